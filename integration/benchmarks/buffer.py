"""``flowbuffer`` beside Spark's own parquet sink, and beside a Python sink that does nothing."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from integration.benchmarks._report import aim, heading, machine, progress, table
from integration.benchmarks._spark import costs, unsettle
from integration.sessions import local_session

ROWS = int(os.environ.get("FLOW_BENCH_ROWS", "10000000"))
BATCHES = 10
FILES_PER_BATCH = 2
THRESHOLD = 1_000_000
SMALL_BATCHES = 40
MANY_BATCHES, MANY_ROWS = 200, 500


class NothingSink(DataSource):
    """The floor of a Python sink: it takes the rows and forgets them."""

    @classmethod
    def name(cls) -> str:
        return "nothing"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        return _NothingWriter()


class _NothingWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        unsettle()
        for _ in iterator:
            pass
        return WriterCommitMessage()


class Bench:
    """One folder with the input, and a folder of its own for each query."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder

    def write_input(self) -> None:
        progress(f"writing {ROWS:,} rows")
        columns = ("id", "cast(id % 1000 as int) as k", "id * 0.5D as x", "hex(id * 7919) as name")
        rows = self.spark.range(ROWS).selectExpr(*columns)
        rows.repartition(BATCHES * FILES_PER_BATCH).write.parquet(str(self.folder / "in"))

    def stream(self) -> DataFrame:
        source = str(self.folder / "in")
        schema = self.spark.read.parquet(source).schema
        reader = self.spark.readStream.schema(schema)
        return reader.option("maxFilesPerTrigger", FILES_PER_BATCH).parquet(source)

    def run(
        self,
        sink: str,
        stream: DataFrame | None = None,
        *,
        kept_as: str | None = None,
        **options: object,
    ) -> StreamingQuery:
        """Run a query to its end; what it wrote stays only under a name."""
        folder = self.folder / (kept_as or "query")
        shutil.rmtree(self.folder / "query", ignore_errors=True)
        writer = (
            (self.stream() if stream is None else stream)
            .writeStream.format(sink)
            .option("path", str(folder / "out"))
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
        )
        for name, value in options.items():
            writer = writer.option(name, str(value))
        query = writer.start()
        query.awaitTermination()
        return query


def throughput(bench: Bench) -> None:
    heading(f"{ROWS:,} rows in {BATCHES} batches into parquet files, local[2]")
    found = costs(
        {
            "parquet": lambda: bench.run("parquet"),
            "flowbuffer": lambda: bench.run("flowbuffer", threshold=THRESHOLD),
            "nothing": lambda: bench.run("nothing"),
        }
    )
    base = found["parquet"]
    rows = [
        (
            name,
            f"{ROWS / cost.wall_s:,.0f}",
            f"{base.wall_s / cost.wall_s:.2f}",
            f"{cost.cpu_s:.1f}",
            f"{cost.cpu_s / base.cpu_s:.2f}",
        )
        for name, cost in found.items()
    ]
    table(("sink", "rows/s", "times parquet", "CPU s", "times parquet"), rows)
    floor = base.wall_s / found["nothing"].wall_s
    aim(
        "rows/s, times those of Spark's own parquet sink",
        1.0,
        base.wall_s / found["flowbuffer"].wall_s,
        at_least=True,
        besides=f" (a Python sink that does nothing: {floor:.2f})",
    )


def files(bench: Bench) -> None:
    heading(
        f"What a reader finds after {MANY_BATCHES} batches of {MANY_ROWS} rows, threshold 25,000"
    )
    source = bench.folder / "many"
    source.mkdir()
    for number in range(MANY_BATCHES):
        ids = range(number * MANY_ROWS, (number + 1) * MANY_ROWS)
        lines = [f'{{"id": {i}, "x": {i}.5, "name": "n{i}"}}\n' for i in ids]
        (source / f"{number:04d}.json").write_text("".join(lines))
    reader = bench.spark.readStream.schema("id long, x double, name string")
    stream = reader.option("maxFilesPerTrigger", 1).json(str(source)).repartition(2)
    folders = {sink: bench.folder / f"kept-{sink}" for sink in ("parquet", "flowbuffer")}
    for sink, folder in folders.items():
        bench.run(sink, stream, kept_as=folder.name, threshold=25_000)
    outs = {sink: str(folder / "out") for sink, folder in folders.items()}
    read = costs({sink: _reader(bench.spark, out) for sink, out in outs.items()})
    rows = []
    for sink, folder in folders.items():
        sizes = [
            path.stat().st_size
            for path in (folder / "out").rglob("*.parquet")
            if "_flow" not in path.parts
        ]
        rows.append(
            (
                sink,
                len(sizes),
                f"{statistics.median(sizes) / 1e3:.1f}",
                f"{sum(sizes) / 1e6:.1f}",
                f"{read[sink].wall_s:.2f}",
            )
        )
    table(("sink", "files", "median kB", "MB in all", "seconds to read and sum"), rows)


def _reader(spark: SparkSession, path: str) -> Callable[[], None]:
    def read() -> None:
        spark.read.parquet(path).selectExpr("sum(id)", "sum(x)", "max(name)").collect()

    return read


def small_batches(bench: Bench) -> None:
    heading(f"A micro-batch of 20 rows: median milliseconds of {SMALL_BATCHES}")
    small = bench.folder / "small"
    for number in range(SMALL_BATCHES):
        path = small / f"{number:04d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f'{{"id": {number * 20 + i}}}\n' for i in range(20)))
    reader = bench.spark.readStream.schema("id long").option("maxFilesPerTrigger", 1)
    stream = reader.json(str(small)).repartition(2)
    bench.spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "1000")
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "nothing": ("nothing", {}),
        "flowbuffer, nothing is full": ("flowbuffer", {"threshold": 1_000_000}),
        "flowbuffer, a file in each batch": ("flowbuffer", {"threshold": 10}),
        "parquet": ("parquet", {}),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(4):
        names = list(cases)[turn % 4 :] + list(cases)[: turn % 4]
        for name in names:
            progress(f"small batches, round {turn + 1} of 4: {name}")
            sink, options = cases[name]
            query = bench.run(sink, stream, **options)
            # The first ones start processes and compile.
            times = [p["durationMs"]["triggerExecution"] for p in query.recentProgress[5:]]
            taken[name].append(statistics.median(times))
    floor = statistics.median(taken["nothing"])
    rows = [
        (name, f"{statistics.median(ms):.0f}", f"{statistics.median(ms) - floor:+.0f}")
        for name, ms in taken.items()
    ]
    table(("sink", "ms", "more than nothing"), rows)
    for name in [name for name in taken if name.startswith("flowbuffer")]:
        more = statistics.median(taken[name]) - floor
        what = f"ms more in a micro-batch than with a Python sink that does nothing: {name}"
        aim(what, 80, more, at_least=False)


def main() -> None:
    print(f"flowbuffer: {machine()}")
    start = time.perf_counter()
    spark = local_session("flowbuffer-benchmark", master="local[2]")
    spark.dataSource.register(NothingSink)
    with tempfile.TemporaryDirectory(prefix="flowbuffer-bench-") as folder:
        bench = Bench(spark, Path(folder))
        small_batches(bench)
        bench.write_input()
        throughput(bench)
        files(bench)
    spark.stop()
    print(f"\nin {time.perf_counter() - start:.0f} s")
