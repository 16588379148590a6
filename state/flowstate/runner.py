"""Runs a function on the state of one subtask: rows and times in, rows out, checkpoints between.

This is what stands between a user's function and a runtime. It knows nothing of where rows come
from or go to: a runtime, or a test, calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flowstate.checkpoint import SubtaskSnapshot
from flowstate.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from flowstate.errors import StateDescriptorError, StateError
from flowstate.functions import (
    CheckpointedFunction,
    CheckpointListener,
    KeyedProcessFunction,
    ListCheckpointed,
    OutputTag,
    TimeDomain,
)
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.keyed.single_states import AggregatingState, ReducingState, ValueState
from flowstate.keyed.states import ListState, MapState
from flowstate.keyed.timers import KeyedTimerService, Timer
from flowstate.operator_state import OperatorStateBackend
from flowstate.subtask import Subtask

__all__ = ["FunctionRunner", "Output", "RuntimeStates"]

Output = tuple[OutputTag | None, Any]
"""A row that a function emits; without a tag it goes to the main output."""

_LIST_CHECKPOINTED = "list-checkpointed"
# Iterable, but never meant as rows. The exact classes, because this is asked for each row.
_NO_ROWS = frozenset({str, bytes, dict})


class _KeyedStates:
    """The part of a backend that functions may see: states, and not the key."""

    def __init__(self, backend: KeyedStateBackend) -> None:
        self._backend = backend

    def get_state(self, descriptor: ValueStateDescriptor, /) -> ValueState[Any]:
        return self._backend.get_state(descriptor)

    def get_list_state(self, descriptor: ListStateDescriptor, /) -> ListState[Any]:
        return self._backend.get_list_state(descriptor)

    def get_map_state(self, descriptor: MapStateDescriptor, /) -> MapState[Any, Any]:
        return self._backend.get_map_state(descriptor)

    def get_reducing_state(self, descriptor: ReducingStateDescriptor, /) -> ReducingState[Any]:
        return self._backend.get_reducing_state(descriptor)

    def get_aggregating_state(
        self, descriptor: AggregatingStateDescriptor, /
    ) -> AggregatingState[Any, Any]:
        return self._backend.get_aggregating_state(descriptor)


class RuntimeStates(_KeyedStates):
    """What ``open`` gets: the runtime context of a subtask."""

    def __init__(self, subtask: Subtask) -> None:
        super().__init__(subtask.keyed)
        self.subtask_index = subtask.subtask_index
        self.parallelism = subtask.parallelism
        self.max_parallelism = subtask.max_parallelism


class _InitializationContext:
    """What ``initialize_state`` gets."""

    def __init__(self, subtask: Subtask) -> None:
        self._subtask = subtask
        self.is_restored = subtask.is_restored
        self.restored_checkpoint_id = subtask.restored_checkpoint_id

    @property
    def operator_state_store(self) -> OperatorStateBackend:
        return self._subtask.operator

    @property
    def keyed_state_store(self) -> _KeyedStates:
        return _KeyedStates(self._subtask.keyed)


class _SnapshotContext:
    """What ``snapshot_state`` gets."""

    def __init__(self, checkpoint_id: int, checkpoint_timestamp: int) -> None:
        self.checkpoint_id = checkpoint_id
        self.checkpoint_timestamp = checkpoint_timestamp


class _Context:
    """What ``process_element`` and ``on_timer`` get; one object for all rows."""

    __slots__ = ("_backend", "_side_rows", "time_domain", "timer_service")

    def __init__(self, backend: KeyedStateBackend) -> None:
        self._backend = backend
        self._side_rows: list[Output] = []
        self.timer_service: KeyedTimerService = backend.timer_service
        self.time_domain = TimeDomain.EVENT_TIME

    @property
    def current_key(self) -> Any:
        return self._backend.current_key

    @property
    def timestamp(self) -> int | None:
        return self._backend.context.timestamp

    def output(self, tag: OutputTag, row: Any, /) -> None:
        if not isinstance(tag, OutputTag):
            raise StateDescriptorError(f"a side output is named by an OutputTag, not {tag!r}")
        self._side_rows.append((tag, row))

    def taken(self) -> list[Output]:
        """Return the rows that went to side outputs since the last call."""
        rows, self._side_rows = self._side_rows, []
        return rows


class FunctionRunner:
    """One function on one subtask.

    The function may be any mix of ``KeyedProcessFunction``, ``CheckpointedFunction`` or
    ``ListCheckpointed``, and ``CheckpointListener``. What it emits for a row is taken as a whole
    before the key changes. Rows of side outputs come before those of the main output of the same
    call.
    """

    def __init__(self, subtask: Subtask, function: Any) -> None:
        self._subtask, self._function = subtask, function
        self._context: _Context | None = None
        if all(isinstance(function, kind) for kind in (CheckpointedFunction, ListCheckpointed)):
            raise StateDescriptorError(
                f"{type(function).__name__} is a CheckpointedFunction and ListCheckpointed at "
                f"once, which both have a snapshot_state: choose one"
            )
        self._restore()
        if isinstance(function, KeyedProcessFunction):
            self._context = _Context(subtask.keyed)
            function.open(RuntimeStates(subtask))

    def process(self, value: Any, *, key: Any, timestamp: int | None = None) -> list[Output]:
        """Hand a row to the function, and return what it emits."""
        context = self._keyed_context()
        self._subtask.keyed.set_current_key(key, timestamp=timestamp)
        return self._emitted(self._function.process_element(value, context), context)

    def process_batch(
        self,
        values: Iterable[Any],
        keys: Iterable[Any],
        places: Iterable[int],
        timestamps: Iterator[int | None] | None,
        rows: list[Any],
    ) -> None:
        """Hand many rows to the function, and add what it emits to the main output to ``rows``.

        To be called within ``KeyedStateBackend.lent``, which gives the places; the keys are those
        of ``KeyType.to_list``. What goes to side outputs is kept until ``take_side_rows``. This is
        the loop that a runtime spends its time in.
        """
        context = self._keyed_context()
        key_context = self._subtask.keyed.context
        process, add = self._function.process_element, rows.extend
        key_context.timestamp = None
        checked: type | None = None
        for value, key, place in zip(values, keys, places, strict=True):
            key_context.key = key
            key_context.place = place
            if timestamps is not None:
                key_context.timestamp = next(timestamps)
            emitted = process(value, context)
            if emitted is not None:
                if emitted.__class__ is not checked:
                    checked = emitted.__class__
                    if checked in _NO_ROWS:
                        raise self._not_rows(emitted)
                add(emitted)

    def take_side_rows(self) -> list[Output]:
        """Return the rows that went to side outputs since the last call."""
        return self._keyed_context().taken()

    def advance_watermark(self, watermark: int) -> Iterator[Output]:
        """Move event time, and yield what the timers that are due emit; take it to the end."""
        timers = self._keyed_context().timer_service.advance_watermark(watermark)
        yield from self._fired(timers)

    def advance_processing_time(self, now_ms: int) -> Iterator[Output]:
        """Move processing time, and yield what is then due; take it to the end."""
        timers = self._keyed_context().timer_service.advance_processing_time(now_ms)
        yield from self._fired(timers)

    def snapshot(
        self,
        checkpoint_id: int,
        *,
        timestamp_ms: int,
        batch_id: int | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> SubtaskSnapshot:
        """Ask the function for its state, and write it together with all other state."""
        self._forget_key()
        function = self._function
        if isinstance(function, CheckpointedFunction):
            function.snapshot_state(_SnapshotContext(checkpoint_id, timestamp_ms))
        elif isinstance(function, ListCheckpointed):
            elements = function.snapshot_state(checkpoint_id, timestamp_ms)
            self._subtask.operator.get_list_state(self._list_descriptor()).update(elements)
        return self._subtask.snapshot(checkpoint_id, batch_id=batch_id, attributes=attributes)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Tell the state and the function that a checkpoint is committed."""
        self._subtask.notify_checkpoint_complete(checkpoint_id)
        self._forget_key()
        if isinstance(self._function, CheckpointListener):
            self._function.notify_checkpoint_complete(checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Tell the state and the function that a checkpoint came to nothing."""
        self._subtask.notify_checkpoint_aborted(checkpoint_id)
        self._forget_key()
        if isinstance(self._function, CheckpointListener):
            self._function.notify_checkpoint_aborted(checkpoint_id)

    def close(self) -> None:
        """Close the function; the subtask stays open."""
        self._forget_key()
        if isinstance(self._function, KeyedProcessFunction):
            self._function.close()

    def _restore(self) -> None:
        function = self._function
        if isinstance(function, CheckpointedFunction):
            function.initialize_state(_InitializationContext(self._subtask))
        elif isinstance(function, ListCheckpointed):
            state = self._subtask.operator.get_list_state(self._list_descriptor())
            if self._subtask.is_restored:
                function.restore_state(list(state.get()))

    def _list_descriptor(self) -> ListStateDescriptor:
        element_type = getattr(self._function, "element_type", None)
        if element_type is None:
            raise StateDescriptorError(
                f"{type(self._function).__name__} must say of what type its elements are: "
                f"element_type = str, say, in the class"
            )
        return ListStateDescriptor(_LIST_CHECKPOINTED, element_type)

    def _keyed_context(self) -> _Context:
        if self._context is None:
            raise StateError(
                f"{type(self._function).__name__} is no KeyedProcessFunction, so it takes no rows"
            )
        return self._context

    def _forget_key(self) -> None:
        # Outside of a row or timer, keyed state belongs to nobody: using it must fail.
        if self._context is not None:
            self._subtask.keyed.clear_current_key()

    def _fired(self, timers: Iterator[Timer]) -> Iterator[Output]:
        context = self._keyed_context()
        for timer in timers:
            context.time_domain = timer.domain
            yield from self._emitted(self._function.on_timer(timer.timestamp, context), context)

    def _emitted(self, rows: Iterable[Any] | None, context: _Context) -> list[Output]:
        if rows.__class__ in _NO_ROWS:
            raise self._not_rows(rows)
        found: list[Output] = [] if rows is None else [(None, row) for row in rows]
        return context.taken() + found

    def _not_rows(self, emitted: Any) -> StateError:
        return StateError(
            f"{type(self._function).__name__} returned a {type(emitted).__name__} where an "
            f"iterable of rows is expected: yield the row, or return it in a list"
        )
