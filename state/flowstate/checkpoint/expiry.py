"""Dropping what has expired from rows, as a full snapshot may."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flowstate.checkpoint.writing import sort_by_group
from flowstate.rows import NO_TIMESTAMP, RowOp, StateKind, StateRows

__all__ = ["drop_expired"]

_INT64_MAX = (1 << 63) - 1
_INT64_MIN = -(1 << 63)

_Mask = npt.NDArray[np.bool_]


def drop_expired(
    rows: StateRows, *, ttl_ms: int, now_ms: int, unstamped_ms: int | None = None
) -> StateRows:
    """Return the rows that are still alive: those whose time plus the TTL is after now.

    The sum does not overflow but stops at the largest time. Rows from before the state had a TTL
    count as of ``unstamped_ms``, and nothing is older than that; without it they do not expire.
    What was stamped before any event time was known (``NO_TIMESTAMP``) does not expire, nor does a
    deletion. Of a list the single elements expire, and a chunk goes with its last element.
    """
    table = rows.table
    if "ts" not in table.column_names:
        return rows
    if unstamped_ms is not None:
        if unstamped_ms + ttl_ms > now_ms:
            return rows
        stamped = pc.is_valid(table.column("ts"))
        deletion = pc.not_equal(table.column("op"), pa.scalar(RowOp.PUT.value, pa.uint8()))
        table = table.filter(pc.or_(stamped, deletion))
    if rows.kind is StateKind.LIST:
        table = _drop_elements(table, ttl_ms=ttl_ms, now_ms=now_ms)
    else:
        times = table.column("ts").combine_chunks()
        table = _filter(table, _alive(times, ttl_ms=ttl_ms, now_ms=now_ms))
    return StateRows(rows.name, rows.kind, table)


def _alive(times: pa.Array, *, ttl_ms: int, now_ms: int) -> _Mask:
    unknown = pc.equal(times, pa.scalar(NO_TIMESTAMP, pa.int64())).fill_null(True)
    if now_ms >= _INT64_MAX:
        # Every sum is at most the largest time, so all that has a time has expired.
        return np.asarray(unknown)
    # ts + ttl <= now is ts <= now - ttl, which Python computes without an overflow.
    last_expired = now_ms - ttl_ms
    if last_expired < _INT64_MIN:
        return np.ones(len(times), np.bool_)
    alive = pc.greater(times, pa.scalar(last_expired, pa.int64())).fill_null(True)
    return np.asarray(pc.or_(alive, unknown))


def _filter(table: pa.Table, mask: _Mask) -> pa.Table:
    return table if mask.all() else table.filter(pa.array(mask))


def _drop_elements(table: pa.Table, *, ttl_ms: int, now_ms: int) -> pa.Table:
    timed = np.asarray(table.column("ts").combine_chunks().is_valid())
    if not timed.all():
        # Chunks from before the TTL, and deletions: as they are.
        rest = _filter(table, ~timed)
        kept = _drop_elements(_filter(table, timed), ttl_ms=ttl_ms, now_ms=now_ms)
        return sort_by_group(pa.concat_tables([rest, kept]))
    times = table.column("ts").combine_chunks()
    alive = _alive(times.flatten(), ttl_ms=ttl_ms, now_ms=now_ms)
    if alive.all():
        return table
    parents = pc.list_parent_indices(times).to_numpy()
    counts = np.bincount(parents[alive], minlength=len(times))
    for name in ("value", "ts"):
        lists = table.column(name).combine_chunks()
        index = table.column_names.index(name)
        field = table.schema.field(name)
        table = table.set_column(index, field, _with_elements(lists, alive, counts))
    return _filter(table, counts > 0)


def _with_elements(lists: pa.Array, alive: _Mask, counts: npt.NDArray[np.int64]) -> pa.Array:
    elements = lists.flatten().filter(pa.array(alive))
    ends = np.concatenate(([0], np.cumsum(counts)))
    large = isinstance(lists, pa.LargeListArray)
    offsets = pa.array(ends, pa.int64() if large else pa.int32())
    make = pa.LargeListArray if large else pa.ListArray
    return make.from_arrays(offsets, elements, type=lists.type)
