"""Keys as state holds them: one canonical Python value each, and their Arrow columns."""

from __future__ import annotations

import datetime as dt
import typing
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from flowstate.errors import StateDescriptorError, StateTypeError
from flowstate.types import arrow_type, value_type

__all__ = ["KeyType", "canonical_column", "physical_column", "python_type"]

# One object for all NaNs, because a dict finds a NaN only by its identity.
_NAN = float("nan")


class KeyType:
    """The type of keys, namespaces and map keys: a scalar, or a tuple of scalars.

    The canonical form is hashable and equal for keys that are one key: -0.0 is 0.0, as in SQL,
    and every NaN is the same key. A composite key is a tuple in the order of the fields.
    """

    def __init__(self, spec: Any) -> None:
        if not isinstance(spec, pa.DataType):
            spec = arrow_type(spec)
        self.arrow: pa.DataType = spec
        self.canonical: Callable[[Any], Any] = _canonicalizer(spec)
        """Check a key and return its canonical form; raises ``StateTypeError``."""
        self.has_floats = _has_floats(spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyType) and bool(self.arrow.equals(other.arrow))

    def __hash__(self) -> int:
        return hash(str(self.arrow))

    def to_array(self, keys: Sequence[Any]) -> pa.Array:
        """Return canonical keys (or nulls) as a column."""
        if not pat.is_struct(self.arrow):
            return pa.array(keys, self.arrow)
        width = self.arrow.num_fields
        columns = [
            pa.array([None if key is None else key[i] for key in keys], self.arrow.field(i).type)
            for i in range(width)
        ]
        mask = pa.array([key is None for key in keys], pa.bool_())
        return pa.StructArray.from_arrays(columns, fields=list(self.arrow), mask=mask)

    def to_list(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        """Return the canonical keys of a column."""
        keys = physical_column(array, composite=True)
        if not self.has_floats:
            return keys
        canonical = self.canonical
        return [None if key is None else canonical(key) for key in keys]


def physical_column(array: pa.Array | pa.ChunkedArray, *, composite: bool = False) -> list[Any]:
    """Return a column as Python values; composite keys as tuples instead of dicts."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if not composite or not pat.is_struct(array.type):
        values: list[Any] = array.to_pylist()
        return values
    columns = [array.field(i).to_pylist() for i in range(array.type.num_fields)]
    keys: list[Any] = list(zip(*columns, strict=True)) if columns else [()] * len(array)
    if array.null_count:
        valid = array.is_valid().to_pylist()
        keys = [key if ok else None for key, ok in zip(keys, valid, strict=True)]
    return keys


def canonical_column(keys: pa.Array) -> pa.Array:
    """Return a column of keys in which floats that are one key are equal bit by bit."""
    if pat.is_struct(keys.type):
        fields = [canonical_column(keys.field(i)) for i in range(keys.type.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(keys.type), mask=keys.is_null())
    if not pat.is_floating(keys.type):
        return keys
    zero, nan = pa.scalar(0.0, keys.type), pa.scalar(_NAN, keys.type)
    return pc.if_else(pc.is_nan(keys), nan, pc.add(keys, zero))


def _has_floats(arrow: pa.DataType) -> bool:
    if pat.is_struct(arrow):
        return any(_has_floats(field.type) for field in arrow)
    return bool(pat.is_floating(arrow))


def _canonicalizer(arrow: pa.DataType) -> Callable[[Any], Any]:
    if pat.is_struct(arrow):
        return _tuple_canonicalizer(arrow)
    if pat.is_nested(arrow):
        raise StateDescriptorError(
            f"{arrow} cannot be a key: use a scalar type, or a struct (a tuple) of scalar types"
        )
    check = value_type(arrow).to_physical
    if pat.is_floating(arrow):
        return lambda key: _canonical_float(check(key))
    return check


def _canonical_float(key: float) -> float:
    if key != key:
        return _NAN
    return key + 0.0


def _tuple_canonicalizer(arrow: pa.DataType) -> Callable[[Any], Any]:
    fields = [(field.name, field.nullable, _canonicalizer(field.type)) for field in arrow]
    if not fields or any(pat.is_nested(field.type) for field in arrow):
        raise StateDescriptorError(f"{arrow} cannot be a key: its fields must be scalars")

    def canonical(key: Any) -> tuple[Any, ...]:
        if isinstance(key, dict):
            key = tuple(key.get(name) for name, _, _ in fields)
        if not isinstance(key, tuple | list) or len(key) != len(fields):
            raise StateTypeError(f"a key of {arrow} is a tuple of {len(fields)} values")
        return tuple(
            _canonical_field(part, name, nullable, check, arrow)
            for part, (name, nullable, check) in zip(key, fields, strict=True)
        )

    return canonical


def _canonical_field(
    part: Any, name: str, nullable: bool, check: Callable[[Any], Any], arrow: pa.DataType
) -> Any:
    if part is not None:
        return check(part)
    if not nullable:
        raise StateTypeError(f"field {name!r} of the key {arrow} must not be null")
    return None


def python_type(arrow: pa.DataType, *, composite: bool = False) -> Any:
    """Return the annotation with which msgpack bytes of this type are read back.

    Fields of a struct may be missing in the bytes: they were added to the type later.
    """
    if pat.is_struct(arrow):
        inner = [python_type(field.type) | None for field in arrow]
        if composite:
            return tuple[tuple(inner)]  # type: ignore[misc]
        names = [field.name for field in arrow]
        return typing.TypedDict(  # type: ignore[operator]
            "Struct", dict(zip(names, inner, strict=True)), total=False
        )
    if pat.is_map(arrow):
        item = python_type(arrow.item_type) | None
        return list[tuple[python_type(arrow.key_type), item]]  # type: ignore[misc]
    if pat.is_list(arrow) or pat.is_large_list(arrow):
        return list[python_type(arrow.value_type) | None]  # type: ignore[misc]
    for accepts, plain in _PYTHON_TYPES:
        if accepts(arrow):
            return plain
    raise StateDescriptorError(f"{arrow} is not supported in state")


_PYTHON_TYPES: tuple[tuple[Callable[[pa.DataType], bool], type], ...] = (
    (pat.is_boolean, bool),
    (pat.is_signed_integer, int),
    (pat.is_floating, float),
    (pat.is_string, str),
    (pat.is_large_string, str),
    (pat.is_binary, bytes),
    (pat.is_large_binary, bytes),
    (pat.is_date32, dt.date),
    (pat.is_time64, dt.time),
    (pat.is_timestamp, dt.datetime),
    (pat.is_duration, dt.timedelta),
    (pat.is_decimal128, Decimal),
)
