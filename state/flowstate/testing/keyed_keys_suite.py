"""Whose state it is: keys, namespaces, and what is registered under which name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from flowstate.aggregates import Reducer
from flowstate.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from flowstate.errors import (
    NoCurrentKeyError,
    StateDescriptorError,
    StateError,
    StateRegistrationError,
    StateTypeError,
)
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.keyed.single_states import ValueState
from flowstate.keyed.states import ListState, MapState
from flowstate.testing.keyed_base_suite import KeyedHarness, KeyedSuiteBase

__all__ = ["KeySuite", "LongKeySuite", "NamespaceSuite", "RegistrationSuite"]

_NUMBER = ValueStateDescriptor("number", int)
_LIST = ListStateDescriptor("list", int)
_MAP = MapStateDescriptor("map", str, int)
_SUM = ReducingStateDescriptor("sum", Reducer.SUM, int)
_MEAN = AggregatingStateDescriptor("mean", Reducer.MEAN, int)

_COMPOSITE = pa.struct([("shop", pa.string()), ("till", pa.int32()), ("rate", pa.float64())])

# LMDB's keys end at 511 bytes; these are one another's beginnings, and differ only at the end.
_LONG = "x" * 600
_LONG_KEYS = [
    "x" * 470,
    "x" * 480,
    "x" * 481,
    "x" * 511,
    "x" * 512,
    _LONG,
    f"{_LONG}a",
    f"{_LONG}b",
    f"{_LONG}a-and-more",
    "y" * 100_000,
    "é" * 400,
]


class KeySuite(KeyedSuiteBase):
    """Each key has its own state."""

    def test_keys_do_not_see_one_another(self, harness: KeyedHarness) -> None:
        for number, key in enumerate("abc"):
            backend = harness.at(key)
            backend.get_state(_NUMBER).update(number)
            backend.get_list_state(_LIST).add(number)
            backend.get_map_state(_MAP).put("x", number)
            backend.get_reducing_state(_SUM).add(number)
        backend = harness.at("b")
        backend.get_list_state(_LIST).clear()
        backend.get_map_state(_MAP).clear()
        harness.restart()

        for number, key in enumerate("abc"):
            backend = harness.at(key)
            assert backend.get_state(_NUMBER).value() == number
            assert backend.get_list_state(_LIST).get() == ([] if key == "b" else [number])
            assert backend.get_map_state(_MAP).get("x") == (None if key == "b" else number)
            assert backend.get_reducing_state(_SUM).get() == number

    @pytest.mark.parametrize(
        "use",
        [
            pytest.param(lambda backend: backend.current_key, id="current-key"),
            pytest.param(lambda backend: backend.get_state(_NUMBER).value(), id="value"),
            pytest.param(lambda backend: backend.get_state(_NUMBER).update(1), id="update"),
            pytest.param(lambda backend: backend.get_state(_NUMBER).clear(), id="clear"),
            pytest.param(lambda backend: backend.get_list_state(_LIST).add(1), id="list-add"),
            pytest.param(lambda backend: backend.get_list_state(_LIST).get(), id="list-get"),
            pytest.param(lambda backend: backend.get_map_state(_MAP).put("x", 1), id="map-put"),
            pytest.param(lambda backend: list(backend.get_map_state(_MAP)), id="map-iterate"),
            pytest.param(lambda backend: backend.get_reducing_state(_SUM).add(1), id="reduce"),
            pytest.param(lambda backend: backend.get_aggregating_state(_MEAN).add(1), id="add"),
            pytest.param(
                lambda backend: backend.timer_service.register_event_time_timer(1), id="timer"
            ),
        ],
    )
    def test_state_without_a_key_is_an_error(
        self, harness: KeyedHarness, use: Callable[[KeyedStateBackend], object]
    ) -> None:
        backend = harness.backends[0]
        with pytest.raises(NoCurrentKeyError, match="No key set"):
            use(backend)
        harness.at("a").clear_current_key()

        with pytest.raises(NoCurrentKeyError, match="No key set"):
            use(backend)

    def test_keys_lists_each_key_that_has_something(self, harness: KeyedHarness) -> None:
        for key in "abcd":
            harness.at(key).get_map_state(_MAP).put_all({"x": 1, "y": 2})
        harness.restart()
        harness.at("b").get_map_state(_MAP).clear()
        harness.at("c").get_map_state(_MAP).remove("x")
        harness.at("e").get_map_state(_MAP).put("x", 3)
        harness.at("f").get_map_state(_MAP).get("x")
        backend = harness.backends[0]

        assert sorted(backend.keys("map")) == ["a", "c", "d", "e"]
        assert backend.entry_count("map") == 4

    def test_a_key_of_another_type_is_refused(self, harness: KeyedHarness) -> None:
        backend = harness.at("a")

        with pytest.raises(StateTypeError, match="int is not of type string"):
            backend.set_current_key(5)
        with pytest.raises(StateTypeError):
            backend.set_current_key(None)
        assert backend.current_key == "a"

    def test_a_composite_key_is_a_tuple_in_the_order_of_its_fields(
        self, harness: KeyedHarness
    ) -> None:
        harness.start(_COMPOSITE)
        keys = [("a", 1, 0.5), ("a", 2, 0.5), ("b", None, math.inf), (None, None, None)]
        for number, key in enumerate(keys):
            harness.at(key).get_state(_NUMBER).update(number)
            harness.at(key).get_list_state(_LIST).add(number)
        harness.restart(parallelism=3)

        for number, key in enumerate(keys):
            assert harness.at(list(key)).get_state(_NUMBER).value() == number
            by_name = dict(zip(("shop", "till", "rate"), key, strict=True))
            assert harness.at(by_name).get_list_state(_LIST).get() == [number]
            assert harness.at(key).current_key == key
        with pytest.raises(StateTypeError, match="tuple of 3"):
            harness.at(("a", 1))

    @pytest.mark.parametrize("key_type", [pa.float32(), pa.float64()], ids=str)
    def test_every_nan_is_one_key_and_so_are_both_zeros(
        self, harness: KeyedHarness, key_type: pa.DataType
    ) -> None:
        harness.start(key_type)
        for key in (math.nan, 0.0):
            harness.at(key).get_list_state(_LIST).add(1)
            harness.at(key).timer_service.register_event_time_timer(5)
        harness.restart()
        for key in (-math.nan, -0.0):
            harness.at(key).get_list_state(_LIST).add(2)
            harness.at(key).timer_service.register_event_time_timer(5)
        backend = harness.backends[0]

        assert backend.entry_count("list") == 2
        assert harness.at(math.nan).get_list_state(_LIST).get() == [1, 2]
        assert harness.at(-0.0).get_list_state(_LIST).get() == [1, 2]
        assert len(list(backend.timer_service.advance_watermark(5))) == 2
        harness.restart()
        assert harness.at(math.nan).get_list_state(_LIST).get() == [1, 2]
        assert harness.at(0.0).get_list_state(_LIST).get() == [1, 2]

    @pytest.mark.parametrize(
        ("key_type", "keys"),
        [
            pytest.param(pa.bool_(), [True, False], id="bool"),
            pytest.param(pa.int8(), [-128, 0, 127], id="int8"),
            pytest.param(pa.int64(), [-(1 << 63), -1, 0, 127, 128, (1 << 63) - 1], id="int64"),
            pytest.param(pa.string(), ["", "a", "\0", "é", "🙂", "a" * 300], id="string"),
            pytest.param(pa.binary(), [b"", b"\0", b"\xff", b"a"], id="binary"),
            pytest.param(pa.float64(), [math.inf, -math.inf, 5e-324, 1.5], id="double"),
        ],
    )
    def test_keys_at_the_limits_of_their_type_are_kept_apart(
        self, harness: KeyedHarness, key_type: pa.DataType, keys: list[Any]
    ) -> None:
        harness.start(key_type)
        for number, key in enumerate(keys):
            harness.at(key).get_state(_NUMBER).update(number)
            harness.at(key).get_map_state(MapStateDescriptor("own", key_type, int)).put(key, number)
        harness.restart()

        for number, key in enumerate(keys):
            backend = harness.at(key)
            assert backend.get_state(_NUMBER).value() == number
            own = backend.get_map_state(MapStateDescriptor("own", key_type, int))
            assert own.items() == [(key, number)]
        assert sorted(map(repr, harness.backends[0].keys("number"))) == sorted(map(repr, keys))


class LongKeySuite(KeyedSuiteBase):
    """Keys that are longer than what a store on local disk takes for a key."""

    def test_long_keys_that_share_their_beginning_are_kept_apart(
        self, harness: KeyedHarness
    ) -> None:
        for number, key in enumerate(_LONG_KEYS):
            harness.at(key).get_state(_NUMBER).update(number)
        harness.restart()
        harness.at(_LONG_KEYS[3]).get_state(_NUMBER).clear()
        harness.at(_LONG_KEYS[6]).get_state(_NUMBER).clear()
        harness.restart()

        left = {key: n for n, key in enumerate(_LONG_KEYS) if n not in (3, 6)}
        found = {key: harness.at(key).get_state(_NUMBER).value() for key in _LONG_KEYS}
        assert {key: n for key, n in found.items() if n is not None} == left
        assert set(harness.backends[0].keys("number")) == set(left)

    def test_long_keys_of_a_map_are_kept_apart(self, harness: KeyedHarness) -> None:
        entries = {key: number for number, key in enumerate(_LONG_KEYS)}
        for key in ("a", _LONG):
            harness.at(key).get_map_state(_MAP).put_all({**entries, "short": -1})
        harness.restart()
        state = harness.at("a").get_map_state(_MAP)
        state.remove(_LONG_KEYS[7])
        state.put(_LONG_KEYS[8], 88)
        state = harness.at(_LONG).get_map_state(_MAP)

        assert dict(state.items()) == {**entries, "short": -1}
        harness.restart()
        changed = {**entries, "short": -1, _LONG_KEYS[8]: 88}
        del changed[_LONG_KEYS[7]]
        assert dict(harness.at("a").get_map_state(_MAP).items()) == changed
        state = harness.at(_LONG).get_map_state(_MAP)
        assert {key: state.get(key) for key in _LONG_KEYS} == entries
        state.clear()
        harness.restart()
        assert harness.at(_LONG).get_map_state(_MAP).is_empty()
        assert len(harness.at("a").get_map_state(_MAP)) == len(changed)

    def test_lists_of_long_keys_grow_over_many_checkpoints(self, harness: KeyedHarness) -> None:
        keys = [_LONG, f"{_LONG}a", "x" * 475]
        for number in range(36):
            for key in keys:
                harness.at(key).get_list_state(_LIST).add(number)
            if number % 9 == 8:
                harness.restart()
            else:
                harness.checkpoint()
        harness.at(keys[1]).get_list_state(_LIST).clear()
        harness.restart()

        assert harness.at(keys[0]).get_list_state(_LIST).get() == list(range(36))
        assert harness.at(keys[1]).get_list_state(_LIST).get() == []
        assert harness.at(keys[2]).get_list_state(_LIST).get() == list(range(36))

    def test_timers_of_long_keys_fire_in_order(self, harness: KeyedHarness) -> None:
        for number, key in enumerate(_LONG_KEYS):
            harness.at(key).timer_service.register_event_time_timer(100 - number)
        harness.at("short").timer_service.register_event_time_timer(95)
        harness.restart()
        harness.at(_LONG_KEYS[0]).timer_service.delete_event_time_timer(100)
        fired = list(harness.backends[0].timer_service.advance_watermark(100))

        assert [timer.timestamp for timer in fired] == [90, 91, 92, 93, 94, 95, 95, 96, 97, 98, 99]
        assert {timer.key for timer in fired} == {*_LONG_KEYS[1:], "short"}


def _in_namespace(
    backend: KeyedStateBackend, namespace_type: pa.DataType, namespace: Any
) -> tuple[ValueState[Any], ListState[Any], MapState[Any, Any]]:
    states = (
        backend.get_state(_NUMBER, namespace_type),
        backend.get_list_state(_LIST, namespace_type),
        backend.get_map_state(_MAP, namespace_type),
    )
    for state in states:
        state.set_current_namespace(namespace)
    return states


class NamespaceSuite(KeyedSuiteBase):
    """State of a key within a window, or another namespace."""

    def test_namespaces_of_a_key_do_not_see_one_another(self, harness: KeyedHarness) -> None:
        window = pa.struct([("start", pa.int64()), ("end", pa.int64())])
        for start in (0, 10):
            value, elements, entries = _in_namespace(harness.at("a"), window, (start, start + 10))
            value.update(start)
            elements.add(start)
            entries.put("x", start)
        harness.restart()
        backend = harness.at("a")

        for start in (0, 10):
            namespace = {"start": start, "end": start + 10}
            value, elements, entries = _in_namespace(backend, window, namespace)
            assert value.value() == start
            assert elements.get() == [start]
            assert entries.items() == [("x", start)]
            elements.clear()
            entries.clear()
        assert backend.entry_count("number") == 2
        assert list(backend.keys("number")) == ["a"]
        assert backend.entry_count("list") == backend.entry_count("map") == 0

    def test_every_nan_is_one_namespace(self, harness: KeyedHarness) -> None:
        for number in (1, 2):
            state = harness.at("a").get_list_state(_LIST, float)
            state.set_current_namespace(math.nan)
            state.add(number)
            harness.restart()
        state = harness.at("a").get_list_state(_LIST, float)
        state.set_current_namespace(-math.nan)

        assert state.get() == [1, 2]
        assert harness.backends[0].entry_count("list") == 1

    def test_the_namespace_must_be_set_first(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_state(_NUMBER, int)

        with pytest.raises(StateError, match="set_current_namespace"):
            state.value()
        with pytest.raises(StateTypeError):
            state.set_current_namespace("x")

    def test_a_state_without_namespaces_has_none_to_set(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_state(_NUMBER)

        with pytest.raises(StateError, match="without namespaces"):
            state.set_current_namespace(1)


_OTHERS_OF_ONE_NAME = [
    pytest.param(
        lambda backend: backend.get_state(ValueStateDescriptor("name", str)), id="another-type"
    ),
    pytest.param(
        lambda backend: backend.get_state(ValueStateDescriptor("name", int), str),
        id="with-namespaces",
    ),
    pytest.param(
        lambda backend: backend.get_list_state(ListStateDescriptor("name", int)), id="list"
    ),
    pytest.param(
        lambda backend: backend.get_map_state(MapStateDescriptor("name", str, int)), id="map"
    ),
    pytest.param(
        lambda backend: backend.get_reducing_state(
            ReducingStateDescriptor("name", Reducer.SUM, int)
        ),
        id="reducing",
    ),
]


class RegistrationSuite(KeyedSuiteBase):
    """A name is one state, whoever asks for it."""

    def test_asking_again_gives_the_same_state(self, harness: KeyedHarness) -> None:
        backend = harness.at("a")
        state = backend.get_state(ValueStateDescriptor("name", int))

        assert backend.get_state(ValueStateDescriptor("name", pa.int64())) is state

    @pytest.mark.parametrize("register", _OTHERS_OF_ONE_NAME)
    def test_a_name_cannot_be_two_states(
        self, harness: KeyedHarness, register: Callable[[KeyedStateBackend], object]
    ) -> None:
        backend = harness.at("a")
        state = backend.get_state(ValueStateDescriptor("name", int))
        state.update(1)

        with pytest.raises(StateRegistrationError, match="'name'"):
            register(backend)
        assert state.value() == 1
        harness.restart()
        assert harness.at("a").get_state(ValueStateDescriptor("name", int)).value() == 1

    def test_a_descriptor_of_another_kind_is_refused(self, harness: KeyedHarness) -> None:
        backend = harness.at("a")

        with pytest.raises(StateRegistrationError, match=r"ListStateDescriptor .* ValueState"):
            backend.get_state(ListStateDescriptor("name", int))  # type: ignore[arg-type]
        backend.get_list_state(ListStateDescriptor("name", int)).add(1)
        with pytest.raises(StateRegistrationError, match=r"ListStateDescriptor .* ValueState"):
            backend.get_state(ListStateDescriptor("name", int))  # type: ignore[arg-type]

    def test_a_state_that_is_not_registered_has_no_table(self, harness: KeyedHarness) -> None:
        backend = harness.at("a")
        backend.get_state(_NUMBER)

        with pytest.raises(StateError, match=r"no state 'other' .*\['number'\]"):
            backend.entry_count("other")

    def test_names_of_the_library_cannot_be_used(self) -> None:
        with pytest.raises(StateDescriptorError, match="reserved"):
            ValueStateDescriptor("_flow.timers.event", int)

    def test_rows_that_belong_to_another_subtask_are_refused(self, harness: KeyedHarness) -> None:
        harness.start(parallelism=2)
        own, other = harness.backends
        keys = [f"key-{number}" for number in range(10)]
        wrong = next(key for key in keys if harness.at(key) is other)
        own.set_current_key(wrong)
        own.get_state(_NUMBER).update(1)

        with pytest.raises(StateError, match="this subtask owns"):
            harness.checkpoint()
