"""What benchmarks of queries share: the CPU time of everything, and one query at a time."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flowspark import workers
from integration.benchmarks._report import ROUNDS, progress

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over the rounds."""

    wall_s: float
    cpu_s: float


def cpu_seconds() -> float:
    """Return the CPU time of all processes of this session: the JVM and the Python workers."""
    return sum(own + ended for own, ended in _times_by_process().values()) / _TICKS


def unsettle() -> None:
    """Undo what ``flowspark.workers.settle`` has done in a worker that peers use as well."""
    gc.unfreeze()
    workers._is_settled = False


class CpuMeter:
    """The CPU time of this session from its beginning on, whoever ends meanwhile.

    What a process has used when it ends goes to its parent, but not in every case: Spark drops idle
    workers in a way in which it is lost. Such losses are not to be anybody's gain.
    """

    def __init__(self) -> None:
        self._before = _times_by_process()

    @property
    def seconds(self) -> float:
        """What was used since the beginning, or since the last ``lap``."""
        return self._since(_times_by_process())

    def lap(self) -> float:
        """Return the same, and begin anew: the more often, the less can be lost."""
        now = _times_by_process()
        seconds, self._before = self._since(now), now
        return seconds

    def _since(self, after: dict[int, tuple[int, int]]) -> float:
        used = from_ended = 0
        for process, (own, children) in after.items():
            own_before, children_before = self._before.get(process, (0, 0))
            used += own - own_before
            from_ended += children - children_before
        known = sum(sum(self._before[process]) for process in self._before.keys() - after.keys())
        return (used + max(0, from_ended - known)) / _TICKS


def _times_by_process() -> dict[int, tuple[int, int]]:
    """Return the ticks of each process of this session, and those of its children that ended."""
    ours, found = os.getsid(0), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of the program is in parentheses, and may have spaces in it.
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It has just ended; its parent has counted it.
        if int(fields[3]) == ours:
            user, system, of_children_user, of_children_system = map(int, fields[11:15])
            found[int(path.parent.name)] = user + system, of_children_user + of_children_system
    return found


def costs(cases: Mapping[str, Callable[[], object]], *, rounds: int = ROUNDS) -> dict[str, Cost]:
    """Return the median costs of each case: warmed, then in rotated order."""
    names = list(cases)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for name in names:
        progress(f"warming {name}")
        cases[name]()
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            progress(f"round {turn + 1} of {rounds}: {name}")
            start, cpu = time.perf_counter(), cpu_seconds()
            cases[name]()
            found[name].append((time.perf_counter() - start, cpu_seconds() - cpu))
    return {
        name: Cost(
            statistics.median(wall for wall, _ in taken), statistics.median(cpu for _, cpu in taken)
        )
        for name, taken in found.items()
    }
