"""A driver that is killed at random times, again and again. ``FLOW_KILLS`` says how often."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from integration.keyed.processes import readers_of
from pyspark_flowsocket.send import FileSender

KILLS = int(os.environ.get("FLOW_KILLS", "2"))
SEED = int(os.environ.get("FLOWSOCKET_SEED", "5"))
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300 + 120 * KILLS)]
ROOT = Path(__file__).parents[1]


class Driver:
    """A query in processes of its own: Python, the JVM, and what the JVM starts."""

    def __init__(self, folder: Path, run: int, options: dict[str, str]) -> None:
        given = {
            "run": run,
            "out": str(folder / "out"),
            "checkpoint": str(folder / "checkpoint"),
            "options": {"stateLocation": str(folder / "state"), "host": "127.0.0.1", **options},
        }
        self._log = open(folder / f"driver-{run}.log", "w")  # noqa: SIM115 (closed in kill)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "integration.flowsocket_driver", json.dumps(given)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.strip(), (folder / f"driver-{run}.log").read_text()[-3000:]
        self.jvm = int(line)

    def reader(self) -> int | None:
        """Return the process that holds the reader."""
        return next(iter(readers_of(self.jvm)), None)

    def kill(self) -> None:
        for pid in (self.jvm, self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


@contextmanager
def running(folder: Path, run: int, options: dict[str, str]) -> Iterator[Driver]:
    driver = Driver(folder, run, options)
    try:
        yield driver
    finally:
        driver.kill()


def wait_for(
    condition: Callable[[], Any], driver: Driver, folder: Path, *, timeout_s: float = 120
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert driver.process.poll() is None, newest_log(folder)
        assert time.monotonic() < deadline, newest_log(folder)
        time.sleep(0.02)


def newest_log(folder: Path) -> str:
    logs = sorted(folder.glob("driver-*.log"))
    return logs[-1].read_text()[-5000:]


def outputs(folder: Path) -> dict[int, dict[int, pa.Table]]:
    """Return what each run has written of each batch, sorted, because tasks have no order."""
    found: dict[int, dict[int, pa.Table]] = {}
    for path in sorted((folder / "out").glob("[0-9]*.arrow")):
        batch, run = (int(part) for part in path.stem.split("-"))
        found.setdefault(batch, {})[run] = rows_of(path)
    return found


@cache
def rows_of(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_stream(file).read_all().sort_by("value")


def check_replays(found: dict[int, dict[int, pa.Table]]) -> int:
    """Check that a batch that ran again had the same rows, and return how often that was."""
    replays = 0
    for runs in found.values():
        first, *others = runs.values()
        for other in others:
            assert other.equals(first)
            replays += 1
    return replays


def row_count(folder: Path) -> int:
    time.sleep(0.1)
    return sum(list(runs.values())[-1].num_rows for runs in outputs(folder).values())


def more_than(folder: Path, batches: int) -> Callable[[], bool]:
    return lambda: len(list((folder / "out").glob("[0-9]*"))) > batches


def lines_of(found: dict[int, dict[int, pa.Table]]) -> list[str]:
    return [
        line for runs in found.values() for line in list(runs.values())[-1]["value"].to_pylist()
    ]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def new_folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path


def report(name: str, **figures: object) -> None:
    print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))


def test_with_the_protocol_every_line_is_there_once_after_kills(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    count = 150_000 * (KILLS + 1)
    (folder / "lines").write_text("".join(f"line {n}\n" for n in range(count)))
    port = free_port()
    rng = random.Random(SEED)
    sender = Sender(folder / "lines", port)
    options = {
        "mode": "listen",
        "protocol": "ack",
        "port": str(port),
        "includeTimestamp": "true",
        # The sender is to be in the middle of the file at each kill, so the spool is small.
        "segmentBytes": "64k",
        "maxSpoolBytes": "512k",
        "maxRowsPerTrigger": "20000",
        "connectTimeout": "30 seconds",
    }
    try:
        for run in range(KILLS):
            parallel = {"numPartitions": str(1 + run % 3)}
            with running(folder, run, options | parallel) as driver:
                seen = len(list((folder / "out").glob("[0-9]*")))
                wait_for(more_than(folder, seen), driver, folder)
                time.sleep(rng.random() * 1.5)
        with running(folder, KILLS, options) as driver:
            wait_for(lambda: row_count(folder) >= count, driver, folder)
            time.sleep(0.5)
    finally:
        sender.stop()

    found = outputs(folder)
    report(
        "ack",
        kills=KILLS,
        batches=len(found),
        lines=count,
        replays=check_replays(found),
        connections=sender.connections,
    )
    assert sorted(lines_of(found)) == sorted(f"line {n}" for n in range(count))


class Sender:
    """Sends a file while drivers come and go."""

    def __init__(self, path: Path, port: int) -> None:
        self._sender = FileSender(
            str(path), "127.0.0.1", port, attempts=10_000, delay_s=0.1, show=self._pace
        )
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(InterruptedError):
            self._sender.run()

    def _pace(self, progress: object) -> None:
        if self._is_stopped:
            raise InterruptedError

    def stop(self) -> None:
        self._is_stopped = True
        self._thread.join(5)

    @property
    def connections(self) -> int:
        return self._sender.progress.connections


class PlainPeer:
    """A server that sends numbered lines to whoever connects, for as long as it is connected."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.2)
        self.port = int(self._listening.getsockname()[1])
        self.connections = 0
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        senders = []
        while not self._is_stopped:
            with suppress(TimeoutError):
                sock, _ = self._listening.accept()
                sender = threading.Thread(target=self._send, args=(sock, self.connections))
                sender.start()
                senders.append(sender)
                self.connections += 1
        for sender in senders:
            sender.join(5)
        self._listening.close()

    def _send(self, sock: socket.socket, connection: int) -> None:
        number = 0
        with suppress(OSError), sock:
            sock.settimeout(1.0)
            while not self._is_stopped:
                text = "".join(f"{connection:03d} {number + n:08d}\n" for n in range(200))
                with suppress(TimeoutError):
                    sock.sendall(text.encode())
                    number += 200
                time.sleep(0.01)

    def stop(self) -> None:
        self._is_stopped = True
        self._thread.join(10)


def test_with_a_plain_sender_every_line_of_an_offset_is_replayed_equal(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    peer = PlainPeer()
    rng = random.Random(SEED + 1)
    options = {
        "port": str(peer.port),
        "includeTimestamp": "true",
        "includeSource": "true",
        "reconnectDelay": "50ms",
        "segmentInterval": "20ms",
    }
    stopped: list[int] = []
    try:
        for run in range(KILLS + 1):
            parallel = {"numPartitions": str(1 + run % 3)}
            with running(folder, run, options | parallel) as driver:
                # The reader of the run before wakes up when the next one has the spool.
                seen = len(list((folder / "out").glob("[0-9]*")))
                wait_for(more_than(folder, seen), driver, folder)
                while stopped:
                    os.kill(stopped.pop(), signal.SIGCONT)
                time.sleep(rng.random() * 1.5)
                reader = driver.reader()
                if run < KILLS and run % 2 == 0 and reader is not None:
                    os.kill(reader, signal.SIGSTOP)
                    stopped.append(reader)
    finally:
        peer.stop()
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    found = outputs(folder)
    replays = check_replays(found)
    lines = lines_of(found)
    report(
        "plain",
        kills=KILLS,
        batches=len(found),
        lines=len(lines),
        replays=replays,
        connections=peer.connections,
    )
    assert len(lines) == len(set(lines))
    # Of each connection a beginning without a hole: what came later was never offered.
    by_connection: dict[str, list[int]] = {}
    for line in lines:
        connection, number = line.split(" ")
        by_connection.setdefault(connection, []).append(int(number))
    for numbers in by_connection.values():
        assert sorted(numbers) == list(range(len(numbers)))
