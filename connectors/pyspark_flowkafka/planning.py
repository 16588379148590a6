"""Admission control and the division of ranges into tasks: pure functions.

The arithmetic is that of Spark's own source, so that the same options give batches and tasks of
the same size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pyspark_flowkafka.offsets import OFFSET_MAX, OffsetRange, Offsets, TopicPartition


def backlog(start: Mapping[TopicPartition, int], latest: Mapping[TopicPartition, int]) -> Offsets:
    """Return how many offsets lie ahead in each partition; what went backwards counts as none."""
    return {
        partition: max(0, end - start[partition])
        for partition, end in latest.items()
        if partition in start
    }


def rate_limit(
    limit: int, start: Mapping[TopicPartition, int], latest: Mapping[TopicPartition, int]
) -> Offsets:
    """Return how far a batch goes if it may have so many offsets, in proportion to what is there.

    ``start`` has to name the beginning of new partitions too. A partition without one, or without
    anything new, is taken to its end.
    """
    sizes = {
        partition: end - start[partition]
        for partition, end in latest.items()
        if partition in start and end > start[partition]
    }
    total = sum(sizes.values())
    limited = dict(latest)
    for partition, size in sizes.items():
        share = limit * (size / total)
        # A partition with little in it is not starved.
        whole = math.ceil(share) if share < 1 else math.floor(share)
        reached = min(start[partition] + whole, OFFSET_MAX)
        limited[partition] = min(latest[partition], reached)
    return limited


def is_delayed(*, available: int, minimum: int, waited_ms: float, delay_max_ms: int) -> bool:
    """Say whether a batch waits for more records, as ``minOffsetsPerTrigger`` asks for."""
    return waited_ms < delay_max_ms and available < minimum


def limit_bytes(
    limit: int,
    start: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
    bytes_per_offset: Mapping[TopicPartition, float],
) -> Offsets:
    """Return how far a batch goes if its records may have about so many bytes.

    Each partition gets a share in proportion to the bytes that lie ahead in it, and at least one
    offset. Where nothing is known about a partition's size, it is taken as it is.
    """
    ahead = {
        partition: (end - start[partition]) * bytes_per_offset[partition]
        for partition, end in latest.items()
        if partition in start and end > start[partition] and partition in bytes_per_offset
    }
    total = sum(ahead.values())
    limited = dict(latest)
    if total <= limit:
        return limited
    for partition, size in ahead.items():
        offsets = math.floor(limit * (size / total) / max(bytes_per_offset[partition], 1e-9))
        reached = start[partition] + max(1, offsets)
        limited[partition] = min(latest[partition], reached)
    return limited


def cap(
    offsets: Mapping[TopicPartition, int],
    ending: Mapping[TopicPartition, int],
    start: Mapping[TopicPartition, int],
) -> Offsets:
    """Return offsets that do not go beyond the ending ones, nor back behind the start.

    A partition for which no end was given is not offered beyond where it is.
    """
    capped: Offsets = {}
    for partition, offset in offsets.items():
        if partition in ending:
            reached = min(offset, ending[partition])
            capped[partition] = max(reached, min(start.get(partition, 0), offset))
        elif partition in start:
            capped[partition] = min(offset, start[partition])
    return capped


def split(
    ranges: Sequence[OffsetRange],
    *,
    min_partitions: int | None = None,
    max_records: int | None = None,
) -> list[OffsetRange]:
    """Divide ranges into tasks; empty and reversed ones are dropped."""
    parts = [one for one in ranges if one.size > 0]
    if max_records is not None:
        parts = [
            piece for one in parts for piece in _divide(one, math.ceil(one.size / max_records))
        ]
    if min_partitions is None or len(parts) >= min_partitions:
        return parts
    return _split_large(parts, min_partitions)


def _split_large(ranges: Sequence[OffsetRange], min_partitions: int) -> list[OffsetRange]:
    """Divide large ranges until there are about so many; small ones stay whole."""
    total = sum(one.size for one in ranges)
    whole = [one for one in ranges if _part_count(one.size, total, min_partitions) == 1]
    rest = total - sum(one.size for one in whole)
    wanted = max(min_partitions - len(whole), 1)
    kept = set(whole)
    return [
        piece
        for one in ranges
        for piece in _divide(one, 1 if one in kept else _part_count(one.size, rest, wanted))
    ]


def _part_count(size: int, total: int, wanted: int) -> int:
    # Java's round: halves go up.
    return max(math.floor(size / total * wanted + 0.5), 1)


def _divide(one: OffsetRange, parts: int) -> list[OffsetRange]:
    pieces = []
    start, left = one.start, one.size
    for index in range(parts):
        size = left // (parts - index)
        left -= size
        if size:
            pieces.append(OffsetRange(one.topic_partition, start, start + size))
        start += size
    return pieces
