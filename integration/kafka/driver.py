"""A driver in a process of its own, so that it can be killed, or its whole output be searched.

Its one argument is JSON. It writes each micro-batch to one file, replacing what an earlier attempt
at that batch wrote: a sink that may be written to twice.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from integration.sessions import local_session


def main(settings: dict[str, Any]) -> None:
    spark = local_session("driver")
    spark.sparkContext.setLogLevel(settings.get("log_level", "ERROR"))
    frame = spark.readStream.format("flowkafka").options(**settings["options"]).load()
    if settings.get("explain"):
        spark.read.format("flowkafka").options(**settings["options"]).load().explain(True)
    folder = Path(settings["output"])
    folder.mkdir(parents=True, exist_ok=True)

    def write(batch: DataFrame, number: int) -> None:
        rows = batch.selectExpr("partition", "offset", "string(value)").collect()
        part = folder / f"{number}.part"
        part.write_text(json.dumps([list(row) for row in rows]))
        part.replace(folder / f"{number}.json")
        print("batch", number, flush=True)

    writer = frame.writeStream.foreachBatch(write)
    writer = writer.option("checkpointLocation", settings["checkpoint"])
    if settings["ends"]:
        query = writer.trigger(availableNow=True).start()
    else:
        query = writer.start()
    query.awaitTermination()
    print("progress", query.lastProgress, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
