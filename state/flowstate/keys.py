"""Keys as state holds them: one canonical Python value each, and their Arrow columns."""

from __future__ import annotations

import datetime as dt
import types
import typing
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from flowstate.errors import StateDescriptorError, StateTypeError
from flowstate.types import arrow_type, value_type

__all__ = ["KeyType", "canonical_column", "physical_column", "python_type"]

# One object for all NaNs, because a dict finds a NaN only by its identity.
_NAN = float("nan")


class KeyType:
    """The type of keys, namespaces and map keys: a scalar, a tuple, or a list of these.

    The canonical form is hashable and equal for keys that are one key: -0.0 is 0.0, as in SQL,
    and every NaN is the same key. A composite key is a tuple in the order of the fields; a list
    is a tuple of its elements.
    """

    def __init__(self, spec: Any) -> None:
        self.arrow: pa.DataType = arrow_type(spec)
        self.canonical: Callable[[Any], Any] = _canonicalizer(self.arrow)
        """Check a key and return its canonical form; raises ``StateTypeError``."""
        self.has_floats = _has_floats(self.arrow)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyType) and bool(self.arrow.equals(other.arrow))

    def __hash__(self) -> int:
        return hash(str(self.arrow))

    def to_array(self, keys: Sequence[Any]) -> pa.Array:
        """Return canonical keys (or nulls) as a column."""
        return _key_array(keys, self.arrow)

    def to_list(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        """Return the canonical keys of a column."""
        keys = physical_column(array, composite=True)
        if not self.has_floats:
            return keys
        canonical = self.canonical
        return [None if key is None else canonical(key) for key in keys]


def physical_column(array: pa.Array | pa.ChunkedArray, *, composite: bool = False) -> list[Any]:
    """Return a column as Python values; composite keys as tuples instead of dicts and lists."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if _is_zoned(array.type):
        array = array.cast(_in_utc(array.type))
    if composite and pat.is_nested(array.type):
        return _key_values(array)
    values: list[Any] = array.to_pylist()
    return values


def _key_values(array: pa.Array) -> list[Any]:
    if pat.is_struct(array.type):
        columns = [_key_values(array.field(i)) for i in range(array.type.num_fields)]
        keys: list[Any] = list(zip(*columns, strict=True)) if columns else [()] * len(array)
    elif pat.is_nested(array.type):
        elements = _key_values(array.flatten())
        ends = np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy()).tolist()
        starts = [0, *ends[:-1]]
        keys = [tuple(elements[a:b]) for a, b in zip(starts, ends, strict=False)]
    else:
        values: list[Any] = array.to_pylist()
        return values
    if array.null_count:
        valid = array.is_valid().to_pylist()
        keys = [key if ok else None for key, ok in zip(keys, valid, strict=True)]
    return keys


def _key_array(keys: Sequence[Any], arrow: pa.DataType) -> pa.Array:
    # Built by hand, because Arrow may take a tuple of pairs for the items of a dict.
    if pat.is_struct(arrow):
        columns = [
            _key_array([None if key is None else key[i] for key in keys], field.type)
            for i, field in enumerate(arrow)
        ]
        mask = pa.array([key is None for key in keys], pa.bool_())
        return pa.StructArray.from_arrays(columns, fields=list(arrow), mask=mask)
    if pat.is_nested(arrow):
        elements = _key_array([part for key in keys for part in key or ()], arrow.value_type)
        ends = np.cumsum([0, *(len(key or ()) for key in keys)])
        mask = pa.array([key is None for key in keys], pa.bool_())
        return _list_kind(arrow).from_arrays(ends, elements, type=arrow, mask=mask)
    return pa.array(keys, arrow)


def _list_kind(arrow: pa.DataType) -> Any:
    return pa.LargeListArray if pat.is_large_list(arrow) else pa.ListArray


def _is_zoned(arrow: pa.DataType) -> bool:
    if pat.is_nested(arrow):
        return any(_is_zoned(arrow.field(i).type) for i in range(arrow.num_fields))
    return bool(pat.is_timestamp(arrow) and arrow.tz not in {None, "UTC"})


def _in_utc(arrow: pa.DataType) -> pa.DataType:
    """Return the type with all its times in UTC, as the physical form has them.

    In the hour that a zone's clocks repeat, Python holds a time in that zone for unequal to the
    same time in any other, so a key that comes back in its zone would not be found.
    """
    if pat.is_struct(arrow):
        return pa.struct([field.with_type(_in_utc(field.type)) for field in arrow])
    if pat.is_map(arrow):
        keys, items = arrow.key_field, arrow.item_field
        return pa.map_(
            keys.with_type(_in_utc(keys.type)),
            items.with_type(_in_utc(items.type)),
            keys_sorted=arrow.keys_sorted,
        )
    if pat.is_nested(arrow):
        make = pa.large_list if pat.is_large_list(arrow) else pa.list_
        return make(arrow.value_field.with_type(_in_utc(arrow.value_type)))
    return pa.timestamp(arrow.unit, "UTC") if _is_zoned(arrow) else arrow


def canonical_column(keys: pa.Array) -> pa.Array:
    """Return a column of keys in which floats that are one key are equal bit by bit."""
    kind = keys.type
    if not _has_floats(kind):
        return keys
    if pat.is_struct(kind):
        fields = [canonical_column(keys.field(i)) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=keys.is_null())
    if pat.is_nested(kind):
        lengths = pc.fill_null(pc.list_value_length(keys), 0).to_numpy()
        ends = np.concatenate(([0], np.cumsum(lengths)))
        elements = canonical_column(keys.flatten())
        return _list_kind(kind).from_arrays(ends, elements, type=kind, mask=keys.is_null())
    zero, nan = pa.scalar(0.0, kind), pa.scalar(_NAN, kind)
    return pc.if_else(pc.is_nan(keys), nan, pc.add(keys, zero))


def _has_floats(arrow: pa.DataType) -> bool:
    if pat.is_nested(arrow):
        return any(_has_floats(arrow.field(i).type) for i in range(arrow.num_fields))
    return bool(pat.is_floating(arrow))


def _canonicalizer(arrow: pa.DataType) -> Callable[[Any], Any]:
    if pat.is_struct(arrow):
        return _tuple_canonicalizer(arrow)
    if pat.is_list(arrow) or pat.is_large_list(arrow):
        return _list_canonicalizer(arrow)
    if pat.is_nested(arrow):
        raise StateDescriptorError(
            f"{arrow} cannot be a key: a map has no order, so that equal ones may look different. "
            f"Use a list of its entries in a fixed order"
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
    if not arrow.num_fields:
        raise StateDescriptorError(f"{arrow} cannot be a key: it has no fields")
    fields = [(field.name, field.nullable, _canonicalizer(field.type)) for field in arrow]
    names = frozenset(field.name for field in arrow)

    def canonical(key: Any) -> tuple[Any, ...]:
        if isinstance(key, dict):
            if not names.issuperset(key):
                extra = sorted(map(str, set(key) - names))
                raise StateTypeError(f"the key {arrow} has no field {', '.join(map(repr, extra))}")
            key = tuple(key.get(name) for name, _, _ in fields)
        if not isinstance(key, tuple | list) or len(key) != len(fields):
            raise StateTypeError(f"a key of {arrow} is a tuple of {len(fields)} values")
        return tuple(
            _canonical_field(part, name, nullable, check, arrow)
            for part, (name, nullable, check) in zip(key, fields, strict=True)
        )

    return canonical


def _list_canonicalizer(arrow: pa.DataType) -> Callable[[Any], Any]:
    check, nullable = _canonicalizer(arrow.value_type), arrow.value_field.nullable

    def canonical(key: Any) -> tuple[Any, ...]:
        if not isinstance(key, tuple | list):
            raise StateTypeError(f"a key of {arrow} is a list or tuple of its elements")
        return tuple(_canonical_field(part, "element", nullable, check, arrow) for part in key)

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
        inner = [python_type(field.type, composite=composite) | None for field in arrow]
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
        element: Any = python_type(arrow.value_type, composite=composite) | None
        return types.GenericAlias(tuple, (element, ...)) if composite else list[element]
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
