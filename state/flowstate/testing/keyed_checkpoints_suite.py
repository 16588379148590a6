"""What is left of keyed state after checkpoints, restarts and checkpoints that came to nothing."""

from __future__ import annotations

import random
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
from flowstate.functions import TimeDomain
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.testing.keyed_base_suite import KeyedHarness, KeyedSuiteBase

__all__ = ["AbortedCheckpointSuite", "CarriedStateSuite", "CheckpointSuite", "RandomUseSuite"]

_NUMBER = ValueStateDescriptor("number", int)
_LIST = ListStateDescriptor("list", int)
_MAP = MapStateDescriptor("map", str, int)
_SUM = ReducingStateDescriptor("sum", Reducer.SUM, int)
_MEAN = AggregatingStateDescriptor("mean", Reducer.MEAN, int)

_KEYS = ("a", "b", "c")


class CheckpointSuite(KeyedSuiteBase):
    """From checkpoint to checkpoint."""

    def test_what_was_not_checkpointed_is_gone_after_a_crash(self, harness: KeyedHarness) -> None:
        backend = harness.at("a")
        backend.get_state(_NUMBER).update(1)
        backend.get_list_state(_LIST).add(1)
        backend.get_map_state(_MAP).put("x", 1)
        harness.checkpoint()
        backend.get_state(_NUMBER).update(2)
        backend.get_list_state(_LIST).add(2)
        backend.get_map_state(_MAP).put("y", 2)
        backend.get_map_state(_MAP).remove("x")
        harness.reopen()
        backend = harness.at("a")

        assert backend.get_state(_NUMBER).value() == 1
        assert backend.get_list_state(_LIST).get() == [1]
        assert backend.get_map_state(_MAP).items() == [("x", 1)]

    def test_a_state_goes_on_after_a_checkpoint_without_a_restart(
        self, harness: KeyedHarness
    ) -> None:
        backend = harness.at("a")
        value, elements = backend.get_state(_NUMBER), backend.get_list_state(_LIST)
        entries, total = backend.get_map_state(_MAP), backend.get_reducing_state(_SUM)
        for number in range(5):
            value.update(number)
            elements.add(number)
            entries.put(str(number), number)
            total.add(number)
            harness.checkpoint()
            harness.at("a")

            assert value.value() == number
            assert elements.get() == list(range(number + 1))
            assert entries.get(str(number)) == number
            assert len(entries) == number + 1
            assert total.get() == sum(range(number + 1))

    def test_single_entries_of_a_map_are_changed_after_a_restart(
        self, harness: KeyedHarness
    ) -> None:
        expected = {str(number): number for number in range(100)}
        harness.at("a").get_map_state(_MAP).put_all(expected)
        for number in range(10):
            harness.restart()
            state = harness.at("a").get_map_state(_MAP)
            assert state.get(str(number)) == number
            state.remove(str(number))
            state.put(str(number + 20), -1)
            state.put(f"new-{number}", number)
            del expected[str(number)]
            expected[str(number + 20)] = -1
            expected[f"new-{number}"] = number
            assert state.get(str(number)) is None
            assert str(number + 20) in state

        assert dict(state.items()) == expected
        harness.restart()
        assert dict(harness.at("a").get_map_state(_MAP).items()) == expected

    @pytest.mark.parametrize("restarts", [1, 7, 100], ids=["each-time", "sometimes", "never"])
    @pytest.mark.parametrize("reads", [False, True], ids=["only-adding", "reading-too"])
    def test_a_list_grows_by_one_chunk_a_checkpoint(
        self, harness: KeyedHarness, restarts: int, reads: bool
    ) -> None:
        for number in range(70):
            state = harness.at("a").get_list_state(_LIST)
            state.add(number)
            if reads and number % 5 == 0:
                assert state.get() == list(range(number + 1))
            if number % restarts == restarts - 1:
                harness.restart()
            else:
                harness.checkpoint()
        harness.reopen()

        assert harness.at("a").get_list_state(_LIST).get() == list(range(70))

    def test_several_changes_of_a_list_between_two_checkpoints_are_one(
        self, harness: KeyedHarness
    ) -> None:
        harness.at("a").get_list_state(_LIST).add_all([1, 2])
        harness.restart()
        state = harness.at("a").get_list_state(_LIST)
        state.add(3)
        state.update([9])
        state.add(4)
        harness.restart()
        state = harness.at("a").get_list_state(_LIST)
        state.add(5)
        assert state.get() == [9, 4, 5]
        state.add(6)
        harness.restart()

        assert harness.at("a").get_list_state(_LIST).get() == [9, 4, 5, 6]

    @pytest.mark.parametrize("restarted", [False, True], ids=["checkpoints", "restarts"])
    def test_what_was_cleared_and_added_again_holds_only_the_new(
        self, harness: KeyedHarness, restarted: bool
    ) -> None:
        after = harness.restart if restarted else harness.checkpoint
        for number in range(4):
            backend = harness.at("a")
            backend.get_state(_NUMBER).clear()
            backend.get_list_state(_LIST).clear()
            backend.get_map_state(_MAP).clear()
            backend.get_reducing_state(_SUM).clear()
            if number % 2:
                after()
            backend = harness.at("a")
            assert backend.get_list_state(_LIST).get() == []
            assert backend.get_map_state(_MAP).is_empty()
            backend.get_state(_NUMBER).update(number)
            backend.get_list_state(_LIST).add(number)
            backend.get_map_state(_MAP).put(str(number), number)
            backend.get_reducing_state(_SUM).add(number)
            after()
        harness.reopen()
        backend = harness.at("a")

        assert backend.get_state(_NUMBER).value() == 3
        assert backend.get_list_state(_LIST).get() == [3]
        assert backend.get_map_state(_MAP).items() == [("3", 3)]
        assert backend.get_reducing_state(_SUM).get() == 3

    def test_what_was_removed_stays_removed_over_many_checkpoints(
        self, harness: KeyedHarness
    ) -> None:
        for key in _KEYS:
            _fill(harness.at(key), 1)
        harness.checkpoint()
        _clear(harness.at("b"))
        for number in range(20):
            harness.at("c").get_state(_NUMBER).update(number)
            harness.checkpoint()
        harness.reopen()

        assert _contents(harness.at("b")) == _NOTHING
        assert _contents(harness.at("a")) == _filled(1)
        assert harness.backends[0].entry_count("map") == 2

    def test_a_checkpoint_without_changes_changes_nothing(self, harness: KeyedHarness) -> None:
        _fill(harness.at("a"), 1)
        for _ in range(3):
            harness.checkpoint()
        harness.restart()
        harness.restart()

        assert _contents(harness.at("a")) == _filled(1)

    def test_an_operator_that_has_done_nothing_yet_can_be_restarted(
        self, harness: KeyedHarness
    ) -> None:
        harness.restart()
        harness.restart()
        _fill(harness.at("a"), 1)
        harness.restart()

        assert _contents(harness.at("a")) == _filled(1)


class AbortedCheckpointSuite(KeyedSuiteBase):
    """A checkpoint that came to nothing leaves its changes to the next one."""

    @pytest.mark.parametrize("times", [1, 3], ids=["once", "three-times"])
    def test_the_next_checkpoint_holds_the_changes_of_an_aborted_one(
        self, harness: KeyedHarness, times: int
    ) -> None:
        for key in _KEYS:
            _fill(harness.at(key), 1)
        harness.checkpoint()
        _fill(harness.at("a"), 2)
        _clear(harness.at("b"))
        _fill(harness.at("d"), 3)
        for _ in range(times):
            _abort(harness)

        assert _contents(harness.at("a")) == _filled(1, 2)
        harness.restart()
        assert _contents(harness.at("a")) == _filled(1, 2)
        assert _contents(harness.at("b")) == _NOTHING
        assert _contents(harness.at("c")) == _filled(1)
        assert _contents(harness.at("d")) == _filled(3)

    def test_changes_before_and_after_an_aborted_checkpoint_add_up(
        self, harness: KeyedHarness
    ) -> None:
        _fill(harness.at("a"), 1)
        harness.restart()
        _fill(harness.at("a"), 2)
        for subtask in harness.operator.subtasks:
            subtask.snapshot(2)
        _fill(harness.at("a"), 3)
        _clear(harness.at("c"))
        for subtask in harness.operator.subtasks:
            subtask.notify_checkpoint_aborted(2)
        _fill(harness.at("a"), 4)

        assert _contents(harness.at("a")) == _filled(1, 2, 3, 4)
        harness.restart()
        assert _contents(harness.at("a")) == _filled(1, 2, 3, 4)
        assert _contents(harness.at("c")) == _NOTHING

    def test_lists_and_maps_that_were_not_read_survive_an_abort(
        self, harness: KeyedHarness
    ) -> None:
        backend = harness.at("a")
        backend.get_list_state(_LIST).add_all([1, 2])
        backend.get_map_state(_MAP).put_all({"x": 1, "y": 2})
        harness.restart()
        backend = harness.at("a")
        backend.get_list_state(_LIST).add(3)
        backend.get_map_state(_MAP).put("z", 3)
        backend.get_map_state(_MAP).remove("x")
        _abort(harness)
        backend.get_list_state(_LIST).add(4)
        harness.restart()
        backend = harness.at("a")

        assert backend.get_list_state(_LIST).get() == [1, 2, 3, 4]
        assert dict(backend.get_map_state(_MAP).items()) == {"y": 2, "z": 3}

    def test_what_was_cleared_before_an_abort_stays_cleared(self, harness: KeyedHarness) -> None:
        _fill(harness.at("a"), 1)
        harness.restart()
        _clear(harness.at("a"))
        _abort(harness)
        harness.restart()

        assert _contents(harness.at("a")) == _NOTHING
        assert harness.backends[0].entry_count("list") == 0

    def test_the_first_checkpoint_may_be_aborted(self, harness: KeyedHarness) -> None:
        _fill(harness.at("a"), 1)
        _fill(harness.at("b"), 1)
        _abort(harness)
        _clear(harness.at("b"))
        harness.restart()

        assert _contents(harness.at("a")) == _filled(1)
        assert _contents(harness.at("b")) == _NOTHING

    def test_timers_of_an_aborted_checkpoint_are_in_the_next(self, harness: KeyedHarness) -> None:
        timers = harness.at("a").timer_service
        timers.register_event_time_timer(10)
        timers.register_event_time_timer(20)
        harness.restart()
        timers = harness.at("a").timer_service
        timers.register_event_time_timer(15)
        timers.delete_event_time_timer(20)
        _abort(harness)
        harness.restart()
        timers = harness.backends[0].timer_service

        assert timers.count(TimeDomain.EVENT_TIME) == 2
        assert [timer.timestamp for timer in timers.advance_watermark(99)] == [10, 15]

    def test_a_snapshot_may_be_taken_before_the_one_before_is_complete(
        self, harness: KeyedHarness
    ) -> None:
        _fill(harness.at("a"), 1)
        harness.restart()
        (subtask,) = harness.operator.subtasks
        _append(harness.at("a"), 2)
        subtask.snapshot(2)
        _append(harness.at("a"), 3)
        subtask.snapshot(3)
        subtask.notify_checkpoint_complete(2)
        _append(harness.at("a"), 4)

        assert _contents(harness.at("a")) == _filled(1, 2, 3, 4)
        subtask.notify_checkpoint_complete(3)
        assert _contents(harness.at("a")) == _filled(1, 2, 3, 4)


class CarriedStateSuite(KeyedSuiteBase):
    """State that a program does not ask for is kept for the one that does."""

    def test_state_that_is_not_registered_is_carried_over_checkpoints_and_rescales(
        self, harness: KeyedHarness
    ) -> None:
        keys = [f"key-{number}" for number in range(30)]
        for number, key in enumerate(keys):
            _fill(harness.at(key), number)
            harness.at(key).timer_service.register_event_time_timer(number)
        harness.restart()
        for parallelism in (3, 2, 5, 1):
            for number, key in enumerate(keys):
                other = harness.at(key).get_state(ValueStateDescriptor("other", int))
                other.update(number * parallelism)
            for _ in range(9):
                harness.at(keys[0]).get_state(ValueStateDescriptor("other", int)).update(0)
                harness.checkpoint()
            harness.restart(parallelism=parallelism)

        for number, key in enumerate(keys):
            assert _contents(harness.at(key)) == _filled(number)
        fired = harness.backends[0].timer_service.advance_watermark(1000)
        assert [(timer.key, timer.timestamp) for timer in fired] == [
            (key, number) for number, key in enumerate(keys)
        ]

    def test_state_that_only_some_subtasks_register_is_carried(self, harness: KeyedHarness) -> None:
        keys = [f"key-{number}" for number in range(20)]
        for number, key in enumerate(keys):
            harness.at(key).get_list_state(_LIST).add(number)
        harness.restart(parallelism=4)
        harness.at(keys[0]).get_list_state(_LIST).add(100)
        harness.restart(parallelism=2)

        found = {key: harness.at(key).get_list_state(_LIST).get() for key in keys}
        expected = {key: [number] for number, key in enumerate(keys)}
        assert found == {**expected, keys[0]: [0, 100]}


class RandomUseSuite(KeyedSuiteBase):
    """Random use against plain dicts."""

    @pytest.mark.parametrize("seed", range(4), ids=lambda seed: f"seed-{seed}")
    def test_random_use_agrees_with_plain_dicts(self, harness: KeyedHarness, seed: int) -> None:
        choose = random.Random(seed)
        keys = [f"key-{number}" for number in range(8)]
        expected: dict[str, dict[str, Any]] = {key: _nothing() for key in keys}
        for _ in range(300):
            key = choose.choice(keys)
            _use(choose, harness.at(key), expected[key])
            if choose.random() < 0.08:
                _interrupt(choose, harness)
            if choose.random() < 0.2:
                key = choose.choice(keys)
                assert _contents(harness.at(key)) == expected[key]
        harness.restart(parallelism=2)

        assert {key: _contents(harness.at(key)) for key in keys} == expected


def _nothing() -> dict[str, Any]:
    return {"number": None, "list": [], "map": {}, "sum": None, "mean": None}


_NOTHING = _nothing()


def _fill(backend: KeyedStateBackend, number: int) -> None:
    backend.get_state(_NUMBER).update(number)
    backend.get_list_state(_LIST).add(number)
    backend.get_map_state(_MAP).put(str(number), number)
    backend.get_reducing_state(_SUM).add(number)
    backend.get_aggregating_state(_MEAN).add(number)


# Another name for the same: what is appended is not read before.
_append = _fill


def _filled(*numbers: int) -> dict[str, Any]:
    return {
        "number": numbers[-1],
        "list": list(numbers),
        "map": {str(number): number for number in numbers},
        "sum": sum(numbers),
        "mean": sum(numbers) / len(numbers),
    }


def _clear(backend: KeyedStateBackend) -> None:
    backend.get_state(_NUMBER).clear()
    backend.get_list_state(_LIST).clear()
    backend.get_map_state(_MAP).clear()
    backend.get_reducing_state(_SUM).clear()
    backend.get_aggregating_state(_MEAN).clear()


def _contents(backend: KeyedStateBackend) -> dict[str, Any]:
    return {
        "number": backend.get_state(_NUMBER).value(),
        "list": backend.get_list_state(_LIST).get(),
        "map": dict(backend.get_map_state(_MAP).items()),
        "sum": backend.get_reducing_state(_SUM).get(),
        "mean": backend.get_aggregating_state(_MEAN).get(),
    }


def _abort(harness: KeyedHarness) -> None:
    record = harness.operator.record
    checkpoint_id = 1 if record is None else record.checkpoint_id + 1
    for subtask in harness.operator.subtasks:
        subtask.snapshot(checkpoint_id)
    for subtask in harness.operator.subtasks:
        subtask.notify_checkpoint_aborted(checkpoint_id)


def _interrupt(choose: random.Random, harness: KeyedHarness) -> None:
    what = choose.choice(("checkpoint", "checkpoint", "restart", "rescale", "abort"))
    if what == "abort":
        _abort(harness)
    elif what == "checkpoint":
        harness.checkpoint()
    else:
        harness.restart(parallelism=choose.randint(1, 4) if what == "rescale" else None)


def _use(choose: random.Random, backend: KeyedStateBackend, expected: dict[str, Any]) -> None:
    number, sub = choose.randint(-9, 9), choose.choice("xyz")
    match choose.choice(
        ("value", "list", "list", "update", "map", "map", "remove", "add", "clear")
    ):
        case "value":
            backend.get_state(_NUMBER).update(number)
            expected["number"] = number
        case "list":
            backend.get_list_state(_LIST).add(number)
            expected["list"].append(number)
        case "update":
            backend.get_list_state(_LIST).update([number])
            expected["list"] = [number]
        case "map":
            backend.get_map_state(_MAP).put(sub, number)
            expected["map"][sub] = number
        case "remove":
            backend.get_map_state(_MAP).remove(sub)
            expected["map"].pop(sub, None)
        case "add":
            backend.get_reducing_state(_SUM).add(number)
            expected["sum"] = number + (expected["sum"] or 0)
        case "clear":
            name = choose.choice(("number", "list", "map", "sum"))
            _clear_one(backend, name)
            expected[name] = _nothing()[name]


def _clear_one(backend: KeyedStateBackend, name: str) -> None:
    states = {
        "number": backend.get_state(_NUMBER),
        "list": backend.get_list_state(_LIST),
        "map": backend.get_map_state(_MAP),
        "sum": backend.get_reducing_state(_SUM),
    }
    states[name].clear()
