"""Bulk access: many keys of a state at once, as Arrow arrays.

It sees and changes the same state as the states of ``keyed.states`` do, TTL included, and may be
mixed with them. Where all of the state is in memory, has no TTL and is not used key by key as well,
nor a few keys of many at a time, it stays in columns and there is no loop in Python; else there is
a step for each distinct key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from flowstate.descriptors import (
    AggregatingStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from flowstate.errors import StateError, StateTypeError
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.keyed.codec import ABSENT
from flowstate.keyed.single_table import SingleTable
from flowstate.keyed.ttl import Ttl
from flowstate.keys import canonical_column, physical_column

__all__ = ["BulkState"]


class BulkState:
    """A value, reducing or aggregating state without namespaces, by columns of keys."""

    def __init__(self, backend: KeyedStateBackend, name: str) -> None:
        table = backend.table(name)
        if not isinstance(table, SingleTable) or table.codec.namespace is not None:
            raise StateError(
                f"state {name!r} has no bulk access: it is for value, reducing and aggregating "
                f"states without namespaces"
            )
        self._table = table
        self._keys = backend.key_type
        self._descriptor: StateDescriptor = backend.descriptor(name)
        if self._descriptor.types["value"].serializer is not None:
            raise StateError(f"state {name!r} has a serializer, so its values are no Arrow column")
        config = self._descriptor.live_ttl
        self._ttl = None if config is None else Ttl(config, backend.context)
        self._type = self._descriptor.types["value"].arrow

    def get(self, keys: pa.Array) -> pa.Array:
        """Return what is stored of each key: the value, or the accumulator; null where nothing is.

        A value state's default stands for nulls, unless there is a TTL.
        """
        values = self._read(self._key_column(keys))
        default = getattr(self._descriptor, "default", None)
        if self._ttl is not None or default is None or not values.null_count:
            return values
        physical = self._descriptor.types["value"].to_physical(default)
        places = np.where(values.is_valid(), np.arange(len(values)), len(values))
        return pa.concat_arrays([values, pa.array([physical], self._type)]).take(pa.array(places))

    def results(self, keys: pa.Array) -> pa.Array:
        """Return the result of each key, as ``get()`` of a reducing or aggregating state does."""
        stored = self.get(keys)
        builtin = getattr(self._descriptor, "builtin", None)
        if builtin is not None:
            return builtin.results(stored)
        if isinstance(self._descriptor, AggregatingStateDescriptor):
            raise self._needs_builtin("results")
        return stored

    def update(self, keys: pa.Array, values: pa.Array) -> None:
        """Set the value of each key; null clears it. Of a key given twice the last one stays."""
        if not isinstance(self._descriptor, ValueStateDescriptor):
            raise StateError(f"state {self._descriptor.name!r} is added to, not updated")
        column = self._cast(values, self._type)
        self._write(self._key_column(keys, values), column)

    def add(self, keys: pa.Array, values: pa.Array) -> pa.Array:
        """Add each value to the state of its key, and return the distinct keys.

        Only for states with a built-in reducer: they add all values of a key in one step.
        """
        builtin = getattr(self._descriptor, "builtin", None)
        if builtin is None:
            raise self._needs_builtin("add")
        if values.null_count:
            raise StateTypeError(
                f"state {self._descriptor.name!r}: cannot add null; {values.null_count} of "
                f"{len(values)} values are null"
            )
        column = self._key_column(keys, values)
        distinct, partials = builtin.fold(column, self._cast(values, self._input_type()))
        stored = self._read(distinct)
        try:
            merged = builtin.merge_columns(stored, partials).cast(self._type)
        except (pa.ArrowException, OverflowError) as error:
            # Before anything is changed.
            raise StateTypeError(
                f"state {self._descriptor.name!r}: a result does not fit {self._type}: {error}"
            ) from error
        self._write(distinct, merged)
        return distinct

    def _input_type(self) -> pa.DataType:
        if isinstance(self._descriptor, AggregatingStateDescriptor):
            kind = self._descriptor.input_type
            return self._type if kind is None else kind.arrow
        return self._type

    def _key_column(self, keys: pa.Array, values: pa.Array | None = None) -> pa.Array:
        """Return the keys as a column of the backend's type, in which equal keys are equal."""
        if values is not None and len(keys) != len(values):
            raise StateTypeError(
                f"state {self._descriptor.name!r}: {len(keys)} keys for {len(values)} values"
            )
        if keys.null_count:
            raise StateTypeError(
                f"state {self._descriptor.name!r}: {keys.null_count} of {len(keys)} keys are null"
            )
        column = self._cast(keys, self._keys.arrow)
        return canonical_column(column) if self._keys.has_floats else column

    def _cast(self, values: pa.Array | pa.ChunkedArray, arrow: pa.DataType) -> pa.Array:
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        try:
            return values.cast(arrow)
        except pa.ArrowException as error:
            raise StateTypeError(
                f"state {self._descriptor.name!r}: a column of {values.type} cannot be {arrow}: "
                f"{error}"
            ) from error

    def _read(self, keys: pa.Array) -> pa.Array:
        """Return what is stored of each key; null where nothing is."""
        found = self._table.get_columns(keys)
        if found is not None:
            return found
        slots = self._keys.to_list(keys)
        units = self._table.get_many(slots)
        if self._ttl is None:
            values = [None if unit is ABSENT else unit for unit in units]
        else:
            ttl, now, stamp = self._ttl, self._ttl.now(), self._ttl.stamp()
            values = [
                None if unit is ABSENT else self._seen(slot, unit, ttl, now, stamp)
                for slot, unit in zip(slots, units, strict=True)
            ]
        return pa.array(values, self._type)

    def _seen(self, slot: Any, unit: Any, ttl: Ttl, now: int, stamp: int) -> Any:
        value, written = unit
        if ttl.is_expired(written, now):
            self._table.remove(slot)
            return value if ttl.return_expired else None
        if ttl.renew_on_read:
            self._table.put(slot, (value, stamp))
        return value

    def _write(self, keys: pa.Array, values: pa.Array) -> None:
        """Store the value of each key; null removes it."""
        if self._table.put_columns(keys, values):
            return
        slots, units = self._keys.to_list(keys), physical_column(values)
        if not values.null_count:
            self._put(slots, units)
            return
        for slot, unit in zip(slots, units, strict=True):
            if unit is None:
                self._table.remove(slot)
            else:
                self._put([slot], [unit])

    def _put(self, slots: list[Any], values: list[Any]) -> None:
        if self._ttl is not None:
            stamp = self._ttl.stamp()
            values = [(value, stamp) for value in values]
        self._table.put_many(slots, values)

    def _needs_builtin(self, what: str) -> StateError:
        reducing = isinstance(self._descriptor, ReducingStateDescriptor)
        return StateError(
            f"{what}() in bulk needs a built-in reducer, and state {self._descriptor.name!r} has "
            f"{'a reduce' if reducing else 'an aggregate'} function of its own: give the "
            f"descriptor Reducer.SUM, MIN, MAX, COUNT or MEAN, or go key by key"
        )
