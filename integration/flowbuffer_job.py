"""A query that tests kill: JSON files, one in each batch, into ``flowbuffer``.

``python -m integration.flowbuffer_job FOLDER PARTITIONS PARALLELISM`` goes on from wherever it was,
prints ``jvm PID`` and a line for each batch, and ends by itself when all files are through.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from integration.sessions import local_session, report_batches

THRESHOLD = 40
ROWS_PER_FILE = 100


def write_input(folder: Path, files: int) -> list[int]:
    """Write the input files, and return all their rows."""
    folder.mkdir(parents=True)
    for number in range(files):
        first = number * ROWS_PER_FILE
        lines = [f'{{"id": {row}}}\n' for row in range(first, first + ROWS_PER_FILE)]
        (folder / f"{number:05d}.json").write_text("".join(lines))
    return list(range(files * ROWS_PER_FILE))


def read_input(spark: SparkSession, folder: Path) -> DataFrame:
    reader = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1)
    return reader.json(str(folder))


def main(folder: Path, partitions: int, parallelism: int) -> None:
    spark = local_session("flowbuffer-job")
    report_batches(spark)
    writer = (
        read_input(spark, folder / "in")
        .repartition(partitions)
        .writeStream.format("flowbuffer")
        .option("path", str(folder / "out"))
        .option("threshold", THRESHOLD)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
    )
    if parallelism:
        writer = writer.option("parallelism", parallelism)
    writer.start().awaitTermination()
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
