"""Restores of one savepoint, of which each runs or is refused.

A case says in words what is tried: ``restore p=4 max=8``, ``restore p=9 max unset``, or, of a new
job, ``p=9 max=8``. The savepoint's own parallelisms are in the file's ``source``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from flowstate.checkpoint import CheckpointStorage
from flowstate.descriptors import ListStateDescriptor, ValueStateDescriptor
from flowstate.errors import FlowError, KeyGroupError, MaxParallelismError, RestoreError
from flowstate.operators import LocalOperator
from flowstate.testing.conformance.trial import (
    Json,
    Mismatch,
    Trial,
    VectorError,
    attempt,
    expect,
    field_of,
)

__all__ = ["case_id", "is_case", "replay"]

_KEYS = [f"key-{number}" for number in range(32)]
_VALUE = ValueStateDescriptor("value", int)
_LIST = ListStateDescriptor("elements", str)

_SAVEPOINT = re.compile(r"parallelism (\d+), max parallelism (\d+)")
_PARALLELISM = re.compile(r"(?<!max )\b(?:p|parallelism) *= *(\d+)")
_MAX_PARALLELISM = re.compile(r"\bmax(?: parallelism)? *= *(\d+)")
_OTHER_OPERATOR = re.compile(r"\buid\b|operator", re.IGNORECASE)
_IGNORED = re.compile(r"ignor|allow|unclaimed", re.IGNORECASE)
_MISMATCH = re.compile(r"with max parallelism (\d+) to new program with max parallelism (\d+)")

_CHAINING = (
    "each operator has a max parallelism of its own: where Flink refuses a restore only because "
    "another operator, with another max parallelism, sits in the same chained vertex, it runs here"
)


@dataclass(frozen=True, slots=True)
class _Savepoint:
    parallelism: int
    max_parallelism: int

    @classmethod
    def of_document(cls, document: Mapping[str, Json]) -> _Savepoint:
        match = _SAVEPOINT.search(str(document.get("source", "")))
        if match is None:
            raise VectorError(
                "'source' does not say 'savepoint taken with parallelism N, max parallelism M'"
            )
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class _Request:
    """What a case tries to start."""

    parallelism: int
    max_parallelism: int | None
    is_new: bool
    is_other_operator: bool
    ignores_unclaimed: bool

    @classmethod
    def of_text(cls, text: str, savepoint: _Savepoint) -> _Request:
        parallelism, maximum = _PARALLELISM.search(text), _MAX_PARALLELISM.search(text)
        return cls(
            parallelism=savepoint.parallelism if parallelism is None else int(parallelism[1]),
            max_parallelism=None if maximum is None else int(maximum[1]),
            is_new="restore" not in text,
            is_other_operator=_OTHER_OPERATOR.search(text) is not None,
            ignores_unclaimed=_IGNORED.search(text) is not None,
        )


def is_case(case: Mapping[str, Json]) -> bool:
    """Say whether a case is such a restore."""
    return {"case", "outcome"} <= set(case)


def case_id(case: Mapping[str, Json]) -> str:
    """Return what a case is called: it has no id, and each version of Flink has its own."""
    return " ".join(str(case[name]) for name in ("flink", "case") if name in case)


def replay(case: Mapping[str, Json], trial: Trial, document: Mapping[str, Json]) -> None:
    """Try what a case tries."""
    savepoint = _Savepoint.of_document(document)
    request = _Request.of_text(case["case"], savepoint)
    ids: list[str] = field_of(case, "restored_checkpoint_ids")
    checkpoint_id = int(ids[0]) if ids else 1
    root = _taken(savepoint, checkpoint_id, trial)
    actual = attempt(lambda: _started(request, root, trial))
    if case["outcome"] == "running":
        _check_running(actual, request, savepoint, ids)
    elif _is_of_another_operator(case, savepoint):
        _check_running(actual, request, savepoint, [str(checkpoint_id)])
        trial.differs(_CHAINING)
    elif str(case["outcome"]).startswith("rejected"):
        expect("restored checkpoint ids of what is refused", [], ids)
        _check_refused(actual, request)
    else:
        raise VectorError(f"the outcome {case['outcome']!r} is neither 'running' nor 'rejected'")


def _is_of_another_operator(case: Mapping[str, Json], savepoint: _Savepoint) -> bool:
    """Say whether the refusal names a max parallelism that the savepoint's operator never had."""
    match = _MISMATCH.search(case.get("root_cause", ""))
    return match is not None and int(match[1]) != savepoint.max_parallelism


def _taken(savepoint: _Savepoint, checkpoint_id: int, trial: Trial) -> str:
    """Take a savepoint with keyed and operator state in it, and return where it is."""
    root = trial.new_root()
    operator = trial.operator(
        root,
        parallelism=savepoint.parallelism,
        max_parallelism=savepoint.max_parallelism,
        key_type=pa.string(),
    )
    for number, key in enumerate(_KEYS):
        operator.subtask_of(key).keyed.get_state(_VALUE).update(number)
    for index, subtask in enumerate(operator.subtasks):
        subtask.operator.get_list_state(_LIST).update(_elements_of(index))
    record = msgspec.structs.replace(operator.checkpoint(), checkpoint_id=checkpoint_id)
    destination = trial.new_root()
    operator.storage.copy_to(record, CheckpointStorage(destination))
    return destination


def _started(request: _Request, savepoint: str, trial: Trial) -> LocalOperator:
    restore_from: str | None = savepoint
    if request.is_other_operator:
        # An operator's state is below its own id; under another id there is none.
        restore_from = None if request.ignores_unclaimed else f"{savepoint}-other"
    return trial.operator(
        trial.new_root(),
        parallelism=request.parallelism,
        max_parallelism=request.max_parallelism,
        key_type=pa.string(),
        restore_from=None if request.is_new else restore_from,
    )


def _check_running(actual: Any, request: _Request, savepoint: _Savepoint, ids: list[str]) -> None:
    if isinstance(actual, FlowError):
        raise Mismatch("outcome", "running", actual)
    operator: LocalOperator = actual
    found = {subtask.restored_checkpoint_id for subtask in operator.subtasks} - {None}
    expect("restored checkpoint ids", sorted(set(ids)), sorted(map(str, found)))
    if ids:
        _check_state(operator, savepoint)
    # What runs can take its next checkpoint.
    parallelism = operator.checkpoint().parallelism
    expect("parallelism of the next checkpoint", request.parallelism, parallelism)


def _check_state(operator: LocalOperator, savepoint: _Savepoint) -> None:
    values = [operator.subtask_of(key).keyed.get_state(_VALUE).value() for key in _KEYS]
    expect("the restored values", list(range(len(_KEYS))), values)
    lists = [subtask.operator.get_list_state(_LIST).get() for subtask in operator.subtasks]
    elements = sorted(element for part in lists for element in part)
    written = [_elements_of(index) for index in range(savepoint.parallelism)]
    expect("the restored elements", sorted(text for part in written for text in part), elements)


def _elements_of(index: int) -> list[str]:
    return [f"{index}-{number}" for number in range(3)]


def _check_refused(actual: Any, request: _Request) -> None:
    wanted: type[FlowError] = MaxParallelismError
    if request.is_new:
        wanted = KeyGroupError
    elif request.is_other_operator:
        wanted = RestoreError
    if not isinstance(actual, wanted):
        raise Mismatch(
            "outcome",
            f"refused with a {wanted.__name__}",
            "running" if not isinstance(actual, FlowError) else actual,
        )
