"""What a keyed operator does with the rows of one subtask, as the task drives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from flowspark.keyed.output import OutputBuffer
from flowstate.checkpoint import SubtaskSnapshot
from flowstate.subtask import Subtask

__all__ = ["BYTES_PER_CALL", "ROWS_PER_CALL", "BatchInfo", "Work", "WorkFactory"]

ROWS_PER_CALL = 1 << 20
"""Rows are gathered into pieces of about this size: each costs some group-by's and look-ups."""
BYTES_PER_CALL = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInfo:
    """One subtask in one batch."""

    uid: str
    key_columns: tuple[str, ...]
    batch_id: int | None
    batch_ms: int
    watermark: int
    """That of the batch before."""
    completed_checkpoint_id: int | None
    """The newest checkpoint of which Spark has committed the batch."""


class Work(Protocol):
    """One subtask's work in one batch; what it emits goes into the buffer it was opened with."""

    def add(self, rows: pa.RecordBatch, keys: pa.Array) -> None:
        """Take rows, in the order in which they come."""
        ...

    def finish(self, watermark: int | None) -> None:
        """Do what is due after the last row; the watermark is None without event time."""
        ...

    def snapshot(self, checkpoint_id: int, attributes: Mapping[str, Any]) -> SubtaskSnapshot:
        """Write what has changed."""
        ...

    def close(self) -> None:
        """Close the user's function; not called if it failed."""
        ...


class WorkFactory(Protocol):
    """Travels to the tasks, and makes the work of each subtask."""

    @property
    def output_schema(self) -> pa.Schema:
        """The columns that are handed on."""
        ...

    def open(self, subtask: Subtask, info: BatchInfo, output: OutputBuffer) -> Work:
        """Open the user's function on a subtask's state."""
        ...
