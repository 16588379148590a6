"""Cases of operator list state and broadcast state, whose operations are written in prose.

An operation is one or more statements, separated by ``;``; the last one's result counts. A
statement may name its state, ``getListState(l).update [1,2]``; without a name it is about the list
or the map of the case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flowstate.descriptors import ListStateDescriptor, MapStateDescriptor
from flowstate.errors import FlowError, StateRegistrationError
from flowstate.operator_state import BroadcastMap, OperatorList, OperatorStateBackend
from flowstate.operators import LocalOperator
from flowstate.testing.conformance.literals import Literals, split_op
from flowstate.testing.conformance.trial import (
    VOID,
    Json,
    Mismatch,
    Trial,
    VectorError,
    attempt,
    expect,
    expect_outcome,
    field_of,
    is_refusal,
    unordered,
)

__all__ = ["is_broadcast_function_case", "is_case", "replay"]

_LIST, _BROADCAST = "l", "m"
_LITERALS = Literals("long")

_NAMED = re.compile(r"get(List|UnionList|Broadcast)State\((\w+)\)(?:\.(.+)|( twice))?")
_SNAPSHOT_RESTORE = re.compile(r"snapshot(?: then |; *)restore")
_AFTER_RESTORES = re.compile(r"get after (\w+) restores?")
_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}
# Elements go to a function with a broadcast side: "element a|show", "broadcast put|r1|5".
_OF_BROADCAST_FUNCTION = re.compile(r"(element|broadcast) |.*\w\|\w|show\b")
_MAP_VERBS = {"put", "putAll", "contains", "remove", "entries", "keys", "values", "isEmpty"}

_ONE_NAME = (
    "a list and a broadcast state of one name are refused at registration: Flink accepts both and "
    "writes a snapshot that is silently corrupt"
)


def is_case(case: Mapping[str, Json]) -> bool:
    """Say whether a case is such a script."""
    steps = case.get("steps")
    return (
        isinstance(steps, list)
        and bool(steps)
        and all(isinstance(step, Mapping) and {"op", "result"} <= set(step) for step in steps)
    )


def is_broadcast_function_case(case: Mapping[str, Json]) -> bool:
    """Say whether a case is about a process function with a broadcast side."""
    ops = [str(step["op"]) for step in case["steps"]]
    named = str(case.get("id", "")).startswith("kbpf")
    # A key of a map may look as if it were an element: "put a|b 1".
    others = [op for op in ops if op.partition(" ")[0] not in {*_MAP_VERBS, "get"}]
    return named or any(_OF_BROADCAST_FUNCTION.match(op) for op in others)


def replay(case: Mapping[str, Json], trial: Trial) -> None:
    """Replay a script."""
    script = _Script(case, trial)
    for number, step in enumerate(field_of(case, "steps"), start=1):
        script.step(f"step {number}, {step['op']}", step["op"], step["result"])


class _Script:
    """One run of a script, in an operator with one subtask."""

    def __init__(self, case: Mapping[str, Json], trial: Trial) -> None:
        self._trial = trial
        self._root = trial.new_root()
        self._operator = self._open()
        ops = [statement for step in case["steps"] for statement in step["op"].split(";")]
        self._is_about_maps = any(map(_is_of_map, ops))
        self._refused_one_name = False

    @property
    def _backend(self) -> OperatorStateBackend:
        return self._operator.subtasks[0].operator

    def step(self, where: str, op: str, expected: Json) -> None:
        if (match := _AFTER_RESTORES.fullmatch(op)) is not None:
            self._check_carried(where, expected, _number(match[1]))
        elif _SNAPSHOT_RESTORE.fullmatch(op):
            self._check_restored(where, expected)
        elif op in {"handle", "state names in handle", "offsets"}:
            self._check_reported(where, op, expected)
        elif self._is_second_use_of_name(op) and not is_refusal(expected):
            self._check_one_name(where, op)
        else:
            self._check(where, op, expected)

    def _check(self, where: str, op: str, expected: Json) -> None:
        actual = attempt(lambda: self._run(op))
        if op.endswith(("entries", "keys", "values")) and isinstance(actual, list):
            expect(where, unordered(expected), unordered(actual))
        else:
            expect_outcome(where, expected, actual, refused_with=FlowError)

    # Statements.

    def _run(self, op: str) -> Any:
        result: Any = VOID
        for statement in op.split(";"):
            result = self._statement(statement.strip())
        return result

    def _statement(self, statement: str) -> Any:
        if statement == "snapshot":
            self._operator.checkpoint()
            return VOID
        if statement == "restore":
            self._restore()
            return VOID
        match = _NAMED.fullmatch(statement)
        if match is None:
            return self._on_default_state(statement)
        state = self._state(match[1], match[2])
        if match[4]:
            return state is self._state(match[1], match[2])
        return VOID if match[3] is None else _perform(state, match[3])

    def _on_default_state(self, statement: str) -> Any:
        kind = "Broadcast" if self._is_about_maps else "List"
        return _perform(self._state(kind, _BROADCAST if self._is_about_maps else _LIST), statement)

    def _state(self, kind: str, name: str) -> OperatorList[Any] | BroadcastMap[Any, Any]:
        backend = self._backend
        if kind == "List":
            return backend.get_list_state(ListStateDescriptor(name, int))
        if kind == "UnionList":
            return backend.get_union_list_state(ListStateDescriptor(name, int))
        return backend.get_broadcast_state(MapStateDescriptor(name, str, int))

    # A list and a map of one name.

    def _is_second_use_of_name(self, op: str) -> bool:
        match = _NAMED.fullmatch(op)
        if match is None or match[2] not in self._backend.registered_names:
            return False
        was_map = bool(self._backend.metas[match[2]]["kind"] == "map")
        return was_map != (match[1] == "Broadcast")

    def _check_one_name(self, where: str, op: str) -> None:
        actual = attempt(lambda: self._run(op))
        if not isinstance(actual, StateRegistrationError):
            raise Mismatch(where, "a StateRegistrationError", actual)
        self._refused_one_name = True
        self._trial.differs(_ONE_NAME)

    # Checkpoints.

    def _open(self) -> LocalOperator:
        return self._trial.operator(self._root, parallelism=1)

    def _restore(self) -> None:
        self._operator.close()
        self._operator = self._open()

    def _contents(self) -> dict[str, list[Any]]:
        """Return what all lists hold, and the entries of all maps."""
        found: dict[str, list[Any]] = {"list": [], "broadcast": []}
        for name, meta in self._backend.metas.items():
            if meta["kind"] == "map":
                found["broadcast"] += map(list, _as_map(self._state("Broadcast", name)).items())
            else:
                kind = "UnionList" if meta["mode"] == "union" else "List"
                found["list"] += _as_list(self._state(kind, name)).get()
        return found

    def _check_restored(self, where: str, expected: Json) -> None:
        before = self._contents()
        self._operator.checkpoint()
        self._restore()
        after = self._contents()
        expect(f"{where}, what was there before", before, after)
        # Where one name was to be two states, Flink's snapshot is corrupt and says nothing.
        if not self._refused_one_name:
            expect(where, expected, after)

    def _check_carried(self, where: str, expected: list[Json], restores: int) -> None:
        """Check that a list outlives restores that do not ask for it."""
        _as_list(self._state("List", _LIST)).update(expected)
        for _ in range(restores):
            self._operator.checkpoint()
            self._restore()
            expect(f"{where}, states asked for", [], self._backend.registered_names)
        expect(where, expected, list(_as_list(self._state("List", _LIST)).get()))

    def _check_reported(self, where: str, op: str, expected: Json) -> None:
        """Check what the subtask reports to the checkpoint."""
        if op == "state names in handle" and not self._backend.registered_names:
            for name in expected:
                self._state("List", name)
        reported = self._operator.checkpoint().subtasks[0].operator
        if op == "handle":
            none_expected = expected is None or str(expected).startswith("null")
            expect(f"{where}, nothing reported", none_expected, not reported)
            return
        if not reported:
            raise Mismatch(where, expected, "no state reported")
        states = {name: meta.count for handle in reported for name, meta in handle.states.items()}
        if op == "offsets":
            expect(where, expected, sum(states.values()))
        else:
            expect(where, unordered(expected), unordered(states))


def _is_of_map(statement: str) -> bool:
    verb, rest = split_op(statement or "-")
    return verb in _MAP_VERBS or (verb == "get" and bool(rest) and not rest.startswith("after"))


def _number(word: str) -> int:
    if word.isdigit():
        return int(word)
    if word not in _NUMBERS:
        raise VectorError(f"{word!r} is not a number of restores")
    return _NUMBERS[word]


def _as_list(state: OperatorList[Any] | BroadcastMap[Any, Any]) -> OperatorList[Any]:
    if not isinstance(state, OperatorList):
        raise AssertionError("a list was asked for")
    return state


def _as_map(state: OperatorList[Any] | BroadcastMap[Any, Any]) -> BroadcastMap[Any, Any]:
    if not isinstance(state, BroadcastMap):
        raise AssertionError("a map was asked for")
    return state


def _perform(state: OperatorList[Any] | BroadcastMap[Any, Any], op: str) -> Any:
    verb, rest = split_op(op)
    if verb == "clear":
        state.clear()
        return VOID
    if isinstance(state, OperatorList):
        return _on_list(state, verb, rest)
    return _on_map(state, verb, rest)


def _on_list(state: OperatorList[Any], verb: str, rest: str) -> Any:
    match verb:
        case "get":
            return list(state.get())
        case "returns_null_when_empty":
            return state.get() is None
        case "add":
            state.add(_LITERALS.value(rest))
        case "addAll":
            state.add_all(_LITERALS.values(rest))  # type: ignore[arg-type]
        case "update":
            state.update(_LITERALS.values(rest))  # type: ignore[arg-type]
        case _:
            raise VectorError(f"operator list state has no operation {verb!r}")
    return VOID


def _on_map(state: BroadcastMap[Any, Any], verb: str, rest: str) -> Any:
    key = _LITERALS.map_key(rest)
    match verb:
        case "get":
            return state.get(key)
        case "contains":
            return state.contains(key)
        case "entries":
            return [list(entry) for entry in state.items()]
        case "keys":
            return state.keys()
        case "values":
            return state.values()
        case "isEmpty":
            return not len(state)
        case "remove":
            state.remove(key)
        case "put":
            key_text, _, value = rest.partition(" ")
            state.put(_LITERALS.map_key(key_text), _LITERALS.value(value.strip()))
        case "putAll":
            state.put_all(_LITERALS.entries(rest))  # type: ignore[arg-type]
        case _:
            raise VectorError(f"broadcast state has no operation {verb!r}")
    return VOID
