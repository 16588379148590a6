"""The function that Spark runs on each partition: one subtask of one operator in one batch."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from flowspark.errors import OptionError
from flowspark.keyed.identity import NAME, OperatorSpec, TaskIdentity
from flowspark.keyed.lineage import Base, Lineage, check_own_job, find_lineage
from flowspark.keyed.output import OutputBuffer
from flowspark.keyed.parts import Part, create_part, folder_of, forget_empty, note_empty, survey
from flowspark.keyed.routing import InputRows, Route
from flowspark.keyed.sealing import FixedClock, same_uid, seal
from flowspark.keyed.watermarks import WatermarkStrategy, WatermarkTracker
from flowspark.keyed.work import BatchInfo, Work, WorkFactory
from flowspark.workers import settle
from flowstate.checkpoint import CheckpointStorage, KeyedHandle, SubtaskSnapshot, encode_name
from flowstate.errors import UnclaimedStateError
from flowstate.key_groups import KeyGroupAssigner, key_group_range_of
from flowstate.restoring import keyed_share, load_rows
from flowstate.rows import NO_TIMESTAMP, RESERVED_PREFIX
from flowstate.subtask import Subtask, SubtaskConfig

__all__ = ["KeyedTask"]

_LOG = logging.getLogger(__name__)

_FOLDER_VARIABLE = "FLOWSPARK_WORKING_FOLDER"
_FOLDERS_KEPT_S = 7 * 86_400
# What an operator's folder is called, and what is in it.
_OWN_FOLDER = re.compile(r"[0-9a-f]{32}")
_KEY_GROUPS = re.compile(r"\d+-\d+-of-\d+")
# What a Python worker keeps of its subtasks' state in memory: some 100 MB, if these are numbers.
_WARM_ROWS_MAX = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedTask:
    """What ``mapInArrow`` is given."""

    spec: OperatorSpec
    factory: WorkFactory
    key_columns: tuple[str, ...]
    key_type: pa.DataType
    watermark: WatermarkStrategy | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run one subtask; its rows are handed on only when its state is durable."""
        task = TaskIdentity.current(self.spec)
        rows = InputRows(iter(batches), self.key_columns, uid=self.spec.uid)
        route = rows.first_route()
        storage = self.spec.open_storage(task.query_id)
        if route is None:
            _run_without_rows(self, storage, task)
            return
        output = OutputBuffer(self.factory.output_schema)
        try:
            with _calm_collector():
                _Execution(self, storage, task, route, output).run(rows)
            yield from output.drain()
        finally:
            output.close()
        settle()

    def restore(self, subtask: Subtask, part: Part, checkpoint_id: int) -> SubtaskSnapshot:
        """Let the function take up what a subtask that had no rows gets after a rescale."""
        attributes = part.snapshot.attributes
        info = BatchInfo(
            uid=self.spec.uid,
            key_columns=self.key_columns,
            batch_id=part.batch_id,
            batch_ms=part.batch_ms,
            watermark=attributes.get("watermark", NO_TIMESTAMP),
            completed_checkpoint_id=None,
        )
        work = self.factory.open(subtask, info, OutputBuffer(self.factory.output_schema))
        snapshot = work.snapshot(checkpoint_id, attributes)
        work.close()
        return snapshot


def _run_without_rows(operator: KeyedTask, storage: CheckpointStorage, task: TaskIdentity) -> None:
    lineage = find_lineage(operator.spec, storage, task, operator.restore)
    if lineage.standing is None:
        note_empty(storage, task, lineage.checkpoint_id)
        forget_empty(storage, lineage.idle)
        _seal_batch_job(operator, storage, task)


def _seal_batch_job(operator: KeyedTask, storage: CheckpointStorage, task: TaskIdentity) -> None:
    """Make the record of a batch job, which no later batch will do, when all its parts are there.

    Whoever is last sees them all; if two are, one of them wins.
    """
    if task.batch_id is not None:
        return
    _, groups = survey(storage)
    for group in groups:
        if group.run == encode_name(task.run) and group.is_complete and group.parts:
            # Another job at the same place may have been the first, although it began later.
            record = seal(storage, operator.spec, group, operator.restore)
            check_own_job(operator.spec, storage, task, record)


class _Execution:
    """One subtask in one batch, from its base to its part."""

    def __init__(
        self,
        task: KeyedTask,
        storage: CheckpointStorage,
        identity: TaskIdentity,
        route: Route,
        output: OutputBuffer,
    ) -> None:
        self._task, self._spec, self._storage = task, task.spec, storage
        self._identity, self._route, self._output = identity, route, output
        self._started_ms = _now_ms()
        self._lineage: Lineage = find_lineage(task.spec, storage, identity, task.restore)
        if route.subtask_index == 0:
            # One seals early, so that the others find it done when they are through.
            _ = self._lineage.parent_record
        self._base = self._lineage.base_of(route.subtask_index)
        self._digest = _base_digest(self._base, task.spec, route.subtask_index)

    def run(self, rows: InputRows) -> None:
        """Process the rows, and make durable what follows from them."""
        tracker = self._tracker()
        with self._open_subtask() as subtask:
            work = self._open_work(subtask, tracker)
            self._check_claimed(subtask)
            for batch in rows:
                if batch.rows.num_rows:
                    work.add(batch.rows, batch.keys)
                for control in batch.controls:
                    if tracker is not None:
                        tracker.observe(control.get("highest", {}), self._route.batch_ms)
            work.finish(None if tracker is None else tracker.advance(self._route.batch_ms))
            attributes = {} if tracker is None else tracker.attributes()
            snapshot = work.snapshot(self._lineage.checkpoint_id, attributes)
            work.close()
            self._commit(subtask, snapshot)
        _ = self._lineage.parent_record
        _seal_batch_job(self._task, self._storage, self._identity)

    def _open_subtask(self) -> Subtask:
        spec = self._spec
        config = SubtaskConfig(
            subtask_index=self._route.subtask_index,
            parallelism=spec.parallelism,
            max_parallelism=spec.max_parallelism,
            key_type=self._task.key_type,
            assigner=KeyGroupAssigner.XXHASH64,
            run=self._identity.run,
            working_folder=_working_folder(spec, self._storage.url),
            warm_rows_max=_WARM_ROWS_MAX,
            continues=self._base.continues,
        )
        return Subtask(
            self._storage,
            config,
            restored=self._base.record,
            restored_from=self._base.storage,
            clock=FixedClock(self._route.batch_ms),
        )

    def _open_work(self, subtask: Subtask, tracker: WatermarkTracker | None) -> Work:
        info = BatchInfo(
            uid=self._spec.uid,
            key_columns=self._task.key_columns,
            batch_id=self._identity.batch_id,
            batch_ms=self._route.batch_ms,
            watermark=NO_TIMESTAMP if tracker is None else tracker.watermark,
            completed_checkpoint_id=None if self._base.is_foreign else self._lineage.parent_id,
        )
        return self._task.factory.open(subtask, info, self._output)

    def _tracker(self) -> WatermarkTracker | None:
        if self._task.watermark is None:
            return None
        record = self._base.record
        known: list[dict[str, Any]] = []
        if record is not None and self._base.continues:
            known = [record.subtasks[self._route.subtask_index].attributes]
        elif record is not None:
            known = [subtask.attributes for subtask in record.subtasks]
        if self._base.is_foreign:
            # Another query has other inputs, and one that never comes would hold the time back.
            known = [{"watermark": one.get("watermark", NO_TIMESTAMP)} for one in known]
        return WatermarkTracker(self._task.watermark, known)

    def _check_claimed(self, subtask: Subtask) -> None:
        """Refuse state of the checkpoint that the function does not ask for any more."""
        described = subtask.describe()
        states = {**described.keyed_states, **described.operator_states}
        lost = sorted(
            name
            for name in states
            if name not in described.registered and not name.startswith(RESERVED_PREFIX)
        )
        if lost and not self._spec.allow_non_restored_state:
            raise UnclaimedStateError(
                f"operator {self._spec.uid!r}: the checkpoint has the state "
                f"{', '.join(map(repr, lost))}, which the function does not register in open() or "
                f"initialize_state(). Register it, or leave it unused in the checkpoint with "
                f"allow_non_restored_state=True"
            )

    def _commit(self, subtask: Subtask, snapshot: SubtaskSnapshot) -> None:
        lineage = self._lineage
        if lineage.standing is not None:
            self._compare_with_standing(subtask, snapshot)
            return
        part = Part(
            operator=self._spec.token,
            batch_id=self._identity.batch_id,
            run=self._identity.run,
            parallelism=self._spec.parallelism,
            parent_id=lineage.parent_id,
            restored_from=lineage.restored_from,
            base=self._digest,
            started_ms=self._started_ms,
            finished_ms=_now_ms(),
            batch_ms=self._route.batch_ms,
            snapshot=snapshot,
            description=subtask.describe(),
        )
        folder = folder_of(self._identity, lineage.checkpoint_id)
        standing = create_part(self._storage, folder, part)
        if standing is None:
            subtask.keep_warm(snapshot)
            return
        if standing.operator != self._spec.token:
            raise same_uid(self._spec)
        self._compare(subtask, standing.snapshot, snapshot)

    def _compare_with_standing(self, subtask: Subtask, snapshot: SubtaskSnapshot) -> None:
        record = self._lineage.standing
        assert record is not None
        if record.parallelism == self._spec.parallelism:
            self._compare(subtask, record.subtasks[self._route.subtask_index], snapshot)

    def _compare(self, subtask: Subtask, first: SubtaskSnapshot, second: SubtaskSnapshot) -> None:
        """Warn if the batch, which ran twice, led to two different states; the first one counts."""
        if first.digest == second.digest:
            return
        # One may have written all of its state, and the other what has changed.
        whole = any(_newest(one)[0].full for one in (first, second) if one.keyed)
        found = [_contents(subtask, self._storage, one, whole=whole) for one in (first, second)]
        if found[0] != found[1]:
            _LOG.warning(
                "[FLOWKEYED_NOT_REPEATABLE] operator %r, subtask %d: batch %s ran twice and led to "
                "different state. What the first execution wrote is kept, what the second emitted "
                "may not agree with it. The function depends on something else than its rows and "
                "state: on chance, a clock, or the order of rows from several input partitions",
                self._spec.uid,
                self._route.subtask_index,
                self._identity.batch_id,
            )


def _base_digest(base: Base, spec: OperatorSpec, subtask_index: int) -> str:
    if base.record is None:
        return ""
    key_groups = key_group_range_of(
        subtask_index=subtask_index,
        parallelism=spec.parallelism,
        max_parallelism=spec.max_parallelism,
    )
    return keyed_share(base.record, key_groups).digest


def _newest(snapshot: SubtaskSnapshot) -> list[KeyedHandle]:
    newest = max((handle.last_checkpoint for handle in snapshot.keyed), default=0)
    return [handle for handle in snapshot.keyed if handle.last_checkpoint == newest]


def _contents(
    subtask: Subtask, storage: CheckpointStorage, snapshot: SubtaskSnapshot, *, whole: bool
) -> dict[str, set[str]]:
    """Return what the newest checkpoint's file says, or all files, whatever order it is in."""
    handles = list(snapshot.keyed) if whole else _newest(snapshot)
    found = load_rows(storage, handles, subtask.key_groups, drop_tombstones=whole)
    return {name: set(map(repr, rows.table.to_pylist())) for name, rows in found.items()}


@contextmanager
def _calm_collector() -> Iterator[None]:
    """Let Python look for cycles less often: a batch makes millions of rows, and none of them."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 100_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _working_folder(spec: OperatorSpec, url: str) -> Path:
    """Return where this operator's working state is on the local disk."""
    base = spec.working_folder or os.environ.get(_FOLDER_VARIABLE)
    root = Path(base or Path(tempfile.gettempdir(), f"flowspark-{os.getuid()}"))
    way_out = (
        f"Name another one with working_folder, or in the variable {_FOLDER_VARIABLE} of the "
        f"executors"
    )
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = root.stat().st_uid
    except OSError as error:
        raise OptionError(
            NAME, f"the working folder {root} cannot be made: {error}. {way_out}"
        ) from error
    if not base and owner != os.getuid():
        # Everybody may write to the system's temporary folder, and what is found here is used.
        raise OptionError(NAME, f"the working folder {root} belongs to the user {owner}. {way_out}")
    folder = root / xxhash.xxh3_128_hexdigest(url.encode())
    if not folder.exists():
        _forget_old_folders(root)
    folder.mkdir(exist_ok=True)
    os.utime(folder)
    return folder


def _forget_old_folders(root: Path) -> None:
    """Remove the working state of operators that have not run here for a long time.

    The root is a folder that a person has named: all else that is in it is somebody else's.
    """
    for folder in root.iterdir():
        with suppress(OSError):
            is_old = time.time() - folder.stat().st_mtime > _FOLDERS_KEPT_S
            if is_old and _is_working_state(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_working_state(folder: Path) -> bool:
    if _OWN_FOLDER.fullmatch(folder.name) is None:
        return False
    return all(_KEY_GROUPS.fullmatch(entry.name) is not None for entry in folder.iterdir())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
