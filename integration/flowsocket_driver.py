"""A query on ``flowsocket`` in a process of its own, so that a test can kill it.

It writes what each batch has, as one Arrow file per batch and run: ``<out>/<batch>-<run>.arrow``.
A file is there as a whole or not at all, and a batch that runs again writes another one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from integration.sessions import local_session

# Short lives: a compiler and a collector that begin quickly, instead of ones that end up fast.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"


def main(given: dict[str, Any]) -> None:
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--driver-java-options '{SHORT_LIVED}' pyspark-shell"
    spark = local_session("flowsocket-driver", master="local[2]")
    out = Path(given["out"])

    def write(batch: DataFrame, batch_id: int) -> None:
        table = batch.toArrow()
        name = f"{batch_id:06d}-{given['run']:03d}.arrow"
        with (
            pa.OSFile(str(out / f".{name}"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
        os.rename(out / f".{name}", out / name)

    query = (
        spark.readStream.format("flowsocket")
        .options(**given["options"])
        .load()
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", given["checkpoint"])
        .start()
    )
    jvm = spark._jvm
    assert jvm is not None
    print(jvm.java.lang.ProcessHandle.current().pid(), flush=True)
    query.awaitTermination()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
