"""A source that gives every subtask a control row now and then, so that timers fire without data.

Its offsets are ends of intervals, in milliseconds since 1970 so that they are comparable when the
interval has become another. Each batch that it starts has one row for each subtask.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

__all__ = ["FORMAT", "TickReader", "TickSource", "register"]

FORMAT = "flowtick"

_registered: weakref.WeakSet[SparkSession] = weakref.WeakSet()


def register(spark: SparkSession) -> None:
    """Make the format known to a session."""
    if spark not in _registered:
        spark.dataSource.register(TickSource)
        _registered.add(spark)


class TickSource(DataSource):
    """``format("flowtick")``, for the keyed operator's own use."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return "subtask int"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's)
        return TickReader(
            interval_ms=int(self.options["intervalms"]),
            parallelism=int(self.options["parallelism"]),
        )


@dataclass(frozen=True, slots=True)
class _Subtasks(InputPartition):
    count: int


class TickReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offers one more offset for each interval that has passed."""

    def __init__(self, *, interval_ms: int, parallelism: int) -> None:
        self._interval_ms, self._parallelism = interval_ms, parallelism
        self._last: dict[str, int] | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"tick": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._last = self._now()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        found = self._last or self._now()
        # A clock that was set back must not set the offset back.
        return found if found["tick"] > start["tick"] else start

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [_Subtasks(self._parallelism)] if end["tick"] > start["tick"] else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Subtasks)
        indexes = pa.array(range(partition.count), pa.int32())
        yield pa.RecordBatch.from_arrays([indexes], names=["subtask"])

    def _now(self) -> dict[str, int]:
        # At the end of an interval, so that a timer is never asked for before its time.
        now_ms = time.time_ns() // 1_000_000
        return {"tick": now_ms - now_ms % self._interval_ms}
