"""State that stays in the memory of a process from one subtask to the next."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowstate import (
    BulkState,
    CheckpointStorage,
    MapStateDescriptor,
    Subtask,
    SubtaskConfig,
    ValueStateDescriptor,
    commit_checkpoint,
)
from flowstate.checkpoint import CheckpointRecord
from flowstate.descriptors import StateDescriptor
from flowstate.keyed import warm
from flowstate.subtask import OperatorDescription

COUNT = ValueStateDescriptor("count", int)


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    warm._kept.clear()
    yield
    warm._kept.clear()


class Program:
    """One subtask for each batch, as a runtime has it whose tasks come and go."""

    def __init__(self, folder: Path) -> None:
        self.storage = CheckpointStorage(f"memory://warm/{uuid.uuid4().hex}")
        self.record: CheckpointRecord | None = None
        self._folder = folder

    def open(self, *, rows_max: int = 1000) -> Subtask:
        config = SubtaskConfig(
            subtask_index=0,
            parallelism=1,
            key_type=str,
            working_folder=self._folder,
            warm_rows_max=rows_max,
        )
        return Subtask(self.storage, config, restored=self.record)

    def commit(self, subtask: Subtask, *, kept: bool = True) -> None:
        checkpoint_id = 1 if self.record is None else self.record.checkpoint_id + 1
        snapshot = subtask.snapshot(checkpoint_id)
        described: OperatorDescription = subtask.describe()
        if kept:
            subtask.keep_warm(snapshot)
        self.record = commit_checkpoint(
            self.storage, [snapshot], [described], parent=self.record, run=subtask.run
        ).record
        subtask.close()

    def batch(
        self, changes: Mapping[str, int | None], *, rows_max: int = 1000, kept: bool = True
    ) -> bool:
        """Run a batch, and return whether its state was in memory."""
        subtask = self.open(rows_max=rows_max)
        update(subtask, changes)
        in_memory = subtask.working_state is None
        self.commit(subtask, kept=kept)
        return in_memory


def update(subtask: Subtask, changes: Mapping[str, int | None]) -> None:
    state = subtask.keyed.get_state(COUNT)
    for key, count in changes.items():
        subtask.keyed.set_current_key(key)
        state.update(count)


def update_in_bulk(subtask: Subtask, changes: Mapping[str, int | None]) -> None:
    subtask.keyed.get_state(COUNT)
    keys, counts = pa.array(list(changes), pa.string()), pa.array(changes.values(), pa.int64())
    BulkState(subtask.keyed, "count").update(keys, counts)


def contents(subtask: Subtask, descriptor: ValueStateDescriptor = COUNT) -> dict[str, Any]:
    state = subtask.keyed.get_state(descriptor)
    found = {}
    for key in subtask.keyed.keys(descriptor.name):
        subtask.keyed.set_current_key(key)
        found[key] = state.value()
    return found


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


LARGE: dict[str, int | None] = {f"key-{number}": number for number in range(100)}


def test_the_next_subtask_finds_the_state_in_memory(program: Program) -> None:
    program.batch(LARGE)
    taken = program.batch({"key-1": None, "new": 7})
    again = program.open()

    assert taken
    assert again.working_state is None
    expected = {**LARGE, "new": 7}
    del expected["key-1"]
    assert contents(again) == expected


def test_what_was_not_committed_is_not_taken(program: Program) -> None:
    program.batch(LARGE)
    lost = program.open()
    update(lost, {"key-1": -1, "lost": 1})
    lost.keep_warm(lost.snapshot(2))
    program.batch({"key-1": 5}, rows_max=0)

    found = contents(program.open())
    assert found["key-1"] == 5
    assert "lost" not in found


def test_a_batch_that_fails_leaves_nothing_of_what_it_did(program: Program) -> None:
    program.batch(LARGE)
    failed = program.open()
    update(failed, {"key-1": -1, "key-2": None})
    failed.close()

    assert contents(program.open()) == LARGE


def test_state_is_brought_up_to_what_was_done_elsewhere(program: Program) -> None:
    program.batch(LARGE)
    kept = dict(warm._kept)
    program.batch({"key-1": 5, "key-2": None}, rows_max=0)
    program.batch({"key-2": 6, "key-3": None}, rows_max=0)
    warm._kept.update(kept)
    subtask = program.open()

    expected = {**LARGE, "key-1": 5, "key-2": 6}
    del expected["key-3"]
    assert subtask.working_state is None
    assert contents(subtask) == expected


def test_a_small_change_of_a_large_state_is_left_to_the_local_disk(program: Program) -> None:
    program.batch(LARGE)
    program.batch({"key-1": 5})
    warm._kept.clear()
    subtask = program.open()

    assert subtask.working_state is not None
    assert contents(subtask) == {**LARGE, "key-1": 5}


def test_no_more_rows_are_kept_than_allowed(program: Program) -> None:
    program.batch(LARGE, rows_max=99)

    assert not warm._kept
    assert not program.batch({"key-1": 1}, rows_max=99)


@pytest.mark.parametrize(
    "descriptor",
    [
        MapStateDescriptor("map", str, int),
        ValueStateDescriptor("list", pa.list_(pa.int64())),
    ],
    ids=["a map", "a value that can be changed in place"],
)
def test_other_kinds_of_state_are_not_kept(descriptor: StateDescriptor, program: Program) -> None:
    subtask = program.open()
    update(subtask, LARGE)
    if isinstance(descriptor, MapStateDescriptor):
        subtask.keyed.get_map_state(descriptor)
    elif isinstance(descriptor, ValueStateDescriptor):
        subtask.keyed.get_state(descriptor).update([1])
    program.commit(subtask)

    assert not warm._kept


def test_timers_are_not_kept_and_not_lost(program: Program) -> None:
    subtask = program.open()
    update(subtask, LARGE)
    subtask.keyed.set_current_key("key-1")
    subtask.keyed.timer_service.register_event_time_timer(10)
    program.commit(subtask)
    again = program.open()

    assert not warm._kept
    assert [timer.key for timer in again.keyed.timer_service.advance_watermark(10)] == ["key-1"]


def test_state_that_the_program_does_not_ask_for_stays(program: Program) -> None:
    program.batch(LARGE)
    program.commit(program.open())
    program.commit(program.open())

    assert contents(program.open()) == LARGE


def test_a_type_that_was_widened_meanwhile_is_taken_over(program: Program) -> None:
    narrow = ValueStateDescriptor("count", pa.int32())
    subtask = program.open()
    state = subtask.keyed.get_state(narrow)
    for key, count in LARGE.items():
        subtask.keyed.set_current_key(key)
        state.update(count)
    program.commit(subtask)
    subtask = program.open()
    assert subtask.working_state is None
    update(subtask, {"key-1": 1 << 40})
    program.commit(subtask)

    assert contents(program.open()) == {**LARGE, "key-1": 1 << 40}


@pytest.mark.parametrize("change", [update, update_in_bulk], ids=["by key", "in bulk"])
def test_state_that_is_mostly_changed_is_written_as_a_whole(
    program: Program, change: Callable[[Subtask, Mapping[str, int | None]], None]
) -> None:
    program.batch(LARGE)
    subtask = program.open()
    change(subtask, {f"key-{number}": None if number < 5 else 7 for number in range(60)})
    program.commit(subtask)
    record = program.record
    warm._kept.clear()

    assert record is not None
    (handle,) = record.subtasks[0].keyed
    assert handle.full
    assert handle.file.rows == 95
    # So what an earlier state lacks cannot be found in it.
    assert (handle.first_checkpoint, handle.last_checkpoint) == (1, 2)
    found = contents(program.open())
    assert found == {key: 7 if n < 60 else n for n, key in enumerate(LARGE) if n >= 5}


def test_state_that_was_wholly_removed_does_not_come_back(program: Program) -> None:
    program.batch(LARGE, rows_max=0)
    program.open(rows_max=0).close()
    subtask = program.open()
    update_in_bulk(subtask, dict.fromkeys(LARGE))
    program.commit(subtask)
    warm._kept.clear()

    assert contents(program.open(rows_max=0)) == {}
    assert contents(program.open()) == {}


@pytest.mark.parametrize("seed", range(12))
def test_whoever_runs_a_batch_finds_what_all_before_have_left(seed: int, program: Program) -> None:
    rng = random.Random(seed)
    model: dict[str, int] = {}
    processes: list[dict[Any, Any]] = [{}, {}, {}]
    for number in range(60):
        place = rng.randrange(len(processes))
        warm._kept.clear()
        warm._kept.update(processes[place])
        subtask = program.open(rows_max=rng.choice([1000, 1000, 1000, 0]))
        if rng.random() < 0.5:
            # Otherwise it is seen in the end, and stays in columns until then.
            assert contents(subtask) == model
        touched = rng.sample(sorted(LARGE), rng.choice([1, 5, 60, 100]))
        gone = rng.choice([0.2, 0.2, 1.0])
        changes = {key: None if rng.random() < gone else number for key in touched}
        rng.choice([update, update_in_bulk, update_in_bulk])(subtask, changes)
        outcome = rng.random()
        if outcome < 0.2:
            subtask.close()
        elif outcome < 0.3:
            checkpoint_id = 1 if program.record is None else program.record.checkpoint_id + 1
            subtask.keep_warm(subtask.snapshot(checkpoint_id))
        else:
            program.commit(subtask)
            model |= {key: count for key, count in changes.items() if count is not None}
            model = {key: count for key, count in model.items() if changes.get(key, 0) is not None}
        processes[place] = dict(warm._kept)
    assert contents(program.open()) == model
