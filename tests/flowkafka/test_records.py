"""The decoder against kafka-python's reader, and against damage of every kind."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_flowkafka import records
from pyspark_flowkafka.batches import AbortedTransaction
from pyspark_flowkafka.boundaries import record_starts
from pyspark_flowkafka.records import Fetched, scan_fetch

from .record_sets import (
    CODECS,
    LOG_APPEND_TIME,
    TIME_MS,
    Record,
    at_offset,
    built,
    decoded,
    read_by_kafka_python,
    with_header,
)

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)

texts = st.one_of(st.none(), st.binary(max_size=40), st.binary(min_size=60, max_size=200))
some_records = st.builds(
    Record,
    key=texts,
    value=texts,
    timestamp=st.integers(TIME_MS - 10**7, TIME_MS + 10**10),
    headers=st.lists(
        st.tuples(st.text(max_size=8), st.one_of(st.none(), st.binary(max_size=9))), max_size=3
    ).map(tuple),
)
some_batches = st.lists(st.lists(some_records, min_size=1, max_size=30), min_size=1, max_size=5)


def log_of(batches: list[list[Record]], codecs: list[int], gaps: list[int]) -> bytes:
    log, offset = b"", 0
    for records_, codec, gap in zip(batches, codecs, gaps, strict=True):
        log += built(records_, codec=codec, base_offset=offset)
        offset += len(records_) + gap
    return log


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    batches = draw(some_batches)
    count = len(batches)
    codecs = draw(st.lists(st.sampled_from(range(5)), min_size=count, max_size=count))
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 1000]), min_size=count, max_size=count))
    return log_of(batches, codecs, gaps)


# The right answer


@settings(max_examples=150, deadline=None)
@given(logs())
def test_random_record_sets_decode_as_kafka_python_reads_them(log: bytes) -> None:
    found = decoded(log)

    assert found.rows == read_by_kafka_python(log)
    assert not found.bad


@every_codec
def test_many_small_batches_decode_as_few_large_ones(codec: int) -> None:
    rng = random.Random(5)
    many = [
        [
            Record(rng.randbytes(8), rng.randbytes(rng.randrange(90)))
            for _ in range(rng.randrange(1, 9))
        ]
        for _ in range(300)
    ]
    log = log_of(many, [codec] * 300, [0] * 300)

    assert decoded(log).rows == read_by_kafka_python(log)


@every_codec
def test_runs_of_one_size_are_leapt_over_without_a_difference(codec: int) -> None:
    same = [Record(b"12345678", b"x" * 100) for _ in range(3000)]
    mixed = same[:500] + [Record(None, b"y" * size) for size in range(0, 400, 3)] + same[:500]
    log = built(same, codec=codec) + built(mixed, codec=codec, base_offset=3000)

    assert decoded(log).rows == read_by_kafka_python(log)


def test_records_of_every_length_of_a_length() -> None:
    sizes = [0, 1, 50, 55, 56, 57, 58, 59, 60, 8170, 8180, 8185, 8190, 8200, 1_048_570, 1_048_600]
    log = built([Record(None, bytes(size)) for size in sizes for _ in range(3)])

    assert decoded(log).rows == read_by_kafka_python(log)


def test_nulls_and_empty_texts_are_told_apart() -> None:
    rows = decoded(built([Record(None, b""), Record(b"", None), Record(b"k", b"v")])).rows

    assert [(row["key"], row["value"]) for row in rows] == [(None, b""), (b"", None), (b"k", b"v")]


def test_a_column_of_nulls_is_one() -> None:
    rows = decoded(built([Record(None, b"v")] * 3)).rows

    assert [row["key"] for row in rows] == [None] * 3


def test_time_may_run_backwards_and_lie_before_1970() -> None:
    times = [TIME_MS, TIME_MS - 5000, 0, -1, TIME_MS + 10**9]
    log = built([Record(b"k", b"v", timestamp=time) for time in times])

    assert decoded(log).rows == read_by_kafka_python(log)


def test_log_append_time_is_the_batchs_own() -> None:
    log = with_header(
        built([Record(b"k", b"v"), Record(b"k", b"w", timestamp=TIME_MS + 9)]),
        attributes=LOG_APPEND_TIME,
        max_ms=TIME_MS + 77,
    )
    rows = decoded(log).rows

    assert rows == read_by_kafka_python(log)
    assert {row["timestampType"] for row in rows} == {1}
    assert {row["timestamp"].timestamp() * 1000 for row in rows} == {TIME_MS + 77}


def test_both_kinds_of_time_may_be_in_one_fetch() -> None:
    appended = with_header(built([Record(b"k", b"v")], base_offset=1), attributes=LOG_APPEND_TIME)
    rows = decoded(built([Record(b"k", b"v")]) + appended).rows

    assert [row["timestampType"] for row in rows] == [0, 1]


def test_headers_may_repeat_and_have_null_values() -> None:
    headers = (("a", b"1"), ("a", None), ("", b""), ("ü", b"\x00"))
    log = built([Record(b"k", b"v", headers=headers), Record(b"k", b"v"), Record(headers=headers)])

    assert decoded(log).rows == read_by_kafka_python(log)


def test_a_headers_name_that_is_not_utf_8_is_readable_all_the_same() -> None:
    raw = bytearray(built([Record(b"k", b"v", headers=(("name", b"1"),)), Record(b"k", b"w")]))
    raw[raw.index(b"name") + 1] = 0xE9
    rows = decoded(with_header(bytes(raw))).rows

    assert [row["headers"] for row in rows] == [[{"key": "n\ufffdme", "value": b"1"}], None]


@settings(max_examples=60, deadline=None)
@given(logs(), st.integers(0, 3000), st.integers(0, 3000))
def test_a_range_has_exactly_its_records(log: bytes, start: int, size: int) -> None:
    rows = [row for row in read_by_kafka_python(log) if start <= row["offset"] < start + size]
    # A broker sends the batch that holds the offset, or the next one.
    data = log
    while (headers := scan_fetch(Fetched(data, 0)).headers) and headers[0].last_offset < start:
        data = data[headers[0].end :]

    assert decoded(data, start=start, until=start + size).rows == rows


def test_a_compacted_batch_keeps_its_offsets() -> None:
    # Compaction leaves a batch's last offset as it was, however few records remain.
    log = with_header(built([Record(b"a", b"1"), Record(b"b", b"2")]), last_delta=9)
    log += built([Record(b"c", b"3")], base_offset=10)
    found = decoded(log)

    assert [row["offset"] for row in found.rows] == [0, 1, 10]
    assert found.next_offset == 11


def test_a_batch_that_compaction_emptied_is_passed() -> None:
    empty = with_header(built([Record(b"a", b"1")])[:61], count=0, last_delta=4)
    empty = empty[:8] + (61 - 12).to_bytes(4, "big") + empty[12:]
    found = decoded(with_header(empty) + built([Record(b"c", b"3")], base_offset=5))

    assert [row["offset"] for row in found.rows] == [5]
    assert found.damage is None


@pytest.mark.parametrize("is_commit", [True, False], ids=["commit", "abort"])
def test_a_marker_that_compaction_emptied_is_passed(is_commit: bool) -> None:
    empty = emptied(marker(1, 7, is_commit=is_commit))
    log = transactional(0, 7, b"a") + empty + transactional(2, 7, b"b")

    assert [row["offset"] for row in decoded(log).rows] == [0, 2]
    found = decoded(transactional(0, 7, b"a") + empty)
    assert ([row["offset"] for row in found.rows], found.bad) == ([0], [])
    assert found.next_offset == 2


def emptied(batch: bytes) -> bytes:
    """Return what compaction leaves of a batch whose records are gone."""
    return with_header(batch[:8] + (61 - 12).to_bytes(4, "big") + batch[12:61], count=0)


def test_a_few_large_batches_among_many_small_ones_cost_no_more_than_themselves() -> None:
    sizes = [*[20_000] * 5, *[1] * 2000, 3]
    log, offset = b"", 0
    for size in sizes:
        log += built([Record(None, b"%d" % (n % 99)) for n in range(size)], base_offset=offset)
        offset += size
    headers = scan_fetch(Fetched(log, 0)).headers
    spans = [(one.records_start, one.end) for one in headers]
    array = np.frombuffer(log, np.uint8)
    tracemalloc.start()
    starts = record_starts(log, array, spans, [one.record_count for one in headers])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    expected = [
        record_starts(log, array, [span], [size]) for span, size in zip(spans, sizes, strict=True)
    ]
    assert np.array_equal(starts, np.concatenate(expected))
    assert peak_bytes < 30 << 20


def test_large_fetches_become_several_arrow_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "GROUP_BYTES", 1000)
    log = log_of([[Record(b"k", b"v" * 300)] * 3] * 5, [0, 4, 0, 3, 0], [0] * 5)

    assert decoded(log).rows == read_by_kafka_python(log)


def test_what_unpacks_to_far_more_than_usual_is_decoded_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "ARENA_BYTES", 2_000_000)
    log = log_of([[Record(None, bytes(900_000))]] * 7, [4] * 7, [0] * 7)
    decoder = records.Decoder("t", 3, 0, 7, False, lambda bad: pytest.fail(bad.reason))
    batches = list(decoder.decode(scan_fetch(Fetched(log, 0))))

    assert [batch.num_rows for batch in batches] == [3, 3, 1]
    assert [n for batch in batches for n in batch.column("offset").to_pylist()] == list(range(7))


# Transactions


def transactional(offset: int, producer: int, *values: bytes) -> bytes:
    return built(
        [Record(b"k", value) for value in values],
        base_offset=offset,
        producer_id=producer,
        is_transactional=True,
    )


def marker(offset: int, producer: int, *, is_commit: bool) -> bytes:
    key = b"\x00\x00" + (b"\x00\x01" if is_commit else b"\x00\x00")
    batch = built(
        [Record(key, b"\x00\x00\x00\x00\x00\x00")],
        base_offset=offset,
        producer_id=producer,
        is_transactional=True,
    )
    return with_header(batch, attributes=0x30)


def test_aborted_transactions_are_dropped_and_the_producers_next_one_is_not() -> None:
    log = transactional(0, 7, b"a1", b"a2") + transactional(2, 8, b"c1")
    log += marker(3, 7, is_commit=False) + transactional(4, 7, b"c2")
    log += marker(5, 8, is_commit=True) + marker(6, 7, is_commit=True)
    log += built([Record(b"k", b"plain")], base_offset=7)

    found = decoded(log, aborted=[AbortedTransaction(7, 0)])

    assert [row["value"] for row in found.rows] == [b"c1", b"c2", b"plain"]
    assert [row["offset"] for row in found.rows] == [2, 4, 7]
    assert found.next_offset == 8


def test_without_read_committed_only_markers_are_dropped() -> None:
    log = transactional(0, 7, b"a") + marker(1, 7, is_commit=False)

    assert [row["value"] for row in decoded(log).rows] == [b"a"]
    assert decoded(log).next_offset == 2


# Damage


def test_a_batch_that_is_cut_off_is_left_for_the_next_fetch() -> None:
    log = built([Record(b"k", b"v")] * 5) + built([Record(b"k", b"w")] * 5, base_offset=5)
    for size in range(len(log)):
        found = decoded(log[:size])

        expected = [] if size < len(log) // 2 else read_by_kafka_python(log[: len(log) // 2])
        assert found.rows == expected
        assert found.next_offset == len(expected)
        assert found.damage is None


UNCHECKED = {*range(8), *range(12, 16)}
"""The base offset and the leader's epoch: Kafka's checksum does not cover them."""


@every_codec
def test_a_flipped_bit_is_noticed_or_harmless(codec: int) -> None:
    log = built(
        [Record(b"k%d" % i, b"v" * i, headers=(("h", b"x"),)) for i in range(20)], codec=codec
    )
    rows = read_by_kafka_python(log)
    for position in range(len(log)):
        if position in UNCHECKED:
            continue
        for bit in range(8):
            flipped = bytearray(log)
            flipped[position] ^= 1 << bit
            found = decoded(bytes(flipped), log_end=20)

            assert found.rows in ([], rows)
            assert found.rows == [] or not found.damage


@settings(max_examples=200, deadline=None)
@given(logs(), st.data())
def test_damage_anywhere_gives_no_wrong_record(log: bytes, data: st.DataObject) -> None:
    rows = {row["offset"]: row for row in read_by_kafka_python(log)}
    damaged = bytearray(log)
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(damaged)))
    found = decoded(bytes(damaged[:cut]), log_end=max(rows) + 1)

    # A base offset that was hit moves its records; everything else about them is checked.
    values = {(row["key"], row["value"], row["timestamp"]) for row in rows.values()}
    for row in found.rows:
        assert (row["key"], row["value"], row["timestamp"]) in values
    assert [row["offset"] for row in found.rows] == sorted({row["offset"] for row in found.rows})


@settings(max_examples=200, deadline=None)
@given(logs(), st.data())
def test_broken_records_with_a_right_checksum_are_an_error(log: bytes, data: st.DataObject) -> None:
    """A producer may write nonsense and a checksum that fits; nothing of that is trusted."""
    first = scan_fetch(Fetched(log, 0)).headers[0]
    raw = bytearray(log[: first.end])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(61, len(raw) - 1))] = data.draw(st.integers(0, 255))
    found = decoded(with_header(bytes(raw)))

    assert len(found.rows) in (0, first.record_count)
    assert all(0 <= row["offset"] <= first.last_offset for row in found.rows)
    assert len(found.bad) == (0 if found.rows else 1)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_end_in_an_answer(data: bytes) -> None:
    assert decoded(data).rows == []


def test_old_message_formats_are_named() -> None:
    old = bytearray(built([Record(b"k", b"v")]))
    old[16] = 1

    assert "message format 1" in (decoded(bytes(old)).damage or "")


def test_an_offset_beyond_the_log_is_damage() -> None:
    found = decoded(at_offset(built([Record(b"k", b"v")]), 1 << 40), log_end=9)

    assert found.rows == []
    assert "beyond the end" in (found.damage or "")


def test_offsets_that_go_back_are_damage() -> None:
    log = built([Record(b"k", b"v")] * 4) + built([Record(b"k", b"w")], base_offset=2)
    found = decoded(log)

    assert len(found.rows) == 4
    assert found.next_offset == 4
    assert found.damage


def test_behind_a_damaged_batch_the_next_sound_one_tells_the_offset() -> None:
    broken = bytearray(built([Record(b"k", b"v" * 50)] * 4))
    broken[80] ^= 1
    log = bytes(broken) + built([Record(b"k", b"w")], base_offset=6)
    damage = scan_fetch(Fetched(log, 0)).damage

    assert damage is not None
    assert damage.next_offset == 6


def test_an_absurd_number_of_records_costs_nothing() -> None:
    found = decoded(with_header(built([Record(b"k", b"v")]), count=2**31 - 1))

    assert found.rows == []
    assert "that many" in found.bad[0].reason


def test_more_records_than_can_be_held_are_a_bad_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORDS_MAX", 4)
    found = decoded(built([Record()] * 5) + built([Record()] * 4, base_offset=5))

    assert [row["offset"] for row in found.rows] == [5, 6, 7, 8]
    assert "more than 4 records" in found.bad[0].reason


def test_a_marker_that_says_nothing_is_a_bad_batch() -> None:
    raw = with_header(built([Record(b"", None)], producer_id=7), attributes=0x30)
    found = decoded(raw + built([Record(b"k", b"v")], base_offset=1))

    assert [row["offset"] for row in found.rows] == [1]
    assert "a control batch ends early" in found.bad[0].reason


def test_an_offset_beyond_64_bits_is_a_bad_batch() -> None:
    body = b"\x00\x00" + varint(2**63 - 5) + b"\x01\x01\x00"
    batch = built([Record()], base_offset=10)[:61] + varint(len(body)) + body
    batch = batch[:8] + (len(batch) - 12).to_bytes(4, "big") + batch[12:]
    found = decoded(with_header(batch), start=10)

    assert found.rows == []
    assert "outside of its batch" in found.bad[0].reason


def varint(number: int) -> bytes:
    zigzag, written = number << 1, bytearray()
    while zigzag > 0x7F:
        written.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    return bytes([*written, zigzag])


def test_a_bad_batch_does_not_take_its_neighbours_along() -> None:
    good = built([Record(b"k", b"v")])
    bad = with_header(built([Record(b"k", b"w")], base_offset=1), attributes=7)
    found = decoded(good + bad + built([Record(b"k", b"x")], base_offset=2))

    assert [row["offset"] for row in found.rows] == [0, 2]
    assert [(one.first_offset, one.last_offset) for one in found.bad] == [(1, 1)]
    assert "no codec 7" in found.bad[0].reason


@pytest.mark.parametrize("time_ms", [2**62, -(2**62), -(2**63)])
def test_a_time_that_spark_cannot_hold_is_a_bad_record(time_ms: int) -> None:
    found = decoded(with_header(built([Record(b"k", b"v")]), base_ms=time_ms))

    assert found.rows == []
    assert "timestamp" in found.bad[0].reason
