"""What scripts are written in: values, lists, map entries, and the types they are of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from flowstate.testing.conformance.trial import Json, VectorError

__all__ = ["Literals", "key_type_of", "parse_type", "split_op"]

_SCALARS: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    # A text of one code unit has the hash of that unit, as Java's Character has.
    "char": pa.string(),
    "double": pa.float64(),
    "float": pa.float32(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "short": pa.int16(),
    "string": pa.string(),
}
_TUPLE = re.compile(r"tuple(\d+)<(.*)>")


def parse_type(text: str) -> pa.DataType:
    """Return the Arrow type of a Java type: ``long``, ``tuple2<string,int>``."""
    name = text.strip().lower()
    if name in _SCALARS:
        return _SCALARS[name]
    match = _TUPLE.fullmatch(name)
    if match is None:
        raise VectorError(f"the type {text!r} is none of {sorted(_SCALARS)} and tupleN<...>")
    parts = [parse_type(part) for part in _split_outside(match[2])]
    if len(parts) != int(match[1]):
        raise VectorError(f"{text!r} has {len(parts)} fields")
    return pa.struct([(f"f{index}", part) for index, part in enumerate(parts)])


def _split_outside(text: str) -> list[str]:
    """Split at the commas that are not within angle brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def key_type_of(keys: Iterable[Json]) -> pa.DataType:
    """Return the type of a script's keys, which the script does not name."""
    kinds = {type(key) for key in keys}
    known: dict[type, pa.DataType] = {
        str: pa.string(),
        bool: pa.bool_(),
        int: pa.int64(),
        float: pa.float64(),
    }
    if not kinds:
        return pa.string()
    if len(kinds) > 1 or not kinds <= known.keys():
        raise VectorError(f"the keys of a case are of one type, not {sorted(map(str, kinds))}")
    return known[kinds.pop()]


def split_op(op: Json) -> tuple[str, str]:
    """Return an operation's name and the rest of its text."""
    if not isinstance(op, str) or not op.strip():
        raise VectorError(f"an op is a text such as 'update 5', not {op!r}")
    verb, _, rest = op.strip().partition(" ")
    return verb, rest.strip()


class Literals:
    """Values of one element type, as operations write them: ``5``, ``[2,null,3]``, ``x=1,y=2``."""

    def __init__(self, type_name: str = "long") -> None:
        self.arrow = parse_type(type_name)
        self._parse = _parser(self.arrow)

    @property
    def zero(self) -> Any:
        """What adding nothing amounts to."""
        return {"string": "", "bool": False}.get(str(self.arrow), 0)

    def value(self, text: str) -> Any:
        """Read one value."""
        if text == "null":
            return None
        try:
            return self._parse(text)
        except ValueError:
            raise VectorError(f"{text!r} is not a value of type {self.arrow}") from None

    def values(self, text: str) -> list[Any] | None:
        """Read a list, or the null in place of one."""
        if text == "null":
            return None
        if not (text.startswith("[") and text.endswith("]")):
            raise VectorError(f"{text!r} is not a list such as [1,null,2]")
        inner = text[1:-1].strip()
        return [self.value(part.strip()) for part in inner.split(",")] if inner else []

    def entries(self, text: str) -> dict[Any, Any] | None:
        """Read the entries of a map, or the null in place of one."""
        if text == "null":
            return None
        found = {}
        for part in filter(None, (part.strip() for part in text.strip("{}").split(","))):
            key, equals, value = part.partition("=")
            if not equals:
                raise VectorError(f"{part!r} is not an entry such as x=1")
            found[self.map_key(key.strip())] = self.value(value.strip())
        return found

    def map_key(self, text: str) -> str | None:
        """Read a map's own key, which is a text."""
        return None if text == "null" else text


def _parser(arrow: pa.DataType) -> Callable[[str], Any]:
    if pa.types.is_string(arrow):
        return str
    if pa.types.is_integer(arrow):
        return int
    if pa.types.is_floating(arrow):
        return float
    return _parsed_json


def _parsed_json(text: str) -> Any:
    return json.loads(text)
