from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstate.errors import SnapshotCorruptError
from flowstate.storage._port import check_span, cut_ranges, merge_ranges

DATA = bytes(range(200))

ranges_within = st.lists(
    st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))).map(
        lambda pair: (pair[0], min(pair[1], len(DATA) - pair[0]))
    ),
    max_size=20,
)


@given(ranges_within)
def test_what_is_cut_out_of_the_spans_is_what_was_asked_for(ranges: list[tuple[int, int]]) -> None:
    spans = merge_ranges(ranges)
    pieces = cut_ranges(ranges, spans, [DATA[start:end] for start, end in spans])

    assert pieces == [DATA[offset : offset + length] for offset, length in ranges]


@given(ranges_within)
def test_spans_are_sorted_and_apart_and_hold_nothing_else(ranges: list[tuple[int, int]]) -> None:
    spans = merge_ranges(ranges)
    asked_for = {byte for offset, length in ranges for byte in range(offset, offset + length)}

    assert {byte for start, end in spans for byte in range(start, end)} == asked_for
    assert all(start < end for start, end in spans)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))


@given(ranges_within)
def test_the_order_of_the_ranges_does_not_change_the_spans(ranges: list[tuple[int, int]]) -> None:
    assert merge_ranges(ranges) == merge_ranges(ranges[::-1]) == merge_ranges(sorted(ranges))


@pytest.mark.parametrize("length_read", [0, 9, 11])
def test_a_span_of_another_length_is_corrupt(length_read: int) -> None:
    with pytest.raises(SnapshotCorruptError) as caught:
        check_span("folder/file", start=5, end=15, length_read=length_read)

    assert (caught.value.path, caught.value.expected, caught.value.actual) == (
        "folder/file",
        10,
        length_read,
    )
