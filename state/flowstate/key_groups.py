"""Key groups: which slice of the keyed state a key belongs to, and which subtask owns the slice.

A key group is the unit in which keyed state moves when the parallelism changes. The number of key
groups is the max parallelism, and it stays what it was when the state was first written.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from flowstate import _java_hash, _spark_hash
from flowstate.errors import KeyGroupError

__all__ = [
    "MAX_PARALLELISM_LIMIT",
    "KeyGroupAssigner",
    "KeyGroupRange",
    "check_parallelism",
    "default_max_parallelism",
    "key_group_of",
    "key_group_range_of",
    "key_grouper",
    "key_groups_of",
    "subtask_index_of",
    "subtask_indexes_of",
]

MAX_PARALLELISM_LIMIT = 32768

_MIN_DEFAULT_MAX_PARALLELISM = 128
_NULL_KEY = "Assigned key must not be null!"
# Java's hash of a key costs a microsecond in Python, and streams repeat their keys. Both bounds
# together keep one grouper's memory within a few megabytes.
_CACHED_KEYS = 1 << 14
_CACHED_KEY_LENGTH = 64

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
# No decimal of Arrow or Spark has more digits, so nothing is rounded on the way to an integer.
_EXACT = decimal.Context(prec=76, traps=[decimal.Inexact, decimal.InvalidOperation])


class KeyGroupAssigner(StrEnum):
    """How a key gets its key group; it belongs to the state as the max parallelism does.

    ``FLINK`` is Flink's own assignment, for state that is compared or exchanged with Flink.
    ``XXHASH64`` is Spark's ``pmod(xxhash64(key), max_parallelism)``, so that Spark can compute the
    key group of each row by itself, in SQL.
    """

    FLINK = "flink"
    XXHASH64 = "xxhash64"


@dataclass(frozen=True, slots=True, order=True)
class KeyGroupRange:
    """A contiguous range of key groups; both ends belong to it, as in Flink."""

    start: int
    end: int

    def __post_init__(self) -> None:
        _check_int("start of a key-group range", self.start)
        _check_int("end of a key-group range", self.end)
        if not 0 <= self.start <= self.end < MAX_PARALLELISM_LIMIT:
            raise KeyGroupError(
                f"a key-group range must lie within 0..{MAX_PARALLELISM_LIMIT - 1} and must not "
                f"end before it starts, not {self.start}..{self.end}"
            )

    def __contains__(self, key_group: object) -> bool:
        if not isinstance(key_group, int | np.integer):
            return False
        return bool(self.start <= key_group <= self.end)

    def __len__(self) -> int:
        return self.end - self.start + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end + 1))

    def __str__(self) -> str:
        return f"{self.start}..{self.end}"

    def intersect(self, other: KeyGroupRange) -> KeyGroupRange | None:
        """Return the key groups that are in both ranges, or None where there are none."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return KeyGroupRange(start, end) if start <= end else None


def check_parallelism(*, parallelism: int, max_parallelism: int) -> None:
    """Refuse a parallelism that is out of bounds or above the max parallelism."""
    _check_bounds("Operator parallelism", parallelism)
    _check_bounds("Max parallelism", max_parallelism)
    if parallelism > max_parallelism:
        raise KeyGroupError(
            f"Maximum parallelism must not be smaller than parallelism. It is {max_parallelism}, "
            f"the parallelism is {parallelism}"
        )


def default_max_parallelism(parallelism: int) -> int:
    """Return Flink's max parallelism for a new state: room to grow to about 1.5 times."""
    _check_bounds("Operator parallelism", parallelism)
    wanted = parallelism + parallelism // 2
    power = 1 << (wanted - 1).bit_length()
    return min(max(power, _MIN_DEFAULT_MAX_PARALLELISM), MAX_PARALLELISM_LIMIT)


def key_group_range_of(
    *, subtask_index: int, parallelism: int, max_parallelism: int
) -> KeyGroupRange:
    """Return the key groups that a subtask owns; the subtasks of an operator share them all."""
    check_parallelism(parallelism=parallelism, max_parallelism=max_parallelism)
    _check_int("subtask index", subtask_index)
    if not 0 <= subtask_index < parallelism:
        raise KeyGroupError(f"subtask index must be 0..{parallelism - 1}, not {subtask_index}")
    return KeyGroupRange(
        (subtask_index * max_parallelism + parallelism - 1) // parallelism,
        ((subtask_index + 1) * max_parallelism - 1) // parallelism,
    )


def subtask_index_of(key_group: int, *, parallelism: int, max_parallelism: int) -> int:
    """Return the subtask that owns a key group."""
    check_parallelism(parallelism=parallelism, max_parallelism=max_parallelism)
    if not 0 <= key_group < max_parallelism:
        raise KeyGroupError(f"key group must be 0..{max_parallelism - 1}, not {key_group}")
    return int(key_group) * parallelism // max_parallelism


def subtask_indexes_of(
    key_groups: npt.NDArray[np.uint16], *, parallelism: int, max_parallelism: int
) -> npt.NDArray[np.uint16]:
    """Return the subtask that owns each key group, as :func:`subtask_index_of` does of one."""
    check_parallelism(parallelism=parallelism, max_parallelism=max_parallelism)
    if len(key_groups) and int(key_groups.max()) >= max_parallelism:
        raise KeyGroupError(
            f"key group must be 0..{max_parallelism - 1}, not {int(key_groups.max())}"
        )
    # In 32 bits, because the product of a key group and the parallelism needs up to 30.
    products = key_groups.astype(np.uint32) * np.uint32(parallelism)
    return (products // np.uint32(max_parallelism)).astype(np.uint16)


def key_group_of(
    key: Any,
    key_type: pa.DataType,
    *,
    max_parallelism: int,
    assigner: KeyGroupAssigner = KeyGroupAssigner.FLINK,
) -> int:
    """Return the key group of one key. For many keys of one type, see :func:`key_grouper`."""
    return key_grouper(key_type, max_parallelism=max_parallelism, assigner=assigner)(key)


def key_grouper(
    key_type: pa.DataType,
    *,
    max_parallelism: int,
    assigner: KeyGroupAssigner = KeyGroupAssigner.FLINK,
) -> Callable[[Any], int]:
    """Return the function from a key of this type to its key group.

    The type decides, not the value: an ``int`` key of -1 has different key groups as int32 and as
    int64. A composite key is a struct, its value a tuple of the fields in order or a dict.
    """
    _check_bounds("Max parallelism", max_parallelism)
    if KeyGroupAssigner(assigner) is KeyGroupAssigner.XXHASH64:
        return _spark_grouper(key_type, max_parallelism)
    return _flink_grouper(key_type, max_parallelism)


def key_groups_of(
    keys: pa.Array | pa.ChunkedArray,
    *,
    max_parallelism: int,
    assigner: KeyGroupAssigner = KeyGroupAssigner.FLINK,
) -> npt.NDArray[np.uint16]:
    """Return the key group of each row of a column, as :func:`key_group_of` does of one key."""
    _check_bounds("Max parallelism", max_parallelism)
    if keys.null_count:
        raise KeyGroupError(f"{_NULL_KEY} {keys.null_count} of {len(keys)} keys are null")
    if KeyGroupAssigner(assigner) is KeyGroupAssigner.XXHASH64:
        groups_of = _spark_groups
    else:
        groups_of = _flink_groups
    if not isinstance(keys, pa.ChunkedArray):
        return groups_of(keys, max_parallelism)
    # An empty chunk in front has the type checked even where there are no chunks at all.
    chunks = [pa.array([], type=keys.type), *keys.chunks]
    return np.concatenate([groups_of(chunk, max_parallelism) for chunk in chunks])


def _flink_grouper(key_type: pa.DataType, max_parallelism: int) -> Callable[[Any], int]:
    physical, java_hash = _physical_form(key_type), _java_hash.hasher(key_type)
    murmur = _java_hash.murmur

    def group_of(value: Any) -> int:
        return murmur(java_hash(value)) % max_parallelism

    # Equal numbers and texts have equal hashes, but 0.0 and -0.0 do not: floats are not cached.
    sized = _is_text(key_type) or _is_bytes(key_type)
    cached = lru_cache(_CACHED_KEYS)(group_of)

    def group_of_int(key: Any) -> int:
        return cached(physical(key))

    def group_of_sized(key: Any) -> int:
        value = physical(key)
        return cached(value) if len(value) <= _CACHED_KEY_LENGTH else group_of(value)

    def group_of_any(key: Any) -> int:
        return group_of(physical(key))

    if pat.is_signed_integer(key_type):
        return group_of_int
    return group_of_sized if sized else group_of_any


def _spark_grouper(key_type: pa.DataType, max_parallelism: int) -> Callable[[Any], int]:
    spark_hash, physical = _spark_hash.hasher(key_type), _physical_form(key_type)
    # What the sign bit adds to an unsigned hash, beyond what it adds to Spark's signed one.
    excess = (1 << 64) % max_parallelism

    def group_of(key: Any) -> int:
        hashed = spark_hash(physical(key), _spark_hash.SEED)
        return (hashed - excess if hashed >> 63 else hashed) % max_parallelism

    return group_of


def _flink_groups(keys: pa.Array, max_parallelism: int) -> npt.NDArray[np.uint16]:
    codes = _java_hash.murmur_array(_java_hash.hash_array(keys))
    if max_parallelism & (max_parallelism - 1) == 0:
        codes &= np.uint32(max_parallelism - 1)
    else:
        codes %= np.uint32(max_parallelism)
    return codes.astype(np.uint16)


def _spark_groups(keys: pa.Array, max_parallelism: int) -> npt.NDArray[np.uint16]:
    signed = _spark_hash.hash_array(keys).view(np.int64)
    if max_parallelism & (max_parallelism - 1) == 0:
        signed &= np.int64(max_parallelism - 1)
    else:
        # numpy's remainder has the sign of the divisor, as pmod has.
        signed %= np.int64(max_parallelism)
    return signed.astype(np.uint16)


def _check_int(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise KeyGroupError(f"{what} must be an int, not {value!r}")


def _check_bounds(what: str, value: int) -> None:
    _check_int(what, value)
    if not 1 <= value <= MAX_PARALLELISM_LIMIT:
        raise KeyGroupError(
            f"{what} not within bounds: {value}. It must be 1..{MAX_PARALLELISM_LIMIT}"
        )


# The physical form of a key is what the hash functions take: an int, float, bool, str or bytes, a
# tuple of these (with None for null fields), and whole numbers for dates, times and decimals.


def _physical_form(key_type: pa.DataType) -> Callable[[Any], Any]:
    """Return the function that checks a key against its type and gives its physical form."""
    convert = _converter(key_type)

    def physical(key: Any) -> Any:
        if key is None:
            raise KeyGroupError(_NULL_KEY)
        return convert(key)

    return physical


def _converter(key_type: pa.DataType) -> Callable[[Any], Any]:
    if pat.is_struct(key_type):
        return _struct_converter(key_type)
    if pat.is_list(key_type) or pat.is_large_list(key_type):
        return _list_converter(key_type)
    if pat.is_signed_integer(key_type):
        return _int_converter(key_type)
    if pat.is_decimal128(key_type):
        return _decimal_converter(key_type)
    for accepts, classes, convert in _CONVERTERS:
        if accepts(key_type):
            return _checked_converter(key_type, classes, convert)
    # The assigners refuse the types that they do not know, each in its own words.
    return _refusing_converter(key_type)


def _misfit(key: Any, key_type: pa.DataType) -> KeyGroupError:
    # The key itself may be long or secret, and its class is what is at fault nearly always.
    return KeyGroupError(f"a key of class {type(key).__name__} is not a value of type {key_type}")


def _refusing_converter(key_type: pa.DataType) -> Callable[[Any], Any]:
    def convert(key: Any) -> Any:
        raise _misfit(key, key_type)

    return convert


def _checked_converter(
    key_type: pa.DataType, classes: tuple[type, ...], convert: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    # A bool is an int and a datetime is a date to Python, but neither to Arrow nor to Spark.
    lookalike: type | None = {int: bool, dt.date: dt.datetime}.get(classes[0])

    def checked(key: Any) -> Any:
        if not isinstance(key, classes) or (lookalike is not None and isinstance(key, lookalike)):
            raise _misfit(key, key_type)
        try:
            return convert(key)
        except (ValueError, OverflowError) as error:
            raise KeyGroupError(f"a key is not a value of type {key_type}: {error}") from error

    return checked


def _int_converter(key_type: pa.DataType) -> Callable[[Any], int]:
    limit = 1 << (key_type.bit_width - 1)

    def convert(key: Any) -> int:
        if type(key) is not int:
            if isinstance(key, bool) or not isinstance(key, int | np.integer):
                raise _misfit(key, key_type)
            key = int(key)
        if not -limit <= key < limit:
            raise KeyGroupError(f"the key {key} is out of the range of type {key_type}")
        return int(key)

    return convert


def _decimal_converter(key_type: pa.DataType) -> Callable[[Any], int]:
    precision, scale = key_type.precision, key_type.scale

    def unscaled(key: decimal.Decimal) -> int:
        try:
            shifted = key.scaleb(scale, _EXACT).to_integral_exact(context=_EXACT)
        except decimal.DecimalException as error:
            raise ValueError(f"it needs more than {scale} digits after the point") from error
        whole = int(shifted)
        if abs(whole) >= 10**precision:
            raise ValueError(f"it needs more than {precision} digits")
        return whole

    return _checked_converter(key_type, (decimal.Decimal,), unscaled)


def _struct_converter(key_type: pa.DataType) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in key_type]
    converters = [_converter(field.type) for field in key_type]

    def convert(key: Any) -> tuple[Any, ...]:
        values: Sequence[Any]
        if isinstance(key, Mapping):
            if len(key) != len(names) or not all(name in key for name in names):
                raise KeyGroupError(f"a composite key must have the fields {names}, no more")
            values = [key[name] for name in names]
        elif isinstance(key, tuple | list):
            values = key
        else:
            raise _misfit(key, key_type)
        if len(values) != len(names):
            raise KeyGroupError(
                f"a composite key must have {len(names)} fields {names}, not {len(values)}"
            )
        return tuple(
            None if value is None else to_physical(value)
            for value, to_physical in zip(values, converters, strict=True)
        )

    return convert


def _list_converter(key_type: pa.DataType) -> Callable[[Any], tuple[Any, ...]]:
    element = _converter(key_type.value_type)

    def convert(key: Any) -> tuple[Any, ...]:
        if not isinstance(key, tuple | list | np.ndarray):
            raise _misfit(key, key_type)
        return tuple(None if value is None else element(value) for value in key)

    return convert


def _text(key: str) -> str:
    # A lone surrogate, which neither Arrow nor Spark can hold, fails here and not when it is kept.
    key.encode()
    return key


def _double(key: Any) -> float:
    number = float(key)
    if isinstance(key, int | np.integer) and number != key:
        raise ValueError("the integer has more digits than a double")
    return number


def _single(key: Any) -> float:
    with np.errstate(over="raise"):
        try:
            return float(np.float32(_double(key)))
        except FloatingPointError as error:
            raise ValueError("it is out of range") from error


def _micros(span: dt.timedelta) -> int:
    return span // dt.timedelta(microseconds=1)


def _epoch_micros(moment: dt.datetime) -> int:
    # Arrow takes a moment without a time zone for UTC.
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
    return _micros(aware - _EPOCH)


def _epoch_day(day: dt.date) -> int:
    return day.toordinal() - _EPOCH_DAY


def _is_text(key_type: pa.DataType) -> bool:
    return bool(pat.is_string(key_type) or pat.is_large_string(key_type))


def _is_bytes(key_type: pa.DataType) -> bool:
    return bool(pat.is_binary(key_type) or pat.is_large_binary(key_type))


_NUMBERS = (int, float, np.floating, np.integer)
_CONVERTERS: tuple[
    tuple[Callable[[pa.DataType], bool], tuple[type, ...], Callable[[Any], Any]], ...
] = (
    (_is_text, (str,), _text),
    (_is_bytes, (bytes, bytearray, memoryview), bytes),
    (pat.is_boolean, (bool, np.bool_), bool),
    (pat.is_float32, _NUMBERS, _single),
    (pat.is_float64, _NUMBERS, _double),
    (pat.is_date32, (dt.date,), _epoch_day),
    (pat.is_timestamp, (dt.datetime,), _epoch_micros),
    (pat.is_duration, (dt.timedelta,), _micros),
)
