"""Operator state: lists and broadcast maps that belong to a subtask and not to a key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast, overload

import pyarrow as pa

from flowstate.descriptors import ListStateDescriptor, MapStateDescriptor, StateDescriptor
from flowstate.errors import (
    SerializerError,
    StateMigrationError,
    StateRegistrationError,
    StateTypeError,
)
from flowstate.keys import KeyType, physical_column
from flowstate.redistribution import Redistribution

__all__ = [
    "BroadcastMap",
    "OperatorList",
    "OperatorSnapshot",
    "OperatorStateBackend",
    "ReadOnlyBroadcastMap",
]

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

_MODE_NAMES = {
    Redistribution.EVEN_SPLIT: "SPLIT_DISTRIBUTE",
    Redistribution.UNION: "UNION",
    Redistribution.BROADCAST: "BROADCAST",
}
_DESCRIPTORS: Mapping[Redistribution, type[StateDescriptor]] = {
    Redistribution.EVEN_SPLIT: ListStateDescriptor,
    Redistribution.UNION: ListStateDescriptor,
    Redistribution.BROADCAST: MapStateDescriptor,
}


@dataclass(frozen=True, slots=True)
class OperatorSnapshot:
    """The elements of one state of one subtask; the entries of a map are key-value structs."""

    name: str
    mode: Redistribution
    elements: pa.Array


class _LiveList(Sequence[T]):
    """What ``get()`` returns: it shows what is added later, too."""

    def __init__(self, units: list[Any], user: Callable[[Any], Any] | None) -> None:
        self._units, self._user = units, user

    def __len__(self) -> int:
        return len(self._units)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._shown(unit) for unit in self._units[index]]
        return self._shown(self._units[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _shown(self, unit: Any) -> T:
        return cast(T, unit if self._user is None else self._user(unit))


class OperatorList(Generic[T]):
    """A subtask's part of a list that is redistributed when the parallelism changes."""

    def __init__(self, descriptor: ListStateDescriptor) -> None:
        self._name = descriptor.name
        self._type = descriptor.element_type
        self._units: list[Any] = []

    def get(self) -> Sequence[T]:
        """Return the elements; what is added later is seen through it."""
        return _LiveList(self._units, self._type.to_user)

    def add(self, value: T) -> None:
        """Add an element at the end."""
        self._units.append(self._checked(value, "You cannot add null to a ListState."))

    def add_all(self, values: Iterable[T]) -> None:
        """Add elements at the end. If one is refused, those before it are added, as in Flink."""
        if values is None:
            raise self._refused("List of values to add cannot be null.")
        # A copy, because the values may be this list's own live view.
        for index, value in enumerate(list(values)):
            null_message = "Any value to add to a list cannot be null."
            self._units.append(self._checked(value, null_message, f"element {index}: "))

    def update(self, values: Iterable[T]) -> None:
        """Have these elements and no others. If one is refused, the old ones are gone, as in Flink.

        The error fails the batch, which then starts again from the checkpoint.
        """
        values = list(values) if values is not None else None
        self.clear()
        self.add_all(values)

    def clear(self) -> None:
        """Have no elements."""
        self._units.clear()

    def load(self, elements: pa.Array) -> None:
        """Take restored elements."""
        self._units.extend(physical_column(elements.cast(self._type.arrow)))

    def elements(self) -> pa.Array:
        """Return the elements as a column."""
        return pa.array(self._units, self._type.arrow)

    def _checked(self, value: Any, null_message: str, where: str = "") -> Any:
        if value is None:
            raise self._refused(where + null_message)
        try:
            return self._type.to_physical(value)
        except (StateTypeError, SerializerError) as error:
            message = f"operator state {self._name!r}: {where}{error.message}"
            raise type(error)(message) from error.__cause__

    def _refused(self, message: str) -> StateTypeError:
        return StateTypeError(f"operator state {self._name!r}: {message}")


class ReadOnlyBroadcastMap(Generic[K, V]):
    """A broadcast map as keyed code sees it: there is no way to change it."""

    def __init__(self, descriptor: MapStateDescriptor) -> None:
        self._name = descriptor.name
        self._key = KeyType(descriptor.key_type.arrow)
        self._type = descriptor.value_type
        self._units: dict[Any, Any] = {}

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None where there is none."""
        return self._shown(self._units.get(self._map_key(key)))

    def contains(self, key: K) -> bool:
        """Say whether a key is there, be its value None or not."""
        return self._map_key(key) in self._units

    def items(self) -> list[tuple[K, V | None]]:
        """Return all keys with their values."""
        return [(key, self._shown(unit)) for key, unit in self._units.items()]

    def keys(self) -> list[K]:
        """Return all keys."""
        return list(self._units)

    def values(self) -> list[V | None]:
        """Return all values."""
        return [self._shown(unit) for unit in self._units.values()]

    def __getitem__(self, key: K) -> V | None:
        return self._shown(self._units[self._map_key(key)])

    def __contains__(self, key: object) -> bool:
        return self.contains(key)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[K]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._units)

    def _shown(self, unit: Any) -> V | None:
        user = self._type.to_user
        return cast("V | None", unit if unit is None or user is None else user(unit))

    def _map_key(self, key: Any) -> Any:
        return None if key is None else self._key.canonical(key)


class BroadcastMap(ReadOnlyBroadcastMap[K, V]):
    """A map of which each subtask has a copy; equal only if all subtasks change it alike."""

    def put(self, key: K, value: V | None) -> None:
        """Set the value of a key; None is a value."""
        self._units[self._map_key(key)] = self._checked(value)

    def put_all(self, values: Mapping[K, V | None]) -> None:
        """Set the values of several keys: of all of them, or of none if one is refused."""
        if values is None:
            raise StateTypeError(
                f"broadcast state {self._name!r}: put_all() takes a mapping, not None"
            )
        checked = {self._map_key(key): self._checked(value) for key, value in values.items()}
        self._units.update(checked)

    def remove(self, key: K) -> None:
        """Forget a key; a missing one is no error."""
        self._units.pop(self._map_key(key), None)

    def clear(self) -> None:
        """Forget all keys."""
        self._units.clear()

    def __setitem__(self, key: K, value: V | None) -> None:
        self.put(key, value)

    def __delitem__(self, key: K) -> None:
        del self._units[self._map_key(key)]

    def read_only(self) -> ReadOnlyBroadcastMap[K, V]:
        """Return a view that shows this map and cannot change it."""
        view: ReadOnlyBroadcastMap[K, V] = ReadOnlyBroadcastMap.__new__(ReadOnlyBroadcastMap)
        view._name, view._key, view._type = self._name, self._key, self._type
        view._units = cast("dict[Any, Any]", MappingProxyType(self._units))
        return view

    def load(self, elements: pa.Array) -> None:
        """Take restored entries; of two copies of a key the later one stays."""
        keys = self._key.to_list(elements.field("key"))
        values = physical_column(elements.field("value").cast(self._type.arrow))
        self._units.update(zip(keys, values, strict=True))

    def elements(self) -> pa.Array:
        """Return the entries as a column of key-value structs."""
        keys = self._key.to_array(list(self._units))
        values = pa.array(list(self._units.values()), self._type.arrow)
        return pa.StructArray.from_arrays([keys, values], names=["key", "value"])

    def _checked(self, value: Any) -> Any:
        if value is None:
            return None
        try:
            return self._type.to_physical(value)
        except (StateTypeError, SerializerError) as error:
            message = f"broadcast state {self._name!r}: {error.message}"
            raise type(error)(message) from error.__cause__


class OperatorStateBackend:
    """The operator state of one subtask.

    A name is one state in one mode, be it a list or a map; Flink lets a list and a broadcast map
    share a name and then writes a snapshot that cannot be read. What was restored and is not asked
    for is carried into the next snapshot.
    """

    def __init__(
        self,
        *,
        restored: Mapping[str, pa.Array] | None = None,
        restored_metas: Mapping[str, Mapping[str, Any]] | None = None,
        carries_union: bool = True,
    ) -> None:
        """Take what was restored.

        Every subtask gets all of a union list, so of one that nobody asks for a single subtask
        must write the elements (``carries_union``), or they would multiply.
        """
        self._carries_union = carries_union
        self._restored = dict(restored or {})
        self._metas = {name: dict(meta) for name, meta in (restored_metas or {}).items()}
        self._states: dict[str, OperatorList[Any] | BroadcastMap[Any, Any]] = {}
        self._descriptors: dict[str, StateDescriptor] = {}

    def get_list_state(self, descriptor: ListStateDescriptor) -> OperatorList[Any]:
        """Return a list whose elements are split evenly when the parallelism changes."""
        state = self._register(descriptor, Redistribution.EVEN_SPLIT, OperatorList)
        return cast("OperatorList[Any]", state)

    def get_union_list_state(self, descriptor: ListStateDescriptor) -> OperatorList[Any]:
        """Return a list of which every restore gives each subtask the elements of all."""
        state = self._register(descriptor, Redistribution.UNION, OperatorList)
        return cast("OperatorList[Any]", state)

    def get_broadcast_state(self, descriptor: MapStateDescriptor) -> BroadcastMap[Any, Any]:
        """Return a map of which each subtask has a copy."""
        state = self._register(descriptor, Redistribution.BROADCAST, BroadcastMap)
        return cast("BroadcastMap[Any, Any]", state)

    @property
    def registered_names(self) -> list[str]:
        """The names that the program has asked for."""
        return sorted(self._states)

    @property
    def metas(self) -> dict[str, dict[str, Any]]:
        """What a record keeps of the states."""
        return {name: dict(meta) for name, meta in sorted(self._metas.items())}

    def snapshot(self) -> list[OperatorSnapshot]:
        """Return the elements of every state; also of empty ones, and of those not asked for."""
        columns = {name: state.elements() for name, state in self._states.items()}
        for name, elements in self._restored.items():
            union = self._metas[name]["mode"] == Redistribution.UNION.value
            columns[name] = elements[:0] if union and not self._carries_union else elements
        return [
            OperatorSnapshot(name, Redistribution(self._metas[name]["mode"]), columns[name])
            for name in sorted(columns)
        ]

    def _register(
        self, descriptor: StateDescriptor, mode: Redistribution, make: Callable[[Any], Any]
    ) -> OperatorList[Any] | BroadcastMap[Any, Any]:
        if not isinstance(descriptor, _DESCRIPTORS[mode]):
            raise StateRegistrationError(
                f"operator state of mode {_MODE_NAMES[mode]} needs a "
                f"{_DESCRIPTORS[mode].__name__}, not a {type(descriptor).__name__}"
            )
        if getattr(descriptor, "ttl", None) is not None:
            raise StateRegistrationError(f"operator state {descriptor.name!r} cannot have a TTL")
        name = descriptor.name
        old = self._metas.get(name)
        if name in self._descriptors and old is not None:
            self._check_same(descriptor, mode, old)
            return self._states[name]
        if old is not None:
            _check_mode(name, old, mode, StateMigrationError)
            descriptor.check_restored(old)
        state = make(descriptor)
        if name in self._restored:
            state.load(self._restored[name])
            del self._restored[name]
        self._states[name] = state
        self._descriptors[name] = descriptor
        self._metas[name] = {**descriptor.to_json(), "mode": mode.value}
        return self._states[name]

    def _check_same(
        self, descriptor: StateDescriptor, mode: Redistribution, old: Mapping[str, Any]
    ) -> None:
        _check_mode(descriptor.name, old, mode, StateRegistrationError)
        if not self._descriptors[descriptor.name].is_same(descriptor):
            raise StateRegistrationError(
                f"operator state {descriptor.name!r} is registered with another type already. "
                f"Give one of them another name"
            )


def _check_mode(
    name: str,
    old: Mapping[str, Any],
    mode: Redistribution,
    error: type[StateRegistrationError] | type[StateMigrationError],
) -> None:
    was = Redistribution(old["mode"])
    if was is not mode:
        raise error(
            f"operator state {name!r}: Incompatible state assignment modes. Was "
            f"[{_MODE_NAMES[was]}], registered with [{_MODE_NAMES[mode]}]. Ask for it as before, "
            f"or give the new state another name"
        )
