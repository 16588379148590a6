"""Timers: when they fire, in which order, and where after a rescale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flowstate.descriptors import ValueStateDescriptor
from flowstate.errors import StateTypeError
from flowstate.functions import TimeDomain
from flowstate.keyed.timers import KeyedTimerService, Timer
from flowstate.rows import NO_TIMESTAMP
from flowstate.testing.keyed_base_suite import KeyedHarness, KeyedSuiteBase

__all__ = ["TimerSuite"]

_EVENT, _PROCESSING = TimeDomain.EVENT_TIME, TimeDomain.PROCESSING_TIME
_LONG_MAX = (1 << 63) - 1


class TimerSuite(KeyedSuiteBase):
    """Timers of both domains."""

    @pytest.fixture(params=list(TimeDomain), ids=str)
    def domain(self, request: pytest.FixtureRequest) -> TimeDomain:
        """Return each domain in turn; what is tested holds for both."""
        found: TimeDomain = request.param
        return found

    @pytest.fixture(params=[False, True], ids=["fresh", "restarted"])
    def restarted(self, request: pytest.FixtureRequest) -> bool:
        """Say whether to restart before timers fire."""
        return bool(request.param)

    def test_a_timer_fires_once_when_its_time_has_come(
        self, harness: KeyedHarness, domain: TimeDomain, restarted: bool
    ) -> None:
        _register(harness.at("a").timer_service, domain, 10)
        if restarted:
            harness.restart()
        timers = harness.backends[0].timer_service

        assert list(_advance(timers, domain, 9)) == []
        assert list(_advance(timers, domain, 10)) == [Timer(domain, "a", None, 10)]
        assert list(_advance(timers, domain, 11)) == []
        harness.restart()
        assert list(_advance(harness.backends[0].timer_service, domain, 99)) == []

    def test_a_timer_that_is_registered_twice_fires_once(
        self, harness: KeyedHarness, domain: TimeDomain, restarted: bool
    ) -> None:
        _register(harness.at("a").timer_service, domain, 10)
        if restarted:
            harness.restart()
        timers = harness.at("a").timer_service
        _register(timers, domain, 10)

        assert timers.count(domain) == 1
        assert _times(_advance(timers, domain, 10)) == [10]

    def test_domains_keys_and_namespaces_have_their_own_timers(
        self, harness: KeyedHarness, restarted: bool
    ) -> None:
        for key in "ab":
            timers = harness.at(key).timer_service
            for domain in TimeDomain:
                _register(timers, domain, 10)
                _register(timers, domain, 10, b"window")
        if restarted:
            harness.restart()
        timers = harness.at("a").timer_service
        timers.delete_event_time_timer(10)
        timers.delete_processing_time_timer(10, b"window")

        events = {(timer.key, timer.namespace) for timer in timers.advance_watermark(10)}
        assert events == {("a", b"window"), ("b", None), ("b", b"window")}
        ticks = {(timer.key, timer.namespace) for timer in timers.advance_processing_time(10)}
        assert ticks == {("a", None), ("b", None), ("b", b"window")}

    def test_timers_fire_in_the_order_of_their_times(
        self, harness: KeyedHarness, domain: TimeDomain, restarted: bool
    ) -> None:
        times = [50, -7, 3, 1000, 0, 256, 255, -300]
        for number, time in enumerate(times):
            _register(harness.at(f"key-{number}").timer_service, domain, time)
        if restarted:
            harness.restart()
        for number, time in enumerate([30, -8, 2000]):
            _register(harness.at(f"key-{number}").timer_service, domain, time)
        timers = harness.backends[0].timer_service

        assert timers.next_timestamp(domain) == -300
        assert _times(_advance(timers, domain, 300)) == sorted(
            time for time in [*times, 30, -8] if time <= 300
        )
        assert timers.next_timestamp(domain) == 1000
        assert timers.count(domain) == 2

    def test_all_timers_of_one_time_fire(self, harness: KeyedHarness, restarted: bool) -> None:
        for number in range(20):
            harness.at(f"key-{number}").timer_service.register_event_time_timer(5)
        if restarted:
            harness.restart()
        fired = list(harness.backends[0].timer_service.advance_watermark(5))

        assert {timer.key for timer in fired} == {f"key-{number}" for number in range(20)}
        assert len(fired) == 20

    def test_a_deleted_timer_does_not_fire(
        self, harness: KeyedHarness, domain: TimeDomain, restarted: bool
    ) -> None:
        timers = harness.at("a").timer_service
        for time in (10, 20, 30):
            _register(timers, domain, time)
        if restarted:
            harness.restart()
        timers = harness.at("a").timer_service
        _delete(timers, domain, 20)
        _delete(timers, domain, 99)

        assert timers.count(domain) == 2
        if restarted:
            harness.restart()
        timers = harness.backends[0].timer_service
        assert _times(_advance(timers, domain, 100)) == [10, 30]

    def test_a_timer_may_be_registered_again_after_it_was_deleted(
        self, harness: KeyedHarness, restarted: bool
    ) -> None:
        timers = harness.at("a").timer_service
        timers.register_event_time_timer(10)
        if restarted:
            harness.restart()
        timers = harness.at("a").timer_service
        timers.delete_event_time_timer(10)
        timers.register_event_time_timer(10)
        if restarted:
            harness.restart()

        assert _times(harness.backends[0].timer_service.advance_watermark(10)) == [10]

    def test_a_timer_that_is_registered_while_firing_and_due_fires_in_the_same_call(
        self, harness: KeyedHarness, restarted: bool
    ) -> None:
        timers = harness.at("a").timer_service
        timers.register_event_time_timer(10)
        timers.register_event_time_timer(50)
        if restarted:
            harness.restart()
        timers = harness.backends[0].timer_service
        fired = []
        for timer in timers.advance_watermark(60):
            fired.append(timer.timestamp)
            if timer.timestamp == 10:
                timers.register_event_time_timer(20)
                timers.register_event_time_timer(5)
                timers.register_event_time_timer(61)

        assert fired == [10, 5, 20, 50]
        assert timers.count(_EVENT) == 1

    def test_a_timer_that_is_deleted_while_firing_does_not_fire(
        self, harness: KeyedHarness, restarted: bool
    ) -> None:
        for time in (10, 20, 30):
            harness.at("a").timer_service.register_event_time_timer(time)
        if restarted:
            harness.restart()
        timers = harness.backends[0].timer_service
        fired = []
        for timer in timers.advance_watermark(60):
            fired.append(timer.timestamp)
            timers.delete_event_time_timer(20)

        assert fired == [10, 30]

    def test_a_timer_registers_itself_again_and_again(self, harness: KeyedHarness) -> None:
        harness.at("a").timer_service.register_processing_time_timer(10)
        timers = harness.backends[0].timer_service
        fired = []
        for timer in timers.advance_processing_time(35):
            fired.append(timer.timestamp)
            timers.register_processing_time_timer(timer.timestamp + 10)

        assert fired == [10, 20, 30]
        assert timers.next_timestamp(_PROCESSING) == 40

    def test_a_timer_fires_with_its_key_and_its_time(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_state(ValueStateDescriptor("number", int))
        for number, key in enumerate("ab"):
            harness.at(key).get_state(ValueStateDescriptor("number", int)).update(number)
            harness.at(key).timer_service.register_event_time_timer(number)
            harness.at(key).timer_service.register_processing_time_timer(number)
        backend = harness.backends[0]
        backend.clear_current_key()
        timers, context = backend.timer_service, backend.context

        seen = [
            (backend.current_key, state.value(), context.timestamp, timers.current_watermark())
            for _ in timers.advance_watermark(7)
        ]
        assert seen == [("a", 0, 0, 7), ("b", 1, 1, 7)]
        ticks = [
            (backend.current_key, context.timestamp, timers.current_processing_time())
            for _ in timers.advance_processing_time(8)
        ]
        assert ticks == [("a", None, 8), ("b", None, 8)]

    def test_a_timer_in_the_past_waits_for_the_next_call(self, harness: KeyedHarness) -> None:
        timers = harness.at("a").timer_service
        assert list(timers.advance_watermark(100)) == []
        timers.register_event_time_timer(50)
        timers.register_processing_time_timer(-50)

        assert timers.count(_EVENT) == 1
        assert _times(timers.advance_watermark(100)) == [50]
        assert _times(timers.advance_processing_time(0)) == [-50]

    def test_what_the_caller_does_not_take_does_not_fire(self, harness: KeyedHarness) -> None:
        for time in (1, 2, 3):
            harness.at("a").timer_service.register_event_time_timer(time)
        timers = harness.backends[0].timer_service
        first = next(timers.advance_watermark(10))
        harness.restart()
        timers = harness.backends[0].timer_service

        assert first.timestamp == 1
        assert _times(timers.advance_watermark(10)) == [2, 3]

    def test_the_watermark_is_not_restored_and_overdue_timers_fire(
        self, harness: KeyedHarness
    ) -> None:
        timers = harness.at("a").timer_service
        assert list(timers.advance_watermark(100)) == []
        timers.register_event_time_timer(50)
        timers.register_processing_time_timer(5)
        harness.restart()
        timers = harness.backends[0].timer_service

        assert timers.current_watermark() == NO_TIMESTAMP
        assert _times(timers.advance_processing_time(1000)) == [5]
        assert _times(timers.advance_watermark(50)) == [50]

    def test_processing_time_is_the_clocks_before_the_first_tick(
        self, harness: KeyedHarness
    ) -> None:
        timers = harness.at("a").timer_service
        harness.clock.set(1234)

        assert timers.current_processing_time() == 1234
        assert list(timers.advance_processing_time(2000)) == []
        assert timers.current_processing_time() == 2000

    def test_times_may_be_as_far_away_as_64_bits_reach(
        self, harness: KeyedHarness, restarted: bool
    ) -> None:
        for time in (_LONG_MAX, NO_TIMESTAMP, 0):
            harness.at("a").timer_service.register_event_time_timer(time)
        if restarted:
            harness.restart()
        timers = harness.backends[0].timer_service

        assert _times(timers.advance_watermark(NO_TIMESTAMP)) == [NO_TIMESTAMP]
        assert _times(timers.advance_watermark(_LONG_MAX)) == [0, _LONG_MAX]

    @pytest.mark.parametrize(
        "time",
        [1.5, "1", None, True, _LONG_MAX + 1, NO_TIMESTAMP - 1],
        ids=["float", "text", "none", "bool", "too-late", "too-early"],
    )
    def test_what_is_no_time_is_refused(self, harness: KeyedHarness, time: Any) -> None:
        timers = harness.at("a").timer_service

        for use in (
            timers.register_event_time_timer,
            timers.register_processing_time_timer,
            timers.delete_event_time_timer,
            timers.advance_watermark,
            timers.advance_processing_time,
        ):
            with pytest.raises(StateTypeError, match="timestamp"):
                use(time)

    def test_a_namespace_of_a_timer_is_bytes(self, harness: KeyedHarness) -> None:
        timers = harness.at("a").timer_service

        with pytest.raises(StateTypeError, match="binary"):
            timers.register_event_time_timer(1, "window")  # type: ignore[arg-type]
        assert timers.count(_EVENT) == 0

    def test_timers_follow_their_keys_when_the_parallelism_changes(
        self, harness: KeyedHarness, domain: TimeDomain
    ) -> None:
        keys = [f"key-{number}" for number in range(40)]
        for number, key in enumerate(keys):
            _register(harness.at(key).timer_service, domain, number)
        for parallelism in (3, 5, 2):
            harness.restart(parallelism=parallelism)
            first = min(
                backend.timer_service.next_timestamp(domain) or 0 for backend in harness.backends
            )
            harness.at(keys[first])
            for backend in harness.backends:
                fired = list(_advance(backend.timer_service, domain, first))
                assert all(harness.at(timer.key) is backend for timer in fired)

        counts = [backend.timer_service.count(domain) for backend in harness.backends]
        assert sum(counts) == 37
        assert all(counts)


def _register(
    timers: KeyedTimerService, domain: TimeDomain, time: int, namespace: bytes | None = None
) -> None:
    if domain is _EVENT:
        timers.register_event_time_timer(time, namespace)
    else:
        timers.register_processing_time_timer(time, namespace)


def _delete(timers: KeyedTimerService, domain: TimeDomain, time: int) -> None:
    if domain is _EVENT:
        timers.delete_event_time_timer(time)
    else:
        timers.delete_processing_time_timer(time)


def _advance(timers: KeyedTimerService, domain: TimeDomain, time: int) -> Iterator[Timer]:
    if domain is _EVENT:
        return timers.advance_watermark(time)
    return timers.advance_processing_time(time)


def _times(fired: Iterator[Timer]) -> list[int]:
    return [timer.timestamp for timer in fired]
