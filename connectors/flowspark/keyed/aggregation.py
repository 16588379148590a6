"""Ready-made aggregates per key: count, sum, min, max and mean, on whole columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from flowspark.errors import OptionError
from flowspark.keyed.arrow_work import ArrowContext, ArrowKeyedFunction, BulkStates
from flowspark.keyed.identity import NAME
from flowspark.keyed.running import running
from flowspark.keyed.schemas import arrow_schema, nullable
from flowstate.aggregates import Reducer, aggregate_of
from flowstate.descriptors import AggregatingStateDescriptor
from flowstate.errors import FlowError
from flowstate.functions import RuntimeContext
from flowstate.keyed.loans import NumberedKeys

__all__ = ["Aggregation", "Emit", "aggregation_of"]


class Emit(StrEnum):
    """When a row is emitted."""

    PER_KEY = "key"
    """Once in a micro-batch for each key that it has rows of."""
    PER_RECORD = "record"
    """For each row, with the aggregates up to it."""


@dataclass(frozen=True, slots=True)
class _Column:
    """One output column."""

    name: str
    reducer: Reducer
    source: str | None
    """None for a count of rows."""
    type: pa.DataType


class Aggregation(ArrowKeyedFunction):
    """Keeps one aggregating state for each output column."""

    def __init__(self, columns: Sequence[_Column], emit: Emit, key_columns: Sequence[str]) -> None:
        self._columns, self._emit, self._key_columns = tuple(columns), emit, tuple(key_columns)
        self._seen: list[pa.Array] = []

    @property
    def value_columns(self) -> list[str]:
        """The input columns that are aggregated."""
        return [column.source for column in self._columns if column.source is not None]

    def open(self, ctx: RuntimeContext) -> None:
        self._seen = []
        for column in self._columns:
            ctx.get_aggregating_state(
                AggregatingStateDescriptor(column.name, column.reducer, column.type)
            )

    def process_batch(
        self, batch: pa.RecordBatch, state: BulkStates, ctx: ArrowContext
    ) -> pa.RecordBatch | None:
        if self._emit is Emit.PER_RECORD:
            return self._per_record(batch, state, ctx)
        added = [self._add(column, batch, state, ctx.keys) for column in self._columns]
        # Whoever added all rows has found the distinct keys already.
        seen = next((keys for keys in added if keys is not None), None)
        self._seen.append(NumberedKeys.of(ctx.keys).distinct if seen is None else seen)
        return None

    def finish(self, state: BulkStates, ctx: ArrowContext) -> pa.RecordBatch | None:
        if self._emit is Emit.PER_RECORD or not self._seen:
            return None
        keys = self._seen[0]
        if len(self._seen) > 1:
            keys = NumberedKeys.of(pa.concat_arrays(self._seen)).distinct
        results = (self._results(one, state, keys) for one in self._columns)
        return self._batch([*ctx.key_arrays(keys), *results])

    def _results(self, column: _Column, state: BulkStates, keys: pa.Array) -> pa.Array:
        results = state[column.name].results(keys)
        # As in SQL: a key that has had only nulls has a count, and it is 0.
        return results.fill_null(0) if column.reducer is Reducer.COUNT else results

    def _add(
        self, column: _Column, batch: pa.RecordBatch, state: BulkStates, keys: pa.Array
    ) -> pa.Array | None:
        """Add the values, and return the distinct keys if there was one for each row."""
        values = _values(column, batch)
        if not values.null_count:
            return state[column.name].add(keys, values)
        # As in SQL: what is null is not aggregated.
        valid = pc.is_valid(values)
        if values.null_count < len(values):
            state[column.name].add(keys.filter(valid), values.filter(valid))
        return None

    def _per_record(
        self, batch: pa.RecordBatch, state: BulkStates, ctx: ArrowContext
    ) -> pa.RecordBatch:
        numbered = NumberedKeys.of(ctx.keys)
        results = []
        for column in self._columns:
            before = state[column.name].get(numbered.distinct)
            values = _values(column, batch)
            results.append(running(column.reducer, before, values, numbered.numbers))
            self._add(column, batch, state, ctx.keys)
        return self._batch([*ctx.key_arrays(ctx.keys), *results])

    def _batch(self, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        names = [*self._key_columns, *(column.name for column in self._columns)]
        return pa.RecordBatch.from_arrays(list(columns), names=names)


def _values(column: _Column, batch: pa.RecordBatch) -> pa.Array:
    if column.source is None:
        return pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows)
    return batch.column(column.source)


def aggregation_of(
    aggregates: Mapping[str, Any], emit: str, schema: StructType, key_columns: Sequence[str]
) -> tuple[Aggregation, StructType]:
    """Return the function for what a program asked for, and the columns that it emits."""
    if not aggregates:
        raise OptionError(NAME, "aggregate() needs at least one output column")
    try:
        how = Emit(emit)
    except ValueError:
        raise OptionError(
            NAME, f"emit is one of {', '.join(map(repr, map(str, Emit)))}, not {emit!r}"
        ) from None
    columns = list(_columns(aggregates, schema, key_columns))
    fields = [schema[name] for name in key_columns]
    for column in columns:
        result = aggregate_of(column.reducer, column.type).result_type
        same = column.source is not None and result == column.type
        kind = schema[column.source].dataType if same else from_arrow_type(result)  # type: ignore[index]
        fields.append(StructField(column.name, kind))
    return Aggregation(columns, how, key_columns), nullable(StructType(fields))


def _columns(
    aggregates: Mapping[str, Any], schema: StructType, key_columns: Sequence[str]
) -> Iterator[_Column]:
    types = arrow_schema(schema)
    for name, given in aggregates.items():
        if name in key_columns:
            raise OptionError(NAME, f"the output column {name!r} is a key already: rename it")
        how, source = (given, None) if isinstance(given, str) else (*given, None)[:2]
        try:
            reducer = Reducer(how)
        except ValueError:
            known = ", ".join(Reducer)
            raise OptionError(
                NAME, f"the output column {name!r}: {how!r} is none of {known}"
            ) from None
        if source is None and reducer is not Reducer.COUNT:
            raise OptionError(
                NAME,
                f"the output column {name!r}: {how} of what? Name a column, as in "
                f"{{{name!r}: ({how!r}, 'amount')}}",
            )
        if source is not None and source not in schema.names:
            raise OptionError(
                NAME,
                f"the output column {name!r}: there is no column {source!r}, the columns are "
                f"{', '.join(schema.names)}",
            )
        kind = pa.int64() if source is None else types.field(source).type
        try:
            aggregate_of(reducer, kind)
        except FlowError as error:
            raise OptionError(NAME, f"the output column {name!r}: {error.message}") from error
        yield _Column(name, reducer, source, kind)
