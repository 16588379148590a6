"""Spark sessions for tests, jobs of tests and benchmarks: local, on loopback, quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

FILE_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)


def local_session(
    name: str,
    *,
    master: str = "local[2,3]",
    settings: Mapping[str, str] | None = None,
    **config: str,
) -> SparkSession:
    """Start Spark in this process; a task may fail twice before its job does.

    A setting may be given as ``spark_a_b`` for ``spark.a.b``, or else by its name in ``settings``.
    """
    # Without these the workers may be another Python than the one that has our packages.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master(master)
        .appName(name)
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        # The two settings that halve a micro-batch with Python in it.
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.sql.streaming.checkpointFileManagerClass", FILE_MANAGER)
    )
    for key, value in config.items():
        builder = builder.config(key.replace("_", "."), value)
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


class _Progress(StreamingQueryListener):
    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        print(f"batch {event.progress.batchId}", flush=True)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        pass


def report_batches(spark: SparkSession) -> None:
    """Print ``jvm PID``, and a line for each micro-batch, for a test that watches and kills."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    print(f"jvm {jvm.java.lang.ProcessHandle.current().pid()}", flush=True)
    spark.streams.addListener(_Progress())
