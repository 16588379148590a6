"""The command ``flow`` on what a real query has left, and beside a real broker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from flowspark import key_by
from integration.kafka.cluster import Cluster
from integration.keyed.functions import COUNT, COUNTED, WordCount

pytestmark = pytest.mark.spark

TIMEOUT_S = 120


def flow(*arguments: object) -> tuple[int, Any]:
    """Run a command in a process of its own, and return its exit code and what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "flowspark.command", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_a_stopped_query_is_inspected_verified_and_flushed(
    spark: SparkSession, tmp_path: Path
) -> None:
    numbers, out, checkpoint = (str(tmp_path / name) for name in ("numbers", "out", "checkpoint"))
    spark.range(1000).write.json(numbers)
    stream = spark.readStream.schema("id long").json(numbers).repartition(2)
    sink = stream.writeStream.format("flowbuffer").option("path", out).option("threshold", 300)
    query = sink.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()

    code, inspected = flow("inspect", checkpoint)
    (operator,) = inspected["operators"]
    assert (code, operator["query"], operator["uid"]) == (0, str(query.id), "flowbuffer")
    assert [(state["name"], state["count"]) for state in operator["states"]] == [("buffer", 400)]
    code, shown = flow("show", checkpoint, "--state", "buffer", "--limit", 0)
    waiting = {row["id"] for subtask in shown["subtasks"] for row in subtask["elements"]}
    published = {row.id for row in spark.read.parquet(out).collect()}
    assert waiting | published == set(range(1000))
    assert not waiting & published
    code, rescaled = flow("rescale", "--dry-run", checkpoint, "--parallelism", 3)
    elements = [share["elements"] for share in rescaled["operators"][0]["after"]]
    assert elements == [134, 133, 133]

    code, flushed = flow("flush", checkpoint)
    assert (code, flushed["rows"]) == (0, 400)
    assert spark.read.parquet(out).count() == 1000
    assert flow("verify", checkpoint)[0] == 0
    assert flow("sweep", checkpoint, "--yes")[0] == 0
    assert flow("report", checkpoint, "--out", tmp_path / "report.html")[0] == 0


def test_keyed_state_of_a_query_is_shown_up_to_its_sealed_checkpoint(
    spark: SparkSession, tmp_path: Path
) -> None:
    words, state = str(tmp_path / "words"), str(tmp_path / "state")
    for parallelism in (2, 2, 3):
        rows = [(word,) for word in ("to", "be", "or", "not", "to", "be")]
        spark.createDataFrame(rows, "word string").write.mode("append").json(words)
        counted = key_by(spark.readStream.schema("word string").json(words), "word").process(
            WordCount(), COUNTED, uid="wc", state_location=state, parallelism=parallelism
        )
        sink = counted.writeStream.format("parquet").option("path", str(tmp_path / "out"))
        sink = sink.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = sink.trigger(availableNow=True).start()
        query.awaitTermination()

    # The third batch has no record before a fourth makes it.
    code, inspected = flow("inspect", state)
    (operator,) = inspected["operators"]
    assert (code, operator["query"], operator["uid"]) == (0, str(query.id), "wc")
    assert [one["checkpoint_id"] for one in operator["checkpoints"]] == [1, 2]
    assert [one["checkpoint_id"] for one in operator["unsealed"]] == [3]
    _, shown = flow("show", state, "--state", COUNT.name, "--limit", 0)
    counts = {entry["key"]: entry["value"] for entry in shown["entries"]}
    assert counts == {"to": 4, "be": 4, "or": 2, "not": 2}
    _, shown = flow("show", state, "--state", COUNT.name, "--key", "to")
    assert [entry["value"] for entry in shown["entries"]] == [4]
    assert flow("verify", state)[0] == 0
    root = f"{state}/{query.id}/wc"
    code, found = flow("diff", f"{root}/chk-1", f"{root}/chk-2", "--limit", 0)
    changed = {one["state"]: one["changed"] for one in found["difference"]["states"]}
    assert (code, changed[COUNT.name]) == (1, 4)


def test_the_doctor_finds_a_real_broker(kafka: Cluster, tmp_path: Path) -> None:
    address = kafka.address

    code, examined = flow("doctor", "--kafka", address, "--state", tmp_path)
    verdicts = {check["what"]: check["verdict"] for check in examined["checks"]}
    assert verdicts[f"broker {address}"] == "ok"
    assert verdicts["state location"] == "ok"
    assert verdicts["java"] == "ok"
    assert code == (1 if "fail" in verdicts.values() else 0)
