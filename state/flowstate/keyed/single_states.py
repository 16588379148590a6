"""The states of one value per key: value, reducing and aggregating state.

Without a TTL and namespaces they take the values that are on loan by the key's place, see
``keyed.loans``.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import pyarrow.types as pat

from flowstate.descriptors import (
    AggregatingStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from flowstate.keyed.codec import ABSENT
from flowstate.keyed.context import NO_KEY, KeyContext
from flowstate.keyed.loans import Loan
from flowstate.keyed.single_table import SingleTable
from flowstate.keyed.states import State
from flowstate.keyed.ttl import Ttl
from flowstate.keys import KeyType
from flowstate.types import ValueType

__all__ = ["AggregatingState", "PlainValueState", "ReducingState", "ValueState"]

T = TypeVar("T")
IN = TypeVar("IN")
OUT = TypeVar("OUT")


class _SingleState(State):
    """A state of one physical value per key, with or without a TTL."""

    def __init__(
        self,
        descriptor: StateDescriptor,
        context: KeyContext,
        table: SingleTable,
        value_type: ValueType,
        namespace_type: KeyType | None,
    ) -> None:
        super().__init__(descriptor, context, value_type, namespace_type)
        self._table = table
        self._clean_on_access(table, self._drop_if_expired)
        if self._ttl is None and namespace_type is None:
            self._take_loans(Loan(table))

    def clear(self) -> None:
        self._table.remove(self._slot())

    def _read(self) -> Any:
        slot = self._slot()
        unit = self._table.get(slot)
        if self._ttl is None or unit is ABSENT:
            self._accessed()
            return unit
        return self._read_with_ttl(slot, unit, self._ttl)

    def _read_with_ttl(self, slot: Any, unit: Any, ttl: Ttl) -> Any:
        value, stamp = unit
        if ttl.is_expired(stamp, ttl.now()):
            self._table.remove(slot)
            value = value if ttl.return_expired else ABSENT
        elif ttl.renew_on_read:
            self._table.put(slot, (value, ttl.stamp()))
        self._accessed()
        return value

    def _write(self, value: Any) -> None:
        self._table.put(self._slot(), value if self._ttl is None else (value, self._ttl.stamp()))
        self._accessed()

    def _take_loans(self, loan: Loan) -> None:
        """Take values by the key's place while they are on loan, and the way of the class else.

        These short ways stand in the instance, in front of the methods of the class, for as long as
        the state lives: whoever keeps one of them gets what is right at any time. They are closures
        because this is where a job on rows spends its time.
        """
        self.loan = loan
        values, changed, context = loan.values, loan.changed, self._context
        read_table, write_table, clear_table = self._read, self._write, self.clear

        def read() -> Any:
            place = context.place
            if place < 0:
                return read_table()
            value = values[place]
            return ABSENT if value is None else value

        def write(value: Any) -> None:
            place = context.place
            if place < 0:
                write_table(value)
                return
            values[place] = value
            changed[place] = 1

        def clear() -> None:
            place = context.place
            if place < 0:
                clear_table()
            elif values[place] is not None:
                values[place] = None
                changed[place] = 1

        self.__dict__.update(_read=read, _write=write, clear=clear)

    def _drop_if_expired(self, slot: Any) -> None:
        unit = self._table.get(slot)
        ttl = self._ttl
        if unit is not ABSENT and ttl is not None and ttl.is_expired(unit[1], ttl.now()):
            self._table.remove(slot)


class ValueState(_SingleState, Generic[T]):
    """One value per key."""

    _descriptor: ValueStateDescriptor

    def value(self) -> T | None:
        """Return the value, or the default (none with a TTL) where there is none."""
        value = self._read()
        if value is not ABSENT:
            return self._user(value)  # type: ignore[no-any-return]
        return None if self._ttl is not None else self._default()

    def update(self, value: T | None) -> None:
        """Set the value; ``None`` clears it."""
        if value is None:
            self.clear()
        else:
            self._write(self._checked(value))

    def _default(self) -> T | None:
        default = self._descriptor.default
        if default is None:
            return None
        # Through the physical form, so that a mutable default is not shared between keys.
        return self._user(self._physical(default))  # type: ignore[no-any-return]


class PlainValueState(ValueState[T]):
    """A value state without TTL and namespaces: the same, with fewer steps on the way."""

    def __init__(
        self,
        descriptor: StateDescriptor,
        context: KeyContext,
        table: SingleTable,
        value_type: ValueType,
        namespace_type: KeyType | None,
    ) -> None:
        self._to_user = value_type.to_user
        # Up to which an int is taken as it is; all else goes the long way.
        is_int = value_type.serializer is None and pat.is_signed_integer(value_type.arrow)
        self._int_limit = 1 << (value_type.arrow.bit_width - 1) if is_int else 0
        super().__init__(descriptor, context, table, value_type, namespace_type)

    def value(self) -> T | None:
        table = self._table
        try:
            value = table.entries[self._context.key]
        except (KeyError, TypeError):  # It is not in memory, or the table has columns.
            value = table.get(self._slot())
        if value is ABSENT:
            return self._default()
        to_user = self._to_user
        return value if to_user is None else to_user(value)  # type: ignore[no-any-return]

    def update(self, value: T | None) -> None:
        key = self._context.key
        if key is NO_KEY or value is None:
            super().update(value)
            return
        table, limit = self._table, self._int_limit
        if value.__class__ is not int or not -limit <= value < limit:  # type: ignore[operator]
            value = self._checked(value)
        if table.columns is not None:
            table.by_slot()
        table.entries[key] = value
        table.dirty[key] = None

    def _take_loans(self, loan: Loan) -> None:
        super()._take_loans(loan)
        values, changed, context = loan.values, loan.changed, self._context
        default, to_user, checked = self._default, self._to_user, self._checked
        value_of_table, update_table, limit = self.value, self.update, self._int_limit

        def value() -> Any:
            place = context.place
            if place < 0:
                return value_of_table()
            found = values[place]
            if found is None:
                return default()
            return found if to_user is None else to_user(found)

        def update(value: Any) -> None:
            place = context.place
            if place < 0:
                update_table(value)
                return
            if value.__class__ is int and -limit <= value < limit:
                values[place] = value
            elif value is not None:
                values[place] = checked(value)
            elif values[place] is None:
                return
            else:
                values[place] = None
            changed[place] = 1

        self.__dict__.update(value=value, update=update)


class ReducingState(_SingleState, Generic[T]):
    """One value per key, into which each added one is reduced."""

    _descriptor: ReducingStateDescriptor

    def get(self) -> T | None:
        """Return the reduced value, or None before the first ``add``."""
        value = self._read()
        return None if value is ABSENT else self._user(value)

    def add(self, value: T) -> None:
        """Reduce a value into the state; the first one is stored as it is."""
        added = self._checked(self._not_null(value, "cannot add None to a reducing state"))
        current = self._read()
        if current is not ABSENT:
            reduced = self._descriptor.function(self._user(current), self._user(added))
            added = self._checked(self._not_null(reduced, "the reduce function returned None"))
        self._write(added)


class AggregatingState(_SingleState, Generic[IN, OUT]):
    """An accumulator per key, to which values are added."""

    _descriptor: AggregatingStateDescriptor

    def get(self) -> OUT | None:
        """Return the result of what was added, or None before the first ``add``."""
        accumulator = self._read()
        if accumulator is ABSENT:
            return None
        builtin = self._descriptor.builtin
        if builtin is not None:
            return builtin.result(accumulator)  # type: ignore[no-any-return]
        return self._descriptor.aggregate.get_result(self._user(accumulator))  # type: ignore

    def add(self, value: IN) -> None:
        """Add a value to the accumulator."""
        self._not_null(value, "cannot add None to an aggregating state")
        current = self._read()
        if self._descriptor.builtin is None:
            added = self._added_by_function(current, value)
        else:
            added = self._added(current, value)
        self._write(self._checked(added))

    def _added(self, current: Any, value: Any) -> Any:
        builtin, kind = self._descriptor.builtin, self._descriptor.input_type
        if builtin is None or kind is None:
            raise AssertionError("only built-in reducers are added so")
        partial = builtin.partial(kind.to_physical(value))
        return partial if current is ABSENT else builtin.merge(current, partial)

    def _added_by_function(self, current: Any, value: Any) -> Any:
        function: Any = self._descriptor.aggregate
        if current is ABSENT:
            accumulator = function.create_accumulator()
        else:
            accumulator = self._user(current)
        added = function.add(value, accumulator)
        return self._not_null(added, "add() of the aggregate function returned None")
