"""The store in LMDB: what it finds, in which order, and what is left when a change fails."""

from __future__ import annotations

import os
import random
import resource
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import lmdb
import pytest

from flowstate.errors import StorageError, StoreFullError
from flowstate.keyed import lmdb_store
from flowstate.keyed.lmdb_store import LmdbStore
from flowstate.rows import StateRows
from tests.keyed.stores import CODEC, Child, Entry, contents, fork, map_rows, row, text_of, version

MAP_BYTES_SMALL = 1 << 18
START = {("a", "1"): "one", ("a", "2"): "two", ("b", "1"): "three"}
# So many bytes that a small map must grow more than once.
LARGE = {("large", f"{number:04}"): "x" * 1000 for number in range(1500)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    with closing(LmdbStore(tmp_path / "store")) as store:
        yield store


@pytest.fixture
def filled(store: LmdbStore) -> LmdbStore:
    store.apply([[map_rows(START)]], expected=None, identity="v1")
    return store


@pytest.fixture
def small_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_store, "_MAP_BYTES_MIN", MAP_BYTES_SMALL)


def map_bytes(store: LmdbStore) -> int:
    return int(store._environment.info()["map_size"])


# Reading.


def test_a_new_store_holds_no_version_and_no_rows(store: LmdbStore) -> None:
    with closing(store.snapshot()) as snapshot:
        assert snapshot.identity is None
        assert snapshot.get("map", row(("a", "1"))) is None
        assert snapshot.get_many("map", [row(("a", "1")), b""]) == [None, None]
        assert list(snapshot.scan("map")) == []


def test_rows_are_found_one_by_one_and_together_in_the_order_asked_for(filled: LmdbStore) -> None:
    wanted: list[Entry] = [("b", "1"), ("none", ""), ("a", "2"), ("z" * 600, ""), ("b", "1")]
    with closing(filled.snapshot()) as snapshot:
        one_by_one = [text_of(snapshot.get("map", row(entry))) for entry in wanted]
        together = [text_of(found) for found in snapshot.get_many("map", list(map(row, wanted)))]

    assert one_by_one == together == ["three", None, "two", None, "three"]


def test_a_scan_yields_the_rows_with_the_prefix_and_no_others(filled: LmdbStore) -> None:
    others = {("aa", "1"): "other key", ("", ""): "empty"}
    filled.apply([[map_rows(others)]], expected="v1", identity="v2")
    with closing(filled.snapshot()) as snapshot:
        found = [text_of(value) for _, value in snapshot.scan("map", CODEC.prefix("a", None))]
        assert found == ["one", "two"]
        assert list(snapshot.scan("map", CODEC.prefix("c", None))) == []
        assert list(snapshot.scan("map", b"\xff" * 600)) == []
        assert list(contents(snapshot)) == sorted([*START, *others], key=row)


def test_states_do_not_see_each_other(store: LmdbStore) -> None:
    names = [f"state-{number}" for number in range(300)]
    rows = [map_rows({("k", ""): name, ("k" * 500, ""): name}, state=name) for name in names]
    store.apply([rows[:200], rows[200:]], expected=None, identity="v1")
    store.apply([[map_rows(clears=["k"], state="state-7")]], expected="v1", identity="v2")

    with closing(store.snapshot()) as snapshot:
        for name in names:
            short = {} if name == "state-7" else {("k", ""): name}
            assert contents(snapshot, name) == short | {("k" * 500, ""): name}
        assert list(snapshot.scan("unknown")) == []


# Rows that are longer than a key of LMDB may be.


@pytest.mark.parametrize("length", [240, 479, 480, 481, 508, 511, 512, 5000])
def test_a_row_of_any_length_is_put_found_replaced_and_deleted(
    store: LmdbStore, length: int
) -> None:
    entry = ("k" * (length - 4 if length >= 260 else length - 3), "")
    assert len(row(entry)) == length
    store.apply([[map_rows({entry: "first"})]], expected=None, identity="v1")
    assert version(store) == ("v1", {entry: "first"})

    store.apply([[map_rows({entry: ""})]], expected="v1", identity="v2")
    assert version(store) == ("v2", {entry: ""})
    with closing(store.snapshot()) as snapshot:
        found = [snapshot.get("map", row(entry)), *snapshot.get_many("map", [row(entry)])]
        assert list(map(text_of, found)) == ["", ""]

    store.apply([[map_rows(deletes=[entry])]], expected="v2", identity="v3")
    assert version(store) == ("v3", {})


def test_long_rows_with_the_same_beginning_are_told_apart(store: LmdbStore) -> None:
    key = "k" * 490
    entries = {(key, sub): f"value {sub}" for sub in ("", "a", "b", "b" * 300)}
    entries[key + "k", ""] = "longer key"
    store.apply([[map_rows(entries)]], expected=None, identity="v1")

    assert version(store)[1] == entries
    with closing(store.snapshot()) as snapshot:
        for entry, text in entries.items():
            assert text_of(snapshot.get("map", row(entry))) == text
        assert snapshot.get("map", row((key, "c"))) is None

    store.apply([[map_rows(deletes=[(key, "a")])]], expected="v1", identity="v2")
    del entries[key, "a"]
    assert version(store)[1] == entries


def test_a_scan_meets_long_and_short_rows_in_the_order_of_their_bytes(store: LmdbStore) -> None:
    subs = [*"abcdef", "c" * 30, "c" * 200, "c" * 299, "c" * 300, "d" * 254, "d" * 255]
    entries = {("k" * 250, sub): sub[:1] for sub in subs}
    entries |= {("j", "x" * 600): "x", ("l", ""): "y"}
    store.apply([[map_rows(entries)]], expected=None, identity="v1")

    assert {len(row(entry)) > 480 for entry in entries} == {True, False}
    assert list(version(store)[1]) == sorted(entries, key=row)


@pytest.mark.parametrize("length", [1, 239, 240, 241, 300, 481, 510, 530])
def test_a_prefix_may_be_of_any_length(store: LmdbStore, length: int) -> None:
    # Their first 240 bytes are the same, so that a longer prefix must be looked for behind them.
    rows = {(f"{'k' * 400}{end}", sub): end for end in "xy" for sub in ("", "s" * 200, "t" * 200)}
    rows["k" * 230, ""] = "short"
    store.apply([[map_rows(rows)]], expected=None, identity="v1")
    prefix = row(("k" * 400 + "y", "t" * 200))[:length]

    expected = sorted(data for data in map(row, rows) if data.startswith(prefix))
    assert expected
    with closing(store.snapshot()) as snapshot:
        assert [data for data, _ in snapshot.scan("map", prefix)] == expected


# Changes.


def test_the_later_set_wins(store: LmdbStore) -> None:
    first = map_rows({("a", "1"): "old", ("a", "2"): "old", ("b", "1"): "old"})
    second = map_rows({("a", "1"): "new"}, deletes=[("a", "2"), ("not there", "")])
    store.apply([[first], [second]], expected=None, identity="v1")
    assert version(store)[1] == {("a", "1"): "new", ("b", "1"): "old"}

    store.apply([[second, first]], expected="v1", identity="v2")
    assert version(store)[1] == {("a", "1"): "old", ("a", "2"): "old", ("b", "1"): "old"}


def test_a_clear_takes_the_earlier_rows_of_its_key_only(store: LmdbStore) -> None:
    long_key = "k" * 300
    others = {("aa", "1"): "stays", ("", "a"): "stays", (long_key + "k", "s" * 300): "stays"}
    taken = {("a", "1"): "", ("a", "s" * 600): "", (long_key, "1"): "", (long_key, "s" * 300): ""}
    store.apply([[map_rows(others | taken)]], expected=None, identity="v1")
    new = {("a", "2"): "new", ("a", "s" * 600): "new"}
    store.apply([[map_rows(new, clears=["a", long_key])]], expected="v1", identity="v2")

    assert version(store) == ("v2", others | new)


def test_a_set_may_have_more_rows_than_are_put_at_once(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_store, "_PUT_ROWS", 7)
    entries = {(f"k{number % 9}", f"{number}"): str(number) for number in range(100)}
    store.apply([[map_rows(entries)]], expected=None, identity="v1")

    assert version(store)[1] == entries


@pytest.mark.parametrize("seed", range(4))
def test_any_changes_leave_what_a_dict_would_hold(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    keys = ["", "a", "aa", "k" * 100, "k" * 245, "k" * 300, "k" * 300 + "l", "l" * 500]
    subs = ["", "b", "m" * 200, "m" * 201, "m" * 300, "n" * 700]
    model: dict[Entry, str] = {}
    for number in range(25):
        clears = choose.sample(keys, choose.choice([0, 0, 1, 2]))
        entries = [(choose.choice(keys), choose.choice(subs)) for _ in range(12)]
        puts = dict.fromkeys(entries[:8], f"{number}")
        deletes = {entry for entry in entries[8:] if entry not in puts}
        model = {entry: text for entry, text in model.items() if entry[0] not in clears} | puts
        model = {entry: text for entry, text in model.items() if entry not in deletes}
        with closing(LmdbStore(tmp_path)) as store:
            expected = None if number == 0 else str(number - 1)
            changes = map_rows(puts, deletes=deletes, clears=clears)
            store.apply([[changes]], expected=expected, identity=str(number))
            with closing(store.snapshot()) as snapshot:
                check_against_model(snapshot, model, keys, subs)


def check_against_model(
    snapshot: lmdb_store.LmdbSnapshot, model: dict[Entry, str], keys: list[str], subs: list[str]
) -> None:
    every = [(key, sub) for key in keys for sub in subs]
    found = snapshot.get_many("map", list(map(row, every)))
    assert list(map(text_of, found)) == [model.get(entry) for entry in every]
    assert [snapshot.get("map", row(entry)) for entry in every] == found
    in_order = sorted(model, key=row)
    assert list(contents(snapshot)) == in_order
    for key in keys:
        of_key = [row(entry) for entry in in_order if entry[0] == key]
        prefix = CODEC.prefix(key, None)
        assert [data for data, _ in snapshot.scan("map", prefix)] == of_key


# Versions.


def test_a_snapshot_stays_as_it_is_while_others_write(filled: LmdbStore) -> None:
    with closing(filled.snapshot()) as before:
        scan = before.scan("map")
        first = next(scan)
        for number in range(1, 20):
            changes = map_rows({("a", "1"): f"{number}", ("n", f"{number}"): ""}, clears=["b"])
            filled.apply([[changes]], expected=f"v{number}", identity=f"v{number + 1}")

        assert [data for data, _ in (first, *scan)] == sorted(map(row, START))
        assert before.identity == "v1"
        assert contents(before) == START
    added = {("n", f"{number}"): "" for number in range(1, 20)}
    assert version(filled) == ("v20", {("a", "1"): "19", ("a", "2"): "two"} | added)


def test_a_snapshot_stays_as_it_is_while_another_process_writes(
    filled: LmdbStore, tmp_path: Path
) -> None:
    writer = Child(write_ten_versions, tmp_path / "store")
    with closing(writer), closing(filled.snapshot()) as before:
        writer.tell()
        assert writer.answer() == "v11"

        assert contents(before) == START
    assert version(filled)[0] == "v11"


def write_ten_versions(parent: Connection, folder: Path) -> None:
    store = LmdbStore(folder)
    parent.recv()
    for number in range(1, 11):
        changes = map_rows({("a", "1"): f"{number}"})
        store.apply([[changes]], expected=f"v{number}", identity=f"v{number + 1}")
    parent.send(version(store)[0])


@pytest.mark.parametrize("expected", [None, "v0", "", "v2"])
def test_a_change_to_another_version_than_the_expected_is_refused(
    filled: LmdbStore, expected: str | None
) -> None:
    changes = iter([[map_rows(clears=["a"])]])

    with pytest.raises(StorageError, match=r"holds version 'v1' and not .* has advanced it"):
        filled.apply(changes, expected=expected, identity="v2")
    assert version(filled) == ("v1", START)
    assert len(list(changes)) == 1, "nothing is read for a change that is refused"


def test_an_error_half_way_through_the_changes_changes_nothing(filled: LmdbStore) -> None:
    def failing() -> Iterator[Sequence[StateRows]]:
        yield [map_rows(LARGE, clears=["a"]), map_rows({("new", ""): ""}, state="new")]
        yield [map_rows({("a" * 600, ""): ""})]
        raise ZeroDivisionError("half way")

    with pytest.raises(ZeroDivisionError, match="half way"):
        filled.apply(failing(), expected="v1", identity="v2")
    assert version(filled) == ("v1", START)
    with closing(filled.snapshot()) as snapshot:
        assert list(snapshot.scan("new")) == []

    filled.apply([[map_rows(clears=["a"])]], expected="v1", identity="v2")
    assert version(filled) == ("v2", {("b", "1"): "three"})


def test_a_writer_that_is_killed_changes_nothing_and_stops_nobody(
    filled: LmdbStore, tmp_path: Path
) -> None:
    with closing(Child(write_until_killed, tmp_path / "store")) as child:
        assert child.answer() == "writing"

    assert version(filled) == ("v1", START)
    filled.apply([[map_rows({("c", ""): ""})]], expected="v1", identity="v2")
    assert version(filled) == ("v2", START | {("c", ""): ""})


def write_until_killed(parent: Connection, folder: Path) -> None:
    def changes() -> Iterator[Sequence[StateRows]]:
        yield [map_rows(LARGE, clears=["a", "b"])]
        parent.send("writing")
        parent.recv()

    LmdbStore(folder).apply(changes(), expected="v1", identity="v2")


def test_the_places_of_readers_that_were_killed_are_free_for_others(tmp_path: Path) -> None:
    LmdbStore(tmp_path).close()
    # Who opens an environment that nobody else has open starts with no readers anyway.
    with closing(Child(read_until_killed, tmp_path)) as other:
        with closing(Child(read_until_killed, tmp_path)) as child:
            assert other.answer() == child.answer() == "reading"
            killed = str(child.process.pid)
        with closing(LmdbStore(tmp_path)) as store:
            readers = store._environment.readers()

        assert killed not in readers
        assert str(other.process.pid) in readers


def read_until_killed(parent: Connection, folder: Path) -> None:
    with closing(LmdbStore(folder).snapshot()):
        parent.send("reading")
        parent.recv()


# Space.


@pytest.mark.usefixtures("small_map")
def test_the_map_grows_and_no_change_is_lost_or_asked_for_twice(filled: LmdbStore) -> None:
    entries = list(LARGE.items())
    sets = [dict(entries[start : start + 100]) for start in range(0, len(entries), 100)]
    taken = []

    def changes() -> Iterator[Sequence[StateRows]]:
        for number, part in enumerate(sets):
            taken.append(number)
            # Rows of the set before go, so that sets that come in another order show.
            gone = list(sets[number - 1])[:10] if number else []
            yield [map_rows(part, deletes=gone)]

    filled.apply(changes(), expected="v1", identity="v2")

    assert taken == list(range(len(sets)))
    assert map_bytes(filled) > 2 * MAP_BYTES_SMALL
    kept = {entry for part in sets[:-1] for entry in list(part)[10:]} | sets[-1].keys()
    assert version(filled) == ("v2", START | {entry: LARGE[entry] for entry in kept})


@pytest.mark.usefixtures("small_map")
def test_a_store_that_may_not_grow_any_more_keeps_its_version(
    filled: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_store, "_MAP_BYTES_MAX", 2 * MAP_BYTES_SMALL)
    with pytest.raises(StoreFullError, match=f"has outgrown {2 * MAP_BYTES_SMALL} bytes"):
        filled.apply([[map_rows(LARGE)]], expected="v1", identity="v2")

    assert version(filled) == ("v1", START)


@pytest.mark.usefixtures("small_map")
@pytest.mark.parametrize("use", ["read", "write"])
def test_a_store_that_another_process_made_larger_is_read_and_written(
    filled: LmdbStore, tmp_path: Path, use: str
) -> None:
    with closing(Child(write_much, tmp_path / "store")) as child:
        assert child.answer() == "done"
    assert map_bytes(filled) == MAP_BYTES_SMALL
    with pytest.raises(lmdb.MapResizedError):
        filled._environment.begin()

    if use == "write":
        filled.apply([[map_rows({("c", ""): ""})]], expected="v2", identity="v3")
        assert version(filled) == ("v3", START | LARGE | {("c", ""): ""})
    else:
        assert version(filled) == ("v2", START | LARGE)
    assert map_bytes(filled) > MAP_BYTES_SMALL


def write_much(parent: Connection, folder: Path) -> None:
    LmdbStore(folder).apply([[map_rows(LARGE)]], expected="v1", identity="v2")
    parent.send("done")


@pytest.mark.usefixtures("small_map")
def test_a_large_store_is_opened_with_a_map_that_holds_it(tmp_path: Path) -> None:
    with closing(LmdbStore(tmp_path)) as store:
        store.apply([[map_rows(LARGE)]], expected=None, identity="v1")
        size = os.path.getsize(store.data_path)

    with closing(LmdbStore(tmp_path)) as store:
        assert map_bytes(store) >= 2 * size > MAP_BYTES_SMALL
        assert version(store) == ("v1", LARGE)


def test_a_full_disk_keeps_the_old_version(filled: LmdbStore) -> None:
    def full() -> Iterator[Sequence[StateRows]]:
        yield [map_rows(LARGE, clears=["a"])]
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")

    with pytest.raises(StoreFullError, match=r"data\.mdb: .*No space left.*Free space"):
        filled.apply(full(), expected="v1", identity="v2")
    assert version(filled) == ("v1", START)


def test_a_file_that_cannot_become_larger_keeps_the_old_version(
    filled: LmdbStore, tmp_path: Path
) -> None:
    with closing(Child(write_beyond_the_limit, tmp_path / "store")) as child:
        error, after_error, after_small_change = child.answer()

    assert isinstance(error, StorageError)
    assert "The local disk may be full" in str(error)
    assert after_error == ("v1", START)
    assert after_small_change == ("v2", START | {("c", ""): ""})
    assert version(filled) == after_small_change


def write_beyond_the_limit(parent: Connection, folder: Path) -> None:
    store = LmdbStore(folder)
    size = os.path.getsize(store.data_path) + (1 << 16)
    # Python ignores SIGXFSZ, so that a write beyond the limit is an error and not the end.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with pytest.raises(StorageError) as caught:
        store.apply([[map_rows(LARGE, clears=["a"])]], expected="v1", identity="v2")
    after_error = version(store)
    store.apply([[map_rows({("c", ""): ""})]], expected="v1", identity="v2")
    parent.send((caught.value, after_error, version(store)))


# Users of one environment.


def is_mapped(store: LmdbStore) -> bool:
    return store.data_path in Path("/proc/self/maps").read_text()


def test_the_environment_is_closed_with_its_last_user(tmp_path: Path) -> None:
    first, second = LmdbStore(tmp_path), LmdbStore(tmp_path)
    first.apply([[map_rows(START)]], expected=None, identity="v1")
    assert version(second) == ("v1", START)

    first.close()
    second.apply([[map_rows({("c", ""): ""})]], expected="v1", identity="v2")
    assert version(second) == ("v2", START | {("c", ""): ""})
    assert is_mapped(second)
    second.close()
    assert not is_mapped(second)


def test_closing_twice_does_not_take_the_environment_from_another_user(tmp_path: Path) -> None:
    first, second = LmdbStore(tmp_path), LmdbStore(tmp_path)
    first.close()
    first.close()

    assert version(second) == (None, {})
    second.close()
    second.close()


def test_an_environment_is_one_by_whichever_path_it_is_reached(
    filled: LmdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "store")
    monkeypatch.chdir(tmp_path)

    for path in (tmp_path / "link", "store", "./link/../store"):
        with closing(LmdbStore(path)) as other:
            assert version(other) == ("v1", START)
    assert version(filled) == ("v1", START)


def test_many_threads_read_while_one_writes(tmp_path: Path) -> None:
    done = threading.Event()

    def read() -> int:
        reads = 0
        while not done.is_set() or reads == 0:
            with closing(LmdbStore(tmp_path)) as store:
                identity, found = version(store)
                assert set(found.values()) == {identity}
                reads += 1
        return reads

    def write(store: LmdbStore, number: int) -> None:
        rows = map_rows({(f"k{key}", ""): f"{number}" for key in range(50)})
        store.apply([[rows]], expected=f"{number - 1}" if number else None, identity=f"{number}")

    with closing(LmdbStore(tmp_path)) as store, ThreadPoolExecutor(6) as threads:
        write(store, 0)
        readers = [threads.submit(read) for _ in range(6)]
        try:
            for number in range(1, 60):
                write(store, number)
        finally:
            done.set()

        assert all(reader.result() for reader in readers)
        assert version(store)[0] == "59"


def test_what_is_closed_is_not_used_again(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    store.snapshot().close()
    store.close()

    with pytest.raises(StorageError, match="cannot read"):
        store.snapshot()
    with pytest.raises(StorageError, match="cannot write"):
        store.apply([], expected=None, identity="v1")


@pytest.mark.parametrize("kind", ["garbage", "no folder"])
def test_what_is_not_a_store_is_an_error_that_says_what_to_do(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "store"
    if kind == "garbage":
        folder.mkdir()
        (folder / "data.mdb").write_bytes(b"garbage" * 10_000)

    with pytest.raises(StorageError, match=r"cannot open .*data\.mdb: .*Remove it, it is a cache"):
        LmdbStore(folder, create=False)
    assert folder.exists() == (kind == "garbage")


@pytest.mark.parametrize("meta", [b"", b"\xff", b"{}", b'{"identity": "v1"}'], ids=repr)
def test_a_store_that_does_not_say_what_it_holds_is_refused(
    filled: LmdbStore, tmp_path: Path, meta: bytes
) -> None:
    with filled._environment.begin(write=True) as transaction:
        transaction.put(b"\x00meta", meta)

    with pytest.raises(StorageError, match=r"cannot read .*data\.mdb: .*Remove it"):
        filled.snapshot()


# Forks.


def test_a_fork_leaves_the_environment_of_its_parent_alone(tmp_path: Path) -> None:
    with closing(Child(fork_with_an_open_snapshot, tmp_path)) as child:
        assert child.answer() == ("v1", START, "v6")


def fork_with_an_open_snapshot(parent: Connection, folder: Path) -> None:
    store = LmdbStore(folder)
    store.apply([[map_rows(START)]], expected=None, identity="v1")
    snapshot = store.snapshot()

    def use_what_was_inherited() -> None:
        with pytest.raises(StorageError, match="was opened before a fork"):
            store.snapshot()
        with pytest.raises(StorageError, match="was opened before a fork"):
            store.apply([], expected="v1", identity="v2")
        snapshot.close()
        store.close()

    fork(use_what_was_inherited)
    # Were the snapshot's place free now, its pages would be written over here.
    for number in range(1, 6):
        changes = map_rows({("a", "1"): f"{number}"}, clears=["a", "b"])
        store.apply([[changes]], expected=f"v{number}", identity=f"v{number + 1}")
    parent.send((snapshot.identity, contents(snapshot), version(store)[0]))


def test_a_fork_opens_environments_of_its_own(tmp_path: Path) -> None:
    with closing(Child(fork_and_write, tmp_path)) as child:
        assert child.answer() == [("v1", START), ("v2", {}), ("v1", START)]


def fork_and_write(parent: Connection, folder: Path) -> None:
    left_open, closed = LmdbStore(folder / "open"), LmdbStore(folder / "closed")
    for store in (left_open, closed):
        store.apply([[map_rows(START)]], expected=None, identity="v1")
    closed.close()

    def write() -> None:
        with closing(LmdbStore(folder / "closed")) as again:
            again.apply([[map_rows(clears=["a", "b"])]], expected="v1", identity="v2")
        with closing(LmdbStore(folder / "new")) as new:
            new.apply([[map_rows(START)]], expected=None, identity="v1")

    def open_what_the_parent_has_open() -> None:
        # The binding refuses it or opens it anew; never is it the parent's.
        with suppress(StorageError):
            again = LmdbStore(folder / "open")
            assert again._environment is not left_open._environment

    fork(write)
    fork(open_what_the_parent_has_open)
    others = [LmdbStore(folder / name) for name in ("closed", "new")]
    parent.send([version(store) for store in (left_open, *others)])
