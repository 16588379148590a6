"""``flow inspect``: which operators there are, and what their checkpoints hold."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowspark.command.arguments import add_url
from flowspark.command.contract import Command, ExitCode, Invocation
from flowspark.command.entries import list_lengths, type_name
from flowspark.command.loads import Loads, loads_of, skew_of, spread_of
from flowspark.command.locations import (
    Location,
    UnsealedCheckpoint,
    find_operators,
    unsealed_checkpoints,
)
from flowspark.command.terminal import Style, Terminal
from flowspark.command.words import count_of, duration, moment, size
from flowstate.checkpoint import CheckpointRecord
from flowstate.clock import SystemClock
from flowstate.errors import CheckpointNotFoundError, SnapshotError
from flowstate.types import type_from_text

__all__ = [
    "COMMAND",
    "Look",
    "Overview",
    "StateOverview",
    "SubtaskOverview",
    "kept_records",
    "look_at",
    "overview_of",
    "selected_record",
    "unsealed_words",
]

_SKYLINE_COLUMNS = 64
_SUBTASKS_SHOWN = 32


@dataclass(frozen=True, slots=True)
class StateOverview:
    """One state of an operator."""

    name: str
    kind: str
    mode: str | None
    """How operator state is redistributed."""
    type: str
    ttl_ms: int | None
    count: int
    """Rows of keyed state, with such as later ones replace; elements of operator state."""
    bytes: int


@dataclass(frozen=True, slots=True)
class SubtaskOverview:
    """What one subtask has."""

    subtask_index: int
    first_key_group: int | None
    last_key_group: int | None
    keyed_bytes: int
    elements: int
    files: int


@dataclass(frozen=True, slots=True)
class CheckpointOverview:
    """One record."""

    checkpoint_id: int
    parent_id: int | None
    batch_id: int | None
    run: str
    created_ms: int
    parallelism: int
    files: int
    bytes_in_files: int
    bytes_inline: int


@dataclass(frozen=True, slots=True)
class Overview:
    """What ``inspect`` says of one operator."""

    url: str
    query: str | None
    uid: str
    checkpoints: tuple[CheckpointOverview, ...]
    unsealed: tuple[UnsealedCheckpoint, ...]
    checkpoint_id: int | None
    """The checkpoint that the rest is about; None where there is none yet."""
    max_parallelism: int | None = None
    assigner: str | None = None
    key_type: str | None = None
    states: tuple[StateOverview, ...] = ()
    subtasks: tuple[SubtaskOverview, ...] = ()
    key_group_bytes: tuple[int, ...] = ()
    problem: str | None = None
    """Why the rest could not be read."""


def selected_record(location: Location) -> CheckpointRecord | None:
    """Return the checkpoint that a URL names, or the newest; None before the first."""
    if location.checkpoint_id is not None:
        return location.storage.read(location.checkpoint_id)
    return location.storage.latest()


@dataclass(frozen=True, slots=True)
class Look:
    """What was read of one operator, as it was then: a query that runs goes on meanwhile."""

    records: tuple[CheckpointRecord, ...]
    """Those that could be read, oldest first; only the named one if the URL named one."""
    record: CheckpointRecord | None
    """The one that is meant."""
    loads: Loads | None
    problem: str | None


def look_at(location: Location) -> Look:
    """Look at one operator; what is damaged is said, and the rest is there."""
    seen = _look(location)
    if (
        seen.problem is not None
        and seen.record is not None
        and not _is_there(location, seen.record)
    ):
        # Its query runs, and has gone on meanwhile: nothing is damaged by that.
        seen = _look(location)
    return seen


def overview_of(location: Location, seen: Look | None = None) -> Overview:
    """Return what is to be said of one operator."""
    seen = seen or look_at(location)
    record, loads = seen.record, seen.loads
    head: dict[str, Any] = {
        "url": location.url,
        "query": location.query,
        "uid": location.uid,
        "checkpoints": tuple(map(_checkpoint, seen.records)),
        "unsealed": tuple(unsealed_checkpoints(location.storage)),
        "checkpoint_id": None if record is None or loads is None else record.checkpoint_id,
        "problem": seen.problem,
    }
    if record is None or loads is None:
        return Overview(**head)
    return Overview(
        **head,
        max_parallelism=record.max_parallelism,
        assigner=record.assigner.value,
        key_type=None if record.key_type is None else str(type_from_text(record.key_type)),
        states=tuple(_states(record, loads)),
        subtasks=tuple(_subtasks(record, loads)),
        key_group_bytes=tuple(round(float(weight)) for weight in loads.key_groups)
        if loads.keyed_bytes
        else (),
    )


def _look(location: Location) -> Look:
    record, loads, problems = None, None, []
    try:
        record = selected_record(location)
    except SnapshotError as error:
        problems.append(str(error))
    records = list(kept_records(location, problems))
    if record is not None:
        if record not in records:
            records.append(record)
        try:
            loads = loads_of(location.storage, record)
        except SnapshotError as error:
            problems.append(str(error))
    # The newest may have been found damaged twice.
    return Look(tuple(records), record, loads, "\n".join(dict.fromkeys(problems)) or None)


def kept_records(location: Location, problems: list[str]) -> Iterator[CheckpointRecord]:
    """Yield the records of an operator, oldest first, and say of which ones it cannot be."""
    named = location.checkpoint_id
    for checkpoint_id in location.storage.checkpoint_ids() if named is None else [named]:
        try:
            yield location.storage.read(checkpoint_id)
        except CheckpointNotFoundError:
            # A query that runs may retire a checkpoint after it was listed.
            if named is not None:
                raise
        except SnapshotError as error:
            problems.append(str(error))


def _is_there(location: Location, record: CheckpointRecord) -> bool:
    return record.checkpoint_id in location.storage.checkpoint_ids()


def _checkpoint(record: CheckpointRecord) -> CheckpointOverview:
    files = {file: None for subtask in record.subtasks for file in subtask.files}
    stored = [file for file in files if file.path is not None]
    return CheckpointOverview(
        checkpoint_id=record.checkpoint_id,
        parent_id=record.parent_id,
        batch_id=record.batch_id,
        run=record.run,
        created_ms=record.created_ms,
        parallelism=record.parallelism,
        files=len(stored),
        bytes_in_files=sum(file.size for file in stored),
        bytes_inline=sum(file.size for file in files if file.path is None),
    )


def _states(record: CheckpointRecord, loads: Loads) -> Iterator[StateOverview]:
    for name, kind in sorted(loads.kinds.items()):
        meta = record.keyed_states.get(name, {})
        yield StateOverview(
            name=name,
            kind=kind.value,
            mode=None,
            type=type_name(meta),
            ttl_ms=meta.get("ttl_ms"),
            count=loads.count_of(name),
            bytes=loads.bytes_of(name),
        )
    for name, meta in sorted(record.operator_states.items()):
        yield StateOverview(
            name=name,
            kind=str(meta.get("kind", "list")),
            mode=str(meta.get("mode")),
            type=type_name(meta),
            ttl_ms=None,
            count=sum(list_lengths(record, name)),
            bytes=loads.bytes_of(name),
        )


def _subtasks(record: CheckpointRecord, loads: Loads) -> Iterator[SubtaskOverview]:
    weights = loads.key_groups
    for subtask in record.subtasks:
        owned = subtask.key_groups
        window = weights[:0] if owned is None else weights[owned.start : owned.end + 1]
        yield SubtaskOverview(
            subtask_index=subtask.subtask_index,
            first_key_group=None if owned is None else owned.start,
            last_key_group=None if owned is None else owned.end,
            keyed_bytes=round(float(window.sum())),
            elements=sum(load[subtask.subtask_index].elements for load in loads.lists.values()),
            files=sum(file.path is not None for file in subtask.files),
        )


# What a person sees.


def _show(overview: Overview, title: str, terminal: Terminal, now_ms: int) -> None:
    terminal.line(terminal.styled(title, Style.BOLD))
    terminal.line(f"  {overview.url}")
    for unsealed in overview.unsealed:
        terminal.line(
            f"  {terminal.styled(unsealed_words(unsealed), Style.YELLOW)}: "
            f"chk-{unsealed.checkpoint_id}, {count_of(unsealed.files, 'file')}, "
            f"{size(unsealed.bytes)}"
        )
    if overview.problem is not None:
        for problem in overview.problem.splitlines():
            terminal.line(f"  {terminal.styled('damaged', Style.RED)}: {problem}")
    if not overview.checkpoints:
        return
    _show_checkpoints(overview, terminal, now_ms)
    if overview.checkpoint_id is None:
        return
    terminal.line()
    keys = "no keys"
    if overview.key_type is not None:
        groups = count_of(overview.max_parallelism or 0, "key group")
        keys = f"keys of type {overview.key_type}, {groups} by {overview.assigner}"
    terminal.line(f"  Checkpoint {overview.checkpoint_id}: {keys}")
    _show_states(overview, terminal)
    _show_subtasks(overview, terminal)


def unsealed_words(unsealed: UnsealedCheckpoint) -> str:
    """Return what it means that a checkpoint has no record."""
    if unsealed.is_left_over:
        return "left over, for a sweep"
    return "no record yet, a later batch makes it"


def _show_checkpoints(overview: Overview, terminal: Terminal, now_ms: int) -> None:
    terminal.table(
        ["checkpoint", "batch", "subtasks", "files", "in files", "in record", "created", "ago"],
        [
            [
                str(one.checkpoint_id),
                "-" if one.batch_id is None else str(one.batch_id),
                str(one.parallelism),
                f"{one.files:,}",
                size(one.bytes_in_files),
                size(one.bytes_inline),
                moment(one.created_ms // 1000 * 1000),
                duration(max(0, now_ms - one.created_ms)),
            ]
            for one in overview.checkpoints
        ],
        aligned=">>>>>><<",
    )


def _show_states(overview: Overview, terminal: Terminal) -> None:
    if not overview.states:
        return
    terminal.line()
    terminal.table(
        ["state", "kind", "type", "ttl", "rows", "size"],
        [
            [
                state.name,
                state.kind if state.mode is None else f"{state.mode} {state.kind}",
                state.type or "-",
                "-" if state.ttl_ms is None else duration(state.ttl_ms),
                f"{state.count:,}",
                size(state.bytes),
            ]
            for state in overview.states
        ],
        aligned="<<<>>>",
    )


def _show_subtasks(overview: Overview, terminal: Terminal) -> None:
    if not overview.subtasks:
        return
    keyed = any(one.first_key_group is not None for one in overview.subtasks)
    weights = [one.keyed_bytes if keyed else one.elements for one in overview.subtasks]
    largest = max(weights, default=0)
    terminal.line()
    terminal.table(
        ["subtask", "key groups", "keyed", "elements", "files", "load"],
        [
            [
                str(one.subtask_index),
                "-"
                if one.first_key_group is None
                else f"{one.first_key_group}..{one.last_key_group}",
                size(one.keyed_bytes) if keyed else "-",
                f"{one.elements:,}",
                f"{one.files:,}",
                terminal.bar(weight, largest),
            ]
            for one, weight in zip(overview.subtasks[:_SUBTASKS_SHOWN], weights, strict=False)
        ],
        aligned="><>>><",
    )
    if len(overview.subtasks) > _SUBTASKS_SHOWN:
        left = len(overview.subtasks) - _SUBTASKS_SHOWN
        terminal.line(f"  ... and {count_of(left, 'subtask')} more (--json has all)")
    if keyed and largest:
        groups = overview.key_group_bytes
        columns = spread_of(_array(groups), _SKYLINE_COLUMNS)
        heaviest = max(range(len(groups)), key=groups.__getitem__)
        terminal.line()
        terminal.line(f"  key groups 0..{len(groups) - 1}  |{terminal.skyline(columns)}|")
        terminal.line(
            f"  the heaviest is {heaviest} with {size(groups[heaviest])}, "
            f"{skew_of(groups):.1f} times the mean; subtasks: {skew_of(weights):.1f} times"
        )


def _array(values: tuple[int, ...]) -> Any:
    import numpy as np

    return np.asarray(values, float)


def _run(invocation: Invocation) -> ExitCode:
    terminal = invocation.terminal
    locations = find_operators(invocation.arguments.url, invocation.storage_options)
    overviews = [overview_of(location) for location in locations]
    if invocation.as_json:
        terminal.json({"operators": overviews})
    else:
        now_ms = SystemClock().now_ms()
        for index, (location, overview) in enumerate(zip(locations, overviews, strict=True)):
            if index:
                terminal.line()
            _show(overview, location.title, terminal, now_ms)
    broken = any(overview.problem is not None for overview in overviews)
    return ExitCode.FOUND if broken else ExitCode.OK


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)


COMMAND = Command(
    "inspect",
    "queries, operators, checkpoints, states, sizes and the load of key groups",
    _run,
    _arguments,
)
