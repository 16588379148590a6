"""What came of a request, in words that do not depend on the client library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pyspark_flowkafka.batches import AbortedTransaction


class Status(Enum):
    """What an answer about one partition or group means for whoever asked."""

    OK = "ok"
    OUT_OF_RANGE = "out of range"
    UNKNOWN = "unknown topic or partition"
    RETRY = "retry"
    """Try again, with fresh metadata: the leader moved, or is not there yet."""
    DENIED = "denied"
    FAILED = "failed"


class RetriableClientError(Exception):
    """No answer, or one that a second attempt may improve; ``reason`` is safe to show."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """What the cluster says about one topic; ``leaders`` has -1 where there is none."""

    status: Status
    is_internal: bool = False
    leaders: Mapping[int, int] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class FetchReply:
    """What a leader sent for one partition."""

    status: Status
    error: str = ""
    data: bytes = field(default=b"", repr=False)
    log_start: int = -1
    log_end: int = -1
    """Up to where may be read: the high watermark, or the last stable offset."""
    aborted: Sequence[AbortedTransaction] | None = None
    is_throttled: bool = False


# Kafka's own consumer tries again after an unknown error of the broker (-1), too: what goes wrong
# with its disks or its remote storage comes as that.
_RETRIED = frozenset(
    {-1, 2, 5, 6, 7, 8, 9, 13, 14, 15, 16, 19, 20, 56, 74, 75, 78, 88, 89, 100, 103}
)
_UNKNOWN = frozenset({3})
_DENIED = frozenset({29, 30, 31})


def status_of(code: int) -> Status:
    """Return what one of Kafka's error codes means."""
    if code == 0:
        return Status.OK
    if code == 1:
        return Status.OUT_OF_RANGE
    if code in _UNKNOWN:
        return Status.UNKNOWN
    if code in _DENIED:
        return Status.DENIED
    return Status.RETRY if code in _RETRIED else Status.FAILED
