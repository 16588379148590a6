"""Record sets written and read by kafka-python, to compare ours with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from kafka.record.memory_records import MemoryRecords, MemoryRecordsBuilder

from pyspark_flowkafka.batches import AbortedTransaction
from pyspark_flowkafka.records import BadBatch, Decoder, Fetched, scan_fetch

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
LOG_APPEND_TIME = 0x08
TIME_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Record:
    key: bytes | None = None
    value: bytes | None = None
    timestamp: int = TIME_MS
    headers: tuple[tuple[str, bytes | None], ...] = ()


def built(
    records: Sequence[Record],
    *,
    codec: int = 0,
    base_offset: int = 0,
    producer_id: int = -1,
    is_transactional: bool = False,
) -> bytes:
    """Return one batch as kafka-python's producer writes it."""
    builder = MemoryRecordsBuilder(
        2,
        codec,
        1 << 26,
        transactional=is_transactional,
        producer_id=producer_id,
        producer_epoch=0 if producer_id >= 0 else -1,
        base_sequence=0 if producer_id >= 0 else -1,
    )
    for one in records:
        builder.append(
            timestamp=one.timestamp, key=one.key, value=one.value, headers=list(one.headers)
        )
    builder.close()
    return at_offset(bytes(builder.buffer()), base_offset)


def at_offset(batch: bytes, offset: int) -> bytes:
    """Move a batch in the log; its checksum does not cover that."""
    return offset.to_bytes(8, "big") + batch[8:]


def with_header(batch: bytes, **fields: int) -> bytes:
    """Change fields of a header and make the checksum right again."""
    import google_crc32c

    places = {"attributes": (21, 2), "last_delta": (23, 4), "base_ms": (27, 8), "max_ms": (35, 8)}
    places |= {"count": (57, 4)}
    raw = bytearray(batch)
    for name, value in fields.items():
        start, size = places[name]
        raw[start : start + size] = value.to_bytes(size, "big", signed=True)
    raw[17:21] = google_crc32c.value(bytes(raw[21:])).to_bytes(4, "big")
    return bytes(raw)


@dataclass
class Decoded:
    """What came out: rows as Python values, where reading goes on, what was bad."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    next_offset: int = 0
    bad: list[BadBatch] = field(default_factory=list)
    damage: str | None = None


def decoded(
    data: bytes,
    *,
    start: int = 0,
    until: int = 1 << 60,
    log_end: int | None = None,
    aborted: Sequence[AbortedTransaction] | None = None,
) -> Decoded:
    """Decode a fetch as a task would."""
    found = Decoded()
    decoder = Decoder("t", 3, start, until, True, found.bad.append)
    scanned = scan_fetch(Fetched(data, start, log_end, aborted))
    for batch in decoder.decode(scanned):
        batch.validate(full=True)
        assert batch.schema.equals(decoder.schema)
        found.rows += batch.to_pylist()
    found.next_offset = scanned.next_offset
    found.damage = scanned.damage.reason if scanned.damage else None
    return found


def read_by_kafka_python(data: bytes) -> list[dict[str, Any]]:
    """Return the same rows, read record by record by kafka-python."""
    rows = []
    records = MemoryRecords(data)
    while records.has_next():
        batch = records.next_batch()
        assert batch is not None
        for one in batch:
            rows.append(
                {
                    "key": one.key,
                    "value": one.value,
                    "topic": "t",
                    "partition": 3,
                    "offset": one.offset,
                    "timestamp": pa.scalar(
                        one.timestamp * 1000, pa.timestamp("us", tz="UTC")
                    ).as_py(),
                    "timestampType": one.timestamp_type,
                    "headers": [{"key": k, "value": v} for k, v in one.headers] or None,
                }
            )
    return rows
