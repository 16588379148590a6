"""Reading values of a checkpoint without the program that wrote them.

Values are in their physical form: what a serializer of the user's made stays bytes.
"""

from __future__ import annotations

import ast
import datetime as dt
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from flowspark.command.contract import CommandError, ExitCode
from flowspark.command.words import hint_for
from flowstate.checkpoint import (
    CheckpointRecord,
    CheckpointStorage,
    SectionType,
    StateMeta,
)
from flowstate.errors import FlowError
from flowstate.key_groups import KeyGroupAssigner, KeyGroupRange, key_grouper
from flowstate.keys import KeyType, physical_column
from flowstate.restoring import ElementRange, cut_list, keyed_share, stretches
from flowstate.rows import StateKind, StateRows
from flowstate.types import type_from_text

__all__ = [
    "KeyedEntry",
    "elements_of",
    "entries_within",
    "is_same_key",
    "key_from_text",
    "keyed_entries",
    "keyed_kinds",
    "list_lengths",
    "type_name",
]


# As Python, and so the table, shows bytes.
_BYTES = re.compile(r"b'[^']*'|b\"[^\"]*\"")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_ZONE = re.compile(r"(?:Z|[+-]\d\d(?::?\d\d)?)$")


@dataclass(frozen=True, slots=True)
class KeyedEntry:
    """What one key has in one state; of a map it is one of its entries."""

    key: Any
    namespace: Any = None
    map_key: Any = None
    """For a timer: when it is due."""
    value: Any = None
    """For a list: the list of its elements."""
    stamp_ms: Any = None
    """With a TTL the time of the last access; for a list that of each element."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells it from all other entries of its state."""
        return self.key, self.namespace, self.map_key


def keyed_kinds(storage: CheckpointStorage, record: CheckpointRecord) -> dict[str, StateKind]:
    """Return the keyed states by name, those of timers too, which no descriptor describes."""
    kinds = {name: StateKind(meta["kind"]) for name, meta in record.keyed_states.items()}
    for subtask in record.subtasks:
        for handle in subtask.keyed:
            for section in storage.reader(handle.file).footer.sections:
                if section.type is SectionType.KEYED and section.kind is not None:
                    kinds.setdefault(section.name, section.kind)
    return kinds


def type_name(meta: StateMeta) -> str:
    """Return a state's type as its descriptor has it; empty for a timer."""
    parts = [_part_name(meta[role]) for role in ("map_key", "value") if role in meta]
    name = " -> ".join(parts)
    return f"{name} by {type_from_text(meta['namespace'])}" if "namespace" in meta else name


def _part_name(part: dict[str, Any]) -> str:
    if "serializer" in part:
        return f"serializer {part['serializer']!r} version {part['version']}"
    return str(part.get("type", "?"))


def keyed_entries(
    storage: CheckpointStorage, record: CheckpointRecord, name: str, key: Any = None
) -> Iterator[KeyedEntry]:
    """Yield the entries of a keyed state, a few key groups at a time; or those of one key.

    The key is in its canonical form, as from :func:`key_from_text`.
    """
    only = None if key is None else _group_range(record, key)
    canonical = None if key is None else _key_type(record).canonical
    for subtask in record.subtasks:
        wanted = subtask.key_groups
        if wanted is not None and only is not None:
            wanted = wanted.intersect(only)
        if wanted is None:
            continue
        for entry in entries_within(storage, record, name, wanted):
            if canonical is None or is_same_key(canonical(entry.key), key):
                yield entry


def is_same_key(key: Any, other: Any) -> bool:
    """Say whether two keys in their canonical form are one."""
    # A tuple looks at identity first, so that the one NaN is found.
    return (key,) == (other,)


def entries_within(
    storage: CheckpointStorage, record: CheckpointRecord, name: str, key_groups: KeyGroupRange
) -> Iterator[KeyedEntry]:
    """Yield the entries of a keyed state in some key groups, whoever owned them."""
    handles = keyed_share(record, key_groups).handles
    for sets in stretches(storage, handles, key_groups, [name]):
        for rows in sets:
            yield from _entries(rows)


def _group_range(record: CheckpointRecord, key: Any) -> KeyGroupRange:
    group_of = key_grouper(
        _key_type(record).arrow,
        max_parallelism=record.max_parallelism,
        assigner=KeyGroupAssigner(record.assigner),
    )
    group = group_of(key)
    return KeyGroupRange(group, group)


def _key_type(record: CheckpointRecord) -> KeyType:
    if record.key_type is None:
        raise CommandError("this operator has no keyed state", ExitCode.USAGE)
    return KeyType(type_from_text(record.key_type))


def key_from_text(text: str, arrow: pa.DataType) -> Any:
    """Return the key that a text on the command line stands for.

    A text is itself; bytes are UTF-8, or written as they are shown; another scalar is written as
    Arrow reads it, a duration as ``PT3S``; several fields, or the elements of a list, are a JSON
    array.
    """
    kind = KeyType(arrow)
    try:
        return kind.canonical(
            _parsed(json.loads(text) if pa.types.is_nested(arrow) else text, arrow)
        )
    except (ValueError, pa.ArrowException, FlowError) as error:
        reason = (error.message if isinstance(error, FlowError) else str(error)).rstrip(".")
        example = " Write a JSON array, as in '[\"a\", 1]'." if pa.types.is_nested(arrow) else ""
        raise CommandError(
            f"{text!r} is not a key of type {arrow}: {reason}.{example}", ExitCode.USAGE
        ) from error


def _parsed(value: Any, arrow: pa.DataType) -> Any:
    if value is None:
        return None
    if not pa.types.is_nested(arrow):
        return _scalar(value, arrow)
    if not isinstance(value, list):
        raise ValueError("it is not a JSON array")
    if not pa.types.is_struct(arrow):
        return tuple(_parsed(part, arrow.value_type) for part in value)
    if len(value) != arrow.num_fields:
        raise ValueError(f"it is not a JSON array of {arrow.num_fields} values")
    return tuple(_parsed(part, field.type) for part, field in zip(value, arrow, strict=True))


def _scalar(value: Any, arrow: pa.DataType) -> Any:
    if pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow):
        return _bytes(str(value))
    text = value if isinstance(value, str) else json.dumps(value)
    if pa.types.is_string(arrow) or pa.types.is_large_string(arrow):
        return text
    if pa.types.is_timestamp(arrow) and arrow.tz is not None:
        text = _with_zone(text)
    if pa.types.is_duration(arrow):
        return physical_column(pa.array([msgspec.convert(text, dt.timedelta)], arrow))[0]
    return physical_column(pa.array([text]).cast(arrow))[0]


def _bytes(text: str) -> bytes:
    if _BYTES.fullmatch(text) is None:
        return os.fsencode(text)
    value: bytes = ast.literal_eval(text)
    return value


def _with_zone(text: str) -> str:
    """Return a time that says its zone; one that says none is in UTC."""
    if _DATE.fullmatch(text):
        return f"{text}T00:00Z"
    return text if _ZONE.search(text) else f"{text}Z"


def _entries(rows: StateRows) -> Iterator[KeyedEntry]:
    table = rows.table
    names = set(table.column_names)
    nothing: Sequence[Any] = [None] * table.num_rows

    def column(name: str, *, composite: bool = False) -> Sequence[Any]:
        if name not in names:
            return nothing
        return physical_column(table[name], composite=composite)

    found = zip(
        column("key", composite=True),
        column("namespace", composite=True),
        column("sub", composite=True),
        column("value"),
        column("ts"),
        strict=True,
    )
    if rows.kind is StateKind.LIST:
        yield from _lists(found)
        return
    for key, namespace, sub, value, stamp in found:
        yield KeyedEntry(key, namespace, sub, value, stamp)


def _lists(found: Iterator[tuple[Any, ...]]) -> Iterator[KeyedEntry]:
    """Put the chunks of each list together. All of a key are in one stretch of key groups."""
    chunks: dict[tuple[Any, Any], list[tuple[int, Any, Any]]] = defaultdict(list)
    for key, namespace, number, values, stamps in found:
        chunks[key, namespace].append((number, values, stamps))
    for (key, namespace), parts in chunks.items():
        parts.sort(key=lambda part: part[0])
        values = [value for _, chunk, _ in parts for value in chunk]
        stamps = [stamp for _, chunk, times in parts for stamp in times or [None] * len(chunk)]
        timed = any(stamp is not None for stamp in stamps)
        yield KeyedEntry(key, namespace, None, values, stamps if timed else None)


# Operator state


def list_lengths(record: CheckpointRecord, name: str) -> list[int]:
    """Return how many elements each subtask has of an operator state."""
    return [
        sum(handle.states[name].count for handle in subtask.operator if name in handle.states)
        for subtask in record.subtasks
    ]


def elements_of(
    storage: CheckpointStorage, record: CheckpointRecord, name: str, subtask_index: int
) -> Iterator[Any]:
    """Yield a subtask's elements of an operator state, as it wrote them."""
    handles = record.subtasks[subtask_index].operator
    length = list_lengths(record, name)[subtask_index]
    for part in cut_list(handles, name, 0, length):
        yield from _elements(storage, name, part)


def _elements(storage: CheckpointStorage, name: str, part: ElementRange) -> Iterator[Any]:
    reader = storage.reader(part.handle.file)
    # A segment at a time: who wants the first elements does not read all of them.
    for segment in reader.sections[name].segments:
        start, stop = max(part.start, segment.first), min(part.stop, segment.last + 1)
        if start < stop:
            yield from physical_column(reader.read_elements(name, start, stop))


def unknown_state(name: str, record: CheckpointRecord, kinds: dict[str, StateKind]) -> CommandError:
    """Say that there is no such state, and which may have been meant."""
    return CommandError(
        f"checkpoint {record.checkpoint_id} has no state {name!r}. "
        f"{hint_for(name, [*kinds, *record.operator_states])}",
        ExitCode.FAILED,
    )
