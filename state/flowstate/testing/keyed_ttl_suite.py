"""How long state lives: in processing time, in event time, and across restarts."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from flowstate.aggregates import Reducer
from flowstate.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtlConfig,
    StateVisibility,
    TtlTime,
    UpdateType,
    ValueStateDescriptor,
)
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.testing.clock import ManualClock
from flowstate.testing.keyed_base_suite import KeyedHarness, KeyedSuiteBase

__all__ = ["EventTimeTtlSuite", "TtlAtRestoreSuite", "TtlSuite"]

_ON_READ = UpdateType.ON_READ_AND_WRITE
_RETURN_EXPIRED = StateVisibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP


def _ttl(ms: int = 100, *, cleanup: int = 0, **options: Any) -> StateTtlConfig:
    # Without clean-up on the side what a test sees does not depend on what else it has read.
    ttl = dt.timedelta(milliseconds=ms)
    return StateTtlConfig(ttl=ttl, cleanup_incrementally=cleanup, **options)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of state that is used to hold one number."""

    name: str
    descriptor: Callable[[StateTtlConfig | None], Any]
    state: Callable[[KeyedStateBackend, Any], Any]
    put: Callable[[Any, int], None]
    read: Callable[[Any], int | None]

    def write(self, backend: KeyedStateBackend, ttl: StateTtlConfig | None, number: int) -> None:
        self.put(self.state(backend, self.descriptor(ttl)), number)

    def get(self, backend: KeyedStateBackend, ttl: StateTtlConfig | None) -> int | None:
        return self.read(self.state(backend, self.descriptor(ttl)))


def _only(elements: list[int]) -> int | None:
    return elements[0] if elements else None


_KINDS = [
    _Kind(
        "value",
        lambda ttl: ValueStateDescriptor("state", int, ttl=ttl),
        KeyedStateBackend.get_state,
        lambda state, number: state.update(number),
        lambda state: state.value(),
    ),
    _Kind(
        "list",
        lambda ttl: ListStateDescriptor("state", int, ttl=ttl),
        KeyedStateBackend.get_list_state,
        lambda state, number: state.update([number]),
        lambda state: _only(state.get()),
    ),
    _Kind(
        "map",
        lambda ttl: MapStateDescriptor("state", str, int, ttl=ttl),
        KeyedStateBackend.get_map_state,
        lambda state, number: state.put("x", number),
        lambda state: state.get("x"),
    ),
    _Kind(
        "map-iterated",
        lambda ttl: MapStateDescriptor("state", str, int, ttl=ttl),
        KeyedStateBackend.get_map_state,
        lambda state, number: state.put_all({"x": number}),
        lambda state: _only(state.values()),
    ),
    _Kind(
        "reducing",
        lambda ttl: ReducingStateDescriptor("state", lambda _, number: number, int, ttl=ttl),
        KeyedStateBackend.get_reducing_state,
        lambda state, number: state.add(number),
        lambda state: state.get(),
    ),
    _Kind(
        "aggregating",
        lambda ttl: AggregatingStateDescriptor("state", Reducer.MAX, int, ttl=ttl),
        KeyedStateBackend.get_aggregating_state,
        lambda state, number: state.add(number),
        lambda state: state.get(),
    ),
]


class _TtlSuiteBase(KeyedSuiteBase):
    @pytest.fixture(params=_KINDS, ids=lambda kind: kind.name)
    def kind(self, request: pytest.FixtureRequest) -> _Kind:
        """Return each kind of state in turn; what is tested holds for all."""
        found: _Kind = request.param
        return found


class TtlSuite(_TtlSuiteBase):
    """Processing time."""

    def test_a_unit_is_gone_when_its_time_has_passed(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        kind.write(harness.at("a"), _ttl(), 1)
        clock.set(99)
        assert kind.get(harness.at("a"), _ttl()) == 1
        clock.set(100)

        assert kind.get(harness.at("a"), _ttl()) is None
        clock.set(0)
        assert kind.get(harness.at("a"), _ttl()) is None, "what was read as expired is removed"
        assert harness.backends[0].entry_count("state") == 0

    def test_writing_renews(self, harness: KeyedHarness, clock: ManualClock, kind: _Kind) -> None:
        kind.write(harness.at("a"), _ttl(), 1)
        clock.set(60)
        kind.write(harness.at("a"), _ttl(), 2)
        clock.set(159)
        assert kind.get(harness.at("a"), _ttl()) == 2
        clock.set(160)

        assert kind.get(harness.at("a"), _ttl()) is None

    @pytest.mark.parametrize("restarted", [False, True], ids=["fresh", "restarted"])
    def test_reading_renews_only_if_it_is_said_so(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind, restarted: bool
    ) -> None:
        kind.write(harness.at("written"), _ttl(), 1)
        clock.set(60)
        assert kind.get(harness.at("written"), _ttl()) == 1
        clock.set(100)
        assert kind.get(harness.at("written"), _ttl()) is None

        harness.reopen()
        renewing = _ttl(update_type=_ON_READ)
        kind.write(harness.at("read"), renewing, 1)
        clock.set(160)
        assert kind.get(harness.at("read"), renewing) == 1
        if restarted:
            harness.restart()
        clock.set(259)
        assert kind.get(harness.at("read"), renewing) == 1
        clock.set(358)
        assert kind.get(harness.at("read"), renewing) == 1
        clock.set(458)
        assert kind.get(harness.at("read"), renewing) is None

    def test_a_disabled_ttl_lets_nothing_expire(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        disabled = _ttl(update_type=UpdateType.DISABLED)
        kind.write(harness.at("a"), disabled, 1)
        clock.set(10_000)
        harness.restart()

        assert kind.get(harness.at("a"), disabled) == 1

    @pytest.mark.parametrize("update_type", [UpdateType.ON_CREATE_AND_WRITE, _ON_READ], ids=str)
    def test_what_has_expired_may_be_returned_once(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind, update_type: UpdateType
    ) -> None:
        ttl = _ttl(visibility=_RETURN_EXPIRED, update_type=update_type)
        kind.write(harness.at("a"), ttl, 1)
        clock.set(100)

        assert kind.get(harness.at("a"), ttl) == 1
        assert kind.get(harness.at("a"), ttl) is None

    def test_a_clock_that_goes_back_only_prolongs(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        clock.set(1000)
        kind.write(harness.at("a"), _ttl(), 1)
        clock.set(0)
        assert kind.get(harness.at("a"), _ttl()) == 1
        clock.set(1099)

        assert kind.get(harness.at("a"), _ttl()) == 1

    def test_the_sum_of_time_and_ttl_does_not_overflow(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        clock.set((1 << 63) - 50)
        kind.write(harness.at("a"), _ttl(), 1)
        clock.set((1 << 63) - 2)
        assert kind.get(harness.at("a"), _ttl()) == 1
        harness.restart()
        clock.set((1 << 63) - 1)

        assert kind.get(harness.at("a"), _ttl()) is None

    def test_each_key_has_its_own_time(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        for time, key in ((0, "a"), (50, "b")):
            clock.set(time)
            kind.write(harness.at(key), _ttl(), time)
        clock.set(120)

        assert kind.get(harness.at("a"), _ttl()) is None
        assert kind.get(harness.at("b"), _ttl()) == 50

    def test_a_default_is_ignored_with_a_ttl(
        self, harness: KeyedHarness, clock: ManualClock
    ) -> None:
        descriptor = ValueStateDescriptor("state", int, default=7, ttl=_ttl())
        state = harness.at("a").get_state(descriptor)

        assert state.value() is None
        state.update(1)
        clock.set(100)
        assert state.value() is None

    def test_each_element_of_a_list_has_its_own_time(
        self, harness: KeyedHarness, clock: ManualClock
    ) -> None:
        descriptor = ListStateDescriptor("list", int, ttl=_ttl())
        state = harness.at("a").get_list_state(descriptor)
        state.add(0)
        clock.set(30)
        state.add_all([30, 31])
        harness.restart()
        clock.set(60)
        state = harness.at("a").get_list_state(descriptor)
        state.add(60)
        clock.set(100)

        assert state.get() == [30, 31, 60]
        clock.set(130)
        assert state.get() == [60]
        harness.restart()
        assert harness.at("a").get_list_state(descriptor).get() == [60]

    def test_updating_a_list_stamps_all_its_elements(
        self, harness: KeyedHarness, clock: ManualClock
    ) -> None:
        state = harness.at("a").get_list_state(ListStateDescriptor("list", int, ttl=_ttl()))
        state.add_all([1, 2])
        clock.set(60)
        state.update([*state.get(), 3])
        clock.set(159)

        assert state.get() == [1, 2, 3]
        clock.set(160)
        assert state.get() == []

    def test_reading_renews_the_elements_of_a_list_that_are_alive(
        self, harness: KeyedHarness, clock: ManualClock
    ) -> None:
        descriptor = ListStateDescriptor("list", int, ttl=_ttl(update_type=_ON_READ))
        state = harness.at("a").get_list_state(descriptor)
        state.add(0)
        clock.set(60)
        state.add(60)
        clock.set(120)
        assert state.get() == [60]
        clock.set(219)

        assert state.get() == [60]

    def test_a_list_with_gaps_can_be_added_to(
        self, harness: KeyedHarness, clock: ManualClock
    ) -> None:
        # Full snapshots drop the chunks whose elements have all expired, here the first one.
        descriptor = ListStateDescriptor("list", int, ttl=_ttl())
        for number in range(3):
            clock.set(30 * number)
            harness.at("a").get_list_state(descriptor).add(number)
            harness.checkpoint()
        clock.set(110)
        for number in range(9):
            harness.at("other").get_list_state(descriptor).add(number)
            harness.checkpoint()
        harness.reopen()
        harness.at("a").get_list_state(descriptor).add(3)
        harness.restart()

        assert harness.at("a").get_list_state(descriptor).get() == [1, 2, 3]

    def test_each_entry_of_a_map_has_its_own_time(
        self, harness: KeyedHarness, clock: ManualClock
    ) -> None:
        descriptor = MapStateDescriptor("map", str, int, ttl=_ttl())
        state = harness.at("a").get_map_state(descriptor)
        state.put_all({"x": 1, "y": 1, "z": 1})
        clock.set(60)
        state.put("y", 2)
        state.put("n", None)
        harness.restart()
        state = harness.at("a").get_map_state(descriptor)
        clock.set(100)

        assert "x" not in state
        assert state.contains("n")
        assert dict(state.items()) == {"y": 2, "n": None}
        assert len(state) == 2
        clock.set(160)
        assert not state.contains("n")
        assert state.keys() == []

    def test_a_map_is_empty_only_when_expired_entries_were_read(
        self, harness: KeyedHarness, clock: ManualClock
    ) -> None:
        descriptor = MapStateDescriptor("map", str, int, ttl=_ttl())
        state = harness.at("a").get_map_state(descriptor)
        state.put("x", 1)
        clock.set(100)

        assert not state.is_empty()
        assert state.get("x") is None
        assert state.is_empty()

    def test_contains_returns_what_has_expired_once(
        self, harness: KeyedHarness, clock: ManualClock
    ) -> None:
        descriptor = MapStateDescriptor("map", str, int, ttl=_ttl(visibility=_RETURN_EXPIRED))
        state = harness.at("a").get_map_state(descriptor)
        state.put("x", 1)
        clock.set(100)

        assert "x" in state
        assert "x" not in state

    @pytest.mark.parametrize(
        ("visibility", "expected"),
        [(StateVisibility.NEVER_RETURN_EXPIRED, 2), (_RETURN_EXPIRED, 3)],
        ids=str,
    )
    @pytest.mark.parametrize("aggregating", [False, True], ids=["reducing", "aggregating"])
    def test_what_is_added_to_an_expired_accumulator_is_added_to_what_may_be_seen(
        self,
        harness: KeyedHarness,
        clock: ManualClock,
        visibility: StateVisibility,
        expected: int,
        aggregating: bool,
    ) -> None:
        ttl = _ttl(visibility=visibility)
        backend = harness.at("a")
        state: Any
        if aggregating:
            descriptor = AggregatingStateDescriptor("state", Reducer.SUM, int, ttl=ttl)
            state = backend.get_aggregating_state(descriptor)
        else:
            state = backend.get_reducing_state(
                ReducingStateDescriptor("state", Reducer.SUM, int, ttl=ttl)
            )
        state.add(1)
        clock.set(100)
        state.add(2)
        clock.set(199)

        assert state.get() == expected, "the sum is as old as the last addition"
        clock.set(200)
        state.get()
        assert state.get() is None

    def test_accesses_clean_up_other_keys_on_the_side(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        ttl = _ttl(cleanup=2)
        for number in range(20):
            kind.write(harness.at(f"key-{number}"), ttl, 1)
        clock.set(100)
        for _ in range(30):
            kind.write(harness.at("new"), ttl, 1)

        assert list(harness.backends[0].keys("state")) == ["new"]
        assert kind.get(harness.at("new"), ttl) == 1

    def test_without_clean_up_expired_entries_stay_until_they_are_read(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        for number in range(5):
            kind.write(harness.at(f"key-{number}"), _ttl(), 1)
        clock.set(100)
        for _ in range(30):
            kind.write(harness.at("new"), _ttl(), 1)

        assert harness.backends[0].entry_count("state") == 6


class TtlAtRestoreSuite(_TtlSuiteBase):
    """Times travel with the state, the configuration with the program."""

    def test_a_restart_does_not_renew(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        kind.write(harness.at("a"), _ttl(), 1)
        clock.set(50)
        harness.restart(parallelism=3)
        clock.set(99)
        assert kind.get(harness.at("a"), _ttl()) == 1
        clock.set(100)

        assert kind.get(harness.at("a"), _ttl()) is None

    def test_a_longer_ttl_revives_and_a_shorter_one_ends_at_once(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        kind.write(harness.at("a"), _ttl(100), 1)
        harness.restart()
        clock.set(150)
        assert kind.get(harness.at("a"), _ttl(200)) == 1
        harness.restart()

        assert kind.get(harness.at("a"), _ttl(120)) is None

    def test_switching_a_ttl_on_counts_from_then(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        for key in ("a", "b", "c"):
            kind.write(harness.at(key), None, 1)
        clock.set(1000)
        harness.restart()
        kind.write(harness.at("a"), _ttl(), 2)
        clock.set(1099)
        assert kind.get(harness.at("b"), _ttl()) == 1
        harness.restart(parallelism=2)
        assert kind.get(harness.at("b"), _ttl()) == 1
        clock.set(1100)

        assert kind.get(harness.at("a"), _ttl()) is None
        assert kind.get(harness.at("b"), _ttl()) is None
        assert kind.get(harness.at("c"), _ttl()) is None

    def test_switching_a_ttl_off_keeps_what_is_there(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        for key in ("a", "b"):
            kind.write(harness.at(key), _ttl(), 1)
        harness.restart()
        clock.set(1000)
        kind.write(harness.at("a"), None, 2)
        harness.restart(parallelism=2)

        assert kind.get(harness.at("a"), None) == 2
        assert kind.get(harness.at("b"), None) == 1

    def test_a_list_that_got_a_ttl_later_may_be_added_to_first(
        self, harness: KeyedHarness, clock: ManualClock
    ) -> None:
        harness.at("a").get_list_state(ListStateDescriptor("list", int)).add_all([1, 2])
        harness.restart()
        clock.set(1000)
        descriptor = ListStateDescriptor("list", int, ttl=_ttl())
        harness.at("a").get_list_state(descriptor).add(3)
        harness.restart()
        state = harness.at("a").get_list_state(descriptor)
        assert state.get() == [1, 2, 3]
        clock.set(1050)
        state.add(4)
        clock.set(1100)

        assert state.get() == [4]

    def test_full_snapshots_keep_what_is_alive(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        for time in range(0, 300, 10):
            clock.set(time)
            kind.write(harness.at(f"key-{time}"), _ttl(), time)
            harness.checkpoint()
        harness.reopen()

        found = [kind.get(harness.at(f"key-{time}"), _ttl()) for time in range(0, 300, 10)]
        assert found == [None] * 20 + list(range(200, 300, 10))


class EventTimeTtlSuite(_TtlSuiteBase):
    """Event time: elements stamp, the watermark ends."""

    def test_a_unit_is_stamped_by_its_element_and_ended_by_the_watermark(
        self, harness: KeyedHarness, clock: ManualClock, kind: _Kind
    ) -> None:
        ttl = _ttl(time=TtlTime.EVENT_TIME)
        kind.write(harness.at("a", timestamp=1000), ttl, 1)
        clock.set(1_000_000)
        _watermark(harness, 1099)
        assert kind.get(harness.at("a", timestamp=5000), ttl) == 1
        _watermark(harness, 1100)

        assert kind.get(harness.at("a", timestamp=0), ttl) is None

    def test_without_a_timestamp_the_watermark_stamps(
        self, harness: KeyedHarness, kind: _Kind
    ) -> None:
        ttl = _ttl(time=TtlTime.EVENT_TIME)
        _watermark(harness, 500)
        kind.write(harness.at("a"), ttl, 1)
        _watermark(harness, 599)
        assert kind.get(harness.at("a"), ttl) == 1
        _watermark(harness, 600)

        assert kind.get(harness.at("a"), ttl) is None

    def test_what_was_written_before_any_event_time_stays_until_it_is_written_again(
        self, harness: KeyedHarness, kind: _Kind
    ) -> None:
        ttl = _ttl(time=TtlTime.EVENT_TIME)
        kind.write(harness.at("a"), ttl, 1)
        harness.restart()
        _watermark(harness, 1_000_000)
        assert kind.get(harness.at("a"), ttl) == 1
        kind.write(harness.at("a"), ttl, 2)
        _watermark(harness, 1_000_100)

        assert kind.get(harness.at("a"), ttl) is None

    def test_reading_renews_in_event_time(self, harness: KeyedHarness, kind: _Kind) -> None:
        ttl = _ttl(time=TtlTime.EVENT_TIME, update_type=_ON_READ)
        kind.write(harness.at("a", timestamp=0), ttl, 1)
        _watermark(harness, 60)
        assert kind.get(harness.at("a", timestamp=80), ttl) == 1
        harness.restart()
        _watermark(harness, 179)
        assert kind.get(harness.at("a", timestamp=80), ttl) == 1
        _watermark(harness, 180)

        assert kind.get(harness.at("a"), ttl) is None

    def test_event_times_survive_restarts_and_rescales(
        self, harness: KeyedHarness, kind: _Kind
    ) -> None:
        ttl = _ttl(time=TtlTime.EVENT_TIME)
        for time in (0, 50):
            kind.write(harness.at(f"key-{time}", timestamp=time), ttl, time)
        harness.restart(parallelism=3)
        _watermark(harness, 120)

        assert kind.get(harness.at("key-0"), ttl) is None
        assert kind.get(harness.at("key-50"), ttl) == 50


def _watermark(harness: KeyedHarness, watermark: int) -> None:
    for backend in harness.backends:
        assert list(backend.timer_service.advance_watermark(watermark)) == []
