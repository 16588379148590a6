"""Watermarks: from the timestamps in the rows to the event time of each subtask.

In front of the shuffle, each partition finds the highest timestamp of each input among its rows
and sends it to every subtask. A subtask keeps them in its checkpoints, so all of them know the
same, also after a restart at another parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flowspark.keyed.durations import duration_ms
from flowspark.keyed.routing import CONTROL, ROUTE, Route, control_text, in_plain_types, route_value
from flowstate.rows import NO_TIMESTAMP

__all__ = ["HighestTimestamps", "WatermarkStrategy", "WatermarkTracker", "bounded_out_of_orderness"]

_MICROS_PER_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkStrategy:
    """How event time follows from the rows; made by ``bounded_out_of_orderness``."""

    column: str
    delay_ms: int
    by: tuple[str, ...] = ()
    idle_ms: int | None = None


def bounded_out_of_orderness(
    column: str, delay: Any, *, by: Sequence[str] = (), idle: Any = None
) -> WatermarkStrategy:
    """Take rows to come at most ``delay`` after later ones of the same input.

    The watermark is the highest timestamp of the slowest input, less the delay and one
    millisecond, as in Flink. The columns in ``by`` tell the inputs apart, as in
    ``by=["topic", "partition"]``; without them all rows are of one input. An input of which
    nothing has come for the time ``idle`` does not hold the others back; without ``idle`` each
    does so for ever.
    """
    return WatermarkStrategy(
        column=column,
        delay_ms=duration_ms("delay", delay, minimum_ms=0),
        by=(by,) if isinstance(by, str) else tuple(by),
        idle_ms=None if idle is None else duration_ms("idle", idle, minimum_ms=1),
    )


def timestamps_ms(column: pa.Array) -> pa.Array:
    """Return a column of timestamps as milliseconds; rounded down, also before 1970."""
    micros = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    millis = pc.divide(micros, _MICROS_PER_MS)
    # Arrow's division rounds towards zero.
    below = pc.and_(pc.less(micros, 0), pc.not_equal(pc.multiply(millis, _MICROS_PER_MS), micros))
    return pc.if_else(below, pc.subtract(millis, 1), millis)


class HighestTimestamps:
    """Hands rows through, and sends what it has seen to every subtask, in front of the shuffle."""

    def __init__(self, strategy: WatermarkStrategy, parallelism: int) -> None:
        self._strategy, self._parallelism = strategy, parallelism

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run as a function of ``mapInArrow``."""
        highest: dict[str, int] = {}
        schema: pa.Schema | None = None
        batch_ms = 0
        for batch in batches:
            if batch.num_rows:
                schema = batch.schema
                batch_ms = Route.of(batch.column(ROUTE)[0].as_py()).batch_ms
                self._observe(batch, highest)
            yield batch
        if schema is not None and highest:
            yield self._controls(schema, highest, batch_ms)

    def _observe(self, batch: pa.RecordBatch, highest: dict[str, int]) -> None:
        stamps = timestamps_ms(batch.column(self._strategy.column))
        if not self._strategy.by:
            found = {"": pc.max(stamps).as_py()}
        else:
            by = in_plain_types(batch.select(list(self._strategy.by)))
            # Whatever they are called, the columns here are not called the same.
            numbers = [str(number) for number in range(by.num_columns)]
            table = pa.table([*by.columns, stamps], names=[*numbers, "stamp"])
            rows = table.group_by(numbers, use_threads=False).aggregate([("stamp", "max")])
            names = zip(*(rows[number].to_pylist() for number in numbers), strict=True)
            found = {
                json.dumps(name, default=str): stamp
                for name, stamp in zip(names, rows["stamp_max"].to_pylist(), strict=True)
            }
        for name, stamp in found.items():
            if stamp is not None:
                highest[name] = max(stamp, highest.get(name, stamp))

    def _controls(
        self, schema: pa.Schema, highest: Mapping[str, int], batch_ms: int
    ) -> pa.RecordBatch:
        rows = self._parallelism
        routes = [route_value(index, batch_ms) for index in range(rows)]
        text = control_text({"highest": dict(highest)})
        columns = {ROUTE: pa.array(routes, pa.int64()), CONTROL: pa.array([text] * rows)}
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(rows, field.type)
            for field in schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


class WatermarkTracker:
    """What a subtask knows of event time, from checkpoint to checkpoint."""

    def __init__(self, strategy: WatermarkStrategy, restored: Iterable[Mapping[str, Any]]) -> None:
        """Take up what subtasks knew: of each input the most that any of them knew."""
        self._strategy = strategy
        self.watermark = NO_TIMESTAMP
        self._highest: dict[str, int] = {}
        self._active_ms: dict[str, int] = {}
        for attributes in restored:
            self.watermark = max(self.watermark, attributes.get("watermark", NO_TIMESTAMP))
            for name, (stamp, active_ms) in attributes.get("inputs", {}).items():
                self._note(name, stamp, active_ms)

    def observe(self, highest: Mapping[str, int], now_ms: int) -> None:
        """Take note of the highest timestamps that came in a batch."""
        for name, stamp in highest.items():
            self._note(name, stamp, now_ms)

    def advance(self, now_ms: int) -> int:
        """Return the watermark as it is now; it never goes back."""
        idle_ms = self._strategy.idle_ms
        active = [
            stamp
            for name, stamp in self._highest.items()
            if idle_ms is None or now_ms - self._active_ms[name] < idle_ms
        ]
        if active:
            self.watermark = max(self.watermark, min(active) - self._strategy.delay_ms - 1)
        return self.watermark

    def attributes(self) -> dict[str, Any]:
        """Return what goes into the checkpoint."""
        inputs = {name: [self._highest[name], self._active_ms[name]] for name in self._highest}
        return {"watermark": self.watermark, "inputs": inputs}

    def _note(self, name: str, stamp: int, active_ms: int) -> None:
        self._highest[name] = max(stamp, self._highest.get(name, stamp))
        self._active_ms[name] = max(active_ms, self._active_ms.get(name, active_ms))
