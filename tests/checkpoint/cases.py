"""Rows, records and file systems that several tests of checkpoints need."""

from __future__ import annotations

import builtins
import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from decimal import Decimal
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from flowstate.checkpoint import (
    CheckpointRecord,
    FileHandle,
    KeyedHandle,
    KeyedSection,
    SubtaskSnapshot,
    encode_state_file,
)
from flowstate.checkpoint.files import TAIL_BYTES, handle_of
from flowstate.key_groups import KeyGroupAssigner, KeyGroupRange, key_group_range_of
from flowstate.rows import RowOp, StateKind, StateRows, row_schema
from flowstate.storage._port import FileEntry, StateFileSystem

MAX_PARALLELISM = 128
ALL = KeyGroupRange(0, MAX_PARALLELISM - 1)

PAIR = pa.struct([("a", pa.string()), ("b", pa.int32())])
DEEP = pa.list_(pa.struct([("at", pa.timestamp("us", tz="UTC")), ("by", pa.list_(pa.string()))]))
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)

PUT, DELETE, CLEAR = RowOp.PUT, RowOp.DELETE, RowOp.CLEAR


def rows_of(name: str, kind: StateKind, schema: pa.Schema, rows: Sequence[Any]) -> StateRows:
    """Make rows of tuples in the order of the schema."""
    columns = [[row[index] for row in rows] for index in range(len(schema))]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return StateRows(name, kind, pa.table(arrays, schema=schema))


LAYOUTS: dict[str, StateRows] = {
    "value": rows_of(
        "value",
        StateKind.VALUE,
        row_schema(key=pa.int64(), value=pa.string()),
        [(0, PUT, 1, "one"), (0, PUT, 2, None), (3, DELETE, 3, None), (127, PUT, 4, "")],
    ),
    "value with a TTL": rows_of(
        "ttl",
        StateKind.VALUE,
        row_schema(key=pa.string(), value=pa.decimal128(9, 2), ts=pa.int64()),
        [(1, PUT, "a", Decimal("1.50"), 7), (1, DELETE, "b", None, None)],
    ),
    "struct key and namespace": rows_of(
        "windowed",
        StateKind.AGGREGATING,
        row_schema(key=PAIR, namespace=PAIR, value=PAIR),
        [
            (5, PUT, {"a": "x", "b": None}, {"a": None, "b": 1}, {"a": "v", "b": 2}),
            (6, PUT, {"a": None, "b": 1}, None, None),
        ],
    ),
    "map of nested values": rows_of(
        "map",
        StateKind.MAP,
        row_schema(key=pa.int32(), sub=pa.string(), value=DEEP, ts=pa.int64()),
        [
            (2, CLEAR, 1, None, None, None),
            (2, PUT, 1, "k", [{"at": NOON, "by": ["p", None]}], 5),
            (2, PUT, 1, "n", None, 6),
            (9, PUT, 2, "e", [], 7),
        ],
    ),
    "list": rows_of(
        "list",
        StateKind.LIST,
        row_schema(
            key=pa.binary(),
            sub=pa.int64(),
            value=pa.list_(pa.float64()),
            ts=pa.list_(pa.int64()),
        ),
        [(0, PUT, b"\0\xff", 0, [1.5, None], [1, 2]), (0, PUT, b"\0\xff", 1, [-0.0], [3])],
    ),
    "timer": rows_of(
        "_flow.timers",
        StateKind.TIMER,
        row_schema(key=pa.int64(), namespace=pa.binary(), sub=pa.int64()),
        [(4, PUT, 1, b"w", 1000), (4, DELETE, 1, b"w", 2000)],
    ),
    "empty": rows_of("none", StateKind.VALUE, row_schema(key=pa.int64(), value=DEEP), []),
}


def int_rows(
    keys: Iterable[int],
    values: Iterable[int] | None = None,
    *,
    name: str = "count",
    max_parallelism: int = MAX_PARALLELISM,
) -> StateRows:
    """Make value rows of int64 keys; the key group is the key modulo the max parallelism."""
    numbers = np.fromiter(keys, np.int64)
    worth = numbers if values is None else np.fromiter(values, np.int64)
    schema = row_schema(key=pa.int64(), value=pa.int64())
    groups = (numbers % max_parallelism).astype(np.uint16)
    columns = [groups, np.zeros(len(numbers), np.uint8), numbers, worth]
    return StateRows(name, StateKind.VALUE, pa.table(columns, schema=schema))


def values_of(rows: StateRows) -> dict[int, int]:
    keys, values = rows.table.column("key").to_pylist(), rows.table.column("value").to_pylist()
    return dict(zip(keys, values, strict=True))


def inline_handle(*states: StateRows) -> FileHandle:
    data = encode_state_file(KeyedSection.of(rows) for rows in states)
    return inline_handle_of(data, rows=sum(rows.table.num_rows for rows in states))


def inline_handle_of(data: bytes, *, rows: int) -> FileHandle:
    footer_length = int.from_bytes(data[-TAIL_BYTES : -TAIL_BYTES + 8], "little")
    ending = data[len(data) - footer_length - TAIL_BYTES :]
    return handle_of(ending, size=len(data), rows=rows, inline=data)


def keyed_handle(
    file: FileHandle,
    *,
    first: int = 1,
    last: int = 1,
    key_groups: KeyGroupRange = ALL,
    level: int = 0,
    full: bool = False,
) -> KeyedHandle:
    return KeyedHandle(
        file=file,
        key_groups=key_groups,
        first_checkpoint=first,
        last_checkpoint=last,
        level=level,
        full=full,
    )


def record_of(
    checkpoint_id: int,
    *files: FileHandle,
    parent: CheckpointRecord | None = None,
    batch_id: int | None = None,
    run: str = "run",
    parallelism: int = 1,
    **changes: Any,
) -> CheckpointRecord:
    """Make a record whose first subtask has the files."""
    subtasks = []
    for index in range(parallelism):
        key_groups = key_group_range_of(
            subtask_index=index, parallelism=parallelism, max_parallelism=MAX_PARALLELISM
        )
        keyed = [keyed_handle(file, key_groups=key_groups) for file in files]
        subtasks.append(
            SubtaskSnapshot(
                subtask_index=index,
                key_groups=key_groups,
                keyed=tuple(keyed) if index == 0 else (),
                digest=f"digest of {index}",
            )
        )
    fields = {
        "checkpoint_id": checkpoint_id,
        "parent_id": parent and parent.checkpoint_id,
        "parent_digest": parent and parent.digest,
        "batch_id": checkpoint_id if batch_id is None else batch_id,
        "run": run,
        "parallelism": parallelism,
        "max_parallelism": MAX_PARALLELISM,
        "assigner": KeyGroupAssigner.FLINK,
        "keyed_states": {"count": {"kind": "value"}},
        "subtasks": tuple(subtasks),
        "created_ms": 0,
    }
    return CheckpointRecord(**{**fields, **changes})


class SpyFileSystem:
    """Passes everything on, counts what is read, and can lose a reply."""

    def __init__(self, inner: StateFileSystem) -> None:
        self._inner = inner
        self.url = inner.url
        self.reads = 0
        self.bytes_read = 0
        self.before_create: Callable[[str], None] = lambda path: None
        self.lose_next_reply = False

    def open_output(self, path: str) -> AbstractContextManager[BinaryIO]:
        return self._inner.open_output(path)

    def write(self, path: str, data: bytes) -> None:
        self._inner.write(path, data)

    def create_exclusively(self, path: str, data: bytes) -> bool:
        self.before_create(path)
        created = self._inner.create_exclusively(path, data)
        if self.lose_next_reply:
            self.lose_next_reply = False
            return self._inner.create_exclusively(path, data)
        return created

    def read(self, path: str) -> bytes:
        return self._inner.read(path)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        pieces = self._inner.read_ranges(path, ranges)
        self.reads += 1
        self.bytes_read += sum(map(len, pieces))
        return pieces

    def list(self, folder: str) -> builtins.list[FileEntry]:
        return self._inner.list(folder)

    def move(self, names: Mapping[str, str]) -> None:
        self._inner.move(names)

    def delete(self, paths: Iterable[str]) -> None:
        self._inner.delete(paths)
