"""Files that wait under ``<path>/_flow`` until a record names them, and how they get out.

::

    <path>/_flow/<tag>/<batchId>-<run>-<uuid>.parquet     staged: what a task has written
    <path>/part-<batchId>-<subtask>-<n>-<tag>.parquet     published: what a reader sees
    <path>/column=value/part-...                          with partitionBy

The tag stands for the query and the uid, so that several queries may write to one path. Readers
pass over names that begin with an underscore.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import xxhash

from flowstate.checkpoint import SubtaskSnapshot
from flowstate.checkpoint.names import batch_id_of, encode_name
from flowstate.storage.filesystems import StateFileSystem
from pyspark_flowbuffer.files import file_extension, write_table
from pyspark_flowbuffer.options import FileOutput

__all__ = ["OUTPUTS", "StagedFile", "StagingArea", "staged_files"]

OUTPUTS = "outputs"
"""The attribute of a subtask's snapshot that lists its files."""

_FOLDER = "_flow"


class StagedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file, as a record names it; paths are below the sink's path."""

    staged: str
    published: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StagingArea:
    """The files of one sink in one query."""

    file_system: StateFileSystem
    output: FileOutput
    tag: str

    @classmethod
    def of(
        cls, file_system: StateFileSystem, output: FileOutput, *, query_id: str, uid: str
    ) -> StagingArea:
        """Return the staging area of a query's sink."""
        return cls(file_system, output, xxhash.xxh3_64_hexdigest(f"{query_id}/{uid}".encode()))

    def stage(
        self, table: pa.Table, *, folder: str, name: str, batch_id: int, run: str
    ) -> StagedFile:
        """Write a complete file out of sight; its name belongs to this attempt alone."""
        ending = file_extension(self.output)
        staged = f"{self._folder}/{batch_id}-{encode_name(run)}-{uuid.uuid4().hex}{ending}"
        with self.file_system.open_output(staged) as file:
            write_table(file, table, self.output)
            size = file.tell()
        published = f"{name}-{self.tag}{ending}"
        return StagedFile(
            staged=staged,
            published=f"{folder}/{published}" if folder else published,
            rows=table.num_rows,
            bytes=size,
        )

    def prove(self, batch_id: int) -> None:
        """Write a file and remove it, as readers do not see; raises if that is not possible."""
        # Named as of the batch, so that a sweep removes it should a crash come in between.
        probe = f"{self._folder}/{batch_id}-probe-{uuid.uuid4().hex}"
        self.file_system.write(probe, b"")
        self.file_system.delete([probe])

    def missing(self, files: Iterable[StagedFile]) -> list[str]:
        """Return which of the files, as tasks have staged them, are not there for this process."""
        there = {entry.path for entry in self.file_system.list(self._folder)}
        return [file.staged for file in files if file.staged not in there]

    def publish(self, files: Iterable[StagedFile]) -> None:
        """Let readers see the files. What was published before stays as it is."""
        self.file_system.move({file.staged: file.published for file in files})

    def discard(self, files: Iterable[StagedFile]) -> None:
        """Remove files that no record names."""
        self.file_system.delete([file.staged for file in files])

    def sweep(self, last_batch_id: int) -> list[str]:
        """Remove what attempts of batches up to this one have left, and return their names."""
        doomed = [
            entry.path
            for entry in self.file_system.list(self._folder)
            if _batch_of(entry.path) <= last_batch_id
        ]
        self.file_system.delete(doomed)
        return doomed

    @property
    def _folder(self) -> str:
        return f"{_FOLDER}/{self.tag}"


def staged_files(subtasks: Iterable[SubtaskSnapshot]) -> list[StagedFile]:
    """Return the files that subtasks have written, as a record names them."""
    return [
        msgspec.convert(value, StagedFile)
        for subtask in subtasks
        for value in subtask.attributes.get(OUTPUTS, ())
    ]


def _batch_of(path: str) -> int:
    batch_id = batch_id_of(path)
    # A temporary file of a store, or nothing of ours: left alone, as of a batch that never comes.
    return batch_id if batch_id is not None else 1 << 62
