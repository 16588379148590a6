"""Rows: the form in which keyed state leaves memory, as Arrow columns.

Everything that keyed state holds is a set of rows. A row is found by its identity, which is the
key, the namespace (where the state has one) and the sub key (a map's own key, a list chunk's
number, a timer's timestamp). It carries a value and, with a TTL, the time of the last access.

====================  ==================  ====================  =========================
kind                  sub                 value                 ts (with a TTL only)
====================  ==================  ====================  =========================
value, reducing       (no column)         the value             int64
aggregating           (no column)         the accumulator       int64
map                   the map's own key   the value, nullable   int64
list                  int64 chunk number  list of the elements  list of int64, one each
timer                 int64 timestamp     (no column)           (no column)
====================  ==================  ====================  =========================

Besides, each row has its key group (``group``, uint16) and what it says (``op``, uint8): see
:class:`RowOp`. In a sequence of row sets the later one wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import pyarrow as pa

__all__ = ["NO_TIMESTAMP", "RESERVED_PREFIX", "RowOp", "StateKind", "StateRows", "row_schema"]

RESERVED_PREFIX = "_flow."
"""How the names of the library's own states begin; a user's state may not be named so."""

NO_TIMESTAMP = -(1 << 63)
"""Before all time: the watermark of a subtask that has seen none."""


class StateKind(StrEnum):
    """The kinds of keyed state, as they are written into records."""

    VALUE = "value"
    LIST = "list"
    MAP = "map"
    REDUCING = "reducing"
    AGGREGATING = "aggregating"
    TIMER = "timer"


class RowOp(IntEnum):
    """What a row says about its identity."""

    PUT = 0
    """It has this value."""
    DELETE = 1
    """It is gone; value and ts are null."""
    CLEAR = 2
    """All earlier rows of this key and namespace are gone; sub, value and ts are null.

    Rows of the same set hold still: a set's CLEAR comes before its other rows.
    """


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of one state; see the module's docstring for the columns."""

    name: str
    kind: StateKind
    table: pa.Table


def row_schema(
    *,
    key: pa.DataType,
    namespace: pa.DataType | None = None,
    sub: pa.DataType | None = None,
    value: pa.DataType | None = None,
    ts: pa.DataType | None = None,
) -> pa.Schema:
    """Return the schema of a state's rows; a column without a type is left out."""
    columns = {"namespace": namespace, "sub": sub, "value": value, "ts": ts}
    return pa.schema(
        [
            pa.field("group", pa.uint16(), nullable=False),
            pa.field("op", pa.uint8(), nullable=False),
            pa.field("key", key, nullable=False),
            *(pa.field(name, kind) for name, kind in columns.items() if kind is not None),
        ]
    )
