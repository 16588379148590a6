"""One canonical value for each key, alone and in columns."""

from __future__ import annotations

import datetime as dt
import math
import re
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstate.errors import StateDescriptorError, StateTypeError
from flowstate.keys import KeyType, canonical_column, physical_column
from tests.keyed.strategies import SCALARS, is_same, typed_keys, values_of

SHOP = pa.struct([("shop", pa.string()), ("till", pa.int32()), ("rate", pa.float64())])
FLOATS = [pa.float32(), pa.float64()]


def required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def is_negative_zero(number: float) -> bool:
    return number == 0 and math.copysign(1, number) < 0


# Which types keys have.


@pytest.mark.parametrize("kind", SCALARS, ids=str)
def test_every_scalar_can_be_a_key_and_a_part_of_one(kind: pa.DataType) -> None:
    assert KeyType(kind).arrow == kind
    composite = pa.struct([("a", kind), ("b", pa.int64())])
    assert KeyType(composite).arrow == composite


def test_builtins_are_short_for_the_types_of_keys() -> None:
    assert KeyType(int) == KeyType(pa.int64()) != KeyType(pa.int32())
    assert KeyType(tuple[str, int]) == KeyType(pa.struct([("f0", pa.string()), ("f1", pa.int64())]))
    assert hash(KeyType(int)) == hash(KeyType(pa.int64()))
    assert KeyType(int) != pa.int64()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (dict[str, int], "cannot be a key: a map has no order"),
        (tuple[int, dict[str, int]], "cannot be a key: a map has no order"),
        (list[dict[str, int]], "cannot be a key: a map has no order"),
        (pa.struct([]), "struct<> cannot be a key: it has no fields"),
        (pa.struct([("a", pa.int64()), ("a", pa.int64())]), "names a field twice"),
        (pa.uint64(), "uint64 is not supported in state"),
        (pa.struct([("a", pa.uint64())]), "uint64 is not supported in state"),
        (object, "<class 'object'> is not a type of state"),
        (None, "None is not a type of state"),
    ],
    ids=str,
)
def test_other_types_are_no_types_of_keys(spec: Any, message: str) -> None:
    with pytest.raises(StateDescriptorError, match=re.escape(message)):
        KeyType(spec)


# The canonical form of a key.


@given(typed_keys())
def test_a_canonical_key_is_its_own_canonical_form(key: tuple[pa.DataType, Any]) -> None:
    key_type = KeyType(key[0])
    canonical = key_type.canonical(key[1])

    assert {canonical: 1}[key_type.canonical(key[1])] == 1
    assert {canonical: 1}[key_type.canonical(canonical)] == 1


@given(st.data(), typed_keys())
def test_keys_are_found_again_after_a_way_through_a_column(
    data: st.DataObject, first: tuple[pa.DataType, Any]
) -> None:
    key_type = KeyType(first[0])
    others = data.draw(st.lists(st.none() | values_of(first[0]), max_size=5))
    keys = [None if key is None else key_type.canonical(key) for key in [first[1], *others]]
    column = key_type.to_array(keys)

    assert column.type == key_type.arrow
    found = key_type.to_list(column)
    numbers = {key: keys.index(key) for key in keys}
    assert [numbers[key] for key in found] == [numbers[key] for key in keys]
    start = data.draw(st.integers(0, len(keys)))
    assert is_same(key_type.to_list(column[start:]), keys[start:])
    chunks = pa.chunked_array([column[:start], column[start:]], column.type)
    assert is_same(key_type.to_list(chunks), keys)


@given(st.data(), st.sampled_from([*FLOATS, SHOP, pa.list_(pa.float32())]))
def test_a_column_is_made_canonical_as_its_keys_are_one_by_one(
    data: st.DataObject, kind: pa.DataType
) -> None:
    zeros_and_nans = st.sampled_from([0.0, -0.0, math.nan, -math.nan])
    rates: st.SearchStrategy[Any] = st.none() | st.floats(width=32) | zeros_and_nans
    if pa.types.is_struct(kind):
        shops = st.fixed_dictionaries(
            {"shop": st.none() | st.text(max_size=3), "till": st.none(), "rate": rates}
        )
        keys: st.SearchStrategy[Any] = st.none() | shops
    elif pa.types.is_list(kind):
        keys = st.none() | st.lists(rates, max_size=3)
    else:
        keys = rates
    drawn = data.draw(st.lists(keys, max_size=6))
    key_type = KeyType(kind)
    column = canonical_column(pa.array(drawn, kind))

    expected = [None if key is None else key_type.canonical(key) for key in drawn]
    assert column.type == kind
    assert repr(physical_column(column, composite=True)) == repr(expected)
    assert is_same(key_type.to_list(pa.array(drawn, kind)), expected)


@pytest.mark.parametrize("kind", FLOATS, ids=str)
def test_every_nan_is_one_key_and_so_are_both_zeros(kind: pa.DataType) -> None:
    canonical = KeyType(kind).canonical
    composite = KeyType(pa.struct([("a", kind)])).canonical

    nan = canonical(math.nan)
    assert nan != nan
    for other in (-math.nan, float("nan"), np.float32("nan"), math.inf - math.inf):
        assert canonical(other) is nan
        assert composite((other,)) == (nan,)
    assert not is_negative_zero(canonical(-0.0))
    assert not is_negative_zero(composite((-0.0,))[0])


@pytest.mark.parametrize(
    ("kind", "bits"), [(pa.float32(), pa.int32()), (pa.float64(), pa.int64())], ids=str
)
def test_keys_of_a_canonical_column_are_equal_bit_by_bit(
    kind: pa.DataType, bits: pa.DataType
) -> None:
    column = pa.array([math.nan, -math.nan, 0.0, -0.0, 1.5], kind)
    found = canonical_column(column).view(bits).to_pylist()

    assert len(set(column.view(bits).to_pylist())) == 5
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert len(set(found)) == 3


def test_nans_that_were_read_are_the_same_key() -> None:
    key_type = KeyType(SHOP)
    nan = KeyType(float).canonical(math.nan)
    (found,) = key_type.to_list(key_type.to_array([("a", 1, math.nan)]))

    assert found == ("a", 1, nan), "equal only if it is the same object"


def test_a_key_that_is_rounded_is_the_rounded_key() -> None:
    key_type = KeyType(pa.float32())

    assert key_type.canonical(0.1) == key_type.canonical(float(np.float32(0.1))) != 0.1
    assert not is_negative_zero(key_type.canonical(-1e-50))


@pytest.mark.parametrize("fold", [0, 1], ids=["first", "again"])
@pytest.mark.parametrize("composite", [False, True], ids=["scalar", "composite"])
def test_a_time_that_a_zone_has_twice_is_found_again(composite: bool, fold: int) -> None:
    zoned = pa.timestamp("us", "Europe/Berlin")
    time: Any = dt.datetime(2023, 10, 29, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=fold)
    key_type = KeyType(pa.struct([("at", zoned)]) if composite else zoned)
    canonical = key_type.canonical((time,) if composite else time)
    (found,) = key_type.to_list(key_type.to_array([canonical]))

    assert {canonical: 1}.get(found) == 1


def test_one_moment_is_one_key_in_whatever_zone_it_is_told() -> None:
    key_type = KeyType(dt.datetime)
    moment = dt.datetime(2023, 7, 1, 12, tzinfo=dt.UTC)
    elsewhere = moment.astimezone(ZoneInfo("Asia/Tokyo"))

    assert {key_type.canonical(moment), key_type.canonical(elsewhere)} == {moment}


def test_decimals_of_one_value_are_one_key() -> None:
    canonical = KeyType(pa.decimal128(12, 3)).canonical

    assert str(canonical(Decimal("1.5"))) == str(canonical(Decimal("1.50"))) == "1.500"


def test_a_long_key_stays_whole() -> None:
    for kind, key in ((str, "é" * 100_000), (bytes, b"\0" * 100_000)):
        key_type = KeyType(kind)
        assert key_type.to_list(key_type.to_array([key_type.canonical(key)])) == [key]


# Composite keys.


def test_a_composite_key_may_be_given_as_tuple_list_or_dict() -> None:
    canonical = KeyType(SHOP).canonical

    assert canonical(["a", 1, -0.0]) == canonical(("a", np.int64(1), 0)) == ("a", 1, 0.0)
    assert canonical({"rate": 0.0, "shop": "a", "till": 1}) == ("a", 1, 0.0)
    assert canonical({"till": 1}) == (None, 1, None)
    assert canonical({}) == (None, None, None)


def test_a_composite_key_of_nulls_is_not_the_absence_of_a_key() -> None:
    key_type = KeyType(tuple[int, str])
    keys = [(None, None), None, (1, None)]

    assert key_type.to_list(key_type.to_array(keys)) == keys


def test_a_field_that_must_be_there_may_not_be_null() -> None:
    key_type = KeyType(pa.struct([required("a", pa.int64()), ("b", pa.int64())]))

    assert key_type.canonical((1, None)) == (1, None)
    for key in ((None, 1), {"b": 1}):
        with pytest.raises(StateTypeError, match=r"field 'a' of the key struct<.*must not be null"):
            key_type.canonical(key)


# What is no key.


@pytest.mark.parametrize(
    ("spec", "key", "message"),
    [
        (str, None, "class NoneType is not of type string"),
        (str, 5, "class int is not of type string"),
        (str, b"a", "class bytes is not of type string"),
        (str, "\udc80", "a text is not valid Unicode"),
        (int, "5", "class str is not of type int64"),
        (int, 5.0, "class float is not of type int64"),
        (int, True, "class bool is not of type int64"),
        (int, 1 << 63, "is out of the range of type int64"),
        (int, -(1 << 63) - 1, "is out of the range of type int64"),
        (pa.int8(), 128, "128 is out of the range of type int8"),
        (float, 10**400, "out of the range of type double"),
        (pa.decimal128(5, 2), Decimal("0.001"), "a decimal does not fit"),
        (SHOP, None, "is a tuple of 3 values"),
        (SHOP, "abc", "is a tuple of 3 values"),
        (SHOP, ("a", 1), "is a tuple of 3 values"),
        (SHOP, ("a", 1, 0.5, 0), "is a tuple of 3 values"),
        (SHOP, ("a", 1 << 31, 0.5), "is out of the range of type int32"),
        (SHOP, ("a", "1", 0.5), "class str is not of type int32"),
        (SHOP, {"shop": "a", "tiil": 1, "rat": 0.5}, "> has no field 'rat', 'tiil'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_key_of_another_type_is_refused(spec: Any, key: Any, message: str) -> None:
    with pytest.raises(StateTypeError, match=re.escape(message)):
        KeyType(spec).canonical(key)


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@given(st.integers(-(1 << 70), 1 << 70))
def test_an_int_is_a_key_if_its_type_can_hold_it(bits: int, number: int) -> None:
    canonical = KeyType(getattr(pa, f"int{bits}")()).canonical

    if -(1 << bits - 1) <= number < 1 << bits - 1:
        assert canonical(number) == number
    else:
        with pytest.raises(StateTypeError, match="out of the range"):
            canonical(number)
