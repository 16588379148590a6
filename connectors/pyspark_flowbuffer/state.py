"""The buffer as operator list state: rows in state files, of which a record holds the handles.

A list consists of several files, so that a batch writes the rows it has and not the whole buffer.
Rows that were emitted are left behind in their file, and the handle says where the others begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from flowstate.checkpoint import (
    CheckpointRecord,
    CheckpointStorage,
    ListSection,
    OperatorHandle,
    OperatorStateMeta,
    StateFileReader,
)
from flowstate.descriptors import ListStateDescriptor
from flowstate.errors import StateMigrationError
from flowstate.redistribution import Redistribution, even_split
from flowstate.restoring import ElementRange, cut_list, operator_ranges
from flowstate.types import type_from_text
from pyspark_flowbuffer.buffer import Stretch
from pyspark_flowbuffer.publishing import SETTINGS

__all__ = [
    "STATE_NAME",
    "ListWriter",
    "buffered_rows",
    "check_restored",
    "describe",
    "even_lists",
    "restored_ranges",
    "stretch_of",
]

STATE_NAME = "buffer"

HANDLES_MAX = 16
"""A list of more handles is written anew as one, so that a restore opens few files."""

_SINCE, _BYTES = "since_ms", "bytes"


def describe(schema: pa.Schema, mode: Redistribution) -> dict[str, Any]:
    """Return what a record says of the list."""
    descriptor = ListStateDescriptor(STATE_NAME, pa.struct(list(schema)))
    return {**descriptor.to_json(), "mode": mode.value}


def check_restored(record: CheckpointRecord, schema: pa.Schema, mode: Redistribution) -> None:
    """Refuse rows that are not the query's: other columns, or another redistribution.

    An empty buffer fits every query.
    """
    meta = record.operator_states.get(STATE_NAME)
    if meta is None or SETTINGS not in record.attributes:
        raise StateMigrationError(
            f"checkpoint {record.checkpoint_id} belongs to another operator: it has no buffer of a "
            f"flowbuffer sink. Give this sink another 'uid' or 'stateLocation'"
        )
    if not buffered_rows(record):
        return
    way_out = (
        "Emit the buffered rows with the flush command (python -m pyspark_flowbuffer.flush), "
        "after which the change is possible, or take it back"
    )
    if meta["mode"] != mode.value:
        raise StateMigrationError(
            f"{buffered_rows(record)} buffered rows were written with redistribution="
            f"{meta['mode']}, and the query has {mode.value}. {way_out}"
        )
    differences = list(_differences(type_from_text(meta["value"]["arrow"]), schema))
    if differences:
        raise StateMigrationError(
            f"{buffered_rows(record)} buffered rows have other columns than the query: "
            f"{'; '.join(differences)}. {way_out}"
        )


def _differences(old: pa.DataType, new: pa.Schema) -> Iterator[str]:
    was = {field.name: field.type for field in old}
    now = {field.name: field.type for field in new}
    for name in was.keys() - now.keys():
        yield f"column {name!r} was removed"
    for name in now.keys() - was.keys():
        yield f"column {name!r} was added"
    for name in was.keys() & now.keys():
        if not was[name].equals(now[name]):
            yield f"column {name!r} was {was[name]} and is {now[name]}"
    if list(was) != list(now) and was.keys() == now.keys():
        yield f"the columns were in the order {', '.join(was)}"


def buffered_rows(record: CheckpointRecord) -> int:
    """Return how many rows wait in a checkpoint."""
    return sum(_count(handle) for subtask in record.subtasks for handle in subtask.operator)


def restored_ranges(
    record: CheckpointRecord, *, subtask_index: int, parallelism: int | None
) -> list[ElementRange]:
    """Return where a subtask's rows are.

    Where the parallelism is not known a subtask goes on with the list of its own number; what is
    then left over is dealt out by :func:`even_lists`.
    """
    if parallelism is not None:
        found = operator_ranges(record, subtask_index=subtask_index, parallelism=parallelism)
        return found.get(STATE_NAME, [])
    if subtask_index >= record.parallelism:
        return []
    return _whole(record.subtasks[subtask_index].operator)


def even_lists(
    lists: Sequence[Sequence[OperatorHandle]], parallelism: int
) -> list[tuple[OperatorHandle, ...]]:
    """Deal the rows of lists out in contiguous blocks, as Flink does at another parallelism."""
    counts = [sum(map(_count, handles)) for handles in lists]
    # An additional empty list, because equally many lists would be left as they are.
    shares = even_split(
        {STATE_NAME: [*counts, *([0] if len(counts) == parallelism else [])]},
        new_parallelism=parallelism,
    )
    return [
        tuple(
            _narrowed(part)
            for piece in share[STATE_NAME]
            for part in cut_list(lists[piece.old_subtask], STATE_NAME, piece.start, piece.stop)
        )
        for share in shares
    ]


def stretch_of(part: ElementRange, reader: StateFileReader, schema: pa.Schema) -> Stretch:
    """Return rows that are read when they are needed."""

    def load() -> pa.Table:
        elements = reader.read_elements(STATE_NAME, part.start, part.stop)
        return pa.Table.from_struct_array(elements).cast(schema)

    handle = _narrowed(part)
    return Stretch(
        rows=len(part),
        bytes=handle.attributes[_BYTES],
        since_ms=handle.attributes[_SINCE],
        load=load,
        origin=handle,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListWriter:
    """Writes what waits at the end of a batch."""

    storage: CheckpointStorage
    schema: pa.Schema
    mode: Redistribution
    batch_id: int
    run: str
    inline_limit: int
    keeps_ages: bool
    """Whether rows of different times must stay apart; otherwise the oldest counts for all."""

    def write(self, stretches: Sequence[Stretch]) -> tuple[OperatorHandle, ...]:
        """Return the handles of the list, after writing into one file what has no handle yet."""
        plan = self._planned(stretches)
        fresh = [part for part in plan if not isinstance(part, OperatorHandle)]
        if not fresh:
            return tuple(part for part in plan if isinstance(part, OperatorHandle))
        tables = [[stretch.load() for stretch in group] for group in fresh]
        kind = pa.struct(list(self.schema))
        arrays = (_structs(table, kind) for group in tables for table in group)
        total_bytes = sum(table.nbytes for group in tables for table in group)
        file = self.storage.write_file(
            [ListSection(STATE_NAME, kind, arrays, total_bytes)],
            batch_id=self.batch_id,
            run=self.run,
            # Each handle has the file in it, so of an inline file there must be one handle only.
            inline_limit=self.inline_limit if len(fresh) == 1 else 0,
        )
        handles, start = [], 0
        for part in plan:
            if isinstance(part, OperatorHandle):
                handles.append(part)
                continue
            count = sum(stretch.rows for stretch in part)
            handles.append(
                OperatorHandle(
                    file=file,
                    states={STATE_NAME: OperatorStateMeta(self.mode.value, count, start)},
                    attributes={
                        _SINCE: min(stretch.since_ms for stretch in part),
                        _BYTES: sum(stretch.bytes for stretch in part),
                    },
                )
            )
            start += count
        return tuple(handles)

    def _planned(self, stretches: Sequence[Stretch]) -> list[OperatorHandle | list[Stretch]]:
        """Return, in the order of the rows, handles to keep and groups of rows to write."""
        kept = [self._keepable(stretch) for stretch in stretches]
        if sum(handle is not None for handle in kept) >= HANDLES_MAX:
            kept = [None] * len(kept)
        plan: list[OperatorHandle | list[Stretch]] = []
        for stretch, handle in zip(stretches, kept, strict=True):
            last = plan[-1] if plan else None
            if handle is not None:
                plan.append(handle)
            elif isinstance(last, list) and (
                not self.keeps_ages or last[0].since_ms == stretch.since_ms
            ):
                last.append(stretch)
            else:
                plan.append([stretch])
        return plan if len(plan) <= HANDLES_MAX else _coarser(stretches)

    def _keepable(self, stretch: Stretch) -> OperatorHandle | None:
        """Return the handle of rows that need not be written again; inline ones cost nothing."""
        handle = stretch.origin
        if isinstance(handle, OperatorHandle) and handle.file.inline is None:
            return handle
        return None


def _coarser(stretches: Sequence[Stretch]) -> list[OperatorHandle | list[Stretch]]:
    """Put neighbours together; the oldest row's age then counts for all of a group."""
    size = -(-len(stretches) // (HANDLES_MAX // 2))
    return [list(stretches[start : start + size]) for start in range(0, len(stretches), size)]


def _structs(table: pa.Table, kind: pa.DataType) -> pa.ChunkedArray:
    return table.to_struct_array().cast(kind)


def _count(handle: OperatorHandle) -> int:
    return handle.states[STATE_NAME].count


def _whole(handles: Iterable[OperatorHandle]) -> list[ElementRange]:
    metas = [(handle, handle.states[STATE_NAME]) for handle in handles]
    return [
        ElementRange(handle, meta.start, meta.start + meta.count)
        for handle, meta in metas
        if meta.count
    ]


def _narrowed(part: ElementRange) -> OperatorHandle:
    """Return a handle of these rows alone."""
    meta: OperatorStateMeta = part.handle.states[STATE_NAME]
    attributes: Mapping[str, Any] = part.handle.attributes
    share = attributes[_BYTES] * len(part) // max(1, meta.count)
    return msgspec.structs.replace(
        part.handle,
        states={STATE_NAME: OperatorStateMeta(meta.mode, len(part), part.start)},
        attributes={**attributes, _BYTES: share},
    )
