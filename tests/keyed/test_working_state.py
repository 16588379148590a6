"""Working state on local disk: always the wanted version, whatever happened to the folder."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from flowstate.errors import SnapshotMissingError, StorageError, StoreUnavailableError
from flowstate.keyed.lmdb_store import LmdbStore
from flowstate.keyed.working_state import StateVersion, WorkingState
from flowstate.rows import StateRows
from tests.keyed.stores import Child, Entry, contents, fork, map_rows, row, text_of

# What each version changes; together with its rows it takes several pages.
CHANGES: dict[str, dict[Entry, str]] = {
    "v1": {(f"k{number % 7}", f"{number}"): "v1" * 20 for number in range(300)},
    "v2": {("k1", "1"): "v2", ("new", ""): "v2", ("long" * 200, ""): "v2"},
    "v3": {("k1", "1"): "v3", ("newer", ""): "v3"},
}
V1 = CHANGES["v1"]
V2 = V1 | CHANGES["v2"]
V3 = V2 | CHANGES["v3"]
CONTENTS = {"v1": V1, "v2": V2, "v3": V3}
VERSIONS = {
    "v1": StateVersion("v1"),
    "v2": StateVersion("v2", ("v1",)),
    "v3": StateVersion("v3", ("v1", "v2")),
}


class Source:
    """A checkpoint storage that tells what was asked of it."""

    def __init__(self, wanted: str) -> None:
        self.wanted = VERSIONS[wanted]
        self.asked: list[str | None] = []

    def rows_since(self, identity: str | None) -> Iterator[Sequence[StateRows]]:
        self.asked.append(identity)
        line = [*self.wanted.lineage, self.wanted.identity]
        for name in line[0 if identity is None else line.index(identity) + 1 :]:
            yield [map_rows(CHANGES[name])]


def open_state(folder: Path, wanted: str) -> WorkingState:
    source = Source(wanted)
    return WorkingState.open(folder, source.wanted, source.rows_since)


def opened(folder: Path, wanted: str) -> str:
    """Open a version, check what it holds, and return how it was reached."""
    with open_state(folder, wanted) as state:
        assert state.identity == wanted
        assert contents(state) == CONTENTS[wanted]
        return state.how


def generations(folder: Path) -> list[Path]:
    return list(folder.glob("gen-*"))


def generation(folder: Path) -> Path:
    (only,) = generations(folder)
    assert (folder / "CURRENT").read_text() == only.name
    return only


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds the first version."""
    assert opened(tmp_path / "state", "v1") == "rebuilt"
    return tmp_path / "state"


# Reused, advanced or rebuilt.


def test_a_version_that_is_there_is_reused_and_nothing_is_read(folder: Path) -> None:
    source = Source("v1")
    with WorkingState.open(folder, source.wanted, source.rows_since) as state:
        assert state.how == "reused"
        assert contents(state) == V1
        assert text_of(state.get("map", row(("k1", "1")))) == "v1" * 20
        assert state.get_many("map", [row(("new", ""))]) == [None]
    assert source.asked == []


@pytest.mark.parametrize("wanted", ["v2", "v3"])
def test_an_earlier_version_is_advanced_by_what_is_newer(folder: Path, wanted: str) -> None:
    before = generation(folder)
    source = Source(wanted)
    with WorkingState.open(folder, source.wanted, source.rows_since) as state:
        assert state.how == "advanced"
        assert state.identity == wanted
        assert contents(state) == CONTENTS[wanted]

    assert source.asked == ["v1"]
    assert generation(folder) == before
    assert opened(folder, wanted) == "reused"


def test_a_version_that_is_not_of_the_lineage_is_rebuilt(folder: Path) -> None:
    before = generation(folder)
    assert opened(folder, "v3") == "advanced"
    source = Source("v1")
    with WorkingState.open(folder, source.wanted, source.rows_since) as state:
        assert state.how == "rebuilt"
        assert contents(state) == V1

    assert source.asked == [None]
    assert generation(folder) != before
    assert opened(folder, "v1") == "reused"


@pytest.mark.parametrize("identity", ["", "empty"])
def test_nothing_at_all_is_a_version_too(tmp_path: Path, identity: str) -> None:
    for how in ("rebuilt", "reused"):
        with WorkingState.open(tmp_path, StateVersion(identity), lambda _: iter(())) as state:
            assert (state.how, state.identity, contents(state)) == (how, identity, {})


def test_state_advances_with_each_checkpoint(folder: Path) -> None:
    with open_state(folder, "v1") as state, open_state(folder, "v1") as reader:
        for name in ("v2", "v3"):
            state.advance([[map_rows(CHANGES[name])]], name)
            assert state.identity == name
            assert contents(state) == CONTENTS[name]
        assert contents(reader) == V1, "who reads the old version goes on reading it"

    assert opened(folder, "v3") == "reused"


def test_generations_that_are_not_in_use_are_removed(folder: Path) -> None:
    abandoned = folder / "gen-abandoned"
    abandoned.mkdir()
    (abandoned / "data.mdb").write_bytes(b"left by a crash")

    for wanted in ("v2", "v1", "v2", "v1"):
        opened(folder, wanted)
    assert generations(folder) == [generation(folder)]
    names = {path.name for path in folder.iterdir()}
    assert names == {"lock", "CURRENT", generation(folder).name}


def test_a_folder_that_cannot_be_is_an_error_of_this_library(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreUnavailableError, match="cannot open the working state"):
        open_state(tmp_path / "file", "v1")


# Damage that can be seen without opening the environment.


def change_mark(folder: Path, **fields: object) -> None:
    path = generation(folder) / "mark.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def write_mark(data: bytes) -> Callable[[Path], object]:
    return lambda folder: (generation(folder) / "mark.json").write_bytes(data)


def write_current(data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "CURRENT").write_bytes(data)


def move_generation(folder: Path) -> None:
    generation(folder).rename(folder / "moved")
    (folder / "CURRENT").write_text("moved")


def lead_outside(folder: Path) -> None:
    """A sound generation of the wanted version, but in the folder of another one."""
    shutil.copytree(folder, folder.parent / "other")
    (folder / "gen-x").mkdir()
    (folder / "CURRENT").write_text(f"gen-x/../../other/{generation(folder.parent / 'other').name}")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no mark": lambda folder: (generation(folder) / "mark.json").unlink(),
    "empty mark": write_mark(b""),
    "torn mark": write_mark(b'{"format": 1, "ident'),
    "binary mark": write_mark(b"\xff\xfe\x00"),
    "mark is null": write_mark(b"null"),
    "mark is a number": write_mark(b"3"),
    "mark is a list": write_mark(b'["format", "boot", "size"]'),
    "mark is a text": write_mark(b'"format boot size"'),
    "mark without fields": write_mark(b"{}"),
    "mark of another boot": lambda folder: change_mark(folder, boot="another"),
    "mark without a boot": lambda folder: change_mark(folder, boot=None),
    "mark of another format": lambda folder: change_mark(folder, format=2),
    "mark of another size": lambda folder: change_mark(folder, size=1),
    "no data": lambda folder: (generation(folder) / "data.mdb").unlink(),
    "no generation": lambda folder: shutil.rmtree(generation(folder)),
    "no CURRENT": lambda folder: (folder / "CURRENT").unlink(),
    "empty CURRENT": write_current(b""),
    "binary CURRENT": write_current(b"\xff\xfe"),
    "CURRENT with a NUL": write_current(b"gen-\0"),
    "CURRENT of no generation": write_current(b"gen-unknown"),
    "CURRENT is the folder": write_current(b"."),
    "CURRENT is absolute": write_current(b"/"),
    "CURRENT of another kind": move_generation,
    "CURRENT leads outside": lead_outside,
}


@pytest.mark.parametrize("wanted", ["v1", "v2"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_that_is_damaged_is_rebuilt(folder: Path, damage: str, wanted: str) -> None:
    DAMAGE[damage](folder)

    assert opened(folder, wanted) == "rebuilt"
    assert generation(folder)
    assert opened(folder, wanted) == "reused"


def test_an_environment_that_holds_no_version_is_rebuilt(folder: Path) -> None:
    current = generation(folder)
    (current / "data.mdb").unlink()
    (current / "lock.mdb").unlink()
    LmdbStore(current).close()
    change_mark(folder, size=(current / "data.mdb").stat().st_size)

    # The version before the first checkpoint has no name.
    with WorkingState.open(folder, StateVersion(""), lambda _: iter(())) as state:
        assert state.how == "rebuilt"
        state.advance([[map_rows(CHANGES["v1"])]], "v1")
    assert opened(folder, "v1") == "reused"


# Damage of the environment. It is opened by another process, which it might end.


def truncate(share: float) -> Callable[[Path], object]:
    return lambda data: os.truncate(data, int(data.stat().st_size * share) // 4096 * 4096)


def overwrite(filling: Callable[[int], bytes], *, start: int) -> Callable[[Path], None]:
    def damage(data: Path) -> None:
        size = data.stat().st_size
        with data.open("r+b") as file:
            file.seek(start)
            file.write(filling(size - start))
        assert data.stat().st_size == size

    return damage


def empty_with_its_mark(data: Path) -> None:
    os.truncate(data, 0)
    change_mark(data.parent.parent, size=0)


DATA_DAMAGE: dict[str, Callable[[Path], object]] = {
    "half": truncate(0.5),
    "last page": lambda data: os.truncate(data, data.stat().st_size - 4096),
    "only the metas": lambda data: os.truncate(data, 8192),
    "empty": truncate(0),
    "empty with its mark": empty_with_its_mark,
    "garbage": overwrite(random.Random(1).randbytes, start=0),
    "zeros": overwrite(bytes, start=0),
    "garbage behind the metas": overwrite(random.Random(2).randbytes, start=8192),
    "zeros behind the metas": overwrite(bytes, start=8192),
}


def open_each(parent: Connection, folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        parent.send((name, opened(folder, "v1"), opened(folder, "v1")))


def test_an_environment_that_is_damaged_is_rebuilt_and_ends_no_process(
    folder: Path, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in DATA_DAMAGE}
    for name, damage in DATA_DAMAGE.items():
        shutil.copytree(folder, folders[name])
        damage(generation(folders[name]) / "data.mdb")

    with closing(Child(open_each, folders)) as child:
        for name in DATA_DAMAGE:
            assert child.answer() == (name, "rebuilt", "reused")


# Errors on the way.


def failing(error: Exception, identity: str | None) -> Iterator[Sequence[StateRows]]:
    yield [map_rows(CHANGES["v2"], clears=["k1"])]
    assert identity in (None, "v1")
    raise error


@pytest.mark.parametrize("wanted", ["v1", "v2"], ids=["nothing-there", "earlier-version-there"])
@pytest.mark.parametrize(
    "error",
    [StorageError("lost"), SnapshotMissingError("lost"), ZeroDivisionError("lost")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_source_leaves_nothing_half_done(
    tmp_path: Path, error: Exception, wanted: str
) -> None:
    if wanted == "v2":
        opened(tmp_path, "v1")
    before = generations(tmp_path)
    with pytest.raises(type(error), match="lost"):
        WorkingState.open(tmp_path, VERSIONS[wanted], lambda identity: failing(error, identity))

    assert generations(tmp_path) == before
    assert (tmp_path / "CURRENT").exists() == bool(before)
    assert opened(tmp_path, wanted) in ("advanced", "rebuilt")


def test_a_failure_of_the_storage_costs_no_rebuild(folder: Path) -> None:
    error = StorageError("lost")
    with pytest.raises(StorageError, match="lost"):
        WorkingState.open(folder, VERSIONS["v2"], lambda identity: failing(error, identity))

    assert opened(folder, "v1") == "reused"
    assert opened(folder, "v2") == "advanced"


def test_an_interrupt_while_it_is_rebuilt_leaves_no_generation(folder: Path) -> None:
    def interrupted(_: str | None) -> Iterator[Sequence[StateRows]]:
        yield [map_rows(CHANGES["v1"])]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WorkingState.open(folder, StateVersion("x"), interrupted)
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_the_mark_is_away_while_the_environment_is_written(folder: Path) -> None:
    mark = generation(folder) / "mark.json"

    def changes(identity: str | None) -> Iterator[Sequence[StateRows]]:
        assert identity == "v1"
        assert not mark.exists()
        yield [map_rows(CHANGES["v2"])]

    with WorkingState.open(folder, VERSIONS["v2"], changes) as state:
        assert json.loads(mark.read_text())["identity"] == "v2"
        assert contents(state) == V2


def test_a_disk_that_becomes_full_leaves_the_version_as_it_was(folder: Path) -> None:
    with closing(Child(advance_beyond_the_limit, folder)) as child:
        error, identity, found = child.answer()

    assert isinstance(error, StorageError)
    assert (identity, found) == ("v1", V1)
    assert opened(folder, "v1") == "reused"
    assert opened(folder, "v2") == "advanced"


def advance_beyond_the_limit(parent: Connection, folder: Path) -> None:
    size = (generation(folder) / "data.mdb").stat().st_size + (1 << 16)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    large = map_rows({("large", f"{number}"): "x" * 1000 for number in range(1000)}, clears=["k1"])
    with open_state(folder, "v1") as state:
        with pytest.raises(StorageError) as caught:
            state.advance([[large]], "v2")
        parent.send((caught.value, state.identity, contents(state)))


# Several processes.


def advance_when_told(parent: Connection, folder: Path, changed: str, identity: str) -> None:
    with open_state(folder, "v1") as state:
        parent.send(state.how)
        parent.recv()
        state.advance([[map_rows({("k1", "1"): changed})]], identity)
        parent.send((state.identity, contents(state)))


def test_the_second_process_to_advance_finds_it_done(folder: Path) -> None:
    second = Child(advance_when_told, folder, "applied twice", "v2")
    with closing(second), open_state(folder, "v1") as state:
        assert second.answer() == "reused"
        state.advance([[map_rows(CHANGES["v2"])]], "v2")
        second.tell()

        assert second.answer() == ("v2", V2)
        assert contents(state) == V2
    assert opened(folder, "v2") == "reused"


def test_state_that_went_elsewhere_is_not_advanced(folder: Path) -> None:
    other = Child(advance_when_told, folder, "elsewhere", "x2")
    with closing(other), open_state(folder, "v1") as state:
        assert other.answer() == "reused"
        other.tell()
        elsewhere = V1 | {("k1", "1"): "elsewhere"}
        assert other.answer() == ("x2", elsewhere)

        with pytest.raises(StorageError, match="another process has advanced it"):
            state.advance([[map_rows(CHANGES["v2"])]], "v2")
        assert (state.identity, contents(state)) == ("v1", V1)
    with WorkingState.open(folder, StateVersion("x2"), lambda _: iter(())) as there:
        assert (there.how, contents(there)) == ("reused", elsewhere)
    assert opened(folder, "v2") == "rebuilt"


def open_and_say_how(parent: Connection, folder: Path, wanted: str) -> None:
    """Be in the middle of it until told to go on, if it has to be built or advanced."""
    source = Source(wanted)

    def rows_since(identity: str | None) -> Iterator[Sequence[StateRows]]:
        yield from source.rows_since(identity)
        parent.send("in the middle")
        parent.recv()

    parent.send("here")
    parent.recv()
    with WorkingState.open(folder, source.wanted, rows_since) as state:
        parent.send((state.how, contents(state)))


@pytest.mark.parametrize(("wanted", "how"), [("v1", "rebuilt"), ("v2", "advanced")])
def test_of_two_processes_at_once_the_second_waits_and_reuses(
    tmp_path: Path, wanted: str, how: str
) -> None:
    if how == "advanced":
        opened(tmp_path, "v1")
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(closing(Child(open_and_say_how, tmp_path, wanted)))
            for _ in range(2)
        )
        for child in (first, second):
            assert child.answer() == "here"
        first.tell()
        assert first.answer() == "in the middle"
        second.tell()
        assert not second.says_something(within_s=0.3), "it must wait for the lock"
        first.tell()

        assert first.answer() == (how, CONTENTS[wanted])
        assert second.answer() == ("reused", CONTENTS[wanted])
    assert generation(tmp_path)


def is_locked(folder: Path) -> bool:
    with open(folder / "lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class UntilKilled(list[StateRows]):
    """Rows of which the last is never reached."""

    def __init__(self, rows: Sequence[StateRows], parent: Connection) -> None:
        super().__init__(rows)
        self._parent = parent

    def __iter__(self) -> Iterator[StateRows]:
        yield from super().__iter__()
        self._parent.send("in the middle")
        self._parent.recv()


def advance_until_killed(parent: Connection, folder: Path) -> None:
    rows = map_rows(CHANGES["v2"] | {("wrong", ""): "x" * 100_000}, clears=["k1"])
    with open_state(folder, "v1") as state:
        parent.send("here")
        parent.recv()
        state.advance([UntilKilled([rows], parent)], "v2")


@pytest.mark.parametrize(
    ("function", "arguments", "wanted"),
    [
        pytest.param(open_and_say_how, ["v2"], "v2", id="opening-a-later-version"),
        pytest.param(advance_until_killed, [], "v1", id="advancing"),
    ],
)
def test_after_a_kill_in_the_middle_of_writing_it_is_rebuilt(
    folder: Path, function: Callable[..., None], arguments: list[Any], wanted: str
) -> None:
    with closing(Child(function, folder, *arguments)) as child:
        assert child.answer() == "here"
        child.tell()
        assert child.answer() == "in the middle"
        assert is_locked(folder)
        assert not (generation(folder) / "mark.json").exists()
        child.kill()

    assert not is_locked(folder)
    assert opened(folder, wanted) == "rebuilt"
    assert generation(folder)


def test_after_a_kill_in_the_middle_of_building_it_is_rebuilt(tmp_path: Path) -> None:
    with closing(Child(open_and_say_how, tmp_path, "v1")) as child:
        assert child.answer() == "here"
        child.tell()
        assert child.answer() == "in the middle"
        (half_built,) = generations(tmp_path)
        assert not (tmp_path / "CURRENT").exists()

    assert opened(tmp_path, "v2") == "rebuilt"
    assert generation(tmp_path) != half_built


def test_a_kill_at_any_moment_leaves_nothing_but_a_version(tmp_path: Path) -> None:
    choose = random.Random(3)
    for wanted in ("v3", "v1", "v2"):
        with closing(Child(open_one_after_the_other, tmp_path)) as child:
            assert child.answer() == "started"
            time.sleep(choose.uniform(0.005, 0.08))
            child.kill()

        assert opened(tmp_path, wanted) in ("reused", "advanced", "rebuilt")
        assert generation(tmp_path)


def open_one_after_the_other(parent: Connection, folder: Path) -> None:
    parent.send("started")
    while True:
        for wanted in ("v1", "v2", "v3"):
            opened(folder, wanted)


# Readers of what is no longer current.


def read_until_told(parent: Connection, folder: Path) -> None:
    with open_state(folder, "v1") as state:
        for _ in range(2):
            parent.send(contents(state))
            parent.recv()
        with pytest.raises(StorageError):
            state.advance([[map_rows(CHANGES["v2"])]], "v2")
        assert (state.identity, contents(state)) == ("v1", V1)
        parent.send("refused")


def test_who_reads_an_old_generation_keeps_it_while_it_is_removed(folder: Path) -> None:
    old = generation(folder)
    reader = Child(read_until_told, folder)
    with closing(reader), open_state(folder, "v1") as state:
        assert reader.answer() == V1
        scan = state.scan("map")
        first = next(scan)
        with WorkingState.open(folder, StateVersion("x"), lambda _: iter(())) as other:
            assert other.how == "rebuilt"
            assert not old.exists()

            assert [data for data, _ in (first, *scan)] == sorted(map(row, V1))
            assert contents(state) == V1
            reader.tell()
            assert reader.answer() == V1
            reader.tell()
            assert reader.answer() == "refused"
            assert contents(other) == {}
        with WorkingState.open(folder, StateVersion("x"), lambda _: iter(())) as again:
            assert again.how == "reused"


def test_closing_twice_takes_the_rows_from_nobody_else(folder: Path) -> None:
    first, second = open_state(folder, "v1"), open_state(folder, "v1")
    first.close()
    first.close()

    assert contents(second) == V1
    second.close()


def fork_while_open(parent: Connection, folder: Path) -> None:
    with open_state(folder, "v1") as state:

        def close_and_open() -> None:
            state.close()
            opened(folder, "v1")

        fork(close_and_open)
        parent.send(contents(state))


def test_a_fork_opens_the_same_version_and_its_parent_reads_on(folder: Path) -> None:
    with closing(Child(fork_while_open, folder)) as child:
        assert child.answer() == V1
    assert opened(folder, "v1") == "reused"
