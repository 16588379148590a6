"""Queries as the tests write them: options, rows, and a stream that keeps what it reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from integration.kafka.cluster import Cluster

WAIT_SECONDS = 60.0


def options(cluster: Cluster, **more: str) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": cluster.address,
        "kafka.default.api.timeout.ms": "20000",
        "fetchOffset.retryIntervalMs": "100",
        **more,
    }


def batch(spark: SparkSession, cluster: Cluster, **more: str) -> DataFrame:
    return spark.read.format("flowkafka").options(**options(cluster, **more)).load()


def rows(frame: DataFrame) -> list[tuple[int, int, bytes | None]]:
    found = frame.select("partition", "offset", "value").orderBy("partition", "offset").collect()
    return [(row[0], row[1], None if row[2] is None else bytes(row[2])) for row in found]


class Stream:
    """A query that keeps what it reads, by batch."""

    def __init__(self, spark: SparkSession, cluster: Cluster, folder: Path, **more: str) -> None:
        self._frame = (
            spark.readStream.format("flowkafka").options(**options(cluster, **more)).load()
        )
        self._folder = folder
        self.batches: dict[int, list[tuple[int, int, bytes | None]]] = {}
        self.query: StreamingQuery | None = None

    def start(self, **trigger: Any) -> StreamingQuery:
        writer = self._frame.writeStream.foreachBatch(self._keep)
        writer = writer.option("checkpointLocation", str(self._folder / "checkpoint"))
        self.query = writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start()
        return self.query

    def run(self) -> Stream:
        """Read what is there now."""
        query = self.start(availableNow=True)
        assert query.awaitTermination(int(WAIT_SECONDS))
        return self

    def _keep(self, frame: DataFrame, number: int) -> None:
        self.batches[number] = rows(frame)

    @property
    def values(self) -> list[bytes | None]:
        return [value for number in sorted(self.batches) for _, _, value in self.batches[number]]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert self.query is not None
            if self.query.exception() is not None:
                raise AssertionError(str(self.query.exception()))
            assert time.monotonic() < deadline, self.batches
            time.sleep(0.05)

    def stop(self) -> None:
        if self.query is not None:
            self.query.stop()


def failure(action: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action()
    return str(caught.value)


def texts(first: int, last: int) -> list[bytes | None]:
    return [b"%d" % number for number in range(first, last + 1)]
