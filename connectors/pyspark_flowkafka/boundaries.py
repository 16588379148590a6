"""Where records begin: a chain of lengths, which can only be followed from one to the next.

Two ways, the same result. Where a fetch has many batches, all of them are followed at once, one
numpy step for the next record of each batch. Where it has few, a plain loop follows each, and
leaps over runs of records of one size. Positions may be wrong where the data is; whoever decodes
the records checks each of them (``columns``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

# Below this a numpy step costs more than the loop it replaces.
_LANES_MIN = 96
# A leap costs as much as following some tens of records, so that it is tried less and less often
# where it leads nowhere.
_STEPS_MIN = 16
_STEPS_MAX = 512
_LEAP_MAX = 1 << 14
_VARINT_BYTES_MAX = 5


class BrokenChainError(ValueError):
    """The lengths of records do not lead to the end of their batch."""


def record_starts(
    data: bytes, array: Bytes, spans: Sequence[tuple[int, int]], counts: Sequence[int]
) -> Positions:
    """Return where each record of each batch begins, batch after batch.

    ``spans`` are the bytes of each batch's records, ``counts`` how many there are.
    """
    lengths = np.asarray(counts, np.int64)
    sizes = np.asarray(spans, np.int64).reshape(-1, 2)
    # The shortest record is seven bytes; a count beyond that is a lie, and must cost nothing.
    if (lengths < 0).any() or (lengths * 7 > sizes[:, 1] - sizes[:, 0]).any():
        raise BrokenChainError("a batch cannot have that many records")
    if len(counts) >= _LANES_MIN:
        return _side_by_side(data, array, sizes, lengths)
    walked = [
        _one_by_one(data, array, start, end, count)
        for (start, end), count in zip(spans, counts, strict=True)
    ]
    return np.concatenate(walked) if walked else np.empty(0, np.int64)


def _one_by_one(data: bytes, array: Bytes, start: int, end: int, count: int) -> Positions:
    pieces: list[Positions] = []
    position, left, steps = start, count, _STEPS_MIN
    while left > 0:
        starts, position = _follow(data, position, end, min(left, steps))
        left -= len(starts)
        pieces.append(np.array(starts, np.int64))
        run = 0
        if left and len(starts) > 1 and (size := position - starts[-1]) == starts[-1] - starts[-2]:
            run = _run_length(array, position, end, size, min(left, _LEAP_MAX))
            pieces.append(np.arange(position, position + run * size, size, dtype=np.int64))
            position += run * size
            left -= run
        steps = _STEPS_MIN if run >= steps else min(2 * steps, _STEPS_MAX)
    if position != end:
        raise BrokenChainError("the records of a batch do not end where the batch does")
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _follow(data: bytes, position: int, end: int, count: int) -> tuple[list[int], int]:
    """Follow some records one by one; this loop is what a large batch costs, so it is bare."""
    starts: list[int] = []
    append = starts.append
    try:
        for _ in range(count):
            append(position)
            byte = data[position]
            if byte < 0x80:
                position += (byte >> 1) + 1
                continue
            second = data[position + 1]
            if second < 0x80:
                position += ((byte & 0x7F | second << 7) >> 1) + 2
            else:
                position += _long_size(data, position, end)
    except IndexError:
        position = end + 1
    if position > end:
        raise BrokenChainError("a batch ends before its last record")
    return starts, position


def _run_length(array: Bytes, position: int, end: int, size: int, most: int) -> int:
    """Count the records from a position on that say the same size as the one before it."""
    most = min(most, (end - position) // size)
    if most <= 0:
        return 0
    before = position - size
    width = 1
    while array[before + width - 1] >= 0x80:
        width += 1
    # Each length is only believed because the one before it leads there, so the first difference
    # ends the run.
    same = np.ones(most, bool)
    for index in range(width):
        column = array[position + index : position + (most - 1) * size + index + 1 : size]
        same &= column == array[before + index]
    return most if same.all() else int(same.argmin())


def _long_size(data: bytes, position: int, end: int) -> int:
    value = shift = 0
    for index in range(_VARINT_BYTES_MAX):
        if position + index >= end:
            break
        byte = data[position + index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) + index + 1
        shift += 7
    raise BrokenChainError("the length of a record is not a number")


def _side_by_side(data: bytes, array: Bytes, sizes: Positions, counts: Positions) -> Positions:
    # Batches with most records first: those that still have one are then always a prefix.
    order = np.argsort(-counts, kind="stable")
    position, ends, left = sizes[order, 0].copy(), sizes[order, 1], counts[order]
    # Where each batch's records stand in the result.
    places = (np.cumsum(counts) - counts)[order]
    found = np.empty(int(counts.sum()), np.int64)
    # A few batches may have far more records than the others; their rest is followed one by one.
    steps = int(left[_LANES_MIN - 1])
    active = np.searchsorted(-left, -np.arange(steps), side="left")
    for step in range(steps):
        lanes = int(active[step])
        here = position[:lanes]
        found[places[:lanes] + step] = here
        here += _sizes_at(array, here)
    longer = int(np.searchsorted(-left, -steps, side="left"))
    if (position[longer:] != ends[longer:]).any():
        raise BrokenChainError("the records of a batch do not end where the batch does")
    for lane in range(longer):
        rest = int(left[lane]) - steps
        place = int(places[lane]) + steps
        found[place : place + rest] = _one_by_one(
            data, array, int(position[lane]), int(ends[lane]), rest
        )
    return found


def _sizes_at(array: Bytes, position: Positions) -> Positions:
    """Return the sizes of the records at some positions, with their length fields."""
    # Outside of the data the last byte stands for all others; the chain's end shows it.
    byte = array.take(position, mode="clip").astype(np.int64)
    if byte.max(initial=0) < 0x80:
        return (byte >> 1) + 1
    value = byte & 0x7F
    width = np.ones(len(position), np.int64)
    more = byte >= 0x80
    for index in range(1, _VARINT_BYTES_MAX):
        byte = array.take(position + index, mode="clip").astype(np.int64)
        value += np.where(more, (byte & 0x7F) << (7 * index), 0)
        width += more
        more &= byte >= 0x80
        if not more.any():
            return (value >> 1) + width
    raise BrokenChainError("the length of a record is not a number")
