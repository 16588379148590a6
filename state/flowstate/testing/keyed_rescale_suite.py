"""The rescale check-list: up, down, none, uneven up, uneven down, and from one to all and back."""

from __future__ import annotations

from typing import Any

import pytest

from flowstate.aggregates import Reducer
from flowstate.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from flowstate.errors import KeyGroupError, MaxParallelismError
from flowstate.functions import TimeDomain
from flowstate.key_groups import KeyGroupAssigner
from flowstate.testing.keyed_base_suite import KeyedHarness, KeyedSuiteBase

__all__ = ["RescaleSuite"]

_VALUE = ValueStateDescriptor("value", str)
_LIST = ListStateDescriptor("list", int)
_MAP = MapStateDescriptor("map", str, int)
_SUM = ReducingStateDescriptor("sum", Reducer.SUM, int)
_MEAN = AggregatingStateDescriptor("mean", Reducer.MEAN, int)
_WINDOWED = ValueStateDescriptor("windowed", int)

_KEYS = [f"key-{number}" for number in range(60)]
_MAX_PARALLELISM = 128


class RescaleSuite(KeyedSuiteBase):
    """Every kind of state at every parallelism."""

    @pytest.mark.parametrize(
        "parallelisms",
        [
            pytest.param((3, 3), id="none"),
            pytest.param((2, 4), id="up"),
            pytest.param((4, 2), id="down"),
            pytest.param((3, 5), id="uneven-up"),
            pytest.param((5, 3), id="uneven-down"),
            pytest.param((1, _MAX_PARALLELISM, 1), id="one-to-all-to-one"),
            pytest.param((2, 3, 7, 5, 2), id="several-times"),
        ],
    )
    def test_state_is_found_at_any_parallelism(
        self, harness: KeyedHarness, parallelisms: tuple[int, ...]
    ) -> None:
        harness.start(parallelism=parallelisms[0], max_parallelism=_MAX_PARALLELISM)
        for step, parallelism in enumerate(parallelisms):
            if step:
                harness.restart(parallelism=parallelism)
                assert _contents(harness) == {key: _expected(key, step) for key in _KEYS}
            for key in _KEYS:
                _use(harness, key, step)
            harness.checkpoint()

        expected = {key: _expected(key, len(parallelisms)) for key in _KEYS}
        assert _contents(harness) == expected
        harness.reopen()
        assert _contents(harness) == expected
        assert _timers(harness) == {key: list(range(len(parallelisms))) for key in _KEYS}

    def test_what_was_removed_at_one_parallelism_is_gone_at_another(
        self, harness: KeyedHarness
    ) -> None:
        harness.start(parallelism=4)
        for key in _KEYS:
            _use(harness, key, 0)
        harness.restart(parallelism=3)
        for key in _KEYS[::2]:
            backend = harness.at(key)
            backend.get_state(_VALUE).clear()
            backend.get_list_state(_LIST).clear()
            backend.get_map_state(_MAP).remove("0")
            backend.get_reducing_state(_SUM).clear()
            backend.timer_service.delete_event_time_timer(0)
        harness.restart(parallelism=5)

        for number, key in enumerate(_KEYS):
            backend = harness.at(key)
            assert backend.get_list_state(_LIST).get() == ([] if number % 2 == 0 else [0])
            assert backend.get_map_state(_MAP).get("0") == (None if number % 2 == 0 else 0)
            assert (backend.get_state(_VALUE).value() is None) == (number % 2 == 0)
            assert (backend.get_reducing_state(_SUM).get() is None) == (number % 2 == 0)
        assert set(_timers(harness)) == set(_KEYS[1::2])

    def test_each_subtask_has_the_keys_of_its_key_groups(self, harness: KeyedHarness) -> None:
        for key in _KEYS:
            harness.at(key).get_state(_VALUE).update(key)
        harness.restart(parallelism=4)
        for backend in harness.backends:
            backend.get_state(_VALUE)

        owners = {
            key: number
            for number, backend in enumerate(harness.backends)
            for key in backend.keys("value")
        }
        assert sorted(owners) == sorted(_KEYS)
        assert all(harness.backends[owners[key]] is harness.at(key) for key in _KEYS)

    @pytest.mark.parametrize("assigner", list(KeyGroupAssigner), ids=str)
    def test_the_assigner_stays_that_of_the_checkpoint(
        self, harness: KeyedHarness, assigner: KeyGroupAssigner
    ) -> None:
        harness.start(parallelism=2, assigner=assigner)
        for key in _KEYS:
            harness.at(key).get_state(_VALUE).update(key)
        harness.restart(parallelism=3)

        assert [harness.at(key).get_state(_VALUE).value() for key in _KEYS] == _KEYS
        other = next(one for one in KeyGroupAssigner if one is not assigner)
        with pytest.raises(MaxParallelismError, match=f"Use '{assigner.value}'"):
            harness.start(assigner=other)

    def test_the_number_of_key_groups_stays_that_of_the_checkpoint(
        self, harness: KeyedHarness
    ) -> None:
        harness.start(parallelism=2, max_parallelism=8)
        harness.at("a").get_state(_VALUE).update("x")
        harness.restart(parallelism=8)
        assert harness.at("a").get_state(_VALUE).value() == "x"

        with pytest.raises(MaxParallelismError, match="Max parallelism mismatch"):
            harness.start(max_parallelism=16)
        with pytest.raises(MaxParallelismError, match=r"\(8\) of the restored state is lower"):
            harness.start(parallelism=9)

    def test_there_are_no_more_subtasks_than_key_groups(self, harness: KeyedHarness) -> None:
        with pytest.raises(KeyGroupError, match="9"):
            harness.start(parallelism=9, max_parallelism=8)


def _use(harness: KeyedHarness, key: str, step: int) -> None:
    backend = harness.at(key)
    backend.get_state(_VALUE).update(f"{key}/{step}")
    backend.get_list_state(_LIST).add(step)
    backend.get_map_state(_MAP).put(str(step), step)
    backend.get_reducing_state(_SUM).add(step)
    backend.get_aggregating_state(_MEAN).add(step)
    windowed = backend.get_state(_WINDOWED, int)
    windowed.set_current_namespace(step)
    windowed.update(step)
    backend.timer_service.register_event_time_timer(step)


def _expected(key: str, steps: int) -> dict[str, Any]:
    numbers = list(range(steps))
    return {
        "value": f"{key}/{steps - 1}",
        "list": numbers,
        "map": {str(number): number for number in numbers},
        "sum": sum(numbers),
        "mean": sum(numbers) / steps,
        "windowed": numbers,
        "timers": steps,
    }


def _contents(harness: KeyedHarness) -> dict[str, dict[str, Any]]:
    found = {key: _contents_of(harness, key) for key in _KEYS}
    # No timer is lost and none is there twice, so they can be counted over all subtasks.
    timers = sum(backend.timer_service.count(TimeDomain.EVENT_TIME) for backend in harness.backends)
    assert timers % len(_KEYS) == 0
    return {key: {**contents, "timers": timers // len(_KEYS)} for key, contents in found.items()}


def _contents_of(harness: KeyedHarness, key: str) -> dict[str, Any]:
    backend = harness.at(key)
    windowed = backend.get_state(_WINDOWED, int)
    windows = []
    for window in range(10):
        windowed.set_current_namespace(window)
        if (number := windowed.value()) is not None:
            windows.append(number)
    return {
        "value": backend.get_state(_VALUE).value(),
        "list": backend.get_list_state(_LIST).get(),
        "map": dict(backend.get_map_state(_MAP).items()),
        "sum": backend.get_reducing_state(_SUM).get(),
        "mean": backend.get_aggregating_state(_MEAN).get(),
        "windowed": windows,
    }


def _timers(harness: KeyedHarness) -> dict[str, list[int]]:
    fired: dict[str, list[int]] = {}
    for backend in harness.backends:
        for timer in backend.timer_service.advance_watermark(1000):
            assert harness.at(timer.key) is backend
            fired.setdefault(timer.key, []).append(timer.timestamp)
    return fired
