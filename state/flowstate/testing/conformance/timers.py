"""Scripts of timers: registered, deleted, fired by either clock, restored and rescaled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from flowstate.functions import TimeDomain
from flowstate.keyed.timers import KeyedTimerService, Timer
from flowstate.operators import LocalOperator
from flowstate.subtask import Subtask
from flowstate.testing.clock import ManualClock
from flowstate.testing.conformance.literals import key_type_of, split_op
from flowstate.testing.conformance.trial import (
    Json,
    Trial,
    VectorError,
    expect,
    field_of,
    steps_of,
    unordered,
)

__all__ = ["is_case", "replay"]

_DOMAIN_LETTERS = {TimeDomain.EVENT_TIME: "E", TimeDomain.PROCESSING_TIME: "P"}
_COUNTS = {"event_timers": TimeDomain.EVENT_TIME, "processing_timers": TimeDomain.PROCESSING_TIME}


def is_case(case: Mapping[str, Json]) -> bool:
    """Say whether a case is such a script."""
    steps = case.get("steps")
    if not isinstance(steps, list):
        return False
    seen = {name for step in steps if isinstance(step, Mapping) for name in step}
    return "on_timer_actions" in case or bool(seen & {"fired", *_COUNTS, "subtasks"})


def replay(case: Mapping[str, Json], trial: Trial) -> None:
    """Replay a script."""
    script = _Script(case, trial)
    for number, step in enumerate(steps_of(case), start=1):
        script.step(f"step {number}, {step.get('op')}", step)


class _Script:
    """One run of a script; it begins with one subtask."""

    def __init__(self, case: Mapping[str, Json], trial: Trial) -> None:
        self._trial = trial
        self._actions: Mapping[str, str] = case.get("on_timer_actions", {})
        steps = field_of(case, "steps")
        self._key_type = key_type_of(step["key"] for step in steps if "key" in step)
        self._max_parallelism: int | None = case.get("max_parallelism")
        self._root = trial.new_root()
        self._has_snapshot = False
        self._clock = ManualClock()
        self._operator = self._open(case.get("parallelism", 1))

    def step(self, where: str, step: Mapping[str, Json]) -> None:
        fired: list[dict[str, Any]] = []
        verb, rest = split_op(step.get("op"))
        if verb == "snapshot":
            self._operator.checkpoint()
            self._has_snapshot = True
        elif verb == "restore":
            self._restore(int(rest) if rest else self._operator.parallelism)
        elif verb in {"wm", "pt"}:
            fired = [*self._advanced(verb, _timestamp(rest))]
        else:
            subtask = self._operator.subtask_of(field_of(step, "key"))
            _perform(subtask.keyed.timer_service, verb, rest)
        self._check(where, step, fired)

    def _advanced(self, verb: str, now: int) -> Iterator[dict[str, Any]]:
        """Move time in all subtasks, and yield what fires while its action is carried out."""
        if verb == "pt":
            self._clock.set(now)
        for subtask in self._operator.subtasks:
            service = subtask.keyed.timer_service
            advance = service.advance_watermark if verb == "wm" else service.advance_processing_time
            for timer in advance(now):
                yield _fired(subtask, timer)
                self._act(service, timer)

    def _act(self, service: KeyedTimerService, timer: Timer) -> None:
        name = f"{_DOMAIN_LETTERS[timer.domain]}:{timer.key}@{timer.timestamp}"
        for action in filter(None, self._actions.get(name, "").split(";")):
            _perform(service, *split_op(action))

    def _check(self, where: str, step: Mapping[str, Json], fired: list[dict[str, Any]]) -> None:
        subtasks = self._operator.subtasks
        for name, expected in step.items():
            if name in {"op", "key", "note"}:
                continue
            if name == "fired":
                # Several subtasks fire independently of each other.
                apart = self._operator.parallelism > 1
                expect(f"{where}, fired", _comparable(expected, apart), _comparable(fired, apart))
            elif name in _COUNTS:
                count = sum(_count(subtask, name) for subtask in subtasks)
                expect(f"{where}, {name}", expected, count)
            elif name == "subtasks":
                found = [
                    {"subtask": index, **{name: _count(subtask, name) for name in _COUNTS}}
                    for index, subtask in enumerate(subtasks)
                ]
                expect(f"{where}, subtasks", expected, found)
            else:
                raise VectorError(f"{where}: a step of a timer script has no {name!r}")

    def _open(self, parallelism: int) -> LocalOperator:
        operator = self._trial.operator(
            self._root,
            parallelism=parallelism,
            key_type=self._key_type,
            max_parallelism=self._max_parallelism,
            clock=self._clock,
        )
        for subtask in operator.subtasks:
            _ = subtask.keyed.timer_service
        return operator

    def _restore(self, parallelism: int) -> None:
        if not self._has_snapshot:
            raise VectorError("a restore before any snapshot")
        self._operator.close()
        # Time begins anew with the process, as in the harness that the scripts were run in.
        self._clock = ManualClock()
        self._operator = self._open(parallelism)


def _perform(service: KeyedTimerService, verb: str, rest: str) -> None:
    operations = {
        "reg_e": service.register_event_time_timer,
        "reg_p": service.register_processing_time_timer,
        "del_e": service.delete_event_time_timer,
        "del_p": service.delete_processing_time_timer,
    }
    if verb not in operations:
        known = ", ".join([*operations, "wm", "pt", "snapshot", "restore"])
        raise VectorError(f"timers have no operation {verb!r}; they have {known}")
    operations[verb](_timestamp(rest))


def _timestamp(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise VectorError(f"{text!r} is not a timestamp in milliseconds") from None


def _count(subtask: Subtask, name: str) -> int:
    return subtask.keyed.timer_service.count(_COUNTS[name])


def _fired(subtask: Subtask, timer: Timer) -> dict[str, Any]:
    service, context = subtask.keyed.timer_service, subtask.keyed.context
    expect("the current key of a timer that fires", timer.key, subtask.keyed.current_key)
    return {
        "domain": timer.domain.value,
        "key": timer.key,
        "timestamp": timer.timestamp,
        "current_watermark": service.current_watermark(),
        "current_processing_time": service.current_processing_time(),
        "output_timestamp": context.timestamp,
    }


def _comparable(fired: Iterable[Mapping[str, Json]], apart: bool) -> list[list[Json]]:
    """Put what fires into one order as far as it has none: timers of one time follow no rule."""
    timers = [dict(sorted(timer.items())) for timer in fired]
    if apart:
        timers.sort(key=lambda timer: timer["timestamp"])
    ties = groupby(timers, key=lambda timer: timer["timestamp"])
    return [unordered(tied) for _, tied in ties]
