"""Rows as Python values, as Arrow columns and as bytes are the same rows."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstate import KeyGroupAssigner
from flowstate.errors import KeyGroupError
from flowstate.key_groups import key_grouper
from flowstate.keyed.codec import (
    Change,
    RowCodec,
    encoded_rows,
    rows_of_changes,
    timer_bound,
    timer_timestamp,
)
from flowstate.keys import KeyType
from flowstate.rows import RowOp, StateKind
from flowstate.types import value_type
from tests.keyed.strategies import SCALARS, is_same, typed_keys, typed_values

PUT, DELETE, CLEAR = RowOp.PUT, RowOp.DELETE, RowOp.CLEAR
LONGS = st.integers(-(1 << 63), (1 << 63) - 1)


def has_key_group(kind: pa.DataType) -> bool:
    try:
        key_grouper(kind, max_parallelism=128, assigner=KeyGroupAssigner.XXHASH64)
    except KeyGroupError:
        return False
    return True


# Any scalar can be a namespace or a map's key; a key needs a key group as well.
KEY_SCALARS = [kind for kind in SCALARS if has_key_group(kind)]


def encoded(codec: RowCodec, *changes: Change) -> list[tuple[int, bytes, bytes]]:
    rows = rows_of_changes(codec, changes, max_parallelism=128, assigner=KeyGroupAssigner.XXHASH64)
    return list(encoded_rows(rows))


@given(typed_keys(scalars=KEY_SCALARS), typed_keys())
def test_a_row_is_found_by_the_bytes_that_it_is_written_under(
    key: tuple[pa.DataType, Any], sub: tuple[pa.DataType, Any]
) -> None:
    key_type, namespace_type, sub_type = KeyType(key[0]), KeyType(sub[0]), KeyType(sub[0])
    codec = RowCodec(
        "map",
        StateKind.MAP,
        key_type,
        namespace=namespace_type,
        sub=sub_type,
        value=pa.int64(),
    )
    identity = (key_type.canonical(key[1]), namespace_type.canonical(sub[1]))
    canonical = sub_type.canonical(sub[1])
    rows = encoded(
        codec,
        Change(CLEAR, *identity, None, None, None),
        Change(PUT, *identity, canonical, 5, None),
        Change(DELETE, *identity, None, None, None),
    )

    assert [op for op, _, _ in rows] == [CLEAR, PUT, DELETE]
    prefix = codec.prefix(*identity)
    assert rows[0][1] == prefix
    assert rows[1][1] == codec.row(*identity, canonical)
    assert rows[2][1] == codec.row(*identity, None)
    assert all(row.startswith(prefix) for _, row, _ in rows)
    found = codec.identity(rows[1][1])
    assert found == (*identity, canonical), "and the same NaN, which only identity tells"
    assert codec.identity(rows[2][1])[2] is None


@given(typed_values(nested=True), st.none() | LONGS)
def test_a_value_is_read_as_it_was_written(
    value: tuple[pa.DataType, Any], stamp: int | None
) -> None:
    kind = value_type(value[0])
    physical = kind.to_physical(value[1])
    codec = RowCodec(
        "value", StateKind.VALUE, KeyType(int), value=kind.arrow, ttl=stamp is not None
    )
    ((_, row, data),) = encoded(codec, Change(PUT, 1, None, None, physical, stamp))

    found, found_stamp = codec.unit(data)
    assert is_same(found, physical)
    assert found_stamp == stamp
    assert codec.identity(row) == (1, None, None)
    user = kind.to_user or (lambda same: same)
    assert is_same(user(found), user(physical))


@given(typed_values(nested=True), st.integers(0, 3), st.booleans())
def test_chunks_of_a_list_are_read_as_they_were_written(
    value: tuple[pa.DataType, Any], count: int, ttl: bool
) -> None:
    kind = value_type(value[0])
    codec = RowCodec(
        "list", StateKind.LIST, KeyType(int), sub=KeyType(int), value=kind.arrow, ttl=ttl
    )
    values = [kind.to_physical(value[1])] * count
    stamps = list(range(count)) if ttl else None
    ((_, row, data),) = encoded(codec, Change(PUT, 1, None, 7, values, stamps))

    found, found_stamps = codec.unit(data)
    assert is_same(found, values)
    assert found_stamps == stamps
    assert codec.identity(row) == (1, None, 7)


@given(
    st.lists(st.tuples(LONGS, st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=20)
)
def test_rows_of_timers_are_in_the_order_in_which_they_fire(
    timers: list[tuple[int, str, bytes | None]],
) -> None:
    codec = RowCodec(
        "timers",
        StateKind.TIMER,
        KeyType(str),
        namespace=KeyType(bytes),
        sub=KeyType(int),
    )
    rows = [codec.row(key, namespace, time) for time, key, namespace in timers]
    changes = [Change(PUT, key, namespace, time, None, None) for time, key, namespace in timers]

    assert [timer_timestamp(row) for row in sorted(rows)] == sorted(time for time, _, _ in timers)
    assert all(row.startswith(timer_bound(timer_timestamp(row))) for row in rows)
    assert {codec.identity(row) for row in rows} == {(k, n, t) for t, k, n in timers}
    assert sorted(row for _, row, _ in encoded(codec, *changes)) == sorted(rows)


@given(
    typed_values(nested=False, scalars=[pa.string(), pa.binary(), pa.int64(), pa.float64()]),
    st.data(),
)
def test_no_keys_bytes_begin_with_those_of_another_key(
    key: tuple[pa.DataType, Any], data: st.DataObject
) -> None:
    key_type = KeyType(key[0])
    codec = RowCodec("value", StateKind.VALUE, key_type, value=pa.int64())
    canonical = key_type.canonical(key[1])
    other = canonical
    if isinstance(canonical, str):
        other = canonical + data.draw(st.text(min_size=1))
    elif isinstance(canonical, bytes):
        other = canonical + data.draw(st.binary(min_size=1))
    elif isinstance(canonical, int):
        other = data.draw(LONGS)

    a, b = codec.prefix(canonical, None), codec.prefix(other, None)
    assert (a == b) == (canonical == other or canonical is other)
    if a != b:
        assert not a.startswith(b)
        assert not b.startswith(a)


def test_rows_are_sorted_by_key_group() -> None:
    codec = RowCodec("value", StateKind.VALUE, KeyType(int), value=pa.int64())
    changes = [Change(PUT, key, None, None, key, None) for key in range(100)]
    rows = rows_of_changes(codec, changes, max_parallelism=16, assigner=KeyGroupAssigner.FLINK)

    groups = rows.table["group"].to_pylist()
    assert groups == sorted(groups)
    assert sorted(rows.table["value"].to_pylist()) == list(range(100))
    assert rows.table.schema.equals(codec.schema)


def test_no_changes_are_no_rows() -> None:
    codec = RowCodec("value", StateKind.VALUE, KeyType(int), value=pa.int64())

    assert encoded(codec) == []


@pytest.mark.parametrize("part", ["key", "namespace", "sub"])
def test_a_nan_that_was_read_is_the_one_that_is_found(part: str) -> None:
    key, namespace, sub = (
        KeyType(float) if name == part else KeyType(int) for name in ("key", "namespace", "sub")
    )
    codec = RowCodec("map", StateKind.MAP, key, namespace=namespace, sub=sub, value=pa.int64())
    nan = math.nan
    identity = tuple(
        kind.canonical(nan if kind.has_floats else 1) for kind in (key, namespace, sub)
    )

    assert codec.identity(codec.row(*identity)) == identity
