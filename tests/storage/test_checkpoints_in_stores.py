"""Whole checkpoints in each kind of store: written, raced for, swept, restored, adopted."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flowstate import CheckpointStorage, ListStateDescriptor, LocalOperator, ValueStateDescriptor

KEYS = [f"key-{number}" for number in range(2000)]


class Location:
    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.url, self.options = url, options

    def storage(self) -> CheckpointStorage:
        return CheckpointStorage(self.url, self.options)

    def operator(self, parallelism: int, **more: Any) -> LocalOperator:
        return LocalOperator(
            self.url, storage_options=self.options, parallelism=parallelism, key_type=str, **more
        )


@pytest.fixture(params=["memory", "local", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "memory":
        return Location(f"memory://checkpoints/{uuid.uuid4().hex}")
    if request.param == "local":
        return Location(str(tmp_path / "state"))
    found = request.getfixturevalue("s3_location")
    return Location(found.url, found.options)


def write_round(operator: LocalOperator, number: int) -> None:
    counts = [
        subtask.keyed.get_state(ValueStateDescriptor("count", int, default=0))
        for subtask in operator.subtasks
    ]
    for key in KEYS[number::2]:
        subtask = operator.subtask_of(key)
        count = counts[operator.subtasks.index(subtask)]
        count.update((count.value() or 0) + 1)
    buffer = operator.subtasks[-1].operator.get_list_state(ListStateDescriptor("buffer", int))
    buffer.add(number)


def counts_of(operator: LocalOperator) -> list[Any]:
    for subtask in operator.subtasks:
        subtask.keyed.get_state(ValueStateDescriptor("count", int, default=0))
    descriptor = ValueStateDescriptor("count", int, default=0)
    return [operator.subtask_of(key).keyed.get_state(descriptor).value() for key in KEYS]


def test_checkpoints_are_restored_at_other_parallelisms(location: Location) -> None:
    for number, parallelism in enumerate([2, 3, 5, 1]):
        operator = location.operator(parallelism)
        write_round(operator, number % 2)
        operator.checkpoint()

    restored = location.operator(4)
    buffers = [
        subtask.operator.get_list_state(ListStateDescriptor("buffer", int)).get()
        for subtask in restored.subtasks
    ]
    storage = location.storage()
    assert counts_of(restored) == [2] * len(KEYS)
    assert sorted(number for buffer in buffers for number in buffer) == [0, 0, 1, 1]
    assert storage.checkpoint_ids() == [3, 4]
    assert all(storage.verify(checkpoint_id).ok for checkpoint_id in (3, 4))


def test_nothing_is_left_that_no_checkpoint_needs(location: Location) -> None:
    operator = location.operator(2)
    for number in range(12):
        write_round(operator, number % 2)
        operator.checkpoint()

    storage = location.storage()
    records = [storage.read(checkpoint_id) for checkpoint_id in storage.checkpoint_ids()]
    needed = {path for record in records for path in record.files}
    names = {f"chk-{record.checkpoint_id}/_metadata" for record in records}
    assert {entry.path for entry in storage.file_system.list("")} == needed | names


def test_of_racing_committers_one_wins_and_the_others_read_its_record(location: Location) -> None:
    operator = location.operator(1)
    write_round(operator, 0)
    record = operator.checkpoint()
    start = threading.Barrier(6)
    committed = []

    def commit(number: int) -> None:
        storage = location.storage()
        rival = msgspec.structs.replace(
            record,
            checkpoint_id=2,
            parent_id=1,
            parent_digest=record.digest,
            run=f"run-{number}",
        )
        start.wait()
        committed.append(storage.commit(rival))

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    winners = [outcome for outcome in committed if outcome.won]
    assert len(committed) == 6
    assert len(winners) == 1
    assert {outcome.record.run for outcome in committed} == {winners[0].record.run}


def test_a_checkpoint_elsewhere_is_adopted_and_then_needed_no_more(
    location: Location, tmp_path: Path
) -> None:
    operator = location.operator(3)
    write_round(operator, 0)
    operator.checkpoint()
    write_round(operator, 1)
    operator.checkpoint()
    copy = CheckpointStorage(tmp_path / "savepoint")
    location.storage().copy_to(operator.record, copy)  # type: ignore[arg-type]

    url = str(tmp_path / "new")
    adopted = LocalOperator(url, parallelism=2, key_type=str, restore_from=copy.url)
    write_round(adopted, 0)
    adopted.checkpoint()
    copy.file_system.delete(entry.path for entry in copy.file_system.list(""))

    again = LocalOperator(url, parallelism=5, key_type=str)
    assert counts_of(again) == [2, 1] * (len(KEYS) // 2)
    assert again.storage.verify(1).ok
