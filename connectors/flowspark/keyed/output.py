"""What an operator hands on: rows as Arrow batches, kept until the state is durable."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

import pyarrow as pa

from flowspark.errors import OutputError
from flowspark.keyed.identity import NAME

__all__ = ["OutputBuffer", "RowWriter"]

_SPILL_BYTES = 128 << 20
_ROWS_PER_BATCH = 10_000


class OutputBuffer:
    """Batches in memory, or, beyond a limit, in a temporary file on the local disk."""

    def __init__(self, schema: pa.Schema, *, spill_bytes: int = _SPILL_BYTES) -> None:
        self.schema = schema
        self._spill_bytes = spill_bytes
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self._writer: pa.RecordBatchStreamWriter | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch."""
        if not batch.num_rows:
            return
        self._batches.append(batch)
        self._bytes += batch.nbytes
        if self._bytes > self._spill_bytes:
            self._spill()

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Yield everything in the order in which it came."""
        if self._file is not None and self._writer is not None:
            self._writer.close()
            self._file.seek(0)
            yield from pa.ipc.open_stream(self._file)
        yield from self._batches

    def close(self) -> None:
        """Let go of the file."""
        self._batches = []
        if self._file is not None:
            self._file.close()
            self._file = None

    def _spill(self) -> None:
        if self._writer is None:
            self._file = tempfile.TemporaryFile(prefix="flowspark-output-")  # noqa: SIM115
            self._writer = pa.ipc.new_stream(self._file, self.schema)
        for batch in self._batches:
            self._writer.write_batch(batch)
        self._batches, self._bytes = [], 0


class RowWriter:
    """Turns the rows that a function emits into batches of one schema."""

    def __init__(self, schema: pa.Schema, *, uid: str, what: str = "output") -> None:
        self.schema = schema
        self._uid, self._what = uid, what

    def batches(self, rows: list[Any]) -> Iterator[pa.RecordBatch]:
        """Yield the rows as batches of a fair size."""
        for start in range(0, len(rows), _ROWS_PER_BATCH):
            yield self.batch(rows[start : start + _ROWS_PER_BATCH])

    def batch(self, rows: Sequence[Any]) -> pa.RecordBatch:
        """Return rows as one batch, or say which value does not fit."""
        rows = self._as_tuples(rows)
        arrays = []
        for place, field in enumerate(self.schema):
            values = [row[place] for row in rows]
            try:
                arrays.append(pa.array(values, field.type))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise self._unfit(field, values, error) from error
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _as_tuples(self, rows: Sequence[Any]) -> Sequence[Any]:
        width = len(self.schema)
        kinds = set(map(type, rows))
        if kinds <= {tuple} or all(issubclass(kind, tuple | list) for kind in kinds):
            if set(map(len, rows)) <= {width}:
                return rows
        elif all(issubclass(kind, dict) for kind in kinds):
            names = self.schema.names
            if all(row.keys() <= set(names) for row in rows):
                return [tuple(row.get(name) for name in names) for row in rows]
        wrong = next(row for row in rows if not self._fits(row, width))
        raise OutputError(
            NAME,
            f"operator {self._uid!r}: an {self._what} row is a tuple of {width} values "
            f"({', '.join(self.schema.names)}) or a dict of them, not {_shown(wrong)}. A function "
            f"yields rows, or returns a list of rows",
        )

    def _fits(self, row: Any, width: int) -> bool:
        if isinstance(row, dict):
            return row.keys() <= set(self.schema.names)
        return isinstance(row, tuple | list) and len(row) == width

    def _unfit(self, field: pa.Field, values: Sequence[Any], error: Exception) -> OutputError:
        for value in values:
            try:
                pa.array([value], field.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                break
        return OutputError(
            NAME,
            f"operator {self._uid!r}: the {self._what} column {field.name!r} is of type "
            f"{field.type}, and the function emitted {_shown(value)} for it: {error}",
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:200]}{'...' if len(text) > 200 else ''} ({type(value).__name__})"
