"""What a descriptor refuses at birth, and what two descriptors have to do with each other."""

from __future__ import annotations

import dataclasses
import datetime as dt
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from flowstate import (
    AggregateFunction,
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReduceFunction,
    Reducer,
    ReducingStateDescriptor,
    StateTtlConfig,
    StateVisibility,
    TtlTime,
    UpdateType,
    ValueStateDescriptor,
)
from flowstate.descriptors import StateDescriptor
from flowstate.errors import StateDescriptorError, StateMigrationError, StateTypeError
from flowstate.rows import StateKind
from flowstate.types import value_type

DAY = StateTtlConfig(ttl=dt.timedelta(days=1))

# One descriptor of each kind, by its name, its type and maybe its TTL.
Make = Callable[..., StateDescriptor]
KINDS: dict[StateKind, Make] = {
    StateKind.VALUE: lambda name, kind, **ttl: ValueStateDescriptor(name, kind, **ttl),
    StateKind.LIST: lambda name, kind, **ttl: ListStateDescriptor(name, kind, **ttl),
    StateKind.MAP: lambda name, kind, **ttl: MapStateDescriptor(name, str, kind, **ttl),
    StateKind.REDUCING: lambda name, kind, **ttl: ReducingStateDescriptor(
        name, operator.add, kind, **ttl
    ),
    StateKind.AGGREGATING: lambda name, kind, **ttl: AggregatingStateDescriptor(
        name, Total(), kind, **ttl
    ),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


class Total(AggregateFunction[int, int, int]):
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: int, accumulator: int) -> int:
        return accumulator + value

    def get_result(self, accumulator: int) -> int:
        return accumulator

    def merge(self, a: int, b: int) -> int:
        return a + b

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Total)

    def __hash__(self) -> int:
        return 1


class Smaller(ReduceFunction[int]):
    def reduce(self, a: int, b: int) -> int:
        return min(a, b)


@dataclasses.dataclass(frozen=True)
class Bytes:
    name: str = "bytes"
    version: int = 1

    def serialize(self, value: bytes) -> bytes:
        return value

    def deserialize(self, data: bytes, version: int) -> bytes:
        return data


# Names.


@every_kind
@pytest.mark.parametrize("name", ["a", "x" * 255, "ä" * 255, "with space", "a/b", "\0", "_flow"])
def test_a_name_may_be_any_text(make: Make, name: str) -> None:
    assert make(name, int).name == name


@every_kind
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "a state needs a name, not ''"),
        (None, "a state needs a name, not None"),
        (5, "a state needs a name, not 5"),
        (int, "a state needs a name, not <class 'int'>"),
        ("x" * 256, "a state's name has at most 255 characters, not 256"),
        ("_flow.timers", "the state name '_flow.timers' is reserved: names that begin"),
        ("\ud800", r"the state name '\ud800' is not valid Unicode"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_name_that_cannot_be_is_refused(make: Make, name: Any, message: str) -> None:
    with pytest.raises(StateDescriptorError, match=re.escape(message)):
        make(name, int)


# Types and functions.


@every_kind
def test_a_descriptor_has_the_kind_and_the_type_it_was_given(make: Make) -> None:
    kind = next(kind for kind, other in KINDS.items() if other is make)
    descriptor = make("name", list[int])

    assert descriptor.kind is kind
    assert descriptor.types["value"] == value_type(pa.list_(pa.int64()))
    assert descriptor.to_json()["kind"] == kind.value
    assert descriptor.to_json()["value"]["type"] == "list<item: int64>"


@every_kind
def test_a_type_that_cannot_be_is_refused(make: Make) -> None:
    with pytest.raises(StateDescriptorError, match="<class 'object'> is not a type of state"):
        make("name", object)
    with pytest.raises(StateDescriptorError, match="uint8 is not supported in state"):
        make("name", pa.list_(pa.uint8()))


@every_kind
def test_a_descriptor_cannot_be_changed(make: Make) -> None:
    descriptor = make("name", int)

    with pytest.raises(dataclasses.FrozenInstanceError):
        descriptor.name = "other"  # type: ignore[misc]


def test_a_default_must_be_of_the_states_type() -> None:
    assert ValueStateDescriptor("name", tuple[int, str], default=(1, "a")).default == (1, "a")
    with pytest.raises(StateTypeError, match="state 'count': the default: a value of class str is"):
        ValueStateDescriptor("count", int, default="0")
    with pytest.raises(StateTypeError, match="state 'count': the default: 128 is out of the range"):
        ValueStateDescriptor("count", pa.int8(), default=128)


@pytest.mark.parametrize("key_type", [dict[str, int], tuple[str, dict[str, int]]], ids=str)
def test_keys_of_a_map_are_no_maps(key_type: Any) -> None:
    with pytest.raises(StateDescriptorError, match="cannot be a key"):
        MapStateDescriptor("name", key_type, int)


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (operator.sub, 3),
        (lambda a, b: a * b, 10),
        (max, 5),
        (np.subtract, 3),
        (Smaller(), 2),
        (Reducer.SUM, 7),
        (Reducer.MIN, 2),
        (Reducer.MAX, 5),
    ],
    ids=["function", "lambda", "builtin", "numpy", "class", "sum", "min", "max"],
)
def test_what_reduces_is_called_with_two_values(reduce: Any, expected: int) -> None:
    assert ReducingStateDescriptor("name", reduce, int).function(5, 2) == expected


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        ("sum", "'sum' is neither a function of two values, nor a ReduceFunction, nor a Reducer"),
        (None, "None is neither a function"),
        (Smaller, "Smaller'> is a class: give Smaller(...)"),
        (Reducer.COUNT, "count does not reduce values to a value of their type: use an Aggregat"),
        (Reducer.MEAN, "mean does not reduce values to a value of their type"),
    ],
    ids=str,
)
def test_what_does_not_reduce_is_refused(reduce: Any, message: str) -> None:
    with pytest.raises(StateDescriptorError, match=re.escape(message)):
        ReducingStateDescriptor("name", reduce, int)


@pytest.mark.parametrize(
    "aggregate",
    ["mean", None, max, Total, Smaller()],
    ids=["text", "none", "function", "class", "reduce-function"],
)
def test_what_does_not_aggregate_is_refused(aggregate: Any) -> None:
    message = re.escape(f"{aggregate!r} is neither an AggregateFunction nor a Reducer")

    with pytest.raises(StateDescriptorError, match=message):
        AggregatingStateDescriptor("name", aggregate, int)


@pytest.mark.parametrize(
    ("reducer", "stored"),
    [
        (Reducer.SUM, "int64"),
        (Reducer.COUNT, "int64"),
        (Reducer.MIN, "int8"),
        (Reducer.MAX, "int8"),
        (Reducer.MEAN, "struct<sum: double, count: int64>"),
    ],
    ids=str,
)
def test_a_built_in_reducer_knows_the_type_of_its_accumulator(
    reducer: Reducer, stored: str
) -> None:
    descriptor = AggregatingStateDescriptor("name", reducer, pa.int8())

    assert descriptor.input_type == value_type(pa.int8())
    assert str(descriptor.types["value"]) == stored


@pytest.mark.parametrize("reducer", [Reducer.MIN, Reducer.MAX, Reducer.SUM, Reducer.MEAN], ids=str)
def test_a_built_in_reducer_does_not_look_into_serialized_values(reducer: Reducer) -> None:
    message = f"{reducer.value} is not defined for serializer 'bytes'"

    with pytest.raises(StateDescriptorError, match=message):
        AggregatingStateDescriptor("name", reducer, Bytes())
    if reducer is not Reducer.MEAN:
        with pytest.raises(StateDescriptorError, match=message):
            ReducingStateDescriptor("name", reducer, Bytes())


def test_serialized_values_may_be_counted() -> None:
    descriptor = AggregatingStateDescriptor("name", Reducer.COUNT, Bytes())

    assert descriptor.input_type == value_type(Bytes())
    assert str(descriptor.types["value"]) == "int64"


# Time to live.


def test_a_ttl_has_flinks_defaults() -> None:
    assert DAY.ttl_ms == 86_400_000
    assert DAY.update_type is UpdateType.ON_CREATE_AND_WRITE
    assert DAY.visibility is StateVisibility.NEVER_RETURN_EXPIRED
    assert DAY.time is TtlTime.PROCESSING_TIME
    assert DAY.to_json() == {"ttl_ms": 86_400_000, "ttl_time": "processing", "ttl_cleanup": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttl": dt.timedelta(0)}, "TTL is expected to be positive. It is 0:00:00"),
        ({"ttl": dt.timedelta(days=-1)}, "TTL is expected to be positive. It is -1 day"),
        ({"ttl": dt.timedelta(microseconds=999)}, "and a millisecond is the least"),
        ({"ttl": 5}, "ttl must be a timedelta, not 5"),
        ({"ttl": None}, "ttl must be a timedelta, not None"),
        ({"update_type": "Disabled"}, "update_type must be a UpdateType, not 'Disabled'"),
        ({"visibility": "NeverReturnExpired"}, "visibility must be a StateVisibility, not 'Never"),
        ({"time": "event"}, "time must be a TtlTime, not 'event'"),
        ({"time": UpdateType.DISABLED}, "time must be a TtlTime, not <UpdateType.DISABLED"),
        ({"cleanup_incrementally": -1}, "cleanup_incrementally must be an int of at least 0"),
        ({"cleanup_incrementally": True}, "cleanup_incrementally must be an int of at least 0"),
        ({"cleanup_incrementally": 0.5}, "cleanup_incrementally must be an int of at least 0"),
    ],
    ids=str,
)
def test_a_ttl_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StateDescriptorError, match=re.escape(message)):
        StateTtlConfig(**{"ttl": dt.timedelta(days=1), **options})


@every_kind
def test_a_state_has_a_ttl_unless_that_is_disabled(make: Make) -> None:
    disabled = dataclasses.replace(DAY, update_type=UpdateType.DISABLED)

    assert make("name", int).live_ttl is None
    assert make("name", int, ttl=DAY).live_ttl is DAY
    assert make("name", int, ttl=disabled).live_ttl is None
    plain = make("name", int).to_json()
    assert make("name", int, ttl=disabled).to_json() == plain
    assert make("name", int, ttl=DAY).to_json() == {**plain, **DAY.to_json()}


@every_kind
def test_a_duration_is_no_ttl(make: Make) -> None:
    with pytest.raises(
        StateDescriptorError, match="state 'name': ttl must be a StateTtlConfig, not datetime"
    ):
        make("name", int, ttl=dt.timedelta(days=1))


# Two descriptors.


@every_kind
def test_descriptors_of_one_name_and_type_are_equal(make: Make) -> None:
    descriptor = make("name", int)

    assert descriptor == make("name", pa.int64())
    assert hash(descriptor) == hash(make("name", pa.int64()))
    assert descriptor != make("other", int)
    assert descriptor != make("name", pa.int32())
    assert descriptor != make("name", int, ttl=DAY)


def test_a_state_is_the_same_whatever_its_ttl_default_and_function_are() -> None:
    sums = ReducingStateDescriptor("name", Reducer.SUM, int)
    values = ValueStateDescriptor("name", int)

    assert sums.is_same(ReducingStateDescriptor("name", max, int, ttl=DAY))
    assert values.is_same(ValueStateDescriptor("name", int, default=5, ttl=DAY))


def test_a_state_of_another_kind_name_or_type_is_another_state() -> None:
    descriptors = [
        *(make("name", int) for make in KINDS.values()),
        *(make("name", str) for make in KINDS.values()),
        *(make("other", int) for make in KINDS.values()),
        MapStateDescriptor("name", int, int),
    ]

    for one in descriptors:
        assert [other for other in descriptors if one.is_same(other)] == [one]


@every_kind
def test_descriptors_can_be_sent_to_another_process_as_spark_does_it(make: Make) -> None:
    descriptor = make("name", dict[str, list[int]], ttl=DAY)
    sent = cloudpickle.loads(cloudpickle.dumps(descriptor))  # type: ignore[no-untyped-call]

    assert sent == descriptor
    assert sent.types["value"].to_physical({"a": [1]}) == [("a", [1])]


# What was written before. Each pair of kinds and types is in the suites of keyed state.


@every_kind
def test_what_was_written_is_restored_as_it_was_or_wider(make: Make) -> None:
    old = make("name", pa.int32()).to_json()

    for kind in (pa.int32(), pa.int64(), pa.float64()):
        make("name", kind).check_restored(old)
    with pytest.raises(StateMigrationError, match="state 'name' value was written as int32"):
        make("name", pa.int16()).check_restored(old)


@pytest.mark.parametrize(
    ("old", "new"),
    [(pa.int32(), pa.int64()), (pa.string(), pa.large_string()), (tuple[int], tuple[int, int])],
    ids=str,
)
def test_a_maps_own_keys_are_not_widened(old: Any, new: Any) -> None:
    written = MapStateDescriptor("name", old, int).to_json()

    with pytest.raises(StateMigrationError, match="state 'name': a map's own keys cannot change"):
        MapStateDescriptor("name", new, int).check_restored(written)
    MapStateDescriptor("name", old, int).check_restored(written)
