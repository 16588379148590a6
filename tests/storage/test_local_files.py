from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from flowstate.errors import StoreFullError, StoreUnavailableError, StoreUnsupportedError
from flowstate.storage.filesystems import (
    TEMPORARY_PREFIX,
    FileEntry,
    StateFileSystem,
    open_file_system,
)

RACERS = 8
RACE_ROUNDS = 40
RACE_TIMEOUT_S = 120
NOBODY = 65534

# A record that is longer than any buffer on its way, so that a kill can come in the middle of it.
RECORD = bytes(range(256)) * (1 << 13)


# Races


def _keep_barrier(barrier: Barrier) -> None:
    # A barrier reaches a worker only while it is started, not with its task.
    _keep_barrier.barrier = barrier  # type: ignore[attr-defined]


def _create_in_each_round(root: str, racer: int) -> list[bool]:
    files = open_file_system(root)
    barrier: Barrier = _keep_barrier.barrier  # type: ignore[attr-defined]
    created = []
    for number in range(RACE_ROUNDS):
        barrier.wait(RACE_TIMEOUT_S)
        created.append(files.create_exclusively(f"{number}/record", bytes([racer]) * 4096))
    return created


def test_of_racing_processes_exactly_one_creates(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        RACERS, spawn, initializer=_keep_barrier, initargs=(spawn.Barrier(RACERS),)
    ) as processes:
        tasks = [
            processes.submit(_create_in_each_round, str(tmp_path), racer) for racer in range(RACERS)
        ]
        created = [task.result(RACE_TIMEOUT_S) for task in tasks]

    files = open_file_system(tmp_path)
    for number, outcomes in enumerate(zip(*created, strict=True)):
        assert outcomes.count(True) == 1
        assert files.read(f"{number}/record") == bytes([outcomes.index(True)]) * 4096
    assert len(files.list("")) == RACE_ROUNDS


# Kills

# A process for each call to be killed at; the first that is not killed ends it. They are forked,
# because to start an interpreter for each takes many times longer than what is tested.
KILLED_AT_EACH_CALL = """
    import itertools, os, signal, sys
    from flowstate.storage.filesystems import open_file_system

    def create(root, calls_left):
        def counted(call):
            def run(*args, **kwargs):
                nonlocal calls_left
                calls_left -= 1
                if calls_left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)
            return run

        for name in ("open", "mkdir", "fsync", "link", "unlink", "close"):
            setattr(os, name, counted(getattr(os, name)))
        open_file_system(root).create_exclusively("folder/record", b"record" * 1000)
        os._exit(0)

    for number in itertools.count():
        child = os.fork()
        if child == 0:
            create(f"{sys.argv[1]}/{number}", number)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status)
        if status != -signal.SIGKILL:
            break
"""

CREATES_UNTIL_KILLED = """
    import itertools, sys
    from flowstate.storage.filesystems import open_file_system

    record = bytes(range(256)) * (1 << 13)
    files = open_file_system(sys.argv[1])
    for number in itertools.count():
        files.create_exclusively(f"records/{number}", record)
        print(number, flush=True)
"""


def _command(script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]


def test_a_kill_at_any_call_leaves_the_whole_record_or_none(tmp_path: Path) -> None:
    whole = b"record" * 1000
    command = _command(KILLED_AT_EACH_CALL, tmp_path)
    process = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    statuses = [int(line) for line in process.stdout.split()]
    decided = []
    for number in range(len(statuses)):
        files = open_file_system(tmp_path / str(number))
        left = [entry for entry in files.list("") if TEMPORARY_PREFIX not in entry.path]
        assert left in ([], [FileEntry("folder/record", len(whole))])
        # The next process must find a decision, not a wreck.
        assert files.create_exclusively("folder/record", b"next") is (left == [])
        assert files.read("folder/record") == (whole if left else b"next")
        decided.append(bool(left))

    assert statuses == [-signal.SIGKILL] * (len(statuses) - 1) + [0]
    # Kills came on both sides of the one call that decides.
    assert decided == sorted(decided)
    assert set(decided[:-1]) == {False, True}


def test_a_kill_in_mid_write_leaves_no_part_of_a_record(tmp_path: Path) -> None:
    seeded = random.Random(20)
    for round_number in range(4):
        root = tmp_path / str(round_number)
        with subprocess.Popen(
            _command(CREATES_UNTIL_KILLED, root), stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(seeded.uniform(0, 0.03))
            process.kill()
        files = open_file_system(root)
        records = [
            entry
            for entry in files.list("records")
            if not entry.path.startswith(f"records/{TEMPORARY_PREFIX}")
        ]

        assert records
        for entry in records:
            assert files.read(entry.path) == RECORD


# Failures of the disk

both_writes = pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda files: files.write("folder/file", b"data"), id="write"),
        pytest.param(lambda files: files.create_exclusively("folder/file", b"data"), id="create"),
    ],
)


@pytest.fixture
def files(tmp_path: Path) -> StateFileSystem:
    return open_file_system(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("length", [1, 100_000, 3 << 20])
def test_a_full_disk_is_told_from_other_failures(
    files: StateFileSystem, tmp_path: Path, length: int
) -> None:
    # The device behind the name answers every write as a full disk does.
    (tmp_path / "file").symlink_to("/dev/full")

    with pytest.raises(StoreFullError, match="Free space") as caught:
        files.write("file", b"x" * length)

    assert str(tmp_path / "file") in str(caught.value)
    assert os.listdir(tmp_path) == []


def _fail_to_sync(number: int) -> Callable[[int], None]:
    def fsync(descriptor: int) -> None:
        # Folders are synced too, while they are made; only the data finds no space.
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    return fsync


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@both_writes
def test_a_disk_that_is_found_full_late_leaves_nothing(
    files: StateFileSystem,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    write: Callable[[StateFileSystem], object],
) -> None:
    # Disks allocate late, and servers check quotas late: the write may succeed, the sync fail.
    monkeypatch.setattr(os, "fsync", _fail_to_sync(number))

    with pytest.raises(StoreFullError):
        write(files)

    monkeypatch.undo()
    assert files.list("") == []


@both_writes
def test_a_failing_disk_leaves_nothing(
    files: StateFileSystem,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[StateFileSystem], object],
) -> None:
    monkeypatch.setattr(os, "fsync", _fail_to_sync(errno.EIO))

    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        write(files)

    monkeypatch.undo()
    assert files.list("") == []


def test_an_output_that_failed_is_not_flushed_later(files: StateFileSystem) -> None:
    failed = ExitStack()
    failed.enter_context(files.open_output("one")).write(b"the rest in the buffer")
    failed.__exit__(LookupError, LookupError(), None)
    # The next file gets the descriptor's number, so a late flush would land in it.
    with files.open_output("two"):
        del failed
        gc.collect()

    assert files.list("") == [FileEntry("two", 0)]


def test_a_file_system_without_hard_links_is_refused(
    files: StateFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)

    with pytest.raises(StoreUnsupportedError, match="no hard links"):
        files.create_exclusively("folder/record", b"record")
    assert files.list("") == []


def test_a_link_whose_reply_was_lost_is_known_to_be_ours(
    files: StateFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_link = os.link

    def link_twice(source: str, target: str) -> None:
        make_link(source, target)
        make_link(source, target)

    monkeypatch.setattr(os, "link", link_twice)

    assert files.create_exclusively("record", b"ours")
    assert not files.create_exclusively("record", b"theirs")


def test_a_record_is_synced_before_it_gets_its_name_and_the_folder_after(
    files: StateFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    make_link, make_durable = os.link, os.fsync

    def link(source: str, target: str) -> None:
        events.append("link")
        make_link(source, target)

    def fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("sync folder" if is_folder else "sync file")
        make_durable(descriptor)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "fsync", fsync)
    files.create_exclusively("record", b"won")
    won = events.copy()
    events.clear()
    files.create_exclusively("record", b"lost")

    assert won == ["sync file", "link", "sync folder"]
    # The loser goes on as if the winner's name were durable, so it sees to that itself.
    assert events == ["sync file", "link", "sync folder"]


def test_every_new_folder_is_synced_into_the_one_above_it(
    files: StateFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    make_durable = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        make_durable(descriptor)

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc to learn what a descriptor stands for")
    monkeypatch.setattr(os, "fsync", fsync)
    files.write("a/b/file", b"data")

    root = str(tmp_path.resolve())
    assert synced == [root, f"{root}/a", f"{root}/a/b/file", f"{root}/a/b"]


def test_a_file_in_the_place_of_a_folder_is_a_failure_of_the_store(
    files: StateFileSystem,
) -> None:
    files.write("name", b"a file")

    for write in (files.write, files.create_exclusively):
        with pytest.raises(StoreUnavailableError, match="name/below"):
            write("name/below", b"data")
    assert files.read("name") == b"a file"


def test_the_last_file_takes_its_empty_folders_along_but_not_the_root(
    files: StateFileSystem, tmp_path: Path
) -> None:
    files.write("upper/folder/one", b"")
    files.write("upper/two", b"")
    files.delete(["upper/folder/one"])
    left = sorted(path.name for path in (tmp_path / "upper").iterdir())
    files.delete(["upper/two"])

    assert left == ["two"]
    assert tmp_path.is_dir()
    assert os.listdir(tmp_path) == []


def _remove_folder_before_open(monkeypatch: pytest.MonkeyPatch, folder: Path, times: int) -> None:
    """Let another process find the folder empty, just after it was made and before it is used."""
    really_open = os.open
    left = iter(range(times))

    def remove_and_open(path: str, flags: int, *mode: int) -> int:
        if os.path.dirname(path) == str(folder) and next(left, None) is not None:
            os.rmdir(folder)
        return really_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", remove_and_open)


@both_writes
def test_a_folder_that_another_process_removes_is_made_again(
    files: StateFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[StateFileSystem], object],
) -> None:
    _remove_folder_before_open(monkeypatch, tmp_path / "folder", times=3)
    write(files)

    assert files.read("folder/file") == b"data"


@both_writes
def test_a_folder_that_is_removed_again_and_again_is_given_up(
    files: StateFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[StateFileSystem], object],
) -> None:
    _remove_folder_before_open(monkeypatch, tmp_path / "folder", times=1000)

    with pytest.raises(StoreUnavailableError, match="folder/file"):
        write(files)


def test_a_link_out_of_the_root_is_not_followed_by_a_listing(
    files: StateFileSystem, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "file").write_bytes(b"not ours")
    (tmp_path / "link").symlink_to(outside)
    files.write("file", b"ours")

    assert files.list("") == [FileEntry("file", 4)]


# Rights


@contextmanager
def _as_an_ordinary_user() -> Iterator[None]:
    """Take root's right to write everywhere away for a moment; other users have none to lose."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    # Not below pytest's own folder, which only its owner may enter.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "state")
        folder.mkdir()
        (folder / "file").write_bytes(b"data")
        folder.chmod(0o555)
        Path(name).chmod(0o755)
        yield folder
        folder.chmod(0o755)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda files: files.write("new", b"data"), id="write"),
        pytest.param(lambda files: files.write("folder/new", b"data"), id="write-in-folder"),
        pytest.param(lambda files: files.create_exclusively("new", b"data"), id="create"),
        pytest.param(lambda files: files.delete(["file"]), id="delete"),
    ],
)
def test_a_read_only_folder_can_only_be_read(
    read_only_folder: Path, change: Callable[[StateFileSystem], object]
) -> None:
    files = open_file_system(read_only_folder)

    with _as_an_ordinary_user():
        with pytest.raises(StoreUnavailableError, match="may be written to by this user"):
            change(files)
        files.delete(["absent"])
        assert files.read("file") == b"data"
        assert files.list("") == [FileEntry("file", 4)]


def test_a_file_that_may_not_be_read_is_not_missing(read_only_folder: Path) -> None:
    (read_only_folder / "file").chmod(0o000)
    files = open_file_system(read_only_folder)

    with _as_an_ordinary_user():
        with pytest.raises(StoreUnavailableError, match="PermissionError"):
            files.read("file")
        with pytest.raises(StoreUnavailableError, match="PermissionError"):
            files.read_ranges("file", [(0, 1)])


def test_a_move_whose_folder_another_process_removes_is_not_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_file_system(tmp_path)
    files.write("staged/one", b"1")
    replace = os.replace

    def remove_and_replace(old: str, new: str) -> None:
        os.rmdir(os.path.dirname(new))
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", remove_and_replace)
        with pytest.raises(StoreUnavailableError):
            files.move({"staged/one": "folder/one"})
    files.move({"staged/one": "folder/one"})

    assert files.read("folder/one") == b"1"


def test_a_move_out_of_a_folder_that_another_process_removes_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_file_system(tmp_path)
    files.write("staged/one", b"1")
    replace = os.replace

    def replace_and_remove(old: str, new: str) -> None:
        replace(old, new)
        os.rmdir(os.path.dirname(old))

    monkeypatch.setattr(os, "replace", replace_and_remove)
    files.move({"staged/one": "one"})

    assert files.read("one") == b"1"
