"""Local working state: the rows of a checkpoint on local disk, shared by a host's processes.

It is a cache and never trusted blindly. A folder belongs to one operator and one range of key
groups::

    lock               taken by whoever changes anything here
    CURRENT            which generation is in use
    <generation>/      an LMDB environment, and
        mark.json      its version, its size, and under which boot of the machine it was written

The mark is taken away before the environment is written and set when that is done. So after a
crash there is none, after a truncation the size is wrong, and after the machine has gone down the
boot is another: each of them means to build a new generation from the checkpoint. Whoever still
reads an old one keeps it until it is done, because an open file outlives its name.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowstate.errors import StateError, StorageError
from flowstate.keyed.lmdb_store import LmdbSnapshot, LmdbStore
from flowstate.rows import StateRows
from flowstate.storage._port import store_errors

__all__ = ["StateVersion", "WorkingState"]

_FORMAT = 1
_BUILDING = "(building)"

RowsSince = Callable[["str | None"], Iterator[Sequence[StateRows]]]
"""From a version of the lineage (None: from nothing) to the row sets that lead to the wanted one.

The sets come in the order in which they are to be applied. Those of a rebuild come with the full
contents of each key group at once, so that they can be applied one by one.
"""


@dataclass(frozen=True, slots=True)
class StateVersion:
    """Which contents are wanted, and which earlier ones they follow from."""

    identity: str
    lineage: tuple[str, ...] = ()


class WorkingState:
    """The rows of one version: a ``BaseStore`` that can move on to the next version."""

    def __init__(self, folder: Path, store: LmdbStore, snapshot: LmdbSnapshot, how: str) -> None:
        self._folder, self._store, self._snapshot = folder, store, snapshot
        self.how = how
        """How it came to hold the version: ``reused``, ``advanced`` or ``rebuilt``."""

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], wanted: StateVersion, rows_since: RowsSince
    ) -> WorkingState:
        """Return the wanted version: as it is there, or advanced to, or built anew."""
        path = Path(os.path.abspath(folder))
        with store_errors("open the working state", str(path)):
            found = _open_current(path)
            if found is not None and found.identity == wanted.identity:
                return found
            if found is not None:
                found.close()
            path.mkdir(parents=True, exist_ok=True)
            with _locked(path):
                return _reach(path, wanted, rows_since)

    @property
    def identity(self) -> str:
        """The version of the rows."""
        return self._snapshot.identity or ""

    def get(self, state: str, row: bytes) -> bytes | None:
        return self._snapshot.get(state, row)

    def get_many(self, state: str, rows: Sequence[bytes]) -> list[bytes | None]:
        return self._snapshot.get_many(state, rows)

    def scan(
        self, state: str, prefix: bytes = b"", *, start: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        return self._snapshot.scan(state, prefix, start=start)

    def advance(self, changes: Sequence[Sequence[StateRows]], identity: str) -> None:
        """Apply the changes of checkpoints that are known to be committed, oldest first.

        Another process of the host may have done so already. If it has gone elsewhere, this
        raises ``StorageError``: open the working state anew. After an error of any kind the rows
        are those of the version before.
        """
        before = self.identity
        with store_errors("advance the working state", str(self._folder)), _locked(self._folder):
            if not os.path.exists(self._store.data_path):
                raise StorageError(
                    f"{self._folder} is not as it was at version {before!r}: another process has "
                    f"built it anew. Open the working state anew"
                )
            found = self._store.snapshot()
            if found.identity not in (before, identity):
                found.close()
                raise StorageError(
                    f"{self._folder} holds version {found.identity!r} and not {before!r}: another "
                    f"process has advanced it. Open the working state anew"
                )
            self._snapshot.close()
            self._snapshot = found
            if self.identity == identity:
                return
            # The environment cannot grow while this process still looks at the old version.
            self._snapshot.close()
            try:
                _write(self._store, iter(changes), expected=before, identity=identity)
            finally:
                self._snapshot = self._store.snapshot()

    def close(self) -> None:
        """Let go of the rows; the folder stays for the next one who wants them."""
        self._snapshot.close()
        self._store.close()

    def __enter__(self) -> WorkingState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reach(folder: Path, wanted: StateVersion, rows_since: RowsSince) -> WorkingState:
    """Bring a folder, whose lock is held, to the wanted version."""
    found = _open_current(folder)
    if found is None or found.identity not in (*wanted.lineage, wanted.identity):
        if found is not None:
            found.close()
        return _rebuild(folder, wanted, rows_since)
    if found.identity == wanted.identity:
        return found
    before = found.identity
    found.close()
    store = LmdbStore(_current_generation(folder))
    try:
        _write(store, rows_since(before), expected=before, identity=wanted.identity)
    except BaseException:
        store.close()
        raise
    return WorkingState(folder, store, store.snapshot(), "advanced")


def _rebuild(folder: Path, wanted: StateVersion, rows_since: RowsSince) -> WorkingState:
    _remove_generations(folder)
    generation = folder / f"gen-{uuid.uuid4().hex}"
    store = LmdbStore(generation)
    try:
        before: str | None = None
        # One transaction a set keeps memory bounded; nobody looks in before CURRENT names it.
        for rows in rows_since(None):
            store.apply([rows], expected=before, identity=_BUILDING)
            before = _BUILDING
        store.apply([], expected=before, identity=wanted.identity)
        _write_mark(generation, store, wanted.identity)
        _replace(folder / "CURRENT", generation.name)
    except BaseException:
        store.close()
        shutil.rmtree(generation, ignore_errors=True)
        raise
    return WorkingState(folder, store, store.snapshot(), "rebuilt")


def _write(
    store: LmdbStore,
    changes: Iterator[Sequence[StateRows]],
    *,
    expected: str,
    identity: str,
) -> None:
    generation = Path(store.data_path).parent
    (generation / "mark.json").unlink(missing_ok=True)
    try:
        store.apply(changes, expected=expected, identity=identity)
    except StorageError:
        # A transaction that did not go through has changed nothing.
        with suppress(OSError):
            _write_mark(generation, store, expected)
        raise
    # Without the mark the rows are right all the same; the next one to open them builds them anew.
    with suppress(OSError):
        _write_mark(generation, store, identity)


def _write_mark(generation: Path, store: LmdbStore, identity: str) -> None:
    mark = {
        "format": _FORMAT,
        "identity": identity,
        "size": os.path.getsize(store.data_path),
        "boot": _boot_id(),
    }
    _replace(generation / "mark.json", json.dumps(mark))


def _open_current(folder: Path) -> WorkingState | None:
    """Return the current generation if its mark says that it is sound."""
    try:
        generation = _current_generation(folder)
        mark: Any = json.loads((generation / "mark.json").read_text())
        size = (generation / "data.mdb").stat().st_size
    except (OSError, ValueError, StateError):
        return None
    expected = (_FORMAT, _boot_id())
    # LMDB maps the file, so a file that is too short would end the process and not the look-up.
    if not isinstance(mark, dict):
        return None
    if (mark.get("format"), mark.get("boot")) != expected or size != mark.get("size"):
        return None
    try:
        store = LmdbStore(generation, create=False)
    except (OSError, StorageError):
        return None
    try:
        snapshot = store.snapshot()
    except StorageError:
        store.close()
        return None
    if snapshot.identity is None:
        snapshot.close()
        store.close()
        return None
    return WorkingState(folder, store, snapshot, "reused")


def _current_generation(folder: Path) -> Path:
    name = (folder / "CURRENT").read_text()
    if "/" in name or not name.startswith("gen-"):
        raise StateError(f"{folder / 'CURRENT'} is damaged: remove the folder, it is a cache")
    return folder / name


def _remove_generations(folder: Path) -> None:
    (folder / "CURRENT").unlink(missing_ok=True)
    for generation in folder.glob("gen-*"):
        shutil.rmtree(generation, ignore_errors=True)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex}")
    temporary.write_text(text)
    os.replace(temporary, path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the kernel lets go of it when a process dies."""
    with open(folder / "lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"
