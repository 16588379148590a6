"""From a checkpoint to one subtask's share of it, at any parallelism."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import xxhash

from flowstate.checkpoint import (
    CheckpointRecord,
    CheckpointStorage,
    FileHandle,
    KeyedHandle,
    OperatorHandle,
    StateFileReader,
    SubtaskSnapshot,
    convert_rows,
    merge_rows,
)
from flowstate.errors import MaxParallelismError, StateMigrationError
from flowstate.key_groups import KeyGroupAssigner, KeyGroupRange
from flowstate.redistribution import Redistribution, StateCounts, redistribute
from flowstate.rows import StateRows
from flowstate.types import type_from_text

__all__ = [
    "ElementRange",
    "KeyedShare",
    "check_restorable",
    "cut_list",
    "keyed_share",
    "load_rows",
    "operator_ranges",
    "operator_share",
    "own_share",
    "stretches",
]

# How many bytes of state files are turned into rows at once when local state is built.
_STRETCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class KeyedShare:
    """The handles that a subtask starts from, and by which its state is known."""

    handles: tuple[KeyedHandle, ...]
    digest: str
    lineage: tuple[tuple[int, str], ...]


def check_restorable(
    record: CheckpointRecord,
    *,
    parallelism: int,
    max_parallelism: int | None,
    assigner: KeyGroupAssigner | None,
    key_type: pa.DataType | None,
) -> None:
    """Refuse a checkpoint whose key groups or keys are not the program's."""
    if max_parallelism is not None and max_parallelism != record.max_parallelism:
        raise MaxParallelismError(
            f"Max parallelism mismatch between checkpoint/savepoint state and new program. The "
            f"checkpoint has {record.max_parallelism} key groups, the program {max_parallelism}. "
            f"Set max_parallelism={record.max_parallelism}: it cannot change over a state's life"
        )
    if parallelism > record.max_parallelism:
        raise MaxParallelismError(
            f"The maximum parallelism ({record.max_parallelism}) of the restored state is lower "
            f"than the configured parallelism ({parallelism}). Reduce the parallelism to "
            f"{record.max_parallelism} or less"
        )
    if assigner is not None and record.key_type is not None and assigner != record.assigner:
        raise MaxParallelismError(
            f"the checkpoint's keys were assigned to key groups by {str(record.assigner)!r}, the "
            f"program uses {str(assigner)!r}. Use {str(record.assigner)!r}"
        )
    if key_type is not None and record.key_type is not None:
        stored = type_from_text(record.key_type)
        if not stored.equals(key_type):
            raise StateMigrationError(
                f"the checkpoint's keys are of type {stored}, the program's of {key_type}. Keys "
                f"cannot change their type: keep it, or start with new state"
            )


def keyed_share(record: CheckpointRecord, key_groups: KeyGroupRange) -> KeyedShare:
    """Return the handles that hold the key groups, each cut to what is needed of it."""
    for subtask in record.subtasks:
        if subtask.key_groups == key_groups:
            lineage = (*subtask.lineage, (record.checkpoint_id, subtask.digest))
            return KeyedShare(subtask.keyed, subtask.digest, lineage)
    clipped = []
    digests = [str(key_groups)]
    for subtask in record.subtasks:
        if subtask.key_groups is None or subtask.key_groups.intersect(key_groups) is None:
            continue
        digests.append(subtask.digest)
        for handle in subtask.keyed:
            part = handle.key_groups.intersect(key_groups)
            if part is not None:
                clipped.append(msgspec.structs.replace(handle, key_groups=part))
    clipped.sort(key=lambda handle: handle.last_checkpoint)
    digest = xxhash.xxh3_128_hexdigest("/".join(digests).encode())
    return KeyedShare(tuple(clipped), digest, ((record.checkpoint_id, digest),))


def load_rows(
    storage: CheckpointStorage,
    handles: Sequence[KeyedHandle],
    key_groups: KeyGroupRange,
    *,
    drop_tombstones: bool = True,
) -> dict[str, StateRows]:
    """Read what handles say of some key groups, merged into one set of rows for each state."""
    return _merged(
        [(storage.reader(handle.file), handle) for handle in handles],
        key_groups,
        drop_tombstones=drop_tombstones,
    )


def stretches(
    storage: CheckpointStorage,
    handles: Sequence[KeyedHandle],
    key_groups: KeyGroupRange,
    names: Collection[str] | None = None,
) -> Iterator[Sequence[StateRows]]:
    """Yield the rows of key groups, a few groups at a time, so that memory stays bounded.

    With ``names`` they are the rows of these states alone.
    """
    readers = [(storage.reader(handle.file), handle) for handle in handles]
    size = sum(handle.file.size for handle in handles)
    step = max(1, len(key_groups) * _STRETCH_BYTES // max(size, 1))
    for start in range(key_groups.start, key_groups.end + 1, step):
        stretch = KeyGroupRange(start, min(start + step - 1, key_groups.end))
        yield list(_merged(readers, stretch, names, drop_tombstones=True).values())


def _merged(
    readers: Sequence[tuple[StateFileReader, KeyedHandle]],
    key_groups: KeyGroupRange,
    names: Collection[str] | None = None,
    *,
    drop_tombstones: bool,
) -> dict[str, StateRows]:
    found: dict[str, list[StateRows]] = defaultdict(list)
    for reader, handle in readers:
        part = handle.key_groups.intersect(key_groups)
        if part is not None:
            for name, rows in reader.read_rows_of(part, names).items():
                found[name].append(rows)
    return {
        name: merge_rows(sets, drop_tombstones=drop_tombstones, convert=convert_rows)
        for name, sets in found.items()
    }


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Some neighbouring elements of one operator state in one file; never empty."""

    handle: OperatorHandle
    start: int
    stop: int
    """Both are places in the file."""

    def __len__(self) -> int:
        return self.stop - self.start


def operator_ranges(
    record: CheckpointRecord, *, subtask_index: int, parallelism: int
) -> dict[str, list[ElementRange]]:
    """Return where a subtask's share of the operator states is, as they are redistributed."""
    shares = redistribute(
        _counts(record), old_parallelism=record.parallelism, new_parallelism=parallelism
    )
    return {
        name: [
            part
            for piece in slices
            for part in cut_list(
                record.subtasks[piece.old_subtask].operator, name, piece.start, piece.stop
            )
        ]
        for name, slices in shares[subtask_index].items()
    }


def cut_list(
    handles: Iterable[OperatorHandle], name: str, start: int, stop: int
) -> Iterator[ElementRange]:
    """Find some elements of a subtask's list in the files that the list consists of."""
    offset = 0
    for handle in handles:
        if (meta := handle.states.get(name)) is None:
            continue
        low, high = max(start, offset), min(stop, offset + meta.count)
        if low < high:
            shift = meta.start - offset
            yield ElementRange(handle, low + shift, high + shift)
        offset += meta.count


def operator_share(
    storage: CheckpointStorage,
    record: CheckpointRecord,
    *,
    subtask_index: int,
    parallelism: int,
) -> dict[str, pa.Array]:
    """Read a subtask's share of the operator states, as they are redistributed."""
    ranges = operator_ranges(record, subtask_index=subtask_index, parallelism=parallelism)
    return _read_elements(storage, ranges)


def own_share(
    storage: CheckpointStorage,
    record: CheckpointRecord,
    *,
    subtask_index: int,
    parallelism: int,
) -> dict[str, pa.Array]:
    """Read what a subtask itself had in the operator states, whatever their mode."""
    if parallelism != record.parallelism:
        raise StateMigrationError(
            f"checkpoint {record.checkpoint_id} is of parallelism {record.parallelism}: at "
            f"{parallelism} its operator state is redistributed, no subtask just goes on"
        )
    own = record.subtasks[subtask_index]
    ranges = {
        name: list(cut_list(own.operator, name, 0, count))
        for name, count in _elements_of(own).items()
    }
    return _read_elements(storage, ranges)


def _read_elements(
    storage: CheckpointStorage, ranges: Mapping[str, Sequence[ElementRange]]
) -> dict[str, pa.Array]:
    readers: dict[FileHandle, StateFileReader] = {}
    found: dict[str, pa.Array] = {}
    for name, parts in ranges.items():
        pieces: list[pa.Array] = []
        for part in parts:
            file = part.handle.file
            reader = readers.setdefault(file, storage.reader(file))
            pieces.extend(reader.read_elements(name, part.start, part.stop).chunks)
        if pieces:
            # Some subtasks may have written the state before its type was widened.
            types = {piece.type for piece in pieces}
            if len(types) > 1:
                wanted = _widest(types)
                pieces = [piece.cast(wanted) for piece in pieces]
            found[name] = pa.concat_arrays(pieces)
    return found


def _widest(types: set[pa.DataType]) -> pa.DataType:
    fields = [pa.schema([("element", one)]) for one in types]
    return pa.unify_schemas(fields, promote_options="permissive").field(0).type


def _counts(record: CheckpointRecord) -> Mapping[str, StateCounts]:
    counts = [_elements_of(subtask) for subtask in record.subtasks]
    names = sorted({name for of_subtask in counts for name in of_subtask})
    return {
        name: StateCounts(
            Redistribution(record.operator_states[name]["mode"]),
            tuple(of_subtask.get(name) for of_subtask in counts),
        )
        for name in names
    }


def _elements_of(subtask: SubtaskSnapshot) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for handle in subtask.operator:
        for name, meta in handle.states.items():
            counts[name] += meta.count
    return counts
