"""One subtask in one batch: restore its list, add the rows, emit full buffers, keep the rest."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flowspark.errors import OutputError
from flowspark.sinks import SinkContext, SinkFunction
from flowstate.checkpoint import OperatorHandle, SubtaskSnapshot, encode_snapshot
from flowstate.key_groups import (
    MAX_PARALLELISM_LIMIT,
    KeyGroupAssigner,
    key_groups_of,
    subtask_indexes_of,
)
from flowstate.redistribution import Redistribution
from flowstate.storage.filesystems import open_file_system
from flowstate.subtask import INLINE_BYTES_MAX
from pyspark_flowbuffer.buffer import RowBuffer, Stretch
from pyspark_flowbuffer.emitting import Emitter, FileEmitter, FunctionEmitter, TwoPhaseEmitter
from pyspark_flowbuffer.lineage import Parent, find_parent, open_storage
from pyspark_flowbuffer.options import FORMAT, BufferOptions, FileOutput
from pyspark_flowbuffer.partitions import check_folder, split_by_folder
from pyspark_flowbuffer.staging import StagingArea
from pyspark_flowbuffer.state import ListWriter, check_restored, restored_ranges, stretch_of
from pyspark_flowbuffer.user_sinks import open_sink

__all__ = ["SubtaskResult", "TaskIdentity", "open_emitter", "owners_of", "run_subtask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskIdentity:
    """Which subtask of which batch a task is."""

    query_id: str
    batch_id: int
    run: str
    subtask_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskResult:
    """What a task tells the driver."""

    task: TaskIdentity
    parent: str
    """By which all tasks of a batch must have gone on from one checkpoint."""
    snapshot: bytes | None
    """None if the batch was committed before."""
    input_rows: int = 0


def run_subtask(
    options: BufferOptions,
    schema: pa.Schema,
    task: TaskIdentity,
    batches: Iterable[pa.RecordBatch],
    *,
    now_ms: int | None = None,
) -> SubtaskResult:
    """Process the rows of one partition; nothing of it counts until the driver commits it."""
    if options.parallelism is not None and task.subtask_index >= options.parallelism:
        raise too_many_partitions(options.parallelism, f"at least {task.subtask_index + 1}")
    storage = open_storage(options, task.query_id)
    parent = find_parent(options, storage, task.batch_id)
    if parent.is_committed:
        return SubtaskResult(task=task, parent=parent.identity, snapshot=None)
    if parent.record is not None:
        check_restored(parent.record, schema, options.redistribution)
    emitter = open_emitter(options, task)
    try:
        now_ms = _now_ms() if now_ms is None else now_ms
        subtask = _Subtask(options, schema, task, parent, emitter, now_ms)
        subtask.restore()
        for batch in batches:
            subtask.add(batch)
        stretches = subtask.finish()
        writer = ListWriter(
            storage=storage,
            schema=schema,
            mode=options.redistribution,
            batch_id=task.batch_id,
            run=task.run,
            inline_limit=_inline_limit(options, parent, task),
            keeps_ages=options.triggers.max_age_ms is not None,
        )
        handles = writer.write(stretches)
        snapshot = SubtaskSnapshot(
            subtask_index=task.subtask_index,
            operator=handles,
            digest=list_digest(handles),
            attributes=emitter.attributes(),
        )
    finally:
        emitter.close()
    return SubtaskResult(
        task=task,
        parent=parent.identity,
        snapshot=encode_snapshot(snapshot),
        input_rows=subtask.input_rows,
    )


def open_emitter(
    options: BufferOptions, task: TaskIdentity, *, prefix: str = "part", sequence_number: int = 0
) -> Emitter:
    """Open what takes the buffers of a subtask; files begin with the prefix."""
    context = SinkContext(task.query_id, task.batch_id, task.subtask_index, sequence_number)
    output = options.output
    if isinstance(output, FileOutput):
        file_system = open_file_system(output.path, options.storage_options)
        area = StagingArea.of(file_system, output, query_id=task.query_id, uid=options.uid)
        return FileEmitter(area, context, task.run, prefix)
    sink = open_sink(output)
    if isinstance(sink, SinkFunction):
        return FunctionEmitter(sink, context)
    return TwoPhaseEmitter(sink, context)


def too_many_partitions(parallelism: int, actual: str) -> OutputError:
    """Say that the query has another number of partitions than was declared."""
    return OutputError(
        FORMAT,
        f"option 'parallelism' is {parallelism}, but the query writes {actual} partitions: add "
        f".repartition({parallelism}) in front of .writeStream, or change the option. Nothing of "
        f"this batch was kept",
    )


def list_digest(handles: Sequence[OperatorHandle]) -> str:
    """Identify the contents of a list."""
    parts = [f"{handle.file.digest} {sorted(handle.states.items())}" for handle in handles]
    return xxhash.xxh3_128_hexdigest("/".join(parts).encode())


class _Subtask:
    """The buffers of one subtask while a batch runs: one, or one for each partition folder."""

    def __init__(
        self,
        options: BufferOptions,
        schema: pa.Schema,
        task: TaskIdentity,
        parent: Parent,
        emitter: Emitter,
        now_ms: int,
    ) -> None:
        self._options, self._schema, self._task = options, schema, task
        self._parent, self._emitter, self._now_ms = parent, emitter, now_ms
        output = options.output
        self._columns = output.partition_by if isinstance(output, FileOutput) else ()
        self._buffers: dict[str, RowBuffer] = {}
        self._restored: list[Stretch] = []
        self._added: list[Stretch] = []
        self._batches = 0
        self.input_rows = 0

    def restore(self) -> None:
        """Take over the subtask's share of the parent's rows."""
        if self._parent.record is None:
            return
        parts = restored_ranges(
            self._parent.record,
            subtask_index=self._task.subtask_index,
            parallelism=self._options.parallelism,
        )
        storage = self._parent.storage
        stretches = [
            stretch_of(part, storage.reader(part.handle.file), self._schema) for part in parts
        ]
        if self._options.redistribution is Redistribution.UNION:
            stretches = [self._own(stretch) for stretch in stretches]
        elif self._parent.is_foreign:
            for stretch in stretches:
                stretch.origin = None
        self._restored = [stretch for stretch in stretches if stretch.rows]
        for place, stretch in enumerate(self._restored):
            stretch.place = place
            self._put(stretch)

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows of the query, and emit what is full by them."""
        table = pa.Table.from_batches([batch]).cast(self._schema)
        self.input_rows += table.num_rows
        stretch = Stretch.of(table, self._now_ms)
        self._batches += 1
        stretch.place = len(self._restored) + self._batches
        if self._columns and not self._emitter.emitted:
            self._added.append(stretch)
        self._put(stretch)
        self._emit_full()

    def finish(self) -> list[Stretch]:
        """Emit what is full or too old, and return the rest, oldest first.

        A union list without new rows stays as it is: if nobody has rows, the batch will not count.
        """
        is_union = self._options.redistribution is Redistribution.UNION
        if self.input_rows or not is_union:
            self._emit_full()
            for folder, buffer in self._buffers.items():
                if (aged := buffer.take_aged(self._now_ms)) is not None:
                    self._emitter.emit(folder, aged)
        if self._columns and not self._emitter.emitted:
            # As they were: what was restored keeps its files.
            return [*self._restored, *self._added]
        rest = [stretch for buffer in self._buffers.values() for stretch in buffer.stretches]
        # Not by their times: clocks of several machines do not agree.
        return sorted(rest, key=lambda stretch: stretch.place) if self._columns else rest

    def _put(self, stretch: Stretch) -> None:
        for folder, part in self._by_folder(stretch):
            if folder not in self._buffers:
                self._buffers[folder] = self._new_buffer(folder)
            self._buffers[folder].add(part)

    def _new_buffer(self, folder: str) -> RowBuffer:
        if isinstance(self._options.output, FileOutput):
            check_folder(folder, self._options.output.path)
        return RowBuffer(self._options.triggers)

    def _by_folder(self, stretch: Stretch) -> Iterator[tuple[str, Stretch]]:
        if not self._columns:
            yield "", stretch
            return
        for folder, table in split_by_folder(stretch.load(), self._columns):
            part = Stretch.of(table, stretch.since_ms)
            part.place = stretch.place
            yield folder, part

    def _emit_full(self) -> None:
        for folder, buffer in self._buffers.items():
            for full in buffer.take_full():
                self._emitter.emit(folder, full)
        if self._emitter.emitted:
            self._added.clear()

    def _own(self, stretch: Stretch) -> Stretch:
        """Return the rows of a union list that this subtask is to keep."""
        assert self._options.parallelism is not None
        table = stretch.load()
        owners = owners_of(table, self._options.buffer_key, parallelism=self._options.parallelism)
        own = table.filter(pa.array(owners == self._task.subtask_index))
        return Stretch.of(own, stretch.since_ms)


def owners_of(
    table: pa.Table, buffer_key: Sequence[str], *, parallelism: int
) -> npt.NDArray[np.uint16]:
    """Return the subtask to which each row of a union list belongs."""
    columns = [table.column(name).combine_chunks() for name in buffer_key]
    keys = pa.StructArray.from_arrays(columns, names=list(buffer_key))
    groups = key_groups_of(
        keys, max_parallelism=MAX_PARALLELISM_LIMIT, assigner=KeyGroupAssigner.XXHASH64
    )
    return subtask_indexes_of(
        groups, parallelism=parallelism, max_parallelism=MAX_PARALLELISM_LIMIT
    )


def _inline_limit(options: BufferOptions, parent: Parent, task: TaskIdentity) -> int:
    """Return this subtask's part of what may be in the record itself.

    How many subtasks there are is not known before the commit, so it is what is known of them.
    """
    before = 1 if parent.record is None else parent.record.parallelism
    return INLINE_BYTES_MAX // (options.parallelism or max(before, task.subtask_index + 1))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
