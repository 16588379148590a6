"""``flow diff``: what has changed between two checkpoints."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from flowspark.command.arguments import add_limit, add_url
from flowspark.command.contract import Command, CommandError, ExitCode, Invocation
from flowspark.command.entries import (
    KeyedEntry,
    elements_of,
    entries_within,
    keyed_kinds,
    type_name,
)
from flowspark.command.locations import Location, only_operator
from flowspark.command.showing import record_of
from flowspark.command.terminal import Style, Terminal
from flowspark.command.words import count_of, moment, shown
from flowstate.checkpoint import CheckpointRecord, CheckpointStorage, StateMeta
from flowstate.key_groups import KeyGroupRange
from flowstate.redistribution import Redistribution
from flowstate.restoring import keyed_share
from flowstate.rows import StateKind
from flowstate.types import type_from_text

__all__ = ["COMMAND", "Change", "Difference", "StateDifference", "difference_of"]

_LIMIT = 5


@dataclass(frozen=True, slots=True)
class Change:
    """One entry or element that differs."""

    what: str
    """``added``, ``removed`` or ``changed``."""
    key: Any = None
    namespace: Any = None
    map_key: Any = None
    old: Any = None
    new: Any = None


@dataclass(frozen=True, slots=True)
class StateDifference:
    """What differs in one state."""

    state: str
    kind: str
    presence: str
    """``added``, ``removed`` or ``both``."""
    type_change: tuple[str, str] | None
    added: int
    removed: int
    changed: int
    examples: tuple[Change, ...]

    @property
    def is_any(self) -> bool:
        """Whether there is a difference at all."""
        counted = self.added + self.removed + self.changed
        return bool(counted or self.type_change) or self.presence != "both"


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between two checkpoints."""

    url_a: str
    checkpoint_a: int
    url_b: str
    checkpoint_b: int
    settings: Mapping[str, tuple[Any, Any]]
    """Parallelism and the like, where they differ."""
    states: tuple[StateDifference, ...]

    @property
    def is_any(self) -> bool:
        """Whether there is a difference at all."""
        return bool(self.settings) or any(state.is_any for state in self.states)


@dataclass(frozen=True, slots=True)
class _Side:
    storage: CheckpointStorage
    record: CheckpointRecord


class _Tally:
    """Counts differences, and keeps the first few."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.counts: Counter[str] = Counter()
        self.examples: list[Change] = []

    def add(self, change: Change, times: int = 1) -> None:
        self.counts[change.what] += times
        if self._limit == 0 or len(self.examples) < self._limit:
            self.examples.append(change)


def difference_of(a: Location, b: Location, limit: int) -> Difference:
    """Compare two checkpoints: their states, and every key and element."""
    old, new = _Side(a.storage, record_of(a)), _Side(b.storage, record_of(b))
    states = [*_keyed_differences(old, new, limit), *_operator_differences(old, new, limit)]
    return Difference(
        url_a=a.url,
        checkpoint_a=old.record.checkpoint_id,
        url_b=b.url,
        checkpoint_b=new.record.checkpoint_id,
        settings=_settings(old.record, new.record),
        states=tuple(states),
    )


def _settings(old: CheckpointRecord, new: CheckpointRecord) -> dict[str, tuple[Any, Any]]:
    pairs = {
        "parallelism": (old.parallelism, new.parallelism),
        "max parallelism": (old.max_parallelism, new.max_parallelism),
        "key-group assigner": (old.assigner.value, new.assigner.value),
        "key type": (_key_type(old), _key_type(new)),
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _key_type(record: CheckpointRecord) -> str | None:
    return None if record.key_type is None else str(type_from_text(record.key_type))


def _presence(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if name in old and name in new:
        return "both"
    return "removed" if name in old else "added"


def _type_change(old: StateMeta | None, new: StateMeta | None) -> tuple[str, str] | None:
    if old is None or new is None or type_name(old) == type_name(new):
        return None
    return type_name(old), type_name(new)


def _result(
    name: str, kind: str, tally: _Tally, presence: str, type_change: tuple[str, str] | None
) -> StateDifference:
    return StateDifference(
        state=name,
        kind=kind,
        presence=presence,
        type_change=type_change,
        added=tally.counts["added"],
        removed=tally.counts["removed"],
        changed=tally.counts["changed"],
        examples=tuple(tally.examples),
    )


# Keyed state


def _keyed_differences(old: _Side, new: _Side, limit: int) -> Iterator[StateDifference]:
    kinds_a, kinds_b = (keyed_kinds(side.storage, side.record) for side in (old, new))
    ranges = list(_changed_ranges(old, new))
    for name in sorted({*kinds_a, *kinds_b}):
        tally = _Tally(limit)
        for key_groups in ranges:
            before = _entries(old, name, key_groups, there=name in kinds_a)
            after = _entries(new, name, key_groups, there=name in kinds_b)
            for change in _changes(before, after):
                tally.add(change)
        metas = (side.record.keyed_states.get(name) for side in (old, new))
        kind = (kinds_b.get(name) or kinds_a[name]).value
        presence = _presence(name, kinds_a, kinds_b)
        yield _result(name, kind, tally, presence, _type_change(*metas))


def _changed_ranges(old: _Side, new: _Side) -> Iterator[KeyGroupRange]:
    """Yield the key groups that may differ: those whose files are not the same in both."""
    a, b = old.record, new.record
    if (a.max_parallelism, a.assigner, a.key_type) != (b.max_parallelism, b.assigner, b.key_type):
        # A key may be in another group, so everything is held against everything.
        yield KeyGroupRange(0, max(a.max_parallelism, b.max_parallelism) - 1)
        return
    owned = a if a.parallelism >= b.parallelism else b
    for subtask in owned.subtasks:
        if subtask.key_groups is None:
            continue
        handles_a = keyed_share(a, subtask.key_groups).handles
        handles_b = keyed_share(b, subtask.key_groups).handles
        if handles_a != handles_b:
            yield subtask.key_groups


def _entries(
    side: _Side, name: str, key_groups: KeyGroupRange, *, there: bool
) -> dict[bytes, KeyedEntry]:
    if not there:
        return {}
    found = entries_within(side.storage, side.record, name, key_groups)
    # A NaN is not equal to itself, but its bytes are.
    return {_encoded(entry.identity): entry for entry in found}


def _changes(before: dict[bytes, KeyedEntry], after: dict[bytes, KeyedEntry]) -> Iterator[Change]:
    for identity, entry in after.items():
        was = before.get(identity)
        if was is None:
            yield _change("added", entry, new=entry.value)
        elif _encoded(was.value) != _encoded(entry.value):
            yield _change("changed", entry, old=was.value, new=entry.value)
    for identity, entry in before.items():
        if identity not in after:
            yield _change("removed", entry, old=entry.value)


def _change(what: str, entry: KeyedEntry, *, old: Any = None, new: Any = None) -> Change:
    return Change(what, entry.key, entry.namespace, entry.map_key, old, new)


def _encoded(value: Any) -> bytes:
    """Return what is equal for equal values, NaN among them, and can be counted."""
    return msgspec.msgpack.encode(value, enc_hook=repr)


# Operator state


def _operator_differences(old: _Side, new: _Side, limit: int) -> Iterator[StateDifference]:
    metas_a, metas_b = old.record.operator_states, new.record.operator_states
    for name in sorted({*metas_a, *metas_b}):
        tally = _Tally(limit)
        meta_a, meta_b = metas_a.get(name), metas_b.get(name)
        before = _elements(old, name, meta_a)
        after = _elements(new, name, meta_b)
        if _is_broadcast(meta_a or meta_b or {}):
            for change in _changes(_as_map(before), _as_map(after)):
                tally.add(change)
        else:
            # Where an element is changes with the parallelism; what matters is that it is there.
            values = {_encoded(value): value for value in (*before, *after)}
            counts_a = Counter(_encoded(value) for value in before)
            counts_b = Counter(_encoded(value) for value in after)
            for element, times in (counts_b - counts_a).items():
                tally.add(Change("added", new=values[element]), times)
            for element, times in (counts_a - counts_b).items():
                tally.add(Change("removed", old=values[element]), times)
        presence = _presence(name, metas_a, metas_b)
        kind = str((meta_b or meta_a or {}).get("kind"))
        yield _result(name, kind, tally, presence, _type_change(meta_a, meta_b))


def _is_broadcast(meta: StateMeta) -> bool:
    return bool(meta.get("mode") == Redistribution.BROADCAST.value)


def _elements(side: _Side, name: str, meta: StateMeta | None) -> list[Any]:
    if meta is None:
        return []
    # Of a broadcast map every subtask has a copy.
    indexes = [0] if _is_broadcast(meta) else range(side.record.parallelism)
    return [
        element
        for index in indexes
        for element in elements_of(side.storage, side.record, name, index)
    ]


def _as_map(entries: list[Any]) -> dict[bytes, KeyedEntry]:
    found = [KeyedEntry(entry["key"], value=entry["value"]) for entry in entries]
    return {_encoded(entry.key): entry for entry in found}


# What a person sees.


def _run(invocation: Invocation) -> ExitCode:
    given = invocation.arguments
    a = only_operator(given.url_a, invocation.storage_options)
    b = only_operator(given.url_b, invocation.storage_options)
    if a.url == b.url and a.checkpoint_id == b.checkpoint_id:
        raise CommandError(
            f"both are the same: {given.url_a}. Give two chk-<id> folders, or two operators",
            ExitCode.USAGE,
        )
    found = difference_of(a, b, given.limit)
    if invocation.as_json:
        invocation.terminal.json({"differ": found.is_any, "difference": found})
    else:
        _show(found, invocation.terminal)
    return ExitCode.FOUND if found.is_any else ExitCode.OK


def _show(found: Difference, terminal: Terminal) -> None:
    terminal.line(f"- {found.url_a}, checkpoint {found.checkpoint_a}")
    terminal.line(f"+ {found.url_b}, checkpoint {found.checkpoint_b}")
    for name, (old, new) in found.settings.items():
        terminal.line(f"  {name}: {old} -> {new}")
    same = [state.state for state in found.states if not state.is_any]
    for state in found.states:
        if state.is_any:
            _show_state(state, terminal)
    if same:
        terminal.line()
        terminal.line(f"  without a difference: {', '.join(same)}")
    if not found.is_any:
        terminal.line("  no difference")


_SIGNS = {"added": ("+", Style.GREEN), "removed": ("-", Style.RED), "changed": ("~", Style.YELLOW)}


def _show_state(state: StateDifference, terminal: Terminal) -> None:
    terminal.line()
    presence = "" if state.presence == "both" else f" ({state.presence})"
    counts = ", ".join(
        f"{count:,} {word}"
        for word, count in (
            ("added", state.added),
            ("removed", state.removed),
            ("changed", state.changed),
        )
        if count
    )
    terminal.line(f"  {terminal.styled(state.state, Style.BOLD)}{presence}: {counts or 'empty'}")
    if state.type_change is not None:
        terminal.line(f"    type {state.type_change[0]} -> {state.type_change[1]}")
    for change in state.examples:
        sign, colour = _SIGNS[change.what]
        terminal.line("    " + terminal.styled(f"{sign} {_words(change, state.kind)}", colour))
    if (left := state.added + state.removed + state.changed - len(state.examples)) > 0:
        terminal.line(f"    ... and {left:,} more (--limit 0 for all)")


def _words(change: Change, kind: str) -> str:
    if kind == StateKind.TIMER.value:
        return f"{shown(change.key)} at {moment(change.map_key)}"
    place = " ".join(
        shown(part) for part in (change.key, change.namespace, change.map_key) if part is not None
    )
    match change.what:
        case "changed":
            value = _grown(change.old, change.new) or f"{shown(change.old)} -> {shown(change.new)}"
        case "added":
            value = shown(change.new)
        case _:
            value = shown(change.old)
    return f"{place}: {value}" if place else value


def _grown(old: Any, new: Any) -> str | None:
    """Return what was appended to a list, if that is all that has changed."""
    if not isinstance(old, list) or not isinstance(new, list) or new[: len(old)] != old:
        return None
    return f"{count_of(len(old), 'element')}, then {shown(new[len(old) :])}"


def _arguments(parser: argparse.ArgumentParser) -> None:
    what = "an operator's folder (its newest checkpoint) or a chk-<id>"
    add_url(parser, "url_a", f"the old side: {what}")
    add_url(parser, "url_b", f"the new side: {what}")
    add_limit(parser, _LIMIT, "show so many differences of each state")


COMMAND = Command(
    "diff",
    "states and keys added, removed and changed between two checkpoints",
    _run,
    _arguments,
    description="Compare two checkpoints: their states, and every key and element. Exit code 1 if "
    "they differ.",
)
