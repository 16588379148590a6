"""The format of a segment: one Arrow IPC stream of record batches, which any Arrow reads.

What is known about the segment stands in the schema's metadata: a JSON text, and a checksum of that
text and of the batches. Columns are ``value``, and run-end encoded ``timestamp`` and ``source``,
because lines that came together share both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import xxhash

from flowstate.errors import SnapshotCorruptError
from pyspark_flowsocket.errors import SpoolError
from pyspark_flowsocket.lines import LineCounts

__all__ = [
    "HEADER_GUESS_BYTES",
    "SEGMENT_FORMAT",
    "SOURCE_TYPE",
    "TIMESTAMP_TYPE",
    "SegmentHeader",
    "batch_of",
    "decode_header",
    "decode_segment",
    "encode_segment",
]

SEGMENT_FORMAT = 1
TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
SOURCE_TYPE = pa.string()
HEADER_GUESS_BYTES = 8192
"""As much of a file as holds the header of most segments."""

_HEADER_KEY, _CHECKSUM_KEY = b"flowsocket", b"flowsocket.checksum"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_SCHEMA = pa.schema(
    [
        ("value", pa.string()),
        ("timestamp", pa.run_end_encoded(pa.int32(), TIMESTAMP_TYPE)),
        ("source", pa.run_end_encoded(pa.int32(), SOURCE_TYPE)),
    ]
)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says about itself, and all totals up to its end."""

    number: int
    uid: str
    epoch: int
    """Each owner of the spool has the next one."""
    owner: str
    """Tells two owners apart, should a reply of the store be lost."""
    first_line: int
    rows: int
    is_claim: bool = False
    """Whether it only says that an owner has begun."""
    counts: LineCounts = field(default_factory=LineCounts)
    """Of the spool since it began."""
    partial_lines: int = 0
    """Unfinished lines that were dropped at the end of a connection, since the spool began."""
    senders: Mapping[str, int] = field(default_factory=dict)
    """For each sender of ``protocol=ack`` the lines received from it, since the spool began."""

    @property
    def end_line(self) -> int:
        """The number of the first line behind this segment."""
        return self.first_line + self.rows


def batch_of(
    values: pa.StringArray, run_ends: list[int], times_us: list[int], sources: list[str]
) -> pa.RecordBatch:
    """Return lines of which each run, up to its end, came at one time from one peer."""
    ends = pa.array(run_ends, pa.int32())
    times = pa.array(times_us, pa.int64()).cast(TIMESTAMP_TYPE)
    columns = [
        values,
        pa.RunEndEncodedArray.from_arrays(ends, times),
        pa.RunEndEncodedArray.from_arrays(ends, pa.array(sources, SOURCE_TYPE)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def encode_segment(header: SegmentHeader, batches: Sequence[pa.RecordBatch]) -> bytes:
    """Return the file of a segment."""
    rows = sum(batch.num_rows for batch in batches)
    if header.rows != rows:
        raise ValueError(f"the header tells of {header.rows} lines, there are {rows}")
    body = [batch.serialize() for batch in batches]
    text = json.dumps({"format": SEGMENT_FORMAT, **asdict(header)}, separators=(",", ":")).encode()
    metadata = {_HEADER_KEY: text, _CHECKSUM_KEY: _checksum(text, body).encode()}
    schema = _SCHEMA.with_metadata(metadata).serialize()
    return b"".join([schema, *body, _END_OF_STREAM])


def decode_header(where: str, data: bytes) -> SegmentHeader | None:
    """Read the header from the beginning of a file; None if more of the file is needed."""
    length = _schema_length(where, data)
    if len(data) < length:
        return None
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data[:length]))
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(where, "its schema", f"{error}") from error
    return _parsed(where, _entry(where, schema, _HEADER_KEY))


def decode_segment(where: str, data: bytes) -> tuple[SegmentHeader, list[pa.RecordBatch]]:
    """Read a file, and refuse it if a byte of it is not what was written."""
    length = _schema_length(where, data)
    header = decode_header(where, data)
    if header is None:
        raise _damaged(where, "the length", len(data))
    reader = pa.ipc.open_stream(pa.py_buffer(data))
    text = _entry(where, reader.schema, _HEADER_KEY)
    expected = _entry(where, reader.schema, _CHECKSUM_KEY).decode()
    body = memoryview(data)[length : len(data) - len(_END_OF_STREAM)]
    actual = _checksum(text, [body])
    if actual != expected:
        raise SnapshotCorruptError(where, what="the checksum", expected=expected, actual=actual)
    return header, list(reader)


def _checksum(text: bytes, body: Iterable[Any]) -> str:
    digest = xxhash.xxh3_64(text)
    for piece in body:
        digest.update(piece)
    return digest.hexdigest()


def _schema_length(where: str, data: bytes) -> int:
    """Return how many bytes the schema's message takes: a marker, a length, and that many."""
    if len(data) < 8 or data[:4] != b"\xff\xff\xff\xff":
        raise _damaged(where, "the beginning", data[:8])
    return 8 + int.from_bytes(data[4:8], "little")


def _entry(where: str, schema: pa.Schema, key: bytes) -> bytes:
    metadata = schema.metadata or {}
    if key not in metadata:
        raise _damaged(where, "the header", "absent")
    return bytes(metadata[key])


def _parsed(where: str, text: bytes) -> SegmentHeader:
    try:
        fields = json.loads(text)
        version = fields.pop("format")
    except (ValueError, KeyError, AttributeError) as error:
        raise _damaged(where, "the header", f"{error}") from error
    if version != SEGMENT_FORMAT:
        raise SpoolError(
            f"{where} has the segment format {version!r}, and this version reads format "
            f"{SEGMENT_FORMAT}. Use the version of flowspark that wrote it, or a new 'uid'"
        )
    try:
        counts = LineCounts(**fields.pop("counts"))
        return SegmentHeader(**fields, counts=counts)
    except (TypeError, KeyError) as error:
        raise _damaged(where, "the header", f"{error}") from error


def _damaged(where: str, what: str, actual: object) -> SnapshotCorruptError:
    return SnapshotCorruptError(where, what=what, expected="what was written", actual=actual)
