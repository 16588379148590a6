"""Random programs against a plain dict: state, TTL, timers, snapshots, crashes, rescaling."""

from __future__ import annotations

import copy
import datetime as dt
import shutil
import tempfile
import uuid
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowstate import (
    AggregatingStateDescriptor,
    CheckpointStorage,
    ListStateDescriptor,
    LocalOperator,
    MapStateDescriptor,
    Reducer,
    ReducingStateDescriptor,
    StateTtlConfig,
    Subtask,
    TimeDomain,
    ValueStateDescriptor,
)
from flowstate.errors import FlowError
from flowstate.storage.filesystems import open_file_system
from flowstate.testing.clock import ManualClock
from flowstate.testing.faults import Fault, FaultAction, FaultyFileSystem, OperationName

TTL_MS = 50
KEYS = st.sampled_from([(name, number) for name in ("a", "b", "ü") for number in range(4)])
NUMBERS = st.integers(-(2**40), 2**40)
SUBS = st.sampled_from(["x", "y", "z", None])
PARALLELISMS = st.sampled_from([1, 2, 3, 5, 128])


class Model:
    """What the state must hold: one dict per state."""

    def __init__(self) -> None:
        self.value: dict[Any, Any] = {}
        self.list: dict[Any, list[int]] = {}
        self.map: dict[Any, dict[Any, Any]] = {}
        self.sum: dict[Any, int] = {}
        self.mean: dict[Any, list[float]] = {}
        self.ttl: dict[Any, tuple[int, int]] = {}
        self.timers: set[tuple[int, Any]] = set()
        self.elements: list[int] = []


class States:
    def __init__(self, subtask: Subtask) -> None:
        keyed = subtask.keyed
        ttl = StateTtlConfig(ttl=dt.timedelta(milliseconds=TTL_MS))
        self.value = keyed.get_state(ValueStateDescriptor("value", dict[str, int]))
        self.list = keyed.get_list_state(ListStateDescriptor("list", int))
        self.map = keyed.get_map_state(MapStateDescriptor("map", str, int))
        self.sum = keyed.get_reducing_state(ReducingStateDescriptor("sum", Reducer.SUM, int))
        self.mean = keyed.get_aggregating_state(
            AggregatingStateDescriptor("mean", Reducer.MEAN, float)
        )
        self.ttl = keyed.get_state(ValueStateDescriptor("ttl", int, ttl=ttl))
        self.elements = subtask.operator.get_list_state(ListStateDescriptor("elements", int))
        self.timers = keyed.timer_service


class StateMachine(RuleBasedStateMachine):
    """An operator that is used, checkpointed, killed and restarted at other parallelisms."""

    on_disk: ClassVar[bool] = False

    @initialize(parallelism=PARALLELISMS)
    def start(self, parallelism: int) -> None:
        self.clock = ManualClock(1000)
        self.files = open_file_system(f"memory://machine/{uuid.uuid4().hex}")
        self.folder = tempfile.mkdtemp() if self.on_disk else None
        self.live, self.saved = Model(), Model()
        self.open(parallelism)

    def open(self, parallelism: int) -> None:
        self.faulty = FaultyFileSystem(self.files)
        self.operator = LocalOperator(
            "",
            storage=CheckpointStorage("", file_system=self.faulty),
            parallelism=parallelism,
            key_type=tuple[str, int],
            working_folder=self.folder,
            clock=self.clock,
        )
        self.states = {id(subtask): States(subtask) for subtask in self.operator.subtasks}

    def of(self, key: Any) -> States:
        return self.states[id(self.operator.subtask_of(key))]

    @rule(key=KEYS, number=NUMBERS)
    def update_value(self, key: Any, number: int) -> None:
        value = {"n": number}
        self.of(key).value.update(value)
        value["n"] = 0  # What was passed in belongs to the caller again.
        self.live.value[key] = {"n": number}

    @rule(key=KEYS, numbers=st.lists(NUMBERS, max_size=4))
    def add_to_list(self, key: Any, numbers: list[int]) -> None:
        self.of(key).list.add_all(numbers)
        self.live.list.setdefault(key, []).extend(numbers)

    @rule(key=KEYS, numbers=st.lists(NUMBERS, max_size=3))
    def update_list(self, key: Any, numbers: list[int]) -> None:
        self.of(key).list.update(numbers)
        self.live.list[key] = list(numbers)

    @rule(key=KEYS, sub=SUBS, number=st.none() | NUMBERS)
    def put_into_map(self, key: Any, sub: Any, number: int | None) -> None:
        self.of(key).map.put(sub, number)
        self.live.map.setdefault(key, {})[sub] = number

    @rule(key=KEYS, sub=SUBS)
    def remove_from_map(self, key: Any, sub: Any) -> None:
        self.of(key).map.remove(sub)
        self.live.map.get(key, {}).pop(sub, None)

    @rule(key=KEYS, number=st.integers(-1000, 1000))
    def add_number(self, key: Any, number: int) -> None:
        self.of(key).sum.add(number)
        self.of(key).mean.add(number)
        self.live.sum[key] = self.live.sum.get(key, 0) + number
        self.live.mean.setdefault(key, []).append(number)

    @rule(key=KEYS, kind=st.sampled_from(["value", "list", "map", "sum", "mean", "ttl"]))
    def clear(self, key: Any, kind: str) -> None:
        getattr(self.of(key), kind).clear()
        getattr(self.live, kind).pop(key, None)

    @rule(key=KEYS, number=NUMBERS)
    def update_with_ttl(self, key: Any, number: int) -> None:
        self.of(key).ttl.update(number)
        self.live.ttl[key] = (number, self.clock.now_ms())

    @rule(ms=st.integers(0, 40))
    def pass_time(self, ms: int) -> None:
        self.clock.advance(ms)

    @rule(key=KEYS, timestamp=st.integers(0, 30))
    def register_timer(self, key: Any, timestamp: int) -> None:
        self.of(key).timers.register_event_time_timer(timestamp)
        self.live.timers.add((timestamp, key))

    @rule(key=KEYS, timestamp=st.integers(0, 30))
    def delete_timer(self, key: Any, timestamp: int) -> None:
        self.of(key).timers.delete_event_time_timer(timestamp)
        self.live.timers.discard((timestamp, key))

    @rule(watermark=st.integers(0, 30))
    def fire_timers(self, watermark: int) -> None:
        fired = []
        for subtask in self.operator.subtasks:
            due = list(subtask.keyed.timer_service.advance_watermark(watermark))
            assert [timer.timestamp for timer in due] == sorted(timer.timestamp for timer in due)
            fired += [(timer.timestamp, timer.key) for timer in due]
        expected = {timer for timer in self.live.timers if timer[0] <= watermark}
        assert sorted(fired) == sorted(expected)
        self.live.timers -= expected

    @rule(number=NUMBERS, place=st.integers(0, 127))
    def add_element(self, number: int, place: int) -> None:
        subtask = self.operator.subtasks[place % len(self.operator.subtasks)]
        self.states[id(subtask)].elements.add(number)
        self.live.elements.append(number)

    @rule()
    def checkpoint(self) -> None:
        self.operator.checkpoint()
        self.saved = copy.deepcopy(self.live)

    @precondition(lambda self: self.operator.record is not None)
    @rule()
    def fail_a_checkpoint(self) -> None:
        def is_create(operation: Any) -> bool:
            return bool(operation.name is OperationName.CREATE_EXCLUSIVELY)

        self.faulty.inject(Fault(FaultAction.FAIL, at=is_create))
        try:
            self.operator.checkpoint()
        except FlowError:
            self.faulty.heal()
        else:
            raise AssertionError("the record could not be created, but nobody noticed")

    @rule(parallelism=PARALLELISMS)
    def crash_and_restart(self, parallelism: int) -> None:
        self.operator.close()
        self.live = copy.deepcopy(self.saved)
        self.open(parallelism)

    @rule(key=KEYS)
    def read(self, key: Any) -> None:
        states, live = self.of(key), self.live
        value = states.value.value()
        assert value == live.value.get(key)
        if value is not None:
            value["n"] = -1  # What was handed out is a copy.
        assert states.list.get() == live.list.get(key, [])
        assert dict(states.map.items()) == live.map.get(key, {})
        assert states.map.is_empty() == (not live.map.get(key))
        assert states.sum.get() == live.sum.get(key)
        numbers = live.mean.get(key)
        assert states.mean.get() == (sum(numbers) / len(numbers) if numbers else None)
        number, written = live.ttl.get(key, (None, 0))
        expected = number if self.clock.now_ms() < written + TTL_MS else None
        assert states.ttl.value() == expected

    @rule(key=KEYS, sub=SUBS)
    def read_one_map_entry(self, key: Any, sub: Any) -> None:
        states, expected = self.of(key), self.live.map.get(key, {})
        assert states.map.get(sub) == expected.get(sub)
        assert (sub in states.map) == (sub in expected)

    @invariant()
    def operator_elements_are_neither_lost_nor_doubled(self) -> None:
        if hasattr(self, "operator"):
            found = [number for one in self.states.values() for number in one.elements.get()]
            assert sorted(found) == sorted(self.live.elements)

    def teardown(self) -> None:
        if not hasattr(self, "operator"):
            return
        for key in [(name, number) for name in ("a", "b", "ü") for number in range(4)]:
            self.read(key)
        count = sum(
            subtask.keyed.timer_service.count(TimeDomain.EVENT_TIME)
            for subtask in self.operator.subtasks
        )
        assert count == len(self.live.timers)
        self.operator.close()
        self.files.delete(entry.path for entry in self.files.list(""))
        if self.folder is not None:
            shutil.rmtree(self.folder)


class DiskStateMachine(StateMachine):
    """The same with LMDB as working state."""

    on_disk = True


BOUNDS = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestMemoryBackend = StateMachine.TestCase
TestMemoryBackend.settings = BOUNDS
TestLmdbBackend = DiskStateMachine.TestCase
TestLmdbBackend.settings = BOUNDS
