"""What benchmarks share: rounds in rotated order, medians, and tables."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from integration.benchmarks._plots import bars, plotted_column

ROUNDS = 5
_PLOT = "(plot)"

DOCUMENTS = Path(__file__).parents[2] / "build" / "benchmarks"


class _Report:
    """What has been printed since the last ``save_report``, for a document."""

    def __init__(self) -> None:
        self.title = ""
        self.lines: list[str] = []
        self.plots: list[str] = []


_report = _Report()


def save_report(name: str) -> Path:
    """Write what a benchmark has printed as a document with plots, and begin anew."""
    global _report
    done, _report = _report, _Report()
    images = DOCUMENTS / "images"
    images.mkdir(parents=True, exist_ok=True)
    for old in images.glob(f"{name}-*.svg"):
        old.unlink()
    lines = [
        f"# Figures of `make bench NAME={name}`",
        "",
        f"Written by the benchmark itself on {time.strftime('%Y-%m-%d')}: {machine()}. What they "
        f"mean, and what was aimed at: `docs/benchmarks.md`. Ratios are worth something, "
        f"absolute times are those of one machine on one day; its load at the end was "
        f"{os.getloadavg()[1]:.1f}.",
    ]
    plots = iter(enumerate(done.plots, 1))
    for line in done.lines:
        if line != _PLOT:
            lines.append(line)
            continue
        number, plot = next(plots)
        (images / f"{name}-{number}.svg").write_text(plot)
        lines += ["", f"![the same as bars](images/{name}-{number}.svg)"]
    document = DOCUMENTS / f"{name}.md"
    document.write_text("\n".join(lines) + "\n")
    return document


def progress(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def heading(text: str) -> None:
    _report.title = text
    _report.lines += ["", f"## {text}", ""]
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
    lines = ["| " + " | ".join(columns) + " |"]
    lines.append("|" + "|".join("---" if i == 0 else "---:" for i in range(len(columns))) + "|")
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    print("\n".join(lines), flush=True)
    _report.lines += lines
    place = plotted_column(columns, rows)
    if place is not None:
        title = f"{_report.title}: {columns[place]}" if columns[place] else _report.title
        _report.plots.append(bars(title, [str(row[0]) for row in rows], [r[place] for r in rows]))
        _report.lines.append(_PLOT)
