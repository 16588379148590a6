"""Java's hash codes and Flink's scrambling of them, for one key and for whole Arrow columns.

A hash is an unsigned 32-bit number here, which holds the same bits as Java's signed ``int``.

Variable-length keys are hashed without a loop over rows. Java's hash of a row is a polynomial in
31, and 31 is odd, so it has an inverse modulo 2^32: weigh each unit of a whole block by a falling
power of 31, sum up row by row with one ``reduceat``, and weigh each sum up again by the power that
belongs to the row's end. That costs one pass over the bytes, however the lengths are spread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from flowstate.errors import KeyGroupError

__all__ = [
    "byte_rows",
    "fixed_values",
    "hash_array",
    "hasher",
    "murmur",
    "murmur_array",
    "validity",
]

Hashes = npt.NDArray[np.uint32]
Hasher = Callable[[Any], int]

_MASK = 0xFFFFFFFF
_TRUE, _FALSE = 1231, 1237
_NAN_BITS_32 = 0x7FC00000
_NAN_BITS_64 = 0x7FF8000000000000

# A block of units, its weights and its products fit into a core's second-level cache. It is
# also the bound on memory: a longer row is hashed in pieces of this size.
_BLOCK_UNITS = 1 << 15
_BLOCK_ROWS = 1 << 14
# Below this many units a Python loop is faster than numpy's fixed cost.
_LOOP_UNITS = 64


def _powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, dtype=np.uint32)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint32)


_POWERS = _powers(31, _BLOCK_UNITS + 1)
# The weight of unit i is 31^-(i+1), so that 31^end weighs the sum of a row up.
_WEIGHTS = _powers(pow(31, -1, 1 << 32), _BLOCK_UNITS + 1)[1:]


def fixed_values(array: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """View the values of a fixed-width array; what stands in its null slots is arbitrary."""
    buffer = array.buffers()[1]
    if len(array) == 0 or buffer is None:
        return np.zeros(len(array), dtype=dtype)
    return np.frombuffer(buffer, dtype=dtype)[array.offset : array.offset + len(array)]


def validity(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Return True for each slot that is not null."""
    valid: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def byte_rows(array: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the bytes of a string or binary array and the n + 1 offsets of its rows in them.

    Null rows come out empty: Arrow allows any bytes behind them, even such as are not text.
    """
    if array.null_count:
        array = array.fill_null("" if _is_text(array.type) else b"")
    if len(array) == 0:
        return np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    _, offset_buffer, data_buffer = array.buffers()
    width = np.int64 if pat.is_large_string(array.type) or pat.is_large_binary(array.type) else "i4"
    offsets = np.frombuffer(offset_buffer, dtype=width)[array.offset :][: len(array) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    if first == last:
        return np.zeros(0, dtype=np.uint8), np.zeros(len(array) + 1, dtype=np.int64)
    data = np.frombuffer(data_buffer, dtype=np.uint8)[first:last]
    return data, offsets.astype(np.int64) - first


def murmur(code: int) -> int:
    """Scramble a hash code as Flink's ``MathUtils.murmurHash`` does: 0 .. 2^31 - 1."""
    code = (code * 0xCC9E2D51) & _MASK
    code = (code << 15 | code >> 17) & _MASK
    code = (code * 0x1B873593) & _MASK
    code = (code << 13 | code >> 19) & _MASK
    code = (code * 5 + 0xE6546B64) & _MASK ^ 4
    code ^= code >> 16
    code = (code * 0x85EBCA6B) & _MASK
    code ^= code >> 13
    code = (code * 0xC2B2AE35) & _MASK
    code ^= code >> 16
    # The absolute value of the signed number, where Java's smallest int has none and becomes 0.
    return code if code < 1 << 31 else (1 << 32) - code & 0x7FFFFFFF


def murmur_array(codes: Hashes) -> Hashes:
    """Scramble a column of hash codes; see :func:`murmur`."""
    result = codes.copy()
    other = np.empty(min(len(result), _BLOCK_ROWS), dtype=np.uint32)
    for start in range(0, len(result), _BLOCK_ROWS):
        code = result[start : start + _BLOCK_ROWS]
        _murmur_in_place(code, other[: len(code)])
    return result


def _murmur_in_place(code: Hashes, other: Hashes) -> None:
    for factor, bits in ((0xCC9E2D51, 15), (0x1B873593, 13)):
        code *= np.uint32(factor)
        np.right_shift(code, 32 - bits, out=other)
        code <<= np.uint32(bits)
        code |= other
    code *= np.uint32(5)
    code += np.uint32(0xE6546B64)
    code ^= np.uint32(4)
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        np.right_shift(code, bits, out=other)
        code ^= other
        code *= np.uint32(factor)
    np.right_shift(code, 16, out=other)
    code ^= other
    signed = code.view(np.int32)
    np.absolute(signed, out=signed)
    # The absolute value of -2^31 is itself; without its sign bit it is the 0 that Flink takes.
    code &= np.uint32(0x7FFFFFFF)


def hash_array(array: pa.Array) -> Hashes:
    """Return Java's hash code of each row; a null row has the hash code 0."""
    codes = _array_hasher(array.type)(array)
    if array.null_count:
        codes[~validity(array)] = 0
    return codes


def hasher(key_type: pa.DataType) -> Hasher:
    """Return the function from one key, in its physical form, to Java's hash code."""
    if pat.is_struct(key_type):
        return _tuple_hasher([hasher(field.type) for field in key_type])
    for accepts, one, _ in _HASHERS:
        if accepts(key_type):
            return one
    raise _unsupported(key_type)


def _array_hasher(key_type: pa.DataType) -> Callable[[pa.Array], Hashes]:
    if pat.is_struct(key_type):
        return _hash_structs
    for accepts, _, column in _HASHERS:
        if accepts(key_type):
            return column
    raise _unsupported(key_type)


def _unsupported(key_type: pa.DataType) -> KeyGroupError:
    return KeyGroupError(
        f"a key of type {key_type} has no key group under the assigner 'flink': cast it to an "
        f"integer of 8 to 64 signed bits, bool, float, double, string or binary, use a struct of "
        f"these, or choose the assigner 'xxhash64'"
    )


def _is_text(key_type: pa.DataType) -> bool:
    return bool(pat.is_string(key_type) or pat.is_large_string(key_type))


def _is_bytes(key_type: pa.DataType) -> bool:
    return bool(pat.is_binary(key_type) or pat.is_large_binary(key_type))


def _is_int(key_type: pa.DataType) -> bool:
    return bool(pat.is_int8(key_type) or pat.is_int16(key_type) or pat.is_int32(key_type))


# One key.


def _hash_int(value: int) -> int:
    return value & _MASK


def _hash_long(value: int) -> int:
    return (value ^ value >> 32) & _MASK


def _hash_bool(value: bool) -> int:
    return _TRUE if value else _FALSE


def _hash_float(value: float) -> int:
    if value != value:
        return _NAN_BITS_32
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def _hash_double(value: float) -> int:
    if value != value:
        return _NAN_BITS_64 >> 32
    low, high = struct.unpack("<II", struct.pack("<d", value))
    code: int = low ^ high
    return code


def _hash_text(value: str) -> int:
    if value.isascii():
        return _polynomial(value.encode(), np.uint8)
    return _polynomial(value.encode("utf-16-le"), np.uint16)


def _hash_bytes(value: bytes) -> int:
    return (_polynomial(value, np.int8) + pow(31, len(value), 1 << 32)) & _MASK


def _polynomial(data: bytes, dtype: type[np.integer[Any]]) -> int:
    if dtype is np.uint8 and len(data) <= _LOOP_UNITS:
        code = 0
        for unit in data:
            code = 31 * code + unit
        return code & _MASK
    return _polynomial_in_pieces(np.frombuffer(data, dtype=dtype))


def _polynomial_in_pieces(units: npt.NDArray[Any]) -> int:
    code = 0
    for start in range(0, len(units), _BLOCK_UNITS):
        piece = units[start : start + _BLOCK_UNITS]
        sums = np.sum(_weighed(piece), dtype=np.uint32)
        power = int(_POWERS[len(piece)])
        code = (code + int(sums)) * power & _MASK
    return code


def _tuple_hasher(fields: Sequence[Hasher]) -> Hasher:
    def hash_tuple(values: Sequence[Any]) -> int:
        code = 0
        for value, hash_field in zip(values, fields, strict=True):
            code = 31 * code + (0 if value is None else hash_field(value)) & _MASK
        return code

    return hash_tuple


# Whole columns.


def _hash_ints(array: pa.Array) -> Hashes:
    dtype = np.dtype(f"<i{array.type.bit_width // 8}")
    return fixed_values(array, dtype).astype(np.int32).view(np.uint32)


def _hash_longs(array: pa.Array) -> Hashes:
    return _fold_64(fixed_values(array, np.uint64))


def _fold_64(bits: npt.NDArray[np.uint64]) -> Hashes:
    return (bits ^ bits >> np.uint64(32)).astype(np.uint32)


def _hash_bools(array: pa.Array) -> Hashes:
    values = array.fill_null(False).to_numpy(zero_copy_only=False)
    return np.where(values, np.uint32(_TRUE), np.uint32(_FALSE))


def _hash_floats(array: pa.Array) -> Hashes:
    values = fixed_values(array, np.float32)
    return np.where(np.isnan(values), np.uint32(_NAN_BITS_32), values.view(np.uint32))


def _hash_doubles(array: pa.Array) -> Hashes:
    values = fixed_values(array, np.float64)
    return _fold_64(np.where(np.isnan(values), np.uint64(_NAN_BITS_64), values.view(np.uint64)))


def _hash_texts(array: pa.Array) -> Hashes:
    data, offsets = byte_rows(array)
    codes = np.empty(len(array), dtype=np.uint32)
    for first, last in _blocks(offsets):
        block = data[offsets[first] : offsets[last]]
        places = offsets[first : last + 1] - offsets[first]
        if len(block) and block.max() >= 0x80:
            codes[first:last] = _hash_block(*_utf16(block, places))
        else:
            codes[first:last] = _hash_block(block, places)
    return codes


def _hash_binaries(array: pa.Array) -> Hashes:
    data, offsets = byte_rows(array)
    codes = np.empty(len(array), dtype=np.uint32)
    for first, last in _blocks(offsets):
        block = data[offsets[first] : offsets[last]].view(np.int8)
        places = offsets[first : last + 1] - offsets[first]
        codes[first:last] = _hash_block(block, places)
        # java.util.Arrays.hashCode starts with 1, which each byte of the row multiplies by 31.
        if len(block) <= _BLOCK_UNITS:
            codes[first:last] += _POWERS[np.diff(places)]
        else:
            codes[first:last] += np.uint32(pow(31, len(block), 1 << 32))
    return codes


def _blocks(offsets: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut rows into runs of at most a block of bytes; a row that is longer is a run of its own."""
    first, rows = 0, len(offsets) - 1
    while first < rows:
        within = int(np.searchsorted(offsets, offsets[first] + _BLOCK_UNITS, side="right")) - 1
        last = min(max(within, first + 1), first + _BLOCK_ROWS)
        yield first, last
        first = last


def _hash_block(units: npt.NDArray[Any], places: npt.NDArray[np.int64]) -> Hashes | np.uint32:
    if len(units) > _BLOCK_UNITS:
        return np.uint32(_polynomial_in_pieces(units))
    starts, ends = places[:-1], places[1:]
    # The spare element lets reduceat take the place behind the last unit, as of an empty last row.
    products = np.zeros(len(units) + 1, dtype=np.uint32)
    products[:-1] = _weighed(units)
    codes: Hashes = np.add.reduceat(products, starts, dtype=np.uint32)
    codes *= _POWERS[ends]
    # For an empty row reduceat gives the element at its place instead of a sum of none.
    codes *= starts != ends
    return codes


def _weighed(units: npt.NDArray[Any]) -> Hashes:
    # Going through int32 extends the sign of Java's bytes and keeps the others as they are.
    return units.astype(np.int32).view(np.uint32) * _WEIGHTS[: len(units)]


def _utf16(
    block: npt.NDArray[np.uint8], places: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """Turn UTF-8 rows into UTF-16 rows, as one text: no row begins within a character."""
    try:
        text = block.tobytes().decode()
    except UnicodeDecodeError as error:
        raise KeyGroupError(f"a key of type string is not UTF-8: {error.reason}") from error
    units = np.frombuffer(text.encode("utf-16-le"), dtype=np.uint16)
    # Each character has one lead byte, and those of four bytes become two units.
    per_byte = ((block & 0xC0) != 0x80).astype(np.int64) + (block >= 0xF0)
    before = np.zeros(len(block) + 1, dtype=np.int64)
    np.cumsum(per_byte, out=before[1:])
    return units, before[places]


def _hash_structs(array: pa.Array) -> Hashes:
    codes = np.zeros(len(array), dtype=np.uint32)
    for index in range(array.type.num_fields):
        codes *= np.uint32(31)
        codes += hash_array(array.field(index))
    return codes


_HASHERS: tuple[tuple[Callable[[pa.DataType], bool], Hasher, Callable[[pa.Array], Hashes]], ...] = (
    (_is_int, _hash_int, _hash_ints),
    (pat.is_int64, _hash_long, _hash_longs),
    (pat.is_boolean, _hash_bool, _hash_bools),
    (pat.is_float32, _hash_float, _hash_floats),
    (pat.is_float64, _hash_double, _hash_doubles),
    (_is_text, _hash_text, _hash_texts),
    (_is_bytes, _hash_bytes, _hash_binaries),
)
