"""The operations of keyed states, as scripts write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowstate.testing.conformance.literals import Literals
from flowstate.testing.conformance.trial import VOID, VectorError, unordered

__all__ = ["perform", "reading"]

Operation = Callable[[Any, str, Literals], Any]


def perform(kind: str, state: Any, verb: str, rest: str, literals: Literals) -> Any:
    """Do to a state what an operation says, and return what it returns."""
    operations = _OPERATIONS.get(kind, {})
    operation = _CLEAR if verb == "clear" else operations.get(verb)
    if operation is None:
        known = ", ".join(sorted([*operations, "clear"]))
        raise VectorError(f"a {kind} state has no operation {verb!r}; it has {known}")
    return operation(state, rest, literals)


def reading(kind: str, state: Any) -> str:
    """Return what a state holds for the current key, in Java's words and without spaces."""
    if kind == "value":
        return _in_java(state.value())
    if kind == "map":
        return _in_java(dict(unordered(state.items())))
    return _in_java(state.get())


def _in_java(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_in_java, value))}]"
    if isinstance(value, dict):
        entries = (f"{_in_java(key)}={_in_java(one)}" for key, one in value.items())
        return f"{{{','.join(entries)}}}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value).replace(" ", "")


def _doing(call: Callable[[Any, str, Literals], None]) -> Operation:
    """Return an operation that has no result."""

    def operation(state: Any, rest: str, literals: Literals) -> Any:
        call(state, rest, literals)
        return VOID

    return operation


def _put(state: Any, rest: str, literals: Literals) -> None:
    key, space, value = rest.partition(" ")
    if not space:
        raise VectorError(f"put needs a key and a value, not {rest!r}")
    state.put(literals.map_key(key), literals.value(value.strip()))


def _set_entries(state: Any, rest: str, literals: Literals) -> None:
    # Flink's entries have a setValue; here a map may be written to while it is iterated.
    for key in state:
        state[key] = literals.value(rest)


def _remove_entries(state: Any, rest: str, literals: Literals) -> None:
    # Flink's iterators have a remove; here entries may be removed while the map is iterated.
    for key in state:
        if not rest or key == literals.map_key(rest):
            state.remove(key)


_CLEAR = _doing(lambda state, _rest, _literals: state.clear())

_REDUCTION: dict[str, Operation] = {
    "get": lambda state, _rest, _literals: state.get(),
    "add": _doing(lambda state, rest, literals: state.add(literals.value(rest))),
}

_OPERATIONS: dict[str, dict[str, Operation]] = {
    "value": {
        "value": lambda state, _rest, _literals: state.value(),
        "update": _doing(lambda state, rest, literals: state.update(literals.value(rest))),
    },
    "list": {
        "get": lambda state, _rest, _literals: state.get(),
        "add": _doing(lambda state, rest, literals: state.add(literals.value(rest))),
        "addAll": _doing(lambda state, rest, literals: state.add_all(literals.values(rest))),
        "update": _doing(lambda state, rest, literals: state.update(literals.values(rest))),
    },
    "map": {
        "get": lambda state, rest, literals: state.get(literals.map_key(rest)),
        "contains": lambda state, rest, literals: state.contains(literals.map_key(rest)),
        "put": _doing(_put),
        "putAll": _doing(lambda state, rest, literals: state.put_all(literals.entries(rest))),
        "remove": _doing(lambda state, rest, literals: state.remove(literals.map_key(rest))),
        "isEmpty": lambda state, _rest, _literals: state.is_empty(),
        "entries": lambda state, _rest, _literals: [list(entry) for entry in state.items()],
        "keys": lambda state, _rest, _literals: state.keys(),
        "values": lambda state, _rest, _literals: state.values(),
        "set_entries": _doing(_set_entries),
        "remove_entries": _doing(_remove_entries),
    },
    "reducing": _REDUCTION,
    "aggregating": _REDUCTION,
}
