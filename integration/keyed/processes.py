"""What processes a cluster consists of, and a standalone cluster of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark

_WAIT_S = 180


def executors_of(jvm: int) -> list[int]:
    """Return the executors that a driver's JVM, or a worker, has started."""
    return [pid for pid in _children_of(jvm) if b"CoarseGrainedExecutorBackend" in _command(pid)]


def python_workers_of(jvm: int) -> list[int]:
    """Return the processes that run Python tasks, of a JVM and of its executors."""
    found = []
    for parent in [jvm, *executors_of(jvm)]:
        for daemon in _children_of(parent):
            if b"pyspark.daemon" in _command(daemon):
                found += _children_of(daemon)
    return found


def readers_of(jvm: int) -> list[int]:
    """Return the processes in which a driver keeps the readers of its Python sources."""
    return [pid for pid in _children_of(jvm) if b"streaming_source_runner" in _command(pid)]


def _children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, IndexError, ValueError):
            # The fields behind the name in parentheses: the state, then the parent.
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class StandaloneCluster:
    """A master and workers of one core each, on the loopback interface."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.workers: list[int] = []
        self.url = ""

    def start(self, workers: int) -> None:
        log = self._start("master", "org.apache.spark.deploy.master.Master", "--port", "0")
        self.url = self._wait_for(log, r"Starting Spark master at (spark://\S+)")
        for number in range(workers):
            # Of two names: Spark does not try a task twice at once on one host.
            self.add_worker(f"worker-{number}", ("127.0.0.1", "localhost")[number % 2])

    def add_worker(self, name: str, host: str = "127.0.0.1") -> None:
        limits = ["-c", "1", "-m", "1g", "-d", str(self._folder / name), "--host", host]
        log = self._start(name, "org.apache.spark.deploy.worker.Worker", *limits, self.url)
        self.workers.append(self._processes[-1].pid)
        self._wait_for(log, r"(Successfully registered with master)")

    def kill_worker(self, place: int) -> None:
        """Kill a worker and its executors, as when a machine goes down."""
        worker = self.workers.pop(place)
        for pid in [*executors_of(worker), worker]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        for process in reversed(self._processes):
            for pid in executors_of(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait(30)

    def _start(self, name: str, main: str, *arguments: str) -> Path:
        home = Path(pyspark.__file__).parent
        log = self._folder / f"{name}.log"
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        }
        command = [str(home / "bin/spark-class"), main, "--host", "127.0.0.1", "--webui-port", "0"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *arguments], stdout=output, stderr=output, env=environment
            )
        self._processes.append(process)
        return log

    def _wait_for(self, log: Path, pattern: str) -> str:
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            if (found := re.search(pattern, log.read_text(errors="replace"))) is not None:
                return found[1]
            time.sleep(0.1)
        raise AssertionError(f"{pattern!r} is not in {log}: {log.read_text()[-2000:]}")


@contextmanager
def standalone_cluster(folder: Path, workers: int) -> Iterator[StandaloneCluster]:
    cluster = StandaloneCluster(folder)
    try:
        cluster.start(workers)
        yield cluster
    finally:
        cluster.stop()
