"""The built-in reducers: sum, count, min, max and mean, for one value and for whole columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from flowstate.checkpoint.identity import codes_of
from flowstate.errors import StateDescriptorError, StateTypeError

__all__ = ["Aggregate", "Reducer", "aggregate_of"]


class Reducer(StrEnum):
    """A reduction that the library knows, and therefore runs over a whole batch at once."""

    SUM = "sum"
    COUNT = "count"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"


class Aggregate(ABC):
    """A built-in reduction of values of one type; accumulators are in their physical form.

    Adding a batch is: ``fold`` the values per key into one partial accumulator each, then
    ``merge`` these into what is stored. A float sum added so may differ in its last digits from
    one added value by value, because the order of the additions differs.
    """

    accumulator_type: pa.DataType
    result_type: pa.DataType

    @abstractmethod
    def partial(self, value: Any) -> Any:
        """Return the accumulator of one value."""

    @abstractmethod
    def merge(self, a: Any, b: Any) -> Any:
        """Return the accumulator of what both hold."""

    def merge_columns(self, stored: pa.Array, partials: pa.Array) -> pa.Array:
        """Merge partial accumulators into what is stored, which is null where nothing is.

        ``ArrowInvalid`` or ``OverflowError`` says that a result is out of range.
        """
        merged = [
            partial if before is None else self.merge(before, partial)
            for before, partial in zip(stored.to_pylist(), partials.to_pylist(), strict=True)
        ]
        return pa.array(merged, partials.type)

    def result(self, accumulator: Any) -> Any:
        """Return what the accumulator amounts to."""
        return accumulator

    @abstractmethod
    def fold(self, keys: pa.Array, values: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Return the distinct keys, in no promised order, and a partial accumulator each."""

    @abstractmethod
    def results(self, accumulators: pa.Array) -> pa.Array:
        """Return :meth:`result` of each; a null has a null result."""


def aggregate_of(reducer: Reducer, value_type: pa.DataType) -> Aggregate:
    """Return the reduction for values of a type, or refuse a type it is not defined for."""
    if reducer is Reducer.COUNT:
        return _Count()
    if reducer in {Reducer.MIN, Reducer.MAX}:
        return _Extreme(reducer, value_type)
    if not (pat.is_signed_integer(value_type) or pat.is_floating(value_type)):
        raise StateDescriptorError(
            f"{reducer.value} is not defined for {value_type}: use integers or floats"
        )
    return _Mean(value_type) if reducer is Reducer.MEAN else _Sum(value_type)


def _added(stored: pa.Array, partials: pa.Array) -> pa.Array:
    """Return the sums; Arrow's own addition would wrap around silently."""
    return pc.coalesce(pc.add_checked(stored.cast(partials.type), partials), partials)


def _grouped(keys: pa.Array, columns: Mapping[str, tuple[pa.Array, str]]) -> dict[str, pa.Array]:
    """Aggregate columns per key; struct keys are grouped by their fields."""
    parts = {"k": keys}
    if pat.is_struct(keys.type):
        parts = {f"k{i}": keys.field(i) for i in range(keys.type.num_fields)}
    if any(pat.is_nested(part.type) for part in parts.values()):
        return _grouped_by_number(keys, columns)
    table = pa.table({**parts, **{name: column for name, (column, _) in columns.items()}})
    # One thread adds in the order of the rows, so that equal columns have equal float sums.
    grouped = table.group_by(list(parts), use_threads=False).aggregate(
        [(name, how) for name, (_, how) in columns.items()]
    )
    result = {name: grouped[f"{name}_{how}"].combine_chunks() for name, (_, how) in columns.items()}
    if "k" in parts:
        return {"key": grouped["k"].combine_chunks(), **result}
    fields = [grouped[name].combine_chunks() for name in parts]
    return {"key": pa.StructArray.from_arrays(fields, fields=list(keys.type)), **result}


def _grouped_by_number(
    keys: pa.Array, columns: Mapping[str, tuple[pa.Array, str]]
) -> dict[str, pa.Array]:
    """Do the same for keys that Arrow cannot group by: lists, and structs within others."""
    _, first, numbers = np.unique(codes_of(keys).numbers, return_index=True, return_inverse=True)
    found = _grouped(pa.array(numbers.reshape(-1)), columns)
    return {**found, "key": keys.take(pa.array(first)).take(found["key"])}


class _Sum(Aggregate):
    def __init__(self, value_type: pa.DataType) -> None:
        whole = pat.is_signed_integer(value_type)
        self.accumulator_type = pa.int64() if whole else pa.float64()
        self.result_type = self.accumulator_type

    def partial(self, value: Any) -> Any:
        return value

    def merge(self, a: Any, b: Any) -> Any:
        return a + b

    def merge_columns(self, stored: pa.Array, partials: pa.Array) -> pa.Array:
        return _added(stored, partials)

    def fold(self, keys: pa.Array, values: pa.Array) -> tuple[pa.Array, pa.Array]:
        if pat.is_integer(values.type) and _may_overflow(values):
            return self._fold_exactly(keys, values)
        found = _grouped(keys, {"v": (values.cast(self.accumulator_type), "sum")})
        return found["key"], found["v"]

    def _fold_exactly(self, keys: pa.Array, values: pa.Array) -> tuple[pa.Array, pa.Array]:
        # Arrow's sum of integers wraps around silently, that of decimals does not.
        found = _grouped(keys, {"v": (values.cast(pa.decimal128(38, 0)), "sum")})
        try:
            return found["key"], found["v"].cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise StateTypeError(f"a sum is out of the range of int64: {error}") from error

    def results(self, accumulators: pa.Array) -> pa.Array:
        return accumulators


def _may_overflow(values: pa.Array) -> bool:
    bounds = pc.min_max(values).as_py()
    largest = max(abs(bounds["min"] or 0), abs(bounds["max"] or 0))
    return bool(largest * len(values) >= 1 << 63)


class _Count(Aggregate):
    accumulator_type = pa.int64()
    result_type = pa.int64()

    def partial(self, value: Any) -> int:
        return 1

    def merge(self, a: int, b: int) -> int:
        return a + b

    def merge_columns(self, stored: pa.Array, partials: pa.Array) -> pa.Array:
        return _added(stored, partials)

    def fold(self, keys: pa.Array, values: pa.Array) -> tuple[pa.Array, pa.Array]:
        ones = pa.repeat(pa.scalar(1, pa.int64()), len(keys))
        found = _grouped(keys, {"n": (ones, "sum")})
        return found["key"], found["n"]

    def results(self, accumulators: pa.Array) -> pa.Array:
        return accumulators


class _Extreme(Aggregate):
    def __init__(self, reducer: Reducer, value_type: pa.DataType) -> None:
        if pat.is_nested(value_type):
            raise StateDescriptorError(f"{reducer.value} is not defined for {value_type}")
        self._how = reducer.value
        self._pick = min if reducer is Reducer.MIN else max
        self.accumulator_type = self.result_type = value_type

    def partial(self, value: Any) -> Any:
        return value

    def merge(self, a: Any, b: Any) -> Any:
        # A NaN is smaller and larger than nothing; numbers go before it, as in Arrow.
        if a != a:
            return b
        return a if b != b else self._pick(a, b)

    def merge_columns(self, stored: pa.Array, partials: pa.Array) -> pa.Array:
        pick = pc.min_element_wise if self._pick is min else pc.max_element_wise
        try:
            return pick(stored, partials, skip_nulls=True)
        except pa.ArrowNotImplementedError:
            # Arrow does not compare booleans and durations.
            return super().merge_columns(stored, partials)

    def fold(self, keys: pa.Array, values: pa.Array) -> tuple[pa.Array, pa.Array]:
        # Arrow finds the extremes of every scalar type but this one.
        ticks = values.view(pa.int64()) if pat.is_duration(values.type) else values
        found = _grouped(keys, {"v": (ticks, self._how)})
        return found["key"], found["v"].view(values.type) if ticks is not values else found["v"]

    def results(self, accumulators: pa.Array) -> pa.Array:
        return accumulators


class _Mean(Aggregate):
    accumulator_type = pa.struct([("sum", pa.float64()), ("count", pa.int64())])
    result_type = pa.float64()

    def __init__(self, value_type: pa.DataType) -> None:
        self._value_type = value_type

    def partial(self, value: Any) -> dict[str, Any]:
        return {"sum": float(value), "count": 1}

    def merge(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        return {"sum": a["sum"] + b["sum"], "count": a["count"] + b["count"]}

    def merge_columns(self, stored: pa.Array, partials: pa.Array) -> pa.Array:
        fields = [
            _added(pc.struct_field(stored, name), pc.struct_field(partials, name))
            for name in ("sum", "count")
        ]
        return pa.StructArray.from_arrays(fields, fields=list(self.accumulator_type))

    def result(self, accumulator: dict[str, Any]) -> float:
        return float(accumulator["sum"] / accumulator["count"])

    def fold(self, keys: pa.Array, values: pa.Array) -> tuple[pa.Array, pa.Array]:
        ones = pa.repeat(pa.scalar(1, pa.int64()), len(keys))
        # Not safe: Arrow refuses integers that a float rounds, and float() rounds them.
        floats = values.cast(pa.float64(), safe=False)
        found = _grouped(keys, {"v": (floats, "sum"), "n": (ones, "sum")})
        both = pa.StructArray.from_arrays(
            [found["v"], found["n"]], fields=list(self.accumulator_type)
        )
        return found["key"], both

    def results(self, accumulators: pa.Array) -> pa.Array:
        counts = pc.struct_field(accumulators, "count").cast(pa.float64())
        return pc.divide(pc.struct_field(accumulators, "sum"), counts)
