"""The query of the demo; ``__main__`` starts it, kills it, and starts it again.

Lines come from ``flowsocket`` or ``flowkafka``, ``key_by(...).process(...)`` counts their words
with state per key, and ``flowbuffer`` writes the counts to files of a fixed size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import functions as sf

from flowspark import key_by
from flowstate import KeyedProcessFunction, ValueStateDescriptor
from integration.sessions import local_session, report_batches

THRESHOLD = 1000


class WordCount(KeyedProcessFunction[str, Any, tuple[str, int]]):
    """Emits each word with how often it has come so far."""

    def open(self, ctx: Any) -> None:
        self.count = ctx.get_state(ValueStateDescriptor("wordCountState", int, default=0))

    def process_element(self, value: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        n = self.count.value() + 1
        self.count.update(n)
        yield value.word, n


def main(given: dict[str, Any]) -> None:
    folder, parallelism = Path(given["folder"]), given["parallelism"]
    spark = local_session("flowspark-demo")
    report_batches(spark)

    lines = spark.readStream.format(given["source"]).options(**given["options"]).load()
    words = lines.select(sf.explode(sf.split(sf.col("value").cast("string"), " ")).alias("word"))
    counts = key_by(words, "word").process(
        WordCount(),
        "word string, n long",
        uid="word-count",
        state_location=folder / "state",
        working_folder=folder / "working",
        parallelism=parallelism,
    )
    query = (
        counts.repartition(parallelism)
        .writeStream.format("flowbuffer")
        .option("path", str(folder / "out"))
        .option("threshold", THRESHOLD)
        .option("parallelism", parallelism)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(**({"availableNow": True} if given["drain"] else {"processingTime": "0 seconds"}))
        .start()
    )
    query.awaitTermination()
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
