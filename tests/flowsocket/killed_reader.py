"""Drives a reader as Spark does, in a process that a test kills: ``python -m ... FOLDER OPTIONS``.

As Spark: the end of a batch is logged before the batch runs; a batch without a commit runs again
with the same offsets, before anything else is asked; a commit is told to the source later.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadMaxRows

from pyspark_flowsocket.options import SocketOptions
from pyspark_flowsocket.reader import SocketStreamReader


def write(path: Path, text: str) -> None:
    path.with_suffix(".tmp").write_text(text)
    os.rename(path.with_suffix(".tmp"), path)


def run_batch(
    reader: SocketStreamReader, folder: Path, batch: int, offsets: dict[str, Any], run: str
) -> None:
    parts = reader.partitions(offsets["start"], offsets["end"])
    batches = [found for part in parts for found in reader.read(part)]
    name = f"{batch:06d}-{run}.arrow"
    if batches:
        with (
            pa.OSFile(str(folder / "out" / f".{name}"), "wb") as file,
            pa.ipc.new_stream(file, batches[0].schema) as writer,
        ):
            for found in batches:
                writer.write_batch(found)
        os.rename(folder / "out" / f".{name}", folder / "out" / name)
    # A batch that has run and is not committed is the one to run again, so there is time for that.
    time.sleep(0.03)
    write(folder / "commits" / f"{batch:06d}", "")


def main(folder: Path, options: dict[str, str], run: str) -> None:
    reader = SocketStreamReader(SocketOptions.parse(options))
    logged = sorted((folder / "offsets").glob("*[0-9]"))
    batch, end = 0, None
    if logged:
        batch = int(logged[-1].name)
        offsets = json.loads(logged[-1].read_text())
        if not (folder / "commits" / f"{batch:06d}").exists():
            run_batch(reader, folder, batch, offsets, run)
        batch, end = batch + 1, offsets["end"]
    start = end or reader.initialOffset()
    while True:
        end = reader.latestOffset(start, ReadMaxRows(20_000))
        if end == start:
            continue
        write(folder / "offsets" / f"{batch:06d}", json.dumps({"start": start, "end": end}))
        if batch:
            reader.commit(start)
        run_batch(reader, folder, batch, {"start": start, "end": end}, run)
        batch, start = batch + 1, end


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
