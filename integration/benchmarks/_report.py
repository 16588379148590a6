"""What benchmarks share: rounds in rotated order, medians, aims, tables, and a document of them.

A benchmark that ran as a whole puts its figures into ``docs/benchmarks.md``, between two marks that
bear its name; what stands around them is written by hand. One of which a variable (``FLOW...``)
has chosen a part is written below ``build/benchmarks``.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from integration.benchmarks._plots import bars, plotted_column

ROUNDS = 5

_ROOT = Path(__file__).parents[2]
DOCUMENT = _ROOT / "docs" / "benchmarks.md"
IMAGES = Path("images", "benchmarks")
"""Where the plots are, beside the document."""
DRAFTS = _ROOT / "build" / "benchmarks"

Row = Sequence[object]


class _Report:
    """What has been printed since the last ``save_report``, for a document."""

    def __init__(self) -> None:
        self.title = ""
        self.lines: list[str] = []
        self.plots: dict[int, str] = {}
        """By the line behind which they belong."""
        self.aims: list[Row] = []


_report = _Report()


def save_report(name: str) -> Path:
    """Write what a benchmark has printed, with plots, and begin anew; return the document."""
    global _report
    done, _report = _report, _Report()
    whole = not any(variable.startswith("FLOW") for variable in os.environ)
    document = DOCUMENT if whole else DRAFTS / f"{name}.md"
    images = document.parent / IMAGES
    images.mkdir(parents=True, exist_ok=True)
    for old in images.glob(f"{name}-*.svg"):
        old.unlink()
    today, load = time.strftime("%Y-%m-%d"), os.getloadavg()[1]
    lines = [
        f"Written by `make bench NAME={name}` on {today}: {machine()}. The load of the last five "
        f"minutes was {load:.1f}, the benchmark's own included.",
    ]
    if done.aims:
        lines += ["", *_markdown(("aim", "bound", "found", ""), done.aims)]
    for place, line in enumerate(done.lines):
        lines.append(line)
        if place in done.plots:
            image = IMAGES / f"{name}-{len(list(images.glob(f'{name}-*.svg'))) + 1}.svg"
            (document.parent / image).write_text(done.plots[place])
            lines += ["", f"![the same as bars]({image})"]
    text = "\n".join(lines)
    document.write_text(_with_figures(document.read_text(), name, text) if whole else text + "\n")
    return document


def _with_figures(document: str, name: str, figures: str) -> str:
    """Return the document with these figures between the marks of a benchmark."""
    begin, end = f"<!-- figures of {name} -->", f"<!-- end of figures of {name} -->"
    found = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    if len(found.findall(document)) != 1:
        raise RuntimeError(
            f"{DOCUMENT.name} must have {begin!r} and {end!r}, once and in this order"
        )
    return found.sub(lambda _: f"{begin}\n\n{figures}\n\n{end}", document)


def progress(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def heading(text: str) -> None:
    _report.title = text
    _report.lines += ["", f"### {text}", ""]
    print(f"\n### {text}\n", flush=True)


def aim(what: str, bound: float, found: float, *, at_least: bool, besides: str = "") -> None:
    """Note what was aimed at and what came out; a target that is missed is shown as missed."""
    is_met = found >= bound if at_least else found <= bound
    sign, shown = "≥" if at_least else "≤", "met" if is_met else "**missed**"
    row = (what, f"{sign} {bound:g}", f"{found:.2f}{besides}", shown)
    _report.aims.append(row)
    print(" | ".join(row), flush=True)


def machine() -> str:
    packages = ("pyspark", "pyarrow", "numpy", "lmdb", "kafka-python")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, Java {_java()}, Python {platform.python_version()}, {versions}"


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    program = Path(home, "bin", "java") if home else "java"
    told = subprocess.run([program, "-version"], capture_output=True, text=True, check=True).stderr
    return told.split('"')[1]


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


def table(columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Print a Markdown table; numbers to the right."""
    lines = _markdown(columns, rows)
    print("\n".join(lines), flush=True)
    _report.lines += lines
    place = plotted_column(columns, rows)
    if place is not None:
        title = f"{_report.title}: {columns[place]}" if columns[place] else _report.title
        plot = bars(title, [str(row[0]) for row in rows], [row[place] for row in rows])
        _report.plots[len(_report.lines) - 1] = plot


def _markdown(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |"]
    lines.append("|" + "|".join("---" if i == 0 else "---:" for i in range(len(columns))) + "|")
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]
