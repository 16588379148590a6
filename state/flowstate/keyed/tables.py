"""Tables: the entries of one state in memory, over the rows of a checkpoint in a base store.

Without a base store a table holds everything. With one it holds what a batch has read or changed.
Either way it knows what has changed since the last snapshot; that is the next delta.

A *slot* names an entry: the key, or (key, namespace) for states with namespaces. A *unit* is what
one value, element or map entry is kept as: the physical value, or (value, ts) with a TTL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from flowstate.keyed.codec import ABSENT, BaseStore, Change, ChangeColumns, RowCodec
from flowstate.keys import physical_column
from flowstate.rows import RowOp

__all__ = ["ListTable", "MapTable", "Slot", "Table", "Unit"]

# A list is written again as one chunk when appending has left this many. So a list of n elements
# costs n/32 elements a snapshot at most, and never more than this many rows to read.
_CHUNKS_MAX = 32

Slot = Any
Unit = Any


class Table(ABC):
    """What the tables of all kinds of state have in common."""

    def __init__(self, codec: RowCodec, base: BaseStore | None, unstamped_ms: int) -> None:
        self.codec = codec
        self._base = base
        self._has_ttl = codec.ts is not None
        # What was written before the state had a TTL counts as written when it got one; also what
        # has a stamp from a time in which it had one before.
        self.unstamped_ms = unstamped_ms
        self.dirty: dict[Slot, None] = {}
        self.entries: dict[Slot, Any] = {}

    def slots_in_memory(self) -> list[Slot]:
        """Return the slots that are in memory, also such as hold nothing."""
        return list(self.entries)

    def split(self, slot: Slot) -> tuple[Any, Any]:
        """Return the key and the namespace of a slot."""
        return (slot, None) if self.codec.namespace is None else slot

    def _slot(self, key: Any, namespace: Any) -> Slot:
        return key if self.codec.namespace is None else (key, namespace)

    def _prefix(self, slot: Slot) -> bytes:
        return self.codec.prefix(*self.split(slot))

    def _unit(self, value: Any, ts: int | None) -> Unit:
        if not self._has_ttl:
            return value
        return value, self.unstamped_ms if ts is None else max(ts, self.unstamped_ms)

    def _unit_columns(self, unit: Unit) -> tuple[Any, Any]:
        return unit if self._has_ttl else (unit, None)

    def _columns(self, table: pa.Table) -> Iterator[tuple[Slot, Any, Any, Any]]:
        """Yield (slot, sub, value, ts) of the rows of a table."""
        names = table.column_names
        empty: list[Any] = [None] * len(table)
        codec = self.codec
        keys = codec.key.to_list(table["key"])
        namespaces = codec.namespace.to_list(table["namespace"]) if codec.namespace else empty
        subs = codec.sub.to_list(table["sub"]) if codec.sub else empty
        values = physical_column(table["value"].cast(codec.value)) if "value" in names else empty
        stamps = physical_column(table["ts"]) if "ts" in names else empty
        for key, namespace, *rest in zip(keys, namespaces, subs, values, stamps, strict=True):
            yield self._slot(key, namespace), *rest

    def base_slots(self) -> Iterator[Slot]:
        """Yield the slots that the base store has rows of."""
        if self._base is None:
            return
        last: Any = ABSENT
        for row, _ in self._base.scan(self.codec.name):
            key, namespace, _ = self.codec.identity(bytes(row))
            slot = self._slot(key, namespace)
            if slot != last:
                last = slot
                yield slot

    @abstractmethod
    def load(self, table: pa.Table) -> None:
        """Take the rows of a restored checkpoint into memory; there is no base store then."""

    @abstractmethod
    def slots(self) -> list[Slot]:
        """Return the slots that hold something."""

    @abstractmethod
    def changes(self) -> list[Change]:
        """Return what has changed since the last snapshot; nothing is settled by it."""

    def change_columns(self) -> ChangeColumns:
        """Return the same by columns."""
        return ChangeColumns.of(self.changes())

    @abstractmethod
    def settle(self) -> None:
        """Take note that the changes are in a snapshot."""

    def changed(self) -> Any:
        """Return what ``unsettle`` is to be given if these changes turn out to be void."""
        return list(self.dirty)

    @abstractmethod
    def unsettle(self, changed: Any) -> None:
        """Take note that the snapshot that held these changes is void."""

    @abstractmethod
    def evict(self) -> None:
        """Forget what is in the base store, now that it holds all settled changes."""


class _ListEntry:
    """The elements of one list: all of them, or only those after what the base store has."""

    __slots__ = ("appended_chunks", "complete", "rewrite", "saved", "units")

    def __init__(self, complete: bool) -> None:
        self.units: list[Unit] = []
        self.complete = complete
        self.saved = 0
        """How many of the units are in a snapshot."""
        self.appended_chunks = 0
        """The next chunk's number; if the list is not complete, beyond those of the base store."""
        self.rewrite = False


class ListTable(Table):
    """A list per slot, written in chunks so that an append costs what it appends."""

    entries: dict[Slot, _ListEntry]

    def get(self, slot: Slot) -> list[Unit]:
        """Return the units of a slot; the list is not to be changed."""
        entry = self.entries.get(slot)
        if entry is None:
            if self._base is None:
                return []
            entry = self.entries[slot] = _ListEntry(complete=False)
        self._complete(slot, entry)
        return entry.units

    def append(self, slot: Slot, units: Sequence[Unit]) -> None:
        """Add units to a slot's list, without reading what it has."""
        entry = self.entries.get(slot)
        if entry is None:
            entry = self.entries[slot] = _ListEntry(complete=self._base is None)
        entry.units.extend(units)
        self.dirty[slot] = None

    def put(self, slot: Slot, units: list[Unit]) -> None:
        """Replace a slot's list; an empty one empties the slot."""
        entry = self.entries.get(slot)
        if entry is None:
            if self._base is None and not units:
                return
            entry = self.entries[slot] = _ListEntry(complete=True)
        entry.units, entry.complete, entry.rewrite = units, True, True
        self.dirty[slot] = None

    def _complete(self, slot: Slot, entry: _ListEntry) -> None:
        if entry.complete or self._base is None:
            return
        units: list[Unit] = []
        for _, data in self._base.scan(self.codec.name, self._prefix(slot)):
            units.extend(self._chunk(*self.codec.unit(bytes(data))))
        entry.appended_chunks = self._next_chunk(slot, entry)
        entry.saved += len(units)
        entry.units = units + entry.units
        entry.complete = True

    def complete_saved(self) -> None:
        """Read the rest of each list that is partly in a snapshot, before the base store has it.

        Afterwards it could not be told which of the units in memory the base store has as well.
        """
        for slot, entry in self.entries.items():
            if entry.saved:
                self._complete(slot, entry)

    def _chunk(self, values: list[Any], stamps: list[int] | None) -> list[Unit]:
        if not self._has_ttl:
            return values
        if stamps is None:
            return [(value, self.unstamped_ms) for value in values]
        since = self.unstamped_ms
        return [(value, max(ts, since)) for value, ts in zip(values, stamps, strict=True)]

    def load(self, table: pa.Table) -> None:
        ordered = table.sort_by("sub")
        for slot, number, values, stamps in self._columns(ordered):
            entry = self.entries.setdefault(slot, _ListEntry(complete=True))
            entry.units.extend(self._chunk(values, stamps))
            entry.saved = len(entry.units)
            entry.appended_chunks = number + 1

    def slots(self) -> list[Slot]:
        found = [slot for slot in self.base_slots() if slot not in self.entries]
        return found + [slot for slot in self.entries if self.get(slot)]

    def changes(self) -> list[Change]:
        found: list[Change] = []
        for slot in self.dirty:
            entry = self.entries[slot]
            key, namespace = self.split(slot)
            number = self._next_chunk(slot, entry)
            if number >= _CHUNKS_MAX:
                self._complete(slot, entry)
                entry.rewrite = True
            if entry.rewrite:
                found.append(Change(RowOp.CLEAR, key, namespace, None, None, None))
                number, units = 0, entry.units
            else:
                units = entry.units[entry.saved :]
            if units:
                values, stamps = self._chunk_columns(units)
                found.append(Change(RowOp.PUT, key, namespace, number, values, stamps))
        return found

    def _next_chunk(self, slot: Slot, entry: _ListEntry) -> int:
        if entry.complete or self._base is None:
            return entry.appended_chunks
        # Chunks whose elements have all expired may be missing, so that counting is not enough.
        last = -1
        for row, _ in self._base.scan(self.codec.name, self._prefix(slot)):
            last = self.codec.identity(bytes(row))[2]
        return last + 1 + entry.appended_chunks

    def _chunk_columns(self, units: list[Unit]) -> tuple[list[Any], list[int] | None]:
        if not self._has_ttl:
            return units, None
        return [value for value, _ in units], [ts for _, ts in units]

    def settle(self) -> None:
        for slot in self.dirty:
            entry = self.entries[slot]
            if entry.rewrite:
                entry.appended_chunks = 1 if entry.units else 0
            elif len(entry.units) > entry.saved:
                entry.appended_chunks += 1
            entry.saved, entry.rewrite = len(entry.units), False
            if self._base is None and not entry.units:
                del self.entries[slot]
        self.dirty = {}

    def unsettle(self, changed: Iterable[Slot]) -> None:
        for slot in changed:
            entry = self.entries.setdefault(slot, _ListEntry(complete=True))
            self._complete(slot, entry)
            entry.rewrite = True
            self.dirty[slot] = None

    def evict(self) -> None:
        if self._base is None:
            return
        self.entries = {slot: self.entries[slot] for slot in self.dirty}
        for entry in self.entries.values():
            if not entry.complete:
                del entry.units[: entry.saved]
                entry.saved = entry.appended_chunks = 0


class _MapEntry:
    """The entries of one map: all of them, or those that were read or changed."""

    __slots__ = ("cleared", "complete", "dirty", "units")

    def __init__(self, complete: bool) -> None:
        self.units: dict[Any, Unit] = {}
        self.complete = complete
        self.cleared = False
        self.dirty: dict[Any, None] = {}


class MapTable(Table):
    """A map per slot, of which only the entries that are asked for are read and written."""

    entries: dict[Slot, _MapEntry]

    def get(self, slot: Slot, sub: Any) -> Unit:
        """Return the unit of a map's key, or ``ABSENT``."""
        if self._base is None and slot not in self.entries:
            return ABSENT
        entry = self._entry(slot)
        unit = entry.units.get(sub, self)
        if unit is not self:
            return unit
        if entry.complete or self._base is None:
            return ABSENT
        row = self.codec.row(*self.split(slot), sub)
        data = self._base.get(self.codec.name, row)
        unit = ABSENT if data is None else self._unit(*self.codec.unit(data))
        entry.units[sub] = unit
        return unit

    def all(self, slot: Slot) -> dict[Any, Unit]:
        """Return the units of a map, which is not to be changed."""
        if self._base is None and slot not in self.entries:
            return {}
        entry = self._entry(slot)
        self._complete(slot, entry)
        return entry.units

    def put(self, slot: Slot, sub: Any, unit: Unit) -> None:
        """Set the unit of a map's key."""
        entry = self._entry(slot)
        entry.units[sub] = unit
        entry.dirty[sub] = None
        self.dirty[slot] = None

    def remove(self, slot: Slot, sub: Any) -> None:
        """Remove a key from a map."""
        if self._base is None and slot not in self.entries:
            return
        entry = self._entry(slot)
        if entry.complete:
            if entry.units.pop(sub, ABSENT) is ABSENT:
                return
        else:
            entry.units[sub] = ABSENT
        entry.dirty[sub] = None
        self.dirty[slot] = None

    def clear(self, slot: Slot) -> None:
        """Remove a whole map, without reading it."""
        if self._base is None and slot not in self.entries:
            return
        entry = self._entry(slot)
        entry.units, entry.dirty = {}, {}
        entry.complete = entry.cleared = True
        self.dirty[slot] = None

    def _entry(self, slot: Slot) -> _MapEntry:
        entry = self.entries.get(slot)
        if entry is None:
            entry = self.entries[slot] = _MapEntry(complete=self._base is None)
        return entry

    def _complete(self, slot: Slot, entry: _MapEntry) -> None:
        if entry.complete or self._base is None:
            return
        units: dict[Any, Unit] = {}
        for row, data in self._base.scan(self.codec.name, self._prefix(slot)):
            _, _, sub = self.codec.identity(bytes(row))
            units[sub] = self._unit(*self.codec.unit(bytes(data)))
        units.update(entry.units)
        entry.units = {sub: unit for sub, unit in units.items() if unit is not ABSENT}
        entry.complete = True

    def load(self, table: pa.Table) -> None:
        for slot, sub, value, ts in self._columns(table):
            self._entry(slot).units[sub] = self._unit(value, ts)

    def slots(self) -> list[Slot]:
        found = [slot for slot in self.base_slots() if slot not in self.entries]
        return found + [slot for slot in list(self.entries) if self.all(slot)]

    def changes(self) -> list[Change]:
        found: list[Change] = []
        for slot in self.dirty:
            entry = self.entries[slot]
            key, namespace = self.split(slot)
            if entry.cleared:
                found.append(Change(RowOp.CLEAR, key, namespace, None, None, None))
            for sub in entry.dirty:
                unit = entry.units.get(sub, ABSENT)
                if unit is not ABSENT:
                    value, ts = self._unit_columns(unit)
                    found.append(Change(RowOp.PUT, key, namespace, sub, value, ts))
                elif not entry.cleared:
                    found.append(Change(RowOp.DELETE, key, namespace, sub, None, None))
        return found

    def settle(self) -> None:
        for slot in self.dirty:
            entry = self.entries[slot]
            entry.cleared, entry.dirty = False, {}
            if self._base is None and not entry.units:
                del self.entries[slot]
        self.dirty = {}

    def unsettle(self, changed: Iterable[Slot]) -> None:
        for slot in changed:
            entry = self._entry(slot)
            self._complete(slot, entry)
            entry.cleared = True
            entry.dirty = dict.fromkeys(entry.units)
            self.dirty[slot] = None

    def evict(self) -> None:
        if self._base is not None:
            self.entries = {slot: self.entries[slot] for slot in self.dirty}
