"""An operator's checkpoints: the snapshots of its subtasks become one record.

``commit_checkpoint`` is for runtimes whose subtasks are spread over processes. ``LocalOperator``
keeps all subtasks in one process: for scripts, for tests, and for looking at state.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from flowstate.checkpoint import (
    CheckpointRecord,
    CheckpointStorage,
    Committed,
    SubtaskSnapshot,
)
from flowstate.clock import Clock, SystemClock
from flowstate.errors import CheckpointSupersededError, StateError, StateRegistrationError
from flowstate.key_groups import (
    MAX_PARALLELISM_LIMIT,
    KeyGroupAssigner,
    check_parallelism,
    key_grouper,
    subtask_index_of,
)
from flowstate.keys import KeyType
from flowstate.subtask import OperatorDescription, Subtask, SubtaskConfig

__all__ = ["LocalOperator", "commit_checkpoint"]

_LOG = logging.getLogger(__name__)


def commit_checkpoint(
    storage: CheckpointStorage,
    snapshots: Sequence[SubtaskSnapshot],
    descriptions: Sequence[OperatorDescription],
    *,
    parent: CheckpointRecord | None,
    run: str,
    batch_id: int | None = None,
    attributes: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> Committed:
    """Create the record that follows the parent, or return the one that another has created."""
    described = _combined(descriptions)
    record = CheckpointRecord(
        checkpoint_id=1 if parent is None else parent.checkpoint_id + 1,
        parent_id=None if parent is None else parent.checkpoint_id,
        parent_digest=None if parent is None else parent.digest,
        batch_id=batch_id,
        run=run,
        parallelism=len(snapshots),
        max_parallelism=described.max_parallelism,
        assigner=described.assigner,
        key_type=described.key_type,
        keyed_states=described.keyed_states,
        operator_states=described.operator_states,
        subtasks=tuple(sorted(snapshots, key=lambda snapshot: snapshot.subtask_index)),
        attributes=dict(attributes or {}),
        created_ms=(clock or SystemClock()).now_ms(),
    )
    return storage.commit(record)


def _combined(descriptions: Sequence[OperatorDescription]) -> OperatorDescription:
    """Return what all subtasks say together; a subtask need not have registered every state."""
    first = descriptions[0]
    registered = {name for description in descriptions for name in description.registered}
    keyed = [(one.keyed_states, one.registered) for one in descriptions]
    operator = [(one.operator_states, one.registered) for one in descriptions]
    return OperatorDescription(
        max_parallelism=first.max_parallelism,
        assigner=first.assigner,
        key_type=first.key_type,
        keyed_states=_combine(keyed),
        operator_states=_combine(operator),
        registered=tuple(sorted(registered)),
    )


def _combine(
    found: Sequence[tuple[dict[str, dict[str, Any]], Sequence[str]]],
) -> dict[str, dict[str, Any]]:
    restored: dict[str, dict[str, Any]] = {}
    registered: dict[str, dict[str, Any]] = {}
    for metas, names in found:
        for name, meta in metas.items():
            restored.setdefault(name, meta)
            if name in names:
                _check_same(name, registered.setdefault(name, meta), meta)
    # What a program has registered may have a newer type than what was restored.
    return dict(sorted({**restored, **registered}.items()))


def _check_same(name: str, known: dict[str, Any], meta: dict[str, Any]) -> None:
    roles = ("kind", "value", "map_key", "mode", "namespace")
    if any(known.get(role) != meta.get(role) for role in roles):
        raise StateRegistrationError(
            f"state {name!r} was registered with different kinds or types by different "
            f"subtasks: all subtasks must run the same function"
        )


class LocalOperator:
    """All subtasks of one operator, in this process.

    It starts from the newest checkpoint below its URL, at whatever parallelism that was written,
    or from a checkpoint or savepoint elsewhere (``restore_from``), or from nothing.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        parallelism: int,
        key_type: Any = None,
        max_parallelism: int | None = None,
        assigner: KeyGroupAssigner = KeyGroupAssigner.FLINK,
        restore_from: str | os.PathLike[str] | None = None,
        working_folder: str | os.PathLike[str] | None = None,
        checkpoints_retained: int = 2,
        storage_options: Mapping[str, Any] | None = None,
        storage: CheckpointStorage | None = None,
        clock: Clock | None = None,
        compact: bool = True,
        allow_non_restored_state: bool = False,
    ) -> None:
        check_parallelism(parallelism=parallelism, max_parallelism=MAX_PARALLELISM_LIMIT)
        if type(checkpoints_retained) is not int or checkpoints_retained < 1:
            raise StateError(
                f"checkpoints_retained must be an int of at least 1, not {checkpoints_retained!r}"
            )
        self.storage = storage or CheckpointStorage(url, storage_options)
        self.parallelism = parallelism
        self._retained = checkpoints_retained
        self._clock = clock or SystemClock()
        self.run = uuid.uuid4().hex
        self._record = self.storage.latest()
        restored, source = self._record, self.storage
        if restore_from is not None and restored is not None:
            _LOG.warning(
                "%s has checkpoints of its own and goes on from checkpoint %d: restore_from is "
                "ignored",
                self.storage.url,
                restored.checkpoint_id,
            )
        elif restore_from is not None:
            source, restored = CheckpointStorage.resolve(restore_from, storage_options)
        with ExitStack() as opened:
            # If one of them cannot be opened, the others are closed again.
            self.subtasks = [
                opened.enter_context(
                    Subtask(
                        self.storage,
                        SubtaskConfig(
                            subtask_index=index,
                            parallelism=parallelism,
                            max_parallelism=max_parallelism,
                            key_type=key_type,
                            assigner=assigner,
                            run=self.run,
                            working_folder=working_folder,
                            compact=compact,
                            allow_non_restored_state=allow_non_restored_state,
                        ),
                        restored=restored,
                        restored_from=source,
                        clock=clock,
                    )
                )
                for index in range(parallelism)
            ]
            opened.pop_all()
        self.max_parallelism = self.subtasks[0].max_parallelism
        self._group_of = None
        if key_type is not None:
            self._keys = KeyType(key_type)
            self._group_of = key_grouper(
                self._keys.arrow, max_parallelism=self.max_parallelism, assigner=assigner
            )

    @property
    def record(self) -> CheckpointRecord | None:
        """The newest checkpoint of this operator."""
        return self._record

    def subtask_of(self, key: Any, *, timestamp: int | None = None) -> Subtask:
        """Return the subtask that owns a key, with the key and its element's time set."""
        if self._group_of is None:
            raise StateRegistrationError("this operator has no keyed state: give it a key_type")
        canonical = self._keys.canonical(key)
        index = subtask_index_of(
            self._group_of(canonical),
            parallelism=self.parallelism,
            max_parallelism=self.max_parallelism,
        )
        subtask = self.subtasks[index]
        subtask.keyed.set_canonical_key(canonical, timestamp=timestamp)
        return subtask

    def checkpoint(self, attributes: Mapping[str, Any] | None = None) -> CheckpointRecord:
        """Take a checkpoint, retire old ones, and remove what nothing refers to any more."""
        checkpoint_id = 1 if self._record is None else self._record.checkpoint_id + 1
        taken: list[Subtask] = []
        try:
            snapshots = []
            for subtask in self.subtasks:
                snapshots.append(subtask.snapshot(checkpoint_id))
                taken.append(subtask)
            committed = commit_checkpoint(
                self.storage,
                snapshots,
                [subtask.describe() for subtask in self.subtasks],
                parent=self._record,
                run=self.run,
                batch_id=checkpoint_id,
                attributes=attributes,
                clock=self._clock,
            )
            if not committed.won:
                raise self._lost_to(committed.record)
        except Exception:
            for subtask in taken:
                subtask.notify_checkpoint_aborted(checkpoint_id)
            raise
        self._record = committed.record
        for subtask in self.subtasks:
            subtask.notify_checkpoint_complete(checkpoint_id)
        self.storage.retain(self._retained)
        self.storage.sweep(checkpoint_id)
        return committed.record

    def _lost_to(self, winner: CheckpointRecord) -> CheckpointSupersededError:
        if winner.run == self.run:
            why = "an attempt of this run whose outcome was unknown: open the operator anew"
        else:
            why = f"run {winner.run!r}: two runs share one location, stop one of them"
        return CheckpointSupersededError(
            f"checkpoint {winner.checkpoint_id} below {self.storage.url} was committed by {why}"
        )

    def close(self) -> None:
        """Let go of local working state; what was not checkpointed is gone."""
        for subtask in self.subtasks:
            subtask.close()

    def __enter__(self) -> LocalOperator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
