"""The keyed state of one subtask: its registered states, its timers, and what has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flowstate.clock import Clock, SystemClock
from flowstate.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    TtlTime,
    ValueStateDescriptor,
)
from flowstate.errors import StateError, StateMigrationError, StateRegistrationError
from flowstate.functions import TimeDomain
from flowstate.key_groups import KeyGroupAssigner, KeyGroupRange
from flowstate.keyed.codec import BaseStore, RowCodec, rows_of_columns
from flowstate.keyed.context import NO_KEY, KeyContext
from flowstate.keyed.loans import NumberedKeys
from flowstate.keyed.single_states import (
    AggregatingState,
    PlainValueState,
    ReducingState,
    ValueState,
)
from flowstate.keyed.single_table import SingleTable
from flowstate.keyed.states import ListState, MapState, State
from flowstate.keyed.tables import ListTable, MapTable, Table
from flowstate.keyed.timers import TIMER_NAMES, KeyedTimerService, TimerQueue
from flowstate.keyed.warm import WarmStates, WarmTable, can_be_warm
from flowstate.keys import KeyType
from flowstate.rows import NO_TIMESTAMP, RowOp, StateKind, StateRows
from flowstate.types import type_from_text, type_to_text

__all__ = ["KeyedStateBackend"]

S = TypeVar("S", bound=State)
StateMeta = dict[str, Any]

_CHUNK_NUMBER = KeyType(pa.int64())
_DESCRIPTORS: Mapping[type[State], type[StateDescriptor]] = {
    ValueState: ValueStateDescriptor,
    ListState: ListStateDescriptor,
    MapState: MapStateDescriptor,
    ReducingState: ReducingStateDescriptor,
    AggregatingState: AggregatingStateDescriptor,
}


class KeyedStateBackend:
    """Keyed state in memory, over the rows of a checkpoint.

    Those rows are either handed over whole (``restored``: the memory backend) or looked up in a
    base store when they are needed (``base``: the LMDB backend). The state of a name is brought
    into the program's types when the name is first registered; what is never registered stays in
    the checkpoint as it is.

    Not for several threads: like the function that it serves, it works on one element at a time.
    """

    def __init__(
        self,
        key_type: Any,
        *,
        max_parallelism: int,
        key_groups: KeyGroupRange | None = None,
        assigner: KeyGroupAssigner = KeyGroupAssigner.FLINK,
        base: BaseStore | None = None,
        restored: Mapping[str, StateRows] | None = None,
        restored_metas: Mapping[str, StateMeta] | None = None,
        warm: WarmStates | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.key_type = key_type if isinstance(key_type, KeyType) else KeyType(key_type)
        self.max_parallelism = max_parallelism
        self.key_groups = key_groups or KeyGroupRange(0, max_parallelism - 1)
        self.assigner = assigner
        self._base = base
        self._restored = dict(restored or {})
        self._warm = dict(warm or {})
        self._metas: dict[str, StateMeta] = {
            name: dict(meta) for name, meta in (restored_metas or {}).items()
        }
        self._context = KeyContext(clock or SystemClock())
        self._descriptors: dict[str, StateDescriptor] = {}
        self._namespaces: dict[str, KeyType | None] = {}
        self._states: dict[str, State] = {}
        self._tables: dict[str, Table | TimerQueue] = {}
        self._pending: dict[int, dict[str, Any]] = {}
        self._lent: pa.Array | None = None
        self._timers: KeyedTimerService | None = None

    # The key.

    @property
    def current_key(self) -> Any:
        """The key that the states are about; ``NoCurrentKeyError`` where there is none."""
        return self._context.checked_key()

    def set_current_key(self, key: Any, *, timestamp: int | None = None) -> None:
        """Say which key the states are about, and when its element happened."""
        self._context.key = self.key_type.canonical(key)
        self._context.timestamp = timestamp

    def set_canonical_key(self, key: Any, *, timestamp: int | None = None) -> None:
        """Do the same for a key that came out of ``key_type.to_list``, without checking it."""
        self._context.key = key
        self._context.timestamp = timestamp

    def clear_current_key(self) -> None:
        """Say that the states are about no key, so that using them is an error."""
        self._context.key = NO_KEY
        self._context.timestamp = None

    # States.

    def get_state(
        self, descriptor: ValueStateDescriptor, namespace_type: Any = None
    ) -> ValueState[Any]:
        """Register a value state, or return the one that is registered."""
        return self._register(descriptor, namespace_type, ValueState, self._single)

    def get_list_state(
        self, descriptor: ListStateDescriptor, namespace_type: Any = None
    ) -> ListState[Any]:
        """Register a list state, or return the one that is registered."""
        return self._register(descriptor, namespace_type, ListState, self._list)

    def get_map_state(
        self, descriptor: MapStateDescriptor, namespace_type: Any = None
    ) -> MapState[Any, Any]:
        """Register a map state, or return the one that is registered."""
        return self._register(descriptor, namespace_type, MapState, self._map)

    def get_reducing_state(
        self, descriptor: ReducingStateDescriptor, namespace_type: Any = None
    ) -> ReducingState[Any]:
        """Register a reducing state, or return the one that is registered."""
        return self._register(descriptor, namespace_type, ReducingState, self._single)

    def get_aggregating_state(
        self, descriptor: AggregatingStateDescriptor, namespace_type: Any = None
    ) -> AggregatingState[Any, Any]:
        """Register an aggregating state, or return the one that is registered."""
        return self._register(descriptor, namespace_type, AggregatingState, self._single)

    @property
    def registered_names(self) -> list[str]:
        """The names of the states that the program has asked for."""
        return sorted(self._states)

    @property
    def timer_service(self) -> KeyedTimerService:
        """The timers of this subtask."""
        if self._timers is None:
            queues = {domain: self._queue(domain) for domain in TimeDomain}
            self._timers = KeyedTimerService(self._context, queues)
        return self._timers

    def keys(self, state_name: str) -> Iterator[Any]:
        """Yield each key that has something in a state, in no defined order."""
        table = self.table(state_name)
        yield from dict.fromkeys(table.split(slot)[0] for slot in table.slots())

    @contextmanager
    def lent(self, keys: pa.Array) -> Iterator[npt.NDArray[np.int64]]:
        """Bring what states of single values hold of these keys into memory, all at once.

        It yields the place of each key, which is to be said in the context together with the key.
        Until the end no other keys may be used.
        """
        numbered = NumberedKeys.of(keys)
        self._lent = numbered.distinct
        try:
            for state in self._states.values():
                self._lend(state, numbered.distinct)
            yield numbered.numbers
        finally:
            self._lent, self._context.place = None, -1
            for state in self._states.values():
                if state.loan is not None:
                    state.loan.settle()

    def _lend(self, state: State, keys: pa.Array) -> None:
        table = self._tables[state.name]
        if state.loan is not None:
            state.loan.take(keys)
        elif isinstance(table, SingleTable) and table.codec.namespace is None:
            table.fetch(self.key_type.to_list(keys))

    def entry_count(self, state_name: str) -> int:
        """Return how many keys (and namespaces) have something in a state."""
        return len(self.table(state_name).slots())

    def table(self, state_name: str) -> Table:
        """Return the table behind a registered state, for bulk access and for tools."""
        table = self._tables.get(state_name)
        if not isinstance(table, Table):
            known = sorted(self._states) or "none"
            raise StateError(f"no state {state_name!r} is registered. Registered are: {known}")
        return table

    def descriptor(self, state_name: str) -> StateDescriptor:
        """Return the descriptor that a state was registered with."""
        self.table(state_name)
        return self._descriptors[state_name]

    @property
    def context(self) -> KeyContext:
        """The key and the times, for the runtime's own use."""
        return self._context

    # Snapshots.

    def warm_states(self) -> WarmStates | None:
        """Return all that there is, for the next backend of the same keys, if it can be had so.

        This one is not to be used any more.
        """
        found = self._whole()
        return found if found is not None and all(one.is_safe for one in found.values()) else None

    def _whole(self) -> WarmStates | None:
        """Return all states, if they are in memory and of one value per key."""
        if self._base is not None or self._restored or not can_be_warm(self._metas):
            return None
        found = dict(self._warm)
        for name, table in self._tables.items():
            if isinstance(table, SingleTable):
                found[name] = WarmTable.of(table)
            elif table.dirty or len(table.slots() if isinstance(table, Table) else table):
                return None
        return found

    @property
    def metas(self) -> dict[str, StateMeta]:
        """What a record keeps of the states: of those registered, and of those restored."""
        return {name: dict(meta) for name, meta in sorted(self._metas.items())}

    @property
    def is_mostly_changed(self) -> bool:
        """Whether to write all of it costs at most about twice what the changes alone would."""
        whole = self._whole()
        tables = [table for table in self._tables.values() if isinstance(table, SingleTable)]
        changed = sum(table.changed_count for table in tables)
        return whole is not None and 0 < sum(map(len, whole.values())) <= 2 * changed

    def changes(
        self, checkpoint_id: int, *, full: bool = False, everything: bool = False
    ) -> list[StateRows]:
        """Return what has changed since the last snapshot, and begin anew.

        ``full`` says that nothing older is there, so that removals need not be written;
        ``everything``, for state that is mostly changed, that the rest is to be written as well.
        Call ``notify_checkpoint_complete`` or ``notify_checkpoint_aborted`` with the same id later.
        """
        whole = self._whole() if everything else None
        if whole is not None:
            written = {name: (table.codec, table.contents()) for name, table in whole.items()}
        else:
            written = {
                name: (table.codec, table.change_columns()) for name, table in self._tables.items()
            }
        found = []
        for name in sorted(written):
            codec, columns = written[name]
            if not len(columns.ops):
                continue
            rows = rows_of_columns(
                codec, columns, max_parallelism=self.max_parallelism, assigner=self.assigner
            )
            self._check_groups(rows)
            if full and columns.ops.any():
                puts = pc.equal(rows.table["op"], int(RowOp.PUT))
                rows = StateRows(rows.name, rows.kind, rows.table.filter(puts))
            if rows.table.num_rows:
                found.append(rows)
        # Nothing is settled before everything could be written.
        self._pending[checkpoint_id] = {
            name: table.changed() for name, table in self._tables.items()
        }
        for table in self._tables.values():
            table.settle()
        return found

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Take note that a snapshot, and with it all before it, is durable and committed."""
        self._pending = {
            pending: slots for pending, slots in self._pending.items() if pending > checkpoint_id
        }
        if self._pending:
            # The base store moves on now, and nothing can be evicted while a later one is open.
            for table in self._tables.values():
                if isinstance(table, ListTable):
                    table.complete_saved()

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Take note that a snapshot is void: its changes belong to the next one again."""
        for name, slots in self._pending.pop(checkpoint_id, {}).items():
            self._tables[name].unsettle(slots)

    def rebase(self) -> None:
        """Forget what the base store holds by now; to be called after it has advanced.

        What is in a snapshot that is neither complete nor aborted is kept.
        """
        if self._pending:
            raise StateError(
                f"checkpoint {min(self._pending)} is neither complete nor aborted, so the base "
                f"store cannot hold it yet"
            )
        for table in self._tables.values():
            table.evict()

    def _check_groups(self, rows: StateRows) -> None:
        groups = rows.table["group"]
        first, last = groups[0].as_py(), groups[-1].as_py()
        if first not in self.key_groups or last not in self.key_groups:
            raise StateError(
                f"state {rows.name!r} holds keys of the key groups {first}..{last}, but this "
                f"subtask owns {self.key_groups}: rows were routed by another key, key type, "
                f"assigner or max parallelism than the state's"
            )

    # Registration.

    def _register(
        self,
        descriptor: StateDescriptor,
        namespace_type: Any,
        kind: type[S],
        make: Callable[[Any, KeyType | None], State],
    ) -> S:
        if not isinstance(descriptor, _DESCRIPTORS[kind]):
            raise StateRegistrationError(
                f"state {descriptor.name!r}: a {type(descriptor).__name__} does not describe a "
                f"{kind.__name__}"
            )
        namespace = None if namespace_type is None else KeyType(namespace_type)
        known = self._descriptors.get(descriptor.name)
        if known is None:
            if descriptor.name in self._metas:
                descriptor.check_restored(self._metas[descriptor.name])
                self._check_namespace(descriptor.name, namespace)
            self._note_meta(descriptor, namespace)
            state = self._states[descriptor.name] = make(descriptor, namespace)
            if self._lent is not None:
                self._lend(state, self._lent)
            self._descriptors[descriptor.name] = descriptor
            self._namespaces[descriptor.name] = namespace
        else:
            self._check_same(known, descriptor, namespace)
        return cast(S, self._states[descriptor.name])

    def _check_same(
        self, known: StateDescriptor, descriptor: StateDescriptor, namespace: KeyType | None
    ) -> None:
        if not known.is_same(descriptor) or self._namespaces[known.name] != namespace:
            raise StateRegistrationError(
                f"state {known.name!r} is registered as {_shown(known)} already and cannot be "
                f"{_shown(descriptor)} as well. Give one of them another name"
            )

    def _check_namespace(self, name: str, namespace: KeyType | None) -> None:
        text = self._metas[name].get("namespace")
        stored = None if text is None else KeyType(type_from_text(text))
        if stored != namespace:
            shown = [str(part.arrow) if part else "none" for part in (stored, namespace)]
            raise StateMigrationError(
                f"state {name!r} was written with namespaces of type {shown[0]}, the program has "
                f"{shown[1]}. Namespaces cannot change their type: use another state name"
            )

    def _note_meta(self, descriptor: StateDescriptor, namespace: KeyType | None) -> None:
        old = self._metas.get(descriptor.name)
        meta = descriptor.to_json()
        if namespace is not None:
            meta["namespace"] = type_to_text(namespace.arrow)
        ttl = descriptor.live_ttl
        if ttl is not None and ttl.time is TtlTime.PROCESSING_TIME and old is not None:
            # What was written without a TTL is as old as the TTL is. (In event time nobody knows
            # how old that is, so it does not expire until it is written again.)
            since = old.get("ttl_since_ms") if "ttl_ms" in old else self._context.clock.now_ms()
            if since is not None:
                meta["ttl_since_ms"] = since
        self._metas[descriptor.name] = meta

    def _codec(self, descriptor: StateDescriptor, namespace: KeyType | None) -> RowCodec:
        sub = None
        if isinstance(descriptor, MapStateDescriptor):
            sub = KeyType(descriptor.key_type.arrow)
        elif isinstance(descriptor, ListStateDescriptor):
            sub = _CHUNK_NUMBER
        return RowCodec(
            descriptor.name,
            descriptor.kind,
            self.key_type,
            namespace=namespace,
            sub=sub,
            value=descriptor.types["value"].arrow,
            ttl=descriptor.live_ttl is not None,
        )

    def _single(self, descriptor: StateDescriptor, namespace: KeyType | None) -> State:
        table = SingleTable(*self._table_parts(descriptor, namespace))
        self._load(table)
        plain = namespace is None and descriptor.live_ttl is None
        kind: Any = {
            StateKind.VALUE: PlainValueState if plain else ValueState,
            StateKind.REDUCING: ReducingState,
            StateKind.AGGREGATING: AggregatingState,
        }[descriptor.kind]
        value_type = descriptor.types["value"]
        return cast(State, kind(descriptor, self._context, table, value_type, namespace))

    def _list(self, descriptor: ListStateDescriptor, namespace: KeyType | None) -> State:
        table = ListTable(*self._table_parts(descriptor, namespace))
        self._load(table)
        element_type = descriptor.element_type
        return ListState(descriptor, self._context, table, element_type, namespace)

    def _map(self, descriptor: MapStateDescriptor, namespace: KeyType | None) -> State:
        table = MapTable(*self._table_parts(descriptor, namespace))
        self._load(table)
        return MapState(descriptor, self._context, table, descriptor.value_type, namespace)

    def _table_parts(
        self, descriptor: StateDescriptor, namespace: KeyType | None
    ) -> tuple[RowCodec, BaseStore | None, int]:
        since = self._metas[descriptor.name].get("ttl_since_ms", NO_TIMESTAMP)
        return self._codec(descriptor, namespace), self._base, since

    def _queue(self, domain: TimeDomain) -> TimerQueue:
        queue = TimerQueue(TIMER_NAMES[domain], self.key_type, self._base)
        self._metas.setdefault(queue.codec.name, {"kind": StateKind.TIMER.value})
        self._load(queue)
        return queue

    def _load(self, table: Table | TimerQueue) -> None:
        self._tables[table.codec.name] = table
        rows = self._restored.pop(table.codec.name, None)
        if rows is not None:
            table.load(rows.table)
        warm = self._warm.pop(table.codec.name, None)
        if warm is not None and isinstance(table, SingleTable):
            warm.give(table)


def _shown(descriptor: StateDescriptor) -> str:
    types = ", ".join(f"{role} {kind}" for role, kind in descriptor.types.items())
    return f"a {descriptor.kind.value} state ({types})"
