"""Bulk access against the states that go key by key."""

from __future__ import annotations

import datetime as dt
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowstate import (
    AggregatingStateDescriptor,
    BulkState,
    ListStateDescriptor,
    MapStateDescriptor,
    Reducer,
    ReducingStateDescriptor,
    StateTtlConfig,
    StateVisibility,
    UpdateType,
    ValueStateDescriptor,
)
from flowstate.errors import StateError, StateTypeError
from flowstate.key_groups import KeyGroupAssigner
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.keyed.single_table import SingleTable
from flowstate.testing.clock import ManualClock
from flowstate.testing.keyed_suite import KeyedHarness

LONG_MAX = (1 << 63) - 1
COMPOSITE = pa.struct([("shop", pa.string()), ("till", pa.int32())])
SUM = ReducingStateDescriptor("sum", Reducer.SUM, int)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "lmdb"])
def harness(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
) -> Iterator[KeyedHarness]:
    folder = tmp_path / "working" if request.param == "lmdb" else None
    harness = KeyedHarness(f"memory:/{tmp_path}", clock=clock, working_folder=folder)
    yield harness
    harness.close()


def bulk_sum(harness: KeyedHarness) -> BulkState:
    backend = harness.backends[0]
    backend.get_reducing_state(SUM)
    return BulkState(backend, "sum")


def sums(harness: KeyedHarness, *keys: Any) -> list[int | None]:
    return [harness.at(key).get_reducing_state(SUM).get() for key in keys]


def texts(*values: str | None) -> pa.Array:
    return pa.array(values, pa.string())


# Against the states that go key by key.


def numbers_of(kind: pa.DataType, choose: random.Random, count: int) -> list[Any]:
    if pa.types.is_floating(kind):
        # Quarters add up exactly, in any order.
        special = [math.inf, math.nan] if choose.random() < 0.3 else []
        return [choose.choice([choose.randint(-400, 400) / 4, *special]) for _ in range(count)]
    # So small that neither sums overflow nor means are rounded.
    limit = 1 << min(kind.bit_width - 10, 40)
    return [choose.randint(-limit, limit) for _ in range(count)]


def same(a: Any, b: Any) -> bool:
    return bool(a == b or (a is not None and b is not None and a != a and b != b))


@pytest.mark.parametrize("kind", [pa.int16(), pa.int64(), pa.float32(), pa.float64()], ids=str)
@pytest.mark.parametrize("reducer", list(Reducer), ids=str)
def test_adding_columns_is_adding_value_by_value(
    harness: KeyedHarness, tmp_path: Path, reducer: Reducer, kind: pa.DataType
) -> None:
    choose = random.Random(f"{reducer}-{kind}")
    one_by_one = KeyedHarness(f"memory:/{tmp_path}/other", clock=ManualClock())
    descriptor = AggregatingStateDescriptor("state", reducer, kind)
    for _ in range(4):
        keys = [f"key-{choose.randint(0, 20)}" for _ in range(60)]
        values = numbers_of(kind, choose, len(keys))
        harness.backends[0].get_aggregating_state(descriptor)
        bulk = BulkState(harness.backends[0], "state")
        distinct = bulk.add(pa.array(keys), pa.array(values, kind))
        for key, value in zip(keys, values, strict=True):
            one_by_one.at(key).get_aggregating_state(descriptor).add(value)

        expected = [one_by_one.at(key).get_aggregating_state(descriptor).get() for key in keys]
        assert distinct.to_pylist() == list(dict.fromkeys(keys))
        assert all(map(same, bulk.results(pa.array(keys)).to_pylist(), expected))
        found = [harness.at(key).get_aggregating_state(descriptor).get() for key in keys]
        assert all(map(same, found, expected))
        harness.restart()


@pytest.mark.parametrize("reducer", [Reducer.SUM, Reducer.MIN, Reducer.MAX], ids=str)
def test_reducing_columns_is_reducing_value_by_value(
    harness: KeyedHarness, reducer: Reducer
) -> None:
    choose = random.Random(reducer)
    descriptor = ReducingStateDescriptor("state", reducer, int)
    keys = [choose.choice("abcd") for _ in range(100)]
    values = [choose.randint(-50, 50) for _ in keys]
    harness.backends[0].get_reducing_state(descriptor)
    BulkState(harness.backends[0], "state").add(pa.array(keys), pa.array(values))

    function: Any = {"sum": sum, "min": min, "max": max}[reducer.value]
    for key in "abcd":
        own = [value for other, value in zip(keys, values, strict=True) if other == key]
        assert harness.at(key).get_reducing_state(descriptor).get() == function(own)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        pytest.param(pa.string(), ["b", "a", "é", "🙂", ""], id="string"),
        pytest.param(pa.binary(), [b"b", b"", b"\xff"], id="binary"),
        pytest.param(pa.bool_(), [True, False], id="bool"),
        pytest.param(pa.date32(), [dt.date(2024, 2, 29), dt.date(1, 1, 1)], id="date"),
        pytest.param(pa.time64("us"), [dt.time(1, 2, 3, 4), dt.time(0)], id="time"),
        pytest.param(
            pa.duration("us"), [dt.timedelta(1), dt.timedelta(-1), dt.timedelta(0)], id="duration"
        ),
        pytest.param(
            pa.timestamp("us", "UTC"),
            [dt.datetime(2024, 1, 1, tzinfo=dt.UTC), dt.datetime(1950, 1, 1, tzinfo=dt.UTC)],
            id="timestamp",
        ),
        pytest.param(pa.float64(), [math.nan, 1.5, -1.5, math.inf], id="double-with-nan"),
        pytest.param(pa.float32(), [math.nan, math.nan], id="only-nan"),
    ],
)
@pytest.mark.parametrize("reducer", [Reducer.MIN, Reducer.MAX], ids=str)
def test_extremes_are_found_of_every_scalar_type(
    harness: KeyedHarness, reducer: Reducer, kind: pa.DataType, values: list[Any]
) -> None:
    descriptor = ReducingStateDescriptor("state", reducer, kind)
    state = harness.at("one by one").get_reducing_state(descriptor)
    for value in values:
        state.add(value)
    bulk = BulkState(harness.backends[0], "state")
    for part in (values[:1], values[1:]):
        bulk.add(pa.array(["bulk"] * len(part)), pa.array(part, kind))

    harness.at("bulk")
    in_bulk = state.get()
    harness.at("one by one")
    assert same(in_bulk, state.get())


def test_values_are_updated_and_read_in_columns(harness: KeyedHarness) -> None:
    descriptor = ValueStateDescriptor("value", int)
    harness.at("a").get_state(descriptor).update(1)
    harness.at("b").get_state(descriptor).update(2)
    harness.restart()
    harness.backends[0].get_state(descriptor)
    bulk = BulkState(harness.backends[0], "value")
    bulk.update(texts("b", "c", "d", "c"), pa.array([20, 30, 40, 31]))
    bulk.update(texts("d", "a"), pa.array([None, 10], pa.int64()))
    harness.at("c").get_state(descriptor).update(33)

    assert bulk.get(texts("a", "b", "c", "d", "e", "a")).to_pylist() == [10, 20, 33, None, None, 10]
    harness.restart()
    harness.backends[0].get_state(descriptor)
    assert sorted(_keys(harness, "value")) == ["a", "b", "c"]


def _keys(harness: KeyedHarness, name: str) -> list[Any]:
    return list(harness.backends[0].keys(name))


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        pytest.param(pa.int64(), 7, id="number"),
        pytest.param(pa.list_(pa.int64()), [1, 2], id="list"),
        pytest.param(COMPOSITE, ("x", 1), id="struct-as-tuple"),
        pytest.param(pa.map_(pa.string(), pa.int64()), {"x": 1}, id="map"),
    ],
)
def test_a_default_stands_for_what_is_not_there(
    harness: KeyedHarness, kind: pa.DataType, default: Any
) -> None:
    descriptor = ValueStateDescriptor("value", kind, default=default)
    state = harness.at("a").get_state(descriptor)
    bulk = BulkState(harness.backends[0], "value")

    expected = pa.array([descriptor.value_type.to_physical(default)] * 2, kind)
    assert bulk.get(texts("a", "b")).equals(expected)
    assert descriptor.value_type.to_physical(state.value()) == expected.to_pylist()[0]
    assert harness.backends[0].entry_count("value") == 0


def test_nested_values_go_through_columns(harness: KeyedHarness) -> None:
    kind = pa.struct([("tags", pa.list_(pa.string())), ("n", pa.map_(pa.string(), pa.int64()))])
    descriptor = ValueStateDescriptor("value", kind)
    harness.backends[0].get_state(descriptor)
    column = pa.array([{"tags": ["x"], "n": [("k", 1)]}, {"tags": None, "n": []}], kind)
    BulkState(harness.backends[0], "value").update(texts("a", "b"), column)
    harness.restart()

    assert harness.at("a").get_state(descriptor).value() == {"tags": ["x"], "n": {"k": 1}}
    assert BulkState(harness.backends[0], "value").get(texts("a", "b")).equals(column)


def test_no_keys_are_no_work(harness: KeyedHarness) -> None:
    bulk = bulk_sum(harness)

    assert len(bulk.add(texts(), pa.array([], pa.int64()))) == 0
    assert len(bulk.get(texts())) == len(bulk.results(texts())) == 0


def test_a_column_may_be_a_part_of_a_larger_one(harness: KeyedHarness) -> None:
    harness.start(COMPOSITE)
    keys = pa.array([{"shop": shop, "till": 1} for shop in "abcd"], COMPOSITE)
    bulk_sum(harness).add(keys[1:3], pa.array([9, 1, 2, 9])[1:3])

    assert sums(harness, ("a", 1), ("b", 1), ("c", 1)) == [None, 1, 2]


# Keys.


def test_composite_keys_are_told_apart_by_all_their_fields(harness: KeyedHarness) -> None:
    harness.start(COMPOSITE)
    rows = [("a", 1), ("a", 2), ("a", 1), (None, 1), ("a", None), (None, 1), (None, None)]
    keys = pa.array([dict(zip(("shop", "till"), row, strict=True)) for row in rows], COMPOSITE)
    distinct = bulk_sum(harness).add(keys, pa.array([1, 2, 4, 8, 16, 32, 64]))
    harness.restart()

    expected = {("a", 1): 5, ("a", 2): 2, (None, 1): 40, ("a", None): 16, (None, None): 64}
    assert [tuple(row.values()) for row in distinct.to_pylist()] == list(expected)
    assert sums(harness, *expected) == list(expected.values())


def test_lists_and_structs_in_structs_are_told_apart_by_their_contents(
    harness: KeyedHarness,
) -> None:
    kind = pa.struct([("path", pa.list_(pa.string())), ("at", pa.struct([("x", pa.int64())]))])
    harness.start(kind, assigner=KeyGroupAssigner.XXHASH64)
    rows = [(["a", "b"], 1), (["ab"], 1), (["a", "b"], 1), ([], 1), (None, 1), (["a", None], 1)]
    keys = pa.array([{"path": path, "at": {"x": x}} for path, x in rows], kind)
    bulk_sum(harness).add(keys, pa.array([1, 2, 4, 8, 16, 32]))
    harness.restart()

    expected = {("a", "b"): 5, ("ab",): 2, (): 8, None: 16, ("a", None): 32}
    assert sums(harness, *((path, (1,)) for path in expected)) == list(expected.values())


@pytest.mark.parametrize("composite", [False, True], ids=["scalar", "composite"])
@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_every_nan_is_one_key_and_so_are_both_zeros(
    harness: KeyedHarness, kind: pa.DataType, composite: bool
) -> None:
    keys = pa.array([0.0, -0.0, math.nan, -math.nan, 1.0], kind)
    if composite:
        key_type = pa.struct([("f", kind)])
        keys = pa.StructArray.from_arrays([keys], fields=list(key_type))
    harness.start(keys.type)
    bulk = bulk_sum(harness)
    distinct = bulk.add(keys, pa.array([1, 2, 4, 8, 16]))

    assert len(distinct) == 3
    assert bulk.get(keys).to_pylist() == [3, 3, 12, 12, 16]
    harness.restart()
    assert bulk_sum(harness).get(keys).to_pylist() == [3, 3, 12, 12, 16]
    zero, nan = ((-0.0,), (math.nan,)) if composite else (-0.0, math.nan)
    assert sums(harness, zero, nan) == [3, 12]


def test_keys_of_a_narrower_type_are_taken(harness: KeyedHarness) -> None:
    harness.start(int)
    bulk_sum(harness).add(pa.array([1, 2, 1], pa.int16()), pa.array([1, 2, 4]))
    harness.restart()

    assert sums(harness, 1, 2) == [5, 2]


def test_keys_that_are_dictionary_encoded_are_taken(harness: KeyedHarness) -> None:
    bulk_sum(harness).add(texts("a", "b", "a").dictionary_encode(), pa.array([1, 2, 4]))

    assert sums(harness, "a", "b") == [5, 2]


def test_columns_in_chunks_are_columns(harness: KeyedHarness) -> None:
    values = ValueStateDescriptor("value", int)
    harness.backends[0].get_state(values)
    bulk = BulkState(harness.backends[0], "value")
    keys = pa.chunked_array([texts("a"), texts("b", "c")])
    for _ in range(2):
        bulk.update(keys, pa.chunked_array([[1, None], [3]], pa.int64()))
        assert bulk.get(keys).to_pylist() == [1, None, 3]
        # From here on the state in memory has entries and no columns.
        assert harness.at("a").get_state(values).value() == 1
    distinct = bulk_sum(harness).add(keys, pa.chunked_array([[1], [2, 3]]))
    assert distinct.to_pylist() == ["a", "b", "c"]
    assert sums(harness, "a", "b", "c") == [1, 2, 3]


def test_a_few_keys_now_and_then_leave_what_is_fast_for_many(clock: ManualClock) -> None:
    backend = KeyedStateBackend(str, max_parallelism=8, clock=clock)
    backend.get_reducing_state(SUM)
    added = BulkState(backend, "sum")
    keys = texts(*(f"key-{number}" for number in range(1000)))
    for _ in range(30):
        added.add(keys, pa.array([1] * 1000))
        added.add(keys.slice(0, 2), pa.array([1, 1]))

    assert has_columns(backend, "sum")


def test_a_few_of_many_keys_again_and_again_leave_the_columns(clock: ManualClock) -> None:
    backend = KeyedStateBackend(str, max_parallelism=8, clock=clock)
    number = ValueStateDescriptor("number", int)
    backend.get_state(number)
    backend.get_reducing_state(SUM)
    numbers, added = BulkState(backend, "number"), BulkState(backend, "sum")
    keys = texts(*(f"key-{number}" for number in range(1000)))
    added.add(keys, pa.array([1] * 1000))
    numbers.update(keys, pa.array(range(1000)))
    for _ in range(30):
        added.add(keys.slice(0, 20), pa.array([1] * 20))
    assert has_columns(backend, "sum")

    for _ in range(30):
        added.add(keys.slice(0, 2), pa.array([1, 1]))
    assert not has_columns(backend, "sum")
    assert added.get(keys.slice(0, 3)).to_pylist() == [61, 61, 31]
    assert sorted(backend.table("sum").change_columns().keys) == sorted(keys.to_pylist())

    for turn in range(30):
        with backend.lent(keys.slice(turn, 2)) as places:
            for key, place in zip(keys.slice(turn, 2).to_pylist(), places, strict=True):
                backend.set_current_key(key)
                backend.context.place = int(place)
                state = backend.get_state(number)
                state.update((state.value() or 0) + 1000)
    backend.clear_current_key()
    assert not has_columns(backend, "number")
    expected = [1000, *(turn + 2000 for turn in range(1, 30)), 1030, 31]
    assert numbers.get(keys.slice(0, 32)).to_pylist() == expected


def has_columns(backend: KeyedStateBackend, name: str) -> bool:
    table = backend.table(name)
    assert isinstance(table, SingleTable)
    return table.columns is not None


# What is refused.


def refused(
    harness: KeyedHarness, keys: pa.Array, values: pa.Array, message: str, *, update: bool = False
) -> None:
    bulk = bulk_sum(harness)
    bulk.add(texts("a", "z"), pa.array([1, LONG_MAX]))
    harness.backends[0].get_state(ValueStateDescriptor("value", int))
    values_in_bulk = BulkState(harness.backends[0], "value")
    change: Callable[[pa.Array, pa.Array], object] = values_in_bulk.update if update else bulk.add
    with pytest.raises(StateTypeError, match=message):
        change(keys, values)

    assert sums(harness, "a", "b", "z") == [1, None, LONG_MAX]
    assert _keys(harness, "value") == []
    harness.restart()
    assert sums(harness, "a", "b", "z") == [1, None, LONG_MAX]


def test_a_null_is_not_added(harness: KeyedHarness) -> None:
    refused(harness, texts("a", "b"), pa.array([1, None]), "1 of 2 values are null")


@pytest.mark.parametrize("update", [False, True], ids=["add", "update"])
def test_a_null_is_no_key(harness: KeyedHarness, update: bool) -> None:
    values = pa.array([1, 2])

    refused(harness, texts("a", None), values, "1 of 2 keys are null", update=update)
    with pytest.raises(StateTypeError, match="keys are null"):
        BulkState(harness.backends[0], "sum").get(texts(None))


@pytest.mark.parametrize("update", [False, True], ids=["add", "update"])
def test_there_is_one_value_for_each_key(harness: KeyedHarness, update: bool) -> None:
    refused(harness, texts("a", "b"), pa.array([1]), "2 keys for 1 values", update=update)


def test_a_sum_that_outgrows_its_type_changes_nothing(harness: KeyedHarness) -> None:
    refused(harness, texts("a", "b", "z"), pa.array([1, 1, 1]), "'sum'.*does not fit int64")


def test_a_sum_that_outgrows_its_type_within_a_column_changes_nothing(
    harness: KeyedHarness,
) -> None:
    refused(harness, texts("a", "b", "b"), pa.array([1, LONG_MAX, LONG_MAX]), "out of the range")


def test_a_sum_that_fits_in_the_end_is_taken(harness: KeyedHarness) -> None:
    bulk_sum(harness).add(texts("b", "b", "b"), pa.array([LONG_MAX, LONG_MAX, -LONG_MAX]))

    assert sums(harness, "b") == [LONG_MAX]


def test_a_sum_of_a_narrow_type_is_checked(harness: KeyedHarness) -> None:
    harness.backends[0].get_reducing_state(ReducingStateDescriptor("s", Reducer.SUM, pa.int8()))
    bulk = BulkState(harness.backends[0], "s")
    bulk.add(texts("a"), pa.array([100], pa.int8()))

    with pytest.raises(StateTypeError, match="does not fit int8"):
        bulk.add(texts("b", "a"), pa.array([1, 100], pa.int8()))
    assert bulk.get(texts("a", "b")).to_pylist() == [100, None]


def test_a_column_of_another_type_is_refused(harness: KeyedHarness) -> None:
    refused(harness, texts("a"), pa.array([0.5]), "'sum'.*double cannot be int64")


def test_the_mean_of_large_integers_is_rounded_as_one_by_one(harness: KeyedHarness) -> None:
    descriptor = AggregatingStateDescriptor("mean", Reducer.MEAN, int)
    state = harness.at("one").get_aggregating_state(descriptor)
    state.add((1 << 60) + 1)
    bulk = BulkState(harness.backends[0], "mean")
    bulk.add(texts("bulk"), pa.array([(1 << 60) + 1]))

    assert bulk.results(texts("bulk")).to_pylist() == [state.get()]


def test_a_float_is_rounded_before_the_checkpoint_and_not_by_it(harness: KeyedHarness) -> None:
    descriptor = ReducingStateDescriptor("s", Reducer.SUM, pa.float32())
    harness.backends[0].get_reducing_state(descriptor)
    for _ in range(2):
        keys = texts("a", "a", "a")
        BulkState(harness.backends[0], "s").add(keys, pa.array([0.1] * 3, pa.float32()))
    before = harness.at("a").get_reducing_state(descriptor).get()
    harness.restart()

    assert harness.at("a").get_reducing_state(descriptor).get() == before


class Words:
    name, version = "words", 1

    def serialize(self, value: list[str]) -> bytes:
        return json.dumps(value).encode()

    def deserialize(self, data: bytes, version: int) -> list[str]:
        found: list[str] = json.loads(data)
        return found


@pytest.mark.parametrize(
    "register",
    [
        pytest.param(lambda b: b.get_list_state(ListStateDescriptor("state", int)), id="list"),
        pytest.param(lambda b: b.get_map_state(MapStateDescriptor("state", int, int)), id="map"),
        pytest.param(
            lambda b: b.get_state(ValueStateDescriptor("state", int), int), id="namespaces"
        ),
        pytest.param(lambda b: b.get_state(ValueStateDescriptor("state", Words())), id="objects"),
    ],
)
def test_some_states_have_no_bulk_access(
    harness: KeyedHarness, register: Callable[[KeyedStateBackend], object]
) -> None:
    register(harness.backends[0])

    with pytest.raises(StateError, match="'state'"):
        BulkState(harness.backends[0], "state")


def test_only_built_in_reducers_add_in_bulk(harness: KeyedHarness) -> None:
    descriptor = ReducingStateDescriptor("own", lambda a, b: a + b, int)
    harness.at("a").get_reducing_state(descriptor).add(5)
    bulk = BulkState(harness.backends[0], "own")

    with pytest.raises(StateError, match="needs a built-in reducer"):
        bulk.add(texts("a"), pa.array([1]))
    with pytest.raises(StateError, match="added to, not updated"):
        bulk.update(texts("a"), pa.array([1]))
    assert bulk.results(texts("a")).to_pylist() == bulk.get(texts("a")).to_pylist() == [5]


# Time to live.


def ttl(**options: Any) -> StateTtlConfig:
    return StateTtlConfig(ttl=dt.timedelta(milliseconds=100), cleanup_incrementally=0, **options)


@pytest.mark.parametrize("update_type", list(UpdateType), ids=str)
@pytest.mark.parametrize("visibility", list(StateVisibility), ids=str)
def test_columns_live_as_long_as_single_values(
    harness: KeyedHarness,
    clock: ManualClock,
    update_type: UpdateType,
    visibility: StateVisibility,
) -> None:
    config = ttl(update_type=update_type, visibility=visibility)
    descriptor = AggregatingStateDescriptor("state", Reducer.SUM, int, ttl=config)
    state = harness.at("one").get_aggregating_state(descriptor)
    bulk = BulkState(harness.backends[0], "state")
    seen = []
    reads = [(60, 0), (110, 0), (300, 0), (351, 0), (352, 0)]
    for time, added in sorted([*reads, (0, 1), (150, 2), (251, 4)]):
        clock.set(time)
        harness.at("one")
        if added:
            state.add(added)
            bulk.add(texts("bulk"), pa.array([added]))
        else:
            seen.append((state.get(), *bulk.results(texts("bulk")).to_pylist()))

    assert [one for one, _ in seen] == [many for _, many in seen]
    assert {one for one, _ in seen} > {1}


def test_updated_columns_are_stamped_and_removed_when_they_have_expired(
    harness: KeyedHarness, clock: ManualClock
) -> None:
    descriptor = ValueStateDescriptor("value", int, default=7, ttl=ttl())
    harness.backends[0].get_state(descriptor)
    bulk = BulkState(harness.backends[0], "value")
    bulk.update(texts("a", "b"), pa.array([1, 2]))
    clock.set(60)
    bulk.update(texts("b"), pa.array([3]))
    harness.restart()
    clock.set(100)
    harness.backends[0].get_state(descriptor)
    bulk = BulkState(harness.backends[0], "value")

    assert bulk.get(texts("a", "b", "c")).to_pylist() == [None, 3, None]
    assert _keys(harness, "value") == ["b"]
