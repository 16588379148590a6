"""The keyed operator beside what Spark has for state, and beside Python without any state.

``FLOWKEYED_BENCH=large,small,size,restart`` chooses parts, ``FLOWKEYED_ROUNDS`` the rounds,
``FLOWKEYED_MODES`` the modes of the first three by the beginnings of their names, and
``FLOWKEYED_KEYS`` the size of the large state. Run it in a session of its own (``setsid``): the CPU
seconds are those of all processes of the session.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from flowspark import ArrowContext, ArrowKeyedFunction, BulkStates, key_by
from flowstate import KeyedProcessFunction, ValueStateDescriptor
from flowstate.functions import Context, RuntimeContext
from integration.benchmarks._queries import (
    FILES_PER_BATCH,
    BatchCost,
    Batches,
    Operator,
    Query,
    bytes_below,
)
from integration.benchmarks._report import aim, heading, machine, progress, table
from integration.benchmarks._spark import unsettle
from integration.sessions import local_session

PARTS = os.environ.get("FLOWKEYED_BENCH", "large,small,size,restart").split(",")
ROUNDS = int(os.environ.get("FLOWKEYED_ROUNDS", "5"))
MODES = tuple(os.environ.get("FLOWKEYED_MODES", "").split(","))
BATCHES = int(os.environ.get("FLOWKEYED_BATCHES", "12"))
MANY_KEYS = int(os.environ.get("FLOWKEYED_KEYS", "5000000"))
FEW_KEYS = 100_000
SMALL_ROWS = 10_000
LEFT_OUT = 2
SIZE_ROUNDS = 5
RESTARTS = 3
PARALLELISM = 2
# At 1,000,000 records one of its batches takes minutes.
TWS_BATCHES_AT_LARGE = 2

_PROVIDERS = "org.apache.spark.sql.execution.streaming.state."
HDFS = _PROVIDERS + "HDFSBackedStateStoreProvider"
ROCKSDB = _PROVIDERS + "RocksDBStateStoreProvider"

PASS = "pass-through, repartition"
PASS_BY_ID = "pass-through, repartitionById"
PER_RECORD = "KeyedProcessFunction, per record"
ARROW = "ArrowKeyedFunction"
AGGREGATE = "aggregate(count)"
GROUP_HDFS = "groupBy().count(), HDFS-backed"
GROUP_ROCKSDB = "groupBy().count(), RocksDB"
TWS = "transformWithState, per record"


class CountPerRecord(KeyedProcessFunction[int, Any, Any]):
    def open(self, ctx: RuntimeContext) -> None:
        self._count = ctx.get_state(ValueStateDescriptor("n", int))

    def process_element(self, value: Any, ctx: Context[int]) -> Iterator[tuple[int, int]]:
        count = (self._count.value() or 0) + 1
        self._count.update(count)
        yield value.k, count


class CountByArrow(ArrowKeyedFunction):
    def open(self, ctx: RuntimeContext) -> None:
        ctx.get_state(ValueStateDescriptor("n", int))

    def process_batch(
        self, batch: pa.RecordBatch, state: BulkStates, ctx: ArrowContext
    ) -> pa.RecordBatch:
        counted = pc.value_counts(ctx.keys)
        keys = counted.field("values")
        counts = pc.add(pc.fill_null(state["n"].get(keys), 0), counted.field("counts"))
        state["n"].update(keys, counts)
        return pa.RecordBatch.from_arrays([keys, counts], names=["k", "n"])


class CountWithState(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("n", "n long")

    def handleInputRows(  # noqa: N802
        self,
        key: Any,
        rows: Iterator[Row],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[Row]:
        for _ in rows:
            known = self._count.get()
            count = (known[0] if known is not None else 0) + 1
            self._count.update((count,))
            yield Row(k=key[0], n=count)

    def close(self) -> None:
        pass


def same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    unsettle()
    yield from batches


def state_of(folder: Path, parallelism: int = PARALLELISM) -> dict[str, Any]:
    return {
        "uid": "bench",
        "state_location": str(folder / "state"),
        "working_folder": str(folder / "work"),
        "parallelism": parallelism,
    }


def aggregate(parallelism: int = PARALLELISM, **settings: Any) -> Operator:
    def operator(df: DataFrame, folder: Path) -> DataFrame:
        arguments = {**state_of(folder, parallelism), **settings}
        return key_by(df, "k").aggregate({"n": "count"}, emit="key", **arguments)

    return operator


def process(function: Any, **settings: Any) -> Operator:
    return lambda df, folder: key_by(df, "k").process(
        function, "k long, n long", **{**state_of(folder), **settings}
    )


def count_by_spark(df: DataFrame, folder: Path) -> DataFrame:
    return df.groupBy("k").count()


def count_with_state(df: DataFrame, folder: Path) -> DataFrame:
    return df.groupBy("k").transformWithState(
        CountWithState(), "k long, n long", outputMode="Update", timeMode="None"
    )


MODES_OF_COUNTING: dict[str, tuple[Operator, str]] = {
    PASS: (lambda df, _: df.repartition(PARALLELISM, "k").mapInArrow(same, "k long"), HDFS),
    PASS_BY_ID: (
        lambda df, _: df.repartitionById(
            PARALLELISM, F.pmod(F.xxhash64("k"), F.lit(PARALLELISM)).cast("int")
        ).mapInArrow(same, "k long"),
        HDFS,
    ),
    PER_RECORD: (process(CountPerRecord()), HDFS),
    ARROW: (process(CountByArrow()), HDFS),
    AGGREGATE: (aggregate(), HDFS),
    GROUP_HDFS: (count_by_spark, HDFS),
    GROUP_ROCKSDB: (count_by_spark, ROCKSDB),
    TWS: (count_with_state, ROCKSDB),
}


class Bench:
    """A session, and a folder for everything."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self._numbers = iter(range(1_000_000))

    def write(
        self, name: str, *, rows: int, keys: int, batches: int, distinct: bool = False
    ) -> Path:
        """Write batches of records with keys at random, or with each key once."""
        source = self.folder / name
        if not source.exists():
            progress(f"writing {name}: {batches} x {rows:,} records, {keys:,} keys")
            files = batches * FILES_PER_BATCH
            ids = self.spark.range(0, rows * batches, 1, files)
            key = F.col("id") if distinct else F.pmod(F.xxhash64("id"), F.lit(keys))
            # Spread over all of long, so that a key takes as much in a small state as in a large.
            ids.select(F.xxhash64(key.cast("int")).alias("k")).write.parquet(str(source))
        return source

    def query(self, mode: str, source: Path) -> Query:
        operator, provider = MODES_OF_COUNTING[mode]
        return Query(self.spark, source, self.new_folder(), operator, provider=provider)

    def new_folder(self) -> Path:
        """Return where a query may have its state and its checkpoint."""
        return self.folder / f"query-{next(self._numbers)}"

    def compare(
        self,
        found: dict[str, BatchCost],
        mode: str,
        other: str,
        how: str,
        bound: float,
        *,
        where: str,
    ) -> None:
        """Note how many times the speed or the time of another mode one has."""
        if mode not in found or other not in found:
            return
        is_speed = how == "speed of"
        one, two = (found[other], found[mode]) if is_speed else (found[mode], found[other])
        wall, cpu = one.batch_s / two.batch_s, one.cpu_s / two.cpu_s
        what = f"{where}: {mode}, times the {how} {other}"
        aim(what, bound, wall, at_least=is_speed, besides=f" (CPU time: {cpu:.2f})")


def throughput(bench: Bench, part: str, *, rows: int, keys: int) -> dict[str, BatchCost]:
    heading(f"{rows:,} records a batch, {keys:,} keys: medians of a batch")
    source = bench.write(part, rows=rows, keys=keys, batches=BATCHES)
    few = bench.write(f"{part}-few", rows=rows, keys=keys, batches=TWS_BATCHES_AT_LARGE)
    warm = bench.write("warm", rows=min(rows, 100_000), keys=10_000, batches=3)
    names = [name for name in MODES_OF_COUNTING if name.startswith(MODES)]
    runs: dict[str, list[Batches]] = {name: [] for name in names}
    for name in names:
        progress(f"warming {name}")
        _run_once(bench, name, warm)
    for turn in range(ROUNDS):
        shift = turn * 3 % len(names)
        for name in names[shift:] + names[:shift]:
            progress(f"round {turn + 1} of {ROUNDS}: {name}")
            slow = name == TWS and rows >= 1_000_000
            if slow and turn:
                continue
            runs[name].append(_run_once(bench, name, few if slow else source, slow=slow))
            taken = runs[name][-1]
            batches = " ".join(f"{seconds:.2f}" for seconds in taken.batch_s)
            progress(f"    {batches} s, {taken.cpu_s:.2f} s of CPU a batch")
    found = {name: BatchCost.of(taken) for name, taken in runs.items()}
    _show(found, rows)
    return found


def _run_once(bench: Bench, mode: str, source: Path, *, slow: bool = False) -> Batches:
    query = bench.query(mode, source)
    try:
        return query.run(leave_out=1 if slow else LEFT_OUT)
    finally:
        query.forget()


def _show(found: dict[str, BatchCost], rows: int) -> None:
    floor = found.get(PASS) or next(iter(found.values()))
    table(
        ("", "ms a batch", "records/s", "times pass-through", "CPU s a batch", "times"),
        [
            (
                name,
                f"{cost.batch_s * 1e3:,.0f}",
                f"{rows / cost.batch_s:,.0f}",
                f"{cost.batch_s / floor.batch_s:.2f}",
                f"{cost.cpu_s:.2f}",
                f"{cost.cpu_s / floor.cpu_s:.2f}",
            )
            for name, cost in found.items()
        ],
    )


def large(bench: Bench) -> None:
    found = throughput(bench, "large", rows=1_000_000, keys=500_000)
    bounds = (
        (PER_RECORD, TWS, "speed of", 10),
        (PER_RECORD, GROUP_ROCKSDB, "speed of", 2),
        (PER_RECORD, GROUP_HDFS, "speed of", 1),
        (PER_RECORD, PASS, "time of", 2.5),
        (ARROW, PASS, "time of", 1.6),
        (ARROW, GROUP_ROCKSDB, "speed of", 3),
        (AGGREGATE, PASS, "time of", 1.6),
        (AGGREGATE, GROUP_ROCKSDB, "speed of", 3),
    )
    for mode, other, how, bound in bounds:
        bench.compare(found, mode, other, how, bound, where="1M records")


def small(bench: Bench) -> None:
    found = throughput(bench, "small", rows=100_000, keys=10_000)
    bench.compare(found, PER_RECORD, TWS, "speed of", 10, where="100k records")


# Small batches on a state that one large batch has built.


class Grown:
    """A query whose first batch has brought a number of keys; small batches follow."""

    def __init__(self, bench: Bench, operator: Operator, provider: str, keys: int) -> None:
        self._bench, self._provider, self._keys = bench, provider, keys
        self._rounds = 0
        bulk = bench.write(f"bulk-{keys}", rows=keys, keys=keys, batches=1, distinct=True)
        self.folder = bench.new_folder()
        self._source = self.folder / "source"
        shutil.copytree(bulk, self._source)
        self.run(operator, batches=1)

    def run(self, operator: Operator, *, batches: int, leave_out: int = 0) -> Batches:
        """Start the query, again if need be, for so many more small batches."""
        later = self._bench.write(
            f"later-{self._keys}-{batches}", rows=SMALL_ROWS, keys=self._keys, batches=batches
        )
        for path in sorted(later.glob("*.parquet")):
            shutil.copyfile(path, self._source / f"later-{self._rounds:03d}-{path.name}")
        self._rounds += 1
        spark, provider = self._bench.spark, self._provider
        # A large state that stays loaded would leave no room for that of the next case.
        _unload_stores(spark)
        query = Query(spark, self._source, self.folder, operator, provider=provider)
        return query.run(leave_out=leave_out)

    def bytes_durable(self) -> int:
        return bytes_below(self.folder / "state") + bytes_below(self.folder / "checkpoint")

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def size(bench: Bench) -> None:
    heading(f"{SMALL_ROWS:,} records a batch against the number of keys")
    # Nothing is removed, so that what was written can be counted.
    keeping = {"checkpoints_retained": 1000}
    modes: dict[str, tuple[Operator, str]] = {
        PER_RECORD: (process(CountPerRecord(), **keeping), HDFS),
        AGGREGATE: (aggregate(**keeping), HDFS),
        GROUP_HDFS: (count_by_spark, HDFS),
        GROUP_ROCKSDB: (count_by_spark, ROCKSDB),
    }
    rows = []
    for mode in [mode for mode in modes if mode.startswith(MODES)]:
        operator, provider = modes[mode]
        costs = _by_keys(bench, mode, operator, provider)
        base = costs[FEW_KEYS][0]
        for keys, (cost, written) in costs.items():
            ratio = cost.cpu_s / base.cpu_s
            rows.append(
                (
                    f"{mode}: {keys:,} keys",
                    f"{cost.batch_s * 1e3:,.0f}",
                    f"{cost.cpu_s:.3f}",
                    f"{ratio:.2f}",
                    f"{written / 1e6:.2f}",
                )
            )
            if keys == MANY_KEYS and mode in {PER_RECORD, AGGREGATE}:
                what = f"10k batch, {mode}: cost at {MANY_KEYS:,} keys, times that at {FEW_KEYS:,}"
                besides = f" in CPU time (wall time: {cost.batch_s / base.batch_s:.2f})"
                aim(what, 1.2, ratio, at_least=False, besides=besides)
    table(("", "ms a batch", "CPU s a batch", "times", "MB written a batch"), rows)


def _by_keys(
    bench: Bench, mode: str, operator: Operator, provider: str
) -> dict[int, tuple[BatchCost, float]]:
    """Return what a small batch costs and writes at each number of keys, which take turns."""
    # So many in a run that a tier of deltas is merged twice.
    batches = 20
    progress(f"{mode}: building the states, and a run of each to warm up")
    grown = {keys: Grown(bench, operator, provider, keys) for keys in (FEW_KEYS, MANY_KEYS)}
    for one in grown.values():
        one.run(operator, batches=batches)
    before = {keys: one.bytes_durable() for keys, one in grown.items()}
    runs: dict[int, list[Batches]] = {keys: [] for keys in grown}
    for turn in range(SIZE_ROUNDS):
        for keys in sorted(grown, reverse=bool(turn % 2)):
            runs[keys].append(grown[keys].run(operator, batches=batches, leave_out=3))
        progress(f"round {turn + 1} of {SIZE_ROUNDS}")
    found = {}
    for keys, one in grown.items():
        written = (one.bytes_durable() - before[keys]) / (batches * SIZE_ROUNDS)
        found[keys] = BatchCost.of(runs[keys]), written
        one.forget()
    return found


# The time to the first batch after a restart.


def restart(bench: Bench) -> None:
    heading(
        f"{MANY_KEYS:,} keys: seconds from the start of the query to the end of its first batch"
    )
    cases: dict[str, tuple[Operator, Operator, str, bool, int]] = {
        "flowspark, 2 -> 2, local copy there": (aggregate(), aggregate(), HDFS, True, 0),
        "flowspark, 2 -> 2": (aggregate(), aggregate(), HDFS, False, 0),
        "flowspark, 2 -> 3": (aggregate(), aggregate(3), HDFS, False, 0),
        "flowspark, 2 -> 4": (aggregate(), aggregate(4), HDFS, False, 0),
        "Spark, RocksDB, 2 -> 2": (count_by_spark, count_by_spark, ROCKSDB, False, 0),
        "Spark, RocksDB, repartition 2 -> 4": (count_by_spark, count_by_spark, ROCKSDB, False, 4),
    }
    rows = []
    for name, (before, after, provider, keeps, partitions) in cases.items():
        progress(name)
        grown = Grown(bench, before, provider, MANY_KEYS)
        offline, taken = [], []
        try:
            for _ in range(RESTARTS):
                # One more small batch, so that a local copy has what the large one brought.
                grown.run(before, batches=1)
                if not keeps:
                    shutil.rmtree(grown.folder / "work", ignore_errors=True)
                if partitions:
                    offline.append(_repartition(bench.spark, grown.folder, partitions))
                taken.append(grown.run(after, batches=1).wall_s)
                if partitions:
                    _repartition(bench.spark, grown.folder, PARALLELISM)
            found = f"{statistics.median(taken):.2f}"
        except Exception as error:
            found = f"failed: {type(error).__name__}"
            progress(str(error)[:600])
        rows.append((name, f"{statistics.median(offline):.2f}" if offline else "", found))
        grown.forget()
    table(("", "offline step s", "first batch s"), rows)


def _unload_stores(spark: SparkSession) -> None:
    """Let the JVM forget what it has loaded of its own state stores, as a new one would."""
    jvm: Any = spark._jvm
    jvm.org.apache.spark.sql.execution.streaming.state.StateStore.stop()


def _repartition(spark: SparkSession, folder: Path, partitions: int) -> float:
    """Use what pyspark has behind an underscore; return how long it took."""
    start = time.perf_counter()
    spark._streamingCheckpointManager.repartition(str(folder / "checkpoint"), partitions)
    return time.perf_counter() - start


def main() -> None:
    print(f"flowspark's keyed operator: {machine()}")
    start = time.perf_counter()
    settings = {"spark.driver.memory": "4g", "spark.ui.showConsoleProgress": "false"}
    spark = local_session("keyed-benchmark", master="local[2]", settings=settings)
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "1000")
    parts = {"large": large, "small": small, "size": size, "restart": restart}
    with tempfile.TemporaryDirectory(prefix="flowkeyed-bench-") as folder:
        bench = Bench(spark, Path(folder))
        for part in PARTS:
            parts[part](bench)
    spark.stop()
    print(f"\nin {time.perf_counter() - start:.0f} s")
