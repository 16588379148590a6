"""Functions on whole columns: no Python for each row, only for each key that changes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from flowspark.errors import FunctionError, OutputError
from flowspark.keyed.identity import NAME
from flowspark.keyed.output import OutputBuffer
from flowspark.keyed.work import BYTES_PER_CALL, ROWS_PER_CALL, BatchInfo
from flowstate.checkpoint import SubtaskSnapshot
from flowstate.errors import FlowError, SnapshotError, StorageError
from flowstate.functions import RuntimeContext
from flowstate.keyed.bulk import BulkState
from flowstate.runner import RuntimeStates
from flowstate.subtask import Subtask

__all__ = ["ArrowContext", "ArrowKeyedFunction", "ArrowWork", "ArrowWorkFactory", "BulkStates"]


class BulkStates:
    """The registered states by name, each for many keys at once."""

    def __init__(self, subtask: Subtask) -> None:
        self._subtask = subtask
        self._found: dict[str, BulkState] = {}

    def __getitem__(self, name: str) -> BulkState:
        state = self._found.get(name)
        if state is None:
            state = self._found[name] = BulkState(self._subtask.keyed, name)
        return state


@dataclass(frozen=True, slots=True)
class ArrowContext:
    """What surrounds a call of ``process_batch``."""

    keys: pa.Array
    """The key of each row; a struct if there are several key columns."""
    key_columns: tuple[str, ...]
    subtask_index: int
    parallelism: int
    batch_id: int | None
    """None in a batch job."""
    processing_time_ms: int
    """The time of the micro-batch: the same again when it is run again."""

    def key_arrays(self, keys: pa.Array) -> list[pa.Array]:
        """Return keys as one array for each key column, to be put into the output."""
        if len(self.key_columns) == 1:
            return [keys]
        return [keys.field(i) for i in range(keys.type.num_fields)]


class ArrowKeyedFunction(ABC):
    """Handles the rows of many keys at once, as Arrow columns, with state in bulk.

    ``process_batch`` is called for pieces of a micro-batch, in the order of the rows; where one
    piece ends and the next begins means nothing and may differ when the batch is run again.
    ``finish`` is called once after them. Both may return a ``RecordBatch``, several, or None.
    There are no timers and no side outputs: for these there is ``KeyedProcessFunction``.
    """

    def open(self, ctx: RuntimeContext) -> None:  # noqa: B027 (optional)
        """Register value, reducing and aggregating states, in every batch anew."""

    @abstractmethod
    def process_batch(
        self, batch: pa.RecordBatch, state: BulkStates, ctx: ArrowContext
    ) -> pa.RecordBatch | Iterable[pa.RecordBatch] | None:
        """Handle rows."""

    def finish(
        self, state: BulkStates, ctx: ArrowContext
    ) -> pa.RecordBatch | Iterable[pa.RecordBatch] | None:
        """Handle the end of the micro-batch; ``ctx.keys`` is empty."""
        return None

    def close(self) -> None:  # noqa: B027 (optional)
        """Let go of what ``open`` took; not called if the function failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowWorkFactory:
    """A function with the columns that it emits."""

    function: ArrowKeyedFunction
    output_schema: pa.Schema

    def open(self, subtask: Subtask, info: BatchInfo, output: OutputBuffer) -> ArrowWork:
        """Open a copy of the function on a subtask's state."""
        return ArrowWork(self, subtask, info, output)


class ArrowWork:
    """One function on one subtask in one batch."""

    def __init__(
        self, factory: ArrowWorkFactory, subtask: Subtask, info: BatchInfo, output: OutputBuffer
    ) -> None:
        self._schema, self._subtask, self._info = factory.output_schema, subtask, info
        self._output = output
        self._states = BulkStates(subtask)
        self._function = copy.copy(factory.function)
        self._waiting: list[tuple[pa.RecordBatch, pa.Array]] = []
        self._rows = self._bytes = 0
        self._call("open", RuntimeStates(subtask))

    def add(self, rows: pa.RecordBatch, keys: pa.Array) -> None:
        self._waiting.append((rows, keys))
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        if self._rows >= ROWS_PER_CALL or self._bytes >= BYTES_PER_CALL:
            self._process_waiting()

    def finish(self, watermark: int | None) -> None:
        self._process_waiting()
        empty = pa.array([], self._subtask.keyed.key_type.arrow)
        self._emit(self._call("finish", self._states, self._context(empty)))

    def snapshot(self, checkpoint_id: int, attributes: Mapping[str, Any]) -> SubtaskSnapshot:
        return self._subtask.snapshot(
            checkpoint_id, batch_id=self._info.batch_id or 0, attributes=attributes
        )

    def close(self) -> None:
        self._call("close")

    def _process_waiting(self) -> None:
        if not self._waiting:
            return
        batches, keys = zip(*self._waiting, strict=True)
        self._waiting, self._rows, self._bytes = [], 0, 0
        # One chunk each: functions may use what only arrays have.
        rows = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
        context = self._context(pa.concat_arrays(keys))
        self._emit(self._call("process_batch", rows, self._states, context))

    def _context(self, keys: pa.Array) -> ArrowContext:
        return ArrowContext(
            keys,
            self._info.key_columns,
            self._subtask.subtask_index,
            self._subtask.parallelism,
            self._info.batch_id,
            self._info.batch_ms,
        )

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            found = getattr(self._function, method)(*arguments)
            # A generator runs only when it is asked for its batches.
            is_some = isinstance(found, pa.RecordBatch | pa.Table) or found is None
            return found if is_some else list(found)
        except (StorageError, SnapshotError):
            # A store that fails is not the function's fault.
            raise
        except Exception as error:
            shown = error if isinstance(error, FlowError) else f"{type(error).__name__}: {error}"
            raise FunctionError(
                NAME,
                f"operator {self._info.uid!r}, subtask {self._subtask.subtask_index} of "
                f"{self._subtask.parallelism}: {method} failed: {shown}. Nothing of this batch "
                f"was kept; correct the function and start the query again",
            ) from error

    def _emit(self, emitted: Any) -> None:
        if emitted is None:
            return
        found = [emitted] if isinstance(emitted, pa.RecordBatch | pa.Table) else emitted
        for one in found:
            for batch in one.to_batches() if isinstance(one, pa.Table) else [one]:
                self._output.add(self._fitted(batch))

    def _fitted(self, batch: Any) -> pa.RecordBatch:
        names = self._schema.names
        if not isinstance(batch, pa.RecordBatch) or set(batch.schema.names) != set(names):
            shown = batch.schema.names if isinstance(batch, pa.RecordBatch) else type(batch)
            raise OutputError(
                NAME,
                f"operator {self._info.uid!r}: an output batch has the columns "
                f"{', '.join(names)}, not {shown}",
            )
        try:
            return batch.select(names).cast(self._schema)
        except (pa.ArrowException, ValueError) as error:
            raise OutputError(
                NAME,
                f"operator {self._info.uid!r}: an output batch does not have the declared types: "
                f"{error}",
            ) from error
