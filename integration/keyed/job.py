"""A word count that tests kill: files of words, a keyed operator, ``flowbuffer``.

``python -m integration.keyed.job FOLDER PARALLELISM [MASTER]`` goes on from wherever it was, prints
``jvm PID`` and a line for each batch, and ends by itself when all files are through. The master
``connect`` is a Spark Connect server in this process's stead. With ``FLOW_SLOW`` in the environment
the first task with that word waits for the second attempt that Spark then starts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from integration.keyed.functions import WaitsForAnotherAttempt, WordCount
from integration.keyed.streams import count_words, read_words
from integration.sessions import local_session, report_batches

THRESHOLD = 30
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "500ms",
    "spark.speculation.quantile": "0.5",
}


def session(master: str) -> SparkSession:
    # Executors of a cluster run in folders of their own.
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    os.environ["PYTHONPATH"] = path
    if master == "connect":
        os.environ["PYSPARK_PYTHON"] = sys.executable
        return SparkSession.builder.remote("local[2]").getOrCreate()
    cluster = {"spark.executorEnv.PYTHONPATH": path, "spark.executor.memory": "768m"}
    if "FLOW_SLOW" in os.environ:
        cluster |= SPECULATION
    settings = {} if master.startswith("local[") else cluster
    spark = local_session("keyed-job", master=master, settings=settings)
    report_batches(spark)
    return spark


def main(folder: Path, parallelism: int, master: str) -> None:
    spark = session(master)
    working = folder / "working"
    slow = os.environ.get("FLOW_SLOW")
    counted = count_words(
        read_words(spark, folder / "in"),
        folder,
        WaitsForAnotherAttempt(folder, slow) if slow else WordCount(),
        parallelism=parallelism,
        working_folder=working,
    )
    query = (
        counted.repartition(parallelism)
        .writeStream.format("flowbuffer")
        .option("path", str(folder / "out"))
        .option("threshold", THRESHOLD)
        .option("parallelism", parallelism)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "local[2,3]")
