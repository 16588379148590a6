"""What can be done to the state of a keyed operator while its query does not run."""

from __future__ import annotations

from collections.abc import Container

from flowspark.errors import OutputError
from flowspark.keyed.identity import NAME, OperatorSpec
from flowspark.keyed.parts import Part, PartGroup, survey
from flowspark.keyed.sealing import choose_group, seal
from flowstate.checkpoint import CheckpointRecord, CheckpointStorage, SubtaskSnapshot
from flowstate.subtask import Subtask

__all__ = ["seal_last_batch", "unsealed_groups"]

# Nothing may be retired by looking at a stopped query.
_RETAINED = 1 << 30


def unsealed_groups(storage: CheckpointStorage) -> list[PartGroup]:
    """Return what runs have written of batches that are not in a record yet."""
    newest = storage.latest()
    reached = -1 if newest is None or newest.batch_id is None else newest.batch_id
    _, groups = survey(storage)
    return [group for group in groups if group.parts and group.batch_id > reached]


def seal_last_batch(
    storage: CheckpointStorage, uid: str, committed_batches: Container[int]
) -> CheckpointRecord | None:
    """Make the record of the last batch that Spark has committed, as the next batch would.

    None if there is nothing to be done. What was written of a batch that Spark has not committed
    stays as it is: Spark will run that batch again.
    """
    groups = [group for group in unsealed_groups(storage) if group.batch_id in committed_batches]
    if not groups:
        return None
    spec = OperatorSpec(
        uid=uid,
        state_location=storage.url,
        parallelism=groups[0].parallelism,
        max_parallelism=groups[0].parallelism,
        checkpoints_retained=_RETAINED,
    )
    last = max(group.batch_id for group in groups)
    chosen = choose_group(storage, spec, [g for g in groups if g.batch_id == last], own_run="")
    return seal(storage, spec, chosen, _refuse)


def _refuse(subtask: Subtask, part: Part, checkpoint_id: int) -> SubtaskSnapshot:
    raise OutputError(
        NAME,
        f"subtask {subtask.subtask_index} had no rows in batch {part.batch_id}, in which the "
        f"parallelism changed, and what it gets of a union list is for the function to say: start "
        f"the query once more and let a batch run",
    )
