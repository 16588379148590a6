"""State that a process keeps in memory from one subtask to the next, where it is small.

It is a cache, and found by the digest of what it holds. Whoever takes it owns it: a batch that
fails leaves nothing here, and its next attempt begins from the store or the local disk again. It is
for states of one value per key: by columns, or plain values key by key, which nobody can change
without the table's knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pat

from flowstate.keyed.codec import ChangeColumns, RowCodec
from flowstate.keyed.columns import ValueColumns
from flowstate.keyed.single_table import SingleTable
from flowstate.keys import physical_column
from flowstate.rows import RowOp, StateKind, StateRows

__all__ = ["WarmStates", "WarmTable", "can_be_warm", "keep", "take"]

_KINDS = frozenset({StateKind.VALUE, StateKind.REDUCING, StateKind.AGGREGATING})
_PLAIN = (pat.is_boolean, pat.is_signed_integer, pat.is_float64, pat.is_string, pat.is_binary)

Place = tuple[Any, ...]
"""Which subtask of which operator it is."""


@dataclass(slots=True)
class WarmTable:
    """What one state holds: as columns, or as entries from key to physical value."""

    codec: RowCodec
    columns: ValueColumns | None
    entries: dict[Any, Any]

    @classmethod
    def of(cls, table: SingleTable) -> WarmTable:
        """Return what a table holds."""
        return cls(table.codec, table.columns, table.entries)

    @property
    def is_safe(self) -> bool:
        """Whether nobody can have changed a value in place."""
        return self.columns is not None or any(accepts(self.codec.value) for accepts in _PLAIN)

    def __len__(self) -> int:
        return len(self.entries) if self.columns is None else self.columns.present_count

    def apply(self, rows: StateRows) -> None:
        """Apply the changes of a checkpoint."""
        keys = rows.table["key"].combine_chunks()
        values = rows.table["value"].cast(self.codec.value).combine_chunks()
        if self.columns is not None:
            # The value of what was removed is null.
            self.columns.put(keys, values)
            self.columns.settle()
            return
        ops = rows.table["op"].to_numpy()
        pairs = zip(self.codec.key.to_list(keys), physical_column(values), strict=True)
        if not ops.any():
            self.entries.update(pairs)
            return
        for op, (key, value) in zip(ops.tolist(), pairs, strict=True):
            if op == RowOp.PUT:
                self.entries[key] = value
            else:
                self.entries.pop(key, None)

    def give(self, table: SingleTable) -> None:
        """Let a table have what this holds; the table's type may be another, if it is wider."""
        if table.codec.schema != self.codec.schema:
            keys, values = self._arrays()
            table.load(pa.table({"key": keys, "value": values}))
        elif self.columns is not None:
            table.take_columns(self.columns)
        else:
            table.take_entries(self.entries)

    def contents(self) -> ChangeColumns:
        """Return everything as if it had just been put."""
        keys, values = self._arrays()
        if values.null_count:
            there = values.is_valid()
            keys, values = keys.filter(there), values.filter(there)
        return ChangeColumns(
            np.full(len(keys), RowOp.PUT, np.uint8), keys, None, None, values, None
        )

    def _arrays(self) -> tuple[pa.Array, pa.Array]:
        if self.columns is not None:
            return self.columns.keys, self.columns.values
        keys = self.codec.key.to_array(list(self.entries))
        return keys, pa.array(list(self.entries.values()), self.codec.value)


WarmStates = dict[str, WarmTable]


@dataclass(frozen=True, slots=True)
class _Kept:
    identity: str
    states: WarmStates

    def __len__(self) -> int:
        return sum(map(len, self.states.values()))


_kept: dict[Place, _Kept] = {}


def can_be_warm(metas: Mapping[str, Mapping[str, Any]]) -> bool:
    """Say whether all states are of one value per key; timers show only in the rows."""
    return all(
        meta["kind"] == StateKind.TIMER
        or (meta["kind"] in _KINDS and "namespace" not in meta and "ttl_ms" not in meta)
        for meta in metas.values()
    )


def take(
    place: Place,
    wanted: str,
    ancestors: Collection[str],
    rows_since: Callable[[str], Mapping[str, StateRows]],
) -> WarmStates | None:
    """Take what is kept of a place, at the wanted version; None if there is nothing.

    From an ancestor it is brought to the wanted version by the rows since then.
    """
    found = _kept.pop(place, None)
    if found is None:
        return None
    if found.identity == wanted:
        return found.states
    if found.identity not in ancestors:
        return None
    newer = rows_since(found.identity)
    if any(name not in found.states or rows.kind not in _KINDS for name, rows in newer.items()):
        return None
    for name, rows in newer.items():
        found.states[name].apply(rows)
    return found.states


def keep(place: Place, identity: str, states: WarmStates, *, rows_max: int) -> None:
    """Keep states until the next subtask of the place; those not asked for longest make room."""
    _kept.pop(place, None)
    new = _Kept(identity, states)
    room = rows_max - len(new)
    if room < 0:
        return
    for old in list(_kept):
        if sum(map(len, _kept.values())) <= room:
            break
        del _kept[old]
    _kept[place] = new
