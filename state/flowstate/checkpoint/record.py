"""Commit records: what a checkpoint consists of, as one JSON document with a checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from flowstate.checkpoint.files import FileHandle, digest_of, unreadable_format
from flowstate.errors import SnapshotCorruptError, UnsafeNameError
from flowstate.key_groups import KeyGroupAssigner, KeyGroupRange, check_parallelism

__all__ = [
    "LINEAGE_MAX",
    "RECORD_FORMAT",
    "CheckpointRecord",
    "KeyedHandle",
    "OperatorHandle",
    "OperatorStateMeta",
    "StateMeta",
    "SubtaskSnapshot",
    "decode_record",
    "decode_snapshot",
    "encode_record",
    "encode_snapshot",
    "map_files",
]

RECORD_FORMAT = 1
LINEAGE_MAX = 16
"""How many ancestors a subtask's snapshot remembers."""

_FIRST_READER = "0.1"

StateMeta = dict[str, Any]
"""What a descriptor says of itself. Read here: ``kind``, ``ttl_ms`` and ``ttl_time``, no more."""


class KeyedHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A state file with changes of keyed state, and the key groups that count of it."""

    file: FileHandle
    key_groups: KeyGroupRange
    """Rows of other key groups are in the file perhaps, but not meant."""
    first_checkpoint: int
    last_checkpoint: int
    """The file has the changes of the checkpoints between the two, which belong to them."""
    level: int
    full: bool
    """It has everything up to ``last_checkpoint``: nothing older is needed."""

    def __post_init__(self) -> None:
        if not 1 <= self.first_checkpoint <= self.last_checkpoint or self.level < 0:
            raise ValueError(
                f"a handle of the checkpoints {self.first_checkpoint} to {self.last_checkpoint} "
                f"at level {self.level} cannot be"
            )


class OperatorStateMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one operator state is to be redistributed, and which elements of the file count."""

    mode: str
    count: int
    start: int = 0
    """How many elements at the beginning of the file are not meant any more."""

    def __post_init__(self) -> None:
        if self.count < 0 or self.start < 0:
            raise ValueError(f"there are no {self.count} elements from {self.start} on")


class OperatorHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A state file with elements of operator states of one subtask."""

    file: FileHandle
    states: dict[str, OperatorStateMeta]
    attributes: dict[str, Any] = {}


class SubtaskSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one subtask hands to whoever commits the checkpoint."""

    subtask_index: int
    key_groups: KeyGroupRange | None = None
    """What the subtask owns; None without keyed state."""
    keyed: tuple[KeyedHandle, ...] = ()
    """Oldest first, by ``last_checkpoint``; the later ones win."""
    operator: tuple[OperatorHandle, ...] = ()
    """A state's list is what the handles have of it, one after the other."""
    digest: str
    lineage: tuple[tuple[int, str], ...] = ()
    """Checkpoint id and digest of the snapshots that this one follows, newest last."""
    attributes: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.subtask_index < 0:
            raise ValueError(f"there is no subtask {self.subtask_index}")
        if len(self.lineage) > LINEAGE_MAX:
            raise ValueError(f"a lineage has at most {LINEAGE_MAX} entries")
        if any(old >= new for (old, _), (new, _) in pairwise(self.lineage)):
            raise ValueError("a lineage goes from older checkpoints to newer ones")
        if any(old.last_checkpoint > new.last_checkpoint for old, new in pairwise(self.keyed)):
            raise ValueError("handles must be ordered from the oldest to the newest")
        for handle in self.keyed:
            owned = self.key_groups and self.key_groups.intersect(handle.key_groups)
            if owned != handle.key_groups:
                raise ValueError(
                    f"a handle of the key groups {handle.key_groups} was given to a subtask that "
                    f"owns {self.key_groups}"
                )

    @property
    def files(self) -> Iterator[FileHandle]:
        """The files that the snapshot consists of."""
        for keyed in self.keyed:
            yield keyed.file
        for operator in self.operator:
            yield operator.file


class CheckpointRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True
):
    """A checkpoint of one operator: complete by itself, and one link of the operator's chain."""

    checkpoint_id: int
    parent_id: int | None = None
    parent_digest: str | None = None
    batch_id: int | None = None
    run: str
    parallelism: int
    max_parallelism: int
    assigner: KeyGroupAssigner
    key_type: str | None = None
    keyed_states: dict[str, StateMeta] = {}
    operator_states: dict[str, StateMeta] = {}
    subtasks: tuple[SubtaskSnapshot, ...]
    attributes: dict[str, Any] = {}
    created_ms: int

    def __post_init__(self) -> None:
        self._check_chain()
        check_parallelism(parallelism=self.parallelism, max_parallelism=self.max_parallelism)
        indexes = [subtask.subtask_index for subtask in self.subtasks]
        if indexes != list(range(self.parallelism)):
            raise ValueError(
                f"a record at parallelism {self.parallelism} needs the subtasks 0 to "
                f"{self.parallelism - 1} in order, not {indexes}"
            )
        self._check_key_groups()
        for subtask in self.subtasks:
            if subtask.keyed and subtask.keyed[-1].last_checkpoint > self.checkpoint_id:
                raise ValueError("a handle is newer than the checkpoint that refers to it")

    def _check_chain(self) -> None:
        if self.checkpoint_id < 1:
            raise ValueError(f"checkpoint ids begin with 1, not {self.checkpoint_id}")
        if (self.parent_id is None) != (self.parent_digest is None):
            raise ValueError("a parent is named by its id and its digest, or not at all")
        if self.parent_id is not None and not 1 <= self.parent_id < self.checkpoint_id:
            raise ValueError(
                f"checkpoint {self.checkpoint_id} cannot have the parent {self.parent_id}"
            )
        if self.batch_id is not None and self.batch_id < 0:
            raise ValueError(f"there is no batch {self.batch_id}")

    def _check_key_groups(self) -> None:
        owned = [subtask.key_groups for subtask in self.subtasks]
        if not self.keyed_states and not any(owned):
            return
        following = 0
        for key_groups in owned:
            if key_groups is None or key_groups.start != following:
                raise ValueError(
                    f"the subtasks must own each key group once, in order; key group {following} "
                    f"is owned by none or by several: {[str(part) for part in owned]}"
                )
            following = key_groups.end + 1
        if following != self.max_parallelism:
            raise ValueError(
                f"the subtasks own the key groups up to {following - 1}, the last one is "
                f"{self.max_parallelism - 1}"
            )

    @cached_property
    def digest(self) -> str:
        """Identifies the record: the checksum that is stored with it."""
        return digest_of(msgspec.json.encode(self))

    @property
    def files(self) -> dict[str, FileHandle]:
        """The files in the store that the checkpoint needs, by path."""
        return {
            file.path: file
            for subtask in self.subtasks
            for file in subtask.files
            if file.path is not None
        }

    def follows(self, other: CheckpointRecord) -> bool:
        """Say whether the other record is this one's parent: the same id and the same contents."""
        return (self.parent_id, self.parent_digest) == (other.checkpoint_id, other.digest)


class _Envelope(msgspec.Struct):
    format: int
    reader: str
    checksum: str
    record: msgspec.Raw


class _AnyFormat(msgspec.Struct):
    format: int
    reader: str = ""


_Stored = TypeVar("_Stored", CheckpointRecord, SubtaskSnapshot)


def encode_record(record: CheckpointRecord) -> bytes:
    """Return the record as it is stored."""
    return _seal(msgspec.json.encode(record))


def decode_record(data: bytes, path: str) -> CheckpointRecord:
    """Return the record that is stored; the path is for messages."""
    record, checksum = _open(data, path, CheckpointRecord)
    record.__dict__["digest"] = checksum
    return record


def encode_snapshot(snapshot: SubtaskSnapshot) -> bytes:
    """Return a subtask's snapshot as it is stored, or sent to whoever commits."""
    return _seal(msgspec.json.encode(snapshot))


def decode_snapshot(data: bytes, path: str) -> SubtaskSnapshot:
    """Return the snapshot that was stored or sent; the path is for messages."""
    return _open(data, path, SubtaskSnapshot)[0]


def map_files(
    record: CheckpointRecord, replace: Callable[[FileHandle], FileHandle]
) -> tuple[SubtaskSnapshot, ...]:
    """Return the record's subtasks with other files in the place of theirs."""
    changed = msgspec.structs.replace
    return tuple(
        changed(
            subtask,
            keyed=tuple(changed(handle, file=replace(handle.file)) for handle in subtask.keyed),
            operator=tuple(
                changed(handle, file=replace(handle.file)) for handle in subtask.operator
            ),
        )
        for subtask in record.subtasks
    )


def _seal(encoded: bytes) -> bytes:
    envelope = _Envelope(RECORD_FORMAT, _FIRST_READER, digest_of(encoded), msgspec.Raw(encoded))
    return msgspec.json.encode(envelope)


def _open(data: bytes, path: str, kind: type[_Stored]) -> tuple[_Stored, str]:
    try:
        found = msgspec.json.decode(data, type=_AnyFormat)
        if found.format != RECORD_FORMAT:
            raise unreadable_format(
                path, found=found.format, known=RECORD_FORMAT, reader=found.reader
            )
        envelope = msgspec.json.decode(data, type=_Envelope)
        encoded = bytes(envelope.record)
        if (checksum := digest_of(encoded)) != envelope.checksum:
            raise SnapshotCorruptError(
                path, what="the checksum", expected=envelope.checksum, actual=checksum
            )
        # What the checksum does not cover is known in advance, to the byte.
        if _seal(encoded) != data:
            raise SnapshotCorruptError(
                path, what="the envelope", expected="that of its format", actual=data[:100]
            )
        return msgspec.json.decode(encoded, type=kind), checksum
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if isinstance(error.__cause__, UnsafeNameError):
            raise error.__cause__ from None
        raise SnapshotCorruptError(
            path, what="the record", expected="a valid record", actual=str(error)
        ) from error
