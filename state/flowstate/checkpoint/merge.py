"""Merging rows: several sets of changes, oldest first, become one set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flowstate.checkpoint.identity import codes_of, combine
from flowstate.checkpoint.writing import group_numbers, sort_by_group
from flowstate.errors import StateMigrationError
from flowstate.rows import RowOp, StateRows

__all__ = ["Convert", "convert_rows", "merge_rows"]

Convert = Callable[[pa.Table, pa.Schema], pa.Table]
"""Turns rows of an older schema into rows of the newest."""

_Positions = npt.NDArray[np.int64]


def convert_rows(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Turn rows into those of another schema as far as no value is changed by it.

    A column that the schema does not have is dropped, and one that it adds is null: rows from
    before a TTL was switched on have no time, and do not expire until they are written again.
    """
    columns = [
        table.column(field.name)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    try:
        return pa.table(columns, schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise StateMigrationError(
            f"rows of {table.schema} cannot be turned into rows of {schema}: {error}. Keep the "
            f"old type, or give the state a new name"
        ) from error


def merge_rows(
    sets: Sequence[StateRows], *, drop_tombstones: bool, convert: Convert = convert_rows
) -> StateRows:
    """Merge sets of one state, oldest first, and return rows sorted by group.

    The later row of an identity wins. A CLEAR removes the rows of its key and namespace in the
    sets before its own. With ``drop_tombstones`` only what is there is left, for a set with
    nothing older; otherwise deletions stay, because an older set may have what they delete.
    """
    newest = sets[-1]
    if any((rows.name, rows.kind) != (newest.name, newest.kind) for rows in sets):
        raise ValueError(f"sets of several states: {[(rows.name, rows.kind) for rows in sets]}")
    schema = newest.table.schema
    tables = [_conform(rows.table, schema, convert) for rows in sets if rows.table.num_rows]
    table = pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()
    ops = table.column("op").to_numpy()
    if len(tables) < 2:
        kept = np.arange(table.num_rows)
    else:
        set_of = np.repeat(np.arange(len(tables)), [part.num_rows for part in tables])
        kept = _survivors(table, ops, set_of)
    if drop_tombstones:
        kept = kept[ops[kept] == RowOp.PUT]
    return StateRows(newest.name, newest.kind, _take_by_group(table, kept))


def _conform(table: pa.Table, schema: pa.Schema, convert: Convert) -> pa.Table:
    if table.schema.equals(schema):
        return table
    converted = convert(table, schema)
    if not converted.schema.equals(schema) or converted.num_rows != table.num_rows:
        raise ValueError(f"rows of {schema} were wanted, and {converted.schema} were made")
    return converted


def _survivors(table: pa.Table, ops: npt.NDArray[np.uint8], set_of: _Positions) -> _Positions:
    """Return the positions of the rows that still say something after all sets."""
    pairs = combine(
        codes_of(table.column(name)) for name in ("key", "namespace") if name in table.column_names
    )
    identities = pairs
    if "sub" in table.column_names:
        identities = combine([pairs, codes_of(table.column("sub"))])
    # A CLEAR has no sub, and must not be taken for the entry whose sub is null.
    clears = np.flatnonzero(ops == RowOp.CLEAR)
    others = np.flatnonzero(ops != RowOp.CLEAR) if len(clears) else np.arange(len(ops))
    kept = _last_of_each(identities.numbers, others, identities.limit)
    if not len(clears):
        return kept
    newest_clears = _last_of_each(pairs.numbers, clears, pairs.limit)
    cleared_in = np.full(pairs.limit, -1)
    cleared_in[pairs.numbers[newest_clears]] = set_of[newest_clears]
    since = cleared_in[pairs.numbers[kept]]
    # Where a CLEAR stays, a DELETE of the same key and namespace says nothing more.
    kept = kept[(set_of[kept] >= since) & ((since < 0) | (ops[kept] == RowOp.PUT))]
    return np.sort(np.concatenate((newest_clears, kept)))


def _last_of_each(numbers: _Positions, positions: _Positions, limit: int) -> _Positions:
    last = np.full(limit, -1)
    # numpy assigns in order, so of several positions of one number the last remains.
    last[numbers[positions]] = positions
    return np.sort(last[last >= 0])


def _take_by_group(table: pa.Table, positions: _Positions) -> pa.Table:
    if len(positions) == table.num_rows:
        return sort_by_group(table)
    order = np.argsort(group_numbers(table)[positions], kind="stable")
    return table.take(pa.array(positions[order]))
