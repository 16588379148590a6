"""What the tests of the source share: peers on loopback, readers, and waiting with an end."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from pyspark_flowsocket.options import SocketOptions
from pyspark_flowsocket.reader import SocketStreamReader

# How long a machine that does other things as well may take for what takes milliseconds.
WAIT_S = 60.0


def wait_for(condition: Callable[[], Any], *, timeout_s: float = WAIT_S) -> Any:
    """Return the first true value of a condition, or fail."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError("it did not come true in time")


def free_port() -> int:
    """Return a port that nobody has, and that the system gives to nobody who asks for any."""
    while True:
        # Those that the system chooses from begin above; one of them might be another test's by
        # the time it is used.
        port = random.randrange(15_000, 32_000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class Peer:
    """A server on loopback that a source connects to."""

    def __init__(self, port: int = 0) -> None:
        self.listening = socket.socket()
        self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listening.bind(("127.0.0.1", port))
        self.listening.listen()
        self.listening.settimeout(WAIT_S)
        self.port = int(self.listening.getsockname()[1])

    def accept(self) -> socket.socket:
        sock, _ = self.listening.accept()
        sock.settimeout(WAIT_S)
        return sock

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.listening.close()


def call(port: int) -> socket.socket:
    """Connect to a source that listens, as soon as it does."""

    def attempt() -> socket.socket | None:
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        except ConnectionRefusedError:
            return None
        return sock

    found = wait_for(attempt)
    assert isinstance(found, socket.socket)
    return found


def wait_hang_up(sock: socket.socket) -> None:
    """Wait until the source has ended a connection."""
    with suppress(ConnectionResetError):
        while sock.recv(4096):
            pass


def hear(sock: socket.socket, count: int = 1) -> list[bytes]:
    """Return the next lines that the source says."""
    data = b""
    while data.count(b"\n") < count:
        piece = sock.recv(1)
        if not piece:
            break
        data += piece
    return data.splitlines()


def options_of(folder: Path, port: int, **more: str) -> dict[str, str]:
    base = {
        "host": "127.0.0.1",
        "port": str(port),
        "statelocation": str(folder / "state"),
        "segmentinterval": "5ms",
        "storagetimeout": "5 seconds",
    }
    if more.get("mode") != "listen":
        base |= {"reconnectdelay": "20ms", "reconnectattempts": "5"}
    return base | {name.lower(): value for name, value in more.items()}


@contextmanager
def reading(folder: Path, port: int, **more: str) -> Iterator[SocketStreamReader]:
    reader = SocketStreamReader(SocketOptions.parse(options_of(folder, port, **more)))
    try:
        yield reader
    finally:
        reader.stop()


def latest(reader: SocketStreamReader, start: int = 0, limit: ReadLimit | None = None) -> int:
    return reader.latestOffset({"line": start}, limit or ReadAllAvailable())["line"]


def wait_until(reader: SocketStreamReader, line: int, start: int = 0) -> None:
    """Wait until so many lines are offered."""
    wait_for(lambda: latest(reader, start) >= line)


def table(reader: SocketStreamReader, start: int, end: int) -> pa.Table:
    """Read a range as executors would."""
    parts = reader.partitions({"line": start}, {"line": end})
    batches = [batch for part in parts for batch in reader.read(part)]
    return pa.Table.from_batches(batches) if batches else pa.table({"value": pa.array([], "str")})


def lines(reader: SocketStreamReader, start: int, end: int) -> list[str]:
    values: list[str] = table(reader, start, end)["value"].to_pylist()
    return values


def received(reader: SocketStreamReader, count: int) -> list[str]:
    """Wait for so many lines since the beginning, and return them."""
    wait_for(lambda: latest(reader) >= count)
    return lines(reader, 0, latest(reader))


def report(reader: SocketStreamReader) -> dict[str, Any]:
    found = reader.reportLatestOffset()
    assert found is not None
    return found


def write_lines(path: Path, count: int, *, end: str = "\n") -> list[str]:
    expected = [f"line {number} é" for number in range(count)]
    path.write_text("\n".join(expected) + (end if expected else ""), encoding="utf-8")
    return expected
