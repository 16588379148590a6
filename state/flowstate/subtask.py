"""The state of one subtask of one operator, from checkpoint to checkpoint."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from flowstate.checkpoint import (
    LINEAGE_MAX,
    CheckpointRecord,
    CheckpointStorage,
    KeyedHandle,
    KeyedSection,
    ListSection,
    MergePlan,
    MergeTimes,
    OperatorHandle,
    OperatorStateMeta,
    SubtaskSnapshot,
    drop_expired,
    merge_handles,
    plan_merge,
)
from flowstate.clock import Clock, SystemClock
from flowstate.errors import StateError, UnclaimedStateError
from flowstate.key_groups import (
    KeyGroupAssigner,
    check_parallelism,
    key_group_range_of,
)
from flowstate.keyed import warm
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.keyed.working_state import StateVersion, WorkingState
from flowstate.keys import KeyType
from flowstate.operator_state import OperatorStateBackend
from flowstate.restoring import (
    KeyedShare,
    check_restorable,
    keyed_share,
    load_rows,
    operator_share,
    own_share,
    stretches,
)
from flowstate.rows import NO_TIMESTAMP, StateKind, StateRows
from flowstate.types import type_to_text

__all__ = ["INLINE_BYTES_MAX", "OperatorDescription", "Subtask", "SubtaskConfig"]

INLINE_BYTES_MAX = 20 << 10
"""State of so many bytes in all goes into the commit record itself, as in Flink."""

DEFAULT_MAX_PARALLELISM = 128

# A row takes several times as long to be written into LMDB as to be read into memory.
_WARM_ROWS_TIMES = 4
_WARM_BYTES_MAX = 16 << 20


class OperatorDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit record says of an operator as a whole; the same from each subtask."""

    max_parallelism: int
    assigner: KeyGroupAssigner
    key_type: str | None
    keyed_states: dict[str, dict[str, Any]]
    operator_states: dict[str, dict[str, Any]]
    registered: tuple[str, ...] = ()
    """The names that the program has asked for; of the others this tells what was restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskConfig:
    """Which subtask it is, and what its keys are."""

    subtask_index: int
    parallelism: int
    max_parallelism: int | None = None
    """None takes that of the checkpoint, or 128 where there is none."""
    key_type: Any = None
    """The type of the keys; None for an operator without keyed state."""
    assigner: KeyGroupAssigner = KeyGroupAssigner.FLINK
    run: str = ""
    """What tells the attempts of two runs apart; by default a new name."""
    working_folder: str | os.PathLike[str] | None = None
    """Where LMDB keeps the working state on local disk; None keeps it in memory."""
    warm_rows_max: int = 0
    """Keep small state in the memory of this process, up to so many rows of all its subtasks.

    LMDB takes over what is larger, or would be read for a small change. See ``keep_warm``.
    """
    allow_non_restored_state: bool = False
    """Drop the keyed state of a checkpoint if the operator has no keys any more."""
    compact: bool = True
    """Merge state files when it is due, as a part of taking snapshots."""
    continues: bool = False
    """The checkpoint is this subtask's own last one, and nothing has been redistributed since.

    Its lists are then what it left in them; otherwise each restore gives out a union list anew.
    The parallelism must be the checkpoint's.
    """
    carries_only: bool = False
    """Only hand the restored state on to the next checkpoint: no row of keyed state is loaded."""


@dataclass(slots=True)
class _Pending:
    """What becomes true when a snapshot is known to be committed."""

    handles: tuple[KeyedHandle, ...]
    rows: Sequence[StateRows]
    digest: str


class Subtask:
    """Keyed state, operator state and timers of one subtask.

    The cycle is: use the state, ``snapshot`` it, hand the result to whoever commits the
    checkpoint, and then say how that went: ``notify_checkpoint_complete`` or ``..._aborted``.
    A process that dies in between loses nothing: the next one starts from the newest record.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        config: SubtaskConfig,
        *,
        restored: CheckpointRecord | None = None,
        restored_from: CheckpointStorage | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start from a checkpoint, or from nothing.

        ``restored_from`` is the storage of a checkpoint that belongs to another operator's root
        or to a savepoint. The first snapshot is then a full one and needs nothing of it.
        """
        self._storage = storage
        self._source = restored_from or storage
        self._foreign = restored is not None and self._source is not storage
        self._clock = clock or SystemClock()
        self._config = config
        self.run = config.run or uuid.uuid4().hex
        self.restored_checkpoint_id = None if restored is None else restored.checkpoint_id
        self._key_type = None if config.key_type is None else KeyType(config.key_type)
        self.max_parallelism = self._checked_max_parallelism(restored)
        self.key_groups = key_group_range_of(
            subtask_index=config.subtask_index,
            parallelism=config.parallelism,
            max_parallelism=self.max_parallelism,
        )
        share = KeyedShare((), "", ())
        if restored is not None:
            share = keyed_share(restored, self.key_groups)
        self._handles, self._digest = share.handles, share.digest
        # Another root counts its checkpoints by itself, so its lineage says nothing here.
        self._lineage = () if self._foreign else share.lineage
        self._pending: dict[int, _Pending] = {}
        # Committed, but not in the working state yet.
        self._behind: list[Sequence[StateRows]] = []
        self._working: WorkingState | None = None
        try:
            self._keyed = self._open_keyed(restored)
            self._operator = self._open_operator(restored)
        except BaseException:
            self.close()
            raise

    @property
    def keyed(self) -> KeyedStateBackend:
        """The keyed state and the timers."""
        if self._keyed is None:
            raise StateError("this operator has no keyed state: give it a key_type")
        return self._keyed

    @property
    def operator(self) -> OperatorStateBackend:
        """The operator state."""
        return self._operator

    @property
    def subtask_index(self) -> int:
        """Which of the parallel copies this is, from 0 on."""
        return self._config.subtask_index

    @property
    def parallelism(self) -> int:
        """How many parallel copies there are."""
        return self._config.parallelism

    @property
    def is_restored(self) -> bool:
        """Whether there is a checkpoint behind this start."""
        return self.restored_checkpoint_id is not None

    @property
    def working_state(self) -> WorkingState | None:
        """The rows on local disk, where the subtask has them."""
        return self._working

    def describe(self) -> OperatorDescription:
        """Return what the commit record says of the operator."""
        keyed = self._keyed
        return OperatorDescription(
            max_parallelism=self.max_parallelism,
            assigner=self._config.assigner,
            key_type=None if keyed is None else type_to_text(keyed.key_type.arrow),
            keyed_states={} if keyed is None else keyed.metas,
            operator_states=self._operator.metas,
            registered=(
                *(() if keyed is None else keyed.registered_names),
                *self._operator.registered_names,
            ),
        )

    def snapshot(
        self,
        checkpoint_id: int,
        *,
        batch_id: int | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> SubtaskSnapshot:
        """Write what has changed, and return what the checkpoint is to refer to.

        Without a batch id the checkpoint's id stands for it.
        """
        if checkpoint_id in self._pending:
            raise StateError(f"checkpoint {checkpoint_id} of this subtask has been taken already")
        batch = checkpoint_id if batch_id is None else batch_id
        try:
            handles, rows = self._snapshot_keyed(checkpoint_id, batch)
            operator = self._snapshot_operator(batch, handles)
        except BaseException:
            # What was written stays unreferenced; what has changed belongs to the next attempt.
            if self._keyed is not None:
                self._keyed.notify_checkpoint_aborted(checkpoint_id)
            raise
        digest = self._next_digest(handles, operator)
        lineage = self._lineage[-LINEAGE_MAX:]
        kept = rows if self._working is not None else ()
        self._pending[checkpoint_id] = _Pending(handles, kept, digest)
        return SubtaskSnapshot(
            subtask_index=self._config.subtask_index,
            key_groups=None if self._keyed is None else self.key_groups,
            keyed=handles,
            operator=operator,
            digest=digest,
            lineage=lineage,
            attributes=dict(attributes or {}),
        )

    def keep_warm(self, snapshot: SubtaskSnapshot) -> None:
        """Leave the state in memory for the next subtask; this one is not to be used any more.

        The next one takes it if its checkpoint turns out to be this snapshot, or to follow it.
        """
        rows_max = self._config.warm_rows_max
        if self._working is None and self._keyed is not None and rows_max:
            states = self._keyed.warm_states()
            if states is not None:
                warm.keep(self._place, snapshot.digest, states, rows_max=rows_max)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Take note that the checkpoint is committed, and all before it with it.

        Now, and not before, the working state on local disk moves on. If that fails, it does so
        along with the next checkpoint, and until then memory has what it lacks.
        """
        for done in sorted(found for found in self._pending if found <= checkpoint_id):
            pending = self._pending.pop(done)
            self._handles, self._digest = pending.handles, pending.digest
            self._lineage = (*self._lineage, (done, pending.digest))[-LINEAGE_MAX:]
            self._foreign, self._source = False, self._storage
            if self._keyed is not None:
                self._keyed.notify_checkpoint_complete(done)
            if self._working is not None:
                self._behind.append(pending.rows)
        if self._working is not None and self._keyed is not None and self._behind:
            # All at once, because memory is held against either all of it or none.
            self._working.advance(self._behind, self._digest)
            self._behind = []
            if not self._pending:
                self._keyed.rebase()

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Take note that the checkpoint came to nothing: the next one will hold its changes."""
        if self._pending and checkpoint_id != max(self._pending):
            raise StateError(
                f"checkpoint {checkpoint_id} cannot be aborted while {max(self._pending)}, which "
                f"builds on it, is still under way: abort that one first"
            )
        if self._pending.pop(checkpoint_id, None) is not None and self._keyed is not None:
            self._keyed.notify_checkpoint_aborted(checkpoint_id)

    def close(self) -> None:
        """Let go of the local working state. Nothing is written."""
        if self._working is not None:
            self._working.close()
            self._working = None

    def __enter__(self) -> Subtask:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Opening.

    def _checked_max_parallelism(self, restored: CheckpointRecord | None) -> int:
        config = self._config
        if restored is None:
            chosen = config.max_parallelism
            chosen = DEFAULT_MAX_PARALLELISM if chosen is None else chosen
            check_parallelism(parallelism=config.parallelism, max_parallelism=chosen)
            return chosen
        check_restorable(
            restored,
            parallelism=config.parallelism,
            max_parallelism=config.max_parallelism,
            assigner=config.assigner,
            key_type=None if self._key_type is None else self._key_type.arrow,
        )
        if restored.keyed_states and self._key_type is None and not config.allow_non_restored_state:
            raise UnclaimedStateError(
                f"checkpoint {restored.checkpoint_id} has the keyed states "
                f"{sorted(restored.keyed_states)}, and the operator has no key. Give it the key "
                f"type, or drop that state with allow_non_restored_state"
            )
        return restored.max_parallelism

    def _open_keyed(self, restored: CheckpointRecord | None) -> KeyedStateBackend | None:
        if self._key_type is None:
            return None
        rows: dict[str, StateRows] = {}
        found = self._take_warm(restored)
        if found is None and self._is_read_quickly(restored):
            found, rows = {}, load_rows(self._source, self._handles, self.key_groups)
        if self._config.carries_only or found is not None:
            pass
        elif self._config.working_folder is not None:
            self._working = self._open_working(self._config.working_folder)
        elif self._handles:
            rows = load_rows(self._source, self._handles, self.key_groups)
        return KeyedStateBackend(
            self._key_type,
            max_parallelism=self.max_parallelism,
            key_groups=self.key_groups,
            assigner=self._config.assigner,
            base=self._working,
            restored=rows,
            warm=found,
            restored_metas=None if restored is None else restored.keyed_states,
            clock=self._clock,
        )

    @property
    def _place(self) -> tuple[Any, ...]:
        groups = self.key_groups
        return self._storage.url, groups.start, groups.end, self.max_parallelism

    def _take_warm(self, restored: CheckpointRecord | None) -> warm.WarmStates | None:
        """Take what an earlier subtask has left in memory; None if that is of no use."""
        if not self._config.warm_rows_max or self._config.carries_only:
            return None
        if restored is None:
            return {}
        if self._foreign or not warm.can_be_warm(restored.keyed_states):
            return None
        reachable = self._reachable()

        def rows_since(identity: str) -> dict[str, StateRows]:
            return self._rows_since(reachable[identity])

        return warm.take(self._place, self._digest, reachable, rows_since)

    def _is_read_quickly(self, restored: CheckpointRecord | None) -> bool:
        """Say whether reading all of the state takes about as long as applying its last change."""
        if restored is None or not self._handles or self._foreign or self._config.carries_only:
            return False
        rows = [handle.file.rows for handle in self._handles]
        size = sum(handle.file.size for handle in self._handles)
        if sum(rows) > min(_WARM_ROWS_TIMES * rows[-1], self._config.warm_rows_max):
            return False
        if size > _WARM_BYTES_MAX or not warm.can_be_warm(restored.keyed_states):
            return False
        readers = map(self._source.reader, [handle.file for handle in self._handles])
        kinds = {section.kind for reader in readers for section in reader.sections.values()}
        return StateKind.TIMER not in kinds

    def _open_working(self, root: str | os.PathLike[str]) -> WorkingState:
        groups = self.key_groups
        folder = Path(root) / f"{groups.start}-{groups.end}-of-{self.max_parallelism}"
        reachable = self._reachable()

        def rows_since(identity: str | None) -> Iterator[Sequence[StateRows]]:
            if identity is None:
                yield from stretches(self._source, self._handles, groups)
            else:
                yield list(self._rows_since(reachable[identity]).values())

        wanted = StateVersion(self._digest, tuple(reachable))
        return WorkingState.open(folder, wanted, rows_since)

    def _reachable(self) -> dict[str, int]:
        """Return the ancestors, by digest, from which newer files alone lead to the checkpoint.

        What has been merged since then says of each key that has changed what it has now, so it
        can be applied to any ancestor. Only a full snapshot cannot: it has no deletions.
        """
        return {
            digest: checkpoint_id
            for checkpoint_id, digest in self._lineage[:-1]
            if all(
                not handle.full
                or handle.last_checkpoint <= checkpoint_id
                or handle.first_checkpoint > checkpoint_id
                for handle in self._handles
            )
        }

    def _rows_since(self, checkpoint_id: int) -> dict[str, StateRows]:
        newer = [handle for handle in self._handles if handle.last_checkpoint > checkpoint_id]
        return load_rows(self._source, newer, self.key_groups, drop_tombstones=False)

    def _open_operator(self, restored: CheckpointRecord | None) -> OperatorStateBackend:
        first = self._config.subtask_index == 0
        if restored is None:
            return OperatorStateBackend()
        share = own_share if self._config.continues else operator_share
        elements = share(
            self._source,
            restored,
            subtask_index=self._config.subtask_index,
            parallelism=self._config.parallelism,
        )
        return OperatorStateBackend(
            restored=elements,
            restored_metas=restored.operator_states,
            carries_union=first or self._config.continues,
        )

    # Snapshots.

    def _snapshot_keyed(
        self, checkpoint_id: int, batch_id: int
    ) -> tuple[tuple[KeyedHandle, ...], Sequence[StateRows]]:
        if self._keyed is None:
            return (), ()
        handles = self._newest_handles()
        since, everything = checkpoint_id, False
        if self._foreign and handles and not self._pending:
            handles = (self._adopted(handles, checkpoint_id, batch_id),)
        elif self._config.compact and handles and self._keyed.is_mostly_changed:
            # The changes would soon be folded into a full file anyway, which costs reading all.
            since, everything = min(handle.first_checkpoint for handle in handles), True
            handles = ()
        elif self._config.compact and (plan := plan_merge(handles)) is not None:
            # Before the new delta is added: so the next batch finds it by itself, and can apply it
            # to the local working state, which is still at this one's parent.
            handles = plan.apply(handles, self._merge(plan, batch_id, self._storage))
        full = not handles
        rows = self._keyed.changes(checkpoint_id, full=full, everything=everything)
        written = [self._without_expired(part) for part in rows] if full else rows
        if written:
            delta = self._write_delta(written, handles, checkpoint_id, batch_id)
            handles = (*handles, msgspec.structs.replace(delta, first_checkpoint=since))
        return handles, rows

    def _newest_handles(self) -> tuple[KeyedHandle, ...]:
        if not self._pending:
            return self._handles
        return self._pending[max(self._pending)].handles

    def _adopted(
        self, handles: tuple[KeyedHandle, ...], checkpoint_id: int, batch_id: int
    ) -> KeyedHandle:
        """Copy state from another root into this one, as one full file."""
        plan = MergePlan(handles, level=0, full=True)
        merged = self._merge(plan, batch_id, self._source)
        return msgspec.structs.replace(
            merged,
            key_groups=self.key_groups,
            first_checkpoint=checkpoint_id,
            last_checkpoint=checkpoint_id,
        )

    def _write_delta(
        self,
        rows: Sequence[StateRows],
        handles: Sequence[KeyedHandle],
        checkpoint_id: int,
        batch_id: int,
    ) -> KeyedHandle:
        file = self._storage.write_file(
            [KeyedSection.of(part) for part in rows],
            batch_id=batch_id,
            run=self.run,
            inline_limit=self._inline_room(handles),
        )
        return KeyedHandle(
            file=file,
            key_groups=self.key_groups,
            first_checkpoint=checkpoint_id,
            last_checkpoint=checkpoint_id,
            level=0,
            full=not handles,
        )

    def _inline_room(self, handles: Sequence[KeyedHandle]) -> int:
        """Return how many bytes this subtask may still put into the record."""
        used = sum(handle.file.size for handle in handles if handle.file.inline is not None)
        return max(0, INLINE_BYTES_MAX // self._config.parallelism - used)

    def _merge(self, plan: MergePlan, batch_id: int, source: CheckpointStorage) -> KeyedHandle:
        rest = [handle for handle in self._newest_handles() if handle not in plan.handles]
        return merge_handles(
            self._storage,
            plan,
            source=source,
            batch_id=batch_id,
            run=self.run,
            states=self._expiring_states(),
            times=self._times(),
            inline_limit=self._inline_room(rest),
        )

    def _expiring_states(self) -> dict[str, dict[str, Any]]:
        metas = {} if self._keyed is None else self._keyed.metas
        return {
            name: meta for name, meta in metas.items() if "ttl_ms" in meta and meta["ttl_cleanup"]
        }

    def _times(self) -> MergeTimes:
        watermark = NO_TIMESTAMP if self._keyed is None else self._keyed.context.watermark
        return MergeTimes(
            processing_ms=self._clock.now_ms(),
            event_ms=None if watermark == NO_TIMESTAMP else watermark,
        )

    def _without_expired(self, rows: StateRows) -> StateRows:
        meta = self._expiring_states().get(rows.name)
        now_ms = None if meta is None else self._times().now_ms(meta)
        if meta is None or now_ms is None:
            return rows
        since = meta.get("ttl_since_ms")
        return drop_expired(rows, ttl_ms=meta["ttl_ms"], now_ms=now_ms, unstamped_ms=since)

    def _snapshot_operator(
        self, batch_id: int, keyed: Sequence[KeyedHandle]
    ) -> tuple[OperatorHandle, ...]:
        states = self._operator.snapshot()
        if not states:
            return ()
        file = self._storage.write_file(
            [ListSection.of(state.name, state.elements) for state in states],
            batch_id=batch_id,
            run=self.run,
            inline_limit=self._inline_room(keyed),
        )
        counts = {
            state.name: OperatorStateMeta(state.mode.value, len(state.elements)) for state in states
        }
        return (OperatorHandle(file=file, states=counts),)

    def _next_digest(
        self, handles: Sequence[KeyedHandle], operator: Sequence[OperatorHandle]
    ) -> str:
        before = self._pending[max(self._pending)].digest if self._pending else self._digest
        parts = [before, self.run, *(handle.file.digest for handle in handles)]
        parts += [handle.file.digest for handle in operator]
        return xxhash.xxh3_128_hexdigest("/".join(parts).encode())
