"""``key_by(df, ...).process(fn, ...)``: what a program calls, and the plan that comes of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flowspark.errors import OptionError
from flowspark.keyed.aggregation import Emit, aggregation_of
from flowspark.keyed.arrow_work import ArrowKeyedFunction, ArrowWorkFactory
from flowspark.keyed.durations import duration_ms
from flowspark.keyed.identity import NAME, OperatorSpec
from flowspark.keyed.lineage import resolve_checkpoint
from flowspark.keyed.offline import unsealed_groups
from flowspark.keyed.routing import CONTROL, ROUTE, control_text, route_column, subtask_column
from flowspark.keyed.row_work import TAG_COLUMN, RowWorkFactory
from flowspark.keyed.schemas import (
    SchemaLike,
    arrow_schema,
    key_type_of,
    nullable,
    struct_type,
    tagged_type,
)
from flowspark.keyed.task import KeyedTask
from flowspark.keyed.watermarks import HighestTimestamps, WatermarkStrategy
from flowspark.keyed.work import WorkFactory
from flowspark.locations import shared_location
from flowstate.errors import FlowError
from flowstate.functions import KeyedProcessFunction, OutputTag
from flowstate.key_groups import check_parallelism
from flowstate.storage.filesystems import open_file_system

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = ["KeyedStream", "key_by", "main_output", "side_output"]

_LOG = logging.getLogger(__name__)

_TICK_DEFAULT = "1 second"


def key_by(df: DataFrame, *columns: str, max_parallelism: int = 128) -> KeyedStream:
    """Group the rows of a DataFrame by columns, for a function with state per key.

    ``max_parallelism`` is the number of key groups, and with it the most subtasks that the state
    can ever be spread over. It cannot be changed once there is state.
    """
    known = [name.lower() for name in df.columns]
    if not columns:
        raise OptionError(NAME, "key_by needs at least one column")
    for name in columns:
        if not isinstance(name, str):
            raise OptionError(
                NAME,
                f"key_by takes names of columns, not {name!r}: give an expression a name with "
                f"withColumn() first",
            )
        if name.lower() not in known:
            raise OptionError(
                NAME, f"there is no column {name!r} to key by: the columns are {df.columns}"
            )
    names = [df.columns[known.index(name.lower())] for name in columns]
    for name in known:
        if known.count(name) > 1 or name in {ROUTE, CONTROL}:
            why = "there are two of that name" if known.count(name) > 1 else "it is reserved"
            raise OptionError(NAME, f"rename the column {name!r}: {why}")
    if len(set(names)) != len(names):
        raise OptionError(NAME, f"key_by names a column twice: {', '.join(columns)}")
    return KeyedStream(df, tuple(names), max_parallelism)


@dataclass(frozen=True, slots=True)
class KeyedStream:
    """Rows by key. A method makes of them an ordinary DataFrame again."""

    df: DataFrame
    columns: tuple[str, ...]
    max_parallelism: int

    def process(
        self,
        function: KeyedProcessFunction[Any, Any, Any] | ArrowKeyedFunction,
        schema: SchemaLike,
        *,
        uid: str,
        state_location: str | os.PathLike[str],
        parallelism: int | None = None,
        restore_from: str | os.PathLike[str] | None = None,
        start_empty: bool = False,
        allow_non_restored_state: bool = False,
        watermark: WatermarkStrategy | None = None,
        tick_interval: Any = None,
        checkpoints_retained: int = 2,
        storage_options: Mapping[str, Any] | None = None,
        side_outputs: Mapping[str | OutputTag, SchemaLike] | None = None,
        working_folder: str | os.PathLike[str] | None = None,
    ) -> DataFrame:
        """Run a function with keyed state over the rows; see the guide for the arguments."""
        settings = _Settings(
            uid=uid,
            state_location=state_location,
            parallelism=parallelism,
            restore_from=restore_from,
            start_empty=start_empty,
            allow_non_restored_state=allow_non_restored_state,
            checkpoints_retained=checkpoints_retained,
            storage_options=dict(storage_options or {}),
            working_folder=working_folder,
        )
        output = struct_type(schema)
        if isinstance(function, ArrowKeyedFunction):
            if side_outputs or watermark or tick_interval:
                raise OptionError(
                    NAME,
                    "an ArrowKeyedFunction has neither timers nor side outputs: leave "
                    "watermark, tick_interval and side_outputs away, or use a "
                    "KeyedProcessFunction",
                )
            factory = ArrowWorkFactory(function=function, output_schema=arrow_schema(output))
            return self._planned(settings, factory, output)
        if not isinstance(function, KeyedProcessFunction):
            raise OptionError(
                NAME,
                f"process() takes an instance of a KeyedProcessFunction or an "
                f"ArrowKeyedFunction, not {function!r}",
            )
        return self._row_function(
            settings, function, output, side_outputs or {}, watermark, tick_interval
        )

    def aggregate(
        self,
        aggregates: Mapping[str, Any],
        *,
        emit: str = Emit.PER_KEY,
        uid: str,
        state_location: str | os.PathLike[str],
        parallelism: int | None = None,
        restore_from: str | os.PathLike[str] | None = None,
        start_empty: bool = False,
        allow_non_restored_state: bool = False,
        checkpoints_retained: int = 2,
        storage_options: Mapping[str, Any] | None = None,
        working_folder: str | os.PathLike[str] | None = None,
    ) -> DataFrame:
        """Keep aggregates per key, without any Python for the rows.

        ``aggregates`` names the output columns: ``{"n": "count", "total": ("sum", "amount")}``,
        with count, sum, min, max and mean. ``emit="key"`` emits a row for each key that a
        micro-batch has rows of, ``emit="record"`` one for each row.
        """
        settings = _Settings(
            uid=uid,
            state_location=state_location,
            parallelism=parallelism,
            restore_from=restore_from,
            start_empty=start_empty,
            allow_non_restored_state=allow_non_restored_state,
            checkpoints_retained=checkpoints_retained,
            storage_options=dict(storage_options or {}),
            working_folder=working_folder,
        )
        input_schema = self.df.schema
        function, output = aggregation_of(aggregates, emit, input_schema, self.columns)
        columns = [*self.columns, *function.value_columns]
        narrow = KeyedStream(
            self.df.select(*dict.fromkeys(map(_quoted, columns))),
            self.columns,
            self.max_parallelism,
        )
        factory = ArrowWorkFactory(function=function, output_schema=arrow_schema(output))
        return narrow._planned(settings, factory, output)

    def reduce(self, reducers: Mapping[str, str], **arguments: Any) -> DataFrame:
        """Reduce columns per key: ``{"amount": "sum", "at": "max"}``.

        The same as ``aggregate`` with output columns that are named as the input's.
        """
        return self.aggregate({name: (how, name) for name, how in reducers.items()}, **arguments)

    def _row_function(
        self,
        settings: _Settings,
        function: KeyedProcessFunction[Any, Any, Any],
        output: StructType,
        side_outputs: Mapping[str | OutputTag, SchemaLike],
        watermark: WatermarkStrategy | None,
        tick_interval: Any,
    ) -> DataFrame:
        sides = {
            tag.name if isinstance(tag, OutputTag) else tag: struct_type(columns)
            for tag, columns in side_outputs.items()
        }
        main = arrow_schema(output)
        if sides:
            output = tagged_type(output, sides)
        self._check_watermark(watermark)
        factory = RowWorkFactory(
            function=function,
            output_schema=arrow_schema(output),
            main_schema=main,
            side_schemas={tag: arrow_schema(columns) for tag, columns in sides.items()},
            timestamp_column=None if watermark is None else watermark.column,
        )
        has_timers = type(function).on_timer is not KeyedProcessFunction.on_timer
        if tick_interval is None and has_timers and watermark is None:
            tick_interval = _TICK_DEFAULT
        tick_ms = 0 if tick_interval is None else _tick_ms(tick_interval)
        return self._planned(settings, factory, output, watermark, tick_ms)

    def _check_watermark(self, watermark: WatermarkStrategy | None) -> None:
        if watermark is None:
            return
        for name in (watermark.column, *watermark.by):
            if name not in self.df.columns:
                raise OptionError(
                    NAME,
                    f"the watermark names the column {name!r}, which is not there: the columns "
                    f"are {self.df.columns}",
                )
        kind = self.df.schema[watermark.column].dataType.typeName()
        if kind not in {"timestamp", "timestamp_ntz"}:
            raise OptionError(
                NAME,
                f"the watermark's column {watermark.column!r} is of type {kind}: cast it to a "
                f"timestamp",
            )
        for name in watermark.by:
            kind = self.df.schema[name].dataType.typeName()
            if kind in {"struct", "array", "map", "variant"}:
                raise OptionError(
                    NAME,
                    f"the watermark tells inputs apart by the column {name!r}, which is of type "
                    f"{kind}: name a number or a text, such as a field of it",
                )

    def _planned(
        self,
        settings: _Settings,
        factory: WorkFactory,
        output: StructType,
        watermark: WatermarkStrategy | None = None,
        tick_ms: int = 0,
    ) -> DataFrame:
        schema = self.df.schema
        key_type = key_type_of(schema, self.columns)
        spec = settings.spec(self.df, self.max_parallelism)
        task = KeyedTask(
            spec=spec,
            factory=factory,
            key_columns=self.columns,
            key_type=key_type,
            watermark=watermark,
        )
        routed = self._routed(spec, with_control=watermark is not None or tick_ms > 0)
        if watermark is not None:
            highest = HighestTimestamps(watermark, spec.parallelism)
            routed = routed.mapInArrow(highest, nullable(routed.schema))
        if tick_ms and self.df.isStreaming:
            routed = routed.unionByName(self._ticks(routed, spec, tick_ms))
        shuffled = routed.repartitionById(spec.parallelism, subtask_column())
        return shuffled.mapInArrow(task, output)

    def _routed(self, spec: OperatorSpec, *, with_control: bool) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812

        hashed = F.xxhash64(*[F.col(_quoted(name)) for name in self.columns])
        group = F.pmod(hashed, F.lit(spec.max_parallelism))
        subtask = F.call_function("div", group * spec.parallelism, F.lit(spec.max_parallelism))
        columns = [F.col(_quoted(name)) for name in self.df.columns]
        columns.append(route_column(subtask).alias(ROUTE))
        if with_control:
            columns.append(F.lit(None).cast("string").alias(CONTROL))
        return self.df.select(*columns)

    def _ticks(self, routed: DataFrame, spec: OperatorSpec, tick_ms: int) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812

        from flowspark.keyed import ticks

        spark = self.df.sparkSession
        ticks.register(spark)
        reader = spark.readStream.format(ticks.FORMAT)
        reader = reader.option("intervalMs", tick_ms).option("parallelism", spec.parallelism)
        own = {
            ROUTE: route_column(F.col("subtask")),
            CONTROL: F.lit(control_text({"tick": True})),
        }
        return reader.load().select(
            *[
                own.get(column.name, F.lit(None).cast(column.dataType)).alias(column.name)
                for column in routed.schema
            ]
        )


def main_output(df: DataFrame) -> DataFrame:
    """Return the rows of the main output, of a DataFrame that has side outputs too."""
    return _output(df, None)


def side_output(df: DataFrame, tag: str | OutputTag) -> DataFrame:
    """Return the rows that were sent to a tag.

    Each use of ``df`` runs the function, so do this under ``foreachBatch``, on a persisted batch.
    """
    return _output(df, tag.name if isinstance(tag, OutputTag) else tag)


def _output(df: DataFrame, tag: str | None) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812

    name = "main" if tag is None else tag
    if df.columns[:2] != [TAG_COLUMN, "main"] or name not in df.columns[1:]:
        raise OptionError(
            NAME,
            f"there is no side output {name!r} in a DataFrame with the columns {df.columns}: it "
            f"must come from process(side_outputs={{...}}) as it is",
        )
    tagged = F.col(TAG_COLUMN)
    wanted = tagged.isNull() if tag is None else tagged == tag
    return df.where(wanted).select(f"{_quoted(name)}.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The arguments that every operator has, as they were given."""

    uid: str
    state_location: str | os.PathLike[str]
    parallelism: int | None
    restore_from: str | os.PathLike[str] | None
    start_empty: bool
    allow_non_restored_state: bool
    checkpoints_retained: int
    storage_options: Mapping[str, Any] = field(repr=False)
    working_folder: str | os.PathLike[str] | None

    def spec(self, df: DataFrame, max_parallelism: int) -> OperatorSpec:
        """Check them, and return what travels to the tasks."""
        if not isinstance(self.uid, str) or not self.uid.strip():
            raise OptionError(
                NAME,
                f"an operator needs a uid, under which its state is found again, not {self.uid!r}",
            )
        if not isinstance(self.checkpoints_retained, int) or self.checkpoints_retained < 1:
            raise OptionError(
                NAME, f"checkpoints_retained is at least 1, not {self.checkpoints_retained!r}"
            )
        if self.start_empty and self.restore_from is not None:
            raise OptionError(NAME, "start_empty and restore_from contradict each other")
        parallelism = self.parallelism
        if parallelism is None:
            parallelism = min(_default_parallelism(df), max_parallelism)
        check_parallelism(parallelism=parallelism, max_parallelism=max_parallelism)
        location = _location("state_location", self.state_location)
        open_file_system(location, self.storage_options)
        restore_from = self.restore_from
        folder = self.working_folder
        spec = OperatorSpec(
            uid=self.uid,
            state_location=location,
            parallelism=parallelism,
            max_parallelism=max_parallelism,
            storage_options=self.storage_options,
            restore_from=None if restore_from is None else _location("restore_from", restore_from),
            start_empty=self.start_empty,
            allow_non_restored_state=self.allow_non_restored_state,
            checkpoints_retained=self.checkpoints_retained,
            working_folder=None if folder is None else os.path.abspath(os.fspath(folder)),
            is_streaming=df.isStreaming,
        )
        return _pinned(spec)


def _pinned(spec: OperatorSpec) -> OperatorSpec:
    """Name the checkpoint itself: below a live root the tasks might find different ones."""
    if spec.restore_from is None:
        return spec
    try:
        found = resolve_checkpoint(spec.restore_from, spec)
    except FlowError:
        # The query may have state of its own by now. If not, the tasks say what is wrong.
        return spec
    if found is None:
        return spec
    storage, record = found
    later = {group.batch_id for group in unsealed_groups(storage) if group.is_complete}
    if later and spec.restore_from.rstrip("/").rpartition("/")[2] != f"chk-{record.checkpoint_id}":
        _LOG.warning(
            "[FLOWKEYED_UNSEALED] %s is restored from checkpoint %d, the state after batch %s. "
            "Batch %s ran as well, but its checkpoint is not made before the batch after it. If "
            "that query has stopped and its last batch is to be in, run `flow seal` first",
            spec.uid,
            record.checkpoint_id,
            record.batch_id,
            ", ".join(map(str, sorted(later))),
        )
    return replace(spec, restore_from=f"{storage.url}/chk-{record.checkpoint_id}")


def _location(name: str, value: str | os.PathLike[str]) -> str:
    text = os.fspath(value)
    if not text.strip():
        raise OptionError(NAME, f"{name} is empty: give a path or a URL that all tasks reach")
    return shared_location(NAME, name, text)


def _default_parallelism(df: DataFrame) -> int:
    try:
        return df.sparkSession.sparkContext.defaultParallelism
    except Exception:  # Spark Connect has no context on the client.
        return int(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)


def _tick_ms(interval: Any) -> int:
    return duration_ms("tick_interval", interval, minimum_ms=0)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
