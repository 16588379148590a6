"""Values on loan, against a dict and against the states that go key by key."""

from __future__ import annotations

import datetime as dt
import math
import random
from collections.abc import Iterator
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
    ValueStateDescriptor,
)
from flowstate.errors import NoCurrentKeyError, StateTypeError
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.testing.clock import ManualClock
from flowstate.testing.keyed_suite import KeyedHarness

NUMBER = ValueStateDescriptor("number", int)
TEXTS = ValueStateDescriptor("texts", pa.list_(pa.string()))
WITH_DEFAULT = ValueStateDescriptor("with default", int, default=7)
EXPIRING = ValueStateDescriptor("expiring", int, ttl=StateTtlConfig(ttl=dt.timedelta(seconds=100)))
SUM = ReducingStateDescriptor("sum", Reducer.SUM, int)
LONGEST = ReducingStateDescriptor("longest", lambda a, b: max(a, b, key=len), str)
MEAN = AggregatingStateDescriptor("mean", Reducer.MEAN, int)
SEEN = ListStateDescriptor("seen", int)
PLACES = MapStateDescriptor("places", int, int)


@pytest.fixture(params=["memory", "lmdb"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeyedHarness]:
    folder = tmp_path / "working" if request.param == "lmdb" else None
    clock = ManualClock()
    harness = KeyedHarness(f"memory:/{tmp_path}", clock=clock, working_folder=folder)
    yield harness
    harness.close()


def each(backend: KeyedStateBackend, keys: list[Any], kind: Any = None) -> Iterator[Any]:
    """Set one key after the other, as a runtime does with the rows of a batch."""
    column = pa.array(keys, backend.key_type.arrow if kind is None else kind)
    with backend.lent(column) as places:
        context = backend.context
        for key, place in zip(backend.key_type.to_list(column), places.tolist(), strict=True):
            context.key, context.place = key, place
            yield key
        backend.clear_current_key()


def found_in(harness: KeyedHarness, state: Any, keys: list[str]) -> list[Any]:
    return [harness.at(key).get_state(state).value() for key in keys]


@pytest.mark.parametrize("seed", range(8))
def test_loans_are_what_a_dict_is(harness: KeyedHarness, seed: int) -> None:
    choose = random.Random(seed)
    numbers: dict[str, int] = {}
    totals: dict[str, int] = {}
    added: dict[str, list[int]] = {}
    seen: dict[str, list[int]] = {}
    for _ in range(12):
        backend = harness.backends[0]
        number, total = backend.get_state(NUMBER), backend.get_reducing_state(SUM)
        mean, listed = backend.get_aggregating_state(MEAN), backend.get_list_state(SEEN)
        universe = [f"k{choose.randint(0, 30)}" for _ in range(choose.choice([0, 1, 5, 60]))]
        for key in each(backend, universe):
            assert number.value() == numbers.get(key)
            assert total.get() == totals.get(key)
            means = added.get(key)
            assert mean.get() == (sum(means) / len(means) if means else None)
            assert listed.get() == seen.get(key, [])
            value = choose.randint(-9, 9)
            match choose.randrange(7):
                case 0:
                    number.update(value)
                    numbers[key] = value
                case 1:
                    number.update(None)
                    numbers.pop(key, None)
                case 2:
                    number.clear()
                    numbers.pop(key, None)
                case 3:
                    total.add(value)
                    totals[key] = totals.get(key, 0) + value
                case 4:
                    total.clear()
                    totals.pop(key, None)
                case 5:
                    mean.add(value)
                    added.setdefault(key, []).append(value)
                case 6:
                    listed.add(value)
                    seen.setdefault(key, []).append(value)
        match choose.randrange(4):
            case 0:
                # Between two batches everything else sees what they have left.
                for key, value in numbers.items():
                    harness.at(key).get_state(NUMBER).update(value + 1)
                    numbers[key] += 1
            case 1 if numbers:
                bulk = BulkState(backend, "number")
                assert bulk.get(pa.array(list(numbers))).to_pylist() == list(numbers.values())
            case 2:
                harness.checkpoint()
            case 3:
                harness.restart(parallelism=1)
        backend = harness.backends[0]
        backend.get_state(NUMBER), backend.get_reducing_state(SUM)
        assert set(backend.keys("number")) == set(numbers)
        assert set(backend.keys("sum")) == set(totals)

    harness.restart(parallelism=3)
    for state, model in ((NUMBER, numbers),):
        assert found_in(harness, state, list(model)) == list(model.values())


def test_what_is_removed_on_loan_is_removed_from_the_checkpoint(harness: KeyedHarness) -> None:
    backend = harness.backends[0]
    number = backend.get_state(NUMBER)
    for _ in each(backend, ["a", "b"]):
        number.update(1)
    harness.restart()
    backend = harness.backends[0]
    number = backend.get_state(NUMBER)
    for key in each(backend, ["a", "c"]):
        number.update(2)
        if key == "a" or key == "c":
            number.clear()
    record = harness.checkpoint()
    harness.reopen()
    harness.backends[0].get_state(NUMBER)

    assert record.checkpoint_id == 2
    assert set(harness.backends[0].keys("number")) == {"b"}


def test_methods_that_somebody_has_kept_stay_right(harness: KeyedHarness) -> None:
    backend = harness.backends[0]
    state = backend.get_state(NUMBER)
    total = backend.get_reducing_state(SUM)
    read, write, empty, add = state.value, state.update, state.clear, total.add
    kept_inside: list[Any] = []
    for key in each(backend, ["a", "b", "a"]):
        write((read() or 0) + 1)
        add(1)
        kept_inside += [state.value, state.update]
        assert state.value() == read() == (2 if key == "a" and len(kept_inside) == 6 else 1)
    for key in each(backend, ["b", "c"]):
        kept_inside[1](10 + (kept_inside[0]() or 0))
        assert read() == (11 if key == "b" else 10)
        add(1)
    harness.at("a")
    empty()
    harness.at("b")

    assert read() == kept_inside[0]() == 11
    assert found_in(harness, NUMBER, ["a", "b", "c"]) == [None, 11, 10]
    assert [harness.at(key).get_reducing_state(SUM).get() for key in "abc"] == [2, 2, 1]


def test_states_may_be_registered_in_the_middle(harness: KeyedHarness) -> None:
    for key in "ab":
        harness.at(key).get_state(NUMBER).update(5)
    harness.restart()
    backend = harness.backends[0]
    for key in each(backend, ["a", "b", "a", "c"]):
        if key != "a":
            number = backend.get_state(NUMBER)
            number.update((number.value() or 0) + 1)
            backend.get_reducing_state(SUM).add(1)

    assert found_in(harness, NUMBER, ["a", "b", "c"]) == [5, 6, 1]
    assert [harness.at(key).get_reducing_state(SUM).get() for key in "abc"] == [None, 1, 1]


def test_what_was_done_before_a_failure_is_there(harness: KeyedHarness) -> None:
    backend = harness.backends[0]
    state = backend.get_state(NUMBER)

    def fail_at_b() -> None:
        for key in each(backend, ["a", "b", "c"]):
            state.update(1 if key != "b" else "one")

    with pytest.raises(StateTypeError, match="number"):
        fail_at_b()

    backend.clear_current_key()
    with pytest.raises(NoCurrentKeyError):
        state.value()
    assert found_in(harness, NUMBER, ["a", "b", "c"]) == [1, None, None]


def test_all_kinds_of_values_come_back(harness: KeyedHarness) -> None:
    backend = harness.backends[0]
    texts, numbers = backend.get_state(TEXTS), backend.get_state(WITH_DEFAULT)
    longest, expiring = backend.get_reducing_state(LONGEST), backend.get_state(EXPIRING)
    places = backend.get_map_state(PLACES)
    for number, key in enumerate(each(backend, ["a", "b", "a"])):
        assert numbers.value() == (7 if number < 2 else 0)
        texts.update([*(texts.value() or []), key * number])
        numbers.update(number)
        longest.add(key * (3 - number))
        expiring.update(number)
        places.put(number, number)
    harness.restart(parallelism=2)

    assert found_in(harness, TEXTS, ["a", "b"]) == [["", "aa"], ["b"]]
    assert found_in(harness, WITH_DEFAULT, ["a", "b", "c"]) == [2, 1, 7]
    assert found_in(harness, EXPIRING, ["a", "b"]) == [2, 1]
    assert harness.at("a").get_reducing_state(LONGEST).get() == "aaa"
    assert harness.at("a").get_map_state(PLACES).items() == [(0, 0), (2, 2)]


def test_a_value_that_is_changed_in_place_needs_an_update(harness: KeyedHarness) -> None:
    backend = harness.backends[0]
    texts = backend.get_state(TEXTS)
    for _ in each(backend, ["a"]):
        texts.update(["x"])
    harness.restart()
    backend = harness.backends[0]
    texts = backend.get_state(TEXTS)
    for _ in each(backend, ["a"]):
        value = texts.value()
        assert value is not None
        value.append("y")
    harness.restart()

    assert found_in(harness, TEXTS, ["a"]) == [["x"]]


def test_floats_that_are_one_key_are_one_key(harness: KeyedHarness) -> None:
    harness.start(pa.float64())
    backend = harness.backends[0]
    state = backend.get_state(NUMBER)
    for _ in each(backend, [0.0, -0.0, math.nan, -math.nan, 1.0]):
        state.update((state.value() or 0) + 1)

    assert [harness.at(key).get_state(NUMBER).value() for key in (0.0, math.nan, 1.0)] == [2, 2, 1]
    assert harness.backends[0].entry_count("number") == 3


def test_an_int_that_does_not_fit_is_refused_on_loan_as_well(harness: KeyedHarness) -> None:
    small = ValueStateDescriptor("small", pa.int8())
    backend = harness.backends[0]
    state = backend.get_state(small)
    for _ in each(backend, ["a"]):
        state.update(127)
        with pytest.raises(StateTypeError, match="128"):
            state.update(128)
        with pytest.raises(StateTypeError, match="bool"):
            state.update(True)

    assert found_in(harness, small, ["a"]) == [127]
