from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
import uuid
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from flowstate.checkpoint import (
    CheckpointRecord,
    CheckpointStorage,
    FileHandle,
    KeyedSection,
    ListSection,
    OperatorHandle,
    OperatorStateMeta,
    encode_record,
)
from flowstate.errors import (
    CheckpointNotFoundError,
    CheckpointSupersededError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMissingError,
    StorageError,
    StoreUnavailableError,
)
from flowstate.testing.faults import Fault, FaultAction, FaultyFileSystem

from .cases import ALL, SpyFileSystem, int_rows, record_of, values_of

RACERS = 4


def put_file(storage: CheckpointStorage, batch_id: int, count: int = 10) -> FileHandle:
    return storage.write_file(
        [KeyedSection.of(int_rows(range(count)))], batch_id=batch_id, run="run"
    )


def chain(storage: CheckpointStorage, length: int) -> list[CheckpointRecord]:
    """Commit checkpoints 1 to length, of batches 0 and on, each with a file of its own."""
    records: list[CheckpointRecord] = []
    for checkpoint_id in range(1, length + 1):
        record = record_of(
            checkpoint_id,
            put_file(storage, checkpoint_id - 1),
            parent=records[-1] if records else None,
            batch_id=checkpoint_id - 1,
        )
        assert storage.commit(record).won
        records.append(record)
    return records


def paths(storage: CheckpointStorage, folder: str = "") -> set[str]:
    return {entry.path for entry in storage.file_system.list(folder)}


# Commit


def test_a_committed_record_is_found(storage: CheckpointStorage) -> None:
    records = chain(storage, 3)

    assert storage.checkpoint_ids() == [1, 2, 3]
    assert storage.read(2) == records[1]
    assert storage.latest() == records[2]
    assert values_of(storage.reader(records[0].subtasks[0].keyed[0].file).read_rows("count", ALL))


def test_the_first_committer_wins_and_the_second_gets_its_record(
    storage: CheckpointStorage,
) -> None:
    first, second = record_of(1, run="first"), record_of(1, run="second")

    assert storage.commit(first).won
    lost = storage.commit(second)

    assert not lost.won
    assert lost.record == first
    assert lost.record.digest == first.digest


def test_a_repeated_commit_wins_again(storage: CheckpointStorage) -> None:
    record = record_of(1)

    assert storage.commit(record).won
    assert storage.commit(record).won


def test_a_lost_reply_does_not_lose_the_race(root: str, spy: SpyFileSystem) -> None:
    storage = CheckpointStorage(root, file_system=spy)
    spy.lose_next_reply = True

    assert storage.commit(record_of(1)).won


def test_threads_that_race_agree_on_one_record(storage: CheckpointStorage) -> None:
    barrier = threading.Barrier(8)

    def commit(racer: int) -> tuple[str, bool]:
        barrier.wait()
        committed = storage.commit(record_of(1, run=f"run {racer}"))
        return committed.record.digest, committed.won

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(commit, range(8)))

    assert [won for _, won in results].count(True) == 1
    assert len({digest for digest, _ in results}) == 1
    assert paths(storage) == {"chk-1/_metadata"}


def commit_in_process(root: str, racer: int, rounds: int) -> list[tuple[str, bool]]:
    storage = CheckpointStorage(root)
    # Processes start at different times; none begins before all are here.
    storage.file_system.write(f"ready/{racer}", b"")
    while len(storage.file_system.list("ready")) < RACERS:
        time.sleep(0.001)
    results = []
    for checkpoint_id in range(1, rounds + 1):
        parent = storage.read(checkpoint_id - 1) if checkpoint_id > 1 else None
        record = record_of(checkpoint_id, parent=parent, run=f"run {racer}")
        committed = storage.commit(record)
        results.append((committed.record.digest, committed.won))
    return results


def test_processes_that_race_agree_on_one_chain(tmp_path: Path) -> None:
    rounds = 30
    with ProcessPoolExecutor(RACERS, multiprocessing.get_context("spawn")) as processes:
        futures = [
            processes.submit(commit_in_process, str(tmp_path), racer, rounds)
            for racer in range(RACERS)
        ]
        results = [future.result() for future in futures]

    for of_round in zip(*results, strict=True):
        assert [won for _, won in of_round].count(True) == 1
        assert len({digest for digest, _ in of_round}) == 1
    assert CheckpointStorage(tmp_path).checkpoint_ids() == list(range(1, rounds + 1))


def test_a_committer_whose_checkpoint_was_retired_is_refused(storage: CheckpointStorage) -> None:
    chain(storage, 5)
    storage.retain(2)

    with pytest.raises(CheckpointSupersededError, match="came too late"):
        storage.commit(record_of(2, run="zombie"))

    assert storage.checkpoint_ids() == [4, 5]


def test_a_committer_of_the_last_retired_checkpoint_is_refused(
    storage: CheckpointStorage,
) -> None:
    # The oldest record left has the parent id 3, but not the parent that this one is.
    chain(storage, 5)
    storage.retain(2)

    with pytest.raises(CheckpointSupersededError):
        storage.commit(record_of(3, run="zombie"))

    assert storage.checkpoint_ids() == [4, 5]


def test_a_winner_whose_successor_came_quickly_has_won(root: str, spy: SpyFileSystem) -> None:
    inner = CheckpointStorage(root)
    record = record_of(1)
    inner.commit(record)
    inner.commit(record_of(2, parent=record))

    assert CheckpointStorage(root, file_system=spy).commit(record).won


def test_a_record_retired_between_losing_and_reading_is_superseded(
    root: str, spy: SpyFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = CheckpointStorage(root, file_system=spy)
    chain(storage, 3)

    def read(path: str) -> bytes:
        raise SnapshotMissingError(path)

    monkeypatch.setattr(spy, "read", read)

    with pytest.raises(CheckpointSupersededError):
        storage.commit(record_of(2, run="zombie"))


@pytest.mark.parametrize(
    ("checkpoint_id", "error"), [(2, CheckpointSupersededError), (6, StoreUnavailableError)]
)
def test_a_failure_that_a_late_committer_meets_is_its_lateness(
    storage: CheckpointStorage, checkpoint_id: int, error: type[Exception]
) -> None:
    chain(storage, 5)
    storage.retain(2)
    failing = [Fault(FaultAction.FAIL, at=lambda operation: operation.name == "create_exclusively")]
    unlucky = CheckpointStorage(
        storage.url, file_system=FaultyFileSystem(storage.file_system, failing)
    )

    with pytest.raises(error):
        unlucky.commit(record_of(checkpoint_id, run="zombie"))


def test_the_error_of_a_late_committer_keeps_its_message_through_pickle() -> None:
    error = CheckpointSupersededError("late")

    assert str(pickle.loads(pickle.dumps(error))) == "[FLOWSTATE_SUPERSEDED] late"


# Finding


def test_the_parent_of_a_batch_is_the_newest_record_below_it(storage: CheckpointStorage) -> None:
    first = record_of(1, batch_id=0)
    second = record_of(2, batch_id=4, parent=first)
    for record in (first, second):
        storage.commit(record)

    assert storage.latest_before(0) is None
    assert storage.latest_before(1) == first
    assert storage.latest_before(4) == first
    assert storage.latest_before(5) == second


def test_a_record_without_a_batch_precedes_all(storage: CheckpointStorage) -> None:
    record = msgspec.structs.replace(record_of(1), batch_id=None)
    storage.commit(record)

    assert storage.latest_before(0) == record


def test_a_left_over_of_a_late_committer_is_not_taken_for_a_parent(
    storage: CheckpointStorage,
) -> None:
    chain(storage, 5)
    storage.retain(2)
    zombie = record_of(2, run="zombie", batch_id=1)
    # As if the committer had died before it saw that it was too late.
    storage.file_system.create_exclusively("chk-2/_metadata", encode_record(zombie))

    assert storage.latest_before(3) is None
    assert storage.retain(2) == [2]


def test_an_incomplete_checkpoint_is_none(storage: CheckpointStorage) -> None:
    storage.file_system.write("chk-3/run/part-0", b"part")
    storage.file_system.write("chk-4/.tmp-0123", b"temporary")
    storage.file_system.write("chk-05/_metadata", b"not a name that we give")
    storage.file_system.write("other/chk-6/_metadata", b"another operator")

    assert storage.checkpoint_ids() == []
    assert storage.latest() is None
    with pytest.raises(CheckpointNotFoundError, match="never completed"):
        storage.read(3)


def test_a_url_of_a_root_or_of_a_checkpoint_is_resolved(
    root: str, storage: CheckpointStorage
) -> None:
    records = chain(storage, 3)

    assert CheckpointStorage.resolve(root)[1] == records[2]
    assert CheckpointStorage.resolve(f"{root}/")[1] == records[2]
    found, record = CheckpointStorage.resolve(f"{root}/chk-2")
    assert record == records[1]
    assert found.checkpoint_ids() == [1, 2, 3]
    assert CheckpointStorage.resolve(f"{root}/chk-2/_metadata")[1] == records[1]
    with pytest.raises(CheckpointNotFoundError, match="1, 2, 3"):
        CheckpointStorage.resolve(f"{root}/chk-9")
    with pytest.raises(CheckpointNotFoundError, match="one of its chk-<id> folders"):
        CheckpointStorage.resolve(f"{root}/elsewhere")


def test_a_record_under_another_id_is_refused(storage: CheckpointStorage) -> None:
    storage.file_system.write("chk-2/_metadata", encode_record(record_of(1)))

    with pytest.raises(SnapshotCorruptError, match="checkpoint id"):
        storage.read(2)


# Retention and sweep


def test_the_newest_records_stay(storage: CheckpointStorage) -> None:
    chain(storage, 5)

    assert storage.retain(2) == [1, 2, 3]
    assert storage.checkpoint_ids() == [4, 5]
    assert storage.retain(7) == []
    with pytest.raises(ValueError, match="at least one"):
        storage.retain(0)


def test_the_sweep_deletes_exactly_what_it_may(storage: CheckpointStorage) -> None:
    records = chain(storage, 5)
    write = storage.file_system.write
    name = uuid.uuid4().hex
    may_go = {
        f"shared/2-dead_run-{name}.arrow",
        f"taskowned/4-run-{name}",
        "chk-4/run/part-0",
        "chk-4/.tmp-0123",
        "chk-2/run/part-0",
    }
    must_stay = {
        f"shared/5-run-{name}.arrow",
        "shared/foreign",
        f"taskowned/5-run-{name}",
        "taskowned/foreign",
        "chk-5/run/part-0",
        "chk-5/.tmp-0123",
        "chk-6/run/part-0",
        "chk-6/.tmp-0123",
        "elsewhere/1-run",
        ".tmp-probe-0123",
    }
    for path in may_go | must_stay:
        write(path, b"12345")
    storage.retain(2)
    retired = {path for record in records[:3] for path in record.files}
    retired_bytes = sum(file.size for record in records[:3] for file in record.files.values())
    before = paths(storage)

    planned = storage.sweep(4, dry_run=True)
    assert paths(storage) == before
    swept = storage.sweep(4)

    assert set(swept.paths) == may_go | retired
    assert swept == planned
    assert swept.bytes == retired_bytes + 5 * len(may_go)
    assert paths(storage) == before - may_go - retired
    assert storage.sweep(4).paths == ()
    assert storage.verify(4).ok
    assert storage.verify(5).ok


def test_files_of_batches_that_are_not_committed_stay(storage: CheckpointStorage) -> None:
    chain(storage, 5)
    storage.retain(1)

    assert {path.split("-")[0] for path in storage.sweep(1).paths} == {"shared/0", "shared/1"}


def test_a_file_that_a_later_record_still_refers_to_stays(storage: CheckpointStorage) -> None:
    shared = put_file(storage, 0)
    first = record_of(1, shared, batch_id=0)
    storage.commit(first)
    storage.commit(record_of(2, shared, parent=first, batch_id=1))
    storage.retain(1)

    assert storage.sweep(1).paths == ()
    assert paths(storage, "shared") == {shared.path}


@pytest.mark.parametrize("broken", [b"{", b'{"format":2}'], ids=["damaged", "newer format"])
def test_nothing_is_swept_while_a_record_cannot_be_read(
    storage: CheckpointStorage, broken: bytes
) -> None:
    chain(storage, 3)
    put_file(storage, 0)
    storage.file_system.write("chk-2/_metadata", broken)
    before = paths(storage)

    with pytest.raises(SnapshotError):
        storage.sweep(2)

    assert paths(storage) == before


def test_nothing_is_swept_where_no_checkpoint_is(storage: CheckpointStorage) -> None:
    put_file(storage, 0)

    assert storage.sweep(10).paths == ()
    assert len(paths(storage)) == 1


def test_sweeps_and_commits_at_the_same_time_lose_nothing(storage: CheckpointStorage) -> None:
    done = threading.Event()

    def sweep() -> None:
        while not done.is_set():
            newest = storage.latest()
            if newest is not None and newest.batch_id is not None:
                storage.retain(2)
                storage.sweep(newest.batch_id)

    with ThreadPoolExecutor(2) as threads:
        sweeping = [threads.submit(sweep) for _ in range(2)]
        try:
            chain(storage, 25)
        finally:
            done.set()
        for future in sweeping:
            future.result()

    storage.retain(2)
    assert storage.checkpoint_ids() == [24, 25]
    assert all(storage.verify(checkpoint_id).ok for checkpoint_id in (24, 25))


# Verification


def with_operator_state(storage: CheckpointStorage, count: int) -> CheckpointRecord:
    file = storage.write_file([ListSection.of("l", pa.array([1, 2]))], batch_id=0, run="run")
    record = record_of(1, put_file(storage, 0))
    operator = OperatorHandle(file=file, states={"l": OperatorStateMeta("even", count)})
    subtask = msgspec.structs.replace(record.subtasks[0], operator=(operator,))
    return msgspec.structs.replace(record, subtasks=(subtask,))


def test_a_sound_checkpoint_has_no_problems(storage: CheckpointStorage) -> None:
    storage.commit(with_operator_state(storage, 2))
    seen: list[tuple[int, int]] = []

    report = storage.verify(1, lambda done, total: seen.append((done, total)))

    assert report.ok
    assert report.files == 2
    assert seen[-1] == (report.bytes, report.bytes)
    report.raise_if_broken()


def test_every_flipped_byte_of_a_file_is_reported(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    record = with_operator_state(storage, 2)
    storage.commit(record)

    for path in record.files:
        data = (tmp_path / path).read_bytes()
        for index in range(len(data)):
            broken = bytearray(data)
            broken[index] ^= 0x40
            (tmp_path / path).write_bytes(broken)
            assert {problem.path for problem in storage.verify(1).problems} == {
                str(tmp_path / path)
            }
        (tmp_path / path).write_bytes(data + b"!")
        assert not storage.verify(1).ok
        (tmp_path / path).write_bytes(data)
    assert storage.verify(1).ok


def test_all_problems_are_reported(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    files = [put_file(storage, 0, count) for count in (100_000, 10, 20, 30)]
    storage.commit(record_of(1, *files))
    segments = storage.reader(files[0]).sections["count"].segments
    damage = {0: [segments[1].offset, segments[3].offset], 1: [5], 2: [files[2].size - 1]}
    for index, offsets in damage.items():
        path = tmp_path / (files[index].path or "")
        data = bytearray(path.read_bytes())
        for offset in offsets:
            data[offset + 20 if index == 0 else offset] ^= 1
        path.write_bytes(data)
    (tmp_path / (files[3].path or "")).unlink()

    report = storage.verify(1)

    assert [problem.path for problem in report.problems] == [
        f"{storage.url}/{files[index].path}" for index in (0, 0, 1, 2, 3)
    ]
    assert isinstance(report.problems[-1].error, SnapshotMissingError)
    with pytest.raises(SnapshotCorruptError) as raised:
        report.raise_if_broken()
    assert len(raised.value.__notes__) == 4


def test_a_wrong_count_of_elements_is_reported(storage: CheckpointStorage) -> None:
    storage.commit(with_operator_state(storage, 3))

    (problem,) = storage.verify(1).problems
    assert "number of elements" in str(problem.error)


def test_a_key_group_that_cannot_be_is_reported(storage: CheckpointStorage) -> None:
    rows = int_rows([200], max_parallelism=256)
    file = storage.write_file([KeyedSection.of(rows)], batch_id=0, run="run")
    storage.commit(record_of(1, file))

    (problem,) = storage.verify(1).problems
    assert "below 128" in str(problem.error)


# Copies


def other_root(root: str) -> str:
    return f"{root}-copy"


def test_a_copy_stands_on_its_own(root: str, storage: CheckpointStorage) -> None:
    records = chain(storage, 2)
    inline = storage.write_file(
        [KeyedSection.of(int_rows([1]))], batch_id=1, run="run", inline_limit=1 << 20
    )
    record = record_of(3, put_file(storage, 2, 200_000), inline, parent=records[-1])
    storage.commit(record)
    destination = CheckpointStorage(other_root(root))

    copy = storage.copy_to(record, destination)
    storage.file_system.delete(paths(storage))

    assert destination.checkpoint_ids() == [3]
    assert (copy.parent_id, copy.parent_digest) == (None, None)
    assert CheckpointStorage.resolve(other_root(root))[1] == copy
    assert destination.verify(3).ok
    stored, kept_inline = (handle.file for handle in copy.subtasks[0].keyed)
    assert len(values_of(destination.reader(stored).read_rows("count", ALL))) == 200_000
    assert kept_inline == inline
    assert not set(copy.files) & set(record.files)


def test_a_copy_of_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "operator")
    (record,) = chain(storage, 1)
    path = tmp_path / "operator" / next(iter(record.files))
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    destination = CheckpointStorage(tmp_path / "copy")

    with pytest.raises(SnapshotCorruptError):
        storage.copy_to(record, destination)

    assert destination.checkpoint_ids() == []


def test_a_copy_needs_an_empty_root(storage: CheckpointStorage) -> None:
    (record,) = chain(storage, 1)

    with pytest.raises(StorageError, match="root of its own"):
        storage.copy_to(record, storage)


def test_a_moved_folder_can_be_restored(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "here")
    (record,) = chain(storage, 1)
    (tmp_path / "here").rename(tmp_path / "there")

    moved, found = CheckpointStorage.resolve(tmp_path / "there")

    assert found == record
    assert moved.verify(1).ok
