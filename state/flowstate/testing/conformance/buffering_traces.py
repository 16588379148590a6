"""The trace of a buffering function: what it keeps and emits, its checkpoints, their restores."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowstate.descriptors import ListStateDescriptor
from flowstate.functions import (
    CheckpointedFunction,
    FunctionInitializationContext,
    FunctionSnapshotContext,
    OperatorListState,
)
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.operator_state import OperatorStateBackend
from flowstate.operators import LocalOperator
from flowstate.subtask import Subtask
from flowstate.testing.clock import ManualClock
from flowstate.testing.conformance.trial import (
    Json,
    Trial,
    VectorError,
    expect,
    field_of,
    steps_of,
)

__all__ = ["is_document", "parts_of", "replay"]

_STATE = ListStateDescriptor("buffered-elements", str)
_EXAMPLE = re.compile(r"chk(\d+)_to_(\d+)")
_THEN = re.compile(r"then (\S+) on subtask (\d+)")
_EMITS = re.compile(r"emits (\S+?(?:, *\S+?)*)")
_EMITS_NOTHING = re.compile(r"\b(nothing|none|never|no|not)\b")

_FLUSH = (
    "a restored buffer that is longer than the threshold is flushed by the next element: the "
    "sample that the trace is of tests for equality and never flushes it again"
)


def is_document(document: Mapping[str, Json]) -> bool:
    """Say whether a file is such a trace."""
    examples = document.get("restore_examples", {})
    events = isinstance(document.get("events"), list) and "threshold" in document
    return events and isinstance(examples, Mapping)


def parts_of(document: Mapping[str, Json]) -> list[str]:
    """Return the parts of a trace that are replayed one by one."""
    examples = [name for name in document.get("restore_examples", {}) if name != "note"]
    order = ["emission_order"] if "emission_order" in document else []
    return ["events", *order, *examples]


def replay(part: str, document: Mapping[str, Json], trial: Trial) -> None:
    """Run the function over the events, and check one part of what the trace says."""
    run = _Run(document, trial, checked=part == "events")
    match = _EXAMPLE.fullmatch(part)
    if part == "emission_order":
        emissions = [[str(index), emitted] for index, emitted in run.emissions]
        expected = [[str(index), emitted] for index, emitted in document["emission_order"]]
        expect("emission order", expected, emissions)
    elif match is not None:
        example = document["restore_examples"][part]
        _check_example(run, int(match[1]), int(match[2]), example, trial)
    elif part != "events":
        raise VectorError(f"{part!r} is not a restore such as chk3_to_2")


class _BufferingFunction(CheckpointedFunction):
    """Keeps elements until there are enough of them, and emits them all at once."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self.buffer: list[Json] = []
        self._state: OperatorListState[str] | None = None

    def initialize_state(self, ctx: FunctionInitializationContext) -> None:
        self._state = ctx.operator_state_store.get_list_state(_STATE)
        if ctx.is_restored:
            self.buffer = [json.loads(text) for text in self._state.get()]

    def snapshot_state(self, ctx: FunctionSnapshotContext) -> None:
        if self._state is None:
            raise AssertionError("initialize_state comes first")
        self._state.update([json.dumps(element) for element in self.buffer])

    def invoke(self, element: Json) -> tuple[int, list[Json]]:
        """Take an element; return how many there are with it, and what is emitted."""
        self.buffer.append(element)
        size = len(self.buffer)
        if size < self.threshold:
            return size, []
        emitted, self.buffer = self.buffer, []
        return size, emitted


@dataclass(frozen=True, slots=True)
class _Initialization:
    subtask: Subtask

    @property
    def is_restored(self) -> bool:
        return self.subtask.is_restored

    @property
    def restored_checkpoint_id(self) -> int | None:
        return self.subtask.restored_checkpoint_id

    @property
    def operator_state_store(self) -> OperatorStateBackend:
        return self.subtask.operator

    @property
    def keyed_state_store(self) -> KeyedStateBackend:
        return self.subtask.keyed


@dataclass(frozen=True, slots=True)
class _Snapshot:
    checkpoint_id: int
    checkpoint_timestamp: int


def _functions(operator: LocalOperator, threshold: int) -> list[_BufferingFunction]:
    functions = [_BufferingFunction(threshold) for _ in operator.subtasks]
    for function, subtask in zip(functions, operator.subtasks, strict=True):
        function.initialize_state(_Initialization(subtask))
    return functions


class _Run:
    """The function in all its subtasks, run over the events of a trace."""

    def __init__(self, document: Mapping[str, Json], trial: Trial, *, checked: bool) -> None:
        self.threshold: int = document["threshold"]
        self.emissions: list[tuple[int, list[Json]]] = []
        self.checkpoints: dict[int, str] = {}
        self._trial, self._checked = trial, checked
        self._clock = ManualClock()
        self._root = trial.new_root()
        self._operator = trial.operator(
            self._root, parallelism=field_of(document, "parallelism"), clock=self._clock
        )
        self._functions = _functions(self._operator, self.threshold)
        self._last_input: Json = None
        for number, event in enumerate(steps_of(document, "events"), start=1):
            self._step(number, event)

    def _step(self, number: int, event: Mapping[str, Json]) -> None:
        if "input" in event:
            self._take(f"event {number}, input {event['input']}", event)
        elif "checkpoint" in event:
            self._take_checkpoint(f"event {number}, checkpoint {event['checkpoint']}", event)
        else:
            raise VectorError(f"event {number} is neither an input nor a checkpoint")

    def _take(self, where: str, event: Mapping[str, Json]) -> None:
        index = field_of(event, "subtask")
        if not 0 <= index < len(self._functions):
            raise VectorError(f"{where}: there is no subtask {index}")
        size, emitted = self._functions[index].invoke(event["input"])
        self._last_input = event["input"]
        if emitted:
            self.emissions.append((index, emitted))
        self._expect(f"{where}, size", field_of(event, "size_after_add"), size)
        self._expect(f"{where}, emitted", field_of(event, "emitted"), emitted)

    def _take_checkpoint(self, where: str, event: Mapping[str, Json]) -> None:
        self._clock.set(event.get("timestamp", self._clock.now_ms()))
        context = _Snapshot(event["checkpoint"], self._clock.now_ms())
        for function in self._functions:
            function.snapshot_state(context)
        record = self._operator.checkpoint()
        self.checkpoints[event["checkpoint"]] = f"{self._root}/chk-{record.checkpoint_id}"
        self._expect(f"{where}, timestamp", context.checkpoint_timestamp, record.created_ms)
        if "after_input" in event:
            self._expect(f"{where}, after input", event["after_input"], self._last_input)
        if self._checked:
            # What is in the checkpoint is what a restore finds there.
            buffers = self.restored(event["checkpoint"], record.parallelism)
            found = {str(index): one.buffer for index, one in enumerate(buffers)}
            expect(f"{where}, contents", field_of(event, "contents"), found)

    def restored(self, checkpoint: int, parallelism: int) -> list[_BufferingFunction]:
        """Restore a checkpoint, in another place and at any parallelism."""
        if checkpoint not in self.checkpoints:
            raise VectorError(f"the events have no checkpoint {checkpoint}")
        operator = self._trial.operator(
            self._trial.new_root(),
            parallelism=parallelism,
            restore_from=self.checkpoints[checkpoint],
        )
        return _functions(operator, self.threshold)

    def _expect(self, where: str, expected: Json, actual: Json) -> None:
        if self._checked:
            expect(where, expected, actual)


def _check_example(
    run: _Run, checkpoint: int, parallelism: int, example: Mapping[str, Json], trial: Trial
) -> None:
    functions = run.restored(checkpoint, parallelism)
    expected = {name: elements for name, elements in example.items() if name.isdigit()}
    found = {str(index): list(function.buffer) for index, function in enumerate(functions)}
    expect(f"checkpoint {checkpoint} at parallelism {parallelism}", expected, found)
    for name, outcome in example.items():
        if (match := _THEN.fullmatch(name)) is not None:
            _check_next(name, functions, int(match[2]), match[1], outcome, trial)
        elif not name.isdigit() and name != "note":
            raise VectorError(f"{name!r} is neither a subtask nor 'then X on subtask N'")


def _check_next(
    where: str,
    functions: Sequence[_BufferingFunction],
    index: int,
    element: str,
    outcome: str,
    trial: Trial,
) -> None:
    if not 0 <= index < len(functions):
        raise VectorError(f"{where}: there is no subtask {index}")
    size, emitted = functions[index].invoke(element)
    match = _EMITS.fullmatch(outcome)
    if _EMITS_NOTHING.search(outcome):
        if emitted and size > functions[index].threshold:
            trial.differs(_FLUSH)
        else:
            expect(where, [], emitted)
    elif match is not None:
        # The outcome is a text, in which a number looks like its digits.
        expect(where, [part.strip() for part in match[1].split(",")], list(map(str, emitted)))
    else:
        raise VectorError(f"{where}: {outcome!r} is neither 'emits a,b,c' nor 'emits nothing'")
