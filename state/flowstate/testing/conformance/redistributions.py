"""Cases of redistribution: the lists of old subtasks, and what the new ones get of them.

Each case is replayed twice: through the pure functions, and through a checkpoint that is taken at
the old parallelism and restored at the new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flowstate.descriptors import ListStateDescriptor, MapStateDescriptor
from flowstate.key_groups import default_max_parallelism
from flowstate.operator_state import OperatorStateBackend
from flowstate.redistribution import (
    Redistribution,
    Slices,
    StateCounts,
    gather,
    redistribute,
)
from flowstate.testing.conformance.trial import Json, Trial, VectorError, expect, field_of

__all__ = ["is_case", "replay"]

_MODES = {
    "SPLIT_DISTRIBUTE": Redistribution.EVEN_SPLIT,
    "UNION": Redistribution.UNION,
    "BROADCAST": Redistribution.BROADCAST,
}

_State = Mapping[str, Json]
_Lists = Sequence[Sequence[Json] | None]


def is_case(case: Mapping[str, Json]) -> bool:
    """Say whether a case is such a redistribution."""
    return {"states", "old_parallelism", "new_parallelism", "expected"} <= set(case)


def replay(case: Mapping[str, Json], trial: Trial) -> None:
    """Redistribute the lists of a case, in both ways."""
    states: list[_State] = case["states"]
    for state in states:
        if field_of(state, "mode") not in _MODES:
            raise VectorError(f"there is no mode {state['mode']!r}; there are {sorted(_MODES)}")
    expect("number of new subtasks", case["new_parallelism"], len(case["expected"]))
    _check_slices(case, states)
    _check_checkpoint(case, states, trial)


def _processing_order(case: Mapping[str, Json], states: Sequence[_State]) -> list[str]:
    split = [state["name"] for state in states if state["mode"] == "SPLIT_DISTRIBUTE"]
    order: list[str] = case.get("split_states_processing_order", sorted(split))
    return order


# Through the pure functions.


def _check_slices(case: Mapping[str, Json], states: Sequence[_State]) -> None:
    lists: dict[str, _Lists] = {state["name"]: field_of(state, "per_subtask") for state in states}
    shares = redistribute(
        {
            state["name"]: StateCounts(_MODES[state["mode"]], _counts(lists[state["name"]]))
            for state in states
        },
        old_parallelism=case["old_parallelism"],
        new_parallelism=case["new_parallelism"],
        order=_processing_order(case, states),
    )
    for index, (expected, share) in enumerate(zip(case["expected"], shares, strict=True)):
        found = {name: _described(slices, lists[name]) for name, slices in share.items()}
        expect(f"new subtask {index}, by redistribute()", expected, found)


def _counts(lists: _Lists) -> tuple[int | None, ...]:
    return tuple(None if elements is None else len(elements) for elements in lists)


def _described(slices: Slices, lists: _Lists) -> dict[str, Any]:
    by_old: dict[str, list[Json]] = {}
    for part in slices:
        by_old.setdefault(str(part.old_subtask), []).extend(gather([part], lists))
    return {"elements": gather(slices, lists), "by_old_subtask": by_old}


# Through a checkpoint.


def _check_checkpoint(case: Mapping[str, Json], states: Sequence[_State], trial: Trial) -> None:
    names = _names(case, states)
    max_parallelism = default_max_parallelism(max(case["old_parallelism"], case["new_parallelism"]))
    root = trial.new_root()
    old = trial.operator(root, parallelism=case["old_parallelism"], max_parallelism=max_parallelism)
    for index, subtask in enumerate(old.subtasks):
        for state in states:
            elements = state["per_subtask"][index]
            if elements is not None:
                _write(subtask.operator, names[state["name"]], state["mode"], elements)
    old.checkpoint()
    new = trial.operator(root, parallelism=case["new_parallelism"])
    for index, (expected, subtask) in enumerate(zip(case["expected"], new.subtasks, strict=True)):
        where = f"new subtask {index}, from a checkpoint"
        expect(f"{where}, is restored", True, subtask.is_restored)
        for state in states:
            name, mode = state["name"], state["mode"]
            wanted = field_of(field_of(expected, name), "elements")
            if mode == "BROADCAST":
                # Two copies that a subtask gets are put into one map.
                wanted = list(dict.fromkeys(map(json.dumps, wanted)))
                wanted = [json.loads(element) for element in wanted]
            found = _read(subtask.operator, names[name], mode)
            expect(f"{where}, state {name!r}", wanted, found)


def _names(case: Mapping[str, Json], states: Sequence[_State]) -> dict[str, str]:
    """Name the states so that they are dealt out in the order of the case.

    Flink deals split states out in the order of a hash map, we in the order of their names.
    """
    order = _processing_order(case, states)
    others = [state["name"] for state in states if state["name"] not in order]
    return {name: f"{index:04}-{name}" for index, name in enumerate((*order, *others))}


def _write(backend: OperatorStateBackend, name: str, mode: str, elements: Sequence[Json]) -> None:
    # Elements may be anything that JSON has, so its text stands for them.
    texts = [json.dumps(element) for element in elements]
    if mode == "BROADCAST":
        copy = backend.get_broadcast_state(MapStateDescriptor(name, str, str))
        copy.put_all({text: text for text in texts})
    else:
        _list(backend, name, mode).update(texts)


def _read(backend: OperatorStateBackend, name: str, mode: str) -> list[Json]:
    if mode == "BROADCAST":
        copy = backend.get_broadcast_state(MapStateDescriptor(name, str, str))
        return [json.loads(text) for text in copy.keys()]  # noqa: SIM118 - it is not a mapping
    return [json.loads(text) for text in _list(backend, name, mode).get()]


def _list(backend: OperatorStateBackend, name: str, mode: str) -> Any:
    descriptor = ListStateDescriptor(name, str)
    if mode == "UNION":
        return backend.get_union_list_state(descriptor)
    return backend.get_list_state(descriptor)
