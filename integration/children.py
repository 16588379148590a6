"""Child processes that tests watch and kill; none of them outlives its test."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


class Child:
    """A Python process in a group of its own, with the lines that it prints."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def _collect(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._lines.put(line.strip())
        self._lines.put(None)

    def next_line(self, timeout_s: float) -> str | None:
        """Return what it prints next; None when it has ended."""
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(
                f"nothing was printed for {timeout_s} s: {self.errors()[-3000:]}"
            ) from None

    def wait_for(self, start: str, timeout_s: float) -> str:
        """Return the next line that begins so."""
        while (line := self.next_line(timeout_s)) is not None:
            if line.startswith(start):
                return line
        raise AssertionError(f"it ended without {start!r}: {self.errors()[-3000:]}")

    def errors(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self, pid: int | None = None) -> None:
        """Kill one of its processes, or all, as a power failure would."""
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=60)
        self._reader.join(timeout=60)

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout=timeout_s)


@contextmanager
def child(
    module: str, *arguments: object, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Child]:
    """Run a module of the repository in a process of its own, with some variables more."""
    with log.open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", module, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            cwd=Path(__file__).parents[1],
            env={**os.environ, **(environment or {})},
        )
        running = Child(process, log)
        try:
            yield running
        finally:
            running.kill()
