"""The keyed operator in a real Spark."""

from __future__ import annotations

import datetime as dt
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from flowspark import (
    bounded_out_of_orderness,
    key_by,
    main_output,
    side_output,
)
from flowspark.keyed.schemas import arrow_schema
from flowstate import CheckpointStorage
from integration.keyed.functions import (
    RARE,
    ArrowCount,
    CountsQuietly,
    CountsRows,
    FirstSeen,
    LastRow,
    Timeout,
    Window,
)
from integration.keyed.streams import (
    WAIT_S,
    count_words,
    expected_counts,
    random_words,
    read_words,
    rows_of,
    run,
    start,
    write_rows,
    write_words,
)

pytestmark = pytest.mark.spark


def states_of(folder: Path, uid: str = "wc-sum") -> CheckpointStorage:
    (root,) = (folder / "state").glob(f"*/{uid}")
    return CheckpointStorage(str(root))


# Counting, and going on.


@pytest.mark.main_path
def test_counts_go_on_after_a_restart_at_any_parallelism(
    spark: SparkSession, tmp_path: Path
) -> None:
    everything: list[str] = []
    for number, parallelism in enumerate((2, 5, 1, 3, 3)):
        for half in (0, 1):
            some = random_words(60, 2 * number + half)
            write_words(tmp_path / "in", 2 * number + half, some)
            everything += some
        words = read_words(spark, tmp_path / "in")
        run(count_words(words, tmp_path, parallelism=parallelism), tmp_path)

    assert rows_of(spark, tmp_path) == expected_counts(everything)


def test_five_comes_after_four(spark: SparkSession, tmp_path: Path) -> None:
    for number, parallelism in enumerate((2, 4)):
        first = 4 * number
        for batch in range(first, first + 4):
            write_words(tmp_path / "in", batch, ["flink"])
        words = read_words(spark, tmp_path / "in")
        run(count_words(words, tmp_path, parallelism=parallelism), tmp_path)

    assert rows_of(spark, tmp_path) == [("flink", n) for n in range(1, 9)]


def test_a_new_query_goes_on_from_a_checkpoint_of_another(
    spark: SparkSession, tmp_path: Path
) -> None:
    first, second = random_words(80, 1), random_words(80, 2)
    write_words(tmp_path / "a/in", 0, first)
    write_words(tmp_path / "a/in", 1, [])
    write_words(tmp_path / "b/in", 0, second)
    run(count_words(read_words(spark, tmp_path / "a/in"), tmp_path / "a"), tmp_path / "a")
    # The last batch's state is sealed by the one after it.
    write_words(tmp_path / "a/in", 2, ["end"])
    run(count_words(read_words(spark, tmp_path / "a/in"), tmp_path / "a"), tmp_path / "a")
    (source,) = (tmp_path / "a/state").glob("*")
    words = read_words(spark, tmp_path / "b/in")
    run(count_words(words, tmp_path / "b", parallelism=3, restore_from=source), tmp_path / "b")

    found = rows_of(spark, tmp_path / "b")
    assert found == sorted(set(expected_counts(first + second)) - set(expected_counts(first)))


def test_a_batch_job_makes_state_for_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    old, new = random_words(300, 3), random_words(50, 4)
    batch = spark.createDataFrame([(word,) for word in old], "word string")
    counted = count_words(batch, tmp_path / "old", parallelism=3)
    assert sorted(map(tuple, counted.collect())) == expected_counts(old)
    # A second action over the same plan changes nothing.
    assert counted.count() == len(old)

    write_words(tmp_path / "in", 0, new)
    words = read_words(spark, tmp_path / "in")
    source = tmp_path / "old/state/batch/wc-sum"
    run(count_words(words, tmp_path, restore_from=source), tmp_path)

    assert rows_of(spark, tmp_path) == sorted(
        set(expected_counts(old + new)) - set(expected_counts(old))
    )


@pytest.mark.main_path
def test_arrow_functions_and_aggregates_count_alike(spark: SparkSession, tmp_path: Path) -> None:
    everything = random_words(90, 5)
    for number in range(3):
        write_words(tmp_path / "in", number, everything[30 * number : 30 * number + 30])
    words = read_words(spark, tmp_path / "in").withColumn("size", sf.length("word"))
    place: dict[str, Any] = {
        "state_location": tmp_path / "state",
        "working_folder": tmp_path / "working",
    }
    by_record = key_by(words, "word").aggregate(
        {"n": "count", "total": ("sum", "size"), "mean": ("mean", "size")},
        emit="record",
        uid="a",
        parallelism=2,
        **place,
    )
    by_function = key_by(words, "word").process(
        ArrowCount(), "word string, n long", uid="b", parallelism=3, **place
    )
    by_key = key_by(words, "word").aggregate({"n": "count"}, uid="c", parallelism=1, **place)
    run(by_record, tmp_path / "record")
    run(by_function, tmp_path / "function")
    run(by_key, tmp_path / "key")

    records = rows_of(spark, tmp_path / "record")
    assert [row[:2] for row in records] == expected_counts(everything)
    assert all(row[2] == row[1] * len(row[0]) and row[3] == len(row[0]) for row in records)
    assert rows_of(spark, tmp_path / "key") == rows_of(spark, tmp_path / "function")


def test_operator_state_is_redistributed_with_the_parallelism(
    spark: SparkSession, tmp_path: Path
) -> None:
    for number, parallelism in enumerate((2, 3, 1)):
        write_words(tmp_path / "in", number, random_words(40, number))
        words = read_words(spark, tmp_path / "in")
        counted = count_words(words, tmp_path, CountsRows(), parallelism=parallelism)
        run(counted, tmp_path)
    # With one subtask all lists have come together, and another batch seals it.
    write_words(tmp_path / "in", 3, ["end"])
    run(
        count_words(read_words(spark, tmp_path / "in"), tmp_path, CountsRows(), parallelism=1),
        tmp_path,
    )
    storage = states_of(tmp_path)
    record = storage.latest()
    assert record is not None
    (subtask,) = record.subtasks
    (handle,) = subtask.operator

    assert storage.reader(handle.file).read_elements("seen", 0, 1).to_pylist() == [120]


# Plans.


def test_operators_in_a_row_and_in_one_arm_of_a_union(spark: SparkSession, tmp_path: Path) -> None:
    everything = random_words(60, 6)
    write_words(tmp_path / "in", 0, everything[:30])
    write_words(tmp_path / "in", 1, everything[30:])
    words = read_words(spark, tmp_path / "in")
    counted = count_words(words, tmp_path, uid="first", parallelism=3)
    # The second one counts how often each count was reached.
    again = counted.select(sf.col("n").cast("string").alias("word"))
    twice = count_words(again, tmp_path, uid="second", parallelism=2)
    others = words.selectExpr("word", "-1L AS n")
    run(others.union(twice), tmp_path)

    reached = [str(n) for _, n in expected_counts(everything)]
    found = rows_of(spark, tmp_path)
    assert [row for row in found if row[1] > 0] == expected_counts(reached)
    assert sorted(word for word, n in found if n < 0) == sorted(everything)


def test_two_operators_with_one_uid_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    write_words(tmp_path / "in", 0, random_words(30, 7))
    words = read_words(spark, tmp_path / "in")
    both = count_words(words, tmp_path).union(count_words(words, tmp_path))

    with pytest.raises(PySparkException, match="two operators of this query have the uid 'wc-sum'"):
        run(both, tmp_path)


def test_a_batch_that_runs_twice_in_one_plan_counts_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    everything = random_words(80, 8)
    for number in range(4):
        write_words(tmp_path / "in", number, everything[20 * number : 20 * number + 20])
    found: list[tuple[Any, ...]] = []

    def keep(batch: DataFrame, _: int) -> None:
        # A sort looks at its input to find the ranges, and then again; count() is one more time.
        rows = batch.repartitionByRange(3, "n").sort("word", "n").collect()
        assert batch.count() == len(rows)
        found.extend(tuple(row) for row in rows)

    query = (
        count_words(read_words(spark, tmp_path / "in"), tmp_path)
        .writeStream.foreachBatch(keep)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(WAIT_S)

    assert sorted(found) == expected_counts(everything)


@pytest.mark.parametrize("how", ["take", "limit", "persisted"])
def test_who_stops_reading_is_told_unless_all_of_it_ran(
    spark: SparkSession, tmp_path: Path, how: str
) -> None:
    everything = random_words(80, 9)
    for number in range(4):
        write_words(tmp_path / "in", number, everything[20 * number : 20 * number + 20])
    found: list[tuple[Any, ...]] = []

    def look(batch: DataFrame, _: int) -> None:
        if how == "persisted":
            batch = batch.persist()
            found.extend(tuple(row) for row in batch.collect())
        if how == "limit":
            batch.limit(1).collect()
        else:
            batch.take(1)

    query = (
        count_words(read_words(spark, tmp_path / "in"), tmp_path, parallelism=4)
        .writeStream.foreachBatch(look)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    if how == "persisted":
        assert query.awaitTermination(WAIT_S)
        assert sorted(found) == expected_counts(everything)
        return
    with pytest.raises(PySparkException, match=r"FLOWKEYED_INCOMPLETE.*of 4 subtasks have run"):
        query.awaitTermination(WAIT_S)


def test_who_asks_whether_there_is_output_may_do_so(spark: SparkSession, tmp_path: Path) -> None:
    """Where there is none all partitions are read, some of which have no rows, in several jobs."""
    everything = random_words(20, 16)[:3] * 2
    write_words(tmp_path / "in", 0, everything[:3])
    write_words(tmp_path / "in", 1, everything[3:])
    found: list[tuple[Any, ...]] = []

    def count(function: Any) -> None:
        def look(batch: DataFrame, _: int) -> None:
            if not batch.isEmpty():
                found.extend(tuple(row) for row in batch.collect())

        words = read_words(spark, tmp_path / "in")
        counted = count_words(words, tmp_path, function, parallelism=9)
        writer = counted.writeStream.foreachBatch(look).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        assert query.awaitTermination(WAIT_S)

    count(CountsQuietly())
    assert found == []
    write_words(tmp_path / "in", 2, everything[:3])
    count(None)

    assert sorted(found) == sorted(
        set(expected_counts([*everything, *everything[:3]])) - set(expected_counts(everything))
    )


def test_a_keyed_operator_inside_of_foreach_batch(spark: SparkSession, tmp_path: Path) -> None:
    everything = random_words(60, 10)
    for number in range(3):
        write_words(tmp_path / "in", number, everything[20 * number : 20 * number + 20])
    found: list[tuple[Any, ...]] = []

    def count(batch: DataFrame, _: int) -> None:
        found.extend(tuple(row) for row in count_words(batch, tmp_path).collect())

    query = (
        read_words(spark, tmp_path / "in")
        .writeStream.foreachBatch(count)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(WAIT_S)

    assert sorted(found) == expected_counts(everything)


def test_side_outputs_are_dataframes_of_their_own(spark: SparkSession, tmp_path: Path) -> None:
    everything = random_words(60, 11)
    for number in range(2):
        write_words(tmp_path / "in", number, everything[30 * number : 30 * number + 30])
    words = read_words(spark, tmp_path / "in")
    counted = count_words(words, tmp_path, FirstSeen(), side_outputs={RARE: "word string"})
    main: list[tuple[Any, ...]] = []
    side: list[str] = []

    def split(batch: DataFrame, _: int) -> None:
        batch.persist()
        main.extend(tuple(row) for row in main_output(batch).collect())
        side.extend(row.word for row in side_output(batch, RARE).collect())
        batch.unpersist()

    writer = counted.writeStream.foreachBatch(split)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    assert writer.trigger(availableNow=True).start().awaitTermination(WAIT_S)

    assert sorted(main) == expected_counts(everything)
    assert sorted(side) == sorted(set(everything))


# Values.


def test_rows_and_keys_of_every_type_survive_a_checkpoint(
    spark: SparkSession, tmp_path: Path
) -> None:
    schema = (
        "i int, l long, d double, f float, b boolean, t string, y binary, "
        "m decimal(20,4), day date, ts timestamp, ntz timestamp_ntz, "
        "s struct<a: int, b: array<struct<c: string>>>, xs array<int>, kv map<string, int>"
    )
    moment = dt.datetime(2024, 3, 31, 2, 30, 0, 1)
    rows: list[tuple[Any, ...]] = [
        (
            number,
            1 << 40,
            0.1,
            0.5,
            True,
            "ü€😀",
            b"\0\xff",
            Decimal("1234567890123.4567"),
            dt.date(1, 1, 3),
            moment,
            moment,
            (1, [("x",), (None,)]),
            [1, None, 3],
            {"a": 1, "b": None},
        )
        for number in (1, 1)
    ]
    rows.append((2, *[None] * 13))
    rows.append(rows[-1])
    keys = ["i", "m", "ts", "s", "xs", "day", "t"]
    folder = tmp_path / "in"
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    # One row in each file and batch.
    for number in range(4):
        one = spark.createDataFrame([rows[number]], schema)
        one.coalesce(1).write.mode("append").parquet(str(folder))
        time.sleep(0.02)
    stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))
    struct = pa.struct(list(arrow_schema(frame.schema)))
    last = key_by(stream, *keys).process(
        LastRow(struct),
        schema,
        uid="last",
        state_location=tmp_path / "state",
        working_folder=tmp_path / "working",
        parallelism=2,
    )
    run(last, tmp_path)

    found = spark.read.parquet(str(tmp_path / "out"))
    wanted = frame.where("i = 1").limit(1).union(frame.where("i = 2").limit(1))
    assert sorted(map(repr, found.collect())) == sorted(map(repr, wanted.collect()))


# Time.


def wait_for_rows(spark: SparkSession, folder: Path, count: int) -> list[tuple[Any, ...]]:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        found = rows_of(spark, folder) if list((folder / "out").glob("*.parquet")) else []
        if len(found) >= count:
            return found
        time.sleep(0.2)
    raise AssertionError(f"{count} rows did not come")


@pytest.mark.main_path
def test_processing_time_timers_fire_without_data_once_and_after_a_restart(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_words(tmp_path / "in", 0, ["a", "a", "b"])
    words = read_words(spark, tmp_path / "in")
    # Nobody waits: the timers are in the checkpoint when the query ends.
    slow = count_words(words, tmp_path, Timeout(3_600_000), tick_interval="100 ms")
    run(slow, tmp_path)
    write_words(tmp_path / "in", 1, ["c"])
    counted = count_words(words, tmp_path, Timeout(500), tick_interval="100 ms", parallelism=3)
    query = start(counted, tmp_path, processingTime="50 milliseconds")
    try:
        assert wait_for_rows(spark, tmp_path, 1) == [("c", 1)]
        time.sleep(1)
        assert rows_of(spark, tmp_path) == [("c", 1)]
    finally:
        query.stop()
    storage = states_of(tmp_path)
    record = storage.latest()
    assert record is not None
    assert record.parallelism == 3


def test_event_time_timers_fire_on_the_slowest_input(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()

    def add(number: int, *rows: tuple[str, int, int]) -> None:
        found = [
            {"word": word, "at": f"1970-01-01 00:00:{second:02d}", "part": part}
            for word, second, part in rows
        ]
        write_rows(folder, number, found)

    reader = spark.readStream.schema("word string, at timestamp, part int")
    stream = reader.option("maxFilesPerTrigger", 1).json(str(folder))
    strategy = bounded_out_of_orderness("at", "2 seconds", by=["part"])

    def windows(parallelism: int) -> list[tuple[Any, ...]]:
        counted = key_by(stream, "word").process(
            Window(),
            "word string, end long, n long",
            uid="windows",
            state_location=tmp_path / "state",
            working_folder=tmp_path / "working",
            parallelism=parallelism,
            watermark=strategy,
        )
        run(counted, tmp_path)
        return rows_of(spark, tmp_path)

    add(0, ("a", 1, 0), ("b", 2, 1), ("a", 3, 0))
    add(1, ("a", 30, 0))
    # The second input is still at second 2, less the two that rows may be late.
    assert windows(2) == []
    add(2, ("b", 12, 1))
    # Now it is at 12, the watermark just before 10: it has not passed the window's last moment.
    add(3, ("b", 13, 1))
    found = windows(3)
    assert found == [("a", 10_000, 2), ("b", 10_000, 1)]
    add(4, ("b", 45, 1))
    # 42 has passed for the one, 27 for the other, less a millisecond each.
    assert windows(1) == sorted([*found, ("b", 20_000, 2)])
