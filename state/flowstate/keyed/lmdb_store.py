"""Rows in an LMDB environment: point look-ups and scans of one version, changes in one step.

An environment is a cache of what checkpoints hold, so nothing in it needs to survive a crash of
the machine; it is written without waiting for the disk. Which version it holds stands inside it,
under the same transaction as the rows.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import lmdb
import pyarrow.compute as pc

from flowstate.errors import StorageError, StoreFullError
from flowstate.keyed.codec import encoded_columns, encoded_rows, in_store_order
from flowstate.rows import RowOp, StateRows

__all__ = ["LmdbSnapshot", "LmdbStore"]

# Opened without buffers a transaction hands out bytes, which its type stubs cannot tell.
Transaction = Any

# Address space, not memory or disk. Large, because growing ends all snapshots of the process.
_MAP_BYTES_MIN = 1 << 36
_MAP_BYTES_MAX = 1 << 44
_READERS_MAX = 1024
_PUT_ROWS = 65_536

_META = b"\x00meta"
_PLAIN, _LONG = b"\x01", b"\x02"
_STATE_ID = struct.Struct(">H")
_LENGTH = struct.Struct(">I")
# LMDB's longest key has 511 bytes. A longer row is found by its beginning and its hash, and then
# stands in full before its value.
_ROW_BYTES_MAX = 480
_LONG_HEAD_BYTES = 240
_LONG_HASH_BYTES = 32


class _Environments:
    """The environments that this process has open: LMDB allows each to be opened only once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._open: dict[str, tuple[lmdb.Environment, int]] = {}

    def acquire(self, folder: str, *, create: bool) -> lmdb.Environment:
        with self._lock:
            if self._pid != os.getpid():
                # What the parent had open before the fork must not be touched here.
                self._pid, self._open = os.getpid(), {}
            environment, users = self._open.get(folder) or (
                _open_environment(folder, create=create),
                0,
            )
            self._open[folder] = (environment, users + 1)
            return environment

    def release(self, folder: str) -> None:
        with self._lock:
            if self._pid != os.getpid() or folder not in self._open:
                return
            environment, users = self._open[folder]
            if users > 1:
                self._open[folder] = (environment, users - 1)
            else:
                del self._open[folder]
                environment.close()


_ENVIRONMENTS = _Environments()


def _open_environment(folder: str, *, create: bool) -> lmdb.Environment:
    if create:
        os.makedirs(folder, exist_ok=True)
    data = Path(folder, "data.mdb")
    size = data.stat().st_size if data.exists() else 0
    try:
        environment = lmdb.open(
            folder,
            map_size=max(_MAP_BYTES_MIN, 2 * size),
            max_readers=_READERS_MAX,
            create=create,
            sync=False,
            metasync=False,
            readahead=False,
        )
        # Readers that were killed keep their places, and with them old versions, until found.
        environment.reader_check()
    except lmdb.Error as error:
        raise StorageError(f"cannot open {data}: {error}. Remove it, it is a cache") from error
    return environment


class LmdbStore:
    """One environment. Several processes may read it while one of them writes."""

    def __init__(self, folder: str | os.PathLike[str], *, create: bool = True) -> None:
        # By whichever path it is reached, it is one environment.
        self._folder = os.path.realpath(folder)
        self._environment = _ENVIRONMENTS.acquire(self._folder, create=create)
        self._pid = os.getpid()
        self._closed = False

    @property
    def data_path(self) -> str:
        """The file that holds the rows."""
        return os.path.join(self._folder, "data.mdb")

    def snapshot(self) -> LmdbSnapshot:
        """Open the version that is there now; it stays as it is until it is closed."""
        self._check_process()
        try:
            return LmdbSnapshot(self._begin())
        except (lmdb.Error, LookupError, ValueError) as error:
            raise StorageError(
                f"cannot read {self.data_path}: {error!r}. Remove it, it is a cache"
            ) from error

    def _begin(self) -> Transaction:
        try:
            return self._environment.begin(buffers=False)
        except lmdb.MapResizedError:
            # Another process has made the environment larger; 0 takes its size over.
            self._environment.set_mapsize(0)
            return self._environment.begin(buffers=False)

    def _check_process(self) -> None:
        # After a fork the parent's places among the readers, and its locks, are not ours.
        if self._pid != os.getpid():
            raise StorageError(f"{self._folder} was opened before a fork: open it in the child")

    def apply(
        self, changes: Iterable[Sequence[StateRows]], *, expected: str | None, identity: str
    ) -> None:
        """Bring the store from the expected identity to a new one, in one transaction.

        The changes are sets of rows, the later ones newer. Nothing has changed if this raises.
        """
        self._check_process()
        groups = iter(changes)
        taken: list[Sequence[StateRows]] = []
        while True:
            try:
                self._apply(taken, groups, expected, identity)
                return
            except lmdb.MapFullError:
                self._grow()
            except lmdb.MapResizedError:
                self._environment.set_mapsize(0)
            except lmdb.DiskError as error:
                raise StoreFullError(
                    f"cannot write {self.data_path}: {error}. Free space on the local disk"
                ) from error
            except lmdb.Error as error:
                # A disk that becomes full in the middle of a write is an input/output error here.
                raise StorageError(
                    f"cannot write {self.data_path}: {error}. The local disk may be full"
                ) from error

    def _apply(
        self,
        taken: list[Sequence[StateRows]],
        groups: Iterator[Sequence[StateRows]],
        expected: str | None,
        identity: str,
    ) -> None:
        # What was taken from the iterator is kept until the transaction is through, because a
        # full map means to do it all again in a larger one.
        with self._environment.begin(write=True) as transaction:
            meta = _read_meta(transaction)
            if meta["identity"] != expected:
                raise StorageError(
                    f"{self._folder} holds version {meta['identity']!r} and not {expected!r}: "
                    f"another process has advanced it"
                )
            for rows in taken:
                _write_all(transaction, meta, rows)
            for rows in groups:
                taken.append(rows)
                _write_all(transaction, meta, rows)
            meta["identity"] = identity
            transaction.put(_META, json.dumps(meta).encode())

    def _grow(self) -> None:
        size = self._environment.info()["map_size"] * 2
        if size > _MAP_BYTES_MAX:
            raise StoreFullError(f"{self.data_path} has outgrown {_MAP_BYTES_MAX} bytes")
        self._environment.set_mapsize(size)

    def close(self) -> None:
        """Let go of the environment. Snapshots must be closed before."""
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            _ENVIRONMENTS.release(self._folder)


class LmdbSnapshot:
    """One version of the rows: a ``BaseStore``."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._pid = os.getpid()
        meta = _read_meta(transaction)
        self.identity: str | None = meta["identity"]
        self._ids: dict[str, bytes] = {
            name: _STATE_ID.pack(number) for name, number in meta["states"].items()
        }
        self._has_long_rows: bool = meta["long"]

    def get(self, state: str, row: bytes) -> bytes | None:
        number = self._ids.get(state)
        if number is None:
            return None
        if len(row) <= _ROW_BYTES_MAX:
            found: bytes | None = self._transaction.get(_PLAIN + number + row)
            return found
        return _long_value(self._transaction.get(_long_key(number, row)), row)

    def get_many(self, state: str, rows: Sequence[bytes]) -> list[bytes | None]:
        number = self._ids.get(state)
        if number is None:
            return [None] * len(rows)
        if max(map(len, rows), default=0) > _ROW_BYTES_MAX:
            return [self.get(state, row) for row in rows]
        head = _PLAIN + number
        return list(map(self._transaction.get, map(head.__add__, rows)))

    def scan(
        self, state: str, prefix: bytes = b"", *, start: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        number = self._ids.get(state)
        if number is None:
            return iter(())
        head = _PLAIN + number
        plain = _scan(self._transaction, head + prefix, skip=len(head), start=head + start)
        if not self._has_long_rows:
            return plain
        long_rows = sorted(_scan_long(self._transaction, number, prefix, start=start))
        return heapq.merge(plain, long_rows)

    def close(self) -> None:
        """Let go of this version."""
        # In a forked child this would end the parent's hold on it.
        if self._pid == os.getpid():
            self._transaction.abort()


def _read_meta(transaction: Transaction) -> dict[str, Any]:
    stored = transaction.get(_META)
    if stored is None:
        return {"identity": None, "states": {}, "long": False}
    meta: dict[str, Any] = json.loads(bytes(stored))
    return meta


def _scan(
    transaction: Transaction, prefix: bytes, *, skip: int, start: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    with transaction.cursor() as cursor:
        if not cursor.set_range(max(prefix, start)):
            return
        for key, value in cursor:
            if not key.startswith(prefix):
                return
            yield key[skip:], value


def _scan_long(
    transaction: Transaction, number: bytes, prefix: bytes, *, start: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    head = _LONG + number
    first, begin = (head + part[:_LONG_HEAD_BYTES] for part in (prefix, start))
    for _, stored in _scan(transaction, first, skip=0, start=begin):
        length = _LENGTH.unpack_from(stored)[0]
        row = stored[_LENGTH.size : _LENGTH.size + length]
        if row.startswith(prefix) and row >= start:
            yield row, stored[_LENGTH.size + length :]


def _long_key(number: bytes, row: bytes) -> bytes:
    digest = hashlib.blake2b(row, digest_size=_LONG_HASH_BYTES).digest()
    return _LONG + number + row[:_LONG_HEAD_BYTES] + digest


def _long_value(stored: bytes | None, row: bytes) -> bytes | None:
    if stored is None or not stored[_LENGTH.size :].startswith(row):
        return None
    return stored[_LENGTH.size + len(row) :]


def _write_all(transaction: Transaction, meta: dict[str, Any], states: Sequence[StateRows]) -> None:
    for rows in states:
        number = _STATE_ID.pack(meta["states"].setdefault(rows.name, len(meta["states"])))
        for prefix in _cleared(rows):
            _delete_prefix(transaction, number, prefix)
        _write_rows(transaction, meta, number, rows)


def _cleared(rows: StateRows) -> list[bytes]:
    table = rows.table.filter(pc.equal(rows.table["op"], RowOp.CLEAR.value))
    cleared = StateRows(rows.name, rows.kind, table)
    return [row for _, row, _ in encoded_rows(cleared)] if len(table) else []


def _delete_prefix(transaction: Transaction, number: bytes, prefix: bytes) -> None:
    plain = [key for key, _ in _scan(transaction, _PLAIN + number + prefix, skip=0)]
    long_rows = [_long_key(number, row) for row, _ in _scan_long(transaction, number, prefix)]
    for key in plain + long_rows:
        transaction.delete(key)


def _write_rows(
    transaction: Transaction, meta: dict[str, Any], number: bytes, rows: StateRows
) -> None:
    rows = in_store_order(rows)
    for start in range(0, rows.table.num_rows, _PUT_ROWS):
        part = rows.table.slice(start, _PUT_ROWS)
        puts = _stored(transaction, meta, number, StateRows(rows.name, rows.kind, part))
        # Sorted puts touch each page once.
        puts.sort(key=itemgetter(0))
        with transaction.cursor() as cursor:
            cursor.putmulti(puts)


def _stored(
    transaction: Transaction, meta: dict[str, Any], number: bytes, rows: StateRows
) -> list[tuple[bytes, bytes]]:
    """Delete what is to be deleted, and return what is to be put."""
    head = _PLAIN + number
    ops, found, values = encoded_columns(rows)
    if not ops.any() and max(map(len, found), default=0) <= _ROW_BYTES_MAX:
        return list(zip(map(head.__add__, found), values, strict=True))
    puts = []
    for op, row, value in zip(ops.tolist(), found, values, strict=True):
        key = head + row
        if len(row) > _ROW_BYTES_MAX:
            meta["long"] = True
            key, value = _long_key(number, row), _LENGTH.pack(len(row)) + row + value
        if op == RowOp.PUT:
            puts.append((key, value))
        elif op == RowOp.DELETE:
            transaction.delete(key)
    return puts
