"""A whole pipeline that the fault suite breaks: source, keyed operator, sink.

``python -m integration.faults.pipeline JSON`` goes on from wherever it was and prints ``jvm PID``
and a line for each batch. With ``drain`` it ends by itself when the source has no more.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import functions as sf

from flowspark import key_by
from flowstate import (
    CheckpointedFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    Reducer,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from integration.sessions import local_session, report_batches

THRESHOLD = 500
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"


class AuditedCount(KeyedProcessFunction[str, Any, tuple[str, int]], CheckpointedFunction):
    """Counts words in three kinds of keyed state, which must agree, and rows in operator state."""

    def open(self, ctx: Any) -> None:
        self.count = ctx.get_state(ValueStateDescriptor("count", int, default=0))
        self.sum = ctx.get_reducing_state(ReducingStateDescriptor("sum", Reducer.SUM, int))
        self.last = ctx.get_map_state(MapStateDescriptor("last", str, int))

    def initialize_state(self, ctx: Any) -> None:
        store = ctx.operator_state_store
        self.seen_state = store.get_list_state(ListStateDescriptor("seen", int))
        self.seen = sum(self.seen_state.get())

    def snapshot_state(self, ctx: Any) -> None:
        self.seen_state.update([self.seen])

    def process_element(self, value: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        n = self.count.value()
        found = (n, self.sum.get() or 0, self.last.get("n") or 0)
        if len(set(found)) != 1:
            raise AssertionError(f"the states of {value.word!r} disagree: {found}")
        self.count.update(n + 1)
        self.sum.add(1)
        self.last.put("n", n + 1)
        self.seen += 1
        yield value.word, n + 1


def main(given: dict[str, Any]) -> None:
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--driver-java-options '{SHORT_LIVED}' pyspark-shell"
    folder, parallelism = Path(given["folder"]), given["parallelism"]
    names = ("PYTHONPATH", "FLOW_FAULT_CONTROL")
    settings = {f"spark.executorEnv.{name}": os.environ[name] for name in names}
    if not given["master"].startswith("local["):
        settings["spark.executor.memory"] = "768m"
    spark = local_session("fault-suite", master=given["master"], settings=settings)
    report_batches(spark)
    lines = spark.readStream.format(given["source"]).options(**given["options"]).load()
    words = lines.select(sf.explode(sf.split(sf.col("value").cast("string"), " ")).alias("word"))
    counted = key_by(words, "word").process(
        AuditedCount(),
        "word string, n long",
        uid="count",
        state_location=folder / "state",
        working_folder=folder / "working",
        parallelism=parallelism,
    )
    writer = (
        counted.repartition(parallelism)
        .writeStream.format("flowbuffer")
        .option("path", str(folder / "out"))
        .option("threshold", THRESHOLD)
        .option("parallelism", parallelism)
        .option("checkpointLocation", str(folder / "checkpoint"))
    )
    if given["drain"]:
        writer = writer.trigger(availableNow=True)
    writer.start().awaitTermination()
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
