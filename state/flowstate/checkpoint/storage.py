"""Checkpoint storage: the checkpoints of one operator below one root.

::

    chk-<id>/_metadata                     the record of a checkpoint, created exclusively
    chk-<id>/...                           what was written for a checkpoint before its record
    shared/<batchId>-<run>-<uuid>.arrow    state files; records refer to them
    taskowned/                             what nobody has committed yet

A checkpoint is there when its record is. Nothing that a record refers to is ever changed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from flowstate.checkpoint import names
from flowstate.checkpoint.files import SHARED_FOLDER, FileHandle
from flowstate.checkpoint.reading import StateFileReader
from flowstate.checkpoint.record import CheckpointRecord, decode_record, encode_record, map_files
from flowstate.checkpoint.verification import VerifyReport, verify_record
from flowstate.checkpoint.writing import KeyedSection, ListSection, write_state_file
from flowstate.errors import (
    CheckpointNotFoundError,
    CheckpointSupersededError,
    SnapshotCorruptError,
    SnapshotMissingError,
    StorageError,
    StoreUnavailableError,
)
from flowstate.storage._port import FileEntry, StateFileSystem
from flowstate.storage.filesystems import open_file_system

__all__ = [
    "TASK_OWNED_FOLDER",
    "CheckpointStorage",
    "Committed",
    "Swept",
]

TASK_OWNED_FOLDER = "taskowned"

_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Committed:
    """The record that now stands for a checkpoint id."""

    record: CheckpointRecord
    won: bool
    """Whether it is the one that was to be committed."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep has deleted, or, in a dry run, would delete."""

    paths: tuple[str, ...]
    bytes: int


class CheckpointStorage:
    """Reads and writes the checkpoints of one operator.

    Any number of them, in any number of processes, may work below one root at the same time.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        file_system: StateFileSystem | None = None,
    ) -> None:
        self.file_system = file_system or open_file_system(url, storage_options)
        self.url = self.file_system.url

    @classmethod
    def resolve(
        cls, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> tuple[Self, CheckpointRecord]:
        """Find the checkpoint that a URL names: a ``chk-<id>``, or the newest below a root."""
        root, checkpoint_id = names.checkpoint_of_url(os.fspath(url))
        storage = cls(root, storage_options)
        if checkpoint_id is not None:
            return storage, storage.read(checkpoint_id)
        record = storage.latest()
        if record is None:
            raise CheckpointNotFoundError(
                f"there is no checkpoint below {storage.url}. Give the folder of one operator of "
                f"a query or a savepoint (the one with chk-<id> folders in it), or one of its "
                f"chk-<id> folders"
            )
        return storage, record

    # State files

    def write_file(
        self,
        sections: Iterable[KeyedSection | ListSection],
        *,
        batch_id: int,
        run: str,
        inline_limit: int = 0,
    ) -> FileHandle:
        """Write a state file under a name of its own; up to the limit it goes into the handle.

        Until a record refers to it, the file is protected from the sweep by its batch id alone.
        """
        path = self._new_path(batch_id=batch_id, run=run)
        return write_state_file(self.file_system, path, sections, inline_limit=inline_limit)

    def reader(self, handle: FileHandle) -> StateFileReader:
        """Return a reader of one state file; nothing is read yet."""
        return StateFileReader(self.file_system, handle)

    # Records

    def commit(self, record: CheckpointRecord) -> Committed:
        """Create the record, or return the one that another committer has created.

        A record's id is the one after its parent's: then of all that follow one parent a single
        one wins, and the records form one chain.

        Raises ``CheckpointSupersededError`` if the chain has gone on without it: the id was free
        only because retention had removed its checkpoint.
        """
        path = names.record_path(record.checkpoint_id)
        try:
            created = self.file_system.create_exclusively(path, encode_record(record))
        except StoreUnavailableError:
            # It may have been created all the same. Only if it is there for sure this goes on.
            if self.find(record.checkpoint_id) is None:
                # A sweep removes what a committer that is too late has only half written.
                if any(found > record.checkpoint_id for found in self.checkpoint_ids()):
                    raise _superseded(record, self.url) from None
                raise
            created = False
        if not created:
            standing = self.find(record.checkpoint_id)
            if standing is None:
                raise _superseded(record, self.url)
            if standing.digest != record.digest:
                return Committed(standing, won=False)
            # Our own record, from an attempt whose reply was lost.
        self._refuse_if_stale(record)
        return Committed(record, won=True)

    def _refuse_if_stale(self, record: CheckpointRecord) -> None:
        following = [found for found in self.checkpoint_ids() if found > record.checkpoint_id]
        for checkpoint_id in following:
            child = self.find(checkpoint_id)
            if child is None:
                continue  # Retired meanwhile; then the next one is the oldest that is left.
            if not child.follows(record):
                self.file_system.delete([names.record_path(record.checkpoint_id)])
                raise _superseded(record, self.url)
            return

    def checkpoint_ids(self) -> list[int]:
        """Return the ids of all checkpoints, oldest first; a folder without a record is none."""
        found = (names.checkpoint_id_of(entry.path) for entry in self.file_system.list(""))
        return sorted(checkpoint_id for checkpoint_id in found if checkpoint_id is not None)

    def read(self, checkpoint_id: int) -> CheckpointRecord:
        """Return the record of a checkpoint."""
        record = self.find(checkpoint_id)
        if record is None:
            there = ", ".join(map(str, self.checkpoint_ids())) or "none"
            raise CheckpointNotFoundError(
                f"there is no checkpoint {checkpoint_id} below {self.url}: it was never "
                f"completed, or retention has removed it. The checkpoints there are: {there}"
            )
        return record

    def latest(self) -> CheckpointRecord | None:
        """Return the newest record, or None if there is none."""
        return self._newest(lambda _: True)

    def latest_before(self, batch_id: int) -> CheckpointRecord | None:
        """Return the newest record of the chain that precedes a batch, or None.

        A record without a batch id, as a batch job or a savepoint makes, precedes every batch.
        """
        return self._newest(lambda record: record.batch_id is None or record.batch_id < batch_id)

    def _newest(self, is_wanted: Callable[[CheckpointRecord], bool]) -> CheckpointRecord | None:
        child: CheckpointRecord | None = None
        for checkpoint_id in reversed(self.checkpoint_ids()):
            record = self.find(checkpoint_id)
            # A late committer's record may be there for a moment, or for as long as it takes
            # until retention finds it, if the committer died. It belongs to no chain.
            if record is None or (child is not None and not child.follows(record)):
                continue
            if is_wanted(record):
                return record
            child = record
        return None

    def find(self, checkpoint_id: int) -> CheckpointRecord | None:
        """Return the record of a checkpoint, or None if there is none."""
        path = names.record_path(checkpoint_id)
        try:
            data = self.file_system.read(path)
        except SnapshotMissingError:
            return None
        record = decode_record(data, self._where(path))
        if record.checkpoint_id != checkpoint_id:
            raise SnapshotCorruptError(
                self._where(path),
                what="the checkpoint id",
                expected=checkpoint_id,
                actual=record.checkpoint_id,
            )
        return record

    # Retention

    def retain(self, count: int) -> list[int]:
        """Remove the records of all but the newest checkpoints, and return their ids.

        Their files stay until the next :meth:`sweep`. The newest checkpoint always stays.
        """
        if count < 1:
            raise ValueError(f"at least one checkpoint must be retained, not {count}")
        retired = self.checkpoint_ids()[:-count]
        for checkpoint_id in retired:
            # One by one, oldest first: a crash in between leaves a chain without gaps.
            self.file_system.delete([names.record_path(checkpoint_id)])
        return retired

    def sweep(self, committed_batch_id: int, *, dry_run: bool = False) -> Swept:
        """Delete what no checkpoint needs any more and no one can still be about to commit.

        That is: state files and task-owned files of batches up to the committed one, and what is
        left in the folders of checkpoints below the newest. (The newest one's folder stays as it
        is: tasks of the next batch may be reading it.) Where there is no checkpoint, or where one
        cannot be read, nothing is deleted; the latter raises its error.
        """
        # Listed before the records are read, so that what a new record refers to is not missed.
        entries = self.file_system.list("")
        records = [self.find(checkpoint_id) for checkpoint_id in self.checkpoint_ids()]
        standing = [record for record in records if record is not None]
        if not standing:
            return Swept((), 0)
        newest_id = standing[-1].checkpoint_id
        referenced = {path for record in standing for path in record.files}
        doomed = [
            entry
            for entry in entries
            if entry.path not in referenced
            and _is_left_over(entry, newest_id=newest_id, committed_batch_id=committed_batch_id)
        ]
        if not dry_run:
            self.file_system.delete([entry.path for entry in doomed])
        return Swept(tuple(entry.path for entry in doomed), sum(entry.size for entry in doomed))

    # Whole checkpoints

    def verify(
        self, checkpoint_id: int, progress: Callable[[int, int], None] | None = None
    ) -> VerifyReport:
        """Read everything that a checkpoint consists of, and report all that is wrong with it.

        ``progress`` is told the bytes that were read so far and those there are.
        """
        return verify_record(self.file_system, self.read(checkpoint_id), progress)

    def copy_to(self, record: CheckpointRecord, destination: CheckpointStorage) -> CheckpointRecord:
        """Copy a checkpoint and all its files into an empty root, and return its record there.

        The copy keeps the id but has no parent, and needs nothing outside of its root: it may be
        moved, and the original deleted. What was copied is read again before the record is made.
        """
        if destination.checkpoint_ids():
            raise StorageError(
                f"{destination.url} has checkpoints already, and a copy needs a root of its own. "
                f"Choose a location that is not in use"
            )
        paths = {
            path: destination._new_path(batch_id=names.batch_id_of(path) or 0, run=record.run)
            for path in record.files
        }
        for path, file in record.files.items():
            self._copy_file(path, file.size, destination.file_system, paths[path])
        subtasks = map_files(record, lambda file: _moved(file, paths))
        copy = msgspec.structs.replace(
            record, parent_id=None, parent_digest=None, subtasks=subtasks
        )
        verify_record(destination.file_system, copy).raise_if_broken()
        committed = destination.commit(copy)
        if not committed.won:
            raise _superseded(copy, destination.url)
        return committed.record

    def _copy_file(self, path: str, size: int, destination: StateFileSystem, new_path: str) -> None:
        with destination.open_output(new_path) as output:
            for offset in range(0, size, _COPY_BYTES):
                length = min(_COPY_BYTES, size - offset)
                (piece,) = self.file_system.read_ranges(path, [(offset, length)])
                output.write(piece)

    def _new_path(self, *, batch_id: int, run: str) -> str:
        unique = uuid.uuid4().hex
        return names.state_file_path(SHARED_FOLDER, batch_id=batch_id, run=run, unique=unique)

    def _where(self, path: str) -> str:
        return f"{self.url}/{path}"


def _is_left_over(entry: FileEntry, *, newest_id: int, committed_batch_id: int) -> bool:
    """Say whether a file that no record refers to may go."""
    folder = entry.path.partition("/")[0]
    if folder in {SHARED_FOLDER, TASK_OWNED_FOLDER}:
        batch_id = names.batch_id_of(entry.path)
        return batch_id is not None and batch_id <= committed_batch_id
    # A record is no left-over, even if it came after the records were listed.
    if names.checkpoint_id_of(entry.path) is not None:
        return False
    checkpoint_id = names.folder_id_of(entry.path)
    return checkpoint_id is not None and checkpoint_id < newest_id


def _moved(file: FileHandle, paths: Mapping[str, str]) -> FileHandle:
    return file if file.path is None else msgspec.structs.replace(file, path=paths[file.path])


def _superseded(record: CheckpointRecord, url: str) -> CheckpointSupersededError:
    return CheckpointSupersededError(
        f"checkpoint {record.checkpoint_id} of run {record.run!r} came too late: the checkpoints "
        f"below {url} have gone on without it, and retention has removed those of its time. Its "
        f"run is over; nothing of it was kept. If it is the only run, restart the query"
    )
