"""``flowkafka`` next to Spark's JVM connector: same broker, same topics, same session.

The peer is Spark's connector 4.2.0, the newest that can be fetched, on whatever Spark is installed,
with the token provider 4.1.0-preview1 and kafka-clients 3.9.2; it also writes the topics. "Tuned"
is that connector with larger fetches. Everything runs in ``local[2]``, into the noop sink, in
rotated order, with the two session settings that shorten micro-batches for every side.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from integration.benchmarks._prebuilt import PrebuiltSource
from integration.benchmarks._report import aim, heading, machine, progress, table
from integration.benchmarks._spark import CpuMeter
from integration.kafka.broker import Broker, single_broker
from integration.kafka.cluster import Cluster
from integration.kafka.distribution import fetched
from integration.sessions import local_session

RECORDS = 2_000_000
PARTITIONS = 4
MICRO_BATCH = 80_000
ROUNDS = int(os.environ.get("FLOWKAFKA_ROUNDS", "5"))
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

_PEER = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.1.0-preview1"),
    ("org.apache.kafka", "kafka-clients", "3.9.2"),
    ("org.apache.commons", "commons-pool2", "2.12.0"),
)
_TUNED = {
    "kafka.max.partition.fetch.bytes": "4194304",
    "kafka.max.poll.records": "10000",
    "kafka.receive.buffer.bytes": "1048576",
}
_STEPS = ("latestOffset", "queryPlanning", "walCommit", "addBatch", "commitOffsets")
# Batches that were built before, through a Python source: what Spark itself takes for one.
CEILING = "pre-built"
SIDES: dict[str, tuple[str, dict[str, str]]] = {
    "JVM default": ("kafka", {}),
    "JVM tuned": ("kafka", _TUNED),
    "flowkafka": ("flowkafka", {}),
}


@dataclass(frozen=True)
class Run:
    """One query over a whole topic."""

    wall_seconds: float
    trigger_seconds: float
    cpu_seconds: float
    batch_ms: float
    records: int
    steps_ms: dict[str, float]
    """The steps of the median batch, as Spark measures them."""

    @property
    def records_per_second(self) -> float:
        return self.records / self.trigger_seconds


def main() -> None:
    codecs = tuple(os.environ.get("FLOWKAFKA_CODECS", ",".join(CODECS)).split(","))
    with tempfile.TemporaryDirectory(prefix="flowkafka-bench") as folder:
        broker = single_broker(Path(folder) / "broker")
        broker.start()
        spark = _session()
        try:
            _report(spark, broker, Path(folder), codecs)
        finally:
            spark.stop()
            broker.kill()


def _report(spark: SparkSession, broker: Broker, folder: Path, codecs: tuple[str, ...]) -> None:
    print(f"\n# Kafka\n\n{machine()}, Spark {spark.version}, {RECORDS:,} records of 104 bytes")
    cluster = Cluster(broker.address)
    topics = {codec: _filled(spark, cluster, codec) for codec in codecs}
    checkpoints = _checkpoints(folder)
    heading(f"One batch of {RECORDS:,} records: medians of {ROUNDS} rounds")
    rows = []
    for codec, topic in topics.items():
        cases = {name: _case(spark, cluster, topic, name, checkpoints) for name in SIDES}
        if codec == codecs[0]:
            cases[CEILING] = lambda: _prebuilt(spark, next(checkpoints))
        found = _rotated(cases)
        peer = found["JVM tuned"]
        rows += [(codec, name, *_figures(run, peer)) for name, run in found.items()]
        _note_aims(codec, found["flowkafka"], peer, found.get(CEILING))
    columns = ("codec", "side", "records/s", "of tuned", "query s", "of tuned", "CPU s", "of tuned")
    table(columns, rows)
    topic = topics[codecs[0]]
    heading(f"{RECORDS // MICRO_BATCH} micro-batches of {MICRO_BATCH:,} records")
    limit = {"maxOffsetsPerTrigger": str(MICRO_BATCH)}
    cases = {name: _case(spark, cluster, topic, name, checkpoints, **limit) for name in SIDES}
    cases[CEILING] = lambda: _prebuilt(spark, next(checkpoints), rowsPerBatch=MICRO_BATCH)
    found = _rotated(cases)
    default = found["JVM default"]
    speed = default.batch_ms / found["flowkafka"].batch_ms
    aim("speed of a micro-batch, times the default connector's", 1.0, speed, at_least=True)
    table(
        ("side", "batch ms", "speed, of JVM default", "query s", "CPU s", *_STEPS),
        [
            (
                name,
                f"{run.batch_ms:.0f}",
                f"{default.batch_ms / run.batch_ms:.2f}",
                f"{run.wall_seconds:.2f}",
                f"{run.cpu_seconds:.1f}",
                *(f"{run.steps_ms[step]:.0f}" for step in _STEPS),
            )
            for name, run in found.items()
        ],
    )
    heading(f"One batch of all topics: {RECORDS * len(topics):,} records")
    cases = {
        name: _case(spark, cluster, ",".join(topics.values()), name, checkpoints) for name in SIDES
    }
    found = _rotated(cases)
    table(columns[1:], [(name, *_figures(run, found["JVM tuned"])) for name, run in found.items()])


def _note_aims(codec: str, run: Run, peer: Run, ceiling: Run | None) -> None:
    speed, whole = run.records_per_second / peer.records_per_second, peer.wall_seconds
    cpu, besides = run.cpu_seconds / peer.cpu_seconds, ""
    if ceiling is not None:
        floor = ceiling.cpu_seconds / peer.cpu_seconds
        besides = f" (a Python source of pre-built batches: {floor:.2f})"
    where = f"of the tuned connector, codec {codec}"
    aim(f"records/s, times those {where}", 1.4, speed, at_least=True)
    aim(
        f"speed of the whole query, times that {where}",
        0.9,
        whole / run.wall_seconds,
        at_least=True,
    )
    aim(f"CPU seconds, times those {where}", 1.5, cpu, at_least=False, besides=besides)


def _figures(run: Run, peer: Run) -> tuple[str, ...]:
    return (
        f"{run.records_per_second:,.0f}",
        f"{run.records_per_second / peer.records_per_second:.2f}",
        f"{run.wall_seconds:.2f}",
        f"{peer.wall_seconds / run.wall_seconds:.2f}",
        f"{run.cpu_seconds:.1f}",
        f"{run.cpu_seconds / peer.cpu_seconds:.2f}",
    )


def _checkpoints(folder: Path) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        yield folder / f"checkpoint-{number}"


def _case(
    spark: SparkSession,
    cluster: Cluster,
    topic: str,
    side: str,
    checkpoints: Iterator[Path],
    **more: str,
) -> Callable[[], Run]:
    name, tuned = SIDES[side]

    def run() -> Run:
        frame = (
            spark.readStream.format(name)
            .option("kafka.bootstrap.servers", cluster.address)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .options(**tuned, **more)
            .load()
        )
        return _timed(frame, next(checkpoints), RECORDS * len(topic.split(",")))

    return run


def _prebuilt(spark: SparkSession, checkpoint: Path, **more: int) -> Run:
    frame = spark.readStream.format("prebuilt").options(rows=RECORDS, **more).load()
    return _timed(frame, checkpoint, RECORDS)


def _timed(frame: DataFrame, checkpoint: Path, records: int) -> Run:
    meter = CpuMeter()
    start = time.perf_counter()
    query = (
        frame.writeStream.format("noop")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(240)
    wall = time.perf_counter() - start
    # The process that has planned the batches is just ending; then its parent tells its time.
    time.sleep(0.3)
    cpu = meter.seconds
    batches: list[Any] = [one for one in query.recentProgress if one["numInputRows"]]
    read = sum(one["numInputRows"] for one in batches)
    assert read == records, f"{read} of {records} records"
    durations = [one["durationMs"] for one in batches]
    triggers = [one["triggerExecution"] for one in durations]
    steps = {step: statistics.median(one.get(step, 0) for one in durations) for step in _STEPS}
    return Run(wall, sum(triggers) / 1000, cpu, statistics.median(triggers), read, steps)


def _rotated(cases: dict[str, Callable[[], Run]]) -> dict[str, Run]:
    names = list(cases)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for name in names:
        cases[name]()
    for turn in range(ROUNDS):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            runs[name].append(cases[name]())
            progress(f"{name}: {runs[name][-1]}")
    return {name: _median(found) for name, found in runs.items()}


def _median(runs: list[Run]) -> Run:
    def middle(values: list[float]) -> float:
        return statistics.median(values)

    return Run(
        middle([run.wall_seconds for run in runs]),
        middle([run.trigger_seconds for run in runs]),
        middle([run.cpu_seconds for run in runs]),
        middle([run.batch_ms for run in runs]),
        runs[0].records,
        {step: middle([run.steps_ms[step] for run in runs]) for step in _STEPS},
    )


def _filled(spark: SparkSession, cluster: Cluster, codec: str) -> str:
    """Write a topic with Spark's own connector."""
    topic = cluster.topic(PARTITIONS, name=f"bench-{codec}")
    # Half of a value repeats, so that codecs have something to do but not everything.
    value = "concat(repeat('spark', 10), substr(sha2(cast(id as string), 256), 1, 54))"
    rows = spark.range(0, RECORDS, 1, PARTITIONS).selectExpr(
        "encode(lpad(cast(id as string), 8, '0'), 'UTF-8') as key",
        f"encode({value}, 'UTF-8') as value",
        f"cast(id % {PARTITIONS} as int) as partition",
    )
    (
        rows.write.format("kafka")
        .option("kafka.bootstrap.servers", cluster.address)
        .option("kafka.compression.type", codec)
        .option("kafka.linger.ms", "20")
        .option("kafka.batch.size", "65536")
        .option("topic", topic)
        .save()
    )
    progress(f"written: {topic}")
    return topic


def _session() -> SparkSession:
    jars = [str(next(fetched(one, is_transitive=False).glob("*.jar"))) for one in _PEER]
    spark = local_session(
        "kafka-benchmark",
        master="local[2]",
        spark_driver_extraClassPath=os.pathsep.join(jars),
        spark_driver_memory="2g",
        spark_sql_streaming_numRecentProgressUpdates="200",
    )
    spark.dataSource.register(PrebuiltSource)
    return spark
