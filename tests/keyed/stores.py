"""Rows for the tests of stores on local disk, and other processes that use the same stores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

import pyarrow as pa

from flowstate import KeyGroupAssigner
from flowstate.keyed.codec import BaseStore, Change, RowCodec, rows_of_changes
from flowstate.keyed.lmdb_store import LmdbStore
from flowstate.keys import KeyType
from flowstate.rows import RowOp, StateKind, StateRows

WAIT_S = 60.0
# Each child is a fork of a server that has imported this much, and has nothing open.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pytest", "pyarrow.compute", "flowstate.keyed.working_state"])

Entry = tuple[str, str]
"""A key and a key of its map."""


def codec_of(state: str) -> RowCodec:
    text = pa.string()
    return RowCodec(state, StateKind.MAP, KeyType(text), sub=KeyType(text), value=text)


CODEC = codec_of("map")


def map_rows(
    puts: Mapping[Entry, str] | None = None,
    *,
    deletes: Iterable[Entry] = (),
    clears: Iterable[str] = (),
    state: str = "map",
) -> StateRows:
    """Return a set of rows; its clears stand last, though they are to come first."""
    changes = [
        *(
            Change(RowOp.PUT, key, None, sub, text, None)
            for (key, sub), text in (puts or {}).items()
        ),
        *(Change(RowOp.DELETE, key, None, sub, None, None) for key, sub in deletes),
        *(Change(RowOp.CLEAR, key, None, None, None, None) for key in clears),
    ]
    return rows_of_changes(
        codec_of(state), changes, max_parallelism=128, assigner=KeyGroupAssigner.XXHASH64
    )


def row(entry: Entry) -> bytes:
    return CODEC.row(entry[0], None, entry[1])


def text_of(data: bytes | None) -> str | None:
    if data is None:
        return None
    text: str = CODEC.unit(data)[0]
    return text


def contents(base: BaseStore, state: str = "map") -> dict[Entry, str | None]:
    """Return all entries of a state in the order in which a scan meets them."""
    found = {}
    for data, value in base.scan(state):
        key, _, sub = CODEC.identity(data)
        found[key, sub] = text_of(value)
    return found


def version(store: LmdbStore) -> tuple[str | None, dict[Entry, str | None]]:
    """Return the identity and the entries that a store holds now."""
    with closing(store.snapshot()) as snapshot:
        return snapshot.identity, contents(snapshot)


class Child:
    """Another process: it runs a function, which gets a connection to talk to this one."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._ours, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=function, args=(theirs, *arguments), daemon=True)
        self.process.start()
        # With our copy closed, a child that has died is an end of file here.
        theirs.close()

    def says_something(self, *, within_s: float) -> bool:
        return self._ours.poll(within_s)

    def answer(self) -> Any:
        """Return what the child says next; ``EOFError`` if it dies before."""
        assert self._ours.poll(WAIT_S), "the child says nothing"
        return self._ours.recv()

    def tell(self, word: object = "go on") -> None:
        self._ours.send(word)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)

    def close(self) -> None:
        self.kill()
        self._ours.close()
        self.process.close()


def fork(function: Callable[[], object]) -> None:
    """Run a function in a fork of this process, and fail if it fails there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
