"""How rows find their subtask: columns that the JVM computes, and what a task reads out of them.

One column goes along with each row: the time of the batch and the subtask, in one long. A second
one is there only where control rows are: those of ticks and of watermarks, which carry no data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from flowspark.errors import InputError
from flowspark.keyed.identity import NAME

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = [
    "CONTROL",
    "ROUTE",
    "InputRows",
    "Route",
    "RoutedBatch",
    "control_text",
    "in_plain_types",
    "route_column",
    "route_value",
    "subtask_column",
]

ROUTE = "_flow_route"
CONTROL = "_flow_control"

# A parallelism is at most 32768, so a subtask's index has 15 bits.
_SUBTASK_BITS = 16
_SUBTASK_MASK = (1 << _SUBTASK_BITS) - 1


@dataclass(frozen=True, slots=True)
class Route:
    """What a row says about where it belongs, and when."""

    subtask_index: int
    batch_ms: int

    @classmethod
    def of(cls, value: int) -> Route:
        """Read the column's value."""
        return cls(value & _SUBTASK_MASK, value >> _SUBTASK_BITS)


@dataclass(frozen=True, slots=True)
class RoutedBatch:
    """Rows with their keys, and what the control rows among them said."""

    rows: pa.RecordBatch
    keys: pa.Array
    controls: list[dict[str, Any]]


def route_column(subtask: Column) -> Column:
    """Return the column that goes along; Spark puts the logged time of the batch into it."""
    from pyspark.sql import functions as F  # noqa: N812 (Spark's own habit)

    now_ms = F.unix_millis(F.current_timestamp())
    return F.shiftleft(now_ms, _SUBTASK_BITS).bitwiseOR(subtask.cast("long"))


def route_value(subtask_index: int, batch_ms: int) -> int:
    """Return the same for a row that is made in Python."""
    return batch_ms << _SUBTASK_BITS | subtask_index


def subtask_column() -> Column:
    """Return the subtask that stands in the route."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.col(ROUTE).bitwiseAND(F.lit(_SUBTASK_MASK)).cast("int")


def control_text(control: dict[str, Any]) -> str:
    """Return what a control row carries."""
    return json.dumps(control, separators=(",", ":"))


class InputRows:
    """A task's input: the first route, and then data and control apart."""

    def __init__(
        self, batches: Iterator[pa.RecordBatch], key_columns: Sequence[str], *, uid: str
    ) -> None:
        self._batches, self._key_columns, self._uid = batches, tuple(key_columns), uid
        self._first: pa.RecordBatch | None = None

    def first_route(self) -> Route | None:
        """Return which subtask this is; None if there are no rows."""
        for batch in self._batches:
            if batch.num_rows:
                self._first = batch
                return Route.of(batch.column(ROUTE)[0].as_py())
        return None

    def __iter__(self) -> Iterator[RoutedBatch]:
        if self._first is not None:
            yield self._routed(self._first)
            self._first = None
        for batch in self._batches:
            if batch.num_rows:
                yield self._routed(batch)

    def _routed(self, batch: pa.RecordBatch) -> RoutedBatch:
        controls: list[dict[str, Any]] = []
        names = batch.schema.names
        if CONTROL in names:
            column = batch.column(CONTROL)
            if column.null_count < batch.num_rows:
                controls = [json.loads(text) for text in column.drop_null().to_pylist()]
                batch = batch.filter(pc.is_null(column))
        rows = in_plain_types(
            batch.select([name for name in names if name not in {ROUTE, CONTROL}])
        )
        return RoutedBatch(rows, self._keys(rows), controls)

    def _keys(self, rows: pa.RecordBatch) -> pa.Array:
        columns = [rows.column(name) for name in self._key_columns]
        if len(columns) > 1:
            fields = [rows.schema.field(name).with_nullable(True) for name in self._key_columns]
            return pa.StructArray.from_arrays(columns, fields=fields)
        if columns[0].null_count:
            raise InputError(
                NAME,
                f"operator {self._uid!r}: {columns[0].null_count} of {rows.num_rows} rows have no "
                f"key: {self._key_columns[0]!r} is null. Filter them out, or give them a key with "
                f"coalesce() in front of key_by",
            )
        return columns[0]


def in_plain_types(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows as the state has them, whatever the session's settings are.

    Times are in UTC, for the session's time zone must not reach the state. Texts are not large
    ones, as they come with ``spark.sql.execution.arrow.useLargeVarTypes``.
    """
    schema = rows.schema
    kinds = [_plain_type(field.type) for field in schema]
    if all(kind is field.type for kind, field in zip(kinds, schema, strict=True)):
        return rows
    columns = [column.cast(kind) for column, kind in zip(rows.columns, kinds, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pat.is_timestamp(kind) and kind.tz not in {None, "UTC"}:
        return pa.timestamp(kind.unit, "UTC")
    if pat.is_large_string(kind):
        return pa.string()
    if pat.is_large_binary(kind):
        return pa.binary()
    if pat.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        inner = [field.with_type(_plain_type(field.type)) for field in fields]
        changed = any(new.type is not old.type for new, old in zip(inner, fields, strict=True))
        return pa.struct(inner) if changed else kind
    if pat.is_list(kind):
        element = _plain_type(kind.value_type)
        return kind if element is kind.value_type else pa.list_(element)
    if pat.is_map(kind):
        parts = (_plain_type(kind.key_type), _plain_type(kind.item_type))
        return kind if parts == (kind.key_type, kind.item_type) else pa.map_(*parts)
    return kind
