"""The built-in reducers: whole columns against one value after the other."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstate.aggregates import Aggregate, Reducer, aggregate_of
from flowstate.errors import StateDescriptorError, StateTypeError
from flowstate.keys import canonical_column, physical_column
from tests.keyed.strategies import SCALARS, is_same, values_of

LONG_MAX = (1 << 63) - 1
LONG_MIN = -(1 << 63)
NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()]
COMPOSITE = pa.struct([("shop", pa.string()), ("rate", pa.float64())])

# Quarters add up exactly, in any order; so do infinities and NaNs, to what they add up to.
QUARTERS = st.integers(-400, 400).map(lambda number: number / 4)
ODD_FLOATS = QUARTERS | st.sampled_from([math.inf, -math.inf, math.nan, -0.0])
KEYS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.string(): st.sampled_from(["a", "b", "", "a\0"]),
    pa.int64(): st.sampled_from([0, -1, LONG_MAX]),
    pa.float64(): st.sampled_from([0.0, -0.0, math.nan, -math.nan, 1.5]),
    COMPOSITE: st.fixed_dictionaries(
        {
            "shop": st.sampled_from(["a", "b", None]),
            "rate": st.sampled_from([0.0, -0.0, math.nan, None]),
        }
    ),
}

Rows = list[tuple[Any, Any]]
reducers = pytest.mark.parametrize("reducer", list(Reducer), ids=str)


def fold(aggregate: Aggregate, keys: pa.Array, values: pa.Array) -> dict[Any, Any]:
    """Return the partial accumulators by key, after checks of what every fold promises."""
    distinct, partials = aggregate.fold(canonical_column(keys), values)

    assert distinct.type == keys.type
    assert partials.type == aggregate.accumulator_type
    assert len(distinct) == len(partials)
    assert distinct.null_count == partials.null_count == 0
    found = dict(zip(map(repr, distinct.to_pylist()), physical_column(partials), strict=True))
    assert len(found) == len(distinct)
    return found


def one_by_one(aggregate: Aggregate, keys: pa.Array, values: Sequence[Any]) -> dict[Any, Any]:
    """Return the accumulators by key."""
    found: dict[Any, Any] = {}
    for key, value in zip(map(repr, canonical_column(keys).to_pylist()), values, strict=True):
        partial = aggregate.partial(value)
        found[key] = aggregate.merge(found[key], partial) if key in found else partial
    return found


def is_same_by_key(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)


def columns(rows: Rows, key_type: pa.DataType, kind: pa.DataType) -> tuple[pa.Array, pa.Array]:
    return (
        pa.array([key for key, _ in rows], key_type),
        pa.array([value for _, value in rows], kind),
    )


def draw_rows(data: st.DataObject, values: st.SearchStrategy[Any]) -> tuple[pa.DataType, Rows]:
    key_type = data.draw(st.sampled_from(list(KEYS)))
    return key_type, data.draw(st.lists(st.tuples(KEYS[key_type], values), max_size=12))


# A column against its values.


@reducers
@given(st.data(), st.sampled_from(NUMBERS))
def test_a_column_of_numbers_is_reduced_as_its_values_are(
    reducer: Reducer, data: st.DataObject, kind: pa.DataType
) -> None:
    whole = st.integers(-128, 127)
    key_type, rows = draw_rows(data, ODD_FLOATS if pa.types.is_floating(kind) else whole)
    aggregate = aggregate_of(reducer, kind)
    keys, values = columns(rows, key_type, kind)
    found = fold(aggregate, keys, values)
    expected = one_by_one(aggregate, keys, values.to_pylist())

    assert is_same_by_key(found, expected)
    results = aggregate.results(pa.array([*found.values(), None], aggregate.accumulator_type))
    assert results.type == aggregate.result_type
    wanted = [*(aggregate.result(expected[key]) for key in found), None]
    assert is_same(results.to_pylist(), wanted)


@pytest.mark.parametrize("reducer", [Reducer.MIN, Reducer.MAX, Reducer.COUNT], ids=str)
@given(st.data(), st.sampled_from(list(SCALARS)))
def test_every_scalar_has_extremes_and_a_count(
    reducer: Reducer, data: st.DataObject, kind: pa.DataType
) -> None:
    key_type, rows = draw_rows(data, values_of(kind))
    aggregate = aggregate_of(reducer, kind)
    keys, values = columns(rows, key_type, kind)

    expected = one_by_one(aggregate, keys, physical_column(values))
    assert is_same_by_key(fold(aggregate, keys, values), expected)


@reducers
@given(st.data(), st.integers(0, 12))
def test_a_column_in_two_parts_is_merged_to_the_same(
    reducer: Reducer, data: st.DataObject, cut: int
) -> None:
    key_type, rows = draw_rows(data, ODD_FLOATS)
    aggregate = aggregate_of(reducer, pa.float64())
    keys, values = columns(rows, key_type, pa.float64())
    merged = fold(aggregate, keys[:cut], values[:cut])
    for key, partial in fold(aggregate, keys[cut:], values[cut:]).items():
        merged[key] = aggregate.merge(merged[key], partial) if key in merged else partial

    assert is_same_by_key(merged, fold(aggregate, keys, values))


@given(st.data())
def test_a_sum_is_exact_or_refused(data: st.DataObject) -> None:
    edges = st.sampled_from([LONG_MAX, LONG_MIN, LONG_MAX - 1, 1, -1])
    key_type, rows = draw_rows(data, edges | st.integers(LONG_MIN, LONG_MAX))
    aggregate = aggregate_of(Reducer.SUM, pa.int64())
    keys, values = columns(rows, key_type, pa.int64())
    expected = one_by_one(aggregate, keys, values.to_pylist())

    if all(LONG_MIN <= total <= LONG_MAX for total in expected.values()):
        assert fold(aggregate, keys, values) == expected
    else:
        with pytest.raises(StateTypeError, match="a sum is out of the range of int64"):
            aggregate.fold(canonical_column(keys), values)


@given(st.lists(st.integers(LONG_MIN, LONG_MAX), min_size=1, max_size=12))
def test_a_mean_of_large_integers_is_rounded_but_never_overflows(numbers: list[int]) -> None:
    aggregate = aggregate_of(Reducer.MEAN, pa.int64())
    keys = pa.array(["a"] * len(numbers))
    (partial,) = fold(aggregate, keys, pa.array(numbers, pa.int64())).values()

    exact = sum(numbers) / len(numbers)
    # A rounding for each addition, of a sum that is never larger than this.
    error = math.ulp(float(sum(map(abs, numbers))))
    assert aggregate.result(partial) == pytest.approx(exact, rel=0, abs=error)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=12))
def test_a_sum_of_floats_differs_in_its_last_digits_at_most(numbers: list[float]) -> None:
    aggregate = aggregate_of(Reducer.SUM, pa.float64())
    keys = pa.array([1] * len(numbers))
    (total,) = fold(aggregate, keys, pa.array(numbers)).values()
    (expected,) = one_by_one(aggregate, keys, numbers).values()

    error = len(numbers) * math.ulp(math.fsum(map(abs, numbers)))
    assert total == pytest.approx(expected, rel=0, abs=error)


# Single facts.


@reducers
@pytest.mark.parametrize("key_type", KEYS, ids=str)
def test_an_empty_column_has_no_keys(reducer: Reducer, key_type: pa.DataType) -> None:
    for kind in NUMBERS:
        aggregate = aggregate_of(reducer, kind)
        assert fold(aggregate, *columns([], key_type, kind)) == {}
        nothing = aggregate.results(pa.array([], aggregate.accumulator_type))
        assert nothing.type == aggregate.result_type
        assert len(nothing) == 0


@reducers
def test_where_nothing_was_added_there_is_no_result(reducer: Reducer) -> None:
    aggregate = aggregate_of(reducer, pa.int64())
    missing = pa.array([None, aggregate.partial(7), None], aggregate.accumulator_type)

    assert aggregate.results(missing).to_pylist() == [
        None,
        1 if reducer is Reducer.COUNT else 7,
        None,
    ]


@reducers
def test_every_key_of_a_long_column_is_there_once(reducer: Reducer) -> None:
    keys = pa.array([f"key-{number * 7919 % 5000}" for number in range(20_000)])
    values = [number % 100 for number in range(20_000)]
    aggregate = aggregate_of(reducer, pa.int64())

    assert fold(aggregate, keys, pa.array(values)) == one_by_one(aggregate, keys, values)


@reducers
def test_a_part_of_a_column_of_composite_keys_is_taken_for_itself(reducer: Reducer) -> None:
    shops = [{"shop": "abc"[number % 3], "rate": 0.5} for number in range(9)]
    keys = pa.array(shops, COMPOSITE)[4:8]
    values = pa.array(range(9), pa.int64())[4:8]
    aggregate = aggregate_of(reducer, pa.int64())

    assert fold(aggregate, keys, values) == one_by_one(aggregate, keys, [4, 5, 6, 7])


@pytest.mark.parametrize("reducer", [Reducer.MIN, Reducer.MAX], ids=str)
def test_numbers_go_before_nans_and_nans_before_nothing(reducer: Reducer) -> None:
    aggregate = aggregate_of(reducer, pa.float64())

    for numbers in itertools.permutations([math.nan, 1.5, math.nan]):
        assert fold(aggregate, pa.array(["a"] * 3), pa.array(numbers)) == {"'a'": 1.5}
        assert aggregate.merge(aggregate.merge(*numbers[:2]), numbers[2]) == 1.5
    assert math.isnan(aggregate.merge(math.nan, math.nan))
    (nan,) = fold(aggregate, pa.array(["a"]), pa.array([math.nan])).values()
    assert math.isnan(nan)


@pytest.mark.parametrize("reducer", [Reducer.SUM, Reducer.MEAN], ids=str)
def test_a_nan_makes_the_sum_of_its_key_a_nan_and_no_other(reducer: Reducer) -> None:
    aggregate = aggregate_of(reducer, pa.float64())
    found = fold(aggregate, pa.array(["a", "b", "a"]), pa.array([math.nan, 1.0, 2.0]))

    assert math.isnan(aggregate.result(found["'a'"]))
    assert aggregate.result(found["'b'"]) == 1.0


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32()], ids=str)
def test_a_sum_of_narrow_integers_is_a_wide_one(kind: pa.DataType) -> None:
    largest = (1 << kind.bit_width - 1) - 1
    aggregate = aggregate_of(Reducer.SUM, kind)

    assert aggregate.accumulator_type == pa.int64()
    found = fold(aggregate, pa.array([1] * 5), pa.array([largest] * 5, kind))
    assert found == {"1": 5 * largest}


@pytest.mark.parametrize(
    "numbers",
    [[LONG_MAX, 1, -1], [LONG_MIN, -1, 1], [LONG_MAX, LONG_MIN], [LONG_MIN], [LONG_MAX]],
    ids=str,
)
def test_a_sum_that_fits_in_the_end_is_exact(numbers: list[int]) -> None:
    aggregate = aggregate_of(Reducer.SUM, pa.int64())

    found = fold(aggregate, pa.array(["a"] * len(numbers)), pa.array(numbers, pa.int64()))
    assert found == {"'a'": sum(numbers)}


def test_merging_single_accumulators_leaves_a_sum_that_is_too_large_to_the_states_type() -> None:
    aggregate = aggregate_of(Reducer.SUM, pa.int64())

    assert aggregate.merge(LONG_MAX, 1) == LONG_MAX + 1


def test_merging_means_changes_neither_accumulator() -> None:
    aggregate = aggregate_of(Reducer.MEAN, pa.int64())
    one, two = aggregate.partial(1), aggregate.partial(4)
    merged = aggregate.merge(one, aggregate.merge(two, two))

    assert aggregate.result(merged) == 3.0
    assert merged == {"sum": 9.0, "count": 3}
    assert (one, two) == ({"sum": 1.0, "count": 1}, {"sum": 4.0, "count": 1})


# What is not defined.


@pytest.mark.parametrize("reducer", [Reducer.SUM, Reducer.MEAN], ids=str)
@pytest.mark.parametrize(
    "kind",
    [*(kind for kind in SCALARS if kind not in NUMBERS), pa.list_(pa.int64()), COMPOSITE],
    ids=str,
)
def test_only_numbers_are_added(reducer: Reducer, kind: pa.DataType) -> None:
    with pytest.raises(
        StateDescriptorError, match=r"is not defined for .*: use integers or floats"
    ):
        aggregate_of(reducer, kind)


@pytest.mark.parametrize("reducer", [Reducer.MIN, Reducer.MAX], ids=str)
@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.map_(pa.string(), pa.int64()), COMPOSITE], ids=str
)
def test_nested_values_have_no_extremes(reducer: Reducer, kind: pa.DataType) -> None:
    with pytest.raises(StateDescriptorError, match=f"{reducer.value} is not defined for"):
        aggregate_of(reducer, kind)


def test_values_of_any_type_are_counted() -> None:
    for kind, value in (
        (pa.list_(pa.int64()), []),
        (COMPOSITE, {"shop": None, "rate": None}),
        (pa.decimal128(5, 2), Decimal(1)),
        (pa.duration("us"), dt.timedelta(1)),
    ):
        aggregate = aggregate_of(Reducer.COUNT, kind)
        assert fold(aggregate, pa.array([1, 1]), pa.array([value] * 2, kind)) == {"1": 2}
        assert aggregate.partial(value) == 1
