"""State that a process keeps in memory from one subtask to the next, where it is small.

It is a cache, and found by the digest of what it holds. Whoever takes it owns it: a batch that
fails leaves nothing here, and its next attempt begins from the store or the local disk again. It is
for states of one plain value per key, which nobody can change without the table's knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pat

from flowstate.key_groups import KeyGroupAssigner
from flowstate.keyed.codec import ChangeColumns, RowCodec, rows_of_columns
from flowstate.keys import physical_column
from flowstate.rows import RowOp, StateKind, StateRows
from flowstate.types import type_from_text

__all__ = ["WarmStates", "WarmTable", "can_be_warm", "keep", "take"]

_KINDS = frozenset({StateKind.VALUE, StateKind.REDUCING, StateKind.AGGREGATING})
_PLAIN = (pat.is_boolean, pat.is_signed_integer, pat.is_float64, pat.is_string, pat.is_binary)

Place = tuple[Any, ...]
"""Which subtask of which operator it is."""


@dataclass(slots=True)
class WarmTable:
    """The entries of one state: key to physical value."""

    codec: RowCodec
    entries: dict[Any, Any]

    def apply(self, rows: StateRows) -> None:
        """Apply the changes of a checkpoint."""
        keys = self.codec.key.to_list(rows.table["key"])
        values = physical_column(rows.table["value"].cast(self.codec.value))
        ops = rows.table["op"].to_numpy()
        if not ops.any():
            self.entries.update(zip(keys, values, strict=True))
            return
        for op, key, value in zip(ops.tolist(), keys, values, strict=True):
            if op == RowOp.PUT:
                self.entries[key] = value
            else:
                self.entries.pop(key, None)

    def rows(self, *, max_parallelism: int, assigner: KeyGroupAssigner) -> pa.Table:
        """Return the same as Arrow columns, for a table of another type."""
        puts = np.full(len(self.entries), RowOp.PUT, np.uint8)
        columns = ChangeColumns(
            puts, list(self.entries), None, None, list(self.entries.values()), None
        )
        return rows_of_columns(
            self.codec, columns, max_parallelism=max_parallelism, assigner=assigner
        ).table


WarmStates = dict[str, WarmTable]


@dataclass(frozen=True, slots=True)
class _Kept:
    identity: str
    states: WarmStates

    def __len__(self) -> int:
        return sum(len(table.entries) for table in self.states.values())


_kept: dict[Place, _Kept] = {}


def can_be_warm(metas: Mapping[str, Mapping[str, Any]]) -> bool:
    """Say whether all states are of one plain value per key; timers show only in the rows."""
    return all(
        meta["kind"] == StateKind.TIMER
        or (
            meta["kind"] in _KINDS
            and "namespace" not in meta
            and "ttl_ms" not in meta
            and _is_plain(meta.get("value"))
        )
        for meta in metas.values()
    )


def _is_plain(described: Any) -> bool:
    if not isinstance(described, Mapping) or "arrow" not in described:
        return False
    arrow = type_from_text(described["arrow"])
    return any(accepts(arrow) for accepts in _PLAIN)


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
