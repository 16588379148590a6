"""Values on loan: for the keys of a batch, in a list, so that a function finds them by a number.

A batch's keys are numbered at once, in Arrow. While the loan lasts, the runtime says the number of
the current key along with the key, and states take the value at that place of a list: that is a
third of what a look-up in a large dict costs. What has changed goes back all at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flowstate.checkpoint.identity import codes_of
from flowstate.keyed.codec import ABSENT
from flowstate.keyed.single_table import SingleTable
from flowstate.keys import canonical_column, physical_column

__all__ = ["Loan", "NumberedKeys"]


@dataclass(frozen=True, slots=True)
class NumberedKeys:
    """Rows by key: the distinct keys, and of each row the number of its key."""

    distinct: pa.Array
    numbers: npt.NDArray[np.int64]

    @classmethod
    def of(cls, keys: pa.Array) -> NumberedKeys:
        """Number the keys of rows."""
        keys = canonical_column(keys)
        codes = codes_of(keys)
        first = np.empty(codes.limit, np.int64)
        # Of several rows of a key the one that is set last stays: the first one.
        first[codes.numbers[::-1]] = np.arange(len(keys))[::-1]
        return cls(keys.take(pa.array(first)), codes.numbers)


class Loan:
    """What one state holds for the keys of a batch: a value, or None where there is none, by place.

    One object, and one list, for as long as the state lives; empty while nothing is on loan.
    """

    def __init__(self, table: SingleTable) -> None:
        self._table = table
        self._keys: pa.Array | None = None
        self.values: list[Any] = []
        self.changed = bytearray()
        """One at each place where ``values`` is to go back to the state."""

    def take(self, keys: pa.Array) -> None:
        """Bring what the state holds of these keys here, each of which is given once."""
        table = self._table
        stored = table.get_columns(keys)
        if stored is not None:
            self.values[:] = physical_column(stored)
        else:
            units = table.get_many(table.codec.key.to_list(keys))
            self.values[:] = [None if unit is ABSENT else unit for unit in units]
        self.changed[:] = bytes(len(keys))
        self._keys = keys

    def settle(self) -> None:
        """Give back what has changed, and end the loan."""
        keys, values, self._keys = self._keys, self.values[:], None
        changed = np.flatnonzero(np.frombuffer(bytes(self.changed), np.uint8))
        self.values.clear()
        self.changed.clear()
        if keys is None or not len(changed):
            return
        if len(changed) < len(values):
            keys = keys.take(pa.array(changed))
            values = list(map(values.__getitem__, changed.tolist()))
        table = self._table
        if table.columns is not None:
            column = pa.array(values, table.codec.value)
            if table.put_columns(keys, column):
                return
        slots = table.codec.key.to_list(keys)
        table.put_many(slots, values)
        for slot, value in zip(slots, values, strict=True):
            if value is None:
                table.remove(slot)
