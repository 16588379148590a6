"""A Python source that does nothing but hand out one Arrow batch again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from flowspark.workers import settle

TASKS = 4
ROWS_A_BATCH = 20_000


class PrebuiltSource(DataSource):
    """Rows like those of the Kafka benchmark, without Kafka."""

    @classmethod
    def name(cls) -> str:
        return "prebuilt"

    def schema(self) -> str:
        return (
            "key binary, value binary, topic string, partition int, offset bigint, "
            "timestamp timestamp, timestampType int"
        )

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        rows = int(self.options["rows"])
        return PrebuiltReader(rows, int(self.options.get("rowsPerBatch", rows)))


class PrebuiltReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches of so many rows, until all are read."""

    def __init__(self, rows: int, rows_per_batch: int) -> None:
        self._rows = rows
        self._rows_per_batch = rows_per_batch

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        pass

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"rows": 0}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        return {"rows": min(start["rows"] + self._rows_per_batch, self._rows)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [InputPartition((end["rows"] - start["rows"]) // TASKS)] * TASKS

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        left: int = partition.value
        batch = _batch()
        while left > 0:
            yield batch[: min(left, len(batch))]
            left -= len(batch)
        # Built by means of pandas, which Spark's garbage collections are to pass over here as well.
        settle()

    def commit(self, end: dict[str, Any]) -> None:
        pass


@cache
def _batch() -> pa.RecordBatch:
    count = ROWS_A_BATCH
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"12345678"] * count),
            "value": pa.array([b"v" * 104] * count),
            "topic": pa.array(["bench-none"] * count),
            "partition": pa.array([0] * count, pa.int32()),
            "offset": pa.array(range(count), pa.int64()),
            "timestamp": pa.array([0] * count, pa.timestamp("us", tz="UTC")),
            "timestampType": pa.array([0] * count, pa.int32()),
        }
    )
