"""``flowsocket`` next to Spark's ``socket`` and next to a source that does nothing else."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from integration.benchmarks._lines import block_of
from integration.benchmarks._report import aim, heading, machine, progress, table
from integration.sessions import local_session
from pyspark_flowsocket.options import SocketOptions
from pyspark_flowsocket.reader import SocketStreamReader

COUNTS = {20: 6_000_000, 100: 3_000_000, 1000: 400_000}
ROUNDS = int(os.environ.get("FLOWSOCKET_ROUNDS", "5"))
BACKLOG_BYTES = 1 << 30
HELD_RATE = 50_000
BATCH_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class Run:
    """What one run has taken."""

    seconds: float
    cpu_s: float
    peak_mb: float


class Generator:
    """The process that sends."""

    def __init__(self, count: int, width: int, rate: int = 0) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "integration.benchmarks._lines",
                f"{count}",
                f"{width}",
                f"{rate}",
            ],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def began(self) -> float:
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stdin):
            if pipe is not None:
                pipe.close()


class CeilingSource(DataSource):
    """Pre-built batches of the same lines: what Spark takes from any Python source at most."""

    @classmethod
    def name(cls) -> str:
        return "ceiling"

    def schema(self) -> str:
        return "value string"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return CeilingReader(int(self.options["count"]), int(self.options["width"]))


class CeilingReader(DataSourceStreamReader):
    def __init__(self, count: int, width: int) -> None:
        self.count, self.width = count, width

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"line": 0}

    def latestOffset(self, start: dict[str, int], limit: object) -> dict[str, int]:  # noqa: N802
        return {"line": self.count}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        half = (end["line"] - start["line"]) // 2
        return [InputPartition(half), InputPartition(end["line"] - start["line"] - half)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        lines = [line[:-1].decode() for line in block_of(self.width, BATCH_ROWS * self.width)]
        batch = pa.record_batch({"value": pa.array(lines, pa.string())})
        left = int(partition.value)
        while left > 0:
            yield batch.slice(0, min(left, batch.num_rows))
            left -= batch.num_rows


def rows_done(query: Any) -> int:
    done = query.lastProgress
    if done is None:
        return 0
    text = str(done.sources[0].endOffset or "0")
    return int("".join(character for character in text if character.isdigit()) or 0)


def run_query(stream: DataFrame, count: int, began: Callable[[], float]) -> float:
    """Run until so many lines are through, and return the seconds since the first was sent."""
    with tempfile.TemporaryDirectory() as folder:
        query = stream.writeStream.format("noop").option("checkpointLocation", folder).start()
        start = began()
        try:
            while rows_done(query) < count:
                if query.exception() is not None or time.time() - start > 240:
                    raise RuntimeError(f"{rows_done(query)} of {count} lines: {query.exception()}")
                time.sleep(0.01)
            return time.time() - start
        finally:
            query.stop()


def flowsocket(spark: SparkSession, port: int, folder: str, **options: str) -> DataFrame:
    return (
        spark.readStream.format("flowsocket")
        .option("host", "127.0.0.1")
        .option("port", port)
        .option("stateLocation", folder)
        .options(**{"maxSpoolBytes": "4g", "numPartitions": "2", **options})
        .load()
    )


def flow_run(spark: SparkSession, count: int, width: int) -> float:
    generator = Generator(count, width)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return run_query(flowsocket(spark, generator.port, folder), count, generator.began)
    finally:
        generator.close()


def ceiling_run(spark: SparkSession, count: int, width: int) -> float:
    stream = spark.readStream.format("ceiling").option("count", count).option("width", width).load()
    return run_query(stream, count, time.time)


# CPU and memory of this process and everything below it, but the generator.


def tree() -> list[int]:
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            names[pid] = (entry / "cmdline").read_bytes().decode(errors="replace")
    found = [os.getpid()]
    for pid in found:
        found += [
            child
            for child, parent in parents.items()
            if parent == pid and "benchmarks._lines" not in names.get(child, "")
        ]
    return found


def rss_mb(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * resource.getpagesize() / 1e6


def cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        with suppress(OSError, ValueError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    peaks, stop = [0.0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.1):
            peaks[0] = max(peaks[0], rss_mb(tree()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


def measured(run: Callable[[], float]) -> Run:
    before = cpu_s(tree())
    with peak_memory() as peaks:
        seconds = run()
    return Run(seconds, cpu_s(tree()) - before, peaks[0])


# The figures.


def throughput(spark: SparkSession) -> None:
    heading(f"Lines a second, durable, against the ceiling; medians of {ROUNDS} rounds")
    rows = []
    for width, count in COUNTS.items():
        cases: dict[str, Callable[[], float]] = {
            "flowsocket": lambda c=count, w=width: flow_run(spark, c, w),  # type: ignore[misc]
            "ceiling": lambda c=count, w=width: ceiling_run(spark, c, w),  # type: ignore[misc]
        }
        for run in cases.values():
            run()
        runs: dict[str, list[Run]] = {name: [] for name in cases}
        for turn in range(ROUNDS):
            for name in list(cases)[:: 1 if turn % 2 else -1]:
                runs[name].append(measured(cases[name]))
                progress(f"{name}, {width} bytes: {runs[name][-1]}")
        middle = {name: statistics.median(r.seconds for r in found) for name, found in runs.items()}
        if width == 100:
            share = middle["ceiling"] / middle["flowsocket"]
            aim("lines/s of 100 bytes, times the ceiling's", 0.6, share, at_least=True)
        for name, found in runs.items():
            rows.append(
                (
                    f"{name}, {width} bytes",
                    f"{count / middle[name] / 1e6:.2f}",
                    f"{count * width / middle[name] / 1e6:.0f}",
                    f"{middle['ceiling'] / middle[name]:.0%}",
                    f"{statistics.median(r.cpu_s for r in found):.1f}",
                    f"{max(r.peak_mb for r in found):.0f}",
                )
            )
    columns = ("source", "M lines/s", "MB/s", "of the ceiling", "CPU s", "peak MB, all processes")
    table(columns, rows)


def spark_socket(spark: SparkSession) -> None:
    heading(f"At a rate that Spark's socket source holds: {HELD_RATE} lines of 100 bytes a second")
    count, rows = 10 * HELD_RATE, []
    for name in ("flowsocket", "socket"):
        generator = Generator(count, 100, HELD_RATE)
        try:
            with tempfile.TemporaryDirectory() as folder:
                if name == "socket":
                    stream = (
                        spark.readStream.format("socket")
                        .option("host", "127.0.0.1")
                        .option("port", generator.port)
                        .load()
                    )
                    wanted = count - 1
                else:
                    stream, wanted = flowsocket(spark, generator.port, folder), count
                run = measured(lambda s=stream, w=wanted, g=generator: run_query(s, w, g.began))  # type: ignore[misc]
        finally:
            generator.close()
        rows.append((name, f"{run.seconds:.1f}", f"{run.cpu_s:.1f}", f"{run.peak_mb:.0f}"))
        progress(f"{name}: {run}")
    table(("source", "seconds for 10 seconds' lines", "CPU s", "peak MB, all processes"), rows)


def backlog(spark: SparkSession) -> None:
    heading("Draining a backlog of 1 GB (lines of 100 bytes), all of it sent at once")
    count = BACKLOG_BYTES // 100
    run = measured(lambda: flow_run(spark, count, 100))
    table(
        ("seconds", "CPU s", "peak MB"),
        [(f"{run.seconds:.1f}", f"{run.cpu_s:.1f}", f"{run.peak_mb:.0f}")],
    )


def latency(spark: SparkSession) -> None:
    heading("From send to sink at 10,000 lines a second of 100 bytes: ms, over 20 s")
    found: list[tuple[float, float]] = []

    def note(batch: DataFrame, batch_id: int) -> None:
        times = batch.selectExpr("min(substr(value, 1, 16))", "max(substr(value, 1, 16))").first()
        now_us = time.time_ns() // 1000
        if times is not None and times[0] is not None:
            found.append(((now_us - int(times[0])) / 1000, (now_us - int(times[1])) / 1000))

    generator = Generator(200_000, 100, 10_000)
    try:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as checkpoint:
            stream = flowsocket(spark, generator.port, folder)
            writer = stream.writeStream.foreachBatch(note)
            query = writer.option("checkpointLocation", checkpoint).start()
            generator.began()
            time.sleep(20)
            query.stop()
    finally:
        generator.close()
    settled = found[len(found) // 4 :]
    middles = sorted((oldest + newest) / 2 for oldest, newest in settled)
    oldest = sorted(oldest for oldest, _ in settled)
    figures = (
        len(settled),
        f"{statistics.median(middles):.0f}",
        f"{statistics.median(oldest):.0f}",
        f"{oldest[int(len(oldest) * 0.99)]:.0f}",
    )
    table(
        ("batches", "mean line, median batch", "oldest line, median batch", "oldest, p99"),
        [figures],
    )


def slow_reader() -> None:
    """Let 2 GB pass while batches are slower than the sender, and print what that took as JSON."""
    count, line = 2 * BACKLOG_BYTES // 100, 0
    generator = Generator(count, 100)
    with tempfile.TemporaryDirectory() as folder:
        given = {"host": "127.0.0.1", "port": str(generator.port), "stateLocation": folder}
        limits = {"maxSpoolBytes": "256m", "maxBytesPerTrigger": "16m"}
        reader = SocketStreamReader(SocketOptions.parse(given | limits))
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
            full, start, spool_mb = 0, time.monotonic(), 0.0
            while line < count:
                end = reader.latestOffset({"line": line}, ReadAllAvailable())["line"]
                time.sleep(0.1)
                reader.commit({"line": line})
                told = reader.reportLatestOffset() or {}
                full += bool(told.get("isFull"))
                spool_mb = max(spool_mb, told.get("spoolBytes", 0) / 1e6)
                line = end
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
            seconds = time.monotonic() - start
        finally:
            reader.stop()
            generator.close()
    figures = (seconds, count * 100 / seconds / 1e6, before, after, spool_mb)
    print(json.dumps([*(f"{figure:.0f}" for figure in figures), full]))


def memory(spark: SparkSession) -> None:
    heading("The reader's process while 2 GB pass and batches are slow (maxSpoolBytes=256m)")
    code = "from integration.benchmarks.socket import slow_reader; slow_reader()"
    # In a process of its own, because the most that this one has ever had is Spark's.
    told = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
    columns = (
        "seconds",
        "MB/s",
        "RSS before, MB",
        "peak RSS, MB",
        "peak spool, MB",
        "batches at which it was full",
    )
    table(columns, [json.loads(told.stdout)])


def main() -> None:
    """Print all figures; ``FLOWSOCKET_BENCH`` names some of them."""
    print(f"# flowsocket ({machine()})")
    spark = local_session("flowsocket-benchmark", master="local[2]")
    spark.dataSource.register(CeilingSource)
    parts = {
        "throughput": throughput,
        "socket": spark_socket,
        "backlog": backlog,
        "latency": latency,
        "memory": memory,
    }
    wanted = os.environ.get("FLOWSOCKET_BENCH", ",".join(parts)).split(",")
    try:
        for name in wanted:
            parts[name](spark)
    finally:
        spark.stop()
