"""What all states that a function works with have in common, and lists and maps.

The runtime sets the key that they are about; states of one value are in ``single_states``.

Names and meanings are PyFlink's. Nulls: ``update(None)`` of a value is ``clear()``; a map may hold
``None`` as a value; lists, reducing and aggregating states take no ``None``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from flowstate.descriptors import (
    ListStateDescriptor,
    MapStateDescriptor,
    StateDescriptor,
)
from flowstate.errors import FlowError, StateError, StateTypeError
from flowstate.keyed.codec import ABSENT
from flowstate.keyed.context import NO_KEY, KeyContext
from flowstate.keyed.loans import Loan
from flowstate.keyed.tables import ListTable, MapTable, Table
from flowstate.keyed.ttl import IncrementalCleanup, Ttl
from flowstate.keys import KeyType
from flowstate.types import ValueType

__all__ = ["ListState", "MapState", "State"]

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


def _identity(value: Any) -> Any:
    return value


class State:
    """What all keyed states have: they are about the current key, and can be cleared."""

    def __init__(
        self,
        descriptor: StateDescriptor,
        context: KeyContext,
        value_type: ValueType,
        namespace_type: KeyType | None,
    ) -> None:
        self._descriptor, self._context = descriptor, context
        self._physical = value_type.to_physical
        self._user = value_type.to_user or _identity
        self._namespace_type = namespace_type
        self._namespace: Any = NO_KEY
        config = descriptor.live_ttl
        self._ttl = None if config is None else Ttl(config, context)
        self._cleanup: IncrementalCleanup | None = None
        self.loan: Loan | None = None
        """Where the state has its values while the runtime lends them; only some states can."""

    @property
    def name(self) -> str:
        """The state's name."""
        return self._descriptor.name

    def set_current_namespace(self, namespace: Any) -> None:
        """Say which namespace (a window, for one) the state is about from now on."""
        if self._namespace_type is None:
            raise StateError(f"state {self.name!r} was registered without namespaces")
        self._namespace = self._namespace_type.canonical(namespace)

    @abstractmethod
    def clear(self) -> None:
        """Remove what the state holds for the current key."""

    def _slot(self) -> Any:
        key = self._context.key
        if key is NO_KEY:
            key = self._context.checked_key()
        if self._namespace_type is None:
            return key
        if self._namespace is NO_KEY:
            raise StateError(f"state {self.name!r} needs set_current_namespace() first")
        return key, self._namespace

    def _checked(self, value: Any) -> Any:
        try:
            return self._physical(value)
        except StateTypeError as error:
            raise StateTypeError(f"state {self.name!r}: {error.message}") from None

    def _not_null(self, value: Any, what: str) -> Any:
        if value is None:
            raise StateTypeError(f"state {self.name!r}: {what}")
        return value

    def _clean_on_access(self, table: Table, clean: Callable[[Any], None]) -> None:
        if self._ttl is not None and self._ttl.cleanup:
            self._cleanup = IncrementalCleanup(self._ttl.cleanup, table.slots_in_memory, clean)

    def _accessed(self) -> None:
        if self._cleanup is not None:
            self._cleanup.accessed()


class ListState(State, Generic[T]):
    """A list per key. With a TTL each element has its own life."""

    _descriptor: ListStateDescriptor

    def __init__(
        self,
        descriptor: ListStateDescriptor,
        context: KeyContext,
        table: ListTable,
        value_type: ValueType,
        namespace_type: KeyType | None,
    ) -> None:
        super().__init__(descriptor, context, value_type, namespace_type)
        self._table = table
        self._clean_on_access(table, self._drop_expired)

    def get(self) -> list[T]:
        """Return the elements in the order they were added; an empty list where there are none."""
        slot = self._slot()
        units = self._table.get(slot)
        if self._ttl is not None:
            units = self._read_with_ttl(slot, units, self._ttl)
        self._accessed()
        user = self._user
        return [user(unit) for unit in units]

    def __iter__(self) -> Iterator[T]:
        return iter(self.get())

    def add(self, value: T) -> None:
        """Append an element."""
        self._not_null(value, "You cannot add null to a ListState.")
        self._append([self._checked(value)])

    def add_all(self, values: Iterable[T]) -> None:
        """Append elements. If one of them is refused, those before it have been added, as in Flink.

        The error fails the batch in any case, so a checkpoint never holds half of them.
        """
        self._not_null(values, "List of values to add cannot be null.")
        checked: list[Any] = []
        try:
            for value in values:
                self._not_null(value, "You cannot add null to a ListState.")
                checked.append(self._checked(value))
        finally:
            if checked:
                self._append(checked)

    def update(self, values: Iterable[T]) -> None:
        """Replace the elements; an empty list clears the state."""
        self._not_null(values, "List of values to add cannot be null.")
        checked = []
        for value in values:
            self._not_null(value, "You cannot add null to a ListState.")
            checked.append(self._checked(value))
        self._table.put(self._slot(), self._stamped(checked))
        self._accessed()

    def clear(self) -> None:
        self._table.put(self._slot(), [])

    def _append(self, checked: list[Any]) -> None:
        self._table.append(self._slot(), self._stamped(checked))
        self._accessed()

    def _stamped(self, values: list[Any]) -> list[Any]:
        if self._ttl is None:
            return values
        stamp = self._ttl.stamp()
        return [(value, stamp) for value in values]

    def _read_with_ttl(self, slot: Any, units: list[Any], ttl: Ttl) -> list[Any]:
        now = ttl.now()
        live = [unit for unit in units if not ttl.is_expired(unit[1], now)]
        if ttl.renew_on_read and units:
            stamp = ttl.stamp()
            self._table.put(slot, [(value, stamp) for value, _ in live])
        elif units and not live:
            self._table.put(slot, [])
        return [value for value, _ in (units if ttl.return_expired else live)]

    def _drop_expired(self, slot: Any) -> None:
        units, ttl = self._table.get(slot), self._ttl
        if ttl is None:
            return
        now = ttl.now()
        live = [unit for unit in units if not ttl.is_expired(unit[1], now)]
        if len(live) < len(units):
            self._table.put(slot, live)


class MapState(State, Generic[K, V]):
    """A map per key, also as ``state[k]``, ``k in state`` and ``for k in state``.

    Iterating gives what was there at its beginning, so the map may be changed meanwhile.
    """

    _descriptor: MapStateDescriptor

    def __init__(
        self,
        descriptor: MapStateDescriptor,
        context: KeyContext,
        table: MapTable,
        value_type: ValueType,
        namespace_type: KeyType | None,
    ) -> None:
        super().__init__(descriptor, context, value_type, namespace_type)
        self._table = table
        if table.codec.sub is None:
            raise AssertionError("the rows of a map have a sub key")
        self._canonical = table.codec.sub.canonical
        self._clean_on_access(table, self._drop_expired)

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        value = self._read(self._map_key(key))
        return None if value is ABSENT or value is None else self._user(value)

    def contains(self, key: K) -> bool:
        """Say whether the map has a key, be its value None or not."""
        return self._read(self._map_key(key)) is not ABSENT

    def put(self, key: K, value: V | None) -> None:
        """Set the value of a key; None is a value."""
        sub = self._map_key(key)
        unit = None if value is None else self._checked(value)
        self._write(sub, unit)
        self._accessed()

    def put_all(self, values: Mapping[K, V]) -> None:
        """Set the values of several keys."""
        self._not_null(values, "put_all() takes a mapping, not None")
        checked = [
            (self._map_key(key), None if value is None else self._checked(value))
            for key, value in values.items()
        ]
        for sub, unit in checked:
            self._write(sub, unit)
        self._accessed()

    def remove(self, key: K) -> None:
        """Remove a key; a missing one is no error."""
        self._table.remove(self._slot(), self._map_key(key))
        self._accessed()

    def clear(self) -> None:
        self._table.clear(self._slot())

    def is_empty(self) -> bool:
        """Say whether nothing is stored; expired entries count until something removes them."""
        return not self._table.all(self._slot())

    def items(self) -> list[tuple[K, V | None]]:
        """Return the entries."""
        slot = self._slot()
        user = self._user
        return [(sub, None if value is None else user(value)) for sub, value in self._entries(slot)]

    def keys(self) -> list[K]:
        """Return the keys."""
        return [sub for sub, _ in self._entries(self._slot())]

    def values(self) -> list[V | None]:
        """Return the values."""
        return [value for _, value in self.items()]

    def __getitem__(self, key: K) -> V | None:
        value = self._read(self._map_key(key))
        if value is ABSENT:
            raise KeyError(key)
        return None if value is None else self._user(value)

    def __setitem__(self, key: K, value: V | None) -> None:
        self.put(key, value)

    def __delitem__(self, key: K) -> None:
        sub = self._map_key(key)
        if self._read(sub) is ABSENT:
            raise KeyError(key)
        self._table.remove(self._slot(), sub)

    def __contains__(self, key: object) -> bool:
        return self.contains(key)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[K]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._entries(self._slot()))

    def __bool__(self) -> bool:
        # A state is there whether or not its map is empty; `if self.state:` asks for the state.
        return True

    def _map_key(self, key: Any) -> Any:
        if key is None:
            return None
        try:
            return self._canonical(key)
        except FlowError as error:
            raise StateTypeError(f"map key of state {self.name!r}: {error.message}") from None

    def _write(self, sub: Any, value: Any) -> None:
        unit = value if self._ttl is None else (value, self._ttl.stamp())
        self._table.put(self._slot(), sub, unit)

    def _read(self, sub: Any) -> Any:
        slot = self._slot()
        unit = self._table.get(slot, sub)
        if self._ttl is not None and unit is not ABSENT:
            unit = self._seen(slot, sub, unit, self._ttl, self._ttl.now())
        self._accessed()
        return unit

    def _entries(self, slot: Any) -> list[tuple[Any, Any]]:
        found = list(self._table.all(slot).items())
        if self._ttl is not None:
            now = self._ttl.now()
            seen = [(sub, self._seen(slot, sub, unit, self._ttl, now)) for sub, unit in found]
            found = [(sub, value) for sub, value in seen if value is not ABSENT]
        self._accessed()
        return found

    def _seen(self, slot: Any, sub: Any, unit: Any, ttl: Ttl, now: int) -> Any:
        """Return the value of an entry that is read, which may renew or remove it."""
        value, stamp = unit
        if ttl.is_expired(stamp, now):
            self._table.remove(slot, sub)
            return value if ttl.return_expired else ABSENT
        if ttl.renew_on_read:
            self._table.put(slot, sub, (value, ttl.stamp()))
        return value

    def _drop_expired(self, slot: Any) -> None:
        ttl = self._ttl
        if ttl is None:
            return
        now = ttl.now()
        for sub, (_, stamp) in list(self._table.all(slot).items()):
            if ttl.is_expired(stamp, now):
                self._table.remove(slot, sub)
