"""The process of the reader is killed at random times, again and again: ``FLOW_KILLS``."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from pyspark_flowsocket.send import FileSender

from .peers import free_port, options_of, wait_for

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("FLOW_KILLS", "4"))
SEED = int(os.environ.get("FLOWSOCKET_SEED", "11"))

pytestmark = pytest.mark.timeout(300 + 10 * KILLS)


def start(folder: Path, options: dict[str, str], run: str) -> subprocess.Popen[bytes]:
    arguments = [str(folder), json.dumps(options), run]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.flowsocket.killed_reader", *arguments],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )


def files_of(folder: Path) -> dict[int, list[Path]]:
    found: dict[int, list[Path]] = {}
    for path in sorted((folder / "out").glob("[0-9]*.arrow")):
        found.setdefault(int(path.name.split("-")[0]), []).append(path)
    return found


def rows_of(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_stream(file).read_all().combine_chunks()


def test_every_line_of_a_sender_with_the_protocol_is_there_once(tmp_path: Path) -> None:
    for name in ("out", "offsets", "commits"):
        (tmp_path / name).mkdir()
    count = 100_000 * (KILLS + 1)
    (tmp_path / "lines").write_text("".join(f"line {n:09d}\n" for n in range(count)))
    port = free_port()
    options = options_of(
        tmp_path,
        port,
        mode="listen",
        protocol="ack",
        includeTimestamp="true",
        segmentBytes="64k",
        maxSpoolBytes="512k",
        uid="killed",
    )
    sender = FileSender(str(tmp_path / "lines"), "127.0.0.1", port, attempts=10_000, delay_s=0.02)
    thread = threading.Thread(target=sender.run, daemon=True)
    thread.start()
    rng = random.Random(SEED)
    for run in range(KILLS):
        parts = {"numpartitions": str(1 + run % 3)}
        process = start(tmp_path, options | parts, f"{run:03d}")
        try:
            before = len(files_of(tmp_path)), sender.progress.connections
            wait_for(lambda least=before: is_beyond(least, tmp_path, sender, thread), timeout_s=120)  # type: ignore[misc]
            time.sleep(rng.random() * 0.15)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(60)
    process = start(tmp_path, options, "last")
    try:
        thread.join(120)
        wait_for(lambda: (tmp_path / "out").exists() and rows_in(tmp_path) == count, timeout_s=60)
    finally:
        process.kill()
        process.wait(60)

    replays = 0
    values: list[pa.Array] = []
    for paths in files_of(tmp_path).values():
        first, *others = [rows_of(path) for path in paths]
        # The same offsets in another life, at another parallelism: byte for byte the same.
        assert all(other.equals(first) for other in others)
        replays += len(others)
        values += first["value"].chunks
    found = pa.chunked_array(values).to_pylist()
    sys.stdout.write(
        f"\nkills {KILLS}, lines {count}, batches {len(files_of(tmp_path))}, replays {replays}, "
        f"connections {sender.progress.connections}\n"
    )
    assert found == [f"line {n:09d}" for n in range(count)]
    assert sender.progress.connections > KILLS // 2


def is_beyond(
    least: tuple[int, int], folder: Path, sender: FileSender, thread: threading.Thread
) -> bool:
    """Tell whether there is a new batch, and the sender is there again, which waits ever longer."""
    batches, connections = least
    is_back = sender.progress.connections > connections or not thread.is_alive()
    return len(files_of(folder)) > batches and is_back


def rows_in(folder: Path) -> int:
    total = 0
    with suppress(OSError, pa.ArrowInvalid):
        total = sum(rows_of(paths[0]).num_rows for paths in files_of(folder).values())
    return total
