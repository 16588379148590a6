"""The driver's part of a batch: one record names the new lists and the output, then it is shown.

The record decides. Before it is created nothing of the batch counts; once it is there, all of it
does, and what is still to be published is published by whoever comes next: the same batch run
again, or a flush.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import pyarrow as pa

from flowspark.errors import OutputError
from flowstate.checkpoint import (
    CheckpointRecord,
    CheckpointStorage,
    Committed,
    OperatorHandle,
    SubtaskSnapshot,
    decode_snapshot,
)
from flowstate.errors import CheckpointSupersededError, SnapshotError, StorageError
from flowstate.key_groups import MAX_PARALLELISM_LIMIT, KeyGroupAssigner
from flowstate.operators import commit_checkpoint
from flowstate.redistribution import Redistribution
from flowstate.subtask import INLINE_BYTES_MAX, OperatorDescription
from pyspark_flowbuffer.lineage import Parent, find_parent
from pyspark_flowbuffer.options import FORMAT, BufferOptions
from pyspark_flowbuffer.publishing import SETTINGS, Publisher
from pyspark_flowbuffer.state import (
    STATE_NAME,
    ListWriter,
    describe,
    even_lists,
    restored_ranges,
    stretch_of,
)
from pyspark_flowbuffer.subtask import SubtaskResult, list_digest, too_many_partitions

__all__ = ["Committer"]

_LOG = logging.getLogger(__name__)

SWEEP_EVERY = 8
"""Left-overs wait so many checkpoints, because looking for them lists the store."""

_OTHERS_ACTIVE = (
    "The buffers were flushed, or another run of this query is active. Nothing of the batch was "
    "kept: stop the other run, if there is one, and restart the query"
)


@dataclass(frozen=True, slots=True)
class Committer:
    """Commits batches of one sink in one query."""

    options: BufferOptions
    schema: pa.Schema
    query_id: str
    storage: CheckpointStorage

    def commit(self, results: Sequence[SubtaskResult], batch_id: int) -> CheckpointRecord | None:
        """Make a batch count once, whatever happens; raises if it must not count at all.

        Returns its record, or None where the batch had no rows and left the buffers as they were.
        """
        parent = find_parent(self.options, self.storage, batch_id)
        snapshots = [_decoded(result) for result in results if result.snapshot is not None]
        won = False
        if parent.is_committed:
            record = parent.record
            _LOG.info("batch %d was committed before: its output is published again", batch_id)
        else:
            try:
                committed = self._commit_new(parent, results, snapshots, batch_id)
            except CheckpointSupersededError:
                self.publisher.drop(snapshots, None)
                raise
            if committed is None:
                self.publisher.drop(snapshots, None)
                return None
            record, won = committed.record, committed.won
        assert record is not None
        self.publisher.publish(record)
        if not won:
            self.publisher.drop(snapshots, record)
        self._tidy_up(record, batch_id)
        return record

    @property
    def publisher(self) -> Publisher:
        """What shows the output."""
        options = self.options
        return Publisher(options.output, self.query_id, options.uid, options.storage_options)

    def abort(self, batch_id: int) -> None:
        """Tell a sink of the user's that a batch failed.

        Nothing is removed. The record may have been created all the same, so that the files
        belong to it; and tasks of the batch may still be writing. The sweep removes the others.
        """
        head = self.storage.latest()
        if head is None or head.batch_id is None or head.batch_id < batch_id:
            self.publisher.aborted(1 if head is None else head.checkpoint_id + 1)

    # The record.

    def _check(self, results: Sequence[SubtaskResult], parent: Parent, batch_id: int) -> None:
        if {result.parent for result in results} != {parent.identity}:
            raise CheckpointSupersededError(
                f"batch {batch_id} began from another checkpoint than the newest one below "
                f"{parent.storage.url}. {_OTHERS_ACTIVE}"
            )
        wanted = self.options.parallelism
        if wanted is not None and len(results) != wanted and not _is_empty(results):
            raise too_many_partitions(wanted, str(len(results)))

    def _commit_new(
        self,
        parent: Parent,
        results: Sequence[SubtaskResult],
        snapshots: Sequence[SubtaskSnapshot],
        batch_id: int,
    ) -> Committed | None:
        self._check(results, parent, batch_id)
        run = results[0].task.run
        is_first = parent.record is None or parent.record.run != run
        if is_first:
            self._begin_run(parent, batch_id)
        subtasks = self._subtasks(parent, results, snapshots)
        if subtasks is None:
            return None
        if is_first:
            self._check_state(subtasks)
        self.publisher.check_staged(subtasks)
        previous = None if parent.is_foreign else parent.record
        return self.create_record(previous, subtasks, run=run, batch_id=batch_id)

    def _begin_run(self, parent: Parent, batch_id: int) -> None:
        """Try the path; finish what the run before, a flush or a restored query may have left."""
        self.publisher.prove(batch_id)
        if parent.record is None:
            return
        if not parent.is_foreign or is_of_files(parent.record):
            self.publisher.publish(parent.record)
        ignored = {"restoreFrom": self.options.restore_from, "startEmpty": self.options.start_empty}
        for option, given in ignored.items():
            if given and not parent.is_foreign:
                _LOG.warning(
                    "%s has checkpoints of its own and goes on from checkpoint %d: %s is ignored",
                    parent.storage.url,
                    parent.record.checkpoint_id,
                    option,
                )

    def _check_state(self, subtasks: Sequence[SubtaskSnapshot]) -> None:
        """Refuse state that only the tasks' hosts can see; other runs' tasks would not find it."""
        needed = {file.path for subtask in subtasks for file in subtask.files if file.path}
        if not needed:
            return
        missing = needed - {entry.path for entry in self.storage.file_system.list("")}
        if missing:
            raise OutputError(
                FORMAT,
                f"{len(missing)} of {len(needed)} files of the buffers are not there for the "
                f"driver: {self.storage.url}/{min(missing)}. The state location must be one place "
                f"for the driver and all executors. Nothing of the batch was kept",
            )

    def _subtasks(
        self,
        parent: Parent,
        results: Sequence[SubtaskResult],
        snapshots: Sequence[SubtaskSnapshot],
    ) -> list[SubtaskSnapshot] | None:
        """Return what the new record consists of; None if there is nothing to record.

        For an input without partitions Spark runs a single task. Such a batch says nothing of
        the parallelism, so it leaves everything as it is.
        """
        ran, wanted = len(snapshots), self.options.parallelism
        before = None if parent.record is None else parent.record.parallelism
        if _is_empty(results) and ran < (wanted or before or ran):
            return self._carried(parent, results[0], snapshots)
        if parent.record is None or wanted is not None or before == ran:
            return list(snapshots)
        lists = [snapshot.operator for snapshot in snapshots]
        for index in range(ran, parent.record.parallelism):
            lists.append(self._unrestored(parent, results[0], index))
        return [
            msgspec.structs.replace(snapshot, operator=handles, digest=list_digest(handles))
            for snapshot, handles in zip(snapshots, even_lists(lists, ran), strict=True)
        ]

    def _carried(
        self, parent: Parent, result: SubtaskResult, snapshots: Sequence[SubtaskSnapshot]
    ) -> list[SubtaskSnapshot] | None:
        """Return all subtasks, of which those without a task keep what they have.

        None for a union list: what others keep depends on what they would have been given.
        """
        wanted = self.options.parallelism
        if parent.record is not None and self.options.redistribution is Redistribution.UNION:
            return None
        total = wanted or (1 if parent.record is None else parent.record.parallelism)
        missing = []
        for index in range(len(snapshots), total):
            handles = () if parent.record is None else self._unrestored(parent, result, index)
            missing.append(
                SubtaskSnapshot(subtask_index=index, operator=handles, digest=list_digest(handles))
            )
        return [*snapshots, *missing]

    def _unrestored(
        self, parent: Parent, result: SubtaskResult, index: int
    ) -> tuple[OperatorHandle, ...]:
        """Return a list of the parent for which there was no task; another query's is copied."""
        assert parent.record is not None
        parts = restored_ranges(
            parent.record, subtask_index=index, parallelism=self.options.parallelism
        )
        stretches = [
            stretch_of(part, parent.storage.reader(part.handle.file), self.schema) for part in parts
        ]
        if parent.is_foreign:
            stretches = [replace(stretch, origin=None) for stretch in stretches]
        writer = ListWriter(
            storage=self.storage,
            schema=self.schema,
            mode=self.options.redistribution,
            batch_id=result.task.batch_id,
            run=result.task.run,
            inline_limit=INLINE_BYTES_MAX // parent.record.parallelism,
            keeps_ages=self.options.triggers.max_age_ms is not None,
        )
        return writer.write(stretches)

    def create_record(
        self,
        previous: CheckpointRecord | None,
        subtasks: Sequence[SubtaskSnapshot],
        *,
        run: str,
        batch_id: int | None,
    ) -> Committed:
        """Create the record after the previous one; refused if another batch was faster."""
        committed = commit_checkpoint(
            self.storage,
            subtasks,
            [self._description()],
            parent=previous,
            run=run,
            batch_id=batch_id,
            attributes={SETTINGS: self.publisher.settings()},
        )
        if not committed.won and committed.record.batch_id != batch_id:
            raise CheckpointSupersededError(
                f"checkpoint {committed.record.checkpoint_id} below {self.storage.url} was "
                f"committed by run {committed.record.run!r} while batch {batch_id} was running. "
                f"{_OTHERS_ACTIVE}"
            )
        return committed

    def _description(self) -> OperatorDescription:
        """Return what the record says of the sink's state."""
        return OperatorDescription(
            max_parallelism=MAX_PARALLELISM_LIMIT,
            assigner=KeyGroupAssigner.XXHASH64,
            key_type=None,
            keyed_states={},
            operator_states={STATE_NAME: describe(self.schema, self.options.redistribution)},
            registered=(STATE_NAME,),
        )

    # After the record.

    def _tidy_up(self, record: CheckpointRecord, batch_id: int) -> None:
        """Retire old checkpoints and remove left-overs; what fails here is done the next time."""
        try:
            self.storage.retain(self.options.checkpoints_retained)
            if record.checkpoint_id % SWEEP_EVERY == 0:
                self.storage.sweep(batch_id)
                self.publisher.sweep(batch_id)
        except (StorageError, SnapshotError) as error:
            _LOG.warning("old checkpoints of %s stay for now: %s", self.storage.url, error)


def _decoded(result: SubtaskResult) -> SubtaskSnapshot:
    assert result.snapshot is not None
    return decode_snapshot(result.snapshot, f"the result of subtask {result.task.subtask_index}")


def _is_empty(results: Sequence[SubtaskResult]) -> bool:
    return not any(result.input_rows for result in results)


def is_of_files(record: CheckpointRecord) -> bool:
    """Say whether a record's output are files, which anybody can publish."""
    return "path" in record.attributes.get(SETTINGS, {})
