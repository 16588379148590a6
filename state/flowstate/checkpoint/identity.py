"""Numbers for the identities of rows, so that equal rows are found without a loop in Python.

Two values are the same key when they have the same type and contents. A null equals a null and is
nothing else; floats are compared by their bits, as key groups are assigned, with one NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from flowstate.errors import StateTypeError

__all__ = ["Codes", "codes_of", "combine"]

_CODE_LIMIT = 1 << 62
_FLOAT_BITS = {pa.float16(): pa.int16(), pa.float32(): pa.int32(), pa.float64(): pa.int64()}


class Codes(NamedTuple):
    """A number per row, equal where the values are equal."""

    numbers: npt.NDArray[np.int64]
    limit: int
    """All numbers are below it."""


def codes_of(column: pa.Array | pa.ChunkedArray) -> Codes:
    """Return the codes of a column of any type that can be a key."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return codes_of(array.storage)
    if pat.is_struct(kind):
        # flatten() gives the fields of a null struct as nulls, so validity is a column of its own.
        return combine([_validity(array), *(codes_of(field) for field in array.flatten())])
    if pat.is_list(kind) or pat.is_large_list(kind) or pat.is_fixed_size_list(kind):
        return combine([_validity(array), _list_codes(array)])
    if pat.is_floating(kind):
        nan = pa.scalar(float("nan"), type=kind)
        array = pc.if_else(pc.is_nan(array), nan, array).view(_FLOAT_BITS[kind])
    return _encoded(array)


def combine(parts: Iterable[Codes]) -> Codes:
    """Return codes that are equal where all the parts' codes are equal."""
    columns = iter(parts)
    whole = next(columns)
    for part in columns:
        if part.limit <= 1:
            continue
        if whole.limit <= 1:
            whole = part
            continue
        # Both were made dense, so this fails only beyond two thousand million distinct values.
        if whole.limit * part.limit >= _CODE_LIMIT:
            raise OverflowError(f"{whole.limit} times {part.limit} identities are too many")
        whole = _encoded(pa.array(whole.numbers * part.limit + part.numbers))
    return whole


def _encoded(array: pa.Array) -> Codes:
    try:
        encoded = pc.dictionary_encode(array, null_encoding="encode")
    except pa.ArrowNotImplementedError as error:
        raise StateTypeError(
            f"values of type {array.type} cannot be told apart, so they cannot be a key, a "
            f"namespace or a key of a map. Use numbers, texts, or structs and lists of these"
        ) from error
    return Codes(encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary))


def _validity(array: pa.Array) -> Codes:
    if not array.null_count:
        return Codes(np.zeros(len(array), np.int64), min(len(array), 1))
    return Codes(array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64), 2)


def _list_codes(array: pa.Array) -> Codes:
    """Encode each list as the bytes of its elements' codes."""
    elements = codes_of(array.flatten()).numbers
    lengths = pc.list_value_length(array).fill_null(0).to_numpy()
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))) * elements.itemsize
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(elements))]
    return _encoded(pa.Array.from_buffers(pa.large_binary(), len(array), buffers))
