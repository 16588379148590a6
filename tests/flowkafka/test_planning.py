"""Offsets, limits and tasks: the arithmetic of Spark's source."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_flowkafka.offsets import (
    OffsetRange,
    Offsets,
    TopicPartition,
    from_json_value,
    names_of,
    parse_offsets,
    to_json_value,
)
from pyspark_flowkafka.planning import cap, is_delayed, limit_bytes, rate_limit, split

A, B, C = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)

partitions = st.builds(
    TopicPartition, st.text("abcxyz._-", min_size=1, max_size=4), st.integers(0, 9)
)
offsets = st.dictionaries(partitions, st.integers(0, 2**60), max_size=6)


def ranges(*sizes: int) -> list[OffsetRange]:
    return [
        OffsetRange(TopicPartition("t", number), 100, 100 + size)
        for number, size in enumerate(sizes)
    ]


def sizes_of(parts: list[OffsetRange]) -> list[tuple[int, int]]:
    return [(one.topic_partition.partition, one.size) for one in parts]


@given(offsets)
def test_offsets_survive_json(some: Offsets) -> None:
    assert from_json_value(to_json_value(some)) == some


def test_offsets_are_written_as_spark_does_and_in_order() -> None:
    assert list(to_json_value({C: 3, B: 2, A: 1}).items()) == [
        ("a", {"0": 1, "1": 2}),
        ("b", {"0": 3}),
    ]
    assert parse_offsets('{"a":{"1":2,"0":1}}') == {A: 1, B: 2}


def test_many_partitions_are_named_by_a_few() -> None:
    many = [TopicPartition("t", number) for number in range(15)]

    assert names_of(many).endswith("t-9 and 5 more")


def test_a_limit_is_shared_in_proportion() -> None:
    latest = {A: 1000, B: 3000}

    assert rate_limit(400, {A: 0, B: 0}, latest) == {A: 100, B: 300}
    assert rate_limit(10_000, {A: 0, B: 0}, latest) == latest


def test_a_small_partition_is_not_starved() -> None:
    assert rate_limit(10, {A: 0, B: 0}, {A: 1, B: 1_000_000}) == {A: 1, B: 9}


def test_without_anything_new_everything_is_taken_as_it_is() -> None:
    assert rate_limit(10, {A: 5, B: 9}, {A: 5, B: 7}) == {A: 5, B: 7}
    assert rate_limit(10, {A: 5}, {A: 5, C: 3}) == {A: 5, C: 3}


@given(offsets, st.data())
def test_a_limit_never_goes_beyond_the_end_nor_back(start: Offsets, data: st.DataObject) -> None:
    latest = {one: at + data.draw(st.integers(0, 10**6)) for one, at in start.items()}
    limit = data.draw(st.integers(1, 10**6))
    limited = rate_limit(limit, start, latest)

    assert limited.keys() == latest.keys()
    for one in latest:
        assert start[one] <= limited[one] <= latest[one]
        # Whoever has something new gets on: a query never stands still.
        assert (limited[one] > start[one]) == (latest[one] > start[one])
    assert sum(limited[one] - start[one] for one in start) <= limit + len(start)


def test_a_limit_in_bytes_takes_sizes_into_account() -> None:
    latest = {A: 1000, B: 1000}
    sizes = {A: 100.0, B: 300.0}

    assert limit_bytes(40_000, {A: 0, B: 0}, latest, sizes) == {A: 100, B: 100}
    assert limit_bytes(10**9, {A: 0, B: 0}, latest, sizes) == latest
    assert limit_bytes(1, {A: 0, B: 0}, latest, sizes) == {A: 1, B: 1}
    assert limit_bytes(1, {A: 0, B: 0}, latest, {A: 100.0}) == {A: 1, B: 1000}


@pytest.mark.parametrize(
    ("available", "waited_ms", "expected"),
    [(9, 0, True), (10, 0, False), (9, 1000, False), (0, 999, True)],
)
def test_a_batch_waits_for_more_records_but_not_for_ever(
    available: int, waited_ms: int, expected: bool
) -> None:
    delayed = is_delayed(available=available, minimum=10, waited_ms=waited_ms, delay_max_ms=1000)

    assert delayed is expected


def test_nothing_beyond_the_end_is_offered() -> None:
    ending = {A: 50, B: 50}

    assert cap({A: 100, B: 20}, ending, {A: 0, B: 0}) == {A: 50, B: 20}
    # A query that is already beyond it stays where it is.
    assert cap({A: 100}, ending, {A: 70}) == {A: 70}
    # What was lost is still reported as such, and new partitions are not begun.
    assert cap({A: 60, C: 9}, ending, {A: 70}) == {A: 60}


def test_each_partition_is_one_task_unless_more_are_wanted() -> None:
    parts = split(ranges(10, 0, 20, -5))

    assert sizes_of(parts) == [(0, 10), (2, 20)]


def test_large_partitions_are_split_and_small_ones_are_not() -> None:
    assert sizes_of(split(ranges(1, 100), min_partitions=4)) == [(0, 1), (1, 33), (1, 33), (1, 34)]
    assert sizes_of(split(ranges(10, 10), min_partitions=4)) == [(0, 5), (0, 5), (1, 5), (1, 5)]
    assert sizes_of(split(ranges(10, 10), min_partitions=2)) == [(0, 10), (1, 10)]


def test_no_task_has_more_records_than_allowed() -> None:
    assert sizes_of(split(ranges(10, 3), max_records=4)) == [(0, 3), (0, 3), (0, 4), (1, 3)]


@given(
    st.lists(st.integers(-5, 10**7), max_size=6),
    st.one_of(st.none(), st.integers(1, 50)),
    st.one_of(st.none(), st.integers(10**5, 10**8)),
)
def test_tasks_cover_each_offset_once(
    sizes: list[int], min_partitions: int | None, max_records: int | None
) -> None:
    whole = ranges(*sizes)
    parts = split(whole, min_partitions=min_partitions, max_records=max_records)

    for one in whole:
        pieces = [part for part in parts if part.topic_partition == one.topic_partition]
        assert sum(piece.size for piece in pieces) == max(0, one.size)
        ends = [one.start, *(piece.until for piece in pieces)]
        assert [piece.start for piece in pieces] == ends[:-1]
    if max_records is not None:
        assert all(part.size <= max_records for part in parts)
