"""The descriptors of scripts: which state is meant, and how long it lives."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from typing import Any

from flowstate.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    StateTtlConfig,
    StateVisibility,
    UpdateType,
    ValueStateDescriptor,
)
from flowstate.functions import AggregateFunction
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.testing.conformance.literals import Literals
from flowstate.testing.conformance.trial import Json, VectorError

__all__ = ["described", "registered", "visibility_of"]

_INCREMENTALLY = re.compile(r"incremental_(\d+)")
# How many entries Flink's background clean-up looks at for each access, unless told otherwise.
_BACKGROUND_ENTRIES = 5


def visibility_of(descriptor: Mapping[str, Json]) -> StateVisibility:
    """Return whether expired values may be returned."""
    default = StateVisibility.NEVER_RETURN_EXPIRED.value
    return StateVisibility(descriptor.get("visibility", default))


class _Sum(AggregateFunction[Any, Any, str]):
    """What the aggregating states of the files do."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    def create_accumulator(self) -> Any:
        return self._zero

    def add(self, value: Any, accumulator: Any) -> Any:
        return accumulator + value

    def get_result(self, accumulator: Any) -> str:
        return f"sum={accumulator}"

    def merge(self, a: Any, b: Any) -> Any:
        return a + b


def described(name: str, descriptor: Mapping[str, Json]) -> StateDescriptor:
    """Return the library's descriptor of what a script describes."""
    literals = Literals(descriptor.get("element_type", "long"))
    kind, element, ttl = descriptor.get("type"), literals.arrow, _ttl(descriptor)
    match kind:
        case "value":
            return ValueStateDescriptor(name, element, descriptor.get("default"), ttl)
        case "list":
            return ListStateDescriptor(name, element, ttl)
        case "map":
            return MapStateDescriptor(name, Literals("string").arrow, element, ttl)
        case "reducing":
            return ReducingStateDescriptor(name, lambda a, b: a + b, element, ttl)
        case "aggregating":
            return AggregatingStateDescriptor(name, _Sum(literals.zero), element, ttl)
    raise VectorError(f"there is no state of type {kind!r}")


def registered(backend: KeyedStateBackend, descriptor: StateDescriptor) -> Any:
    """Ask a backend for the state that a descriptor describes."""
    match descriptor:
        case ValueStateDescriptor():
            return backend.get_state(descriptor)
        case ListStateDescriptor():
            return backend.get_list_state(descriptor)
        case MapStateDescriptor():
            return backend.get_map_state(descriptor)
        case ReducingStateDescriptor():
            return backend.get_reducing_state(descriptor)
        case AggregatingStateDescriptor():
            return backend.get_aggregating_state(descriptor)
    raise AssertionError(f"{descriptor!r} is of no kind")


def _ttl(descriptor: Mapping[str, Json]) -> StateTtlConfig | None:
    if "ttl_ms" not in descriptor:
        return None
    full, entries = _cleanup(descriptor.get("cleanup", "default"))
    return StateTtlConfig(
        ttl=dt.timedelta(milliseconds=descriptor["ttl_ms"]),
        update_type=UpdateType(descriptor.get("update_type", "OnCreateAndWrite")),
        visibility=visibility_of(descriptor),
        cleanup_in_full_snapshot=full,
        cleanup_incrementally=entries,
    )


def _cleanup(name: str) -> tuple[bool, int]:
    """Return whether full snapshots leave out what has expired, and the entries per access.

    ``default`` is Flink's default, which is not ours: its full snapshots keep what has expired.
    """
    if name == "default":
        return False, _BACKGROUND_ENTRIES
    if name == "none":
        return False, 0
    if name == "full_snapshot":
        return True, 0
    if (match := _INCREMENTALLY.fullmatch(name)) is not None:
        return False, int(match[1])
    raise VectorError(f"there is no clean-up {name!r}")
