"""``flow show``: the values of one state."""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from flowspark.command.arguments import add_limit, add_url
from flowspark.command.contract import Command, CommandError, ExitCode, Invocation
from flowspark.command.entries import (
    KeyedEntry,
    elements_of,
    is_same_key,
    key_from_text,
    keyed_entries,
    keyed_kinds,
    list_lengths,
    type_name,
    unknown_state,
)
from flowspark.command.inspecting import selected_record
from flowspark.command.locations import Location, only_operator
from flowspark.command.terminal import Style, Terminal
from flowspark.command.words import count_of, moment, shown
from flowstate.checkpoint import CheckpointRecord, StateMeta
from flowstate.clock import SystemClock
from flowstate.errors import CheckpointNotFoundError
from flowstate.keys import KeyType
from flowstate.redistribution import Redistribution
from flowstate.rows import NO_TIMESTAMP, StateKind
from flowstate.types import type_from_text

__all__ = ["COMMAND", "record_of"]

_LIMIT = 20
_LENGTH_MAX, _LENGTH_OF_ONE_MAX = 200, 10_000


@dataclass(frozen=True, slots=True)
class _Query:
    """Which values are wanted."""

    location: Location
    record: CheckpointRecord
    name: str
    key: str | None
    limit: int


def record_of(location: Location) -> CheckpointRecord:
    """Return the checkpoint that a URL names, or the newest, which must be there."""
    record = selected_record(location)
    if record is None:
        raise CheckpointNotFoundError(
            f"there is no complete checkpoint below {location.url} yet: its chk-<id> folders have "
            f"no record. Look again after the next batch"
        )
    return record


def _run(invocation: Invocation) -> ExitCode:
    given = invocation.arguments
    location = only_operator(given.url, invocation.storage_options)
    record = record_of(location)
    query = _Query(location, record, given.state, given.key, given.limit)
    kinds = keyed_kinds(location.storage, record)
    if given.state in kinds:
        _show_keyed(query, kinds[given.state], invocation)
    elif given.state in record.operator_states:
        _show_operator(query, invocation)
    else:
        raise unknown_state(given.state, record, kinds)
    return ExitCode.OK


def _limited(found: Iterator[Any], limit: int) -> tuple[list[Any], bool]:
    """Return so many of them, and whether there are more."""
    if limit == 0:
        return list(found), False
    kept = list(islice(found, limit + 1))
    return kept[:limit], len(kept) > limit


# Keyed state


def _show_keyed(query: _Query, kind: StateKind, invocation: Invocation) -> None:
    record = query.record
    key = None
    if query.key is not None and record.key_type is not None:
        key = key_from_text(query.key, type_from_text(record.key_type))
    found = keyed_entries(query.location.storage, record, query.name, key)
    if kind is StateKind.TIMER:
        found = _earliest(found, query.limit)
    entries, more = _limited(found, query.limit)
    meta = record.keyed_states.get(query.name, {})
    if invocation.as_json:
        invocation.terminal.json(
            {
                "checkpoint_id": record.checkpoint_id,
                "state": query.name,
                "kind": kind,
                "type": type_name(meta),
                "more": more,
                "entries": entries,
            }
        )
        return
    _print_entries(query, kind, entries, invocation.terminal, meta)
    _print_rest(query, len(entries), more, invocation.terminal)


def _earliest(found: Iterator[KeyedEntry], limit: int) -> Iterator[KeyedEntry]:
    """Yield timers as they will fire, not as their keys are stored."""

    def due(entry: KeyedEntry) -> Any:
        return entry.map_key

    return iter(heapq.nsmallest(limit + 1, found, key=due) if limit else sorted(found, key=due))


def _print_entries(
    query: _Query,
    kind: StateKind,
    entries: list[KeyedEntry],
    terminal: Terminal,
    meta: StateMeta,
) -> None:
    what = f"{kind.value} {type_name(meta)}".strip()
    checkpoint = f"checkpoint {query.record.checkpoint_id} of {query.location.title}"
    terminal.line(f"{terminal.styled(query.name, Style.BOLD)} ({what}), {checkpoint}")
    life = _life(meta)
    length_max = _LENGTH_MAX if query.key is None else _LENGTH_OF_ONE_MAX
    spaced = any(entry.namespace is not None for entry in entries)
    head = ["key", *(["namespace"] if spaced else []), *_head(kind), *(["life"] if life else [])]
    rows = []
    for entry in entries:
        row = [shown(entry.key)]
        if spaced:
            row.append("-" if entry.namespace is None else shown(entry.namespace))
        row += _cells(kind, entry, length_max)
        if life:
            row.append(life(entry.stamp_ms))
        rows.append(row)
    if rows:
        terminal.table(head, rows)


def _head(kind: StateKind) -> list[str]:
    match kind:
        case StateKind.MAP:
            return ["map key", "value"]
        case StateKind.TIMER:
            return ["fires at", "ms"]
        case StateKind.LIST:
            return ["elements", "value"]
        case StateKind.AGGREGATING:
            return ["accumulator"]
        case _:
            return ["value"]


def _cells(kind: StateKind, entry: KeyedEntry, length_max: int) -> list[str]:
    value = shown(entry.value, length_max)
    match kind:
        case StateKind.MAP:
            return [shown(entry.map_key), value]
        case StateKind.TIMER:
            return [moment(entry.map_key), str(entry.map_key)]
        case StateKind.LIST:
            return [f"{len(entry.value):,}", value]
        case _:
            return [value]


def _life(meta: StateMeta) -> Callable[[Any], str] | None:
    """Return what says whether a unit has expired, for a state with a TTL."""
    ttl_ms = meta.get("ttl_ms")
    if ttl_ms is None:
        return None
    event_time = meta.get("ttl_time") == "event"
    now_ms = SystemClock().now_ms()

    def said(stamp: Any) -> str:
        # The elements of a list have a stamp each; the last to go says when the list is over.
        stamps = [one for one in (stamp if isinstance(stamp, list) else [stamp]) if one is not None]
        if not stamps or max(stamps) == NO_TIMESTAMP:
            return "no stamp"
        ends_ms = max(stamps) + ttl_ms
        if event_time:
            return f"until the watermark is {moment(ends_ms)}"
        return f"expired {moment(ends_ms)}" if ends_ms <= now_ms else f"until {moment(ends_ms)}"

    return said


def _print_rest(query: _Query, count: int, more: bool, terminal: Terminal) -> None:
    if more:
        terminal.line(f"  ... and more: --limit {max(1, query.limit) * 10}, or --limit 0 for all")
    elif not count and query.key is not None:
        terminal.line(f"  the key {query.key!r} has nothing here")
    elif not count:
        terminal.line("  empty")


# Operator state


@dataclass(frozen=True, slots=True)
class _SubtaskElements:
    subtask_index: int
    length: int
    elements: list[Any]


def _show_operator(query: _Query, invocation: Invocation) -> None:
    record, meta = query.record, query.record.operator_states[query.name]
    broadcast = Redistribution(meta["mode"]) is Redistribution.BROADCAST
    if query.key is not None and not broadcast:
        raise CommandError(
            f"{query.name!r} is a list of operator state, which has no keys: leave --key out",
            ExitCode.USAGE,
        )
    lengths = list_lengths(record, query.name)
    # Every subtask has a copy of a broadcast map; one is enough to see it.
    indexes = [0] if broadcast else list(range(record.parallelism))
    parts: list[_SubtaskElements] = []
    left, more = query.limit, False
    for index in indexes:
        found = elements_of(query.location.storage, record, query.name, index)
        if query.key is not None:
            found = _with_key(found, query.key, meta)
        # A limit of 0 is none, so what is left of another one is not handed on when it is used up.
        elements: list[Any] = []
        if query.limit and left == 0:
            cut = next(found, None) is not None
        else:
            elements, cut = _limited(found, left)
            left -= len(elements) if query.limit else 0
        more = more or cut
        parts.append(_SubtaskElements(index, lengths[index], elements))
    if invocation.as_json:
        invocation.terminal.json(
            {
                "checkpoint_id": record.checkpoint_id,
                "state": query.name,
                "kind": meta["kind"],
                "mode": meta["mode"],
                "type": type_name(meta),
                "more": more,
                "subtasks": parts,
            }
        )
        return
    _print_operator(query, parts, broadcast, invocation.terminal)
    _print_rest(query, sum(len(part.elements) for part in parts), more, invocation.terminal)


def _with_key(found: Iterator[Any], text: str, meta: StateMeta) -> Iterator[Any]:
    arrow = type_from_text(meta["map_key"]["arrow"])
    wanted, canonical = key_from_text(text, arrow), KeyType(arrow).canonical
    return (entry for entry in found if is_same_key(canonical(entry["key"]), wanted))


def _print_operator(
    query: _Query, parts: list[_SubtaskElements], broadcast: bool, terminal: Terminal
) -> None:
    record, meta = query.record, query.record.operator_states[query.name]
    what = f"{meta['mode']} {meta['kind']} {type_name(meta)}"
    checkpoint = f"checkpoint {record.checkpoint_id} of {query.location.title}"
    terminal.line(f"{terminal.styled(query.name, Style.BOLD)} ({what}), {checkpoint}")
    if broadcast:
        terminal.line(
            f"  the copy of subtask 0; there are {count_of(record.parallelism, 'copy', 'copies')}"
        )
        rows = [[shown(entry["key"]), shown(entry["value"])] for entry in parts[0].elements]
        if rows:
            terminal.table(["key", "value"], rows)
        return
    rows = [
        [str(part.subtask_index), f"{number:,}", shown(element)]
        for part in parts
        for number, element in enumerate(part.elements)
    ]
    if rows:
        terminal.table(["subtask", "n", "element"], rows, aligned=">>")
    listed = ", ".join(f"{part.length:,}" for part in parts)
    terminal.line(f"  elements by subtask: {listed}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--state", required=True, metavar="NAME", help="as 'flow inspect' names it")
    parser.add_argument(
        "--key",
        metavar="K",
        help="only this key: a text as it is, other types as Arrow reads them, several fields as "
        "a JSON array",
    )
    add_limit(parser, _LIMIT, "so many entries or elements")


COMMAND = Command("show", "the values of one state, of all keys or of one", _run, _arguments)
