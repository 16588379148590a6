"""What a fetch brings to what Spark reads: bytes of a partition's log to Arrow record batches.

A ``Decoder`` is for one range of one partition. It checks each batch, leaves out control batches
and aborted transactions, unpacks, and decodes many batches together into one Arrow batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pyspark_flowkafka import columns
from pyspark_flowkafka.batches import (
    AbortedTransaction,
    BatchHeader,
    DamagedBatchError,
    check_crc,
    check_offsets,
    read_header,
    visible,
)
from pyspark_flowkafka.boundaries import BrokenChainError, Bytes, Positions, record_starts
from pyspark_flowkafka.codecs import Codec, CodecError, decompress
from pyspark_flowkafka.columns import BrokenRecordError

GROUP_BYTES = 8 << 20
"""Batches are decoded together up to about this size: one Arrow batch for Spark."""

ARENA_BYTES = 64 << 20
"""What batches unpack to is decoded as soon as it is that much, however much was expected."""

RECORDS_MAX = 1 << 24
"""One batch may not have more records: each takes some hundred bytes while it is decoded."""

_BROKEN = (CodecError, BrokenChainError, BrokenRecordError, pa.ArrowInvalid, OverflowError)


@dataclass(frozen=True, slots=True)
class BadBatch:
    """A batch that could not be decoded: its offsets and bytes, and why."""

    first_offset: int
    last_offset: int
    reason: str
    data: bytes = field(repr=False)


OnBadBatch = Callable[[BadBatch], None]
"""What to do with it: raise, or return and thereby skip it."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a broker sent for one partition, from an offset on."""

    data: bytes = field(repr=False)
    fetch_offset: int
    log_end: int | None = None
    """The end of what may be read, if the broker said so."""
    aborted: Sequence[AbortedTransaction] | None = None
    """Aborted transactions in it; None where uncommitted records are read as well."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Why a fetch could not be followed further, and where it can go on if that is known."""

    reason: str
    next_offset: int | None = None


@dataclass(frozen=True, slots=True)
class Scanned:
    """The sound batches at the beginning of a fetch."""

    fetched: Fetched
    headers: tuple[BatchHeader, ...]
    next_offset: int
    """Where the next fetch goes on."""
    damage: Damage | None = None
    """What follows the last header; None where the data simply ended."""


def scan_fetch(fetched: Fetched, *, until: int | None = None, check_crcs: bool = True) -> Scanned:
    """Find the complete batches of a fetch, up to the first one that is damaged.

    What begins at ``until`` or behind it is not looked at.
    """
    headers: list[BatchHeader] = []
    position, next_offset = 0, fetched.fetch_offset
    damage = None
    try:
        while (header := read_header(fetched.data, position)) is not None:
            if until is not None and header.base_offset >= until and headers:
                break
            check_offsets(
                header, next_offset=next_offset, is_first=not headers, log_end=fetched.log_end
            )
            if check_crcs:
                check_crc(fetched.data, header)
            headers.append(header)
            position, next_offset = header.end, header.last_offset + 1
    except DamagedBatchError as error:
        damage = Damage(error.reason, _behind(fetched, error.header, next_offset))
    return Scanned(fetched, tuple(headers), next_offset, damage)


def _behind(fetched: Fetched, damaged: BatchHeader | None, next_offset: int) -> int | None:
    """Return where to go on behind a damaged batch.

    Nothing that it says is trusted, its own offsets least of all. If its length leads to a sound
    batch, that one tells.
    """
    if damaged is None:
        return None
    try:
        header = read_header(fetched.data, damaged.end)
        if header is None:
            # Or if there is no other batch behind it.
            return fetched.log_end if damaged.last_offset + 1 == fetched.log_end else None
        check_offsets(header, next_offset=next_offset, is_first=False, log_end=fetched.log_end)
        check_crc(fetched.data, header)
    except DamagedBatchError:
        return None
    return header.base_offset


@dataclass(slots=True)
class Decoder:
    """Turns fetches of one partition into Arrow batches with the records of [start, until)."""

    topic: str
    partition: int
    start: int
    until: int
    include_headers: bool
    on_bad_batch: OnBadBatch
    _constants: dict[str | int, pa.Array] = field(default_factory=dict, repr=False)

    @property
    def schema(self) -> pa.Schema:
        return columns.SCHEMA_WITH_HEADERS if self.include_headers else columns.SCHEMA

    def decode(self, scanned: Scanned) -> Iterator[pa.RecordBatch]:
        """Yield the records of a fetch that are in the range."""
        data = scanned.fetched.data
        for group in self._groups(data, self._wanted(scanned)):
            left = group
            while left:
                try:
                    arena, spans = _arena(data, left)
                    batch = self._decode_group(arena, spans, left[: len(spans)])
                except _BROKEN:
                    yield from self._decode_apart(data, left)
                    break
                left = left[len(spans) :]
                if batch.num_rows:
                    yield batch

    def _wanted(self, scanned: Scanned) -> list[BatchHeader]:
        fetched = scanned.fetched
        return [
            header
            for header in visible(fetched.data, scanned.headers, fetched.aborted, self._bad)
            if header.last_offset >= self.start
            and header.base_offset < self.until
            and header.record_count
        ]

    def _groups(self, data: bytes, headers: Sequence[BatchHeader]) -> Iterator[list[BatchHeader]]:
        group: list[BatchHeader] = []
        size = 0
        for header in headers:
            # What a compressed batch unpacks to is not known yet; four times is usual.
            cost = (header.end - header.start) * (1 if header.codec == Codec.NONE else 4)
            if group and size + cost > GROUP_BYTES:
                yield group
                group, size = [], 0
            group.append(header)
            size += cost
        if group:
            yield group

    def _decode_apart(self, data: bytes, group: Sequence[BatchHeader]) -> Iterator[pa.RecordBatch]:
        """Find out which of the batches is the bad one, and yield the others."""
        for header in group:
            try:
                batch = self._decode_group(*_arena(data, [header]), [header])
            except _BROKEN as error:
                self._bad(data, header, str(error))
            else:
                if batch.num_rows:
                    yield batch

    def _bad(self, data: bytes, header: BatchHeader, reason: str) -> None:
        raw = data[header.start : header.end]
        self.on_bad_batch(BadBatch(header.base_offset, header.last_offset, reason, raw))

    def _decode_group(
        self, arena: bytes, spans: Sequence[tuple[int, int]], group: Sequence[BatchHeader]
    ) -> pa.RecordBatch:
        if len(arena) > np.iinfo(np.int32).max:
            raise BrokenRecordError("a batch is larger than two gigabytes")
        array = np.frombuffer(arena, np.uint8)
        counts = [header.record_count for header in group]
        starts = record_starts(arena, array, spans, counts)
        if max(counts) > RECORDS_MAX:
            raise BrokenRecordError(f"a batch has more than {RECORDS_MAX} records")
        batch_ends = np.repeat(np.array([end for _, end in spans], np.int64), counts)
        fields = columns.read_fields(array, starts, batch_ends)
        # What one record says to be its end is where the next one begins, or the batch ends.
        if not np.array_equal(fields.end, _expected_ends(starts, spans, counts)):
            raise BrokenRecordError("a record does not end where the next one begins")
        bases = _column(group, "base_offset")
        offsets = fields.offset_delta + np.repeat(bases, counts)
        last_deltas = np.repeat(_column(group, "last_offset") - bases, counts)
        _check_offsets(offsets, fields.offset_delta, last_deltas)
        kept = slice(
            int(np.searchsorted(offsets, self.start)), int(np.searchsorted(offsets, self.until))
        )
        times, time_types = _times(group, counts, fields.time_delta)
        kept_fields = _cut(fields, kept)
        return self._assemble(
            arena, array, kept_fields, offsets[kept], times[kept], time_types[kept]
        )

    def _assemble(
        self,
        arena: bytes,
        array: Bytes,
        fields: columns.Fields,
        offsets: Positions,
        times: Positions,
        time_types: Positions,
    ) -> pa.RecordBatch:
        data = pa.py_buffer(arena)
        count = len(offsets)
        arrays = [
            columns.binary_column(data, fields.key),
            columns.binary_column(data, fields.value),
            self._constant(self.topic, count),
            self._constant(self.partition, count),
            columns.number_column(offsets, pa.int64()),
            columns.timestamp_column(times),
            self._time_types(time_types),
        ]
        if self.include_headers:
            arrays.append(columns.headers_column(data, array, fields))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _time_types(self, kinds: Positions) -> pa.Array:
        if len(kinds) == 0 or (kinds == kinds[0]).all():
            return self._constant(int(kinds[0]) if len(kinds) else 0, len(kinds))
        return columns.number_column(kinds.astype(np.int32), pa.int32())

    def _constant(self, value: str | int, count: int) -> pa.Array:
        """Return a column of one value; made once, and cut to length."""
        cached = self._constants.get(value)
        if cached is None or len(cached) < count:
            cached = columns.constant_column(value, max(count, 1024))
            self._constants[value] = cached
        return cached[:count]


def _arena(data: bytes, group: Sequence[BatchHeader]) -> tuple[bytes, list[tuple[int, int]]]:
    """Return one stretch of bytes with the unpacked records of batches, and where each lies.

    It has all batches, or the first ones if they unpack to far more than is usual.
    """
    if all(header.codec == Codec.NONE for header in group):
        # As they came: the headers between them do no harm.
        return data, [(header.records_start, header.end) for header in group]
    pieces, spans = [], []
    position = 0
    for header in group:
        piece = decompress(header.codec, data[header.records_start : header.end])
        pieces.append(piece)
        spans.append((position, position + len(piece)))
        position += len(piece)
        if position >= ARENA_BYTES:
            break
    return pieces[0] if len(pieces) == 1 else b"".join(pieces), spans


def _expected_ends(
    starts: Positions, spans: Sequence[tuple[int, int]], counts: Sequence[int]
) -> Positions:
    ends = np.empty(len(starts), np.int64)
    ends[:-1] = starts[1:]
    last = np.cumsum(counts) - 1
    ends[last] = [end for _, end in spans]
    return ends


def _column(group: Sequence[BatchHeader], name: str) -> Positions:
    return np.array([getattr(header, name) for header in group], np.int64)


def _check_offsets(offsets: Positions, deltas: Positions, last_deltas: Positions) -> None:
    # Deltas are compared, not offsets: a sum may be beyond 64 bits, and small again.
    if (deltas < 0).any() or (deltas > last_deltas).any():
        raise BrokenRecordError("a record's offset is outside of its batch")
    if (np.diff(offsets) <= 0).any():
        raise BrokenRecordError("the offsets of records do not ascend")


def _times(
    group: Sequence[BatchHeader], counts: Sequence[int], deltas: Positions
) -> tuple[Positions, Positions]:
    """Return when records were made, or appended, and which of the two it is (0 or 1)."""
    appended = np.array([header.is_log_append_time for header in group])
    created = deltas + np.repeat(_column(group, "base_timestamp"), counts)
    kinds = np.repeat(appended.astype(np.int64), counts)
    if not appended.any():
        return created, kinds
    return np.where(kinds == 1, np.repeat(_column(group, "max_timestamp"), counts), created), kinds


def _cut(fields: columns.Fields, kept: slice) -> columns.Fields:
    def cut(spans: columns.Spans) -> columns.Spans:
        return columns.Spans(spans.start[kept], spans.end[kept], spans.is_null[kept])

    return columns.Fields(
        fields.time_delta[kept],
        fields.offset_delta[kept],
        cut(fields.key),
        cut(fields.value),
        fields.headers_start[kept],
        fields.end[kept],
    )
