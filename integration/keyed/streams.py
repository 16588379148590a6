"""Streams of words from files, a file in each micro-batch, and the queries over them."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from flowspark import key_by
from integration.keyed.functions import COUNTED, WordCount

WAIT_S = 180
WORDS = [f"word{number}" for number in range(40)]


def write_rows(folder: Path, number: int, rows: list[dict[str, Any]]) -> None:
    """Add a file to a stream; the source takes them in the order of their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / f".{number:05d}.json"
    hidden.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(hidden, (1000 + number, 1000 + number))
    hidden.rename(folder / f"{number:05d}.json")


def write_words(folder: Path, number: int, words: list[str]) -> None:
    write_rows(folder, number, [{"word": word} for word in words])


def random_words(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [chance.choice(WORDS) for _ in range(count)]


def read_words(spark: SparkSession, folder: Path) -> DataFrame:
    folder.mkdir(parents=True, exist_ok=True)
    reader = spark.readStream.schema("word string").option("maxFilesPerTrigger", 1)
    return reader.json(str(folder))


def count_words(
    words: DataFrame, folder: Path, function: Any = None, schema: str = COUNTED, **options: Any
) -> DataFrame:
    """Count words with the state in a folder of the test."""
    given: dict[str, Any] = {
        "uid": "wc-sum",
        "state_location": folder / "state",
        "working_folder": folder / "working",
        "parallelism": 2,
    }
    return key_by(words, "word").process(function or WordCount(), schema, **{**given, **options})


def run(df: DataFrame, folder: Path, name: str = "out") -> StreamingQuery:
    """Write all that is there to parquet files, and end."""
    query = start(df, folder, name)
    assert query.awaitTermination(WAIT_S)
    return query


def start(df: DataFrame, folder: Path, name: str = "out", **trigger: Any) -> StreamingQuery:
    writer = df.writeStream.format("parquet").option("path", str(folder / name))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(**(trigger or {"availableNow": True})).start()


def rows_of(spark: SparkSession, folder: Path, name: str = "out") -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in spark.read.parquet(str(folder / name)).collect())


def expected_counts(words: list[str]) -> list[tuple[str, int]]:
    """Return the rows that a count of each word emits, in whatever order it sees them."""
    return sorted((word, n) for word, total in Counter(words).items() for n in range(1, total + 1))
