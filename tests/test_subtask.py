from __future__ import annotations

import datetime as dt
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowstate import (
    CheckpointStorage,
    KeyGroupAssigner,
    ListStateDescriptor,
    LocalOperator,
    MapStateDescriptor,
    StateTtlConfig,
    Subtask,
    SubtaskConfig,
    ValueStateDescriptor,
    commit_checkpoint,
)
from flowstate.checkpoint import handles_max
from flowstate.errors import (
    CheckpointNotFoundError,
    CheckpointSupersededError,
    KeyGroupError,
    MaxParallelismError,
    StateError,
    StateMigrationError,
    StorageError,
    StoreFullError,
    UnclaimedStateError,
)
from flowstate.keyed.lmdb_store import LmdbStore
from flowstate.keyed.working_state import WorkingState
from flowstate.subtask import INLINE_BYTES_MAX
from flowstate.testing.clock import ManualClock

COUNT = ValueStateDescriptor("count", int, default=0)
ROOT = "memory://subtasks"


@pytest.fixture
def url() -> str:
    return f"{ROOT}/{uuid.uuid4().hex}"


def open_operator(url: str, parallelism: int = 1, **options: Any) -> LocalOperator:
    options.setdefault("key_type", str)
    operator = LocalOperator(url, parallelism=parallelism, **options)
    if options["key_type"] is not None:
        for subtask in operator.subtasks:
            subtask.keyed.get_state(COUNT)
    return operator


def put(operator: LocalOperator, key: str, count: int) -> None:
    operator.subtask_of(key).keyed.get_state(COUNT).update(count)


def get(operator: LocalOperator, key: str) -> Any:
    return operator.subtask_of(key).keyed.get_state(COUNT).value()


# Working state on local disk follows the checkpoints.


def fill(operator: LocalOperator) -> None:
    """Make the state so large that a few changes do not have it written anew."""
    for number in range(2000):
        put(operator, f"filler-{number}", number * 7919)


def how_of(operator: LocalOperator) -> set[str]:
    found = [subtask.working_state for subtask in operator.subtasks]
    return {working.how for working in found if working is not None}


def test_working_state_is_reused_advanced_or_rebuilt(url: str, tmp_path: Path) -> None:
    with open_operator(url, working_folder=tmp_path) as first:
        fill(first)
        put(first, "a", 1)
        first.checkpoint()
        assert how_of(first) == {"rebuilt"}
    with open_operator(url, working_folder=tmp_path) as same:
        assert how_of(same) == {"reused"}
    elsewhere = open_operator(url)
    for count in (2, 3):
        put(elsewhere, "a", count)
        put(elsewhere, f"new-{count}", count)
        elsewhere.checkpoint()

    with open_operator(url, working_folder=tmp_path) as later:
        assert how_of(later) == {"advanced"}
        assert [get(later, key) for key in ("a", "new-2", "new-3", "b")] == [3, 2, 3, 0]
    with open_operator(url, 2, working_folder=tmp_path) as rescaled:
        assert how_of(rescaled) == {"rebuilt"}
        assert [get(rescaled, key) for key in ("a", "new-2", "new-3", "b")] == [3, 2, 3, 0]


def test_working_state_is_rebuilt_when_the_way_to_it_has_been_merged_away(
    url: str, tmp_path: Path
) -> None:
    with open_operator(url, working_folder=tmp_path) as first:
        put(first, "a", 1)
        first.checkpoint()
    elsewhere = open_operator(url)
    for count in range(2, 40):
        put(elsewhere, "a", count)
        put(elsewhere, f"key-{count}", count)
        elsewhere.checkpoint()

    with open_operator(url, working_folder=tmp_path) as later:
        assert how_of(later) == {"rebuilt"}
        assert get(later, "a") == 39
        assert get(later, "key-17") == 17


def test_working_state_is_advanced_over_deltas_that_were_merged(url: str, tmp_path: Path) -> None:
    descriptor = MapStateDescriptor("map", str, int)

    def map_of(operator: LocalOperator) -> Any:
        return operator.subtask_of("k").keyed.get_map_state(descriptor)

    with open_operator(url) as elsewhere:
        fill(elsewhere)
        for key in ("gone", "back"):
            put(elsewhere, key, 1)
        map_of(elsewhere).put_all({"x": 1, "y": 2})
        elsewhere.checkpoint()
        put(elsewhere, "a", 1)
        put(elsewhere, "b", 1)
        elsewhere.checkpoint()
        with open_operator(url, working_folder=tmp_path) as local:
            assert how_of(local) == {"rebuilt"}
        for key in ("gone", "back"):
            elsewhere.subtask_of(key).keyed.get_state(COUNT).clear()
        map_of(elsewhere).clear()
        map_of(elsewhere).put("z", 3)
        elsewhere.checkpoint()
        put(elsewhere, "back", 2)
        # The tier that is merged has deltas from before and from after the local version.
        for count in range(2, 10):
            put(elsewhere, "a", count)
            elsewhere.checkpoint()

    with open_operator(url, working_folder=tmp_path) as later:
        assert how_of(later) == {"advanced"}
        found = [get(later, key) for key in ("a", "b", "gone", "back", "filler-7")]
        assert found == [9, 1, 0, 2, 7 * 7919]
        assert dict(map_of(later).items()) == {"z": 3}


def test_the_next_checkpoint_after_a_fold_finds_working_state_to_advance(
    url: str, tmp_path: Path
) -> None:
    hows = []
    for count in range(1, 40):
        with open_operator(url, working_folder=tmp_path) as operator:
            put(operator, "a", count)
            put(operator, f"key-{count}", count)
            hows.append(how_of(operator))
            record = operator.checkpoint()

    assert any(handle.full and handle.last_checkpoint > 1 for handle in record.subtasks[0].keyed)
    assert {"rebuilt"} not in hows[1:]


def test_deletions_and_cleared_maps_reach_working_state_that_is_advanced(
    url: str, tmp_path: Path
) -> None:
    descriptor = MapStateDescriptor("map", str, int)

    def map_of(operator: LocalOperator) -> Any:
        return operator.subtask_of("k").keyed.get_map_state(descriptor)

    with open_operator(url, working_folder=tmp_path) as first:
        fill(first)
        put(first, "gone", 1)
        map_of(first).put_all({"x": 1, "y": 2})
        first.checkpoint()
    elsewhere = open_operator(url)
    elsewhere.subtask_of("gone").keyed.get_state(COUNT).clear()
    map_of(elsewhere).clear()
    map_of(elsewhere).put("z", 3)
    elsewhere.checkpoint()

    with open_operator(url, working_folder=tmp_path) as later:
        assert how_of(later) == {"advanced"}
        assert get(later, "gone") == 0
        assert map_of(later).items() == [("z", 3)]


def test_working_state_that_could_not_advance_does_so_with_the_next_checkpoint(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = ListStateDescriptor("list", int)

    def full(*_: object, **__: object) -> None:
        raise StoreFullError("the local disk is full")

    def list_of(operator: LocalOperator) -> Any:
        return operator.subtask_of("a").keyed.get_list_state(descriptor)

    def found(operator: LocalOperator) -> list[Any]:
        return [get(operator, "a"), get(operator, "b"), list_of(operator).get()]

    with open_operator(url, working_folder=tmp_path) as operator:
        put(operator, "a", 1)
        put(operator, "b", 1)
        list_of(operator).add(1)
        operator.checkpoint()
        put(operator, "a", 2)
        list_of(operator).add(2)
        monkeypatch.setattr(LmdbStore, "apply", full)
        with pytest.raises(StoreFullError):
            operator.checkpoint()
        monkeypatch.undo()
        assert found(operator) == [2, 1, [1, 2]]

        put(operator, "b", 3)
        list_of(operator).add(3)
        assert operator.checkpoint().checkpoint_id == 3
        assert found(operator) == [2, 3, [1, 2, 3]]
    with open_operator(url, working_folder=tmp_path) as again:
        assert how_of(again) == {"reused"}
        assert found(again) == [2, 3, [1, 2, 3]]


@pytest.mark.parametrize("broken", ["the other subtask's folder", "operator state"])
def test_a_start_that_fails_lets_go_of_working_state(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    with open_operator(url, 2, working_folder=tmp_path) as operator:
        operator.checkpoint()
    closed: list[WorkingState] = []
    close = WorkingState.close

    def noted(state: WorkingState) -> None:
        closed.append(state)
        close(state)

    monkeypatch.setattr(WorkingState, "close", noted)
    if broken == "operator state":
        monkeypatch.setattr("flowstate.subtask.operator_share", raise_lost)
    else:
        other = tmp_path / "64-127-of-128"
        other.rename(tmp_path / "elsewhere")
        other.write_text("a file in its place")
    with pytest.raises(StorageError):
        open_operator(url, 2, working_folder=tmp_path)

    assert len(closed) == 1


def raise_lost(*_: object, **__: object) -> None:
    raise StorageError("lost")


# What does not fit is refused.


def test_another_max_parallelism_is_refused(url: str) -> None:
    open_operator(url, max_parallelism=8).checkpoint()

    with pytest.raises(MaxParallelismError, match="Max parallelism mismatch"):
        open_operator(url, max_parallelism=16)
    with pytest.raises(MaxParallelismError, match=r"\(8\) of the restored state is lower.*\(9\)"):
        open_operator(url, 9)
    assert open_operator(url, 8).max_parallelism == 8


def test_a_parallelism_above_the_max_parallelism_is_refused(url: str) -> None:
    with pytest.raises(KeyGroupError, match="must not be smaller than parallelism"):
        open_operator(url, 9, max_parallelism=8)


@pytest.mark.parametrize("parallelism", [0, -1, 2.0, "2", 40_000])
def test_a_parallelism_that_is_none_is_refused(url: str, parallelism: Any) -> None:
    with pytest.raises(KeyGroupError, match="parallelism"):
        open_operator(url, parallelism)


def test_a_max_parallelism_of_0_is_not_the_default(url: str) -> None:
    with pytest.raises(KeyGroupError, match="not within bounds: 0"):
        open_operator(url, max_parallelism=0)


@pytest.mark.parametrize("count", [0, -1, "2", None])
def test_how_many_checkpoints_to_retain_is_checked_before_one_is_taken(
    url: str, count: Any
) -> None:
    with pytest.raises(StateError, match="checkpoints_retained must be"):
        open_operator(url, checkpoints_retained=count)


def test_another_assigner_or_key_type_is_refused(url: str) -> None:
    operator = open_operator(url)
    put(operator, "a", 1)
    operator.checkpoint()

    for assigner in (KeyGroupAssigner.XXHASH64, "xxhash64"):
        with pytest.raises(MaxParallelismError, match="assigned to key groups by 'flink'"):
            open_operator(url, assigner=assigner)
    assert get(open_operator(url, assigner="flink"), "a") == 1
    with pytest.raises(StateMigrationError, match=r"keys are of type string.*int64"):
        LocalOperator(url, parallelism=1, key_type=int)


def test_keyed_state_is_not_dropped_by_an_operator_without_a_key(url: str) -> None:
    operator = open_operator(url)
    put(operator, "a", 1)
    operator.checkpoint()
    storage = CheckpointStorage(url)
    config = SubtaskConfig(subtask_index=0, parallelism=1)

    with pytest.raises(UnclaimedStateError, match="'count'"):
        Subtask(storage, config, restored=storage.latest())


def test_a_namespace_type_cannot_change(url: str) -> None:
    descriptor = ValueStateDescriptor("windowed", int)
    operator = open_operator(url)
    state = operator.subtask_of("a").keyed.get_state(descriptor, tuple[int, int])
    state.set_current_namespace((0, 10))
    state.update(1)
    operator.checkpoint()

    keyed = open_operator(url).subtask_of("a").keyed
    with pytest.raises(StateMigrationError, match="namespaces of type struct"):
        keyed.get_state(descriptor)
    again = keyed.get_state(descriptor, tuple[int, int])
    again.set_current_namespace((0, 10))
    assert again.value() == 1


def test_a_key_of_another_subtask_is_an_error_and_not_a_lost_key(url: str) -> None:
    operator = open_operator(url, 2)
    owner = operator.subtask_of("a")
    other = operator.subtasks[1 - operator.subtasks.index(owner)]
    other.keyed.set_current_key("a")
    other.keyed.get_state(COUNT).update(1)

    with pytest.raises(StateError, match="this subtask owns"):
        operator.checkpoint()


def test_a_mistyped_location_to_restore_from_does_not_start_from_nothing(url: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint below"):
        open_operator(url, restore_from=f"{url}-mistyped")


# Two runs at one location.


def test_the_second_of_two_runs_at_one_location_is_refused_and_changes_nothing(url: str) -> None:
    first, second = open_operator(url), open_operator(url)
    put(first, "a", 1)
    put(second, "a", 2)
    first.checkpoint()

    with pytest.raises(CheckpointSupersededError, match="two runs share one location"):
        second.checkpoint()
    assert get(open_operator(url), "a") == 1


# Small state, many checkpoints.


def test_small_state_stands_in_the_record_and_large_state_in_files(url: str) -> None:
    operator = open_operator(url, 2)
    put(operator, "a", 1)
    small = operator.checkpoint()
    for number in range(5000):
        put(operator, f"key-{number}", number * 7919)
    large = operator.checkpoint()

    assert not small.files
    assert large.files
    inlined = [file.size for part in large.subtasks for file in part.files if file.inline]
    assert sum(inlined) <= INLINE_BYTES_MAX


def test_a_restore_never_has_more_files_to_read_than_the_bound(url: str) -> None:
    operator = open_operator(url, 2)
    most = 0
    for number in range(120):
        for key in range(20):
            put(operator, f"key-{number}-{key}", number)
        record = operator.checkpoint()
        most = max(most, *(len(part.keyed) for part in record.subtasks))

    assert most <= handles_max()
    assert get(open_operator(url, 3), "key-60-7") == 60


def test_attributes_travel_with_the_checkpoint(url: str) -> None:
    operator = open_operator(url)
    operator.checkpoint({"offset": {"line": 7}})

    record = open_operator(url).record
    assert record is not None
    assert record.attributes == {"offset": {"line": 7}}


def test_operator_state_alone_needs_no_key(url: str) -> None:
    descriptor = ListStateDescriptor("buffer", str)
    operator = open_operator(url, 2, key_type=None)
    for index, subtask in enumerate(operator.subtasks):
        subtask.operator.get_list_state(descriptor).add_all([f"{index}-a", f"{index}-b"])
    operator.checkpoint()

    again = open_operator(url, 3, key_type=None)
    lists = [subtask.operator.get_list_state(descriptor).get() for subtask in again.subtasks]
    assert lists == [["0-a", "0-b"], ["1-a"], ["1-b"]]
    with pytest.raises(StateError, match="give it a key_type"):
        _ = again.subtasks[0].keyed


# What a first user stumbles over.


def test_a_type_may_be_widened_by_the_one_subtask_that_has_met_a_key(url: str) -> None:
    narrow = ValueStateDescriptor("number", pa.int32())
    wide = ValueStateDescriptor("number", pa.int64())
    operator = LocalOperator(url, parallelism=2, key_type=str)
    for key in ("a", "b", "c", "d"):
        operator.subtask_of(key).keyed.get_state(narrow).update(1)
    operator.checkpoint()

    lazy = LocalOperator(url, parallelism=2, key_type=str)
    lazy.subtask_of("a").keyed.get_state(wide).update(1 << 40)
    lazy.checkpoint()

    again = LocalOperator(url, parallelism=3, key_type=str)
    found = [again.subtask_of(key).keyed.get_state(wide).value() for key in ("a", "b", "c", "d")]
    assert found == [1 << 40, 1, 1, 1]


def test_a_location_with_checkpoints_ignores_restore_from_with_a_warning(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    for location, count in ((url, 1), (f"{url}-other", 2)):
        operator = open_operator(location)
        put(operator, "a", count)
        operator.checkpoint()

    again = open_operator(url, restore_from=f"{url}-other")
    assert get(again, "a") == 1
    assert "restore_from is ignored" in caplog.text


def test_a_union_list_that_nobody_asks_for_does_not_multiply(url: str) -> None:
    descriptor = ListStateDescriptor("union", int)
    operator = open_operator(url, 2, key_type=None)
    for subtask in operator.subtasks:
        subtask.operator.get_union_list_state(descriptor).add(subtask.subtask_index)
    operator.checkpoint()
    for parallelism in (3, 3, 2):
        open_operator(url, parallelism, key_type=None).checkpoint()

    again = open_operator(url, 2, key_type=None)
    for subtask in again.subtasks:
        assert sorted(subtask.operator.get_union_list_state(descriptor).get()) == [0, 1]


def test_keyed_state_may_be_dropped_on_purpose(url: str) -> None:
    operator = open_operator(url)
    put(operator, "a", 1)
    operator.checkpoint()

    keyless = open_operator(url, key_type=None, allow_non_restored_state=True)
    keyless.subtasks[0].operator.get_list_state(ListStateDescriptor("buffer", int)).add(1)
    record = keyless.checkpoint()
    assert record.subtasks[0].keyed == ()
    assert record.keyed_states == {}


def test_a_query_started_from_elsewhere_goes_on_checkpointing(url: str, tmp_path: Path) -> None:
    first = open_operator(url)
    for count in range(4):
        put(first, "a", count)
        first.checkpoint()

    with open_operator(f"{url}-new", restore_from=url, working_folder=tmp_path) as second:
        for count in range(10, 14):
            put(second, "a", count)
            put(second, f"b{count}", count)
            second.checkpoint()
    with open_operator(f"{url}-new", working_folder=tmp_path) as again:
        assert how_of(again) == {"reused"}
        assert (get(again, "a"), get(again, "b11")) == (13, 11)


def test_the_second_snapshot_after_a_start_from_elsewhere_needs_nothing_of_it(
    url: str, tmp_path: Path
) -> None:
    with open_operator(url) as elsewhere:
        fill(elsewhere)
        record = elsewhere.checkpoint()
    assert record.files, "what stands in the record itself would be found anywhere"
    storage = CheckpointStorage(f"{url}-copy")
    config = SubtaskConfig(subtask_index=0, parallelism=1, key_type=str, run="run")
    subtask = Subtask(storage, config, restored=record, restored_from=elsewhere.storage)
    count = subtask.keyed.get_state(COUNT)
    parent = None
    snapshots = [subtask.snapshot(1)]
    subtask.keyed.set_current_key("a")
    count.update(1)
    snapshots.append(subtask.snapshot(2))
    for snapshot in snapshots:
        parent = commit_checkpoint(
            storage, [snapshot], [subtask.describe()], parent=parent, run="run"
        ).record
    elsewhere.storage.file_system.delete(record.files)

    assert storage.verify(2).ok
    with open_operator(storage.url) as copy:
        assert [get(copy, "a"), get(copy, "filler-7")] == [1, 7 * 7919]


def test_a_ttl_that_was_off_for_a_while_begins_anew(url: str) -> None:
    clock = ManualClock(0)
    ttl = StateTtlConfig(ttl=dt.timedelta(milliseconds=100))
    timed = ValueStateDescriptor("value", int, ttl=ttl)
    plain = ValueStateDescriptor("value", int)

    def state(descriptor: ValueStateDescriptor) -> tuple[LocalOperator, Any]:
        operator = LocalOperator(url, parallelism=1, key_type=str, clock=clock)
        return operator, operator.subtask_of("k").keyed.get_state(descriptor)

    operator, value = state(timed)
    value.update(5)
    operator.checkpoint()
    operator, value = state(plain)
    operator.checkpoint()
    clock.set(1000)
    operator, value = state(timed)
    assert value.value() == 5
    operator.checkpoint()

    clock.set(1099)
    assert state(timed)[1].value() == 5
    clock.set(1100)
    assert state(timed)[1].value() is None
