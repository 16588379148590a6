"""The keyed operator on clusters, and through Spark Connect."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.children import child
from integration.keyed.processes import standalone_cluster
from integration.keyed.streams import expected_counts
from integration.test_keyed_kill import JOB, emitted, write_input

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def test_a_standalone_cluster_loses_a_worker_and_counts_each_word_once(tmp_path: Path) -> None:
    everything = write_input(tmp_path, 9, 5)
    with standalone_cluster(tmp_path / "cluster", workers=2) as cluster:
        with child(JOB, tmp_path, 2, cluster.url, log=tmp_path / "log") as job:
            while (line := job.next_line(180)) is not None and line != "done":
                if line == "batch 3":
                    cluster.kill_worker(0)
        assert line == "done", (tmp_path / "log").read_text()[-3000:]

    assert emitted(tmp_path) == expected_counts(everything)


def test_a_task_that_two_attempts_run_at_once_counts_once(tmp_path: Path) -> None:
    everything = write_input(tmp_path, 4, seed=21)
    slow = {"FLOW_SLOW": everything[60]}
    log = tmp_path / "log"
    with (
        standalone_cluster(tmp_path / "cluster", workers=2) as cluster,
        child(JOB, tmp_path, 2, cluster.url, log=log, environment=slow) as job,
    ):
        job.wait_for("done", 240)

    assert (tmp_path / "second").exists()
    assert not (tmp_path / "alone").exists(), "there was no second attempt"
    assert emitted(tmp_path) == expected_counts(everything)


def test_a_query_through_spark_connect_counts_alike(tmp_path: Path) -> None:
    everything = []
    for parallelism in (2, 3):
        everything += write_input(tmp_path, 2, seed=parallelism, first=2 * parallelism)
        with child(JOB, tmp_path, parallelism, "connect", log=tmp_path / "log") as job:
            job.wait_for("done", 180)

    assert emitted(tmp_path) == expected_counts(everything)
