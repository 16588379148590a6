"""The table of states that have one value per key: by columns, or key by key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import filterfalse, repeat
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstate.keyed.codec import (
    ABSENT,
    BaseStore,
    Change,
    ChangeColumns,
    RowCodec,
    has_absent,
)
from flowstate.keyed.columns import ValueColumns
from flowstate.keyed.tables import Slot, Table, Unit
from flowstate.keys import physical_column
from flowstate.rows import RowOp

__all__ = ["SingleTable"]

# Beyond it Arrow's texts would soon need more than one chunk.
_COLUMN_BYTES_MAX = 1 << 30
# A look-up costs something for each key that is there, and entries cost as much as a few look-ups.
_FEW_KEYS_SHARE = 100
_FEW_KEYS_TIMES = 16


class SingleTable(Table):
    """One unit per slot: value, reducing and aggregating state.

    Where all of it is in memory and a unit is a plain value, a table begins as columns, which is
    all that bulk access needs. The first access to a single slot turns them into entries, and so
    does bulk access to a small part of them again and again; that is what the table has from then
    on.
    """

    entries: dict[Slot, Unit]
    """None while the table has columns, so that whoever takes a short way to it cannot go wrong."""

    def __init__(self, codec: RowCodec, base: BaseStore | None, unstamped_ms: int) -> None:
        super().__init__(codec, base, unstamped_ms)
        self.columns: ValueColumns | None = None
        self._few_keys_times = 0
        if base is None and not self._has_ttl and codec.namespace is None:
            self.take_columns(ValueColumns(codec.key.arrow, codec.value))

    def take_columns(self, columns: ValueColumns) -> None:
        """Have these columns instead of what the table has."""
        self.columns, self.entries = columns, cast("dict[Slot, Unit]", None)

    def take_entries(self, entries: dict[Slot, Unit]) -> None:
        """Have these entries instead of what the table has."""
        self.columns, self.entries = None, entries

    def by_slot(self) -> dict[Slot, Unit]:
        """Return the entries; from now on there are no columns."""
        columns = self.columns
        if columns is not None:
            to_list = self.codec.key.to_list
            units = physical_column(columns.values)
            self.take_entries(dict(zip(to_list(columns.keys), units, strict=True)))
            self.dirty = dict.fromkeys(to_list(columns.changes()[0]))
            if columns.values.null_count:
                for slot in self.dirty:
                    if self.entries[slot] is None:
                        del self.entries[slot]
        return self.entries

    @property
    def changed_count(self) -> int:
        """How many slots have changed since the last snapshot."""
        return len(self.dirty) if self.columns is None else self.columns.changed_count

    def slots_in_memory(self) -> list[Slot]:
        return list(self.by_slot())

    # Many slots, as columns.

    def get_columns(self, keys: pa.Array) -> pa.Array | None:
        """Return the value of each key, or null; None if the table has no columns."""
        columns = self._columns_for(keys)
        return None if columns is None else columns.get(keys)

    def put_columns(self, keys: pa.Array, values: pa.Array) -> bool:
        """Set the value of each key, null empties it; say whether the table has columns."""
        columns = self._columns_for(keys)
        if columns is None:
            return False
        columns.put(keys, values)
        if columns.nbytes > _COLUMN_BYTES_MAX:
            self.by_slot()
        return True

    def _columns_for(self, keys: pa.Array) -> ValueColumns | None:
        if self.columns is not None:
            is_few = len(keys) * _FEW_KEYS_SHARE < len(self.columns.keys)
            # In a row: by entries, access to many keys costs several times what it costs here.
            self._few_keys_times = self._few_keys_times + 1 if is_few else 0
            if self._few_keys_times > _FEW_KEYS_TIMES:
                self.by_slot()
        return self.columns

    # Single slots.

    def get(self, slot: Slot) -> Unit:
        """Return the unit of a slot, or ``ABSENT``."""
        entries = self.by_slot()
        unit = entries.get(slot, self)
        if unit is not self:
            return unit
        if self._base is None:
            return ABSENT
        unit = self._decoded(self._base.get(self.codec.name, self._prefix(slot)))
        entries[slot] = unit
        return unit

    def get_many(self, slots: Sequence[Slot]) -> list[Unit]:
        """Return the unit of each slot, or ``ABSENT``."""
        self.fetch(slots)
        return list(map(self.entries.get, slots, repeat(ABSENT)))

    def fetch(self, slots: Iterable[Slot]) -> None:
        """Bring slots into memory, all at once."""
        entries = self.by_slot()
        if self._base is None:
            return
        wanted = list(dict.fromkeys(filterfalse(entries.__contains__, slots)))
        if not wanted:
            return
        if self.codec.namespace is None:
            prefixes = self.codec.prefixes(wanted)
        else:
            prefixes = list(map(self._prefix, wanted))
        found = self.codec.units(self._base.get_many(self.codec.name, prefixes))
        if self._has_ttl:
            units = [ABSENT if one is None else self._unit(one.value, one.ts) for one in found]
        else:
            units = [ABSENT if one is None else one.value for one in found]
        entries.update(zip(wanted, units, strict=True))

    def put(self, slot: Slot, unit: Unit) -> None:
        """Set the unit of a slot."""
        self.by_slot()[slot] = unit
        self.dirty[slot] = None

    def put_many(self, slots: Sequence[Slot], units: Sequence[Unit]) -> None:
        """Set the unit of each slot."""
        self.by_slot().update(zip(slots, units, strict=True))
        self.dirty.update(dict.fromkeys(slots))

    def remove(self, slot: Slot) -> None:
        """Empty a slot."""
        entries = self.by_slot()
        if self._base is None:
            if entries.pop(slot, ABSENT) is ABSENT:
                return
        else:
            entries[slot] = ABSENT
        self.dirty[slot] = None

    def _decoded(self, data: bytes | None) -> Unit:
        return ABSENT if data is None else self._unit(*self.codec.unit(data))

    # Checkpoints.

    def load(self, table: pa.Table) -> None:
        if self.columns is not None:
            keys, values = table["key"], table["value"].cast(self.codec.value)
            self.columns.load(keys.combine_chunks(), values.combine_chunks())
            return
        for slot, _, value, ts in self._columns(table):
            self.entries[slot] = self._unit(value, ts)

    def slots(self) -> list[Slot]:
        if self.columns is not None:
            return self.codec.key.to_list(self.columns.present())
        found = [slot for slot in self.base_slots() if slot not in self.entries]
        return found + [slot for slot, unit in self.entries.items() if unit is not ABSENT]

    def changes(self) -> list[Change]:
        found = []
        entries = self.by_slot()
        for slot in self.dirty:
            key, namespace = self.split(slot)
            unit = entries.get(slot, ABSENT)
            if unit is ABSENT:
                found.append(Change(RowOp.DELETE, key, namespace, None, None, None))
            else:
                value, ts = self._unit_columns(unit)
                found.append(Change(RowOp.PUT, key, namespace, None, value, ts))
        return found

    def change_columns(self) -> ChangeColumns:
        if self.columns is not None:
            return _columns_of(*self.columns.changes())
        slots = list(self.dirty)
        units = list(map(self.entries.get, slots, repeat(ABSENT)))
        if not slots or has_absent(units):
            return super().change_columns()
        puts = np.full(len(slots), RowOp.PUT, np.uint8)
        keys: Sequence[Any] = slots
        namespaces: Sequence[Any] | None = None
        if self.codec.namespace is not None:
            keys, namespaces = zip(*slots, strict=True)
        values, ts = zip(*units, strict=True) if self._has_ttl else (units, None)
        return ChangeColumns(puts, keys, namespaces, None, values, ts)

    def settle(self) -> None:
        if self.columns is not None:
            self.columns.settle()
        self.dirty = {}

    def changed(self) -> Any:
        return super().changed() if self.columns is None else self.columns.changes()[0]

    def unsettle(self, changed: Any) -> None:
        if self.columns is not None:
            self.columns.unsettle(changed)
            return
        if isinstance(changed, pa.Array):
            # The table had columns when they were taken.
            changed = self.codec.key.to_list(changed)
        self.dirty.update(dict.fromkeys(changed))

    def evict(self) -> None:
        if self._base is not None:
            self.entries = {slot: self.entries[slot] for slot in self.dirty}


def _columns_of(keys: pa.Array, values: pa.Array) -> ChangeColumns:
    """Return changes of which a null value is a removal."""
    ops = np.where(pc.is_null(values), RowOp.DELETE, RowOp.PUT).astype(np.uint8)
    return ChangeColumns(ops, keys, None, None, values, None)
