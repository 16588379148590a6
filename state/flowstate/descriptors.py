"""State descriptors: the name, the kind and the type of a state, and how long it lives."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from flowstate.aggregates import Aggregate, Reducer, aggregate_of
from flowstate.errors import StateDescriptorError, StateMigrationError, StateTypeError
from flowstate.functions import AggregateFunction, ReduceFunction
from flowstate.keys import KeyType
from flowstate.rows import RESERVED_PREFIX, StateKind
from flowstate.types import ValueType, check_migration, value_type

__all__ = [
    "AggregatingStateDescriptor",
    "ListStateDescriptor",
    "MapStateDescriptor",
    "ReducingStateDescriptor",
    "StateDescriptor",
    "StateTtlConfig",
    "StateVisibility",
    "TtlTime",
    "UpdateType",
    "ValueStateDescriptor",
]

_NAME_LENGTH_MAX = 255


class UpdateType(StrEnum):
    """What renews the life of a unit of state."""

    DISABLED = "Disabled"
    ON_CREATE_AND_WRITE = "OnCreateAndWrite"
    ON_READ_AND_WRITE = "OnReadAndWrite"


class StateVisibility(StrEnum):
    """Whether what has expired may still be seen once, if nothing has removed it yet."""

    NEVER_RETURN_EXPIRED = "NeverReturnExpired"
    RETURN_EXPIRED_IF_NOT_CLEANED_UP = "ReturnExpiredIfNotCleanedUp"


class TtlTime(StrEnum):
    """Which time a TTL is measured in.

    Under event time a unit is stamped with its element's timestamp (with the watermark where the
    element has none), and expires when the watermark passes its end.
    """

    PROCESSING_TIME = "processing"
    EVENT_TIME = "event"


_TTL_CHOICES: Mapping[str, type[StrEnum]] = {
    "update_type": UpdateType,
    "visibility": StateVisibility,
    "time": TtlTime,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTtlConfig:
    """How long state lives: a value, each list element, each map entry, the accumulator.

    A unit written at t is gone at t + ttl. The configuration belongs to the program, not to the
    checkpoint: restoring with a longer TTL revives what has not been cleaned up yet.
    """

    ttl: dt.timedelta
    update_type: UpdateType = UpdateType.ON_CREATE_AND_WRITE
    visibility: StateVisibility = StateVisibility.NEVER_RETURN_EXPIRED
    time: TtlTime = TtlTime.PROCESSING_TIME
    cleanup_in_full_snapshot: bool = True
    """Leave expired units out of full snapshots; the live state stays as it is."""
    cleanup_incrementally: int = 5
    """How many entries to look at for each access to the state; 0 switches it off."""

    def __post_init__(self) -> None:
        if not isinstance(self.ttl, dt.timedelta):
            raise StateDescriptorError(f"ttl must be a timedelta, not {self.ttl!r}")
        if self.ttl_ms <= 0:
            raise StateDescriptorError(
                f"TTL is expected to be positive. It is {self.ttl}, and a millisecond is the least"
            )
        for name, choices in _TTL_CHOICES.items():
            # A bare text is equal to its choice, but code asks for the choice itself.
            if not isinstance(getattr(self, name), choices):
                raise StateDescriptorError(
                    f"{name} must be a {choices.__name__}, not {getattr(self, name)!r}"
                )
        if type(self.cleanup_incrementally) is not int or self.cleanup_incrementally < 0:
            raise StateDescriptorError(
                f"cleanup_incrementally must be an int of at least 0, "
                f"not {self.cleanup_incrementally!r}"
            )

    @property
    def ttl_ms(self) -> int:
        """The time to live in whole milliseconds."""
        return self.ttl // dt.timedelta(milliseconds=1)

    def to_json(self) -> dict[str, Any]:
        """Return what clean-up needs to know where the program is not at hand."""
        return {
            "ttl_ms": self.ttl_ms,
            "ttl_time": self.time.value,
            "ttl_cleanup": self.cleanup_in_full_snapshot,
        }


@dataclass(frozen=True, slots=True)
class StateDescriptor:
    """What all kinds of state have: a name, and maybe a TTL."""

    kind: ClassVar[StateKind]
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise StateDescriptorError(f"a state needs a name, not {self.name!r}")
        if len(self.name) > _NAME_LENGTH_MAX:
            raise StateDescriptorError(
                f"a state's name has at most {_NAME_LENGTH_MAX} characters, not {len(self.name)}"
            )
        if self.name.startswith(RESERVED_PREFIX):
            raise StateDescriptorError(
                f"the state name {self.name!r} is reserved: names that begin with "
                f"{RESERVED_PREFIX!r} are the library's own"
            )
        try:
            self.name.encode()
        except UnicodeEncodeError as error:
            raise StateDescriptorError(
                f"the state name {self.name!r} is not valid Unicode: {error.reason}"
            ) from error
        ttl = getattr(self, "ttl", None)
        if ttl is not None and not isinstance(ttl, StateTtlConfig):
            raise StateDescriptorError(
                f"state {self.name!r}: ttl must be a StateTtlConfig, not {ttl!r}"
            )

    @property
    def live_ttl(self) -> StateTtlConfig | None:
        """The TTL, unless there is none or it is disabled."""
        ttl: StateTtlConfig | None = getattr(self, "ttl", None)
        return None if ttl is None or ttl.update_type is UpdateType.DISABLED else ttl

    @property
    def types(self) -> Mapping[str, ValueType]:
        """The types that a record keeps, by their role."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return what a record keeps of the descriptor."""
        meta: dict[str, Any] = {"kind": self.kind.value}
        meta.update({role: kind.to_json() for role, kind in self.types.items()})
        if (ttl := self.live_ttl) is not None:
            meta.update(ttl.to_json())
        return meta

    def check_restored(self, old: Mapping[str, Any]) -> None:
        """Refuse state that was written as another kind, or as a type that does not fit."""
        if old["kind"] != self.kind.value:
            raise StateMigrationError(
                f"state {self.name!r}: Incompatible key/value state types. Was "
                f"[{old['kind'].upper()}], registered with [{self.kind.value.upper()}]. Use "
                f"another name for the new state"
            )
        for role, kind in self.types.items():
            check_migration(old[role], kind, f"state {self.name!r} {role}")
        if "map_key" in self.types and old["map_key"] != self.types["map_key"].to_json():
            raise StateMigrationError(
                f"state {self.name!r}: a map's own keys cannot change their type. Use a new name"
            )

    def is_same(self, other: StateDescriptor) -> bool:
        """Say whether both describe the same state: kind, name and types."""
        return self.kind is other.kind and self.name == other.name and self.types == other.types


def _set_types(descriptor: StateDescriptor, **specs: Any) -> None:
    for name, spec in specs.items():
        object.__setattr__(descriptor, name, value_type(spec))


@dataclass(frozen=True, slots=True)
class ValueStateDescriptor(StateDescriptor):
    """One value per key. With a TTL the default is ignored, as in Flink."""

    kind: ClassVar[StateKind] = StateKind.VALUE
    value_type: Any
    default: Any = None
    ttl: StateTtlConfig | None = None

    def __post_init__(self) -> None:
        StateDescriptor.__post_init__(self)
        _set_types(self, value_type=self.value_type)
        if self.default is None:
            return
        try:
            self.value_type.to_physical(self.default)
        except StateTypeError as error:
            raise StateTypeError(f"state {self.name!r}: the default: {error.message}") from None

    @property
    def types(self) -> Mapping[str, ValueType]:
        return {"value": self.value_type}


@dataclass(frozen=True, slots=True)
class ListStateDescriptor(StateDescriptor):
    """A list per key; as operator state, a list that is redistributed."""

    kind: ClassVar[StateKind] = StateKind.LIST
    element_type: Any
    ttl: StateTtlConfig | None = None

    def __post_init__(self) -> None:
        StateDescriptor.__post_init__(self)
        _set_types(self, element_type=self.element_type)

    @property
    def types(self) -> Mapping[str, ValueType]:
        return {"value": self.element_type}


@dataclass(frozen=True, slots=True)
class MapStateDescriptor(StateDescriptor):
    """A map per key; as operator state, a broadcast map."""

    kind: ClassVar[StateKind] = StateKind.MAP
    key_type: Any
    value_type: Any
    ttl: StateTtlConfig | None = None

    def __post_init__(self) -> None:
        StateDescriptor.__post_init__(self)
        _set_types(self, key_type=self.key_type, value_type=self.value_type)
        if self.key_type.serializer is not None:
            raise StateDescriptorError(
                f"state {self.name!r}: a map's own keys cannot have a serializer, because equal "
                f"keys need not have equal bytes. Use a scalar type, or a tuple of scalar types"
            )
        KeyType(self.key_type.arrow)

    @property
    def types(self) -> Mapping[str, ValueType]:
        return {"map_key": self.key_type, "value": self.value_type}


def _builtin(reducer: Reducer, kind: ValueType) -> Aggregate:
    if kind.serializer is not None and reducer is not Reducer.COUNT:
        raise StateDescriptorError(
            f"{reducer.value} is not defined for {kind}: the library sees only its bytes. Give a "
            f"function of your own"
        )
    return aggregate_of(reducer, kind.arrow)


@dataclass(frozen=True, slots=True)
class ReducingStateDescriptor(StateDescriptor):
    """One value per key, into which each added value is reduced.

    ``reduce`` is a function of two values, a :class:`ReduceFunction`, or one of the built-in
    ``Reducer.SUM``, ``MIN`` and ``MAX``, which also run over whole columns.
    """

    kind: ClassVar[StateKind] = StateKind.REDUCING
    reduce: ReduceFunction[Any] | Callable[[Any, Any], Any] | Reducer
    value_type: Any
    ttl: StateTtlConfig | None = None
    builtin: Aggregate | None = field(init=False, default=None, compare=False)

    def __post_init__(self) -> None:
        StateDescriptor.__post_init__(self)
        _set_types(self, value_type=self.value_type)
        if isinstance(self.reduce, Reducer):
            if self.reduce in {Reducer.COUNT, Reducer.MEAN}:
                raise StateDescriptorError(
                    f"{self.reduce.value} does not reduce values to a value of their type: use an "
                    f"AggregatingStateDescriptor"
                )
            builtin = _builtin(self.reduce, self.value_type)
            object.__setattr__(self, "builtin", builtin)
        elif isinstance(self.reduce, type) and issubclass(self.reduce, ReduceFunction):
            raise StateDescriptorError(
                f"{self.reduce!r} is a class: give {self.reduce.__name__}(...)"
            )
        elif not isinstance(self.reduce, ReduceFunction) and not callable(self.reduce):
            raise StateDescriptorError(
                f"{self.reduce!r} is neither a function of two values, nor a ReduceFunction, nor "
                f"a Reducer"
            )

    @property
    def types(self) -> Mapping[str, ValueType]:
        return {"value": self.value_type}

    @property
    def function(self) -> Callable[[Any, Any], Any]:
        """The reduction of two values."""
        if self.builtin is not None:
            return self.builtin.merge
        # Not whatever has a method of that name: that of numpy's functions does something else.
        function: Any = self.reduce
        reduces: Callable[[Any, Any], Any] = (
            function.reduce if isinstance(function, ReduceFunction) else function
        )
        return reduces


@dataclass(frozen=True, slots=True)
class AggregatingStateDescriptor(StateDescriptor):
    """An accumulator per key, to which values are added and from which a result is taken.

    ``aggregate`` is an :class:`AggregateFunction`, with the type of its accumulator, or one of the
    built-in reducers, with the type of the added values.
    """

    kind: ClassVar[StateKind] = StateKind.AGGREGATING
    aggregate: AggregateFunction[Any, Any, Any] | Reducer
    accumulator_type: Any
    ttl: StateTtlConfig | None = None
    builtin: Aggregate | None = field(init=False, default=None, compare=False)
    input_type: ValueType | None = field(init=False, default=None, compare=False)

    def __post_init__(self) -> None:
        StateDescriptor.__post_init__(self)
        _set_types(self, accumulator_type=self.accumulator_type)
        if isinstance(self.aggregate, Reducer):
            builtin = _builtin(self.aggregate, self.accumulator_type)
            object.__setattr__(self, "builtin", builtin)
            object.__setattr__(self, "input_type", self.accumulator_type)
            _set_types(self, accumulator_type=builtin.accumulator_type)
        elif not isinstance(self.aggregate, AggregateFunction):
            raise StateDescriptorError(
                f"{self.aggregate!r} is neither an AggregateFunction nor a Reducer"
            )

    @property
    def types(self) -> Mapping[str, ValueType]:
        return {"value": self.accumulator_type}
