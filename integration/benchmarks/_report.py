"""What benchmarks share: rounds in rotated order, medians, and tables."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

ROUNDS = 5


def progress(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def heading(text: str) -> None:
    print(f"\n## {text}\n", flush=True)


def machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("pyarrow", "lmdb", "numpy"))
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, Python {platform.python_version()}, {packages}"


def medians(cases: Mapping[str, Callable[[], object]], *, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median seconds of each case: warmed, then in rotated order."""
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        cases[name]()
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            cases[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table; numbers to the right."""
    print("| " + " | ".join(columns) + " |")
    print("|" + "|".join("---" if i == 0 else "---:" for i in range(len(columns))) + "|")
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)
