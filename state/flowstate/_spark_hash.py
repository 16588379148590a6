"""Spark's ``xxhash64``, for one key and for whole Arrow columns.

A hash is an unsigned 64-bit number here, which holds the same bits as Spark's ``long``. Each hash
seeds the next one: several columns, the fields of a struct and the elements of an array are folded
from left to right, and a null leaves the seed as it is.

Spark's formulas for an int and a long are XXH64 of their 4 or 8 little-endian bytes, so one key
needs nothing but the xxhash package.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat
from xxhash import xxh64_intdigest

from flowstate._java_hash import byte_rows, fixed_values, validity
from flowstate.errors import KeyGroupError

__all__ = ["SEED", "hash_array", "hash_columns", "hasher"]

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
# From a key in its physical form and a seed to the hash.
Hasher = Callable[[Any, int], int]

SEED = 42
_MAX_LONG_DIGITS = 18

_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5 = np.uint64(0x27D4EB2F165667C5)

_NAN_BITS_32 = np.uint32(0x7FC00000)
_NAN_BITS_64 = np.uint64(0x7FF8000000000000)

# So many rows and their temporaries stay in a core's second-level cache.
_BLOCK_ROWS = 1 << 13
# With fewer rows, or with longer ones, a call of the xxhash package per row is faster than numpy,
# whose cost is one round of calls per 32 bytes of the longest row.
_MIN_ROWS = 128
_MAX_ROW_BYTES = 256


def hash_array(array: pa.Array) -> Hashes:
    """Return ``xxhash64(column)`` of each row; a null row has the seed itself."""
    return hash_columns([array], rows=len(array))


def hash_columns(columns: Iterable[pa.Array], *, rows: int) -> Hashes:
    """Return ``xxhash64(column, column, ...)`` of each row."""
    hashes = np.full(rows, SEED, dtype=np.uint64)
    for column in columns:
        hashes = _fold(column, hashes)
    return hashes


def hasher(key_type: pa.DataType) -> Hasher:
    """Return the function from one key, in its physical form, and a seed to its hash."""
    if pat.is_struct(key_type):
        return _struct_hasher([hasher(field.type) for field in key_type])
    if _is_list(key_type):
        return _list_hasher(hasher(key_type.value_type))
    for accepts, one, _ in _HASHERS:
        if accepts(key_type):
            return one
    raise _unsupported(key_type)


def _fold(array: pa.Array, seeds: Hashes) -> Hashes:
    hashes = _array_hasher(array.type)(array, seeds)
    if array.null_count:
        return np.where(validity(array), hashes, seeds)
    return hashes


def _array_hasher(key_type: pa.DataType) -> Callable[[pa.Array, Hashes], Hashes]:
    if pat.is_struct(key_type):
        return _hash_structs
    if _is_list(key_type):
        return _hash_lists
    for accepts, _, column in _HASHERS:
        if accepts(key_type):
            return column
    raise _unsupported(key_type)


def _unsupported(key_type: pa.DataType) -> KeyGroupError:
    if pat.is_map(key_type):
        return KeyGroupError(
            f"a key of type {key_type} has no key group: Spark does not hash maps. Use a struct "
            f"or an array of entries in a fixed order"
        )
    if pat.is_timestamp(key_type) or pat.is_duration(key_type):
        return KeyGroupError(
            f"a key of type {key_type} has no key group under the assigner 'xxhash64': Spark "
            f"counts in microseconds, cast it to the unit 'us'"
        )
    return KeyGroupError(
        f"a key of type {key_type} has no key group under the assigner 'xxhash64': Spark has no "
        f"such type, cast it to one that Spark has"
    )


def _is_list(key_type: pa.DataType) -> bool:
    return bool(pat.is_list(key_type) or pat.is_large_list(key_type))


def _is_int(key_type: pa.DataType) -> bool:
    return bool(
        pat.is_int8(key_type)
        or pat.is_int16(key_type)
        or pat.is_int32(key_type)
        or pat.is_date32(key_type)
    )


def _is_long(key_type: pa.DataType) -> bool:
    timed = pat.is_timestamp(key_type) or pat.is_duration(key_type)
    return bool(pat.is_int64(key_type) or (timed and key_type.unit == "us"))


def _is_bytes(key_type: pa.DataType) -> bool:
    return bool(pat.is_binary(key_type) or pat.is_large_binary(key_type))


def _is_text(key_type: pa.DataType) -> bool:
    return bool(pat.is_string(key_type) or pat.is_large_string(key_type))


def _is_small_decimal(key_type: pa.DataType) -> bool:
    return bool(pat.is_decimal128(key_type)) and key_type.precision <= _MAX_LONG_DIGITS


# One key.


def _hash_int(value: int, seed: int) -> int:
    return xxh64_intdigest(value.to_bytes(4, "little", signed=True), seed)


def _hash_long(value: int, seed: int) -> int:
    return xxh64_intdigest(value.to_bytes(8, "little", signed=True), seed)


def _hash_float(value: float, seed: int) -> int:
    if value != value:
        return xxh64_intdigest(_NAN_BITS_32.tobytes(), seed)
    # Adding 0.0 turns -0.0 into 0.0, which Spark takes for the same number.
    return xxh64_intdigest(struct.pack("<f", value + 0.0), seed)


def _hash_double(value: float, seed: int) -> int:
    if value != value:
        return xxh64_intdigest(_NAN_BITS_64.tobytes(), seed)
    return xxh64_intdigest(struct.pack("<d", value + 0.0), seed)


def _hash_text(value: str, seed: int) -> int:
    return xxh64_intdigest(value.encode(), seed)


def _hash_big(value: int, seed: int) -> int:
    magnitude = value if value >= 0 else ~value
    size = magnitude.bit_length() // 8 + 1
    return xxh64_intdigest(value.to_bytes(size, "big", signed=True), seed)


def _struct_hasher(fields: Sequence[Hasher]) -> Hasher:
    def hash_struct(values: Sequence[Any], seed: int) -> int:
        for value, hash_field in zip(values, fields, strict=True):
            if value is not None:
                seed = hash_field(value, seed)
        return seed

    return hash_struct


def _list_hasher(hash_element: Hasher) -> Hasher:
    def hash_list(values: Sequence[Any], seed: int) -> int:
        for value in values:
            if value is not None:
                seed = hash_element(value, seed)
        return seed

    return hash_list


# Whole columns.


def _rotated(values: Hashes, bits: int) -> Hashes:
    return values << np.uint64(bits) | values >> np.uint64(64 - bits)


def _finished(hashes: Hashes) -> Hashes:
    hashes = (hashes ^ hashes >> np.uint64(33)) * _PRIME_2
    hashes = (hashes ^ hashes >> np.uint64(29)) * _PRIME_3
    return hashes ^ hashes >> np.uint64(32)


def _with_word(hashes: Hashes, words: Hashes) -> Hashes:
    return _rotated(hashes ^ words * _PRIME_1, 23) * _PRIME_2 + _PRIME_3


def _with_lane(hashes: Hashes, lanes: Hashes) -> Hashes:
    return _rotated(hashes ^ _rotated(lanes * _PRIME_2, 31) * _PRIME_1, 27) * _PRIME_1 + _PRIME_4


def _fold_words(words: Hashes, seeds: Hashes) -> Hashes:
    return _finished(_with_word(seeds + (_PRIME_5 + np.uint64(4)), words))


def _fold_lanes(lanes: Hashes, seeds: Hashes) -> Hashes:
    return _finished(_with_lane(seeds + (_PRIME_5 + np.uint64(8)), lanes))


def _hash_ints(array: pa.Array, seeds: Hashes) -> Hashes:
    values = fixed_values(array, np.dtype(f"<i{array.type.bit_width // 8}"))
    return _fold_words(values.astype(np.int32).view(np.uint32).astype(np.uint64), seeds)


def _hash_longs(array: pa.Array, seeds: Hashes) -> Hashes:
    return _fold_lanes(fixed_values(array, np.uint64), seeds)


def _hash_bools(array: pa.Array, seeds: Hashes) -> Hashes:
    values = array.fill_null(False).to_numpy(zero_copy_only=False)
    return _fold_words(values.astype(np.uint64), seeds)


def _hash_floats(array: pa.Array, seeds: Hashes) -> Hashes:
    values = fixed_values(array, np.float32)
    bits = np.where(values == 0, np.uint32(0), values.view(np.uint32))
    return _fold_words(np.where(np.isnan(values), _NAN_BITS_32, bits).astype(np.uint64), seeds)


def _hash_doubles(array: pa.Array, seeds: Hashes) -> Hashes:
    values = fixed_values(array, np.float64)
    bits = np.where(values == 0, np.uint64(0), values.view(np.uint64))
    return _fold_lanes(np.where(np.isnan(values), _NAN_BITS_64, bits), seeds)


def _hash_binaries(array: pa.Array, seeds: Hashes) -> Hashes:
    data, offsets = byte_rows(array)
    return _fold_bytes(data, offsets[:-1], np.diff(offsets), seeds)


def _hash_small_decimals(array: pa.Array, seeds: Hashes) -> Hashes:
    # The low half of the 128 bits is the whole number when it has at most 18 digits.
    halves = fixed_values(array, np.dtype(("<u8", 2))).reshape(-1, 2)
    return _fold_lanes(np.ascontiguousarray(halves[:, 0]), seeds)


def _hash_big_decimals(array: pa.Array, seeds: Hashes) -> Hashes:
    """Hash the bytes of Java's ``BigInteger.toByteArray``: big-endian, no needless sign bytes."""
    rows = len(array)
    little = fixed_values(array, np.dtype(("u1", 16))).reshape(rows, 16)
    big = np.ascontiguousarray(little[:, ::-1])
    signs = np.where(big[:, :1] >= 0x80, np.uint8(0xFF), np.uint8(0))
    differs = big != signs
    # The last byte always stays, also where all 16 are sign bytes (0 and -1).
    differs[:, 15] = True
    first = differs.argmax(axis=1)
    # Where the first other byte has the wrong top bit, one sign byte in front of it stays.
    wrong_sign = (big[np.arange(rows), first] ^ signs[:, 0]) >= 0x80
    dropped = first - wrong_sign
    starts = np.arange(rows, dtype=np.int64) * 16 + dropped
    return _fold_bytes(big.reshape(-1), starts, (16 - dropped).astype(np.int64), seeds)


def _fold_bytes(
    data: npt.NDArray[np.uint8], starts: Places, lengths: Places, seeds: Hashes
) -> Hashes:
    if len(starts) < _MIN_ROWS:
        return _fold_row_by_row(data, starts, lengths, seeds)
    hashes = np.empty(len(starts), dtype=np.uint64)
    for first in range(0, len(starts), _BLOCK_ROWS):
        rows = slice(first, first + _BLOCK_ROWS)
        short = np.minimum(lengths[rows], _MAX_ROW_BYTES)
        hashes[rows] = _fold_block(data, starts[rows], short, seeds[rows])
    long = np.flatnonzero(lengths > _MAX_ROW_BYTES)
    if len(long):
        hashes[long] = _fold_row_by_row(data, starts[long], lengths[long], seeds[long])
    return hashes


def _fold_row_by_row(
    data: npt.NDArray[np.uint8], starts: Places, lengths: Places, seeds: Hashes
) -> Hashes:
    view = data.data
    rows = (view[start:end] for start, end in zip(starts, starts + lengths, strict=True))
    hashes = map(xxh64_intdigest, rows, seeds.tolist())
    return np.fromiter(hashes, dtype=np.uint64, count=len(starts))


def _fold_block(
    data: npt.NDArray[np.uint8], starts: Places, lengths: Places, seeds: Hashes
) -> Hashes:
    """Compute XXH64 of all rows at once, each round over the rows that still have bytes for it."""
    hashes = seeds + _PRIME_5
    striped = np.flatnonzero(lengths >= 32)
    if len(striped):
        hashes[striped] = _fold_stripes(data, starts[striped], lengths[striped], seeds[striped])
    hashes += lengths.view(np.uint64)
    places = starts + (lengths & ~31)
    lanes, words = _unaligned(data, 8), _unaligned(data, 4)
    for lane in range(3):
        rows = _rows((lengths & 31) >= 8 * (lane + 1))
        hashes[rows] = _with_lane(hashes[rows], lanes[places[rows] + 8 * lane])
    places = starts + (lengths & ~7)
    rows = _rows((lengths & 4) != 0)
    hashes[rows] = _with_word(hashes[rows], words[places[rows]].astype(np.uint64))
    places = starts + (lengths & ~3)
    for index in range(3):
        rows = _rows((lengths & 3) > index)
        units = data[places[rows] + index].astype(np.uint64)
        hashes[rows] = _rotated(hashes[rows] ^ units * _PRIME_5, 11) * _PRIME_1
    return _finished(hashes)


def _fold_stripes(
    data: npt.NDArray[np.uint8], starts: Places, lengths: Places, seeds: Hashes
) -> Hashes:
    lanes = _unaligned(data, 8)
    sums = [seeds + _PRIME_1 + _PRIME_2, seeds + _PRIME_2, seeds.copy(), seeds - _PRIME_1]
    for stripe in range(int(lengths.max()) // 32):
        rows = _rows(lengths >= 32 * (stripe + 1))
        places = starts[rows] + 32 * stripe
        for index, lane_sum in enumerate(sums):
            lane_sum[rows] = _rounded(lane_sum[rows], lanes[places + 8 * index])
    hashes = sum(
        (_rotated(lane_sum, bits) for lane_sum, bits in zip(sums, (1, 7, 12, 18), strict=True)),
        start=np.zeros(len(seeds), dtype=np.uint64),
    )
    for lane_sum in sums:
        hashes = (hashes ^ _rounded(np.zeros_like(hashes), lane_sum)) * _PRIME_1 + _PRIME_4
    return hashes


def _rounded(sums: Hashes, lanes: Hashes) -> Hashes:
    return _rotated(sums + lanes * _PRIME_2, 31) * _PRIME_1


def _rows(chosen: npt.NDArray[np.bool_]) -> slice | Places:
    """Choose rows by index, or by a slice, which does not copy, where all of them are chosen."""
    return slice(None) if chosen.all() else np.flatnonzero(chosen)


def _unaligned(data: npt.NDArray[np.uint8], size: int) -> npt.NDArray[Any]:
    """View little-endian numbers of ``size`` bytes that begin at each byte of the data."""
    count = max(len(data) - size + 1, 0)
    if count == 0:
        return np.zeros(0, dtype=f"<u{size}")
    return np.ndarray((count,), dtype=f"<u{size}", buffer=data, strides=(1,))


def _hash_structs(array: pa.Array, seeds: Hashes) -> Hashes:
    for index in range(array.type.num_fields):
        seeds = _fold(array.field(index), seeds)
    return seeds


def _hash_lists(array: pa.Array, seeds: Hashes) -> Hashes:
    """Fold the first elements of all rows, then the second ones, as long as rows have any."""
    array_hasher = _array_hasher(array.type.value_type)
    if len(array) == 0:
        return array_hasher(array.values.slice(0, 0), seeds)
    width = np.int64 if pat.is_large_list(array.type) else np.int32
    offsets = np.frombuffer(array.buffers()[1], dtype=width)[array.offset :][: len(array) + 1]
    lengths = np.diff(offsets)
    if array.null_count:
        lengths = np.where(validity(array), lengths, 0)
    hashes = seeds.copy()
    for index in range(int(lengths.max())):
        rows = np.flatnonzero(lengths > index)
        elements = array.values.take(pa.array(offsets[rows] + index))
        hashes[rows] = _fold(elements, hashes[rows])
    return hashes


_HASHERS: tuple[
    tuple[Callable[[pa.DataType], bool], Hasher, Callable[[pa.Array, Hashes], Hashes]], ...
] = (
    (_is_int, _hash_int, _hash_ints),
    (_is_long, _hash_long, _hash_longs),
    (pat.is_boolean, _hash_int, _hash_bools),
    (pat.is_float32, _hash_float, _hash_floats),
    (pat.is_float64, _hash_double, _hash_doubles),
    (_is_text, _hash_text, _hash_binaries),
    (_is_bytes, xxh64_intdigest, _hash_binaries),
    (_is_small_decimal, _hash_long, _hash_small_decimals),
    (pat.is_decimal128, _hash_big, _hash_big_decimals),
)
