"""Runs a pipeline, breaks it at random moments, and compares the end with a count of the input."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pyarrow.parquet as pq

from flowstate import CheckpointStorage
from integration.children import Child, child
from integration.faults.feeds import Feed
from integration.faults.pipeline import THRESHOLD
from integration.keyed.processes import (
    StandaloneCluster,
    executors_of,
    python_workers_of,
    readers_of,
    standalone_cluster,
)
from pyspark_flowbuffer.flush import flush

__all__ = ["Fault", "Scenario", "Summary", "run_scenario"]

_ROOT = Path(__file__).parents[2]
_BATCH_WAIT_S = 150.0
_DRAIN_WAIT_S = 300.0
_BROKEN_S = 1.5
_PARALLELISMS = (1, 2, 3, 5)


class Fault(StrEnum):
    """What is done to a pipeline."""

    MACHINE = "machine killed (driver, JVM, workers)"
    JVM = "driver's JVM killed, the rest lives on"
    WORKERS = "Python workers killed"
    READER = "source's reader killed"
    EXECUTOR = "executor killed"
    NODE = "worker node killed"
    FEED = "sender or broker killed"
    STORE_FAILS = "store unavailable for a while"
    STORE_LOSES = "store's replies lost for a while"
    STORE_FULL = "store full for a while"
    CLOCK = "clock set wrong by hours"


_CONTROLS = {
    Fault.STORE_FAILS: ("unavailable", 0.3),
    Fault.STORE_LOSES: ("lost", 0.2),
    Fault.STORE_FULL: ("full", 1.0),
}
_EVERYWHERE = (
    Fault.MACHINE,
    Fault.JVM,
    Fault.WORKERS,
    Fault.FEED,
    Fault.CLOCK,
    *_CONTROLS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One pipeline with its faults; the same seed chooses the same ones."""

    seed: int
    feed: type[Feed]
    master: str = "local[2,3]"
    """Or ``standalone``, for a cluster of two workers."""
    faults: int = 4
    lines: int = 30_000

    @property
    def possible(self) -> tuple[Fault, ...]:
        """The faults that make sense here."""
        found = list(_EVERYWHERE)
        if self.master == "standalone":
            found.append(Fault.NODE)
        if not self.master.startswith("local["):
            found.append(Fault.EXECUTOR)
        if self.feed.has_reader:
            found.append(Fault.READER)
        return tuple(found)

    def __str__(self) -> str:
        return f"{self.feed.__name__} on {self.master}, seed {self.seed}"


@dataclass
class Summary:
    """What came of scenarios."""

    scenarios: int = 0
    faults: Counter[Fault] = field(default_factory=Counter)
    starts: int = 0
    batches: int = 0
    records: int = 0
    lost: int = 0
    doubled: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Summary) -> None:
        self.scenarios += other.scenarios
        self.faults += other.faults
        self.starts += other.starts
        self.batches += other.batches
        self.records += other.records
        self.lost += other.lost
        self.doubled += other.doubled
        self.failures += other.failures

    def lines(self) -> list[str]:
        found = [
            f"scenarios {self.scenarios}, faults {sum(self.faults.values())}, starts "
            f"{self.starts}, micro-batches {self.batches:,}, records {self.records:,}, "
            f"lost {self.lost}, doubled {self.doubled}"
        ]
        found += [f"  {count:5d}  {fault}" for fault, count in sorted(self.faults.items())]
        return found + [f"FAILED: {failure}" for failure in self.failures]


def run_scenario(scenario: Scenario, folder: Path) -> Summary:
    """Run a scenario to its end, and say what is missing or there twice."""
    folder.mkdir(parents=True)
    (folder / "control").mkdir()
    with scenario.feed(folder / "feed", scenario.seed, scenario.lines) as feed:
        with _cluster(scenario, folder) as cluster:
            run = _Run(scenario, folder, feed, cluster)
            run.break_it()
            run.drain()
        expected = feed.words()
    run.check(expected)
    return run.summary


@contextmanager
def _cluster(scenario: Scenario, folder: Path) -> Iterator[StandaloneCluster | None]:
    if scenario.master != "standalone":
        yield None
        return
    with standalone_cluster(folder / "cluster", workers=2) as cluster:
        yield cluster


class _Run:
    """A scenario under way."""

    def __init__(
        self, scenario: Scenario, folder: Path, feed: Feed, cluster: StandaloneCluster | None
    ) -> None:
        self._scenario, self._folder, self._feed, self._cluster = scenario, folder, feed, cluster
        self._chance = random.Random(scenario.seed)
        self._nodes = 0
        self.summary = Summary(scenarios=1)

    def break_it(self) -> None:
        """Start the pipeline as often as it takes, until all faults have happened."""
        left = self._scenario.faults
        while left:
            with self._started(drain=False) as job:
                jvm = self._jvm(job)
                while left and jvm is not None:
                    if self._next_batch(job) is None:
                        break
                    time.sleep(self._chance.uniform(0, 1.0))
                    fault = self._chance.choice(self._scenario.possible)
                    self._break(fault, job, jvm)
                    self.summary.faults[fault] += 1
                    left -= 1

    def drain(self) -> None:
        """Run the pipeline unharmed until the source has no more."""
        self._feed.finish()
        with self._started(drain=True) as job:
            deadline = time.monotonic() + _DRAIN_WAIT_S
            while (line := job.next_line(_BATCH_WAIT_S)) != "done":
                if line is None or time.monotonic() > deadline:
                    raise AssertionError(f"{self._scenario} did not end: {job.errors()[-4000:]}")
                self.summary.batches += line.startswith("batch")

    def check(self, expected: Counter[str]) -> None:
        """Compare what was emitted, and what is in the state, with a count of the input."""
        flush(str(self._folder / "checkpoint"))
        found: Counter[tuple[str, int]] = Counter()
        for file in (self._folder / "out").glob("*.parquet"):
            columns = pq.read_table(file).to_pydict()
            assert len(columns["n"]) <= THRESHOLD
            found.update(zip(columns["word"], columns["n"], strict=True))
        wanted = Counter((word, n) for word, count in expected.items() for n in range(1, count + 1))
        self.summary.records = wanted.total()
        self.summary.lost = (wanted - found).total()
        self.summary.doubled = (found - wanted).total()
        seen = self._rows_in_operator_state()
        last_batch = self.summary.records - seen
        if self.summary.lost or self.summary.doubled or last_batch < 0:
            self.summary.failures.append(
                f"{self._scenario}: lost {self.summary.lost}, doubled {self.summary.doubled}, "
                f"{seen} rows seen of {self.summary.records}; {self._folder}"
            )

    def _rows_in_operator_state(self) -> int:
        (root,) = (self._folder / "state").glob("*/count")
        storage = CheckpointStorage(str(root))
        record = storage.latest()
        assert record is not None
        return sum(
            element
            for subtask in record.subtasks
            for handle in subtask.operator
            for element in storage.reader(handle.file)
            .read_elements("seen", 0, handle.states["seen"].count)
            .to_pylist()
        )

    @contextmanager
    def _started(self, *, drain: bool) -> Iterator[Child]:
        self.summary.starts += 1
        given = {
            "folder": str(self._folder),
            "parallelism": self._chance.choice(_PARALLELISMS),
            "master": self._scenario.master if self._cluster is None else self._cluster.url,
            "source": self._feed.source,
            "options": self._feed.options(drain=drain),
            "drain": drain,
        }
        path = [str(_ROOT / "integration/faults/injected"), str(_ROOT)]
        path.append(os.environ.get("PYTHONPATH", ""))
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "FLOW_FAULT_CONTROL": str(self._folder / "control"),
        }
        log = self._folder / "log"
        module = "integration.faults.pipeline"
        with child(module, json.dumps(given), log=log, environment=environment) as job:
            yield job

    def _jvm(self, job: Child) -> int | None:
        while (line := job.next_line(_BATCH_WAIT_S)) is not None:
            if line.startswith("jvm"):
                return int(line.split()[1])
        return None

    def _next_batch(self, job: Child) -> str | None:
        """Return the next batch; None if the query has ended because of what was done to it."""
        while (line := job.next_line(_BATCH_WAIT_S)) is not None:
            if line.startswith("batch"):
                self.summary.batches += 1
                return line
        return None

    def _break(self, fault: Fault, job: Child, jvm: int) -> None:
        match fault:
            case Fault.MACHINE:
                job.kill()
            case Fault.JVM:
                self._kill_some(job, [jvm])
            case Fault.WORKERS:
                self._kill_some(job, python_workers_of(jvm))
            case Fault.READER:
                self._kill_some(job, readers_of(jvm))
            case Fault.EXECUTOR:
                parents = [jvm] if self._cluster is None else self._cluster.workers
                self._kill_some(job, [pid for one in parents for pid in executors_of(one)])
            case Fault.NODE:
                assert self._cluster is not None
                self._cluster.kill_worker(0)
                self._nodes += 1
                self._cluster.add_worker(f"new-worker-{self._nodes}")
            case Fault.FEED:
                self._feed.interrupt()
            case Fault.CLOCK:
                hours = self._chance.choice([-30, -1, 1, 30])
                (self._folder / "control/clock").write_text(str(3600 * hours))
            case _:
                name, chance = _CONTROLS[fault]
                control = self._folder / "control" / name
                control.write_text(str(chance))
                time.sleep(_BROKEN_S)
                control.unlink()

    def _kill_some(self, job: Child, pids: list[int]) -> None:
        if not pids:
            return
        for pid in self._chance.sample(sorted(pids), self._chance.randint(1, len(pids))):
            with suppress(ProcessLookupError):
                job.kill(pid)
