"""A query with the sink and without a JVM: tasks and commits are called as Spark calls them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flowstate.checkpoint import CheckpointRecord, CheckpointStorage
from pyspark_flowbuffer.committing import Committer
from pyspark_flowbuffer.lineage import open_storage
from pyspark_flowbuffer.options import BufferOptions
from pyspark_flowbuffer.state import restored_ranges, stretch_of
from pyspark_flowbuffer.subtask import SubtaskResult, TaskIdentity, run_subtask

VALUES = pa.schema([("value", pa.string())])


def table(values: Sequence[Any], schema: pa.Schema = VALUES) -> pa.Table:
    """Return rows of one column, or of several where the values are tuples."""
    if len(schema) == 1:
        return pa.table([pa.array(list(values), schema.field(0).type)], schema=schema)
    rows = [dict(zip(schema.names, row, strict=True)) for row in values]
    return pa.Table.from_pylist(rows, schema)


class Query:
    """One run of a query; another one with the same folder is a restart."""

    def __init__(
        self,
        folder: Path,
        *,
        query_id: str = "query",
        schema: pa.Schema = VALUES,
        run: str | None = None,
        **options: Any,
    ) -> None:
        self.folder, self.schema, self.query_id = folder, schema, query_id
        self.run = run or uuid.uuid4().hex
        given = {"checkpointLocation": str(folder / "checkpoint"), **options}
        if "sinkFunction" not in given:
            given.setdefault("path", str(folder / "out"))
        self.options = BufferOptions.parse({name: str(value) for name, value in given.items()})

    @property
    def storage(self) -> CheckpointStorage:
        return open_storage(self.options, self.query_id)

    @property
    def committer(self) -> Committer:
        return Committer(self.options, self.schema, self.query_id, self.storage)

    def tasks(
        self, batch_id: int, partitions: Sequence[Sequence[Any]], *, now_ms: int = 1000
    ) -> list[SubtaskResult]:
        """Run the tasks of a batch."""
        return [
            self.task(batch_id, index, rows, now_ms=now_ms) for index, rows in enumerate(partitions)
        ]

    def task(
        self, batch_id: int, index: int, rows: Sequence[Any], *, now_ms: int = 1000
    ) -> SubtaskResult:
        task = TaskIdentity(
            query_id=self.query_id, batch_id=batch_id, run=self.run, subtask_index=index
        )
        batches = table(rows, self.schema).to_batches(max_chunksize=3)
        return run_subtask(self.options, self.schema, task, batches, now_ms=now_ms)

    def batch(
        self, batch_id: int, *partitions: Sequence[Any], now_ms: int = 1000
    ) -> CheckpointRecord | None:
        """Run a whole batch."""
        return self.committer.commit(self.tasks(batch_id, partitions, now_ms=now_ms), batch_id)

    # What a person finds afterwards.

    def buffers(self, checkpoint_id: int | None = None) -> list[list[Any]]:
        """Return the rows that wait, by subtask."""
        storage = self.storage
        record = storage.latest() if checkpoint_id is None else storage.read(checkpoint_id)
        if record is None:
            return []
        return [self._list(storage, record, index) for index in range(record.parallelism)]

    def _list(self, storage: CheckpointStorage, record: CheckpointRecord, index: int) -> list[Any]:
        parts = restored_ranges(record, subtask_index=index, parallelism=None)
        tables = [
            stretch_of(part, storage.reader(part.handle.file), self.schema).load() for part in parts
        ]
        return [row for found in tables for row in rows_of(found)]

    def files(self) -> dict[str, list[Any]]:
        """Return the published parquet files, by their paths in the sink's folder."""
        out = self.folder / "out"
        found = sorted(path for path in out.rglob("*.parquet") if "_flow" not in path.parts)
        return {str(path.relative_to(out)): rows_of(pq.ParquetFile(path).read()) for path in found}

    def published(self) -> list[Any]:
        """Return the published rows."""
        return [row for rows in self.files().values() for row in rows]

    def staged(self) -> list[str]:
        """Return what is left in the staging folder."""
        staging = self.folder / "out" / "_flow"
        return sorted(path.name for path in staging.rglob("*") if path.is_file())

    def everything(self) -> list[Any]:
        """Return the published and the buffered rows."""
        return sorted([*self.published(), *(row for rows in self.buffers() for row in rows)])


def rows_of(found: pa.Table) -> list[Any]:
    """Return values, or tuples of them where there are several columns."""
    columns = [column.to_pylist() for column in found.columns]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
