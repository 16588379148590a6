"""The types of state: what a value may be, how it is checked, and how a type may change.

A value has two forms. The *user* form is what a program sees. The *physical* form is what is kept:
a plain Python value that Arrow and msgpack both take, checked once, when it enters the state. For
numbers and texts the two are the same; a nested value is copied on the way in and out, so that
changing what ``value()`` returned does not change the state behind its back.
"""

from __future__ import annotations

import base64
import ctypes
import datetime as dt
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.types as pat

from flowstate.errors import (
    FlowError,
    SerializerError,
    StateDescriptorError,
    StateMigrationError,
    StateTypeError,
)

__all__ = [
    "StateSerializer",
    "ValueType",
    "arrow_type",
    "check_migration",
    "type_from_text",
    "type_to_text",
    "value_type",
]

TypeSpec = Any
"""An Arrow type, a Python builtin or generic (``int``, ``list[str]``), or a serializer."""

Convert = Callable[[Any], Any]

_VERSION_BYTES = 2
_VERSION_MAX = (1 << 8 * _VERSION_BYTES) - 1
_DURATION_MAX = dt.timedelta(microseconds=(1 << 63) - 1)
_BUILTINS: Mapping[Any, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    dt.datetime: pa.timestamp("us", tz="UTC"),
    dt.date: pa.date32(),
    dt.time: pa.time64("us"),
    dt.timedelta: pa.duration("us"),
}


@runtime_checkable
class StateSerializer(Protocol):
    """How values of a user's own class are written.

    The name and the version are kept with the state. Name and class may part: a program may give
    another class the same name as long as it reads what was written. ``deserialize`` is told the
    version that wrote the bytes; it must read every version up to its own.
    """

    name: str
    version: int

    def serialize(self, value: Any) -> bytes:
        """Return the bytes of a value; equal values should have equal bytes."""
        ...

    def deserialize(self, data: bytes, version: int) -> Any:
        """Return the value that this or an older version of the serializer wrote."""
        ...


@dataclass(frozen=True, slots=True)
class ValueType:
    """A type of state with the functions between the two forms of its values."""

    arrow: pa.DataType
    serializer: StateSerializer | None
    to_physical: Convert
    """Check a value and return its physical form; raises ``StateTypeError``."""
    to_user: Convert | None
    """Return the user form; None where it is the physical one."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ValueType):
            return NotImplemented
        return self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(str(self.arrow))

    def __str__(self) -> str:
        if self.serializer is None:
            return str(self.arrow)
        return f"serializer {self.serializer.name!r}"

    def to_json(self) -> dict[str, Any]:
        """Return what a record keeps of the type."""
        if self.serializer is None:
            return {"type": str(self.arrow), "arrow": type_to_text(self.arrow)}
        return {"serializer": self.serializer.name, "version": self.serializer.version}


def value_type(spec: TypeSpec) -> ValueType:
    """Return the type that a descriptor's author named."""
    if isinstance(spec, ValueType):
        return spec
    if not isinstance(spec, type) and isinstance(spec, StateSerializer):
        return _serialized(spec)
    arrow = arrow_type(spec)
    checked, user = _converters(arrow)
    return ValueType(arrow, None, checked, user)


def arrow_type(spec: TypeSpec) -> pa.DataType:
    """Return the Arrow type of a Python builtin or generic, or check one that is given."""
    if isinstance(spec, pa.DataType):
        _check_supported(spec, str(spec))
        return spec
    known = _BUILTINS.get(spec) if isinstance(spec, type) else None
    if known is not None:
        return known
    origin: Any = typing.get_origin(spec)
    arguments = typing.get_args(spec)
    if origin is list and len(arguments) == 1:
        return pa.list_(arrow_type(arguments[0]))
    if origin is dict and len(arguments) == 2:
        return pa.map_(arrow_type(arguments[0]), arrow_type(arguments[1]))
    if origin is tuple and arguments and Ellipsis not in arguments:
        return pa.struct([(f"f{i}", arrow_type(part)) for i, part in enumerate(arguments)])
    raise StateDescriptorError(
        f"{spec!r} is not a type of state. Give an Arrow type, one of bool, int, float, str, "
        f"bytes, datetime, date, time, timedelta, a list[...], dict[..., ...] or tuple[...] of "
        f"these, or a serializer with name, version, serialize and deserialize"
    )


def _check_supported(arrow: pa.DataType, whole: str) -> None:
    if pat.is_struct(arrow):
        names = [field.name for field in arrow]
        if len(set(names)) != len(names):
            raise StateDescriptorError(f"{whole} names a field twice")
        for field in arrow:
            _check_supported(field.type, whole)
    elif _is_list(arrow):
        _check_supported(arrow.value_type, whole)
    elif pat.is_map(arrow):
        _check_supported(arrow.key_type, whole)
        _check_supported(arrow.item_type, whole)
    elif _scalar_converter(arrow) is None:
        raise StateDescriptorError(
            f"{whole}: {arrow} is not supported in state. Use signed integers, float, double, "
            f"bool, string, binary, date32, time64[us], timestamp[us], duration[us], "
            f"decimal128, or lists, maps and structs of these"
        )


# Custom serializers.


def _serialized(serializer: StateSerializer) -> ValueType:
    if not serializer.name or not isinstance(serializer.name, str):
        raise StateDescriptorError("a serializer needs a name, which is kept with the state")
    if type(serializer.version) is not int or not 1 <= serializer.version <= _VERSION_MAX:
        raise StateDescriptorError(
            f"the version of serializer {serializer.name!r} must be 1..{_VERSION_MAX}, "
            f"not {serializer.version!r}"
        )
    prefix = serializer.version.to_bytes(_VERSION_BYTES, "big")

    def to_physical(value: Any) -> bytes:
        data = _guarded(serializer, "serialize", serializer.serialize, value)
        if not isinstance(data, bytes):
            raise SerializerError(
                f"serializer {serializer.name!r} returned {type(data).__name__} instead of bytes"
            )
        return prefix + data

    def to_user(data: bytes) -> Any:
        version = int.from_bytes(data[:_VERSION_BYTES], "big")
        if version > serializer.version:
            raise SerializerError(
                f"a value was written by version {version} of serializer {serializer.name!r}, "
                f"this program has version {serializer.version}: use the newer one"
            )
        read = serializer.deserialize
        return _guarded(serializer, "deserialize", read, data[_VERSION_BYTES:], version)

    return ValueType(pa.binary(), serializer, to_physical, to_user)


def _guarded(
    serializer: StateSerializer, what: str, call: Callable[..., Any], *arguments: Any
) -> Any:
    try:
        return call(*arguments)
    except FlowError:
        raise
    except Exception as error:
        raise SerializerError(
            f"serializer {serializer.name!r} failed to {what} a value: "
            f"{type(error).__name__}: {error}"
        ) from error


# Checks of single values.


def _misfit(value: Any, arrow: pa.DataType) -> StateTypeError:
    # The value itself may be long or secret, and its class is what is at fault nearly always.
    return StateTypeError(f"a value of class {type(value).__name__} is not of type {arrow}")


def _converters(arrow: pa.DataType) -> tuple[Convert, Convert | None]:
    """Return the functions to the physical form and back (None where they are the same)."""
    if pat.is_struct(arrow):
        return _struct_converters(arrow)
    if _is_list(arrow):
        return _list_converters(arrow)
    if pat.is_map(arrow):
        return _map_converters(arrow)
    convert = _scalar_converter(arrow)
    if convert is None:
        raise AssertionError(f"{arrow} passed the check of supported types")
    return convert, None


def _nullable(convert: Convert, nullable: bool, arrow: pa.DataType, where: str) -> Convert:
    def check(value: Any) -> Any:
        if value is not None:
            return convert(value)
        if not nullable:
            raise StateTypeError(f"{where} of {arrow} must not be null")
        return None

    return check


def _optional(convert: Convert | None) -> Convert:
    if convert is None:
        return lambda value: value
    return lambda value: None if value is None else convert(value)


def _struct_converters(arrow: pa.DataType) -> tuple[Convert, Convert]:
    names = [field.name for field in arrow]
    known = frozenset(names)
    pairs = [_converters(field.type) for field in arrow]
    checks = [
        (field.name, _nullable(pair[0], field.nullable, arrow, f"field {field.name!r}"))
        for field, pair in zip(arrow, pairs, strict=True)
    ]
    copies = [(name, _optional(pair[1])) for name, pair in zip(names, pairs, strict=True)]

    def to_physical(value: Any) -> dict[str, Any]:
        if isinstance(value, tuple | list):
            if len(value) != len(names):
                raise StateTypeError(f"{len(value)} values given for the {len(names)} of {arrow}")
            value = dict(zip(names, value, strict=True))
        elif not isinstance(value, Mapping):
            raise _misfit(value, arrow)
        elif not known.issuperset(value):
            extra = sorted(map(str, set(value) - known))
            raise StateTypeError(f"{arrow} has no field {', '.join(map(repr, extra))}")
        return {name: check(value.get(name)) for name, check in checks}

    def to_user(value: dict[str, Any]) -> dict[str, Any]:
        return {name: copy(value.get(name)) for name, copy in copies}

    return to_physical, to_user


def _list_converters(arrow: pa.DataType) -> tuple[Convert, Convert]:
    check, copy = _converters(arrow.value_type)
    check = _nullable(check, arrow.value_field.nullable, arrow, "an element")
    copy_one = _optional(copy)

    def to_physical(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple | np.ndarray) or (
            isinstance(value, np.ndarray) and value.ndim == 0
        ):
            raise _misfit(value, arrow)
        return [check(element) for element in value]

    def to_user(value: list[Any]) -> list[Any]:
        return [copy_one(element) for element in value] if copy else list(value)

    return to_physical, to_user


def _map_converters(arrow: pa.DataType) -> tuple[Convert, Convert]:
    check_key, copy_key = _converters(arrow.key_type)
    check_item, copy_item = _converters(arrow.item_type)
    check_key = _nullable(check_key, False, arrow, "a key")
    check_item = _nullable(check_item, arrow.item_field.nullable, arrow, "a value")
    key_of, item_of = _optional(copy_key), _optional(copy_item)

    def to_physical(value: Any) -> list[tuple[Any, Any]]:
        if not isinstance(value, Mapping):
            raise _misfit(value, arrow)
        return [(check_key(key), check_item(item)) for key, item in value.items()]

    def to_user(value: list[tuple[Any, Any]]) -> dict[Any, Any]:
        return {key_of(key): item_of(item) for key, item in value}

    return to_physical, to_user


def _scalar_converter(arrow: pa.DataType) -> Convert | None:
    if pat.is_signed_integer(arrow):
        return _int_converter(arrow)
    if pat.is_float64(arrow) or pat.is_float32(arrow):
        return _float_converter(arrow)
    if pat.is_string(arrow) or pat.is_large_string(arrow):
        return _text_converter(arrow)
    if pat.is_decimal128(arrow):
        return _decimal_converter(arrow)
    if pat.is_timestamp(arrow) and arrow.unit == "us":
        return _datetime_converter(arrow)
    for accepts, classes, convert in _PLAIN:
        if accepts(arrow):
            return _plain_converter(arrow, classes, convert)
    return None


def _int_converter(arrow: pa.DataType) -> Convert:
    limit = 1 << (arrow.bit_width - 1)

    def convert(value: Any) -> int:
        if type(value) is int and -limit <= value < limit:
            return value
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise _misfit(value, arrow)
        if not -limit <= value < limit:
            raise StateTypeError(f"{value} is out of the range of type {arrow}")
        return int(value)

    return convert


def _float_converter(arrow: pa.DataType) -> Convert:
    single = pat.is_float32(arrow)

    def convert(value: Any) -> float:
        if type(value) is not float:
            if isinstance(value, bool) or not isinstance(
                value, int | float | np.floating | np.integer
            ):
                raise _misfit(value, arrow)
            try:
                value = float(value)
            except OverflowError as error:
                raise StateTypeError(f"an int is out of the range of type {arrow}") from error
        # numpy would warn where a number becomes infinite, which other sums do silently, too.
        return ctypes.c_float(value).value if single else value

    return convert


def _text_converter(arrow: pa.DataType) -> Convert:
    def convert(value: Any) -> str:
        if type(value) is str and value.isascii():
            return value
        if not isinstance(value, str):
            raise _misfit(value, arrow)
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise StateTypeError(f"a text is not valid Unicode: {error.reason}") from error
        # Not str(value): that of an enum with texts for values is the member's name.
        return str.__str__(value)

    return convert


def _decimal_converter(arrow: pa.DataType) -> Convert:
    def convert(value: Any) -> Decimal:
        if not isinstance(value, Decimal):
            raise _misfit(value, arrow)
        try:
            rescaled: Decimal = pa.scalar(value, arrow).as_py()
        except pa.ArrowInvalid as error:
            raise StateTypeError(f"a decimal does not fit {arrow}: {error}") from error
        return rescaled

    return convert


def _datetime_converter(arrow: pa.DataType) -> Convert:
    aware = arrow.tz is not None

    def convert(value: Any) -> dt.datetime:
        if not isinstance(value, dt.datetime):
            raise _misfit(value, arrow)
        if type(value) is not dt.datetime:
            value = _plain_datetime(value, arrow)
        if (value.tzinfo is not None) != aware:
            raise StateTypeError(
                f"{arrow} needs a datetime {'with' if aware else 'without'} a time zone"
            )
        try:
            plain: dt.datetime = value.astimezone(dt.UTC) if aware else value.replace(fold=0)
        except OverflowError as error:
            raise StateTypeError(f"a datetime is out of the range of {arrow}") from error
        return plain

    return convert


def _plain_datetime(value: Any, arrow: pa.DataType) -> dt.datetime:
    """Return a datetime of a class of its own, pandas' for one, as Python's."""
    try:
        day = dt.date(value.year, value.month, value.day)
    except TypeError as error:
        # pandas' NaT is a datetime of no day.
        raise _misfit(value, arrow) from error
    _check_microseconds(value, arrow)
    return dt.datetime.combine(day, value.timetz())


def _check_microseconds(value: Any, arrow: pa.DataType) -> None:
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        raise StateTypeError(f"nanoseconds do not fit {arrow}: round the value to microseconds")


def _plain_converter(arrow: pa.DataType, classes: tuple[type, ...], convert: Convert) -> Convert:
    def checked(value: Any) -> Any:
        if not isinstance(value, classes) or (
            isinstance(value, dt.datetime) and dt.datetime not in classes
        ):
            raise _misfit(value, arrow)
        return convert(value)

    return checked


def _plain_date(value: dt.date) -> dt.date:
    return value if type(value) is dt.date else dt.date(value.year, value.month, value.day)


def _naive_time(value: dt.time) -> dt.time:
    if value.tzinfo is not None:
        raise StateTypeError("a time of day in state has no time zone")
    return value


def _plain_duration(value: dt.timedelta) -> dt.timedelta:
    if type(value) is not dt.timedelta:
        _check_microseconds(value, pa.duration("us"))
        value = dt.timedelta(value.days, value.seconds, value.microseconds)
    if not -_DURATION_MAX <= value <= _DURATION_MAX:
        raise StateTypeError(f"{value} is out of the range of type duration[us]")
    return value


def _is_list(arrow: pa.DataType) -> bool:
    return bool(pat.is_list(arrow) or pat.is_large_list(arrow))


def _is_binary(arrow: pa.DataType) -> bool:
    return bool(pat.is_binary(arrow) or pat.is_large_binary(arrow))


def _is_time(arrow: pa.DataType) -> bool:
    return bool(pat.is_time64(arrow) and arrow.unit == "us")


def _is_duration(arrow: pa.DataType) -> bool:
    return bool(pat.is_duration(arrow) and arrow.unit == "us")


_PLAIN: tuple[tuple[Callable[[pa.DataType], bool], tuple[type, ...], Convert], ...] = (
    (pat.is_boolean, (bool, np.bool_), bool),
    (_is_binary, (bytes, bytearray, memoryview), bytes),
    (pat.is_date32, (dt.date,), _plain_date),
    (_is_time, (dt.time,), _naive_time),
    (_is_duration, (dt.timedelta,), _plain_duration),
)


# Types as text, and how a type may change between two checkpoints.


def type_to_text(arrow: pa.DataType) -> str:
    """Write an Arrow type as text that :func:`type_from_text` reads exactly."""
    schema = pa.schema([pa.field("t", arrow)])
    return base64.b64encode(schema.serialize()).decode()


def type_from_text(text: str) -> pa.DataType:
    """Read an Arrow type back."""
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
    return schema.field(0).type


def check_migration(old: Mapping[str, Any], new: ValueType, where: str) -> None:
    """Refuse a type that what is stored cannot be turned into without loss."""
    if "serializer" in old or new.serializer is not None:
        _check_serializer_migration(old, new, where)
        return
    _check_arrow_migration(type_from_text(old["arrow"]), new.arrow, where)


def _check_serializer_migration(old: Mapping[str, Any], new: ValueType, where: str) -> None:
    before = f"serializer {old['serializer']!r}" if "serializer" in old else old["type"]
    if new.serializer is None or old.get("serializer") != new.serializer.name:
        raise StateMigrationError(f"{where} was written with {before}, the program has {new}")
    if old["version"] > new.serializer.version:
        raise StateMigrationError(
            f"{where} was written by version {old['version']} of {before}, the program has "
            f"version {new.serializer.version}: use the newer program"
        )


def _check_arrow_migration(old: pa.DataType, new: pa.DataType, where: str) -> None:
    if old.equals(new) or _widens(old, new):
        return
    if pat.is_struct(old) and pat.is_struct(new):
        _check_struct_migration(old, new, where)
    elif _is_list(old) and old.id == new.id:
        _check_null_migration(old.value_field, new.value_field, f"{where}[]")
        _check_arrow_migration(old.value_type, new.value_type, f"{where}[]")
    elif pat.is_map(old) and pat.is_map(new) and old.key_type.equals(new.key_type):
        _check_null_migration(old.item_field, new.item_field, f"{where}{{}}")
        _check_arrow_migration(old.item_type, new.item_type, f"{where}{{}}")
    else:
        raise StateMigrationError(
            f"{where} was written as {old} and cannot become {new}. Fields may be added if they "
            f"are nullable, and numbers may become wider; for anything else use a new state name"
        )


def _check_struct_migration(old: pa.DataType, new: pa.DataType, where: str) -> None:
    before = {field.name: field for field in old}
    after = {field.name: field for field in new}
    for name, field in before.items():
        if name not in after:
            raise StateMigrationError(
                f"{where}.{name} was written and is not in the program any more. Keep the field, "
                f"or use a new state name"
            )
        _check_null_migration(field, after[name], f"{where}.{name}")
        _check_arrow_migration(field.type, after[name].type, f"{where}.{name}")
    for name, field in after.items():
        if name not in before and not field.nullable:
            raise StateMigrationError(
                f"{where}.{name} is new and not nullable, so what is stored cannot have it. Make "
                f"the field nullable"
            )


def _check_null_migration(old: pa.Field, new: pa.Field, where: str) -> None:
    if old.nullable and not new.nullable:
        raise StateMigrationError(
            f"{where} was nullable and no longer is, but nulls may be stored. Keep it nullable"
        )


def _widens(old: pa.DataType, new: pa.DataType) -> bool:
    if pat.is_signed_integer(old) and pat.is_signed_integer(new):
        return bool(old.bit_width <= new.bit_width)
    if pat.is_signed_integer(old) and pat.is_float64(new):
        return bool(old.bit_width <= 32)
    if pat.is_decimal128(old) and pat.is_decimal128(new):
        whole = old.precision - old.scale <= new.precision - new.scale
        return bool(whole and old.scale <= new.scale)
    pairs = (
        (pat.is_float32, pat.is_float64),
        (pat.is_string, pat.is_large_string),
        (pat.is_binary, pat.is_large_binary),
    )
    return any(narrow(old) and wide(new) for narrow, wide in pairs)
