"""From which state a batch goes on, whoever ran the batches before and at whatever parallelism."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

from flowspark.errors import OptionError
from flowspark.keyed.identity import NAME, OperatorSpec, TaskIdentity
from flowspark.keyed.parts import PartGroup, read_part, survey
from flowspark.keyed.sealing import Restore, choose_group, provisional_record, same_uid, seal
from flowstate.checkpoint import CheckpointRecord, CheckpointStorage, decode_name, encode_name
from flowstate.checkpoint.names import checkpoint_of_url
from flowstate.errors import CheckpointNotFoundError, UnclaimedStateError, UnsafeNameError
from flowstate.storage.filesystems import open_file_system

__all__ = ["Base", "Lineage", "check_own_job", "find_lineage", "resolve_checkpoint"]

_LOG = logging.getLogger(__name__)

# Once in a process is enough: a task asks in every batch.
_WARNED: set[str] = set()


@dataclass(frozen=True, slots=True)
class Base:
    """The state that a subtask starts from."""

    record: CheckpointRecord | None
    storage: CheckpointStorage
    """Where the record's files are."""
    continues: bool = False
    """It is the subtask's own last state; nothing is redistributed."""
    is_foreign: bool = False
    """It is of another root: nothing of the new checkpoint may refer to its files."""


@dataclass(frozen=True)
class Lineage:
    """The checkpoints before a batch, as one listing of the store showed them."""

    spec: OperatorSpec
    storage: CheckpointStorage
    restore: Restore
    own_run: str
    sealed: CheckpointRecord | None
    """The newest record of a batch before this one."""
    unsealed: PartGroup | None
    """The batch after it, which Spark has committed; its record is still to be made."""
    standing: CheckpointRecord | None
    """The record of this very batch, where Spark has forgotten that it committed it."""
    foreign: tuple[CheckpointStorage, CheckpointRecord] | None
    """The checkpoint that ``restore_from`` names, if there is none of this query's own."""
    idle: tuple[PartGroup, ...] = ()
    """Batches without rows before the last one: nobody needs their signs any more."""

    @property
    def checkpoint_id(self) -> int:
        """The id of this batch's checkpoint."""
        if self.unsealed is not None:
            return self.unsealed.checkpoint_id + 1
        return 1 if self.sealed is None else self.sealed.checkpoint_id + 1

    @property
    def parent_id(self) -> int | None:
        """The id of the checkpoint before."""
        return None if self.checkpoint_id == 1 else self.checkpoint_id - 1

    @property
    def restored_from(self) -> str | None:
        """Where the first checkpoint of this root came from."""
        if self.foreign is None or self.checkpoint_id != 1:
            return None
        storage, record = self.foreign
        return f"{storage.url}/chk-{record.checkpoint_id}"

    def base_of(self, subtask_index: int) -> Base:
        """Return what a subtask starts from."""
        if self.unsealed is None:
            return self._sealed_base(self.sealed)
        if self.unsealed.run != self.own_run:
            # Another run, or another parallelism: everybody needs all of it.
            return self._sealed_base(self.parent_record)
        if subtask_index in self.unsealed.parts:
            part = read_part(self.storage, f"{self.unsealed.folder}/part-{subtask_index}")
            record = provisional_record(part, self.unsealed.checkpoint_id)
            return Base(record, self.storage, continues=True)
        # It had no rows in that batch, so it is where it was before.
        return self._sealed_base(self.sealed)

    def _sealed_base(self, record: CheckpointRecord | None) -> Base:
        if record is not None:
            continues = record.parallelism == self.spec.parallelism
            return Base(record, self.storage, continues=continues)
        if self.foreign is not None:
            storage, record = self.foreign
            return Base(record, storage, is_foreign=True)
        return Base(None, self.storage)

    @cached_property
    def parent_record(self) -> CheckpointRecord | None:
        """The record of the batch before, sealed now if it was not yet."""
        if self.unsealed is None:
            return self.sealed
        standing = self.storage.find(self.unsealed.checkpoint_id)
        if standing is not None:
            return standing
        try:
            return seal(self.storage, self.spec, self.unsealed, self.restore)
        except CheckpointNotFoundError:
            # Another task has sealed it meanwhile, and retired the one before.
            if (standing := self.storage.find(self.unsealed.checkpoint_id)) is None:
                raise
            return standing


def find_lineage(
    spec: OperatorSpec, storage: CheckpointStorage, task: TaskIdentity, restore: Restore
) -> Lineage:
    """Look at what is in the store; the same for all who ask before this batch is committed.

    A query that has run before must find its state: a location with a mistake in it would
    otherwise look like a query that starts anew.
    """
    own_run = encode_name(task.run)
    ids, groups = survey(storage)
    if task.batch_id is None:
        return _of_batch_job(spec, storage, task, restore, own_run, ids)
    sealed, standing = _newest_before(storage, ids, task.batch_id)
    reached = -1 if sealed is None or sealed.batch_id is None else sealed.batch_id
    _check_one_operator(spec, task, own_run, [one for one in groups if one.batch_id > reached])
    between = [group for group in groups if reached < group.batch_id < task.batch_id]
    unsealed = None
    idle: list[PartGroup] = []
    newest = max((group.batch_id for group in between), default=None)
    for batch_id in sorted({group.batch_id for group in between}):
        found = [group for group in between if group.batch_id == batch_id]
        if batch_id != newest and not any(group.parts for group in found):
            # The batches after it have seen that it was complete; by now its signs may be gone.
            idle += found
            continue
        chosen = choose_group(storage, spec, found, own_run)
        # A batch in which nobody had rows changes nothing and needs no checkpoint.
        unsealed = chosen if chosen.parts else unsealed
    is_new = sealed is None and unsealed is None
    if is_new and task.batch_id > 0 and not groups:
        _check_fresh_start(spec, storage, task.batch_id)
    return Lineage(
        spec=spec,
        storage=storage,
        restore=restore,
        own_run=own_run,
        sealed=sealed,
        unsealed=unsealed,
        standing=standing,
        foreign=(
            _foreign(spec, storage, has_own=sealed is not None)
            if unsealed is None or sealed is not None
            else _foreign_of(spec, storage, unsealed)
        ),
        idle=tuple(idle),
    )


def _check_one_operator(
    spec: OperatorSpec, task: TaskIdentity, own_run: str, groups: list[PartGroup]
) -> None:
    """Refuse two operators of one uid that have folders of their own: they differ in parallelism.

    Within one run and batch an operator has one. Those of equal parallelism meet at their parts.
    """
    own = own_run.rpartition("-")[0]
    found = {(task.batch_id, own): spec.parallelism}
    for group in groups:
        which = (group.batch_id, group.run.rpartition("-")[0])
        if found.setdefault(which, group.parallelism) != group.parallelism:
            raise same_uid(spec)


def _newest_before(
    storage: CheckpointStorage, ids: list[int], batch_id: int
) -> tuple[CheckpointRecord | None, CheckpointRecord | None]:
    """Return the newest record of a batch before, and the record of the batch itself."""
    newest = storage.find(ids[-1]) if ids else None
    if newest is None:
        # Retired between the listing and now, if there was one: look again.
        newest = storage.latest() if ids else None
    if newest is None or newest.batch_id is None or newest.batch_id < batch_id:
        return newest, None
    before = storage.latest_before(batch_id)
    if before is None and batch_id > 0 and newest.parent_id is not None:
        raise CheckpointNotFoundError(
            f"batch {batch_id} is to run again, but the checkpoint before it below {storage.url} "
            f"has been retired; the newest one is of batch {newest.batch_id}. Restore the newer "
            f"checkpointLocation; to be able to go further back, raise checkpoints_retained"
        )
    standing = newest if newest.batch_id == batch_id else None
    if newest.batch_id > batch_id:
        raise OptionError(
            NAME,
            f"Spark wants to run batch {batch_id}, but the newest checkpoint below {storage.url} "
            f"is of batch {newest.batch_id}: the query's checkpointLocation was set back. Restore "
            f"the newer one, or start a new query with restore_from={storage.url}/chk-"
            f"{before.checkpoint_id if before else '<id>'}",
        )
    return before, standing


def _of_batch_job(
    spec: OperatorSpec,
    storage: CheckpointStorage,
    task: TaskIdentity,
    restore: Restore,
    own_run: str,
    ids: list[int],
) -> Lineage:
    standing = storage.latest() if ids else None
    if standing is not None:
        check_own_job(spec, storage, task, standing)
    foreign = _foreign(spec, storage, has_own=False)
    return Lineage(spec, storage, restore, own_run, None, None, standing, foreign)


def check_own_job(
    spec: OperatorSpec, storage: CheckpointStorage, task: TaskIdentity, record: CheckpointRecord
) -> None:
    """Refuse to go on where another batch job has made the checkpoint."""
    if record.run != task.run:
        raise OptionError(
            NAME,
            f"operator {spec.uid!r}: {storage.url} holds the state of another batch job. Give "
            f"another uid or state_location, or remove that folder. (Or this is no batch job: "
            f"inside foreachBatch of Spark Connect, or in a thread of one's own inside any, Spark "
            f"does not say that there is a stream.)",
        )


def _check_fresh_start(spec: OperatorSpec, storage: CheckpointStorage, batch_id: int) -> None:
    if spec.start_empty or spec.restore_from is not None:
        return
    raise CheckpointNotFoundError(
        f"batch {batch_id} of the query needs the state of the batch before, and there is nothing "
        f"below {storage.url}. Correct state_location or uid, or give restore_from; if the "
        f"operator is new in this query, or its state may be forgotten, set start_empty=True"
    )


def _foreign(
    spec: OperatorSpec, storage: CheckpointStorage, *, has_own: bool
) -> tuple[CheckpointStorage, CheckpointRecord] | None:
    if spec.restore_from is None:
        return None
    if has_own:
        if storage.url not in _WARNED:
            _WARNED.add(storage.url)
            _LOG.warning("%s has checkpoints of its own: restore_from is ignored", storage.url)
        return None
    return resolve_checkpoint(spec.restore_from, spec)


def _foreign_of(
    spec: OperatorSpec, storage: CheckpointStorage, first: PartGroup
) -> tuple[CheckpointStorage, CheckpointRecord] | None:
    """Return where the first batch started; below a live root there may be newer ones by now."""
    part = read_part(storage, f"{first.folder}/part-{min(first.parts)}")
    if part.restored_from is None:
        return None
    return CheckpointStorage.resolve(part.restored_from, spec.storage_options)


def resolve_checkpoint(
    url: str, spec: OperatorSpec
) -> tuple[CheckpointStorage, CheckpointRecord] | None:
    """Find the operator's checkpoint at a URL: its own folder, or that of a query or savepoint."""
    if checkpoint_of_url(url)[1] is None:
        below = f"{url.rstrip('/')}/{encode_name(spec.uid)}"
        if (record := CheckpointStorage(below, spec.storage_options).latest()) is not None:
            return CheckpointStorage(below, spec.storage_options), record
        if others := _operators_below(url, spec):
            if spec.allow_non_restored_state:
                return None
            raise UnclaimedStateError(
                f"Cannot map checkpoint/savepoint state to the operator {spec.uid!r}: below {url} "
                f"there is state of {', '.join(map(repr, others))}. Give the operator that uid, "
                f"name the operator's own folder in restore_from, or let it start empty with "
                f"allow_non_restored_state=True"
            )
    return CheckpointStorage.resolve(url, spec.storage_options)


def _operators_below(url: str, spec: OperatorSpec) -> list[str]:
    found = set()
    for entry in open_file_system(url, spec.storage_options).list(""):
        folder, _, rest = entry.path.partition("/")
        if rest.startswith("chk-") and rest.endswith("/_metadata"):
            try:
                found.add(decode_name(folder))
            except UnsafeNameError:
                found.add(folder)
    return sorted(found)
