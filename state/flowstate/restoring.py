"""From a checkpoint to one subtask's share of it, at any parallelism."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import xxhash

from flowstate.checkpoint import (
    CheckpointRecord,
    CheckpointStorage,
    KeyedHandle,
    StateFileReader,
    convert_rows,
    merge_rows,
)
from flowstate.errors import MaxParallelismError, StateMigrationError
from flowstate.key_groups import KeyGroupAssigner, KeyGroupRange
from flowstate.redistribution import Redistribution, StateCounts, redistribute
from flowstate.rows import StateRows
from flowstate.types import type_from_text

__all__ = [
    "KeyedShare",
    "check_restorable",
    "keyed_share",
    "load_rows",
    "operator_share",
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
    if assigner is not None and record.key_type is not None and assigner is not record.assigner:
        raise MaxParallelismError(
            f"the checkpoint's keys were assigned to key groups by {record.assigner.value!r}, the "
            f"program uses {assigner.value!r}. Use {record.assigner.value!r}"
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
    storage: CheckpointStorage, handles: Sequence[KeyedHandle], key_groups: KeyGroupRange
) -> Iterator[Sequence[StateRows]]:
    """Yield the rows of key groups, a few groups at a time, so that memory stays bounded."""
    readers = [(storage.reader(handle.file), handle) for handle in handles]
    size = sum(handle.file.size for handle in handles)
    step = max(1, len(key_groups) * _STRETCH_BYTES // max(size, 1))
    for start in range(key_groups.start, key_groups.end + 1, step):
        stretch = KeyGroupRange(start, min(start + step - 1, key_groups.end))
        yield list(_merged(readers, stretch, drop_tombstones=True).values())


def _merged(
    readers: Sequence[tuple[StateFileReader, KeyedHandle]],
    key_groups: KeyGroupRange,
    *,
    drop_tombstones: bool,
) -> dict[str, StateRows]:
    found: dict[str, list[StateRows]] = defaultdict(list)
    for reader, handle in readers:
        part = handle.key_groups.intersect(key_groups)
        if part is not None:
            for name, rows in reader.read_rows_of(part).items():
                found[name].append(rows)
    return {
        name: merge_rows(sets, drop_tombstones=drop_tombstones, convert=convert_rows)
        for name, sets in found.items()
    }


def operator_share(
    storage: CheckpointStorage,
    record: CheckpointRecord,
    *,
    subtask_index: int,
    parallelism: int,
) -> dict[str, pa.Array]:
    """Read a subtask's share of the operator states, as they are redistributed."""
    shares = redistribute(
        _counts(record), old_parallelism=record.parallelism, new_parallelism=parallelism
    )
    readers: dict[int, StateFileReader] = {}
    found: dict[str, pa.Array] = {}
    for name, slices in shares[subtask_index].items():
        pieces: list[pa.Array] = []
        for piece in slices:
            if piece.old_subtask not in readers:
                operator = record.subtasks[piece.old_subtask].operator
                if operator is None:
                    raise AssertionError("a slice is of a subtask that reported the state")
                readers[piece.old_subtask] = storage.reader(operator.file)
            elements = readers[piece.old_subtask].read_elements(name, piece.start, piece.stop)
            pieces.extend(elements.chunks)
        if pieces:
            found[name] = pa.concat_arrays(pieces)
    return found


def _counts(record: CheckpointRecord) -> Mapping[str, StateCounts]:
    names = sorted(
        {
            name
            for subtask in record.subtasks
            if subtask.operator
            for name in subtask.operator.states
        }
    )
    return {
        name: StateCounts(
            Redistribution(record.operator_states[name]["mode"]),
            tuple(
                subtask.operator.states[name].count
                if subtask.operator is not None and name in subtask.operator.states
                else None
                for subtask in record.subtasks
            ),
        )
        for name in names
    }
