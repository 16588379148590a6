"""What goes wrong with a keyed operator in a real Spark, and what a person is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark import inheritable_thread_target
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from flowspark import (
    bounded_out_of_orderness,
    key_by,
)
from flowspark.errors import OptionError
from integration.keyed.functions import (
    FailsOn,
    KillsItsWorkerOnce,
    RenamedCount,
    Returns,
    WordCount,
)
from integration.keyed.streams import (
    WAIT_S,
    count_words,
    expected_counts,
    random_words,
    read_words,
    rows_of,
    run,
    write_words,
)

pytestmark = pytest.mark.spark


def failure(df: DataFrame, folder: Path) -> str:
    with pytest.raises(PySparkException) as caught:
        run(df, folder)
    return str(caught.value)


def test_a_function_that_raises_is_named_with_its_key_and_nothing_is_kept(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_words(tmp_path / "in", 0, ["a", "b"])
    write_words(tmp_path / "in", 1, ["a", "bad", "b"])
    words = read_words(spark, tmp_path / "in")
    message = failure(count_words(words, tmp_path, FailsOn("bad")), tmp_path)
    assert "FLOWKEYED_FUNCTION" in message
    assert "operator 'wc-sum', subtask" in message
    assert "key 'bad': process_element failed: ZeroDivisionError: this word" in message

    run(count_words(words, tmp_path, parallelism=3), tmp_path)
    assert rows_of(spark, tmp_path) == expected_counts(["a", "b", "a", "bad", "b"])


def test_a_batch_of_which_spark_does_not_say_the_number_is_no_batch_job(
    spark: SparkSession, tmp_path: Path
) -> None:
    everything = [random_words(20, number) for number in range(3)]
    for number, words in enumerate(everything):
        write_words(tmp_path / "in", number, words)
    found: list[tuple[Any, ...]] = []

    def run(within: Callable[[Callable[[], Any]], Callable[[], Any]]) -> None:
        def look(batch: DataFrame, _: int) -> None:
            with ThreadPoolExecutor(1) as pool:
                rows = pool.submit(within(batch.collect)).result()
            found.extend(tuple(row) for row in rows)

        counted = count_words(read_words(spark, tmp_path / "in"), tmp_path)
        writer = counted.writeStream.foreachBatch(look).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        assert query.awaitTermination(WAIT_S)

    with pytest.raises(PySparkException, match="does not say which micro-batch this is"):
        run(lambda collect: collect)
    assert found == []
    # What Spark has for the purpose makes the thread one of the batch.
    run(lambda collect: inheritable_thread_target(spark)(collect))

    assert sorted(found) == expected_counts([word for words in everything for word in words])


def test_a_python_worker_that_is_killed_counts_nothing_twice(
    spark: SparkSession, tmp_path: Path
) -> None:
    everything = [*random_words(40, 12), "deadly", *random_words(40, 13)]
    write_words(tmp_path / "in", 0, everything[:30])
    write_words(tmp_path / "in", 1, everything[30:])
    words = read_words(spark, tmp_path / "in")
    function = KillsItsWorkerOnce(tmp_path / "killed", "deadly")
    run(count_words(words, tmp_path, function), tmp_path)

    assert (tmp_path / "killed").exists()
    assert rows_of(spark, tmp_path) == expected_counts(everything)


@pytest.mark.parametrize(
    ("emitted", "message"),
    [
        ([("a", 1, 2)], "is a tuple of 2 values"),
        ("text", "an iterable of rows is expected"),
        (("a", 1), "is a tuple of 2 values"),
        ([("a", "one")], "the output column 'n' is of type int64, and the function emitted 'one'"),
    ],
    ids=["too-long", "text", "no-list", "wrong-type"],
)
def test_wrong_output_rows_are_named(
    spark: SparkSession, tmp_path: Path, emitted: Any, message: str
) -> None:
    write_words(tmp_path / "in", 0, ["a"])
    words = read_words(spark, tmp_path / "in")

    assert message in failure(count_words(words, tmp_path, Returns(emitted)), tmp_path)


def test_a_null_key_is_refused_and_in_a_composite_key_it_is_a_value(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = spark.createDataFrame([("a", None), ("a", None), ("a", 1)], "word string, x int")
    place: dict[str, Any] = {"uid": "u", "parallelism": 2, "working_folder": tmp_path / "working"}
    grouped = key_by(rows, "word", "x").aggregate(
        {"n": "count"}, state_location=tmp_path / "a", **place
    )
    single = key_by(rows, "x").aggregate({"n": "count"}, state_location=tmp_path / "b", **place)

    assert sorted(map(str, grouped.collect())) == [
        "Row(word='a', x=1, n=1)",
        "Row(word='a', x=None, n=2)",
    ]
    with pytest.raises(PySparkException, match="2 of 3 rows have no key: 'x' is null"):
        single.collect()


def test_a_changed_key_type_and_lost_state_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    write_words(tmp_path / "in", 0, ["1", "2"])
    words = read_words(spark, tmp_path / "in")
    run(count_words(words, tmp_path), tmp_path)
    write_words(tmp_path / "in", 1, ["1"])

    numbers = words.selectExpr("CAST(word AS int) AS word")
    assert "keys are of type string, the program's of int32" in failure(
        count_words(numbers, tmp_path), tmp_path
    )
    assert "the checkpoint has the state 'wordCountState'" in failure(
        count_words(words, tmp_path, RenamedCount()), tmp_path
    )
    run(count_words(words, tmp_path, RenamedCount(), allow_non_restored_state=True), tmp_path)
    assert rows_of(spark, tmp_path) == [("1", 1), ("1", 1), ("2", 1)]


def test_a_max_parallelism_that_changed_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    write_words(tmp_path / "in", 0, ["a"])
    words = read_words(spark, tmp_path / "in")
    run(count_words(words, tmp_path), tmp_path)
    write_words(tmp_path / "in", 1, ["a"])
    other = key_by(words, "word", max_parallelism=64).process(
        WordCount(),
        "word string, n long",
        uid="wc-sum",
        state_location=tmp_path / "state",
        parallelism=2,
    )

    assert "Max parallelism mismatch" in failure(other, tmp_path)


def test_a_lost_state_location_is_no_fresh_start(spark: SparkSession, tmp_path: Path) -> None:
    write_words(tmp_path / "in", 0, ["a"])
    words = read_words(spark, tmp_path / "in")
    run(count_words(words, tmp_path), tmp_path)
    write_words(tmp_path / "in", 1, ["a"])
    elsewhere: dict[str, Any] = {"state_location": tmp_path / "mistyped"}

    assert "there is nothing below" in failure(count_words(words, tmp_path, **elsewhere), tmp_path)
    run(count_words(words, tmp_path, **elsewhere, start_empty=True), tmp_path)
    assert rows_of(spark, tmp_path) == [("a", 1), ("a", 1)]


def test_a_damaged_checkpoint_is_named_and_a_damaged_cache_is_built_anew(
    spark: SparkSession, tmp_path: Path
) -> None:
    for number in range(2):
        write_words(tmp_path / "in", number, random_words(30, number))
    words = read_words(spark, tmp_path / "in")
    run(count_words(words, tmp_path), tmp_path)
    for data in (tmp_path / "working").rglob("data.mdb"):
        data.write_bytes(b"damaged" * 1000)
    write_words(tmp_path / "in", 2, random_words(30, 2))
    run(count_words(words, tmp_path), tmp_path)
    everything = [word for number in range(3) for word in random_words(30, number)]
    assert rows_of(spark, tmp_path) == expected_counts(everything)

    write_words(tmp_path / "in", 3, ["a"])
    for part in (tmp_path / "state").rglob("part-*"):
        part.write_bytes(part.read_bytes().replace(b"wordCountState", b"wordCountStale"))
    assert "[FLOWSTATE_CORRUPT]" in failure(count_words(words, tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"uid": " "}, "an operator needs a uid"),
        ({"parallelism": 129}, "parallelism"),
        ({"parallelism": 0}, "parallelism"),
        ({"checkpoints_retained": 0}, "checkpoints_retained is at least 1"),
        ({"state_location": ""}, "state_location is empty"),
        ({"state_location": "memory://x"}, "the memory of one process"),
        ({"start_empty": True, "restore_from": "x"}, "contradict each other"),
        ({"tick_interval": "soon"}, "must be a time span"),
        ({"watermark": bounded_out_of_orderness("ts", "1s")}, "names the column 'ts'"),
        ({"watermark": bounded_out_of_orderness("at", "1s", by=["s"])}, "of type struct"),
        ({"side_outputs": {"main": "a int"}}, "cannot be named 'main'"),
        ({"schema": "word strin"}, "the schema 'word strin' is not valid"),
        ({"function": WordCount}, "takes an instance"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_arguments_are_refused_at_once(
    spark: SparkSession, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    words = spark.createDataFrame([], "word string, at timestamp, s struct<a: int>")

    with pytest.raises(ValueError, match=message):
        count_words(words, tmp_path, **arguments)


def test_keys_that_cannot_be_are_refused_at_once(spark: SparkSession) -> None:
    df = spark.createDataFrame([("a", {"x": 1})], "word string, kv map<string, int>")

    for columns, message in (
        (("nothing",), "there is no column 'nothing'"),
        ((), "at least one column"),
        (("word", "WORD"), "names a column twice"),
        ((sf.col("word"),), "takes names of columns"),
    ):
        with pytest.raises(OptionError, match=message):
            key_by(df, *columns)
    with pytest.raises(OptionError, match="kv cannot be the key"):
        key_by(df, "kv").aggregate({"n": "count"}, uid="u", state_location="x")


def test_an_operator_that_is_run_twice_at_once_warns_no_one(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = spark.createDataFrame([(word,) for word in random_words(50, 14)], "word string")
    counted = count_words(words, tmp_path)
    with caplog.at_level(logging.WARNING):
        both = counted.union(counted)

        assert both.count() == 100
    assert not caplog.records
