"""What the subtasks of a batch leave in the store before the batch's checkpoint is sealed.

::

    chk-<id>/<batch>-<run>/part-<subtask>                    what a subtask has made of its rows
    chk-<id>/<batch>-<run>/none-<stage>-<partition>-<task>-  a partition without rows has run
                           <action>-<x>

A subtask learns which one it is from its rows, so one without rows can only say that it ran. The
run's name ends with its parallelism: so the names alone tell whether all subtasks have run.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from flowspark.keyed.identity import TaskIdentity
from flowstate.checkpoint import CheckpointStorage, SubtaskSnapshot, encode_name
from flowstate.errors import FormatVersionError, SnapshotCorruptError
from flowstate.subtask import OperatorDescription

__all__ = [
    "Part",
    "PartGroup",
    "create_part",
    "folder_of",
    "forget_empty",
    "note_empty",
    "read_part",
    "survey",
]

_FORMAT = 1
_IDLE_BATCHES_KEPT = 16
_PART = re.compile(
    r"chk-([1-9]\d*)/((\d+)-(.+-(\d+)))/"
    r"(?:part-(\d+)|none-(\d+)-(\d+)-(\d+)-(?:(\d+)-)?.+)"
)
_RECORD = re.compile(r"chk-([1-9]\d*)/_metadata")


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one subtask contributes to the checkpoint of one batch."""

    operator: str
    """The token of the operator that wrote it."""
    batch_id: int | None
    run: str
    parallelism: int
    parent_id: int | None
    """The checkpoint that it follows; None for the first one."""
    restored_from: str | None
    """The checkpoint of another root from which the first one was restored."""
    base: str
    """The digest of the state that it started from."""
    started_ms: int
    """When the task began, by the clock of its machine."""
    finished_ms: int
    batch_ms: int
    """The time of the batch, which a repetition of it has again."""
    snapshot: SubtaskSnapshot
    description: OperatorDescription


@dataclass(slots=True)
class PartGroup:
    """The parts that one run wrote of one batch."""

    checkpoint_id: int
    batch_id: int
    run: str
    """As it stands in the folder's name, encoded, with the parallelism at its end."""
    parallelism: int
    folder: str
    parts: set[int] = field(default_factory=set)
    empty: dict[tuple[int | None, int], dict[int, Counter[int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Counter))
    )
    """How many calls without rows there were, by action and stage, by partition, and by task."""

    @property
    def empty_subtasks(self) -> int:
        """How many subtasks have said that they ran without rows.

        A task may have been tried several times, and a plan may run several times, in stages of
        their own. Within one task there is more than one subtask if partitions were coalesced.
        """
        by_action: dict[Any, list[dict[int, int]]] = defaultdict(list)
        for (action, stage), partitions in self.empty.items():
            counts = {number: max(calls.values()) for number, calls in partitions.items()}
            by_action[("stage", stage) if action is None else action].append(counts)
        return max(map(_all_of, by_action.values()), default=0)

    @property
    def is_complete(self) -> bool:
        """Whether all subtasks have run."""
        return len(self.parts) + self.empty_subtasks >= self.parallelism

    @property
    def missing(self) -> list[int]:
        """The subtasks of which there is no part."""
        return [index for index in range(self.parallelism) if index not in self.parts]


def _all_of(stages: list[dict[int, int]]) -> int:
    """Count the calls of one action. Only stages that share no partition are parts of one whole."""
    if len(set().union(*stages)) == sum(map(len, stages)):
        return sum(sum(stage.values()) for stage in stages)
    return max(sum(stage.values()) for stage in stages)


def survey(storage: CheckpointStorage) -> tuple[list[int], list[PartGroup]]:
    """Return the ids of the sealed checkpoints, and all groups of parts, from one listing."""
    return _surveyed(entry.path for entry in storage.file_system.list(""))


def _surveyed(paths: Iterable[str]) -> tuple[list[int], list[PartGroup]]:
    sealed: list[int] = []
    groups: dict[tuple[int, str], PartGroup] = {}
    for path in paths:
        if (record := _RECORD.fullmatch(path)) is not None:
            sealed.append(int(record[1]))
        elif (found := _PART.fullmatch(path)) is not None:
            checkpoint_id, folder, batch, run, parallelism, part, *empty = found.groups()
            group = groups.setdefault(
                (int(checkpoint_id), folder),
                PartGroup(
                    checkpoint_id=int(checkpoint_id),
                    batch_id=int(batch),
                    run=run,
                    parallelism=int(parallelism),
                    folder=f"chk-{checkpoint_id}/{folder}",
                ),
            )
            if part is not None:
                group.parts.add(int(part))
            else:
                *signed, action = empty
                stage, partition, task = map(int, signed)
                which = (None if action is None else int(action), stage)
                group.empty[which][partition][task] += 1
    return sorted(sealed), list(groups.values())


def folder_of(task: TaskIdentity, checkpoint_id: int) -> str:
    """Return where the parts of a run are."""
    return f"chk-{checkpoint_id}/{task.file_batch_id}-{encode_name(task.run)}"


def note_empty(storage: CheckpointStorage, task: TaskIdentity, checkpoint_id: int) -> None:
    """Leave a sign that a subtask ran and had no rows."""
    action = "" if task.action_id is None else f"{task.action_id}-"
    name = f"none-{task.stage_id}-{task.partition_id}-{task.task_id}-{action}{uuid.uuid4().hex}"
    storage.file_system.write(f"{folder_of(task, checkpoint_id)}/{name}", b"{}")


def forget_empty(storage: CheckpointStorage, groups: Sequence[PartGroup]) -> None:
    """Remove the signs of batches in which nobody had rows, once there are many."""
    if len(groups) < _IDLE_BATCHES_KEPT:
        return
    for group in groups:
        signs = [entry.path for entry in storage.file_system.list(group.folder)]
        storage.file_system.delete(signs)


def create_part(storage: CheckpointStorage, folder: str, part: Part) -> Part | None:
    """Write a part, or return the one that another execution of the same subtask has written."""
    path = f"{folder}/part-{part.snapshot.subtask_index}"
    if storage.file_system.create_exclusively(path, _encode(part)):
        return None
    standing = read_part(storage, path)
    # Our own, if the store's reply was lost and the client repeated the request.
    return None if standing == part else standing


def read_part(storage: CheckpointStorage, path: str) -> Part:
    """Return a part, or raise ``SnapshotError``."""
    data = storage.file_system.read(path)
    where = f"{storage.url}/{path}"
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        if sealed.format != _FORMAT:
            raise FormatVersionError(
                f"{where} has the format {sealed.format}, this version reads {_FORMAT}: use the "
                f"version of flowspark that wrote it, or a newer one"
            )
        body = bytes(sealed.part)
        if (digest := xxhash.xxh3_128_hexdigest(body)) != sealed.checksum:
            raise SnapshotCorruptError(
                where, what="the checksum", expected=sealed.checksum, actual=digest
            )
        return msgspec.json.decode(body, type=Part)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SnapshotCorruptError(
            where, what="the part", expected="a valid part", actual=str(error)
        ) from error


class _Sealed(msgspec.Struct):
    format: int
    checksum: str
    part: msgspec.Raw


def _encode(part: Part) -> bytes:
    body: Any = msgspec.json.encode(part)
    sealed = _Sealed(_FORMAT, xxhash.xxh3_128_hexdigest(body), msgspec.Raw(body))
    return msgspec.json.encode(sealed)
