"""Running aggregates: of each row the aggregate of its key up to that row, for whole columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flowstate.aggregates import Reducer

__all__ = ["running"]

Numbers = npt.NDArray[np.int64]


def running(reducer: Reducer, before: pa.Array, values: pa.Array, groups: Numbers) -> pa.Array:
    """Return the aggregate after each row.

    ``before`` is what each group had, as it is stored; ``groups`` is the group of each row. A null
    among the values leaves the aggregate as it is.
    """
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    valid = values.is_valid().to_numpy(zero_copy_only=False)[order]
    if reducer is Reducer.COUNT:
        counts = _sums(valid.astype(np.int64), ordered) + _filled(before, 0)[ordered]
        result = pa.array(counts)
    elif reducer is Reducer.MEAN:
        result = _running_mean(before, values, order, ordered, valid)
    elif reducer is Reducer.SUM:
        result = _running_sum(before, values, order, ordered, valid)
    else:
        result = _running_extreme(reducer, before, values, order, ordered)
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return result.take(pa.array(back))


def _running_sum(
    before: pa.Array, values: pa.Array, order: Numbers, ordered: Numbers, valid: Any
) -> pa.Array:
    whole = pa.types.is_integer(values.type)
    numbers = _filled(values.cast(before.type), 0)[order]
    with np.errstate(invalid="ignore", over="ignore"):
        sums = _sums(numbers, ordered) + _filled(before, 0)[ordered]
    had = before.is_valid().to_numpy(zero_copy_only=False)[ordered]
    seen = had | (_sums(valid.astype(np.int64), ordered) > 0)
    if whole and len(sums):
        about = _sums(numbers.astype(np.float64), ordered) + _filled(before, 0)[ordered]
        if np.abs(about).max() >= float(1 << 62):
            # Near the ends of the range floats do not tell; Python's integers do.
            exact = _sums(numbers.astype(object), ordered) + _filled(before, 0)[ordered]
            if (exact != sums).any():
                raise OverflowError("a sum is out of the range of int64")
    return pa.array(sums, before.type, mask=~seen)


def _running_mean(
    before: pa.Array, values: pa.Array, order: Numbers, ordered: Numbers, valid: Any
) -> pa.Array:
    numbers = _filled(values.cast(pa.float64(), safe=False), 0.0)[order]
    counts = _sums(valid.astype(np.int64), ordered)
    counts += _filled(pc.struct_field(before, "count"), 0)[ordered]
    with np.errstate(divide="ignore", invalid="ignore"):
        sums = _sums(numbers, ordered) + _filled(pc.struct_field(before, "sum"), 0.0)[ordered]
        means = sums / counts
    return pa.array(means, pa.float64(), mask=counts == 0)


def _running_extreme(
    reducer: Reducer, before: pa.Array, values: pa.Array, order: Numbers, ordered: Numbers
) -> pa.Array:
    """Compare ranks instead of values, which works for every type that Arrow can sort."""
    everything = pa.concat_arrays([before, values])
    ranks = np.asarray(pc.rank(everything, "ascending", tiebreaker="dense"))
    # Of a NaN a number is both the smaller and the larger one; a null loses against all.
    nothing = everything.is_null().to_numpy(zero_copy_only=False)
    ranks = ranks.astype(np.int64)
    sign = 1 if reducer is Reducer.MIN else -1
    ranks = sign * ranks
    if pa.types.is_floating(everything.type):
        nan = pc.fill_null(pc.is_nan(everything), False).to_numpy(zero_copy_only=False)
        ranks[nan] = np.iinfo(np.int64).max - 1
    ranks[nothing] = np.iinfo(np.int64).max
    own = ranks[len(before) :][order]
    best = np.minimum(_scanned(np.minimum, own, ordered), ranks[: len(before)][ordered])
    unique, first = np.unique(ranks, return_index=True)
    return everything.take(pa.array(first[np.searchsorted(unique, best)]))


def _filled(column: pa.Array, nothing: Any) -> npt.NDArray[Any]:
    filled: npt.NDArray[Any] = pc.fill_null(column, nothing).to_numpy(zero_copy_only=False)
    return filled


def _sums(values: npt.NDArray[Any], ordered: Numbers) -> npt.NDArray[Any]:
    """Return the sums within each run of equal groups."""
    if not len(values):
        return values
    if values.dtype.kind == "f":
        # A sum over everything would let a NaN, or a large number, of one group into the next.
        with np.errstate(invalid="ignore", over="ignore"):
            return _scanned(np.add, values, ordered)
    total = np.cumsum(values)
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    sizes = np.diff(np.append(starts, len(values)))
    before = np.where(starts > 0, total[starts - 1], total.dtype.type(0))
    sums: npt.NDArray[Any] = total - np.repeat(before, sizes)
    return sums


def _scanned(combine: np.ufunc, values: npt.NDArray[Any], ordered: Numbers) -> npt.NDArray[Any]:
    """Combine the values within each run of equal groups up to each place, in log(n) steps."""
    found = values.copy()
    step = 1
    longest = int(np.bincount(ordered).max()) if len(ordered) else 0
    while step < longest:
        same = ordered[step:] == ordered[:-step]
        found[step:] = np.where(same, combine(found[step:], found[:-step]), found[step:])
        step *= 2
    return found
