from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flowstate import functions
from flowstate.descriptors import ListStateDescriptor
from flowstate.errors import StateDescriptorError
from flowstate.functions import (
    AggregateFunction,
    CheckpointedFunction,
    CheckpointListener,
    Context,
    FunctionInitializationContext,
    FunctionSnapshotContext,
    KeyedProcessFunction,
    ListCheckpointed,
    OperatorListState,
    OutputTag,
    ReduceFunction,
    TimeDomain,
)
from flowstate.redistribution import even_split, gather

if TYPE_CHECKING:
    from flowstate.descriptors import MapStateDescriptor
    from flowstate.functions import BroadcastState

TRACE: dict[str, Any] = json.loads(
    (Path(__file__).parent / "vectors" / "seed003_buffering_sink_trace.json").read_text(
        encoding="utf-8"
    )
)
THRESHOLD: int = TRACE["threshold"]
CHECKPOINTS = {
    event["checkpoint"]: [event["contents"]["0"], event["contents"]["1"]]
    for event in TRACE["events"]
    if "checkpoint" in event
}


# What a user must write, and what is there without it.


class Echo(KeyedProcessFunction[str, int, int]):
    def process_element(self, value: int, ctx: Context[str]) -> Iterator[int]:
        yield value


class Longest(ReduceFunction[str]):
    def reduce(self, a: str, b: str) -> str:
        return max(a, b, key=len)


class Average(AggregateFunction[float, tuple[float, int], float]):
    def create_accumulator(self) -> tuple[float, int]:
        return 0.0, 0

    def add(self, value: float, accumulator: tuple[float, int]) -> tuple[float, int]:
        return accumulator[0] + value, accumulator[1] + 1

    def get_result(self, accumulator: tuple[float, int]) -> float:
        return accumulator[0] / accumulator[1]

    def merge(self, a: tuple[float, int], b: tuple[float, int]) -> tuple[float, int]:
        return a[0] + b[0], a[1] + b[1]


class Publisher(CheckpointListener):
    """Publishes as the contract asks: everything up to the completed checkpoint, once."""

    def __init__(self) -> None:
        self.pending: dict[int, str] = {}
        self.published: list[str] = []

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        for pending_id in sorted(self.pending):
            if pending_id <= checkpoint_id:
                self.published.append(self.pending.pop(pending_id))


def test_a_process_function_needs_process_element_and_nothing_else() -> None:
    function: KeyedProcessFunction[str, int, int] = Echo()
    unused: Any = None
    function.open(unused)
    function.close()

    assert list(function.process_element(7, unused) or ()) == [7]
    assert list(function.on_timer(0, unused) or ()) == []


def test_an_aggregate_adds_and_merges_accumulators() -> None:
    average = Average()
    one = average.add(1.0, average.create_accumulator())
    two = average.add(4.0, average.add(4.0, average.create_accumulator()))

    assert average.get_result(average.merge(one, two)) == 3.0


def test_a_listener_may_leave_out_what_to_do_on_an_abort() -> None:
    publisher = Publisher()
    publisher.pending = {1: "a", 2: "b", 4: "c"}
    publisher.notify_checkpoint_aborted(1)
    publisher.notify_checkpoint_complete(3)
    publisher.notify_checkpoint_complete(3)

    assert publisher.published == ["a", "b"]
    assert publisher.pending == {4: "c"}


@pytest.mark.parametrize(
    ("contract", "methods"),
    [
        (ReduceFunction, {"reduce"}),
        (AggregateFunction, {"create_accumulator", "add", "get_result", "merge"}),
        (KeyedProcessFunction, {"process_element"}),
        (CheckpointedFunction, {"initialize_state", "snapshot_state"}),
        (ListCheckpointed, {"snapshot_state", "restore_state"}),
        (CheckpointListener, {"notify_checkpoint_complete"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_function_without_a_required_method_cannot_be_made(
    contract: type, methods: set[str]
) -> None:
    assert contract.__abstractmethods__ == methods  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="abstract"):
        contract()


def test_functions_can_be_sent_to_another_process() -> None:
    for function in (Echo(), Longest(), Average(), Publisher()):
        assert type(pickle.loads(pickle.dumps(function))) is type(function)


def test_public_names_are_sorted_and_exist() -> None:
    assert functions.__all__ == sorted(functions.__all__)
    assert all(hasattr(functions, name) for name in functions.__all__)


# Tags and time domains.


def test_output_tags_of_one_name_are_the_same_output() -> None:
    tag = OutputTag("late")

    assert tag == OutputTag("late") != OutputTag("early")
    assert {tag: 1}[pickle.loads(pickle.dumps(tag))] == 1


@pytest.mark.parametrize("name", ["", None, 1], ids=repr)
def test_an_output_tag_without_a_name_is_refused(name: Any) -> None:
    with pytest.raises(StateDescriptorError, match="an output tag needs a name"):
        OutputTag(name)


def test_time_domains_are_written_as_words() -> None:
    assert [str(domain) for domain in TimeDomain] == ["event", "processing"]


# The contracts are enough for a buffering sink: the trace of one, with stores as small as can be.


@dataclass
class FakeList:
    elements: list[Any] = field(default_factory=list)

    def get(self) -> list[Any]:
        return self.elements

    def add(self, value: Any, /) -> None:
        self.elements.append(value)

    def add_all(self, values: Iterable[Any], /) -> None:
        self.elements.extend(values)

    def update(self, values: Iterable[Any], /) -> None:
        self.elements[:] = values

    def clear(self) -> None:
        self.elements.clear()


class FakeStore:
    def __init__(self) -> None:
        self.lists: dict[str, FakeList] = defaultdict(FakeList)

    def get_list_state(self, descriptor: ListStateDescriptor, /) -> FakeList:
        return self.lists[descriptor.name]

    def get_union_list_state(self, descriptor: ListStateDescriptor, /) -> FakeList:
        raise NotImplementedError

    def get_broadcast_state(self, descriptor: MapStateDescriptor, /) -> BroadcastState[Any, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class FakeInitialization:
    operator_state_store: FakeStore
    restored_checkpoint_id: int | None = None
    keyed_state_store: Any = None

    @property
    def is_restored(self) -> bool:
        return self.restored_checkpoint_id is not None


@dataclass(frozen=True)
class FakeSnapshot:
    checkpoint_id: int
    checkpoint_timestamp: int = 0


class Buffer:
    """Emits all it has as soon as that is enough; also when a restore brought more than enough."""

    def __init__(self) -> None:
        self.buffered: list[str] = []

    def invoke(self, value: str) -> list[str]:
        self.buffered.append(value)
        if len(self.buffered) < THRESHOLD:
            return []
        emitted, self.buffered = self.buffered, []
        return emitted


class StateSink(Buffer, CheckpointedFunction):
    state: OperatorListState[str]

    def initialize_state(self, ctx: FunctionInitializationContext) -> None:
        descriptor = ListStateDescriptor("buffered-elements", str)
        self.state = ctx.operator_state_store.get_list_state(descriptor)
        if ctx.is_restored:
            self.buffered = list(self.state.get())

    def snapshot_state(self, ctx: FunctionSnapshotContext) -> None:
        self.state.update(self.buffered)


class ListSink(Buffer, ListCheckpointed[str]):
    def snapshot_state(self, checkpoint_id: int, timestamp: int) -> list[str]:
        return list(self.buffered)

    def restore_state(self, state: list[str]) -> None:
        self.buffered = list(state)


class StateSubtask:
    """Runs one subtask of a sink that has a state store."""

    def __init__(self, restored: tuple[int, list[str]] | None = None) -> None:
        self.sink, self.store = StateSink(), FakeStore()
        if restored is not None:
            self.store.lists["buffered-elements"].update(restored[1])
        restored_id = None if restored is None else restored[0]
        self.sink.initialize_state(FakeInitialization(self.store, restored_id))

    def snapshot(self, checkpoint_id: int) -> list[str]:
        self.sink.snapshot_state(FakeSnapshot(checkpoint_id))
        return list(self.store.lists["buffered-elements"].elements)


class ListSubtask:
    """Runs one subtask of a sink that hands over its list."""

    def __init__(self, restored: tuple[int, list[str]] | None = None) -> None:
        self.sink = ListSink()
        if restored is not None:
            self.sink.restore_state(restored[1])

    def snapshot(self, checkpoint_id: int) -> list[str]:
        return self.sink.snapshot_state(checkpoint_id, 0)


both_sinks = pytest.mark.parametrize("subtask", [StateSubtask, ListSubtask])
Subtask = type[StateSubtask] | type[ListSubtask]


def rescaled(lists: list[list[str]], *, new_parallelism: int) -> list[list[str]]:
    shares = even_split({"b": list(map(len, lists))}, new_parallelism=new_parallelism)
    return [gather(share["b"], lists) for share in shares]


@both_sinks
def test_a_buffering_sink_does_what_it_did_in_flink(subtask: Subtask) -> None:
    subtasks = [subtask() for _ in range(TRACE["parallelism"])]

    for event in TRACE["events"]:
        if "checkpoint" in event:
            found = [one.snapshot(event["checkpoint"]) for one in subtasks]
            assert found == CHECKPOINTS[event["checkpoint"]]
        else:
            assert subtasks[event["subtask"]].sink.invoke(event["input"]) == event["emitted"]


@both_sinks
@pytest.mark.parametrize("checkpoint_id", CHECKPOINTS)
def test_a_restored_buffering_sink_goes_on_as_if_nothing_had_happened(
    subtask: Subtask, checkpoint_id: int
) -> None:
    lists = rescaled(CHECKPOINTS[checkpoint_id], new_parallelism=TRACE["parallelism"])
    subtasks = [subtask((checkpoint_id, elements)) for elements in lists]
    events = TRACE["events"]
    taken = next(i for i, event in enumerate(events) if event.get("checkpoint") == checkpoint_id)

    for event in events[taken + 1 :]:
        if "checkpoint" not in event:
            assert subtasks[event["subtask"]].sink.invoke(event["input"]) == event["emitted"]


@both_sinks
def test_a_buffer_that_a_scale_down_made_too_long_is_emitted_with_the_next_row(
    subtask: Subtask,
) -> None:
    (elements,) = rescaled(CHECKPOINTS[3], new_parallelism=1)
    restored = subtask((3, elements))

    assert len(elements) > THRESHOLD
    assert restored.sink.invoke("a9") == [*elements, "a9"]
    assert restored.snapshot(4) == []
