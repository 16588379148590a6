"""Types of state and their values, for Hypothesis."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

_LARGEST_DURATION = dt.timedelta(microseconds=(1 << 63) - 1)


def _ints(bits: int) -> st.SearchStrategy[int]:
    limit = 1 << (bits - 1)
    return st.integers(-limit, limit - 1)


# Every scalar type that state may have, and what its values are.
SCALARS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): _ints(8),
    pa.int16(): _ints(16),
    pa.int32(): _ints(32),
    pa.int64(): _ints(64),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.string(): st.text(max_size=40),
    pa.large_string(): st.text(max_size=40),
    pa.binary(): st.binary(max_size=40),
    pa.large_binary(): st.binary(max_size=40),
    pa.date32(): st.dates(),
    pa.time64("us"): st.times(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(dt.UTC)),
    # A little inside of what datetime can do, because another zone's local time must fit as well.
    pa.timestamp("us", "Europe/Berlin"): st.datetimes(
        min_value=dt.datetime(1, 1, 3),
        max_value=dt.datetime(9999, 12, 29),
        timezones=st.timezones(),
    ),
    pa.duration("us"): st.timedeltas(min_value=-_LARGEST_DURATION, max_value=_LARGEST_DURATION),
    pa.decimal128(12, 3): st.decimals(
        min_value=-999_999_999, max_value=999_999_999, allow_nan=False, places=3
    ),
}


@st.composite
def typed_values(
    draw: st.DrawFn, *, nested: bool, scalars: list[pa.DataType] | None = None
) -> tuple[pa.DataType, Any]:
    """Draw a type (a struct of scalars as well, and any nesting if asked for) and a value of it."""
    kinds = st.sampled_from(scalars or list(SCALARS))
    kind = draw(_nested_types(kinds) if nested else st.one_of(kinds, _structs(kinds)))
    return kind, draw(values_of(kind))


@st.composite
def typed_keys(
    draw: st.DrawFn, scalars: list[pa.DataType] | None = None
) -> tuple[pa.DataType, Any]:
    """Draw a type that a key may have, with structs and lists in each other, and a key of it."""

    def larger(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
        return st.one_of(_structs(inner), inner.map(pa.list_))

    kind = draw(st.recursive(st.sampled_from(scalars or list(SCALARS)), larger, max_leaves=4))
    return kind, draw(values_of(kind))


def _structs(kinds: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    def named(fields: list[pa.DataType]) -> pa.DataType:
        return pa.struct([(f"f{number}", field) for number, field in enumerate(fields)])

    return st.lists(kinds, min_size=1, max_size=3).map(named)


def _nested_types(kinds: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    def larger(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
        maps = st.tuples(kinds, inner).map(lambda pair: pa.map_(*pair))
        return st.one_of(_structs(inner), inner.map(pa.list_), maps)

    return st.recursive(kinds, larger, max_leaves=4)


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return the values that a state of a type takes."""
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries(
            {field.name: st.none() | values_of(field.type) for field in kind}
        )
    if pa.types.is_list(kind):
        return st.lists(st.none() | values_of(kind.value_type), max_size=3)
    if pa.types.is_map(kind):
        items = st.none() | values_of(kind.item_type)
        return st.dictionaries(values_of(kind.key_type), items, max_size=3)
    return SCALARS[kind]


def is_same(a: Any, b: Any) -> bool:
    """Compare values of which a NaN may be a part."""
    if isinstance(a, dict) and isinstance(b, dict):
        return is_same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    return bool(a == b) and isinstance(b, Decimal) == isinstance(a, Decimal)
