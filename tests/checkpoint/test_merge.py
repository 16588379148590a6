from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstate.checkpoint import convert_rows, drop_expired, merge_rows
from flowstate.checkpoint.identity import codes_of, combine
from flowstate.errors import StateMigrationError, StateTypeError
from flowstate.rows import RowOp, StateKind, StateRows, row_schema

from .cases import CLEAR, DELETE, PAIR, PUT, int_rows, rows_of, values_of

# Keys with null fields, and with fields that would collide if they were joined as text.
KEYS: list[dict[str, Any]] = [
    {"a": "x", "b": 1},
    {"a": "x", "b": None},
    {"a": None, "b": 1},
    {"a": "", "b": 1},
    {"a": None, "b": None},
]
NAMESPACES = [None, 1, 2]
SUBS = [None, "s", "t", ""]
SCHEMA = row_schema(key=PAIR, namespace=pa.int64(), sub=pa.string(), value=pa.int64())

Pair = tuple[int, int]
Identity = tuple[int, int, int]
Change = tuple[set[Pair], dict[Identity, int | None]]

pairs = st.tuples(st.integers(0, len(KEYS) - 1), st.integers(0, len(NAMESPACES) - 1))
identities = st.tuples(pairs, st.integers(0, len(SUBS) - 1)).map(lambda both: (*both[0], both[1]))
changes = st.tuples(
    st.sets(pairs, max_size=3),
    st.dictionaries(identities, st.one_of(st.none(), st.integers(0, 9)), max_size=12),
)


def rows_of_change(change: Change, seed: int) -> StateRows:
    cleared, entries = change
    rows: list[tuple[Any, ...]] = [
        (key, CLEAR, KEYS[key], NAMESPACES[namespace], None, None) for key, namespace in cleared
    ]
    for (key, namespace, sub), value in entries.items():
        op = DELETE if value is None else PUT
        rows.append((key, op, KEYS[key], NAMESPACES[namespace], SUBS[sub], value))
    # Within a set the order says nothing, not even that of a CLEAR.
    np.random.default_rng(seed).shuffle(rows)
    return rows_of("map", StateKind.MAP, SCHEMA, rows)


def apply(model: dict[Identity, int], change: Change) -> None:
    cleared, entries = change
    for identity in [identity for identity in model if identity[:2] in cleared]:
        del model[identity]
    for identity, value in entries.items():
        if value is None:
            model.pop(identity, None)
        else:
            model[identity] = value


def contents(rows: StateRows) -> dict[Identity, int]:
    found = {}
    for row in rows.table.to_pylist():
        assert row["op"] == PUT
        identity = (
            KEYS.index(row["key"]),
            NAMESPACES.index(row["namespace"]),
            SUBS.index(row["sub"]),
        )
        assert identity not in found
        found[identity] = row["value"]
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(changes, min_size=1, max_size=6), st.data())
def test_merging_gives_what_a_dict_gives(history: list[Change], data: st.DataObject) -> None:
    model: dict[Identity, int] = {}
    for change in history:
        apply(model, change)
    sets = [rows_of_change(change, seed) for seed, change in enumerate(history)]
    begin = data.draw(st.integers(0, len(sets) - 1))
    end = data.draw(st.integers(begin + 1, len(sets)))

    at_once = merge_rows(sets, drop_tombstones=True)
    middle = merge_rows(sets[begin:end], drop_tombstones=False)
    in_steps = merge_rows([*sets[:begin], middle, *sets[end:]], drop_tombstones=True)

    assert contents(at_once) == model
    assert contents(in_steps) == model
    groups = middle.table.column("group").to_pylist()
    assert groups == sorted(groups)


def test_a_deletion_stays_while_something_older_may_need_it() -> None:
    put, gone = int_rows([1, 2]), int_rows([2])
    table = gone.table.set_column(1, gone.table.schema.field("op"), pa.array([1], pa.uint8()))
    gone = StateRows("count", StateKind.VALUE, table)

    kept = merge_rows([put, gone], drop_tombstones=False)

    assert dict(zip(*(kept.table.column(n).to_pylist() for n in ("key", "op")), strict=True)) == {
        1: PUT,
        2: DELETE,
    }
    assert values_of(merge_rows([put, gone], drop_tombstones=True)) == {1: 1}
    assert values_of(merge_rows([gone], drop_tombstones=True)) == {}


def test_only_the_newest_clear_stays_and_makes_deletions_needless() -> None:
    def change(*rows: tuple[RowOp, str | None, int | None]) -> StateRows:
        full = [(0, op, KEYS[0], None, sub, value) for op, sub, value in rows]
        return rows_of("map", StateKind.MAP, SCHEMA, full)

    merged = merge_rows(
        [
            change((CLEAR, None, None), (PUT, "s", 1)),
            change((CLEAR, None, None), (PUT, "t", 2)),
            change((DELETE, "t", None), (PUT, "u", 3)),
        ],
        drop_tombstones=False,
    )

    found = [(row["op"], row["sub"]) for row in merged.table.to_pylist()]
    assert sorted(found, key=str) == [(PUT, "u"), (CLEAR, None)]


def test_the_order_of_a_million_rows_is_by_group_and_the_later_wins() -> None:
    old = int_rows(range(500_000))
    new = int_rows(range(250_000, 750_000), [-1] * 500_000)

    merged = merge_rows([old, new], drop_tombstones=True)

    groups = merged.table.column("group").to_numpy()
    assert bool(np.all(groups[:-1] <= groups[1:]))
    values = values_of(merged)
    assert len(values) == 750_000
    assert all(values[key] == (key if key < 250_000 else -1) for key in range(750_000))


def test_the_newest_types_win() -> None:
    old = rows_of(
        "s", StateKind.VALUE, row_schema(key=pa.int32(), value=pa.int32()), [(0, PUT, 1, 5)]
    )
    schema = row_schema(key=pa.int32(), value=pa.int64(), ts=pa.int64())
    new = rows_of("s", StateKind.VALUE, schema, [(0, PUT, 2, 6, 77)])

    switched_on = merge_rows([old, new], drop_tombstones=True).table
    switched_off = merge_rows([new, old], drop_tombstones=True).table

    assert switched_on.schema.equals(schema)
    assert switched_on.select(["key", "value", "ts"]).to_pylist() == [
        {"key": 1, "value": 5, "ts": None},
        {"key": 2, "value": 6, "ts": 77},
    ]
    assert switched_off.schema.equals(old.table.schema)
    assert switched_off.num_rows == 2


def test_an_empty_newest_set_decides_the_types() -> None:
    old = int_rows([1])
    schema = row_schema(key=pa.int64(), value=pa.string())
    empty = StateRows("count", StateKind.VALUE, schema.empty_table())

    merged = merge_rows([old, empty], drop_tombstones=True)

    assert merged.table.column("value").to_pylist() == ["1"]


def test_a_value_that_does_not_fit_the_new_type_is_refused() -> None:
    narrow = row_schema(key=pa.int64(), value=pa.int8())
    new = StateRows("count", StateKind.VALUE, narrow.empty_table())

    with pytest.raises(StateMigrationError, match="give the state a new name"):
        merge_rows([int_rows([1000]), new], drop_tombstones=True)


def test_a_conversion_of_ones_own_is_used() -> None:
    def halve(table: pa.Table, schema: pa.Schema) -> pa.Table:
        values = pa.array([f"{value / 2}" for value in table.column("value").to_pylist()])
        return convert_rows(table.set_column(3, "value", values), schema)

    schema = row_schema(key=pa.int64(), value=pa.string())
    new = StateRows("count", StateKind.VALUE, schema.empty_table())

    merged = merge_rows([int_rows([3]), new], drop_tombstones=True, convert=halve)

    assert merged.table.column("value").to_pylist() == ["1.5"]


def test_sets_of_several_states_are_refused() -> None:
    with pytest.raises(ValueError, match="several states"):
        merge_rows([int_rows([1]), int_rows([1], name="other")], drop_tombstones=True)


# Identity


NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "values", "same_as"),
    [
        (pa.float64(), [0.0, -0.0, NAN, NAN, None], [0, 1, 2, 2, 3]),
        (pa.float32(), [NAN, 1.0, NAN], [0, 1, 0]),
        (pa.list_(pa.int8()), [[1, 2], [1], [2, 1], None, [], [1, 2], [None], None], None),
        (pa.list_(pa.list_(pa.string())), [[["a"], []], [[], ["a"]], [["a"]], [["a"], []]], None),
        (pa.list_(PAIR), [[{"a": "x", "b": 1}], [{"a": "x", "b": None}], [None]], None),
        (pa.list_(pa.int32(), 2), [[1, 2], None, [2, 1], [1, 2]], None),
        (pa.struct([("s", PAIR)]), [{"s": None}, {"s": {"a": None, "b": None}}, None], None),
        (pa.bool_(), [True, False, None, True], None),
        (pa.null(), [None, None], [0, 0]),
        (pa.binary(2), [b"ab", None, b"ab"], None),
    ],
    ids=str,
)
def test_equal_values_have_equal_codes(
    kind: pa.DataType, values: list[Any], same_as: Sequence[int] | None
) -> None:
    expected = [values.index(value) for value in values] if same_as is None else same_as

    # Once as it is, and once as a slice of a longer array, in chunks.
    padded = pa.array([values[-1], *values], kind).slice(1)
    chunked = pa.chunked_array([padded.slice(0, 1), padded.slice(1)])
    for column in (padded, chunked):
        codes = codes_of(column)
        numbers = codes.numbers.tolist()
        assert max(numbers) < codes.limit
        assert [numbers.index(number) for number in numbers] == [
            list(expected).index(number) for number in expected
        ]


def test_codes_of_two_columns_tell_both_apart() -> None:
    left, right = pa.array([1, 1, 2, None, 1]), pa.array(["a", "b", "a", None, "a"])

    numbers = combine([codes_of(left), codes_of(right)]).numbers.tolist()

    assert [numbers.index(number) for number in numbers] == [0, 1, 2, 3, 0]


def test_maps_cannot_be_keys() -> None:
    with pytest.raises(StateTypeError, match="cannot be told apart"):
        codes_of(pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())))


# Expiry

MAX = (1 << 63) - 1
MIN = -(1 << 63)


def timed(*times: int | None) -> StateRows:
    schema = row_schema(key=pa.int64(), value=pa.int64(), ts=pa.int64())
    rows = [(0, PUT, key, key, ts) for key, ts in enumerate(times)]
    return rows_of("s", StateKind.VALUE, schema, rows)


@pytest.mark.parametrize(("now_ms", "alive"), [(109, [0, 1]), (110, [1])], ids=["young", "old"])
def test_rows_from_before_the_ttl_are_as_old_as_the_ttl(now_ms: int, alive: list[int]) -> None:
    kept = drop_expired(timed(None, 1000), ttl_ms=10, now_ms=now_ms, unstamped_ms=100)

    assert kept.table.column("key").to_pylist() == alive


@pytest.mark.parametrize(
    ("times", "ttl_ms", "now_ms", "alive"),
    [
        ([0, 1, 2], 10, 11, [2]),
        ([0, 1, 2], 10, 9, [0, 1, 2]),
        ([None, 0], 1, 100, [0]),
        ([MAX - 5, 0], 10, MAX - 1, [0]),
        ([MAX, 0], 10, MAX, []),
        ([MIN + 1, 0], 10, MIN + 11, [1]),
        ([MIN, 0], 10, 100, [0]),
        ([MIN, 0], MAX, MIN, [0, 1]),
    ],
    ids=str,
)
def test_rows_expire_when_their_time_has_come(
    times: list[int | None], ttl_ms: int, now_ms: int, alive: list[int]
) -> None:
    kept = drop_expired(timed(*times), ttl_ms=ttl_ms, now_ms=now_ms)

    assert kept.table.column("key").to_pylist() == alive


@pytest.mark.parametrize("make", [pa.list_, pa.large_list], ids=["list", "large_list"])
def test_single_elements_of_lists_expire(make: Any) -> None:
    schema = row_schema(
        key=pa.int64(), sub=pa.int64(), value=make(pa.string()), ts=make(pa.int64())
    )
    rows = rows_of(
        "l",
        StateKind.LIST,
        schema,
        [
            (0, PUT, 0, 0, ["skipped"], [0]),
            (0, PUT, 1, 0, ["a", None, "c"], [1, 20, 21]),
            (1, PUT, 1, 1, ["d"], [2]),
            (2, PUT, 2, 0, ["untimed"], None),
            (2, DELETE, 3, 0, None, None),
            (2, PUT, 4, 0, ["e", "f"], [30, 3]),
        ],
    )
    sliced = StateRows("l", StateKind.LIST, rows.table.slice(1))

    kept = drop_expired(sliced, ttl_ms=10, now_ms=15).table

    assert kept.schema.equals(schema)
    kept.validate(full=True)
    assert [(row["key"], row["value"], row["ts"]) for row in kept.to_pylist()] == [
        (1, [None, "c"], [20, 21]),
        (2, ["untimed"], None),
        (3, None, None),
        (4, ["e"], [30]),
    ]


def test_states_without_times_do_not_expire() -> None:
    rows = int_rows([1])

    assert drop_expired(rows, ttl_ms=1, now_ms=MAX) is rows
