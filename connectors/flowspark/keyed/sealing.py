"""From the parts of a batch that Spark has committed to the checkpoint's record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from flowspark.errors import IncompleteBatchError, OptionError, OutputError
from flowspark.keyed.identity import NAME, OperatorSpec
from flowspark.keyed.parts import Part, PartGroup, read_part
from flowstate.checkpoint import CheckpointRecord, CheckpointStorage, SubtaskSnapshot
from flowstate.errors import SnapshotCorruptError
from flowstate.key_groups import key_group_range_of
from flowstate.operators import commit_checkpoint
from flowstate.redistribution import Redistribution
from flowstate.restoring import keyed_share
from flowstate.subtask import Subtask, SubtaskConfig
from flowstate.types import type_from_text

__all__ = ["FixedClock", "Restore", "choose_group", "provisional_record", "same_uid", "seal"]

_LOG = logging.getLogger(__name__)

# Listing and deleting costs more than what it frees is worth, after each single batch.
_SWEEP_EVERY = 8

Restore = Callable[[Subtask, Part, int], SubtaskSnapshot]
"""Lets the function take up the state of a subtask, and writes it for a checkpoint."""


@dataclass(frozen=True, slots=True)
class FixedClock:
    """The time of a batch: the same again when the batch is run again."""

    time_ms: int

    def now_ms(self) -> int:
        return self.time_ms


def choose_group(
    storage: CheckpointStorage, spec: OperatorSpec, groups: list[PartGroup], own_run: str
) -> PartGroup:
    """Return the parts that count of those that several runs may have written of one batch.

    Spark has committed the batch. If this run has executed it, it is this run's; otherwise it was
    the last run that was through with it.
    """
    own = [group for group in groups if group.run == own_run]
    if own:
        if not own[0].is_complete:
            raise _incomplete(storage, spec, own[0])
        return own[0]
    complete = [group for group in groups if group.is_complete]
    if not complete:
        raise _incomplete(storage, spec, max(groups, key=lambda group: len(group.parts)))
    if len(complete) == 1:
        return complete[0]
    return max(complete, key=lambda group: _last_start(storage, group))


def _last_start(storage: CheckpointStorage, group: PartGroup) -> int:
    parts = (read_part(storage, f"{group.folder}/part-{index}") for index in group.parts)
    return max((part.started_ms for part in parts), default=-1)


def _incomplete(
    storage: CheckpointStorage, spec: OperatorSpec, group: PartGroup
) -> IncompleteBatchError:
    ran = len(group.parts) + group.empty_subtasks
    return IncompleteBatchError(
        NAME,
        f"operator {spec.uid!r}: Spark has committed batch {group.batch_id}, but only {ran} of "
        f"{group.parallelism} subtasks have run in it (parts {sorted(group.parts)} below "
        f"{storage.url}/{group.folder}). Something downstream stopped reading: a limit, or take(), "
        f"first() or isEmpty() under foreachBatch. Take it away, or put .persist() and a count() "
        f"in front of it; then let Spark run the batch again: stop the query and remove "
        f"commits/{group.batch_id} and offsets/{group.batch_id + 1} from its checkpointLocation. "
        f"A sink that is not idempotent will see the batch twice",
    )


def provisional_record(part: Part, checkpoint_id: int) -> CheckpointRecord:
    """Return the record that will be, as far as one subtask needs it: the others are hollow."""
    own, described = part.snapshot, part.description
    subtasks = tuple(
        own
        if index == own.subtask_index
        else SubtaskSnapshot(
            subtask_index=index,
            key_groups=key_group_range_of(
                subtask_index=index,
                parallelism=part.parallelism,
                max_parallelism=described.max_parallelism,
            ),
            digest="",
        )
        for index in range(part.parallelism)
    )
    return CheckpointRecord(
        checkpoint_id=checkpoint_id,
        batch_id=part.batch_id,
        run=part.run,
        parallelism=part.parallelism,
        max_parallelism=described.max_parallelism,
        assigner=described.assigner,
        key_type=described.key_type,
        keyed_states=described.keyed_states,
        operator_states=described.operator_states,
        subtasks=subtasks,
        created_ms=part.batch_ms,
    )


def seal(
    storage: CheckpointStorage, spec: OperatorSpec, group: PartGroup, restore: Restore
) -> CheckpointRecord:
    """Create the record of a group of parts, and return it or the one that stands already.

    Any number of tasks may do so at once: the record follows from the parts alone.
    """
    parts = [
        _checked(storage, group, read_part(storage, f"{group.folder}/part-{index}"), index)
        for index in sorted(group.parts)
    ]
    first = parts[0]
    for part in parts[1:]:
        if part.operator != first.operator:
            raise same_uid(spec)
        if (part.parent_id, part.restored_from) != (first.parent_id, first.restored_from):
            raise OutputError(
                NAME,
                f"operator {spec.uid!r}: the subtasks of batch {group.batch_id} went on from "
                f"different checkpoints ({first.parent_id} and {part.parent_id}) below "
                f"{storage.url}: something changed the folder meanwhile. Restart the query",
            )
    parent = None if first.parent_id is None else storage.read(first.parent_id)
    for part in parts:
        _check_base(parent, part, storage.url)
    snapshots = [part.snapshot for part in parts]
    if missing := group.missing:
        snapshots += _carried(storage, spec, first, parent, missing, restore)
    finished_ms = max(part.finished_ms for part in parts)
    attributes: dict[str, Any] = {
        "duration_ms": finished_ms - min(part.started_ms for part in parts),
        "batch_ms": first.batch_ms,
    }
    if first.restored_from is not None:
        attributes["restored_from"] = first.restored_from
    committed = commit_checkpoint(
        storage,
        snapshots,
        [part.description for part in parts],
        parent=parent,
        run=first.run,
        batch_id=first.batch_id,
        attributes=attributes,
        clock=FixedClock(finished_ms),
    )
    if committed.won:
        _retire(storage, spec, committed.record)
    return committed.record


def _checked(storage: CheckpointStorage, group: PartGroup, part: Part, index: int) -> Part:
    found = (part.snapshot.subtask_index, part.parallelism)
    if found != (index, group.parallelism):
        raise SnapshotCorruptError(
            f"{storage.url}/{group.folder}/part-{index}",
            what="the subtask and the parallelism",
            expected=(index, group.parallelism),
            actual=found,
        )
    return part


def _carried(
    storage: CheckpointStorage,
    spec: OperatorSpec,
    part: Part,
    parent: CheckpointRecord | None,
    indexes: list[int],
    restore: Restore,
) -> list[SubtaskSnapshot]:
    """Return what the subtasks without rows have: what they had in the parent."""
    if parent is not None and parent.parallelism == part.parallelism:
        return [parent.subtasks[index] for index in indexes]
    source = storage
    if parent is None and part.restored_from is not None:
        source, parent = CheckpointStorage.resolve(part.restored_from, spec.storage_options)
    is_foreign = source is not storage
    checkpoint_id = 1 if parent is None or is_foreign else parent.checkpoint_id + 1
    found = []
    for index in indexes:
        config = SubtaskConfig(
            subtask_index=index,
            parallelism=part.parallelism,
            max_parallelism=part.description.max_parallelism,
            key_type=type_from_text(part.description.key_type or ""),
            assigner=part.description.assigner,
            run=part.run,
            compact=False,
            carries_only=True,
        )
        subtask = Subtask(
            storage,
            config,
            restored=parent,
            restored_from=source,
            clock=FixedClock(part.batch_ms),
        )
        if parent is not None and _has_union(part):
            taken = restore(subtask, part, checkpoint_id)
        else:
            taken = subtask.snapshot(
                checkpoint_id, batch_id=part.batch_id or 0, attributes=part.snapshot.attributes
            )
        # The state is what it was, so it keeps its name: local copies of it stay good.
        digest = "" if parent is None else keyed_share(parent, subtask.key_groups).digest
        found.append(msgspec.structs.replace(taken, digest=digest))
    return found


def _has_union(part: Part) -> bool:
    """Say whether the function has a union list.

    It is given all of it, and only the function itself knows what each subtask keeps.
    """
    described = part.description
    return any(
        name in described.registered and meta["mode"] == Redistribution.UNION.value
        for name, meta in described.operator_states.items()
    )


def _check_base(parent: CheckpointRecord | None, part: Part, url: str) -> None:
    """Refuse a part that was made from anything but the parent."""
    if parent is None:
        return
    key_groups = part.snapshot.key_groups
    assert key_groups is not None
    if (digest := keyed_share(parent, key_groups).digest) != part.base:
        raise SnapshotCorruptError(
            f"{url}, part {part.snapshot.subtask_index} of batch {part.batch_id}",
            what="the state that it follows",
            expected=digest,
            actual=part.base,
        )


def _retire(storage: CheckpointStorage, spec: OperatorSpec, record: CheckpointRecord) -> None:
    storage.retain(spec.checkpoints_retained)
    if record.checkpoint_id % _SWEEP_EVERY == 0 and record.batch_id is not None:
        swept = storage.sweep(record.batch_id)
        _LOG.debug("%s: swept %d files", storage.url, len(swept.paths))


def same_uid(spec: OperatorSpec) -> OptionError:
    """Say that two operators of one query would share their state."""
    return OptionError(
        NAME,
        f"two operators of this query have the uid {spec.uid!r}: their state would be mixed. Give "
        f"each process() a uid of its own",
    )
