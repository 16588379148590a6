"""Sinks that a user writes, for what ``flowbuffer`` emits.

Two contracts. A ``SinkFunction`` writes in the task and may see a buffer twice. A ``TwoPhaseSink``
prepares in the task and commits on the driver, after the checkpoint that names what it prepared
is durable, so that it can be exactly-once.

A sink may be a ``flowstate.CheckpointListener`` as well. It is then told on the driver of
checkpoints that are complete, and of batches that failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FLUSH_SEQUENCE", "Committable", "SinkContext", "SinkFunction", "TwoPhaseSink"]

FLUSH_SEQUENCE = 1 << 30


@dataclass(frozen=True, slots=True, order=True)
class SinkContext:
    """Which buffer it is. The same buffer has the same context whenever a batch is run again."""

    query_id: str
    batch_id: int
    subtask_index: int
    sequence_number: int
    """Counts the buffers that this subtask emits in this batch, from 0 on; in a flush from
    ``FLUSH_SEQUENCE`` on, so that it does not take the place of the batch before it."""


@dataclass(frozen=True, slots=True)
class Committable:
    """What ``prepare`` returned for one buffer, as it is stored in the commit record."""

    context: SinkContext
    value: Any


class _Sink(ABC):  # noqa: B024 (only its children have something to implement)
    """Is made anew in every task and for every commit, from the options below ``sink.``."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        """Their names are in lower case, as Spark hands them over."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Let go of connections."""


class SinkFunction(_Sink):
    """Writes each buffer in the task that emits it: at least once.

    A task that is run again, or a batch whose commit failed, writes its buffers again. The rows of
    a buffer may then be others, because Spark promises no order within a partition; what is
    promised is that the last write of a context counts. So replace by context, or accept
    duplicates.
    """

    @abstractmethod
    def write(self, batch: pa.RecordBatch, context: SinkContext) -> None:
        """Write one buffer; an error fails the task, and Spark runs it again."""


class TwoPhaseSink(_Sink):
    """Prepares each buffer in its task, and makes it visible when the checkpoint is durable.

    Exactly once, if ``prepare`` leaves nothing visible and ``commit`` is idempotent. What was
    prepared by a task that failed is never committed; it is up to the sink to expire it.
    """

    @abstractmethod
    def prepare(self, batch: pa.RecordBatch, context: SinkContext) -> Any:
        """Store one buffer out of sight, and return what ``commit`` needs: something of JSON."""

    @abstractmethod
    def commit(self, committables: Sequence[Committable]) -> None:
        """Make them visible, on the driver. Called again after a crash: what is done is done."""

    def abort(self, committables: Sequence[Committable]) -> None:
        """Discard what was prepared and lost to another attempt of the same batch.

        Not called for every failure: a process that dies calls nothing.
        """
