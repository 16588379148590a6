"""Between rows as Arrow columns, as Python values, and as the bytes of a working store.

In a working store a row is found by the msgpack of its identity: the key, then the namespace, then
the sub key, each only where the state has it. So all rows of one key and namespace share a prefix.
A timer's row begins with its timestamp instead, so that a scan meets timers in the order in which
they fire. The value is the msgpack of ``[value]`` or ``[value, ts]``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from flowstate.key_groups import KeyGroupAssigner, key_groups_of
from flowstate.keys import KeyType, physical_column, python_type
from flowstate.rows import RowOp, StateKind, StateRows, row_schema

__all__ = ["ABSENT", "BaseStore", "Change", "RowCodec", "encoded_rows", "rows_of_changes"]

_TIMESTAMP = struct.Struct(">Q")
_BIAS = 1 << 63
_encode = msgspec.msgpack.Encoder().encode


class _Absent:
    """What stands for a row that is known not to be there; None may be a value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


class BaseStore(Protocol):
    """Rows of a checkpoint that stay as they are while a batch runs over them."""

    def get(self, state: str, row: bytes) -> bytes | None:
        """Return the value of a row, or None."""
        ...

    def get_many(self, state: str, rows: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each row, or None, in the order asked for."""
        ...

    def scan(self, state: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows that begin with a prefix and their values, in the order of their bytes.

        What is yielded may be a view that is valid until the next step only.
        """
        ...


class Change(NamedTuple):
    """One row that is to be written."""

    op: RowOp
    key: Any
    namespace: Any
    sub: Any
    value: Any
    ts: Any


class RowCodec:
    """How the rows of one state are written and read."""

    def __init__(
        self,
        name: str,
        kind: StateKind,
        key: KeyType,
        *,
        namespace: KeyType | None = None,
        sub: KeyType | None = None,
        value: pa.DataType | None = None,
        ttl: bool = False,
    ) -> None:
        self.name, self.kind, self.key = name, kind, key
        self.namespace, self.sub = namespace, sub
        in_chunks = kind is StateKind.LIST
        self.value = pa.list_(value) if in_chunks else value
        self.ts = (pa.list_(pa.int64()) if in_chunks else pa.int64()) if ttl else None
        self._decode_row = self._row_decoder()
        plain = type(None) if self.value is None else python_type(self.value)
        stamp = list[int] if in_chunks else int
        self._decode_unit = msgspec.msgpack.Decoder(_unit_type(plain, stamp)).decode

    def _row_decoder(self) -> Callable[[bytes], Any]:
        parts = [self.key, self.namespace, None if self.kind is StateKind.TIMER else self.sub]
        types = [python_type(part.arrow, composite=True) | None for part in parts if part]
        decode = msgspec.msgpack.Decoder(tuple[tuple(types)]).decode  # type: ignore[misc]
        # Several msgpack values in a row are the inside of an array of so many.
        head = bytes([0x90 | len(types)])
        return lambda row: decode(head + row)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the state's rows."""
        return row_schema(
            key=self.key.arrow,
            namespace=None if self.namespace is None else self.namespace.arrow,
            sub=None if self.sub is None else self.sub.arrow,
            value=self.value,
            ts=self.ts,
        )

    def prefix(self, key: Any, namespace: Any) -> bytes:
        """Return the bytes with which all rows of a key and namespace begin."""
        if self.namespace is None:
            return _encode(key)
        return _encode(key) + _encode(namespace)

    def row(self, key: Any, namespace: Any, sub: Any) -> bytes:
        """Return the bytes by which a working store finds a row."""
        if self.kind is StateKind.TIMER:
            return _TIMESTAMP.pack(sub + _BIAS) + self.prefix(key, namespace)
        if self.sub is None:
            return self.prefix(key, namespace)
        return self.prefix(key, namespace) + _encode(sub)

    def identity(self, row: bytes) -> tuple[Any, Any, Any]:
        """Return the key, the namespace and the sub key of a row."""
        if self.kind is StateKind.TIMER:
            parts = [*self._decode_row(row[_TIMESTAMP.size :]), timer_timestamp(row)]
        else:
            parts = list(self._decode_row(row))
        key = parts.pop(0)
        namespace = parts.pop(0) if self.namespace is not None else None
        return self._canonical(key, namespace, parts[0] if parts else None)

    def _canonical(self, key: Any, namespace: Any, sub: Any) -> tuple[Any, Any, Any]:
        # A NaN that was read is another object than the one that all NaN keys are.
        if self.key.has_floats:
            key = self.key.canonical(key)
        if self.namespace is not None and self.namespace.has_floats:
            namespace = self.namespace.canonical(namespace)
        if self.sub is not None and self.sub.has_floats and sub is not None:
            sub = self.sub.canonical(sub)
        return key, namespace, sub

    def unit(self, data: bytes) -> tuple[Any, Any]:
        """Return the value and the time of the last access, None where it was not kept."""
        found = self._decode_unit(data)
        return found.value, found.ts


def _unit_type(plain: Any, stamp: Any) -> Any:
    fields: list[Any] = [("value", plain | None), ("ts", stamp | None, None)]
    return msgspec.defstruct("Unit", fields, array_like=True, frozen=True)


def timer_timestamp(row: bytes) -> int:
    """Return the timestamp of a timer's row."""
    biased: int = _TIMESTAMP.unpack_from(row)[0]
    return biased - _BIAS


def timer_bound(timestamp: int) -> bytes:
    """Return the bytes with which the rows of timers of this timestamp begin."""
    return _TIMESTAMP.pack(timestamp + _BIAS)


def rows_of_changes(
    codec: RowCodec,
    changes: Sequence[Change],
    *,
    max_parallelism: int,
    assigner: KeyGroupAssigner,
) -> StateRows:
    """Return changes as Arrow columns, sorted by key group."""
    columns: list[Sequence[Any]] = list(zip(*changes, strict=True)) if changes else [()] * 6
    keys = codec.key.to_array(columns[1])
    groups = key_groups_of(keys, max_parallelism=max_parallelism, assigner=assigner)
    arrays = [pa.array(groups), pa.array(np.array(columns[0], dtype=np.uint8)), keys]
    for kind, part in ((codec.namespace, columns[2]), (codec.sub, columns[3])):
        if kind is not None:
            arrays.append(kind.to_array(part))
    for arrow, part in ((codec.value, columns[4]), (codec.ts, columns[5])):
        if arrow is not None:
            arrays.append(pa.array(part, arrow))
    table = pa.Table.from_arrays(arrays, schema=codec.schema)
    order = np.argsort(groups, kind="stable")
    return StateRows(codec.name, codec.kind, table.take(pa.array(order)))


def encoded_rows(rows: StateRows) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (op, row, value) as a working store keeps them; a CLEAR has its prefix for a row.

    It needs no descriptor, only the columns, so it serves states that no program claims, too.
    """
    table = rows.table
    names = table.column_names
    ops = table["op"].to_pylist()
    size = len(ops)
    empty: list[Any] = [None] * size
    keys = physical_column(table["key"], composite=True)
    namespaces, subs = (
        physical_column(table[name], composite=True) if name in names else None
        for name in ("namespace", "sub")
    )
    values = physical_column(table["value"]) if "value" in names else empty
    stamps = physical_column(table["ts"]) if "ts" in names else empty
    timer = rows.kind is StateKind.TIMER
    for i in range(size):
        row = _encode(keys[i])
        if namespaces is not None:
            row += _encode(namespaces[i])
        if subs is not None and ops[i] != RowOp.CLEAR:
            row = _TIMESTAMP.pack(subs[i] + _BIAS) + row if timer else row + _encode(subs[i])
        stamp = stamps[i]
        yield ops[i], row, _encode((values[i],) if stamp is None else (values[i], stamp))
