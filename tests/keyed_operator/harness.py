"""Spark without a JVM: routes rows, runs the subtasks of batches, and remembers what it commits."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T  # noqa: N812 (Spark's own habit)

import flowstate.checkpoint.storage
from flowspark.keyed.identity import OperatorSpec, TaskIdentity
from flowspark.keyed.lineage import find_lineage
from flowspark.keyed.routing import CONTROL, ROUTE, control_text, route_value
from flowspark.keyed.row_work import RowWorkFactory
from flowspark.keyed.schemas import arrow_schema, tagged_type
from flowspark.keyed.task import KeyedTask
from flowspark.keyed.watermarks import HighestTimestamps, WatermarkStrategy
from flowspark.keyed.work import WorkFactory
from flowstate.checkpoint import CheckpointRecord, CheckpointStorage
from flowstate.key_groups import KeyGroupAssigner, key_groups_of
from flowstate.storage.filesystems import StateFileSystem, open_file_system
from flowstate.testing.faults import (
    Fault,
    FaultAction,
    FaultyFileSystem,
    Operation,
    SimulatedCrashError,
)

WORDS = "word string, n long"
_TYPES: dict[str, T.DataType] = {
    "string": T.StringType(),
    "long": T.LongType(),
    "int": T.IntegerType(),
    "double": T.DoubleType(),
    "timestamp": T.TimestampType(),
    "binary": T.BinaryType(),
    "boolean": T.BooleanType(),
}
_STAGES = itertools.count(1)
_TASKS = itertools.count(1)
_LOCAL = threading.local()


@dataclass(frozen=True)
class FakeContext:
    """What a task can ask Spark."""

    properties: Mapping[str, str | None]
    stage: int
    partition: int
    task: int

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802 (Spark's)
        return self.properties.get(name)

    def stageId(self) -> int:  # noqa: N802
        return self.stage

    def partitionId(self) -> int:  # noqa: N802
        return self.partition

    def taskAttemptId(self) -> int:  # noqa: N802
        return self.task


def current_context() -> FakeContext | None:
    """Stand in for ``TaskContext.get``."""
    return getattr(_LOCAL, "context", None)


def struct_type(text: str) -> T.StructType:
    """Return columns such as ``word string, n long``, which Spark would ask its JVM about."""
    columns = (column.split() for column in text.split(","))
    return T.StructType([T.StructField(name, _TYPES[kind]) for name, kind in columns])


def row_factory(
    function: Any,
    schema: str = "word string, text string",
    *,
    sides: Mapping[str, str] | None = None,
    timestamp_column: str | None = None,
) -> RowWorkFactory:
    """Return what ``process`` makes of a function, without a DataFrame."""
    output = struct_type(schema)
    main = arrow_schema(output)
    side_types = {tag: struct_type(columns) for tag, columns in (sides or {}).items()}
    if side_types:
        output = tagged_type(output, side_types)
    return RowWorkFactory(
        function=function,
        output_schema=arrow_schema(output),
        main_schema=main,
        side_schemas={tag: arrow_schema(columns) for tag, columns in side_types.items()},
        timestamp_column=timestamp_column,
    )


@dataclass(kw_only=True)
class Query:
    """One run of a query with one keyed operator; ``restarted`` is the run after it."""

    folder: Path
    factory: WorkFactory
    parallelism: int = 2
    max_parallelism: int = 128
    schema: str = WORDS
    keys: tuple[str, ...] = ("word",)
    key_type: pa.DataType = field(default_factory=pa.string)
    uid: str = "words"
    query_id: str | None = "query"
    run: str = field(default_factory=lambda: str(uuid.uuid4()))
    watermark: WatermarkStrategy | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    chunk_rows: int = 3
    """How many rows there are in a batch of Arrow's."""

    def __post_init__(self) -> None:
        given = {
            "state_location": str(self.folder / "state"),
            "working_folder": str(self.folder / "work"),
            **self.settings,
        }
        self.spec = OperatorSpec(
            uid=self.uid,
            parallelism=self.parallelism,
            max_parallelism=self.max_parallelism,
            **given,
        )

    def restarted(self, **changes: Any) -> Query:
        """Return the next run of the query, in which some settings may be others."""
        settings = {**self.settings, **changes.pop("settings", {})}
        return dataclasses.replace(
            self, **{"run": str(uuid.uuid4()), "settings": settings, **changes}
        )

    @property
    def task(self) -> KeyedTask:
        return KeyedTask(
            spec=self.spec,
            factory=self.factory,
            key_columns=self.keys,
            key_type=self.key_type,
            watermark=self.watermark,
        )

    # In front of the operator.

    def partitions(
        self,
        rows: Sequence[Sequence[Any]],
        *,
        batch_ms: int = 1000,
        sources: int = 1,
        tick: bool = False,
    ) -> list[list[pa.RecordBatch]]:
        """Return the input of each subtask, as the shuffle hands it out."""
        routed = [self._routed(rows[start::sources], batch_ms) for start in range(sources)]
        if self.watermark is not None:
            highest = HighestTimestamps(self.watermark, self.parallelism)
            routed = [
                pa.Table.from_batches(highest(table.to_batches()), table.schema) for table in routed
            ]
        if tick:
            routed.append(self._ticks(routed[0].schema, batch_ms))
        table = pa.concat_tables(routed, promote_options="default").combine_chunks()
        subtasks = table[ROUTE].to_numpy() & 0xFFFF
        return [
            table.filter(pa.array(subtasks == index)).to_batches(self.chunk_rows)
            for index in range(self.parallelism)
        ]

    def subtask_of(self, key: Any) -> int:
        """Return which subtask a key belongs to."""
        return int(self._subtasks(pa.array([key], self.key_type))[0])

    def _subtasks(self, keys: pa.Array) -> Any:
        groups = key_groups_of(
            keys, max_parallelism=self.max_parallelism, assigner=KeyGroupAssigner.XXHASH64
        )
        return groups.astype(np.int64) * self.parallelism // self.max_parallelism

    def _routed(self, rows: Sequence[Sequence[Any]], batch_ms: int) -> pa.Table:
        schema = arrow_schema(struct_type(self.schema))
        columns: list[Any] = list(zip(*rows, strict=True)) if rows else [[] for _ in schema]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
        table = pa.table(arrays, schema=schema)
        parts = [table[name].combine_chunks() for name in self.keys]
        parts = [part.chunk(0) if isinstance(part, pa.ChunkedArray) else part for part in parts]
        keys = parts[0]
        if len(parts) > 1:
            keys = pa.StructArray.from_arrays(parts, fields=list(self.key_type))
        subtasks = [] if not rows else self._subtasks(keys.drop_null())
        if len(subtasks) < len(keys):
            # A null has a hash, too; the operator refuses it wherever it comes.
            subtasks = [0] * len(keys)
        routes = [route_value(int(subtask), batch_ms) for subtask in subtasks]
        table = table.append_column(ROUTE, pa.array(routes, pa.int64()))
        if self.watermark is not None:
            table = table.append_column(CONTROL, pa.nulls(table.num_rows, pa.string()))
        return table

    def _ticks(self, schema: pa.Schema, batch_ms: int) -> pa.Table:
        count = self.parallelism
        own = {
            ROUTE: pa.array([route_value(i, batch_ms) for i in range(count)], pa.int64()),
            CONTROL: pa.array([control_text({"tick": True})] * count),
        }
        if CONTROL not in schema.names:
            schema = schema.append(pa.field(CONTROL, pa.string()))
        return pa.table([own.get(f.name, pa.nulls(count, f.type)) for f in schema], schema=schema)

    # Running it.

    def execute(
        self,
        batch_id: int | None,
        batches: Iterable[pa.RecordBatch],
        *,
        partition: int = 0,
        stage: int = 0,
        task: int | None = None,
        action: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Call the operator as a task of Spark's, here and now; its output may be left unread."""
        properties = {"spark.jobGroup.id": self.run}
        if action is not None:
            properties["spark.sql.execution.id"] = str(action)
        if batch_id is not None and self.query_id is not None:
            properties["streaming.sql.batchId"] = str(batch_id)
            properties["sql.streaming.queryId"] = self.query_id
        number = next(_TASKS) if task is None else task
        output = self.task(batches)

        def pulled() -> Iterator[pa.RecordBatch]:
            while True:
                _LOCAL.context = FakeContext(properties, stage, partition, number)
                try:
                    found = next(output)
                except StopIteration:
                    return
                finally:
                    _LOCAL.context = None
                yield found

        return pulled()

    def subtask(
        self, batch_id: int | None, rows: Sequence[Sequence[Any]], index: int, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Run one subtask of a batch to its end, and return what it hands on."""
        stage = arguments.pop("stage", 0)
        batches = self.partitions(rows, **arguments)[index]
        return rows_of(self.execute(batch_id, batches, partition=index, stage=stage))

    def batch(
        self,
        batch_id: int | None,
        rows: Sequence[Sequence[Any]],
        *,
        order: Sequence[int] | None = None,
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        """Run the subtasks of a batch in an order, in which some may be twice or not at all."""
        partitions = self.partitions(rows, **arguments)
        stage = next(_STAGES)
        found: list[dict[str, Any]] = []
        for index in range(self.parallelism) if order is None else order:
            found += rows_of(
                self.execute(batch_id, partitions[index], partition=index, stage=stage)
            )
        return found

    # Looking at what is there.

    @property
    def storage(self) -> CheckpointStorage:
        return self.spec.open_storage(self.query_id)

    @property
    def root(self) -> Path:
        return Path(self.storage.url.removeprefix("file://"))

    def seal(self, batch_id: int) -> CheckpointRecord | None:
        """Return the record that the batch goes on from, as the first task of it would."""
        identity = TaskIdentity(
            query_id=self.query_id,
            batch_id=batch_id,
            run=f"{self.run}-{self.parallelism}",
            stage_id=0,
            partition_id=0,
            task_id=0,
        )
        return find_lineage(self.spec, self.storage, identity, self.task.restore).parent_record

    def files(self) -> list[str]:
        return sorted(entry.path for entry in self.storage.file_system.list(""))


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Return the rows of batches."""
    return [row for batch in batches for row in batch.to_pylist()]


def words_of(query: Query, count: int = 3) -> list[list[str]]:
    """Return for each subtask some words that are its own."""
    found: list[list[str]] = [[] for _ in range(query.parallelism)]
    for number in itertools.count():
        mine = found[query.subtask_of(f"w{number}")]
        if len(mine) < count:
            mine.append(f"w{number}")
        if all(len(words) == count for words in found):
            return found
    raise AssertionError


@contextmanager
def crashing(
    at: int | None, action: FaultAction = FaultAction.CRASH_BEFORE
) -> Iterator[list[Operation]]:
    """Count the storage operations of all tasks in one sequence, and let one of them go wrong."""
    operations: list[Operation] = []
    fault = [] if at is None else [Fault(action, at=at)]
    dead: list[FaultyFileSystem] = []

    def opened(url: Any, storage_options: Any = None) -> StateFileSystem:
        if any(files.crashed for files in dead):
            raise SimulatedCrashError(operations[-1])
        wrapped = FaultyFileSystem(open_file_system(url, storage_options), fault)
        wrapped.operations = operations
        dead.append(wrapped)
        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flowstate.checkpoint.storage, "open_file_system", opened)
        yield operations
