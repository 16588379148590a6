"""Commands of ``flow``, called as a shell would, in this process or in one of their own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspark.command.main import run
from flowspark.command.terminal import Terminal

TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def words(self, beginning: str) -> list[str]:
        """Return the words of the only line of the output that begins so."""
        (line,) = (
            line
            for line in self.out.splitlines()
            if line.split()[: len(beginning.split())] == beginning.split()
        )
        return line.split()


def flow(*arguments: object, **terminal: Any) -> Result:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        try:
            code = run([str(one) for one in arguments], Terminal(out=out, err=err, **terminal))
        except SystemExit as end:  # So argparse ends what it does not understand.
            code = int(end.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def environment(**changes: str) -> dict[str, str]:
    """Return that of a shell: Python buffers its output, and colours are not forced."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PYTHONUNBUFFERED", "NO_COLOR", "TERM"}
    }
    return {**kept, **changes}


def flow_process(
    *arguments: object, cwd: Path | None = None, python: Sequence[str] = (), **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    return subprocess.run(
        [sys.executable, *python, "-m", "flowspark.command", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=cwd,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
    )
