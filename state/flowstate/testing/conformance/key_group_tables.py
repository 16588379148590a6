"""Tables of key groups: hashes, groups, owners, ranges, defaults, and refused calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from flowstate import _java_hash
from flowstate.errors import KeyGroupError
from flowstate.key_groups import (
    check_parallelism,
    default_max_parallelism,
    key_group_of,
    key_group_range_of,
    key_groups_of,
    subtask_index_of,
)
from flowstate.testing.conformance.literals import parse_type
from flowstate.testing.conformance.trial import (
    Json,
    Mismatch,
    Trial,
    VectorError,
    attempt,
    expect,
    field_of,
    shown,
)

__all__ = ["SECTIONS", "case_id", "is_document", "replay"]

_CALL = re.compile(r"(\w+)\((.*)\)")
_UINT32 = (1 << 32) - 1


def is_document(document: Mapping[str, Json]) -> bool:
    """Say whether a file has these tables, or some of them."""
    sections = [document[name] for name in SECTIONS if name in document]
    return (
        bool(sections)
        and all(isinstance(section, list) for section in sections)
        and "cases" not in document
    )


def case_id(section: str, entry: Json) -> str:
    """Return what a table's row is called."""
    if section == "murmurHash":
        return f"murmurHash {entry[0] if isinstance(entry, list) and entry else shown(entry)}"
    if not isinstance(entry, Mapping):
        return f"{section} {shown(entry)}"
    if section == "keys":
        return f"key {entry.get('type')} {json.dumps(entry.get('key'), ensure_ascii=False)}"
    if section == "ranges":
        return f"ranges {entry.get('max_parallelism')}/{entry.get('parallelism')}"
    if section == "default_max_parallelism":
        return f"default_max_parallelism {entry.get('parallelism')}"
    return f"error {entry.get('call')}"


def replay(section: str, entry: Json, _trial: Trial) -> None:
    """Replay one row of a table."""
    is_pair = isinstance(entry, list) and len(entry) == 2
    if not (is_pair if section == "murmurHash" else isinstance(entry, Mapping)):
        raise VectorError(f"{shown(entry)} is no row of {section!r}")
    SECTIONS[section](entry)


def _check_murmur(entry: Json) -> None:
    code, expected = entry
    expect("murmur", expected, _java_hash.murmur(code & _UINT32))
    column = _java_hash.murmur_array(np.array([code & _UINT32], np.uint32))
    expect("murmur of a column", expected, int(column[0]))


def _check_key(entry: Mapping[str, Json]) -> None:
    key_type = parse_type(field_of(entry, "type"))
    key = _key(field_of(entry, "key"), key_type)
    column = pa.array([key], key_type)
    if "hashCode" in entry:
        code = int(_java_hash.hash_array(column)[0])
        expect("hashCode", entry["hashCode"], code - (1 << 32) if code >> 31 else code)
        if "murmur" in entry:
            expect("murmur", entry["murmur"], _java_hash.murmur(code))
    for text, expected in field_of(entry, "key_group").items():
        maximum = int(text)
        group = key_group_of(key, key_type, max_parallelism=maximum)
        expect(f"key group of {text}", expected, group)
        groups = key_groups_of(column, max_parallelism=maximum)
        expect(f"key group of {text}, of a column", [expected], groups.tolist())
    for text, expected in entry.get("operator_index", {}).items():
        maximum, parallelism = map(int, text.split("/"))
        group = key_group_of(key, key_type, max_parallelism=maximum)
        index = subtask_index_of(group, parallelism=parallelism, max_parallelism=maximum)
        expect(f"operator index of {text}", expected, index)


def _key(value: Json, key_type: pa.DataType) -> Any:
    if pa.types.is_struct(key_type):
        if not isinstance(value, list) or len(value) != key_type.num_fields:
            raise VectorError(f"{value!r} is not a key of {key_type}")
        parts = zip(value, key_type, strict=True)
        return tuple(_key(part, field.type) for part, field in parts)
    if pa.types.is_floating(key_type) and isinstance(value, str):
        # JSON has no NaN and no infinity, so they are written as texts.
        return float(value)
    return value


def _check_ranges(entry: Mapping[str, Json]) -> None:
    maximum, parallelism = field_of(entry, "max_parallelism"), field_of(entry, "parallelism")
    found = [
        key_group_range_of(subtask_index=index, parallelism=parallelism, max_parallelism=maximum)
        for index in range(parallelism)
    ]
    expected = field_of(entry, "ranges_inclusive")
    expect("ranges", expected, [[groups.start, groups.end] for groups in found])
    for index, groups in enumerate(found):
        owners = {
            subtask_index_of(group, parallelism=parallelism, max_parallelism=maximum)
            for group in groups
        }
        expect(f"owners of {groups}", [index], sorted(owners))


def _check_default(entry: Mapping[str, Json]) -> None:
    found = default_max_parallelism(field_of(entry, "parallelism"))
    expect("default max parallelism", field_of(entry, "default_max_parallelism"), found)


def _check_error(entry: Mapping[str, Json]) -> None:
    match = _CALL.fullmatch(field_of(entry, "call").replace(" ", ""))
    if match is None or match[1] not in _CALLS:
        raise VectorError(f"the call {entry['call']!r} is none of {sorted(_CALLS)}")
    arguments = [_argument(text) for text in match[2].split(",")]
    actual = attempt(lambda: _CALLS[match[1]](*arguments))
    if not isinstance(actual, KeyGroupError):
        raise Mismatch(entry["call"], "a KeyGroupError", actual)


def _argument(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _range(maximum: Any, parallelism: Any, index: Any) -> Any:
    return key_group_range_of(subtask_index=index, parallelism=parallelism, max_parallelism=maximum)


def _assigned(key: Any, maximum: Any) -> Any:
    """Return the key group by both ways, of which neither may let pass what the other refuses."""
    key_type = pa.string() if key is None else pa.scalar(key).type
    alone = attempt(lambda: key_group_of(key, key_type, max_parallelism=maximum))
    column = attempt(lambda: key_groups_of(pa.array([key], key_type), max_parallelism=maximum))
    if isinstance(alone, KeyGroupError) != isinstance(column, KeyGroupError):
        raise Mismatch("the same of one key and of a column", alone, column)
    return alone


def _owner(key: Any, maximum: Any, parallelism: Any) -> Any:
    check_parallelism(parallelism=parallelism, max_parallelism=maximum)
    return _assigned(key, maximum)


_CALLS: dict[str, Callable[..., Any]] = {
    "assignKeyToParallelOperator": _owner,
    "assignToKeyGroup": _assigned,
    "checkParallelismPreconditions": default_max_parallelism,
    "computeDefaultMaxParallelism": default_max_parallelism,
    "computeKeyGroupRangeForOperatorIndex": _range,
    "computeOperatorIndexForKeyGroup": lambda maximum, parallelism, group: subtask_index_of(
        group, parallelism=parallelism, max_parallelism=maximum
    ),
}

SECTIONS: dict[str, Callable[[Json], None]] = {
    "murmurHash": _check_murmur,
    "keys": _check_key,
    "ranges": _check_ranges,
    "default_max_parallelism": _check_default,
    "errors": _check_error,
}
"""The tables, by the names of their fields."""
