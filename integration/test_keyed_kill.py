"""A word count whose processes are killed, into a sink that is exactly-once.

``FLOW_KILLS`` says how often the driver is killed, ``FLOW_SEED`` makes a run repeatable.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from integration.children import child
from integration.keyed.processes import executors_of
from integration.keyed.streams import expected_counts, random_words, write_words
from pyspark_flowbuffer.flush import flush

KILLS = int(os.environ.get("FLOW_KILLS", "2"))
JOB = "integration.keyed.job"

pytestmark = pytest.mark.spark


def write_input(folder: Path, files: int, seed: int, *, first: int = 0) -> list[str]:
    everything = []
    for number in range(first, first + files):
        words = random_words(50, seed + number)
        write_words(folder / "in", number, words)
        everything += words
    return everything


def emitted(folder: Path) -> list[tuple[str, int]]:
    """Return every row that the sink has published, after its buffers were flushed."""
    flush(str(folder / "checkpoint"))
    tables = [pq.read_table(file) for file in (folder / "out").glob("*.parquet")]
    return sorted(row for table in tables for row in zip(*table.to_pydict().values(), strict=True))


@pytest.mark.timeout(180 + 90 * KILLS)
def test_a_killed_driver_counts_each_word_once_at_changing_parallelism(tmp_path: Path) -> None:
    seed = int(os.environ.get("FLOW_SEED", random.randrange(1 << 30)))
    print(f"FLOW_SEED={seed}")
    chance = random.Random(seed)
    everything = write_input(tmp_path, 6 + 5 * KILLS, seed)
    killed_at = []
    log = tmp_path / "log"
    for number in range(KILLS):
        with child(JOB, tmp_path, (2, 5, 3, 1)[number % 4], log=log) as job:
            jvm = int(job.wait_for("jvm", 120).split()[1])
            line = job.wait_for("batch", 120)
            time.sleep(chance.uniform(0, 2))
            # The whole machine, or the JVM alone: then workers live on for a while.
            job.kill(chance.choice([None, jvm]))
            killed_at.append(line)
    with child(JOB, tmp_path, 3, log=log) as job:
        job.wait_for("done", 300)

    print(f"killed {len(killed_at)} times, after {killed_at}")
    assert emitted(tmp_path) == expected_counts(everything)


@pytest.mark.timeout(300)
def test_an_executor_that_is_killed_in_mid_batch_counts_nothing_twice(tmp_path: Path) -> None:
    everything = write_input(tmp_path, 10, 77)
    killed = 0
    with child(JOB, tmp_path, 3, "local-cluster[2,1,1024]", log=tmp_path / "log") as job:
        jvm = int(job.wait_for("jvm", 120).split()[1])
        while (line := job.next_line(180)) is not None and line != "done":
            if line in {"batch 2", "batch 5"}:
                executor = min(executors_of(jvm))
                time.sleep(0.1)
                job.kill(executor)
                killed += 1

    assert killed == 2
    assert emitted(tmp_path) == expected_counts(everything)
