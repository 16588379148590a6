"""Records to Arrow columns, all records of a group of batches at once.

numpy reads each field of every record in one go; keys and values are then copied once, by Arrow,
from the fetched bytes to their columns. Every position is checked against its record's end before
anything is copied: damaged data raises ``BrokenRecordError``, it never becomes a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_flowkafka.boundaries import Bytes, Positions

Mask = npt.NDArray[np.bool_]

HEADER_TYPE = pa.struct([("key", pa.string()), ("value", pa.binary())])
SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
    ]
)
SCHEMA_WITH_HEADERS = SCHEMA.append(pa.field("headers", pa.list_(HEADER_TYPE)))

# Spark's timestamps are microseconds in 64 bits.
_TIMESTAMP_MS_MAX = (1 << 63) // 1000 - 1
_VARINT_BITS_MAX = 70
_HEADERS_MAX = 1 << 16


class BrokenRecordError(ValueError):
    """A record's fields do not fit into the record."""


class Spans(NamedTuple):
    """Where one field of every record lies; a null one is empty."""

    start: Positions
    end: Positions
    is_null: Mask


class Fields(NamedTuple):
    """The fields of every record, as positions and numbers."""

    time_delta: Positions
    offset_delta: Positions
    key: Spans
    value: Spans
    headers_start: Positions
    """Where the number of headers stands."""
    end: Positions


def read_fields(array: Bytes, starts: Positions, batch_ends: Positions) -> Fields:
    """Read what stands in the records that begin at the given positions.

    ``batch_ends`` has the end of each record's batch, so that no field leads out of it.
    """
    length, position = varints(array, starts)
    end = position + length
    if (length < 0).any() or (end > batch_ends).any():
        raise BrokenRecordError("a record has an impossible length")
    # One byte of attributes, which nothing uses.
    time_delta, position = varints(array, position + 1)
    offset_delta, position = varints(array, position)
    key, position = _span(array, position, end)
    value, position = _span(array, position, end)
    if (position >= end).any():
        raise BrokenRecordError("a record has no place for its headers")
    return Fields(time_delta, offset_delta, key, value, position, end)


def varints(array: Bytes, position: Positions) -> tuple[Positions, Positions]:
    """Return the zigzag numbers at some positions, and the positions behind them."""
    byte = array.take(position, mode="clip")
    more = byte > 0x7F
    position = position + 1
    if not more.any():
        small = byte.astype(np.int64)
        return (small >> 1) ^ -(small & 1), position
    value = (byte & 0x7F).astype(np.uint64)
    # The second byte for all records at once, which is cheaper than to pick those that have one.
    byte = array.take(position, mode="clip")
    value += np.where(more, byte & 0x7F, 0).astype(np.uint64) << np.uint64(7)
    position += more
    index = np.flatnonzero(more & (byte > 0x7F))
    shift = 14
    while len(index):
        if shift >= _VARINT_BITS_MAX:
            raise BrokenRecordError("a number has too many bytes")
        byte = array.take(position[index], mode="clip")
        value[index] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        position[index] += 1
        index = index[byte > 0x7F]
        shift += 7
    signed = value.view(np.int64)
    return (value >> np.uint64(1)).view(np.int64) ^ -(signed & 1), position


def _span(array: Bytes, position: Positions, end: Positions) -> tuple[Spans, Positions]:
    """Read a length and what is as long; -1 stands for null."""
    length, start = varints(array, position)
    is_null = length < 0
    if is_null.any():
        if (length < -1).any():
            raise BrokenRecordError("a field has an impossible length")
        length = np.where(is_null, 0, length)
    if (length > end - start).any():
        raise BrokenRecordError("a field is longer than its record")
    stop = start + length
    return Spans(start, stop, is_null), stop


def binary_column(data: pa.Buffer, spans: Spans, kind: pa.DataType | None = None) -> pa.Array:
    """Copy the bytes of one field of every record into a column."""
    kind = pa.binary() if kind is None else kind
    count = len(spans.start)
    if count == 0 or spans.is_null.all():
        return pa.nulls(count, kind)
    # An array whose every second element is a field, the others being what lies between them.
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2] = spans.start
    offsets[1::2] = spans.end
    both = pa.Array.from_buffers(kind, 2 * count - 1, [None, pa.py_buffer(offsets), data])
    taken = pc.take(both, _even_numbers(count), boundscheck=False)
    if not spans.is_null.any():
        return taken
    validity = pa.py_buffer(np.packbits(~spans.is_null, bitorder="little"))
    return pa.Array.from_buffers(kind, count, [validity, *taken.buffers()[1:]])


def number_column(
    numbers: npt.NDArray[np.int64] | npt.NDArray[np.int32], kind: pa.DataType
) -> pa.Array:
    """Return numbers as a column of a kind as wide as they are, without a copy.

    ``pa.array`` would do, but its first call imports pandas: a third of a second in each worker.
    """
    return pa.Array.from_buffers(
        kind, len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))]
    )


def constant_column(value: str | int, count: int) -> pa.Array:
    """Return a column of one text or 32-bit number.

    Built from its parts: ``pa.scalar`` would import pandas, as ``pa.array`` does.
    """
    if isinstance(value, int):
        return number_column(np.full(count, value, np.int32), pa.int32())
    text = value.encode()
    if count * len(text) > np.iinfo(np.int32).max:
        raise OverflowError("a column of one text is larger than two gigabytes")
    offsets = np.arange(0, (count + 1) * len(text), len(text), dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text * count)]
    )


_even = number_column(np.arange(0, 1 << 16, 2, dtype=np.int32), pa.int32())


def _even_numbers(count: int) -> pa.Array:
    global _even
    if count > len(_even):
        _even = number_column(np.arange(0, 2 * count, 2, dtype=np.int32), pa.int32())
    return _even[:count]


def timestamp_column(milliseconds: Positions) -> pa.Array:
    """Return Spark's timestamps; a time that they cannot hold is an error, as in Spark's source."""
    if (np.abs(milliseconds).view(np.uint64) > _TIMESTAMP_MS_MAX).any():
        raise BrokenRecordError("a timestamp is outside of what Spark can hold")
    return number_column(milliseconds * 1000, SCHEMA.field("timestamp").type)


def headers_column(data: pa.Buffer, array: Bytes, fields: Fields) -> pa.Array:
    """Return each record's headers as a list; null where there are none, as in Spark's source."""
    counts, position = varints(array, fields.headers_start)
    if (counts < 0).any() or counts.max(initial=0) > _HEADERS_MAX:
        raise BrokenRecordError("a record cannot have that many headers")
    rounds: list[tuple[Positions, Spans, Spans]] = []
    rows = np.flatnonzero(counts > 0)
    position = position.copy()
    while len(rows):
        key, behind_key = _span(array, position[rows], fields.end[rows])
        if key.is_null.any():
            raise BrokenRecordError("a header has no key")
        value, behind = _span(array, behind_key, fields.end[rows])
        rounds.append((rows, key, value))
        position[rows] = behind
        rows = rows[counts[rows] > len(rounds)]
    if (position != fields.end).any():
        raise BrokenRecordError("the headers of a record do not end where the record does")
    return _lists(data, counts, rounds)


def _lists(
    data: pa.Buffer, counts: Positions, rounds: list[tuple[Positions, Spans, Spans]]
) -> pa.Array:
    kind = SCHEMA_WITH_HEADERS.field("headers").type
    if not rounds:
        return pa.nulls(len(counts), kind)
    # Round k has the k-th header of every record; in the column a record's headers are neighbours.
    rows = np.concatenate([row for row, _, _ in rounds])
    order = np.argsort(rows, kind="stable")
    keys = _ordered([key for _, key, _ in rounds], order)
    values = _ordered([value for _, _, value in rounds], order)
    names = _texts(binary_column(data, keys))
    entries = pa.StructArray.from_arrays(
        [names, binary_column(data, values)], fields=list(HEADER_TYPE)
    )
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    validity = pa.py_buffer(np.packbits(counts > 0, bitorder="little"))
    return pa.Array.from_buffers(
        kind, len(counts), [validity, pa.py_buffer(offsets)], children=[entries]
    )


def _texts(names: pa.Array) -> pa.Array:
    """Return names as texts; what is not UTF-8 in them is replaced, as Java does it."""
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([name.decode(errors="replace") for name in names.to_pylist()], pa.string())


def _ordered(parts: list[Spans], order: Positions) -> Spans:
    return Spans(
        np.concatenate([part.start for part in parts])[order],
        np.concatenate([part.end for part in parts])[order],
        np.concatenate([part.is_null for part in parts])[order],
    )
