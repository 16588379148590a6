"""Kafka's record batches (message format 2): their headers, their checksum, their transactions.

What follows a header is decoded in bulk, by ``boundaries`` and ``columns``; here is one small
object per batch, never one per record.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import google_crc32c

HEADER = struct.Struct(">qiibIhiqqqhii")
"""Offset, length, leader epoch, magic, CRC, attributes, last offset delta, base and max timestamp,
producer id and epoch, base sequence, count."""

# Offset and length stand in front of what the length counts.
LOG_OVERHEAD_BYTES = 12
# The CRC covers everything behind itself.
CRC_END = 21
MAGIC = 2

_CODEC_MASK = 0x07
_LOG_APPEND_TIME = 0x08
_TRANSACTIONAL = 0x10
_CONTROL = 0x20

_ABORT_MARKER = 0


class DamagedBatchError(ValueError):
    """A batch is not what its producer sent; ``header`` says how far to skip, if that is known."""

    def __init__(self, reason: str, header: BatchHeader | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.header = header


class BatchHeader(NamedTuple):
    """Where one batch lies in the fetched bytes, and what its header says."""

    start: int
    end: int
    base_offset: int
    last_offset: int
    magic: int
    crc: int
    attributes: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    record_count: int

    @property
    def records_start(self) -> int:
        return self.start + HEADER.size

    @property
    def codec(self) -> int:
        return self.attributes & _CODEC_MASK

    @property
    def is_log_append_time(self) -> bool:
        return bool(self.attributes & _LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & _CONTROL)


class AbortedTransaction(NamedTuple):
    """A transaction that was rolled back, as a fetch response lists it."""

    producer_id: int
    first_offset: int


def read_header(data: bytes, position: int) -> BatchHeader | None:
    """Return the header at a position, or None if its batch is cut off.

    Raises ``DamagedBatchError`` for a length or a magic that no batch has: nothing behind it can
    be found.
    """
    if position + LOG_OVERHEAD_BYTES > len(data):
        return None
    length = int.from_bytes(data[position + 8 : position + 12], "big", signed=True)
    if len(data) - position > 16 and data[position + 16] != MAGIC:
        # Formats 0 and 1 have their magic at the same place.
        raise DamagedBatchError(f"message format {data[position + 16]} is not format 2")
    if length < HEADER.size - LOG_OVERHEAD_BYTES:
        raise DamagedBatchError(f"the length of a batch cannot be {length}")
    end = position + LOG_OVERHEAD_BYTES + length
    if end > len(data):
        return None
    offset, _, _, magic, crc, attributes, delta, base_ms, max_ms, producer, _, _, count = (
        HEADER.unpack_from(data, position)
    )
    return BatchHeader(
        position,
        end,
        offset,
        offset + delta,
        magic,
        crc,
        attributes,
        base_ms,
        max_ms,
        producer,
        count,
    )


def size_of_first(data: bytes) -> int | None:
    """Return how many bytes the first batch has, even if it is cut off."""
    if len(data) < LOG_OVERHEAD_BYTES:
        return None
    length = int.from_bytes(data[8:12], "big", signed=True)
    return LOG_OVERHEAD_BYTES + length if length >= 0 else None


def check_crc(data: bytes, header: BatchHeader) -> None:
    """Raise ``DamagedBatchError`` if a batch is not what its checksum was made of."""
    found = google_crc32c.value(data[header.start + CRC_END : header.end])
    if found != header.crc:
        reason = f"the checksum is {found:#010x} instead of {header.crc:#010x}"
        raise DamagedBatchError(reason, header)


def check_offsets(
    header: BatchHeader, *, next_offset: int, is_first: bool, log_end: int | None
) -> None:
    """Check what the checksum does not cover: offsets that ascend, within the log.

    The first batch of a fetch may begin below the offset that was asked for, but reaches it.
    """
    low = header.last_offset if is_first else header.base_offset
    if low < next_offset or not 0 <= header.base_offset <= header.last_offset:
        reason = f"offsets {header.base_offset} to {header.last_offset} follow {next_offset - 1}"
        raise DamagedBatchError(reason, header)
    if log_end is not None and header.last_offset >= log_end:
        reason = f"offset {header.last_offset} lies beyond the end of the log, {log_end}"
        raise DamagedBatchError(reason, header)


def visible(
    data: bytes,
    headers: Iterable[BatchHeader],
    aborted: Sequence[AbortedTransaction] | None,
    on_bad: Callable[[bytes, BatchHeader, str], None],
) -> list[BatchHeader]:
    """Leave out control batches, and those of aborted transactions if the list is given.

    ``on_bad`` is told of a control batch that says nothing.
    """
    pending = sorted(aborted or (), key=lambda one: one.first_offset)
    rolled_back: set[int] = set()
    kept = []
    for header in headers:
        while pending and pending[0].first_offset <= header.last_offset:
            rolled_back.add(pending.pop(0).producer_id)
        if header.is_control:
            try:
                if _is_abort_marker(data, header):
                    rolled_back.discard(header.producer_id)
            except DamagedBatchError as error:
                on_bad(data, header, error.reason)
        elif not (header.is_transactional and header.producer_id in rolled_back):
            kept.append(header)
    return kept


def _is_abort_marker(data: bytes, header: BatchHeader) -> bool:
    """Look into a control batch: its one record's key is a version and a type."""
    if not header.record_count:
        # Compaction took the marker, and left the batch for its producer's sake.
        return False
    record = data[header.records_start : header.end]
    # In front of the key: length, attributes (one byte), time delta, offset delta, key's length.
    try:
        position = _skip_varint(record, 0) + 1
        for _ in range(3):
            position = _skip_varint(record, position)
    except IndexError:
        position = len(record)
    if position + 4 > len(record):
        raise DamagedBatchError("a control batch ends early", header)
    return int.from_bytes(record[position + 2 : position + 4], "big") == _ABORT_MARKER


def _skip_varint(data: bytes, position: int) -> int:
    while data[position] > 0x7F:
        position += 1
    return position + 1
