"""The way out that a message and the guide name when somebody has stopped reading."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from integration.keyed.streams import (
    WAIT_S,
    count_words,
    expected_counts,
    random_words,
    read_words,
    write_words,
)

pytestmark = pytest.mark.spark


def test_a_batch_that_did_not_run_as_a_whole_is_run_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    everything = random_words(80, 15)
    for number in range(4):
        write_words(tmp_path / "in", number, everything[20 * number : 20 * number + 20])
    found: list[tuple[Any, ...]] = []

    def look(batch: DataFrame, _: int) -> None:
        batch.take(1)

    def keep(batch: DataFrame, _: int) -> None:
        found.extend(tuple(row) for row in batch.collect())

    def run(use: Any) -> None:
        counted = count_words(read_words(spark, tmp_path / "in"), tmp_path, parallelism=4)
        writer = counted.writeStream.foreachBatch(use).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        assert query.awaitTermination(WAIT_S)

    with pytest.raises(PySparkException, match="FLOWKEYED_INCOMPLETE") as caught:
        run(look)
    names = re.search(r"remove (commits/\d+) and (offsets/\d+)", str(caught.value))
    assert names is not None
    for name in names.groups():
        path = tmp_path / "checkpoint" / name
        path.unlink()
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    run(keep)

    assert sorted(found) == expected_counts(everything)
