"""The sink in a real Spark."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from tests.flowbuffer.test_batches import trace_batches, trace_contents

from flowstate.checkpoint import CheckpointStorage
from integration.children import child
from integration.flowbuffer_job import THRESHOLD, read_input, write_input
from pyspark_flowbuffer.flush import flush
from pyspark_flowbuffer.state import STATE_NAME, buffered_rows

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[1]


def sink(df: DataFrame, folder: Path, **options: Any) -> DataStreamWriter:
    writer = df.writeStream.format("flowbuffer").trigger(availableNow=True)
    given = {"checkpointLocation": folder / "checkpoint", "threshold": 5, **options}
    if "sinkFunction" not in given:
        given.setdefault("path", folder / "out")
    for name, value in given.items():
        writer = writer.option(name, str(value))
    return writer


def run(writer: DataStreamWriter) -> StreamingQuery:
    query = writer.start()
    assert query.awaitTermination(120)
    return query


def root_of(folder: Path) -> str:
    (root,) = (folder / "checkpoint" / "flow").glob("*/*")
    return str(root)


def lists(root: str, column: str, checkpoint_id: int | None = None) -> list[list[Any]]:
    storage = CheckpointStorage(root)
    record = storage.latest() if checkpoint_id is None else storage.read(checkpoint_id)
    assert record is not None
    found: list[list[Any]] = []
    for subtask in record.subtasks:
        rows: list[Any] = []
        for handle in subtask.operator:
            meta = handle.states[STATE_NAME]
            reader = storage.reader(handle.file)
            elements = reader.read_elements(STATE_NAME, meta.start, meta.start + meta.count)
            rows += [row[column] for row in elements.to_pylist()]
        found.append(rows)
    return found


def published(folder: Path, column: str) -> list[list[Any]]:
    files = sorted((folder / "out").glob("*.parquet"))
    return [pq.read_table(file)[column].to_pylist() for file in files]


def everything(folder: Path) -> list[int]:
    waiting = lists(root_of(folder), "id")
    return sorted(row for rows in [*published(folder, "id"), *waiting] for row in rows)


# The trace of Flink's own buffering sink.


def trace_stream(spark: SparkSession, folder: Path) -> DataFrame:
    """Return a stream of the trace's elements: a batch up to each checkpoint, to given subtasks."""
    folder.mkdir()
    for number, partitions in enumerate(trace_batches(5)):
        lines = [
            json.dumps({"subtask": subtask, "value": value}) + "\n"
            for subtask, values in enumerate(partitions)
            for value in values
        ]
        path = folder / f"{number}.json"
        path.write_text("".join(lines))
        # The source takes the oldest file first.
        os.utime(path, (1000 + number, 1000 + number))
    reader = spark.readStream.schema("subtask int, value string").option("maxFilesPerTrigger", 1)
    return reader.json(str(folder)).repartitionById(2, sf.col("subtask")).select("value")


def test_the_trace_of_flinks_buffering_sink_and_its_restores(
    spark: SparkSession, tmp_path: Path
) -> None:
    stream = trace_stream(spark, tmp_path / "in")
    run(sink(stream, tmp_path / "a", checkpointsRetained=10))

    root = root_of(tmp_path / "a")
    assert [lists(root, "value", number) for number in range(1, 6)] == trace_contents()
    assert sorted(published(tmp_path / "a", "value")) == [
        ["a1", "a3", "a5", "a7", "a9"],
        ["a2", "a4", "a6", "a8", "a10"],
    ]

    for parallelism in (1, 3):
        folder = tmp_path / f"restored-{parallelism}"
        nothing = read_input(spark, _one_row(folder)).filter("id < 0").selectExpr("'' as value")
        options = {"parallelism": parallelism, "restoreFrom": f"{root}/chk-3"}
        run(sink(nothing.repartition(parallelism), folder, **options))
        if parallelism == 1:
            assert published(folder, "value") == [["a2", "a4", "a6", "a8", "a1"]]
            assert lists(root_of(folder), "value") == [["a3", "a5", "a7"]]
        else:
            expected = [["a2", "a4", "a6"], ["a8", "a1", "a3"], ["a5", "a7"]]
            assert lists(root_of(folder), "value") == expected


def _one_row(folder: Path) -> Path:
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "0.json").write_text('{"id": 1}\n')
    return folder / "in"


# Partitions, restarts, faults.


@pytest.mark.main_path
def test_a_changed_number_of_partitions_loses_nothing(spark: SparkSession, tmp_path: Path) -> None:
    rows = write_input(tmp_path / "in", files=2)
    stream = read_input(spark, tmp_path / "in")
    run(sink(stream.repartition(4), tmp_path, threshold=60))
    first = lists(root_of(tmp_path), "id")
    more = [f'{{"id": {row}}}\n' for row in range(200, 210)]
    (tmp_path / "in" / "more.json").write_text("".join(more))

    run(sink(stream.repartition(3), tmp_path, threshold=60, parallelism=3))

    assert len(first) == 4
    assert len(lists(root_of(tmp_path), "id")) == 3
    assert everything(tmp_path) == [*rows, *range(200, 210)]
    assert {len(found) for found in published(tmp_path, "id")} <= {60}


def test_another_number_of_partitions_than_declared_says_what_to_do(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_input(tmp_path / "in", files=1)
    writer = sink(read_input(spark, tmp_path / "in").repartition(3), tmp_path, parallelism=2)

    with pytest.raises(PySparkException, match=r"add \.repartition\(2\) in front of"):
        run(writer)


def test_a_task_that_fails_and_is_run_again_counts_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = write_input(tmp_path / "in", files=2)

    def fail_at_first(batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0 and context.partitionId() == 1:
            raise RuntimeError("the first attempt dies after all its rows were written")

    stream = read_input(spark, tmp_path / "in").repartition(2)
    run(sink(stream.mapInArrow(fail_at_first, "id long"), tmp_path, threshold=7))

    assert everything(tmp_path) == rows
    assert {len(found) for found in published(tmp_path, "id")} == {7}


def test_a_query_that_is_stopped_in_mid_batch_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    rows = write_input(tmp_path / "in", files=4)

    def slowly(batches: Any) -> Any:
        for batch in batches:
            for start in range(0, batch.num_rows, 8):
                yield batch.slice(start, 8)
                time.sleep(0.3)

    stream = read_input(spark, tmp_path / "in").repartition(2)
    query = sink(stream.mapInArrow(slowly, "id long"), tmp_path, threshold=7).start()
    staging = tmp_path / "out" / "_flow"
    deadline = time.monotonic() + 60
    while not any(staging.rglob("*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.01)
    query.stop()
    assert not list((tmp_path / "out").glob("*.parquet"))

    run(sink(stream, tmp_path, threshold=7))

    assert everything(tmp_path) == rows
    assert {len(found) for found in published(tmp_path, "id")} == {7}


KILLS = int(os.environ.get("FLOW_KILLS", "2"))


@pytest.mark.timeout(120 + 60 * KILLS)
def test_a_killed_driver_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Kill the driver at random times, at another number of partitions each time."""
    seed = int(os.environ.get("FLOW_SEED", random.randrange(1 << 30)))
    print(f"FLOW_SEED={seed}")
    chance = random.Random(seed)
    rows = write_input(tmp_path / "in", files=6 + 6 * KILLS)
    killed_at = []
    for _ in range(KILLS):
        partitions = chance.randint(1, 4)
        parallelism = chance.choice([0, partitions])
        log = tmp_path / "log"
        with child("integration.flowbuffer_job", tmp_path, partitions, parallelism, log=log) as job:
            jvm = int(job.wait_for("jvm", 120).split()[1])
            line = job.wait_for("batch", 120)
            time.sleep(chance.uniform(0, 1.5))
            # The whole machine, or the JVM alone: then workers live on for a while.
            job.kill(chance.choice([None, jvm]))
            killed_at.append(line)
    with child("integration.flowbuffer_job", tmp_path, 2, 2, log=tmp_path / "log") as job:
        job.wait_for("done", 300)

    print(f"killed {len(killed_at)} times, after {killed_at}")
    assert everything(tmp_path) == rows
    assert {len(found) for found in published(tmp_path, "id")} == {THRESHOLD}
    record = CheckpointStorage(root_of(tmp_path)).latest()
    assert record is not None
    flushed = flush(str(tmp_path / "checkpoint"))
    assert flushed.rows == buffered_rows(record)
    assert sorted(row for found in published(tmp_path, "id") for row in found) == rows


# What Spark reads back.


def test_spark_reads_what_was_written(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", files=1)
    columns = [
        "id",
        "if(id % 7 = 0, null, concat('é \"', id, '\\n')) as s",
        "id % 3 as part",
        "cast(id / 7 as decimal(20, 3)) as dec",
        "timestamp_millis(id * 1000003) as at",
        "date_add(date'2020-01-01', cast(id as int)) as day",
        "if(id % 5 = 0, null, id * 1.5D) as f",
    ]
    nested = ["array(id, null) as l", "map('k', id) as m", "struct(id as x, 'q' as y) as st"]
    for file_format, extra in (("parquet", nested), ("json", nested), ("csv", [])):
        folder = tmp_path / file_format
        stream = read_input(spark, tmp_path / "in").selectExpr(*columns, *extra).repartition(2)
        options = {"fileFormat": file_format, "partitionBy": "part", "threshold": 10}
        run(sink(stream, folder, **options))
        flush(str(folder / "checkpoint"))

        expected = spark.read.schema("id long").json(str(tmp_path / "in"))
        wanted = expected.selectExpr(*columns, *extra)
        reader = spark.read.schema(wanted.schema)
        if file_format == "csv":
            reader = reader.option("multiLine", True).option("escape", '"')
        found = reader.format(file_format).load(str(folder / "out"))
        assert sorted(map(str, found.select(*wanted.columns).collect())) == sorted(
            map(str, wanted.collect())
        )


# Bad input, as a user sees it.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": "0"}, r"\[FLOWBUFFER_OPTION\] option 'threshold' must be at least 1"),
        ({"tresh": "1"}, "there is no option 'tresh'"),
        ({"sinkFunction": "no.such:Sink"}, "option 'sinkFunction' 'no.such:Sink' cannot be imp"),
        ({"path": "/proc/nowhere"}, r"cannot write /proc/nowhere"),
    ],
    ids=["threshold", "unknown", "sink", "unwritable"],
)
def test_a_mistake_is_named(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    write_input(tmp_path / "in", files=1)

    with pytest.raises(PySparkException, match=message):
        run(sink(read_input(spark, tmp_path / "in"), tmp_path, **options))


def test_complete_mode_and_batch_writes_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", files=1)
    counts = read_input(spark, tmp_path / "in").groupBy("id").count()

    with pytest.raises(PySparkException, match="use outputMode 'append'"):
        run(sink(counts, tmp_path).outputMode("complete"))
    with pytest.raises(PySparkException, match="a batch write has no next batch"):
        spark.range(3).write.format("flowbuffer").mode("append").save(str(tmp_path / "out"))


def test_other_columns_are_refused_with_the_rows_intact(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = write_input(tmp_path / "in", files=1)
    stream = read_input(spark, tmp_path / "in")
    run(sink(stream, tmp_path, threshold=1000))
    (tmp_path / "in" / "more.json").write_text('{"id": 100}\n')

    with pytest.raises(PySparkException, match="column 'extra' was added"):
        run(sink(stream.selectExpr("id", "1 as extra"), tmp_path, threshold=1000))
    assert everything(tmp_path) == rows


# A database.


def test_the_sqlite_example_is_exactly_once(spark: SparkSession, tmp_path: Path) -> None:
    rows = write_input(tmp_path / "in", files=3)
    database = tmp_path / "words.db"
    with sqlite3.connect(database) as connection:
        connection.execute("create table numbers (id integer)")
    stream = read_input(spark, tmp_path / "in").repartition(2)
    spark.sparkContext.addPyFile(str(ROOT / "docs" / "examples" / "sqlite_sink.py"))
    options = {
        "sinkFunction": "sqlite_sink:SqliteSink",
        "sink.database": database,
        "sink.table": "missing",
        "threshold": 7,
    }
    # The commit on the driver fails: there is no such table. What was prepared stays prepared.
    with pytest.raises(PySparkException, match="no such table: missing"):
        run(sink(stream, tmp_path, **options))

    run(sink(stream, tmp_path, **{**options, "sink.table": "numbers"}))
    flush(
        str(tmp_path / "checkpoint"),
        sink_options={"database": str(database), "table": "numbers"},
    )

    with sqlite3.connect(database) as connection:
        found = [row for (row,) in connection.execute("select id from numbers order by id")]
        left = connection.execute("select count(*) from flow_staged").fetchone()
    assert found == rows
    assert left == (0,)
