from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from flowstate import (
    CheckpointedFunction,
    CheckpointListener,
    CheckpointStorage,
    KeyedProcessFunction,
    ListCheckpointed,
    ListStateDescriptor,
    OutputTag,
    Subtask,
    SubtaskConfig,
    TimeDomain,
    ValueStateDescriptor,
    commit_checkpoint,
    key_group_of,
    subtask_index_of,
)
from flowstate.errors import NoCurrentKeyError, StateDescriptorError, StateError
from flowstate.key_groups import KeyGroupAssigner
from flowstate.keys import KeyType
from flowstate.runner import FunctionRunner
from flowstate.testing.clock import ManualClock

LATE = OutputTag("late")


class CountUntilQuiet(KeyedProcessFunction[str, int, tuple[str, int]]):
    """Counts per key, and emits the count when the key has been quiet for 10 ms."""

    def open(self, ctx: Any) -> None:
        self.where = (ctx.subtask_index, ctx.parallelism, ctx.max_parallelism)
        self.count = ctx.get_state(ValueStateDescriptor("count", int, default=0))
        self.last = ctx.get_state(ValueStateDescriptor("last", int))
        self.closed = False

    def process_element(self, value: int, ctx: Any) -> None:
        if ctx.timestamp <= ctx.timer_service.current_watermark():
            ctx.output(LATE, (ctx.current_key, value))
            return
        self.count.update(self.count.value() + value)
        self.last.update(ctx.timestamp)
        ctx.timer_service.register_event_time_timer(ctx.timestamp + 10)

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[tuple[str, int]]:
        assert ctx.time_domain is TimeDomain.EVENT_TIME
        assert ctx.timestamp == timestamp
        if self.last.value() == timestamp - 10:
            yield ctx.current_key, self.count.value()

    def close(self) -> None:
        self.closed = True


class Buffer(ListCheckpointed[str]):
    element_type = str

    def __init__(self) -> None:
        self.elements: list[str] = []
        self.restored = False

    def snapshot_state(self, checkpoint_id: int, timestamp: int) -> list[str]:
        return self.elements

    def restore_state(self, state: list[str]) -> None:
        self.elements, self.restored = state, True


class Job:
    """A function on all subtasks of an operator, in this process."""

    def __init__(self, make: Any, *, parallelism: int, url: str, key_type: Any = str) -> None:
        self.storage = CheckpointStorage(url)
        self.parallelism = parallelism
        self.record = self.storage.latest()
        self.subtasks = [
            Subtask(
                self.storage,
                SubtaskConfig(subtask_index=index, parallelism=parallelism, key_type=key_type),
                restored=self.record,
                clock=ManualClock(),
            )
            for index in range(parallelism)
        ]
        self.functions = [make() for _ in self.subtasks]
        self.runners = [
            FunctionRunner(subtask, function)
            for subtask, function in zip(self.subtasks, self.functions, strict=True)
        ]

    def process(self, key: str, value: Any, timestamp: int | None = None) -> list[Any]:
        group = key_group_of(key, KeyType(str).arrow, max_parallelism=128)
        index = subtask_index_of(group, parallelism=self.parallelism, max_parallelism=128)
        return self.runners[index].process(value, key=key, timestamp=timestamp)

    def watermark(self, watermark: int) -> list[Any]:
        return [row for one in self.runners for row in one.advance_watermark(watermark)]

    def checkpoint(self) -> None:
        number = 1 if self.record is None else self.record.checkpoint_id + 1
        snapshots = [one.snapshot(number, timestamp_ms=0) for one in self.runners]
        descriptions = [subtask.describe() for subtask in self.subtasks]
        self.record = commit_checkpoint(
            self.storage, snapshots, descriptions, parent=self.record, run="test"
        ).record
        for runner in self.runners:
            runner.notify_checkpoint_complete(number)


@pytest.fixture
def url() -> str:
    return f"memory://runner/{uuid.uuid4().hex}"


def test_rows_timers_and_side_outputs(url: str) -> None:
    job = Job(CountUntilQuiet, parallelism=2, url=url)
    assert job.process("a", 1, timestamp=5) == []
    assert job.process("a", 2, timestamp=8) == []
    assert job.process("b", 7, timestamp=1) == []

    assert job.watermark(14) == [(None, ("b", 7))]
    assert job.process("c", 9, timestamp=14) == [(LATE, ("c", 9))]
    assert job.watermark(100) == [(None, ("a", 3))]
    assert job.functions[1].where == (1, 2, 128)


def test_a_function_goes_on_at_another_parallelism(url: str) -> None:
    job = Job(CountUntilQuiet, parallelism=2, url=url)
    for number in range(20):
        job.process(f"key-{number}", number, timestamp=number)
    job.checkpoint()
    job.process("key-3", 1000, timestamp=3)

    again = Job(CountUntilQuiet, parallelism=3, url=url)
    again.process("key-3", 1, timestamp=50)
    fired = sorted(row for _, row in again.watermark(1000))
    expected = sorted((f"key-{n}", 4 if n == 3 else n) for n in range(20))
    assert fired == expected


def test_a_list_checkpointed_function_gets_its_share_back(url: str) -> None:
    job = Job(Buffer, parallelism=2, url=url, key_type=None)
    job.functions[0].elements = ["a2", "a4", "a6"]
    job.functions[1].elements = ["a1", "a3", "a5", "a7"]
    job.checkpoint()

    again = Job(Buffer, parallelism=3, url=url, key_type=None)
    assert [one.elements for one in again.functions] == [
        ["a2", "a4", "a6"],
        ["a1", "a3"],
        ["a5", "a7"],
    ]
    assert not job.functions[0].restored
    assert all(one.restored for one in again.functions)


def test_a_checkpointed_function_registers_what_it_needs(url: str) -> None:
    class Keeper(CheckpointedFunction):
        def initialize_state(self, ctx: Any) -> None:
            descriptor = ListStateDescriptor("kept", int)
            self.state = ctx.operator_state_store.get_list_state(descriptor)
            self.kept = list(self.state.get()) if ctx.is_restored else [1, 2]
            self.restored_id = ctx.restored_checkpoint_id

        def snapshot_state(self, ctx: Any) -> None:
            self.state.update([*self.kept, ctx.checkpoint_id])

    Job(Keeper, parallelism=1, url=url, key_type=None).checkpoint()

    again = Job(Keeper, parallelism=1, url=url, key_type=None)
    assert again.functions[0].kept == [1, 2, 1]
    assert again.functions[0].restored_id == 1


def test_a_listener_hears_of_completed_and_aborted_checkpoints(url: str) -> None:
    class Listener(Buffer, CheckpointListener):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[tuple[str, int]] = []

        def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
            self.heard.append(("complete", checkpoint_id))

        def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
            self.heard.append(("aborted", checkpoint_id))

    job = Job(Listener, parallelism=1, url=url, key_type=None)
    job.checkpoint()
    job.runners[0].snapshot(2, timestamp_ms=0)
    job.runners[0].notify_checkpoint_aborted(2)

    assert job.functions[0].heard == [("complete", 1), ("aborted", 2)]


def test_keyed_state_cannot_be_used_outside_of_rows_and_timers(url: str) -> None:
    class Nosy(CountUntilQuiet, CheckpointedFunction):
        def initialize_state(self, ctx: Any) -> None:
            self.early = ctx.keyed_state_store.get_state(ValueStateDescriptor("early", int))
            with pytest.raises(NoCurrentKeyError):
                self.early.value()

        def snapshot_state(self, ctx: Any) -> None:
            self.count.value()

    job = Job(Nosy, parallelism=1, url=url)
    job.process("a", 1, timestamp=0)

    with pytest.raises(NoCurrentKeyError, match="No key set"):
        job.runners[0].snapshot(1, timestamp_ms=0)


@pytest.mark.parametrize("rows", ["text", b"bytes", {"a": 1}], ids=["str", "bytes", "dict"])
def test_a_row_returned_instead_of_rows_is_an_error(rows: Any, url: str) -> None:
    class Wrong(CountUntilQuiet):
        def process_element(self, value: Any, ctx: Any) -> Any:
            return rows

    job = Job(Wrong, parallelism=1, url=url)
    with pytest.raises(StateError, match="yield the row, or return it in a list"):
        job.process("a", 1)


def test_what_a_function_cannot_be_is_refused(url: str) -> None:
    class Untyped(Buffer):
        element_type = None  # type: ignore[assignment]

    class Both(Buffer, CheckpointedFunction):  # type: ignore[misc]
        def initialize_state(self, ctx: Any) -> None: ...

    with pytest.raises(StateDescriptorError, match="element_type = str"):
        Job(Untyped, parallelism=1, url=url, key_type=None)
    with pytest.raises(StateDescriptorError, match="choose one"):
        Job(Both, parallelism=1, url=url, key_type=None)
    with pytest.raises(StateError, match="takes no rows"):
        Job(Buffer, parallelism=1, url=url, key_type=None).process("a", 1)


def test_a_side_output_needs_a_tag(url: str) -> None:
    class Untagged(CountUntilQuiet):
        def process_element(self, value: Any, ctx: Any) -> None:
            ctx.output("late", value)

    job = Job(Untagged, parallelism=1, url=url)
    with pytest.raises(StateDescriptorError, match="OutputTag"):
        job.process("a", 1)


def test_a_function_is_closed_without_a_key(url: str) -> None:
    job = Job(CountUntilQuiet, parallelism=1, url=url)
    job.process("a", 1, timestamp=0)
    job.runners[0].close()

    assert job.functions[0].closed
    with pytest.raises(NoCurrentKeyError):
        job.functions[0].count.value()
    assert job.subtasks[0].describe().assigner is KeyGroupAssigner.FLINK
