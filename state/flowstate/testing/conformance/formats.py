"""The formats of vector files, and which of them a file is of.

A file is recognised by what is in it, case by case. Its name does not matter.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flowstate.testing.conformance import (
    buffering_traces,
    key_group_tables,
    keyed_states,
    operator_states,
    redistributions,
    restore_outcomes,
    timers,
)
from flowstate.testing.conformance.trial import Json, Trial, shown

__all__ = ["FORMATS", "Case", "UnknownFormatError", "read_cases"]


@dataclass(frozen=True, slots=True)
class Case:
    """Something to replay, or the reason why it is not."""

    id: str
    replay: Callable[[Trial], None]
    skipped: str | None = None


class UnknownFormatError(Exception):
    """A file that cannot be replayed: it cannot be read, or it is of no known format."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        known = "".join(f"\n    {name}: {shape}" for name, shape in FORMATS.items())
        return f"{self.path.name}: {self.why}. The known formats are:{known}"


FORMATS = {
    "key groups": "a table 'murmurHash', 'keys', 'ranges', 'default_max_parallelism' or 'errors'",
    "buffering trace": "'threshold', 'parallelism' and 'events'",
    "keyed state": "'cases' with 'descriptor' and 'steps'",
    "redistribution": "'cases' with 'states', 'old_parallelism', 'new_parallelism', 'expected'",
    "timers": "'cases' with 'on_timer_actions' and 'steps'",
    "operator and broadcast state": "'cases' with 'steps' of 'op' and 'result'",
    "restore outcomes": "'cases' with 'case' and 'outcome'",
    "windows": "'cases' with 'config' and 'steps' (skipped)",
    "restart strategies": "'cases' with 'strategy' and 'steps' (skipped)",
}


def read_cases(path: Path) -> list[Case]:
    """Read a file's cases, or refuse the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnknownFormatError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnknownFormatError(path, f"is not JSON: {error}") from error
    if not isinstance(document, Mapping):
        raise UnknownFormatError(path, "has no object at its top")
    cases = _cases_of(path, document)
    if not cases:
        raise UnknownFormatError(path, "has no cases")
    return _told_apart(cases)


def _told_apart(cases: list[Case]) -> list[Case]:
    """Number the cases that share an id, so that none of them hides another."""
    seen: Counter[str] = Counter()
    apart = []
    for case in cases:
        seen[case.id] += 1
        again = f" ({seen[case.id]})" if seen[case.id] > 1 else ""
        apart.append(replace(case, id=f"{case.id}{again}"))
    return apart


def _cases_of(path: Path, document: Mapping[str, Json]) -> list[Case]:
    if key_group_tables.is_document(document):
        return [
            Case(
                key_group_tables.case_id(section, entry),
                partial(key_group_tables.replay, section, entry),
            )
            for section in key_group_tables.SECTIONS
            for entry in document.get(section, [])
        ]
    if buffering_traces.is_document(document):
        return [
            Case(part, partial(buffering_traces.replay, part, document))
            for part in buffering_traces.parts_of(document)
        ]
    if not isinstance(document.get("cases"), list):
        raise UnknownFormatError(path, f"has only {shown(sorted(document))}")
    return [_case(path, document, number, case) for number, case in enumerate(document["cases"], 1)]


def _case(path: Path, document: Mapping[str, Json], number: int, case: Json) -> Case:
    if not isinstance(case, Mapping):
        raise UnknownFormatError(path, f"case {number} is {shown(case)}")
    case_id = str(case.get("id", f"case {number}"))
    if case.get("implementation_detail") is True:
        return Case(case_id, _not_replayed, skipped="implementation detail")
    if keyed_states.is_case(case):
        return Case(case_id, partial(keyed_states.replay, case))
    if redistributions.is_case(case):
        return Case(case_id, partial(redistributions.replay, case))
    if restore_outcomes.is_case(case):
        replay = partial(restore_outcomes.replay, case, document=document)
        return Case(restore_outcomes.case_id(case), replay)
    if "strategy" in case:
        return Case(f"{case['strategy']} {number}", _not_replayed, skipped="restart strategy")
    if isinstance(case.get("config"), Mapping) and "steps" in case:
        return Case(case_id, _not_replayed, skipped="windows")
    if timers.is_case(case):
        return Case(case_id, partial(timers.replay, case))
    if operator_states.is_case(case):
        if operator_states.is_broadcast_function_case(case):
            return Case(case_id, _not_replayed, skipped="broadcast process function")
        return Case(case_id, partial(operator_states.replay, case))
    raise UnknownFormatError(path, f"case {number} ({case_id}) has only {shown(sorted(case))}")


def _not_replayed(_trial: Trial) -> None:
    raise AssertionError("a case that is skipped is not replayed")
