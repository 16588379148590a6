"""Directs the demo: feeds the query, kills it, and counts what came out of it.

Ends by itself, with 1 if a word was counted wrongly.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from integration.children import Child, child
from integration.demo.pipeline import THRESHOLD
from integration.demo.screen import Screen
from integration.faults.feeds import Feed, KafkaFeed, SocketFeed
from pyspark_flowbuffer.flush import flush

_LINES = 20_000
_SEED = 2026
_BATCHES_BEFORE_A_KILL = 6
_WAIT_S = 120.0


@dataclass
class _Demo:
    screen: Screen
    folder: Path
    feed: Feed
    started: float
    batches: int = 0
    restores: int = 0

    def run(self, parallelism: int, *, kill: bool) -> None:
        """Run the query until it is killed in the middle of a batch, or to its end."""
        given = {
            "folder": str(self.folder),
            "parallelism": parallelism,
            "source": self.feed.source,
            "options": self.feed.options(drain=not kill),
            "drain": not kill,
        }
        log = self.folder / "driver.log"
        with child("integration.demo.pipeline", json.dumps(given), log=log) as job:
            self.screen.progress("starting Spark")
            own = 0
            while (line := job.next_line(_WAIT_S)) != "done":
                if line is None:
                    raise RuntimeError(f"the query ended by itself:\n{job.errors()[-4000:]}")
                if not line.startswith("batch"):
                    continue
                own, self.batches = own + 1, self.batches + 1
                self._show(line)
                if kill and own >= _BATCHES_BEFORE_A_KILL:
                    time.sleep(0.15)
                    self._kill(job)
                    return

    def _show(self, line: str) -> None:
        files = len(list((self.folder / "out").glob("*.parquet")))
        seconds = time.monotonic() - self.started
        self.screen.progress(f"{seconds:5.1f} s  micro-{line}, {files} files published")

    def _kill(self, job: Child) -> None:
        job.kill()
        self.restores += 1
        self.screen.line("  kill -9: the driver, its JVM and all Python workers are gone")

    def counted(self) -> Counter[tuple[str, int]]:
        """Return the rows in the files, each word with each of its counts."""
        flush(str(self.folder / "checkpoint"))
        found: Counter[tuple[str, int]] = Counter()
        for file in (self.folder / "out").glob("*.parquet"):
            columns = pq.read_table(file).to_pydict()
            found.update(zip(columns["word"], columns["n"], strict=True))
        return found


def main() -> int:
    screen = Screen()
    kind = KafkaFeed if os.environ.get("KAFKA", "0") not in {"", "0"} else SocketFeed
    folder = Path(tempfile.mkdtemp(prefix="flowspark-demo-"))
    via = "a Kafka topic" if kind is KafkaFeed else "TCP, with acknowledgements"
    screen.heading("flowspark: a word count that survives kill -9 and changes its parallelism")
    screen.line(
        f"  {_LINES:,} lines over {via} -> {kind.source} -> key_by(word).process(WordCount)"
    )
    screen.line(f"  -> flowbuffer: parquet files of {THRESHOLD:,} rows")
    try:
        return _play(screen, folder, kind)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _play(screen: Screen, folder: Path, kind: type[Feed]) -> int:
    if kind is KafkaFeed:
        screen.progress("starting a broker (the first time it is fetched)")
    with kind(folder / "feed", _SEED, _LINES) as feed:
        demo = _Demo(screen, folder, feed, time.monotonic())
        for place, (parallelism, kill) in enumerate(((2, True), (3, True), (5, False))):
            again = "comes back" if place else "starts"
            screen.heading(f"The query {again} at parallelism {parallelism}")
            screen.key_groups(parallelism)
            if not kill:
                feed.finish()
            demo.run(parallelism, kill=kill)
        expected = feed.words()
    return _judge(screen, demo, expected)


def _judge(screen: Screen, demo: _Demo, expected: Counter[str]) -> int:
    found = demo.counted()
    wanted = Counter((word, n) for word, count in expected.items() for n in range(1, count + 1))
    counts = Counter(word for word, _ in found.elements())
    lost, doubled = (wanted - found).total(), (found - wanted).total()
    screen.heading("What came out")
    screen.table(
        [
            ("lines sent", _LINES),
            ("words in them, counted apart", expected.total()),
            ("words counted by the query", counts.total()),
            ("different words", len(counts)),
            ("lost", lost),
            ("counted twice", doubled),
            ("micro-batches seen", demo.batches),
            ("restores after kill -9", demo.restores),
            ("files written", len(list((demo.folder / "out").glob("*.parquet")))),
        ]
    )
    screen.line()
    screen.line(f"  {'word':<12}{'expected':>10}{'counted':>10}")
    for word, count in expected.most_common(5):
        screen.line(f"  {word:<12}{count:>10,}{counts[word]:>10,}")
    screen.line()
    if lost or doubled or counts != expected:
        screen.line("  " + screen.bad("wrong: the counts differ"))
        return 1
    screen.line("  " + screen.good("right: every word was counted once"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
