"""A streaming query from parquet files into nothing, and what each of its batches cost."""

from __future__ import annotations

import bisect
import datetime as dt
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from integration.benchmarks._spark import CpuMeter

FILES_PER_BATCH = 2
_SAMPLE_S = 0.1

Operator = Callable[[DataFrame, Path], DataFrame]
"""From the input and a folder for state to what is written."""


class CpuClock(threading.Thread):
    """Notes the CPU time of all processes now and then, to be asked for any moment later."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._times: list[float] = []
        self._seconds: list[float] = []
        self._done = threading.Event()
        self._meter = CpuMeter()

    def run(self) -> None:
        while not self._done.is_set():
            self._note()
            self._done.wait(_SAMPLE_S)

    def _note(self) -> None:
        self._times.append(time.time())
        self._seconds.append((self._seconds or [0.0])[-1] + self._meter.lap())

    def at(self, moment: float) -> float:
        """Return the CPU time used until then."""
        right = min(max(bisect.bisect(self._times, moment), 1), len(self._times) - 1)
        (t0, t1), (c0, c1) = (
            self._times[right - 1 : right + 1],
            self._seconds[right - 1 : right + 1],
        )
        share = 0.0 if t1 == t0 else min(1.0, max(0.0, (moment - t0) / (t1 - t0)))
        return c0 + share * (c1 - c0)

    def stop(self) -> None:
        self._done.set()
        self.join()
        self._note()


@dataclass(frozen=True, slots=True)
class Batches:
    """What one run of a query took."""

    wall_s: float
    """From the start to the end of the last batch."""
    batch_s: tuple[float, ...]
    """Of each batch."""
    cpu_s: float
    """Of a batch, in the mean over those that were not left out at the beginning."""


class Query:
    """One operator in a query, which can be run again and again on its own checkpoint."""

    def __init__(
        self, spark: SparkSession, source: Path, folder: Path, operator: Operator, *, provider: str
    ) -> None:
        self.spark, self.source, self.folder = spark, source, folder
        self._operator, self._provider = operator, provider

    def run(self, *, leave_out: int = 0) -> Batches:
        """Process all that is in the source; the first batches do not count."""
        spark = self.spark
        spark.conf.set("spark.sql.streaming.stateStore.providerClass", self._provider)
        reader = spark.readStream.schema("k long").option("maxFilesPerTrigger", FILES_PER_BATCH)
        clock = CpuClock()
        clock.start()
        start = time.perf_counter()
        query = (
            self._operator(reader.parquet(str(self.source)), self.folder)
            .writeStream.format("noop")
            .outputMode("update")
            .option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        wall_s = time.perf_counter() - start
        clock.stop()
        progress = [one for one in query.recentProgress if one["numInputRows"]]
        taken = [one["durationMs"]["triggerExecution"] / 1e3 for one in progress]
        starts = [dt.datetime.fromisoformat(one["timestamp"]).timestamp() for one in progress]
        first, last = starts[min(leave_out, len(starts) - 1)], starts[-1] + taken[-1]
        counted = taken[leave_out:] or taken[-1:]
        cpu_s = (clock.at(last) - clock.at(first)) / len(counted)
        return Batches(wall_s, tuple(counted), cpu_s)

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Medians of a mode, over all of its runs."""

    batch_s: float
    cpu_s: float

    @classmethod
    def of(cls, runs: list[Batches]) -> BatchCost:
        return cls(
            statistics.median(seconds for run in runs for seconds in run.batch_s),
            statistics.median(run.cpu_s for run in runs),
        )


def bytes_below(folder: Path) -> int:
    """Return what all files below a folder take."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return found
