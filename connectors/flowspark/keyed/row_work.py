"""Runs a ``KeyedProcessFunction``: the one place where there is Python for each row."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import pyarrow as pa

from flowspark.errors import FunctionError, InputError, OutputError
from flowspark.keyed.identity import NAME
from flowspark.keyed.output import OutputBuffer, RowWriter
from flowspark.keyed.watermarks import timestamps_ms
from flowspark.keyed.work import BYTES_PER_CALL, ROWS_PER_CALL, BatchInfo
from flowstate.checkpoint import SubtaskSnapshot
from flowstate.errors import FlowError, SnapshotError, StorageError
from flowstate.keyed.context import NO_KEY
from flowstate.runner import FunctionRunner, Output
from flowstate.subtask import Subtask

__all__ = ["TAG_COLUMN", "RowWork", "RowWorkFactory"]

TAG_COLUMN = "tag"
_MAIN = "main"
_OWN_ERRORS = (OutputError, FunctionError, StorageError, SnapshotError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWorkFactory:
    """A function with the columns that it emits."""

    function: Any
    output_schema: pa.Schema
    """With side outputs: the tag, and a struct for each output."""
    side_schemas: Mapping[str, pa.Schema]
    main_schema: pa.Schema
    timestamp_column: str | None = None

    def open(self, subtask: Subtask, info: BatchInfo, output: OutputBuffer) -> RowWork:
        """Open a copy of the function on a subtask's state."""
        return RowWork(self, subtask, info, output)


class RowWork:
    """One function on one subtask in one batch."""

    def __init__(
        self, factory: RowWorkFactory, subtask: Subtask, info: BatchInfo, output: OutputBuffer
    ) -> None:
        self._factory, self._subtask, self._info, self._output = factory, subtask, info, output
        self._writer = RowWriter(factory.main_schema, uid=info.uid)
        self._side_writers = {
            tag: RowWriter(schema, uid=info.uid, what=f"side output {tag!r}")
            for tag, schema in factory.side_schemas.items()
        }
        self._row_types: dict[tuple[str, ...], Any] = {}
        self._waiting: list[tuple[pa.RecordBatch, pa.Array]] = []
        self._rows = self._bytes = 0
        with self._blaming("open"):
            # A plan may run several times in one Python process: none sees what another left.
            self._runner = FunctionRunner(subtask, copy.copy(factory.function))
            if info.completed_checkpoint_id is not None:
                self._runner.notify_checkpoint_complete(info.completed_checkpoint_id)
        timers = subtask.keyed.timer_service
        timers.restore_watermark(info.watermark)
        with self._blaming("on_timer"):
            # They were due before the first row of this batch.
            self._emit_outputs(self._runner.advance_processing_time(info.batch_ms))

    def add(self, rows: pa.RecordBatch, keys: pa.Array) -> None:
        self._waiting.append((rows, keys))
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        if self._rows >= ROWS_PER_CALL or self._bytes >= BYTES_PER_CALL:
            self._process_waiting()

    def _process_waiting(self) -> None:
        """Process what was gathered: the state of all its keys is looked up at once."""
        waiting, self._waiting, self._rows, self._bytes = self._waiting, [], 0, 0
        if not waiting:
            return
        with self._subtask.keyed.lent(pa.concat_arrays([keys for _, keys in waiting])) as places:
            done = 0
            for rows, keys in waiting:
                self._process(rows, keys, places[done : done + rows.num_rows].tolist())
                done += rows.num_rows

    def _process(self, rows: pa.RecordBatch, keys: pa.Array, places: list[int]) -> None:
        columns = self._columns(rows)
        canonical = self._canonical(rows, keys, columns)
        timestamps = None
        if self._factory.timestamp_column is not None:
            column = rows.column(self._factory.timestamp_column)
            timestamps = iter(timestamps_ms(column).to_pylist())
        emitted: list[Any] = []
        with self._blaming("process_element"):
            values = self._tuples(rows.schema.names, columns)
            self._runner.process_batch(values, canonical, places, timestamps, emitted)
        self._emit(emitted)
        self._emit_side(self._runner.take_side_rows())

    def _columns(self, rows: pa.RecordBatch) -> list[list[Any]]:
        found = []
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            try:
                found.append(_values_of(column))
            except (OverflowError, ValueError, KeyError) as error:
                raise InputError(
                    NAME,
                    f"operator {self._info.uid!r}: the column {name!r} has a value that Python "
                    f"cannot hold, such as a date beyond the year 9999: {error}. Filter such rows "
                    f"out, or cast the column, in front of key_by",
                ) from error
        return found

    def _canonical(
        self, rows: pa.RecordBatch, keys: pa.Array, columns: list[list[Any]]
    ) -> list[Any]:
        """Return the keys as Python values; mostly they have been made for the rows already."""
        names, key_type = self._info.key_columns, self._subtask.keyed.key_type
        if len(names) > 1 or key_type.has_floats or pa.types.is_nested(keys.type):
            return key_type.to_list(keys)
        return columns[rows.schema.get_field_index(names[0])]

    def finish(self, watermark: int | None) -> None:
        self._process_waiting()
        with self._blaming("on_timer"):
            if watermark is not None:
                self._emit_outputs(self._runner.advance_watermark(watermark))
            # Those that the rows of this batch have set to a time that is past.
            self._emit_outputs(self._runner.advance_processing_time(self._info.batch_ms))

    def snapshot(self, checkpoint_id: int, attributes: Mapping[str, Any]) -> SubtaskSnapshot:
        with self._blaming("snapshot_state"):
            return self._runner.snapshot(
                checkpoint_id,
                timestamp_ms=self._info.batch_ms,
                batch_id=self._info.batch_id or 0,
                attributes=attributes,
            )

    def close(self) -> None:
        with self._blaming("close"):
            self._runner.close()

    def _tuples(self, given: list[str], columns: list[list[Any]]) -> Iterator[Any]:
        names = tuple(given)
        kind = self._row_types.get(names)
        if kind is None:
            # A name that Python does not allow becomes _0, _1, ... by its place.
            kind = self._row_types[names] = namedtuple("Row", names, rename=True)
        return map(tuple.__new__, repeat(kind), zip(*columns, strict=True))

    # What was emitted.

    def _emit_outputs(self, outputs: Iterator[Output]) -> None:
        main: list[Any] = []
        side: list[Output] = []
        for tag, row in outputs:
            if tag is None:
                main.append(row)
            else:
                side.append((tag, row))
        self._emit(main)
        self._emit_side(side)

    def _emit(self, rows: list[Any]) -> None:
        for batch in self._writer.batches(rows):
            self._output.add(batch if not self._side_writers else self._tagged(None, batch))

    def _emit_side(self, rows: list[Output]) -> None:
        by_tag: dict[str, list[Any]] = {}
        for tag, row in rows:
            assert tag is not None
            by_tag.setdefault(tag.name, []).append(row)
        for name, tagged in by_tag.items():
            writer = self._side_writers.get(name)
            if writer is None:
                known = ", ".join(map(repr, self._side_writers)) or "none"
                raise OutputError(
                    NAME,
                    f"operator {self._info.uid!r}: there is no side output {name!r}; there are: "
                    f"{known}. Name it with its columns in process(side_outputs={{...}})",
                )
            for batch in writer.batches(tagged):
                self._output.add(self._tagged(name, batch))

    def _tagged(self, tag: str | None, batch: pa.RecordBatch) -> pa.RecordBatch:
        own = _MAIN if tag is None else tag
        arrays = []
        for field in self._factory.output_schema:
            if field.name == TAG_COLUMN:
                arrays.append(pa.array([tag] * batch.num_rows, pa.string()))
            elif field.name == own:
                arrays.append(pa.StructArray.from_arrays(batch.columns, fields=list(field.type)))
            else:
                arrays.append(pa.nulls(batch.num_rows, field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._factory.output_schema)

    def _blaming(self, where: str) -> _Blaming:
        return _Blaming(self._info.uid, self._subtask, where)


def _values_of(column: pa.Array) -> list[Any]:
    if not pa.types.is_nested(column.type):
        values: list[Any] = column.to_pylist()
        return values
    # A map would be a list of pairs otherwise. Slower, so only where a map can be.
    nested: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return nested


class _Blaming:
    """Says in which operator, subtask and key a function failed."""

    __slots__ = ("_subtask", "_uid", "_where")

    def __init__(self, uid: str, subtask: Subtask, where: str) -> None:
        self._uid, self._subtask, self._where = uid, subtask, where

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # These say by themselves what is wrong; a store that fails is not the function's fault.
        if not isinstance(error, Exception) or isinstance(error, _OWN_ERRORS):
            return
        key = self._subtask.keyed.context.key
        at = "" if key is NO_KEY else f", key {key!r}"
        shown = error if isinstance(error, FlowError) else f"{type(error).__name__}: {error}"
        raise FunctionError(
            NAME,
            f"operator {self._uid!r}, subtask {self._subtask.subtask_index} of "
            f"{self._subtask.parallelism}{at}: {self._where} failed: {shown}. Nothing of this "
            f"batch was kept; correct the function and start the query again",
        ) from error
