"""What lists and broadcast maps of one subtask do while it runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstate import (
    BroadcastMap,
    ListStateDescriptor,
    MapStateDescriptor,
    OperatorList,
    OperatorStateBackend,
)
from flowstate.errors import SerializerError, StateTypeError


@dataclass(frozen=True)
class Inked:
    """A serializer of texts that runs out of ink."""

    name: str = "inked"
    version: int = 1

    def serialize(self, value: str) -> bytes:
        if value == "long":
            raise RuntimeError("no ink")
        return value.encode()

    def deserialize(self, data: bytes, version: int) -> str:
        return data.decode()


GetList = Callable[[OperatorStateBackend, ListStateDescriptor], OperatorList[Any]]
both_lists = pytest.mark.parametrize(
    "get", [OperatorStateBackend.get_list_state, OperatorStateBackend.get_union_list_state]
)


def list_of(kind: Any, *elements: Any) -> OperatorList[Any]:
    state = OperatorStateBackend().get_list_state(ListStateDescriptor("list", kind))
    state.add_all(elements)
    return state


def map_of(key_type: Any, kind: Any) -> BroadcastMap[Any, Any]:
    descriptor = MapStateDescriptor("map", key_type, kind)
    return OperatorStateBackend().get_broadcast_state(descriptor)


# Lists.


@both_lists
def test_a_list_is_what_was_added_and_updated(get: GetList) -> None:
    state = get(OperatorStateBackend(), ListStateDescriptor("list", int))

    assert state.get() == []
    state.add(1)
    state.add_all([2, 3])
    state.add_all([])
    assert state.get() == [1, 2, 3]
    state.update(iter([4, 5]))
    assert state.get() == [4, 5]
    state.update([])
    assert state.get() == []
    state.add(6)
    state.clear()
    assert state.get() == []


def test_what_get_returned_shows_what_happens_later() -> None:
    state = list_of(int, 1)
    live = state.get()

    state.add(2)
    assert live == [1, 2]
    state.update([3, 4, 5])
    assert (len(live), live[0], live[-1], live[1:]) == (3, 3, 5, [4, 5])
    assert 4 in live
    assert list(reversed(live)) == [5, 4, 3]
    assert repr(live) == "[3, 4, 5]"
    state.clear()
    assert not live
    with pytest.raises(IndexError):
        live[0]


def test_what_get_returned_cannot_be_changed() -> None:
    live: Any = list_of(int, 1).get()

    assert not hasattr(live, "append")
    with pytest.raises(TypeError):
        live[0] = 2
    with pytest.raises(TypeError):
        hash(live)


def test_a_live_list_is_equal_to_any_sequence_of_its_elements() -> None:
    live = list_of(int, 1, 2).get()

    assert live == (1, 2)
    assert live == list_of(int, 1, 2).get()
    assert live != [2, 1]
    assert live != set(live)  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda state: state.add_all(state.get()), [1, 2, 1, 2]),
        (lambda state: state.update(state.get()), [1, 2]),
        (lambda state: state.update(reversed(state.get())), [2, 1]),
        (lambda state: state.update(number * 10 for number in state.get()), [10, 20]),
    ],
    ids=["add-all", "update", "reversed", "generator"],
)
def test_a_lists_own_elements_may_be_given_back_to_it(
    use: Callable[[OperatorList[int]], None], expected: list[int]
) -> None:
    state = list_of(int, 1, 2)
    use(state)

    assert state.get() == expected


def test_nested_elements_are_copies() -> None:
    given: dict[str, list[int]] = {"a": [1]}
    state = list_of(dict[str, list[int]], given)
    given["a"].append(2)
    state.get()[0]["a"].append(3)
    state.get()[:][0]["a"].append(4)
    next(iter(state.get()))["b"] = [5]

    assert state.get() == [{"a": [1]}]


@pytest.mark.parametrize("method", ["add_all", "update"])
@pytest.mark.parametrize(
    ("kind", "bad", "message"),
    [
        (int, "x", "a value of class str is not of type int64"),
        (int, 1 << 63, "9223372036854775808 is out of the range of type int64"),
        (int, object(), "a value of class object is not of type int64"),
        (list[int], [1, lambda: 1], "a value of class function is not of type int64"),
        (int, None, "Any value to add to a list cannot be null."),
    ],
    ids=["another-type", "too-large", "object", "nested", "null"],
)
def test_an_element_that_cannot_be_kept_is_refused_by_its_index(
    method: str, kind: Any, bad: Any, message: str
) -> None:
    good: Any = 7 if kind is int else [7]
    state = list_of(kind, good)

    with pytest.raises(StateTypeError) as caught:
        getattr(state, method)([good, good, bad, good])
    assert caught.value.message == f"operator state 'list': element 2: {message}"
    before = [good] if method == "add_all" else []
    assert state.get() == [*before, good, good], "as in Flink: those before it are added"


@pytest.mark.parametrize("method", ["add_all", "update"])
def test_an_element_that_its_serializer_fails_on_is_refused_by_its_index(method: str) -> None:
    state = list_of(Inked())

    with pytest.raises(
        SerializerError, match=r"state 'list': element 1: .*'inked' .*no ink"
    ) as one:
        getattr(state, method)(["short", "long"])
    assert isinstance(one.value.__cause__, RuntimeError)
    assert state.get() == ["short"]


def test_a_single_element_that_cannot_be_kept_changes_nothing() -> None:
    state = list_of(int, 1)

    with pytest.raises(StateTypeError, match="operator state 'list': a value of class str is not"):
        state.add("x")
    with pytest.raises(StateTypeError, match="'list': You cannot add null to a ListState"):
        state.add(None)
    with pytest.raises(StateTypeError, match="'list': List of values to add cannot be null"):
        state.add_all(None)  # type: ignore[arg-type]
    with pytest.raises(SerializerError, match="operator state 'list': serializer 'inked' failed"):
        list_of(Inked()).add("long")
    assert state.get() == [1]


# Broadcast maps.


def test_a_map_is_what_was_put_and_removed() -> None:
    state = map_of(str, int)

    assert (len(state), state.items(), state.get("a"), "a" in state) == (0, [], None, False)
    state.put("a", 1)
    state["b"] = 2
    state.put_all({"c": 3, "a": 4})
    assert state.items() == [("a", 4), ("b", 2), ("c", 3)]
    assert (state.keys(), state.values(), list(state)) == (
        ["a", "b", "c"],
        [4, 2, 3],
        ["a", "b", "c"],
    )
    state.remove("a")
    state.remove("a")
    del state["b"]
    assert (state["c"], state.contains("a"), len(state)) == (3, False, 1)
    state.clear()
    assert state.items() == []


def test_a_missing_key_is_an_error_only_in_brackets() -> None:
    state = map_of(str, int)

    assert state.get("a") is None
    with pytest.raises(KeyError):
        state["a"]
    with pytest.raises(KeyError):
        del state["a"]


def test_none_is_a_value_and_a_key() -> None:
    state = map_of(str, int)
    state.put("a", None)
    state.put(None, 1)

    assert (state.contains("a"), state.get("a"), state["a"]) == (True, None, None)
    assert (None in state, state.get(None)) == (True, 1)
    state.remove(None)
    assert state.items() == [("a", None)]


def test_keys_that_are_one_key_are_one_entry() -> None:
    state = map_of(float, str)
    for key, value in ((math.nan, "a"), (-math.nan, "b"), (0.0, "c"), (-0.0, "d")):
        state.put(key, value)

    assert state.values() == ["b", "d"]
    assert (state.get(float("nan")), state.get(-0.0)) == ("b", "d")
    composite = map_of(tuple[str, int], str)
    composite.put(("a", 1), "x")
    assert composite[["a", 1]] == composite[{"f0": "a", "f1": 1}] == "x"


def test_all_of_several_entries_are_put_or_none() -> None:
    state = map_of(str, int)
    state.put("a", 1)

    with pytest.raises(StateTypeError, match="broadcast state 'map': a value of class str is not"):
        state.put_all({"a": 2, "b": "x"})
    with pytest.raises(StateTypeError, match="a value of class int is not of type string"):
        state.put_all({"a": 2, 5: 5})
    with pytest.raises(
        StateTypeError, match="broadcast state 'map': put_all\\(\\) takes a mapping"
    ):
        state.put_all(None)  # type: ignore[arg-type]
    assert state.items() == [("a", 1)]


def test_a_value_that_its_serializer_fails_on_is_refused() -> None:
    state = map_of(str, Inked())
    state.put("a", "short")

    with pytest.raises(SerializerError, match=r"broadcast state 'map': serializer 'inked'.*no ink"):
        state.put("a", "long")
    assert state["a"] == "short"


def test_values_of_a_map_are_copies() -> None:
    given = [1]
    state = map_of(str, list[int])
    state.put("a", given)
    given.append(2)
    for found in (state["a"], state.get("a"), state.values()[0], state.items()[0][1]):
        assert found is not None
        found.append(3)

    assert state.items() == [("a", [1])]


def test_what_a_map_listed_does_not_change_with_it() -> None:
    state = map_of(str, int)
    state.put_all({"a": 1, "b": 2})
    keys, items = state.keys(), state.items()
    for key in state:
        del state[key]

    assert (keys, items, len(state)) == (["a", "b"], [("a", 1), ("b", 2)], 0)


def test_a_read_only_map_shows_the_map_and_has_no_way_to_change_it() -> None:
    state = map_of(str, list[int])
    view: Any = state.read_only()
    state.put("a", [1])
    view["a"].append(2)

    assert (view["a"], view.get("b"), list(view), len(view)) == ([1], None, ["a"], 1)
    for name in ("put", "put_all", "remove", "clear", "load", "__setitem__", "__delitem__"):
        assert not hasattr(view, name), name
    with pytest.raises(TypeError):
        BroadcastMap.__delitem__(view, "a")
    with pytest.raises(AttributeError):
        BroadcastMap.clear(view)
    assert state.items() == [("a", [1])]
    state.clear()
    assert view.items() == []


# As columns, which is how they are written.


@given(st.lists(st.lists(st.none() | st.integers(-128, 127), max_size=3), max_size=5))
def test_elements_are_the_same_after_a_way_through_a_column(elements: list[Any]) -> None:
    kind = pa.list_(pa.int8())
    state, again = list_of(kind, *elements), list_of(kind)
    column = state.elements()
    again.load(column)

    assert column.type == kind
    assert again.get() == state.get() == elements


@given(
    st.dictionaries(
        st.none() | st.tuples(st.none() | st.text(max_size=3), st.none() | st.floats()),
        st.none() | st.integers(0, 9),
        max_size=5,
    )
)
def test_entries_are_the_same_after_a_way_through_a_column(entries: dict[Any, Any]) -> None:
    state, again = map_of(tuple[str, float], int), map_of(tuple[str, float], int)
    state.put_all(entries)
    again.load(state.elements())

    assert again.items() == state.items()
    for key, value in state.items():
        assert again[key] == value


def test_of_two_restored_copies_of_a_key_the_later_one_stays() -> None:
    state = map_of(str, int)
    for entries in ({"a": 1, "b": 1}, {"b": 2, "c": 2}):
        other = map_of(str, int)
        other.put_all(entries)
        state.load(other.elements())

    assert dict(state.items()) == {"a": 1, "b": 2, "c": 2}


def test_the_name_of_a_state_is_in_every_refusal() -> None:
    backend = OperatorStateBackend()
    state = backend.get_list_state(ListStateDescriptor("it's", int))

    with pytest.raises(StateTypeError, match=re.escape('operator state "it\'s": ')):
        state.add("x")
