"""Every kind of state through rescaling, crashes and lost local state, against a plain model."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowstate.checkpoint import CheckpointRecord
from flowstate.restoring import operator_share
from flowstate.testing.faults import SimulatedCrashError

from .functions import Everything
from .harness import Query, crashing, row_factory

WORDS = [f"w{number}" for number in range(12)]
PARALLELISMS = st.sampled_from([1, 2, 3, 5])
Row = tuple[str, int]


class Model:
    """What the function is to have, and what it is to emit."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}
        self.timers: set[tuple[int, str]] = set()

    def batch(self, rows: list[Row], batch_ms: int, fires: set[str]) -> Counter[tuple[str, str]]:
        """Return what is emitted; of the words in ``fires`` timers can fire."""
        emitted: Counter[tuple[str, str]] = Counter()
        for word, n in rows:
            self.rows.setdefault(word, []).append(n)
            emitted[word, json.dumps(self.shown(word))] += 1
            if n % 5 == 0:
                self.timers.add((n, word))
        due = {(n, word) for n, word in self.timers if n <= batch_ms and word in fires}
        self.timers -= due
        emitted.update((word, f"timer {n}") for n, word in due)
        return emitted

    def shown(self, word: str) -> dict[str, Any]:
        values = self.rows[word]
        kept: list[int] = []
        entries: dict[str, int] = {}
        for n in values:
            kept.append(n)
            if n % 7 == 0:
                kept = []
            entries[str(n % 4)] = n
            if n % 11 == 0:
                entries.pop("0", None)
        return {
            "value": sum(values),
            "list": kept,
            "map": dict(sorted(entries.items())),
            "sum": sum(values),
            "mean": sum(values) / len(values),
            "rule": "always",
        }

    @property
    def elements(self) -> list[str]:
        return sorted(
            f"{word}:{n}" for word, all_n in self.rows.items() for n in all_n if n % 3 == 0
        )


def texts(rows: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((row["word"], row["text"]) for row in rows)


def operator_states(query: Query, record: CheckpointRecord) -> dict[str, list[str]]:
    """Return the elements that the subtasks have of each list."""
    found: dict[str, list[str]] = {"elements": [], "union": []}
    for subtask in record.subtasks:
        share = operator_share(
            query.storage,
            record,
            subtask_index=subtask.subtask_index,
            parallelism=record.parallelism,
        )
        found["elements"] += share["elements"].to_pylist() if "elements" in share else []
        if subtask.subtask_index == 0 and "union" in share:
            found["union"] += share["union"].to_pylist()
    return {name: sorted(elements) for name, elements in found.items()}


def all_words(query: Query) -> list[Row]:
    """Return rows for all subtasks, so that each of them has run at its parallelism."""
    return [(word, 1) for word in WORDS]


def subtasks_of(query: Query, rows: list[Row]) -> set[str]:
    """Return the words whose subtasks have rows."""
    awake = {query.subtask_of(word) for word, _ in rows}
    return {word for word in WORDS if query.subtask_of(word) in awake}


class Machine(RuleBasedStateMachine):
    """One query through its life."""

    @initialize(parallelism=PARALLELISMS)
    def start(self, parallelism: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.query = Query(
            folder=self.folder, factory=row_factory(Everything()), parallelism=parallelism
        )
        self.model, self.batch_id, self.batch_ms = Model(), 0, 10

    @rule(
        rows=st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 60)), max_size=8),
        later_ms=st.integers(0, 20),
        tick=st.booleans(),
        twice=st.booleans(),
        seed=st.integers(0, 9),
    )
    def run_batch(self, rows: list[Row], later_ms: int, tick: bool, twice: bool, seed: int) -> None:
        self.batch_ms += later_ms
        order = list(range(self.query.parallelism)) * (2 if twice else 1)
        random.Random(seed).shuffle(order)
        found = texts(self.query.batch(self.batch_id, rows, order=order, **self.how(tick)))
        fires = set(WORDS) if tick else subtasks_of(self.query, rows)
        expected = self.model.batch(rows, self.batch_ms, fires)

        assert found == Counter({one: times * (1 + twice) for one, times in expected.items()})
        self.batch_id += 1

    @rule(
        rows=st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 60)), max_size=8),
        at=st.integers(0, 40),
        parallelism=PARALLELISMS,
    )
    def crash_in_a_batch(self, rows: list[Row], at: int, parallelism: int) -> None:
        """Die at some operation, or between the last one and Spark's commit; then start anew."""
        with crashing(at), suppress(SimulatedCrashError):
            self.query.batch(self.batch_id, rows, **self.how(tick=False))
        self.restart(parallelism)
        found = texts(self.query.batch(self.batch_id, rows, **self.how(tick=True)))

        assert found == self.model.batch(rows, self.batch_ms, set(WORDS))
        self.batch_id += 1

    @rule(parallelism=PARALLELISMS)
    def restart(self, parallelism: int) -> None:
        self.query = self.query.restarted(parallelism=parallelism)

    @rule()
    def lose_the_working_folder(self) -> None:
        shutil.rmtree(self.folder / "work", ignore_errors=True)

    @rule(seed=st.integers(0, 9))
    def damage_the_working_folder(self, seed: int) -> None:
        files = sorted(path for path in (self.folder / "work").rglob("*") if path.is_file())
        if files:
            chosen = random.Random(seed).choice(files)
            chosen.write_bytes(chosen.read_bytes()[: chosen.stat().st_size // 2])

    @invariant()
    def no_element_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "model"):
            return
        record = self.query.seal(self.batch_id)
        if record is not None:
            assert operator_states(self.query, record)["elements"] == self.model.elements
            assert self.query.storage.verify(record.checkpoint_id).problems == ()

    def how(self, tick: bool) -> dict[str, Any]:
        return {"batch_ms": self.batch_ms, "tick": tick}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            if self.model.rows:
                self.ask_for_everything()
            shutil.rmtree(self.folder)

    def ask_for_everything(self) -> None:
        rows = [(word, 1) for word in self.model.rows]
        self.restart(4)
        found = texts(self.query.batch(self.batch_id, rows, **self.how(tick=True)))

        assert found == self.model.batch(rows, self.batch_ms, set(WORDS))


Machine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=14, deadline=None, database=None
)
TestMachine = Machine.TestCase


@pytest.mark.parametrize(
    "scales",
    [[2, 4], [4, 2], [3, 3], [2, 3], [5, 3], [1, 128, 1]],
    ids=["up", "down", "none", "uneven-up", "uneven-down", "1-128-1"],
)
@pytest.mark.parametrize("is_sparse", [False, True], ids=["all", "some-without-rows"])
def test_all_state_comes_along_to_another_parallelism(
    tmp_path: Path, scales: list[int], is_sparse: bool
) -> None:
    query = Query(folder=tmp_path, factory=row_factory(Everything()))
    model = Model()
    batch_id = 0
    for place, parallelism in enumerate(scales):
        query = query.restarted(parallelism=parallelism)
        few = is_sparse and place > 0
        for n in (15,) if parallelism == 128 else (15, 16, 21):
            rows = [(word, n + batch_id) for word in (WORDS[:2] if few else WORDS)]
            found = texts(query.batch(batch_id, rows, batch_ms=7))

            assert found == model.batch(rows, 7, set())
            batch_id += 1
    # All of them once at the last parallelism, so that each has taken its own elements.
    found = texts(query.batch(batch_id, [(word, 3) for word in WORDS], batch_ms=1000, tick=True))
    assert found == model.batch([(word, 3) for word in WORDS], 1000, set(WORDS))
    record = query.seal(batch_id + 1)
    assert record is not None
    assert record.parallelism == scales[-1]
    assert operator_states(query, record) == {"elements": model.elements, "union": model.elements}
