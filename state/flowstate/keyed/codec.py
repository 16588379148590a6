"""Between rows as Arrow columns, as Python values, and as the bytes of a working store.

In a working store a row is found by the msgpack of its identity: the key, then the namespace, then
the sub key, each only where the state has it. So all rows of one key and namespace share a prefix.
A timer's row begins with its timestamp instead, so that a scan meets timers in the order in which
they fire. The value is the msgpack of ``[value]`` or ``[value, ts]``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import add, is_
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from flowstate.key_groups import KeyGroupAssigner, key_groups_of
from flowstate.keys import KeyType, physical_column, python_type
from flowstate.rows import RowOp, StateKind, StateRows, row_schema

__all__ = [
    "ABSENT",
    "BaseStore",
    "Change",
    "ChangeColumns",
    "RowCodec",
    "encoded_columns",
    "encoded_rows",
    "has_absent",
    "in_store_order",
    "rows_of_changes",
    "rows_of_columns",
]

_TIMESTAMP = struct.Struct(">Q")
# The head of a msgpack array of up to 2**32 - 1 elements, and msgpack's null.
_ARRAY = struct.Struct(">BI")
_NIL = b"\xc0"
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

    def scan(
        self, state: str, prefix: bytes = b"", *, start: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows that begin with a prefix and their values, in the order of their bytes.

        With ``start`` they are those from there on. What is yielded may be a view that is
        valid until the next step only.
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


class ChangeColumns(NamedTuple):
    """Rows that are to be written, by columns; None for a column that is null throughout."""

    ops: npt.NDArray[np.uint8]
    keys: Sequence[Any] | pa.Array
    namespaces: Sequence[Any] | None
    subs: Sequence[Any] | None
    values: Sequence[Any] | pa.Array | None
    ts: Sequence[Any] | None

    @classmethod
    def of(cls, changes: Sequence[Change]) -> ChangeColumns:
        """Turn rows into columns."""
        ops, *rest = zip(*changes, strict=True) if changes else [()] * 6
        return cls(np.array(ops, dtype=np.uint8), *rest)


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
        unit = _unit_type(plain, stamp)
        self._decode_unit = msgspec.msgpack.Decoder(unit).decode
        self._decode_units = msgspec.msgpack.Decoder(list[unit | None]).decode  # type: ignore[valid-type]

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

    def prefixes(self, keys: Iterable[Any]) -> list[bytes]:
        """Return the same for many keys of a state without namespaces."""
        return list(map(_encode, keys))

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

    def units(self, data: Sequence[bytes | None]) -> list[Any]:
        """Return the ``value`` and ``ts`` of many rows; None instead where there is no row.

        They are read as one message, because that is three times as fast as one by one.
        """
        if not data:
            return []
        given = [_NIL if one is None else one for one in data]
        found: list[Any] = self._decode_units(_ARRAY.pack(0xDD, len(given)) + b"".join(given))
        return found


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
    columns = ChangeColumns.of(changes)
    return rows_of_columns(codec, columns, max_parallelism=max_parallelism, assigner=assigner)


def rows_of_columns(
    codec: RowCodec,
    columns: ChangeColumns,
    *,
    max_parallelism: int,
    assigner: KeyGroupAssigner,
) -> StateRows:
    """Return changes as Arrow columns, sorted by key group."""
    keys = columns.keys if isinstance(columns.keys, pa.Array) else codec.key.to_array(columns.keys)
    groups = key_groups_of(keys, max_parallelism=max_parallelism, assigner=assigner)
    arrays = [pa.array(groups), pa.array(columns.ops), keys]
    nothing: list[Any] = []
    for kind, part in ((codec.namespace, columns.namespaces), (codec.sub, columns.subs)):
        if kind is not None:
            nothing = nothing or [None] * len(keys)
            arrays.append(kind.to_array(nothing if part is None else part))
    for arrow, part in ((codec.value, columns.values), (codec.ts, columns.ts)):
        if arrow is not None:
            given = pa.nulls(len(keys), arrow) if part is None else part
            arrays.append(given if isinstance(given, pa.Array) else pa.array(given, arrow))
    table = pa.Table.from_arrays(arrays, schema=codec.schema)
    order = np.argsort(groups, kind="stable")
    return StateRows(codec.name, codec.kind, table.take(pa.array(order)))


def encoded_rows(rows: StateRows) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (op, row, value) as a working store keeps them; a CLEAR has its prefix for a row.

    It needs no descriptor, only the columns, so it serves states that no program claims, too.
    """
    ops, found, values = encoded_columns(rows)
    return zip(ops.tolist(), found, values, strict=True)


def encoded_columns(rows: StateRows) -> tuple[npt.NDArray[np.uint8], list[bytes], list[bytes]]:
    """Return the ops, the rows and the values as a working store keeps them.

    All of it is loops that run outside of Python's own: they take most of an advance's time.
    """
    table = rows.table
    names = table.column_names
    ops: npt.NDArray[np.uint8] = table["op"].to_numpy()
    found: Iterable[bytes] = map(_encode, physical_column(table["key"], composite=True))
    if "namespace" in names:
        namespaces = physical_column(table["namespace"], composite=True)
        found = map(add, found, map(_encode, namespaces))
    if "sub" in names:
        subs = physical_column(table["sub"], composite=True)
        found = _with_subs(found, subs, ops, is_timer=rows.kind is StateKind.TIMER)
    values = physical_column(table["value"]) if "value" in names else [None] * len(ops)
    return ops, list(found), _encoded_values(values, table["ts"] if "ts" in names else None)


def _with_subs(
    prefixes: Iterable[bytes], subs: Sequence[Any], ops: npt.NDArray[np.uint8], *, is_timer: bool
) -> Iterable[bytes]:
    if is_timer:
        return (
            _TIMESTAMP.pack(sub + _BIAS) + prefix
            for prefix, sub in zip(prefixes, subs, strict=True)
        )
    if not np.any(ops == RowOp.CLEAR):
        return map(add, prefixes, map(_encode, subs))
    return (
        prefix if op == RowOp.CLEAR else prefix + _encode(sub)
        for prefix, sub, op in zip(prefixes, subs, ops.tolist(), strict=True)
    )


def _encoded_values(values: Sequence[Any], stamps: pa.ChunkedArray | None) -> list[bytes]:
    if stamps is None or stamps.null_count == len(stamps):
        return list(map(_encode, zip(values)))
    return [
        _encode((value,) if stamp is None else (value, stamp))
        for value, stamp in zip(values, physical_column(stamps), strict=True)
    ]


def in_store_order(rows: StateRows) -> StateRows:
    """Return rows nearly in the order in which a working store has them, so that sorting is quick.

    Numbers and texts as they are encoded sort by their value, or by their length and value.
    """
    table = rows.table
    kind = table.schema.field("key").type
    if rows.kind is StateKind.TIMER or table.num_rows < 2:
        return rows
    key = table["key"]
    if pat.is_integer(kind):
        order = pc.sort_indices(key)
    elif pat.is_string(kind) or pat.is_binary(kind):
        lengths = pc.binary_length(key)
        by_length = pa.table({"length": lengths, "key": key})
        order = pc.sort_indices(by_length, [("length", "ascending"), ("key", "ascending")])
    else:
        return rows
    return StateRows(rows.name, rows.kind, table.take(order))


def has_absent(units: Iterable[Any]) -> bool:
    """Say whether one of them is ``ABSENT``; without asking the values whether they are equal."""
    return any(map(is_, units, repeat(ABSENT)))
