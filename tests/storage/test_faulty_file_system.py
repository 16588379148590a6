from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flowstate.errors import SnapshotMissingError, StoreFullError, StoreUnavailableError
from flowstate.storage.filesystems import FileEntry, StateFileSystem, open_file_system
from flowstate.testing.faults import (
    Fault,
    FaultAction,
    FaultyFileSystem,
    Operation,
    OperationName,
    SimulatedCrashError,
)

Use = Callable[[StateFileSystem], object]

CRASHES = [FaultAction.CRASH_BEFORE, FaultAction.CRASH_AFTER]


@pytest.fixture(params=["memory", "local"])
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> StateFileSystem:
    return open_file_system(tmp_path if request.param == "local" else f"memory:/{tmp_path}")


def _write_output(files: StateFileSystem) -> None:
    with files.open_output("folder/output") as output:
        output.write(b"first,")
        output.write(b"second")


def _use_everything(files: StateFileSystem) -> None:
    files.write("folder/file", b"data")
    files.create_exclusively("record", b"record")
    _write_output(files)
    files.read("folder/file")
    files.read_ranges("folder/file", [(0, 1)])
    files.list("folder")
    files.delete(["folder/file", "record"])


USES: list[tuple[OperationName, Use]] = [
    (OperationName.WRITE, lambda files: files.write("path", b"data")),
    (OperationName.CREATE_EXCLUSIVELY, lambda files: files.create_exclusively("path", b"data")),
    (OperationName.READ, lambda files: files.read("there")),
    (OperationName.READ_RANGES, lambda files: files.read_ranges("there", [(0, 1)])),
    (OperationName.LIST, lambda files: files.list("")),
    (OperationName.MOVE, lambda files: files.move({"there": "elsewhere"})),
    (OperationName.DELETE, lambda files: files.delete(["there"])),
    (OperationName.OPEN_OUTPUT, _write_output),
    (OperationName.WRITE_OUTPUT, _write_output),
    (OperationName.CLOSE_OUTPUT, _write_output),
]
every_use = pytest.mark.parametrize(("name", "use"), USES, ids=[name.value for name, _ in USES])


def _at(name: OperationName) -> Callable[[Operation], bool]:
    return lambda operation: operation.name is name


# Counting


def test_every_operation_is_recorded_in_order(inner: StateFileSystem) -> None:
    files = FaultyFileSystem(inner)
    _use_everything(files)

    assert [(operation.name.value, operation.path) for operation in files.operations] == [
        ("write", "folder/file"),
        ("create_exclusively", "record"),
        ("open_output", "folder/output"),
        ("write_output", "folder/output"),
        ("write_output", "folder/output"),
        ("close_output", "folder/output"),
        ("read", "folder/file"),
        ("read_ranges", "folder/file"),
        ("list", "folder"),
        ("delete", "folder/file"),
        ("delete", "record"),
    ]
    assert [operation.number for operation in files.operations] == list(range(11))


def test_the_operations_of_racing_threads_have_a_number_each(inner: StateFileSystem) -> None:
    files = FaultyFileSystem(inner)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: files.write(str(number), b""), range(100)))

    assert [operation.number for operation in files.operations] == list(range(100))
    assert {operation.path for operation in files.operations} == {str(n) for n in range(100)}


def test_a_fault_by_number_hits_that_operation_only(inner: StateFileSystem) -> None:
    files = FaultyFileSystem(inner, [Fault(FaultAction.FAIL, at=1)])
    files.write("zero", b"")
    with pytest.raises(StoreUnavailableError):
        files.write("one", b"")
    files.write("two", b"")

    assert [entry.path for entry in inner.list("")] == ["two", "zero"]
    assert len(files.operations) == 3


@pytest.mark.parametrize(("times", "failures"), [(1, 1), (3, 3), (None, 5)])
def test_a_fault_by_predicate_hits_as_often_as_it_says(
    inner: StateFileSystem, times: int | None, failures: int
) -> None:
    files = FaultyFileSystem(
        inner, [Fault(FaultAction.FAIL, at=lambda it: it.path == "bad", times=times)]
    )
    failed = 0
    for _ in range(5):
        files.write("good", b"")
        try:
            files.write("bad", b"")
        except StoreUnavailableError:
            failed += 1

    assert failed == failures


def test_faults_may_come_later_and_may_go_again(inner: StateFileSystem) -> None:
    files = FaultyFileSystem(inner)
    files.write("before", b"")
    files.inject(Fault(FaultAction.FAIL, at=lambda _: True, times=None))
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            files.write("meanwhile", b"")
    files.heal()
    files.write("after", b"")

    assert [entry.path for entry in inner.list("")] == ["after", "before"]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Fault(FaultAction.FAIL, at=-1), id="negative-number"),
        pytest.param(lambda: Fault(FaultAction.FAIL, at=0, times=0), id="no-times"),
        pytest.param(lambda: Fault(FaultAction.DELAY, at=0), id="no-delay"),
        pytest.param(lambda: Fault(FaultAction.FAIL, at=0, delay_s=1), id="delay-of-a-failure"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(make: Callable[[], Fault]) -> None:
    with pytest.raises(ValueError, match=r"number|times|delay_s"):
        make()


# Failing


@every_use
@pytest.mark.parametrize(
    ("action", "error"),
    [
        (FaultAction.FAIL, StoreUnavailableError),
        (FaultAction.FULL, StoreFullError),
    ],
)
def test_a_failed_operation_has_no_effect_and_the_next_one_succeeds(
    inner: StateFileSystem,
    name: OperationName,
    use: Use,
    action: FaultAction,
    error: type[Exception],
) -> None:
    inner.write("there", b"data")
    files = FaultyFileSystem(inner, [Fault(action, at=_at(name))])

    with pytest.raises(error):
        use(files)

    # An output that failed half-way was removed, as the contract says.
    assert inner.list("") == [FileEntry("there", 4)]
    assert not files.crashed
    use(files)


def test_a_lost_reply_is_a_failure_with_an_effect(inner: StateFileSystem) -> None:
    files = FaultyFileSystem(inner, [Fault(FaultAction.FAIL_AFTER, at=0)])

    with pytest.raises(StoreUnavailableError):
        files.create_exclusively("record", b"ours")

    assert inner.read("record") == b"ours"
    assert not files.create_exclusively("record", b"again")


# Crashing


@every_use
@pytest.mark.parametrize("action", CRASHES)
def test_nothing_survives_a_crash(
    inner: StateFileSystem, name: OperationName, use: Use, action: FaultAction
) -> None:
    inner.write("there", b"data")
    files = FaultyFileSystem(inner, [Fault(action, at=_at(name))])

    with pytest.raises(SimulatedCrashError):
        use(files)

    assert files.crashed
    before = inner.list("")
    operations = len(files.operations)
    files.heal()
    for _, any_use in USES:
        with pytest.raises(SimulatedCrashError):
            any_use(files)
    assert inner.list("") == before
    assert len(files.operations) == operations


@pytest.mark.parametrize(
    ("action", "left"),
    [(FaultAction.CRASH_BEFORE, False), (FaultAction.CRASH_AFTER, True)],
)
@pytest.mark.parametrize("use", [USES[0][1], USES[1][1]], ids=["write", "create"])
def test_a_crash_comes_before_or_after_the_effect(
    inner: StateFileSystem, use: Use, action: FaultAction, left: bool
) -> None:
    files = FaultyFileSystem(inner, [Fault(action, at=0)])

    with pytest.raises(SimulatedCrashError):
        use(files)

    assert inner.list("") == ([FileEntry("path", 4)] if left else [])


@pytest.mark.parametrize(
    ("number", "action", "left"),
    [
        (0, FaultAction.CRASH_BEFORE, None),
        (0, FaultAction.CRASH_AFTER, b""),
        (1, FaultAction.CRASH_BEFORE, b""),
        (1, FaultAction.CRASH_AFTER, b"first,"),
        (2, FaultAction.CRASH_BEFORE, b"first,"),
        (2, FaultAction.CRASH_AFTER, b"first,second"),
        (3, FaultAction.CRASH_BEFORE, b"first,second"),
        (3, FaultAction.CRASH_AFTER, b"first,second"),
    ],
)
def test_a_crash_leaves_what_was_written_to_an_open_output(
    inner: StateFileSystem, number: int, action: FaultAction, left: bytes | None
) -> None:
    files = FaultyFileSystem(inner, [Fault(action, at=number)])

    with pytest.raises(SimulatedCrashError):
        _write_output(files)

    if left is None:
        assert inner.list("") == []
    else:
        assert inner.list("") == [FileEntry("folder/output", len(left))]
        assert inner.read("folder/output") == left


def test_a_crash_at_another_operation_leaves_the_open_outputs_too(inner: StateFileSystem) -> None:
    files = FaultyFileSystem(inner, [Fault(FaultAction.CRASH_AFTER, at=_at(OperationName.LIST))])

    with pytest.raises(SimulatedCrashError):
        _list_while_writing(files)

    assert inner.read("one") == b"1"
    assert inner.read("two") == b"2"


def _list_while_writing(files: StateFileSystem) -> None:
    with files.open_output("one") as one, files.open_output("two") as two:
        one.write(b"1")
        two.write(b"2")
        files.list("")


def test_no_handler_of_errors_goes_on_after_a_crash(inner: StateFileSystem) -> None:
    files = FaultyFileSystem(inner, [Fault(FaultAction.CRASH_BEFORE, at=0)])

    def handle_all_errors() -> None:
        try:
            files.write("file", b"")
        except Exception:
            pytest.fail("a dead process handles no errors")

    with pytest.raises(SimulatedCrashError):
        handle_all_errors()


def test_a_crash_takes_threads_in_the_middle_of_an_operation_along(inner: StateFileSystem) -> None:
    delayed, crashed = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        delayed.set()
        crashed.wait(60)

    delay = Fault(FaultAction.DELAY, at=lambda it: it.path == "slow", delay_s=1)
    crash = Fault(FaultAction.CRASH_BEFORE, at=lambda it: it.path == "deadly")
    files = FaultyFileSystem(inner, [delay, crash], sleep=sleep)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(files.write, "slow", b"")
        assert delayed.wait(60)
        with pytest.raises(SimulatedCrashError):
            files.write("deadly", b"")
        crashed.set()
        with pytest.raises(SimulatedCrashError):
            slow.result(60)

    assert inner.list("") == []


def test_a_crash_says_where_it_was_also_after_pickling(inner: StateFileSystem) -> None:
    files = FaultyFileSystem(inner, [Fault(FaultAction.CRASH_AFTER, at=0)])

    with pytest.raises(SimulatedCrashError) as caught:
        files.write("folder/file", b"")

    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == "crashed at operation 0: write of 'folder/file'"
    assert again.operation == files.operations[0]


# Truncating, delaying, killing


@pytest.mark.parametrize(
    ("number", "use", "left"),
    [
        pytest.param(0, USES[0][1], b"da", id="write"),
        pytest.param(0, USES[1][1], b"da", id="create"),
        pytest.param(2, _write_output, b"first,sec", id="output"),
    ],
)
def test_truncated_data_is_reported_as_written(
    inner: StateFileSystem, number: int, use: Use, left: bytes
) -> None:
    files = FaultyFileSystem(inner, [Fault(FaultAction.TRUNCATE, at=number)])
    use(files)
    (entry,) = inner.list("")

    assert inner.read(entry.path) == left


def test_a_truncated_piece_counts_as_a_whole_one(inner: StateFileSystem) -> None:
    files = FaultyFileSystem(inner, [Fault(FaultAction.TRUNCATE, at=1)])
    with files.open_output("file") as output:
        reported = output.write(b"1234"), output.tell()

    assert reported == (4, 4)
    assert inner.read("file") == b"12"


def test_a_truncation_of_what_writes_no_data_is_a_mistake_of_the_test(
    inner: StateFileSystem,
) -> None:
    files = FaultyFileSystem(inner, [Fault(FaultAction.TRUNCATE, at=0)])

    with pytest.raises(ValueError, match="writes no data"):
        files.list("")


def test_a_truncation_and_a_crash_are_a_death_in_mid_write(inner: StateFileSystem) -> None:
    faults = [Fault(FaultAction.TRUNCATE, at=0), Fault(FaultAction.CRASH_AFTER, at=0)]

    with pytest.raises(SimulatedCrashError):
        FaultyFileSystem(inner, faults).write("file", b"data")
    assert inner.read("file") == b"da"


def test_a_delayed_operation_comes_later_and_then_succeeds(inner: StateFileSystem) -> None:
    seen: list[tuple[float, list[FileEntry]]] = []
    fault = Fault(FaultAction.DELAY, at=0, delay_s=1.5)
    files = FaultyFileSystem(inner, [fault], sleep=lambda s: seen.append((s, inner.list(""))))
    files.write("file", b"data")

    assert seen == [(1.5, [])]
    assert inner.read("file") == b"data"


KILLED = """
    import sys
    from flowstate.storage.filesystems import open_file_system
    from flowstate.testing.faults import Fault, FaultAction, FaultyFileSystem

    files = FaultyFileSystem(open_file_system(sys.argv[1]), [Fault(FaultAction.KILL, at=3)])
    files.write("whole", b"data")
    with files.open_output("part") as output:
        output.write(bytes(3 << 20))
        output.write(b"never")
"""


def test_a_kill_is_the_end_of_a_real_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    process = subprocess.run(command, capture_output=True, check=False)
    files = open_file_system(tmp_path)

    assert process.returncode == -signal.SIGKILL
    assert files.read("whole") == b"data"
    # Nobody was left to remove it.
    assert files.read("part") == bytes(3 << 20)


# The way it is meant to be used


def test_every_crash_of_a_commit_can_be_enumerated(tmp_path: Path) -> None:
    def commit(files: StateFileSystem) -> None:
        with files.open_output("data") as output:
            output.write(b"1")
            output.write(b"2")
        files.create_exclusively("record", b"data")

    recorded = FaultyFileSystem(open_file_system(f"memory:/{tmp_path}/recorded"))
    commit(recorded)
    committed = []
    for number in range(len(recorded.operations)):
        for action in CRASHES:
            inner = open_file_system(f"memory:/{tmp_path}/{number}-{action.name}")
            with pytest.raises(SimulatedCrashError):
                commit(FaultyFileSystem(inner, [Fault(action, at=number)]))
            committed.append(_is_committed(inner))

    assert committed == [False] * 9 + [True]


def _is_committed(files: StateFileSystem) -> bool:
    try:
        return files.read(files.read("record").decode()) == b"12"
    except SnapshotMissingError:
        return False
