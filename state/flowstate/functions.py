"""The contracts between a user's function and whatever runs it.

A function is a plain class that inherits from what it needs: ``KeyedProcessFunction`` for rows and
timers, ``CheckpointedFunction`` or ``ListCheckpointed`` for operator state, ``CheckpointListener``
to hear of completed checkpoints. The contexts that it is handed are protocols; the runner brings
the classes.

All times are milliseconds since 1970-01-01T00:00:00Z.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from flowstate.errors import StateDescriptorError

if TYPE_CHECKING:
    from flowstate.descriptors import (
        AggregatingStateDescriptor,
        ListStateDescriptor,
        MapStateDescriptor,
        ReducingStateDescriptor,
        ValueStateDescriptor,
    )
    from flowstate.keyed.single_states import AggregatingState, ReducingState, ValueState
    from flowstate.keyed.states import ListState, MapState

__all__ = [
    "AggregateFunction",
    "BroadcastState",
    "CheckpointListener",
    "CheckpointedFunction",
    "Context",
    "FunctionInitializationContext",
    "FunctionSnapshotContext",
    "KeyedProcessFunction",
    "KeyedStateStore",
    "ListCheckpointed",
    "OnTimerContext",
    "OperatorListState",
    "OperatorStateStore",
    "OutputTag",
    "ReduceFunction",
    "RuntimeContext",
    "TimeDomain",
    "TimerService",
]

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
In = TypeVar("In")
Acc = TypeVar("Acc")
Out = TypeVar("Out")
K_co = TypeVar("K_co", covariant=True)


class TimeDomain(StrEnum):
    """Which clock a timer follows; the timers of the two are separate sets."""

    EVENT_TIME = "event"
    PROCESSING_TIME = "processing"


@dataclass(frozen=True, slots=True)
class OutputTag:
    """The name of a side output. Two tags of one name are the same output."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise StateDescriptorError(f"an output tag needs a name, not {self.name!r}")


# What a state does with the values that are added to it.


class ReduceFunction(ABC, Generic[T]):
    """Two values become one of the same type.

    It must be associative and must not change its arguments. The first value of a key is stored
    as it is: ``reduce`` is not called for it.
    """

    @abstractmethod
    def reduce(self, a: T, b: T) -> T:
        """Return what stands for both; ``a`` is what is stored, ``b`` what is added."""


class AggregateFunction(ABC, Generic[In, Acc, Out]):
    """Values are added to an accumulator of another type, from which a result is taken.

    The accumulator is what is stored, so it must be of the type that the descriptor declares.
    """

    @abstractmethod
    def create_accumulator(self) -> Acc:
        """Return a new accumulator that nothing has been added to, never a shared one."""

    @abstractmethod
    def add(self, value: In, accumulator: Acc) -> Acc:
        """Return the accumulator with the value added.

        It may be the given one, changed. Only what is returned is stored.
        """

    @abstractmethod
    def get_result(self, accumulator: Acc) -> Out:
        """Return what the accumulator amounts to, and leave it as it is."""

    @abstractmethod
    def merge(self, a: Acc, b: Acc) -> Acc:
        """Return an accumulator of what both hold; neither is used again."""


# Where a function gets its state.


class KeyedStateStore(Protocol):
    """Hands out keyed state. A state that is handed out always means that of the current key.

    Asking again for a name gives the same state. Asking for it with another kind or type is
    refused, also when the other one is in the checkpoint that was restored.
    """

    def get_state(self, descriptor: ValueStateDescriptor, /) -> ValueState[Any]:
        """Return the state that holds one value per key."""
        ...

    def get_list_state(self, descriptor: ListStateDescriptor, /) -> ListState[Any]:
        """Return the state that holds a list per key."""
        ...

    def get_map_state(self, descriptor: MapStateDescriptor, /) -> MapState[Any, Any]:
        """Return the state that holds a map per key."""
        ...

    def get_reducing_state(self, descriptor: ReducingStateDescriptor, /) -> ReducingState[Any]:
        """Return the state that reduces all values of a key to one."""
        ...

    def get_aggregating_state(
        self, descriptor: AggregatingStateDescriptor, /
    ) -> AggregatingState[Any, Any]:
        """Return the state that adds all values of a key to an accumulator."""
        ...


class OperatorListState(Protocol[T]):
    """A subtask's part of a list that is redistributed when the parallelism changes.

    An element is the unit that moves, so it must mean something on its own. None is not one.
    """

    def get(self) -> Iterable[T]:
        """Return the elements; what is added later may be seen through it."""
        ...

    def add(self, value: T, /) -> None:
        """Add an element at the end."""
        ...

    def add_all(self, values: Iterable[T], /) -> None:
        """Add elements at the end. If one is refused, those before it are added, as in Flink."""
        ...

    def update(self, values: Iterable[T], /) -> None:
        """Have these elements and no others; if one is refused, the old ones are gone."""
        ...

    def clear(self) -> None:
        """Have no elements."""
        ...


class BroadcastState(Protocol[K, V]):
    """A map of which every subtask holds a copy.

    Nothing keeps the copies equal but the function: it must change all of them in the same way,
    whatever order the changes arrive in. A value may be None.
    """

    def get(self, key: K, /) -> V | None:
        """Return the value, or None where there is none."""
        ...

    def put(self, key: K, value: V | None, /) -> None:
        """Set the value of a key."""
        ...

    def put_all(self, values: Mapping[K, V | None], /) -> None:
        """Set the values of keys: of all of them, or of none if one is refused."""
        ...

    def remove(self, key: K, /) -> None:
        """Forget a key; one that is missing is no error."""
        ...

    def contains(self, key: K, /) -> bool:
        """Say whether the key has a value, even None."""
        ...

    def items(self) -> Iterable[tuple[K, V | None]]:
        """Return all keys with their values."""
        ...

    def keys(self) -> Iterable[K]:
        """Return all keys."""
        ...

    def values(self) -> Iterable[V | None]:
        """Return all values."""
        ...

    def clear(self) -> None:
        """Forget all keys."""
        ...


class OperatorStateStore(Protocol):
    """Hands out operator state: what belongs to a subtask, not to a key.

    A name is one state in one mode. Asking for it in another is refused, also when the other mode
    is that of the checkpoint. What was restored and is never asked for stays in the next
    checkpoint.
    """

    def get_list_state(self, descriptor: ListStateDescriptor, /) -> OperatorListState[Any]:
        """Return a list whose elements are split evenly when the parallelism changes."""
        ...

    def get_union_list_state(self, descriptor: ListStateDescriptor, /) -> OperatorListState[Any]:
        """Return a list of which every restore gives each subtask the elements of all.

        The function has to keep only its own, or the list grows with each restore.
        """
        ...

    def get_broadcast_state(self, descriptor: MapStateDescriptor, /) -> BroadcastState[Any, Any]:
        """Return a map of which each subtask has a copy."""
        ...


# What a function is told.


class RuntimeContext(KeyedStateStore, Protocol):
    """What a function knows of itself, and where it gets keyed state; valid until ``close``."""

    @property
    def subtask_index(self) -> int:
        """Which of the parallel copies this is, from 0 on."""
        ...

    @property
    def parallelism(self) -> int:
        """How many parallel copies there are; may differ at the next restore."""
        ...

    @property
    def max_parallelism(self) -> int:
        """The number of key groups; stays the same over the life of the state."""
        ...


class FunctionInitializationContext(Protocol):
    """What ``initialize_state`` works with."""

    @property
    def is_restored(self) -> bool:
        """Whether there is a checkpoint behind this start.

        True also for a subtask that gets nothing of it, as there may be more subtasks than
        elements. False for a function that the checkpoint does not know.
        """
        ...

    @property
    def restored_checkpoint_id(self) -> int | None:
        """The checkpoint's id, None if nothing was restored."""
        ...

    @property
    def operator_state_store(self) -> OperatorStateStore:
        """Where operator state is registered."""
        ...

    @property
    def keyed_state_store(self) -> KeyedStateStore:
        """Where keyed state is registered. There is no current key, so it cannot be used yet."""
        ...


class FunctionSnapshotContext(Protocol):
    """What ``snapshot_state`` is told."""

    @property
    def checkpoint_id(self) -> int:
        """The checkpoint's id: higher than any before it, not always by one."""
        ...

    @property
    def checkpoint_timestamp(self) -> int:
        """When the checkpoint was started."""
        ...


class TimerService(Protocol):
    """Time, and timers of the current key.

    A timer is a domain, a key and a timestamp: registering it twice fires it once. It fires when
    the watermark, or processing time, has reached its timestamp; the timers of a domain fire in
    the order of their timestamps, equal ones in no particular order. One whose time is already
    past fires at the next advance, and one registered so in ``on_timer`` within the same advance.
    Timers belong to their key: they are in the checkpoint, and follow the key on a rescale.
    """

    def current_processing_time(self) -> int:
        """Return the processing time."""
        ...

    def current_watermark(self) -> int:
        """Return the event time up to which everything is taken to have arrived.

        It is -2**63 until there is one. In ``on_timer`` it is already the one that fired.
        """
        ...

    def register_event_time_timer(self, timestamp: int, /) -> None:
        """Have ``on_timer`` called when the watermark reaches the timestamp."""
        ...

    def register_processing_time_timer(self, timestamp: int, /) -> None:
        """Have ``on_timer`` called when processing time reaches the timestamp."""
        ...

    def delete_event_time_timer(self, timestamp: int, /) -> None:
        """Forget a timer; one that was never registered is no error."""
        ...

    def delete_processing_time_timer(self, timestamp: int, /) -> None:
        """Forget a timer; one that was never registered is no error."""
        ...


class Context(Protocol[K_co]):
    """What surrounds one row; valid only until the function is done with the row."""

    @property
    def current_key(self) -> K_co:
        """The row's key: what keyed state and timers now belong to."""
        ...

    @property
    def timestamp(self) -> int | None:
        """The row's event time, None if it has none."""
        ...

    @property
    def timer_service(self) -> TimerService:
        """Time, and the timers of the current key."""
        ...

    def output(self, tag: OutputTag, row: Any, /) -> None:
        """Emit a row to a side output."""
        ...


class OnTimerContext(Context[K_co], Protocol[K_co]):
    """What surrounds a timer that fires; its key is the current one, its time the timestamp."""

    @property
    def time_domain(self) -> TimeDomain:
        """The clock that the timer follows."""
        ...


# What a function may be.


class KeyedProcessFunction(ABC, Generic[K, In, Out]):
    """Handles the rows of a key one by one, with state and timers of that key.

    A batch that failed runs again from the same state. The results are exactly-once if the
    function then does the same again: no randomness, no clock but the timer service's, nothing
    kept outside of state, nothing that depends on the order of rows from different inputs.

    What a method returns is emitted in order; None and an empty iterable emit nothing, and the
    methods may be generators. The runner takes all of it before it goes on to the next row, so
    the current key stays what it is.
    """

    def open(self, ctx: RuntimeContext) -> None:
        """Register state; called once, before anything else. There is no current key yet."""

    @abstractmethod
    def process_element(self, value: In, ctx: Context[K]) -> Iterable[Out] | None:
        """Handle a row."""

    def on_timer(self, timestamp: int, ctx: OnTimerContext[K]) -> Iterable[Out] | None:
        """Handle a timer that fires."""
        return ()

    def close(self) -> None:
        """Let go of what ``open`` took.

        It is not called when the process dies, and what it does to state is not kept.
        """


class CheckpointedFunction(ABC):
    """Takes part in checkpoints with operator state of its own.

    A class cannot be this and :class:`ListCheckpointed`: both have a ``snapshot_state``.
    """

    @abstractmethod
    def initialize_state(self, ctx: FunctionInitializationContext) -> None:
        """Register state and, if ``ctx.is_restored``, take back what is in it.

        It is called once for each start, also the very first, and before any row.
        """

    @abstractmethod
    def snapshot_state(self, ctx: FunctionSnapshotContext) -> None:
        """Put into the registered state whatever a restart must not lose.

        The checkpoint may still fail afterwards: see :class:`CheckpointListener` for what may be
        done only once it has completed.
        """


class ListCheckpointed(ABC, Generic[T]):
    """Takes part in checkpoints with one list, which is split evenly on a rescale.

    The class says of what type the elements are: ``element_type = str``.
    """

    element_type: ClassVar[Any]
    """An Arrow type, a Python builtin or a serializer, as in a descriptor."""

    @abstractmethod
    def snapshot_state(self, checkpoint_id: int, timestamp: int) -> list[T]:
        """Return what a restart must not lose, in elements that may go to different subtasks.

        An empty list is a state as well: this subtask holds nothing.
        """

    @abstractmethod
    def restore_state(self, state: list[T]) -> None:
        """Take back this subtask's share, which may be empty, longer or shorter than it was.

        It is called before any row, and only if a checkpoint is restored.
        """


class CheckpointListener(ABC):
    """Hears what became of a checkpoint, to make effects outside of state final only then.

    What is guaranteed: a checkpoint that is announced as complete is durable, and no automatic
    restart goes back behind it. Completion of N stands for all lower ids as well: none of them
    completes after it.

    What is not: that the announcement comes. A crash right after the completion loses it, the
    announcement of a higher id may come in its place, and a savepoint by itself is not announced.
    So keep what is pending in state, by checkpoint id. On completion of N make final everything
    whose id is at most N, and after a restore everything whose id is at most the restored one.
    Both may happen again for an id, so making it final must be idempotent.

    An error raised here fails the task. It does not undo the checkpoint.
    """

    @abstractmethod
    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Make final what was pending up to this checkpoint."""

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:  # noqa: B027 (optional)
        """Learn that a checkpoint will never complete.

        This is no order to discard what was pending for it: the next checkpoint that completes
        covers it too.
        """
