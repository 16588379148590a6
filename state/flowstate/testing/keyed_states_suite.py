"""What values, lists and maps do for one key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from flowstate.descriptors import (
    ListStateDescriptor,
    MapStateDescriptor,
    ValueStateDescriptor,
)
from flowstate.errors import StateTypeError
from flowstate.testing.keyed_base_suite import KeyedHarness, KeyedSuiteBase

__all__ = ["ListStateSuite", "MapStateSuite", "ValueStateSuite"]

_NUMBER = ValueStateDescriptor("number", int)
_NUMBERS = ValueStateDescriptor("numbers", list[int])
_DEFAULT = ValueStateDescriptor("default", list[int], default=[1])
_PERSON = ValueStateDescriptor(
    "person", pa.struct([("name", pa.string()), ("tags", pa.list_(pa.string()))])
)
_LIST = ListStateDescriptor("list", int)
_LISTS = ListStateDescriptor("lists", list[int])
_MAP = MapStateDescriptor("map", str, int)
_MAP_OF_LISTS = MapStateDescriptor("map-of-lists", str, list[int])


class ValueStateSuite(KeyedSuiteBase):
    """One value per key."""

    def test_an_unset_value_is_none(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_state(_NUMBER)

        assert state.value() is None

    def test_a_value_is_what_it_was_updated_to_last(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_state(_NUMBER)
        state.update(1)
        state.update(2)

        assert state.value() == 2
        harness.restart()
        assert harness.at("a").get_state(_NUMBER).value() == 2

    @pytest.mark.parametrize("clear", ["clear", "update-none"])
    def test_clearing_a_value_brings_its_default_back(
        self, harness: KeyedHarness, clear: str
    ) -> None:
        state = harness.at("a").get_state(_DEFAULT)
        state.update([2])
        if clear == "clear":
            state.clear()
        else:
            state.update(None)

        assert state.value() == [1]
        assert harness.backends[0].entry_count("default") == 0
        harness.restart()
        assert harness.at("a").get_state(_DEFAULT).value() == [1]
        assert harness.backends[0].entry_count("default") == 0

    def test_a_default_is_no_stored_value(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_state(_DEFAULT)

        assert state.value() == [1]
        assert list(harness.backends[0].keys("default")) == []

    def test_a_default_is_not_shared(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_state(_DEFAULT)
        value = state.value()
        assert value is not None
        value.append(99)

        assert state.value() == [1]
        harness.at("b")
        assert state.value() == [1]

    @pytest.mark.parametrize("restarted", [False, True], ids=["fresh", "restarted"])
    def test_changing_what_was_returned_does_not_change_the_state(
        self, harness: KeyedHarness, restarted: bool
    ) -> None:
        harness.at("a").get_state(_PERSON).update({"name": "Ada", "tags": ["x"]})
        if restarted:
            harness.restart()
        state = harness.at("a").get_state(_PERSON)
        value = state.value()
        assert value is not None
        value["tags"].append("y")
        value["name"] = "Bob"

        assert state.value() == {"name": "Ada", "tags": ["x"]}
        harness.restart()
        assert harness.at("a").get_state(_PERSON).value() == {"name": "Ada", "tags": ["x"]}

    def test_changing_what_was_passed_in_does_not_change_the_state(
        self, harness: KeyedHarness
    ) -> None:
        state = harness.at("a").get_state(_NUMBERS)
        numbers = [1, 2]
        state.update(numbers)
        numbers.append(3)

        assert state.value() == [1, 2]

    def test_a_value_of_another_type_is_refused_and_changes_nothing(
        self, harness: KeyedHarness
    ) -> None:
        state = harness.at("a").get_state(_NUMBER)
        state.update(1)

        with pytest.raises(StateTypeError, match=r"state 'number'.*str.*int64"):
            state.update("2")
        assert state.value() == 1

    def test_an_empty_value_is_a_value(self, harness: KeyedHarness) -> None:
        harness.at("a").get_state(_DEFAULT).update([])
        harness.restart()

        assert harness.at("a").get_state(_DEFAULT).value() == []


class ListStateSuite(KeyedSuiteBase):
    """A list per key."""

    def test_a_list_without_elements_is_empty(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_list_state(_LIST)

        assert state.get() == []
        assert list(state) == []

    def test_elements_stay_in_the_order_they_were_added(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_list_state(_LIST)
        state.add(3)
        state.add_all([1, 2])
        state.add(3)

        assert state.get() == list(state) == [3, 1, 2, 3]
        harness.restart()
        assert harness.at("a").get_list_state(_LIST).get() == [3, 1, 2, 3]

    def test_update_replaces_the_elements(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_list_state(_LIST)
        state.add_all([1, 2, 3])
        state.update(iter([4]))

        assert state.get() == [4]

    def test_update_with_no_elements_clears(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_list_state(_LIST)
        state.add(1)
        state.update([])

        assert state.get() == []
        assert harness.backends[0].entry_count("list") == 0

    def test_adding_no_elements_changes_nothing(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_list_state(_LIST)
        state.add_all([])

        assert harness.backends[0].entry_count("list") == 0
        state.add(1)
        state.add_all(iter(()))
        assert state.get() == [1]

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda state: state.add(None), id="add"),
            pytest.param(lambda state: state.add_all(None), id="add-all"),
            pytest.param(lambda state: state.update(None), id="update"),
            pytest.param(lambda state: state.update([2, None]), id="update-with-a-null"),
            pytest.param(lambda state: state.update([2, "x"]), id="update-with-another-type"),
            pytest.param(lambda state: state.add("x"), id="add-another-type"),
        ],
    )
    def test_what_a_list_refuses_changes_nothing(
        self, harness: KeyedHarness, change: Callable[[Any], None]
    ) -> None:
        state = harness.at("a").get_list_state(_LIST)
        state.add(1)

        with pytest.raises(StateTypeError, match="state 'list'"):
            change(state)
        assert state.get() == [1]

    def test_of_several_elements_those_before_a_refused_one_are_added(
        self, harness: KeyedHarness
    ) -> None:
        state = harness.at("a").get_list_state(_LIST)
        state.add(1)

        with pytest.raises(StateTypeError, match="cannot add null"):
            state.add_all([2, None, 3])
        assert state.get() == [1, 2]

    def test_elements_that_come_from_the_state_itself_can_be_added(
        self, harness: KeyedHarness
    ) -> None:
        state = harness.at("a").get_list_state(_LIST)
        state.update([1, 2])
        state.add_all(state)
        state.update(element * 10 for element in state)

        assert state.get() == [10, 20, 10, 20]

    @pytest.mark.parametrize("restarted", [False, True], ids=["fresh", "restarted"])
    def test_elements_of_a_list_are_copies(self, harness: KeyedHarness, restarted: bool) -> None:
        passed = [1]
        harness.at("a").get_list_state(_LISTS).add(passed)
        passed.append(98)
        if restarted:
            harness.restart()
        state = harness.at("a").get_list_state(_LISTS)
        elements = state.get()
        elements[0].append(99)
        elements.append([100])

        assert state.get() == [[1]]

    def test_a_list_may_be_changed_while_it_is_iterated(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_list_state(_LIST)
        state.update([1, 2, 3])
        seen = []
        for element in state:
            seen.append(element)
            state.add(element * 10)

        assert seen == [1, 2, 3]
        assert state.get() == [1, 2, 3, 10, 20, 30]

    def test_clear_then_add_holds_only_what_came_after(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_list_state(_LIST)
        state.add_all([1, 2])
        state.clear()
        state.add(3)

        assert state.get() == [3]


class MapStateSuite(KeyedSuiteBase):
    """A map per key."""

    def test_a_map_without_entries_is_empty(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_map_state(_MAP)

        assert state.is_empty()
        assert state.items() == state.keys() == state.values() == list(state) == []
        assert len(state) == 0
        assert state.get("x") is None
        assert not state.contains("x")
        assert state, "an empty map is still a state"

    def test_a_map_is_used_like_a_dict(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_map_state(_MAP)
        state["x"] = 1
        state.put("y", 2)
        state.put_all({"z": 3, "x": 4})
        del state["y"]

        assert state["x"] == state.get("x") == 4
        assert "x" in state
        assert "y" not in state
        assert sorted(state.items()) == [("x", 4), ("z", 3)]
        assert sorted(state.keys()) == sorted(state) == ["x", "z"]
        assert sorted(value or 0 for value in state.values()) == [3, 4]
        assert len(state) == 2

    @pytest.mark.parametrize("restarted", [False, True], ids=["fresh", "restarted"])
    def test_a_missing_key_is_an_error_only_in_brackets(
        self, harness: KeyedHarness, restarted: bool
    ) -> None:
        harness.at("a").get_map_state(_MAP).put("x", 1)
        if restarted:
            harness.restart()
        state = harness.at("a").get_map_state(_MAP)
        state.remove("missing")

        assert state.get("missing") is None
        with pytest.raises(KeyError, match="missing"):
            state["missing"]
        with pytest.raises(KeyError, match="missing"):
            del state["missing"]
        assert state.items() == [("x", 1)]

    @pytest.mark.parametrize("restarted", [False, True], ids=["fresh", "restarted"])
    def test_none_is_a_value_and_a_key(self, harness: KeyedHarness, restarted: bool) -> None:
        state = harness.at("a").get_map_state(_MAP)
        state.put("x", None)
        state.put(None, 1)
        if restarted:
            harness.restart()
            state = harness.at("a").get_map_state(_MAP)

        assert state.contains("x")
        assert state["x"] is None
        assert state[None] == 1
        assert dict(state.items()) == {"x": None, None: 1}
        state.remove(None)
        assert state.items() == [("x", None)]

    def test_removing_the_last_entry_empties_the_slot(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_map_state(_MAP)
        state.put("x", 1)
        harness.checkpoint()
        state.remove("x")

        assert state.is_empty()
        assert harness.backends[0].entry_count("map") == 0
        harness.restart()
        assert harness.at("a").get_map_state(_MAP).is_empty()
        assert list(harness.backends[0].keys("map")) == []

    def test_all_of_several_entries_are_put_or_none(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_map_state(_MAP)

        with pytest.raises(StateTypeError, match="state 'map'"):
            state.put_all({"x": 1, "y": "2"})
        with pytest.raises(StateTypeError, match="takes a mapping"):
            state.put_all(None)  # type: ignore[arg-type]
        assert state.is_empty()

    def test_a_map_key_of_another_type_is_refused(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_map_state(_MAP)

        for use in (state.get, state.contains, state.remove, lambda key: state.put(key, 1)):
            with pytest.raises(StateTypeError, match="map key of state 'map'"):
                use(5)

    @pytest.mark.parametrize("restarted", [False, True], ids=["fresh", "restarted"])
    def test_values_of_a_map_are_copies(self, harness: KeyedHarness, restarted: bool) -> None:
        passed = [1]
        harness.at("a").get_map_state(_MAP_OF_LISTS).put("x", passed)
        passed.append(97)
        if restarted:
            harness.restart()
        state = harness.at("a").get_map_state(_MAP_OF_LISTS)
        for found in (state.get("x"), state["x"], state.values()[0], state.items()[0][1]):
            assert found is not None
            found.append(98)

        assert state.get("x") == [1]

    @pytest.mark.parametrize("restarted", [False, True], ids=["fresh", "restarted"])
    def test_a_map_may_be_changed_while_it_is_iterated(
        self, harness: KeyedHarness, restarted: bool
    ) -> None:
        harness.at("a").get_map_state(_MAP).put_all({"x": 1, "y": 2})
        if restarted:
            harness.restart()
        state = harness.at("a").get_map_state(_MAP)
        seen = []
        for key in state:
            seen.append(key)
            state.remove(key)
            state.put(f"{key}{key}", 0)
        for key, _ in state.items():
            state.clear()
            seen.append(key)

        assert sorted(seen) == ["x", "xx", "y", "yy"]
        assert state.is_empty()

    def test_clear_then_put_holds_only_what_came_after(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_map_state(_MAP)
        state.put_all({"x": 1, "y": 2})
        harness.checkpoint()
        state.clear()
        state.put("y", 3)

        assert state.items() == [("y", 3)]
        assert state.get("x") is None
        harness.restart()
        assert harness.at("a").get_map_state(_MAP).items() == [("y", 3)]

    def test_keys_of_a_map_may_be_tuples(self, harness: KeyedHarness) -> None:
        descriptor = MapStateDescriptor("pairs", tuple[str, int], float)
        harness.at("a").get_map_state(descriptor).put_all({("x", 1): 0.5, ("x", 2): 1.5})
        harness.restart()
        state = harness.at("a").get_map_state(descriptor)

        assert state.get(("x", 2)) == 1.5
        assert sorted(state.keys()) == [("x", 1), ("x", 2)]

    def test_every_nan_is_one_key_of_a_map_and_so_are_both_zeros(
        self, harness: KeyedHarness
    ) -> None:
        descriptor = MapStateDescriptor("floats", float, int)
        state = harness.at("a").get_map_state(descriptor)
        state.put(float("nan"), 1)
        state.put(0.0, 2)
        harness.restart()
        state = harness.at("a").get_map_state(descriptor)
        state.put(-float("nan"), 3)
        state.put(-0.0, 4)

        assert len(state) == 2
        assert state.get(float("nan")) == 3
        assert state.get(0.0) == 4
        harness.restart()
        assert sorted(map(str, harness.at("a").get_map_state(descriptor))) == ["0.0", "nan"]
