"""State as columns, against a dict."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstate.keyed.columns import ValueColumns

_PAIR = pa.struct([("a", pa.string()), ("b", pa.list_(pa.int32()))])
_NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)

# Types of keys, with a few keys each of which some are nearly equal.
KEYS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "long": (pa.int64(), [0, 1, -1, 1 << 62, -(1 << 63)]),
    "text": (pa.string(), ["", "a", "b", "ab", "é"]),
    "bytes": (pa.binary(), [b"", b"\0", b"\0\0", b"a"]),
    "bool": (pa.bool_(), [True, False]),
    "double": (pa.float64(), [0.0, 1.5, math.nan, math.inf]),
    "decimal": (pa.decimal128(10, 2), [Decimal("1.00"), Decimal("-1.00"), Decimal("0.01")]),
    "time": (pa.timestamp("us", "UTC"), [_NOON, _NOON + dt.timedelta(microseconds=1)]),
    "pair": (
        _PAIR,
        [
            {"a": "x", "b": [1]},
            {"a": "x", "b": [1, 1]},
            {"a": None, "b": [1]},
            {"a": "x", "b": None},
            {"a": "x", "b": []},
            {"a": None, "b": None},
        ],
    ),
}


@pytest.mark.parametrize("name", KEYS)
@given(data=st.data())
def test_columns_are_a_dict(name: str, data: st.DataObject) -> None:
    kind, given_keys = KEYS[name]
    universe = pa.array(given_keys, kind).to_pylist()
    columns = ValueColumns(kind, pa.int64())
    model: dict[int, int] = {}
    changed: set[int] = set()
    steps = data.draw(
        st.lists(st.sampled_from(["put", "put", "put", "get", "settle", "unsettle"]), max_size=12)
    )
    some = st.lists(st.integers(0, len(universe) - 1), max_size=8)
    for step in steps:
        asked = data.draw(some)
        keys = pa.array([universe[place] for place in asked], kind)
        if step == "put":
            nullable = st.none() | st.integers(-9, 9)
            size = len(asked)
            values = data.draw(st.lists(nullable, min_size=size, max_size=size))
            columns.put(keys, pa.array(values, pa.int64()))
            for place, value in zip(asked, values, strict=True):
                changed.add(place)
                model.pop(place, None)
                if value is not None:
                    model[place] = value
        elif step == "settle":
            columns.settle()
            changed.clear()
        elif step == "unsettle":
            columns.unsettle(keys)
            changed.update(asked)

        assert columns.get(keys).to_pylist() == [model.get(place) for place in asked]
        assert columns.present_count == len(model)
        assert columns.changed_count == len(changed)
        found, values_found = columns.changes()
        expected = {repr(universe[place]): model.get(place) for place in changed}
        written = zip(map(repr, found.to_pylist()), values_found.to_pylist(), strict=True)
        assert dict(written) == expected
        present = sorted(map(repr, columns.present().to_pylist()))
        assert present == sorted(repr(universe[place]) for place in model)


def test_what_is_loaded_is_no_change() -> None:
    columns = ValueColumns(pa.string(), pa.int64())
    columns.load(pa.array(["a", "b"]), pa.array([1, 2]))
    columns.load(pa.array(["b", "c"]), pa.array([3, 4]))

    assert columns.changed_count == 0
    assert columns.get(pa.array(["a", "b", "c", "d"])).to_pylist() == [1, 3, 4, None]


def test_values_of_any_type_are_kept() -> None:
    kind = pa.struct([("sum", pa.float64()), ("tags", pa.list_(pa.string()))])
    columns = ValueColumns(pa.string(), kind)
    values = pa.array([{"sum": 1.5, "tags": ["x", None]}, {"sum": None, "tags": []}], kind)
    columns.put(pa.array(["a", "b"]), values)
    columns.put(pa.array(["a"]), values.slice(1))

    assert columns.get(pa.array(["b", "a", "c"])).to_pylist() == [
        values[1].as_py(),
        values[1].as_py(),
        None,
    ]
