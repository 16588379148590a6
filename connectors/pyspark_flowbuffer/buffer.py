"""Rows that wait until there are enough of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from pyspark_flowbuffer.options import Triggers

__all__ = ["RowBuffer", "Stretch"]


@dataclass(slots=True)
class Stretch:
    """Neighbouring rows that came at one time; perhaps still in a file."""

    rows: int
    bytes: int
    """In memory, perhaps an estimate."""
    since_ms: int
    """When they came into a buffer."""
    load: Callable[[], pa.Table]
    origin: object = None
    """What stands for them in the checkpoint; None where they are in memory only."""
    place: int = 0
    """Orders the rows of several buffers as they came."""

    @classmethod
    def of(cls, table: pa.Table, since_ms: int) -> Stretch:
        """Return rows that are in memory."""
        return cls(table.num_rows, table.nbytes, since_ms, lambda: table)


class RowBuffer:
    """Rows in the order they came; full by their number, their bytes or their age."""

    def __init__(self, triggers: Triggers) -> None:
        self._triggers = triggers
        self._stretches: deque[Stretch] = deque()
        self._rows = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, stretch: Stretch) -> None:
        """Add rows at the end."""
        if stretch.rows:
            self._stretches.append(stretch)
            self._rows += stretch.rows
            self._bytes += stretch.bytes

    def take_full(self) -> Iterator[pa.Table]:
        """Take out every full buffer, oldest first."""
        while rows := self._full_rows():
            yield self._take(rows)

    def take_aged(self, now_ms: int) -> pa.Table | None:
        """Take out everything if the oldest row has waited long enough."""
        age_ms = self._triggers.max_age_ms
        if age_ms is None or not self._stretches:
            return None
        oldest_ms = min(stretch.since_ms for stretch in self._stretches)
        return self._take(self._rows) if oldest_ms + age_ms <= now_ms else None

    def take_all(self) -> pa.Table | None:
        """Take out everything there is."""
        return self._take(self._rows) if self._rows else None

    @property
    def stretches(self) -> list[Stretch]:
        """What waits, oldest first."""
        return list(self._stretches)

    def _full_rows(self) -> int:
        """Return how many rows the next full buffer has; 0 if there is none."""
        candidates = []
        threshold, limit = self._triggers.threshold, self._triggers.max_bytes
        if threshold is not None and self._rows >= threshold:
            candidates.append(threshold)
        if limit is not None and self._rows and self._bytes >= limit:
            # As many rows as make the limit full; rows are of about one size.
            candidates.append(min(self._rows, -(-self._rows * limit // self._bytes)))
        return min(candidates, default=0)

    def _take(self, rows: int) -> pa.Table:
        taken = []
        while rows:
            stretch = self._stretches.popleft()
            self._rows -= stretch.rows
            self._bytes -= stretch.bytes
            table = stretch.load()
            taken.append(table.slice(0, rows))
            if stretch.rows > rows:
                # A slice knows its own bytes only roughly, so the share is computed.
                rest = Stretch.of(table.slice(rows), stretch.since_ms)
                rest.bytes = stretch.bytes * rest.rows // stretch.rows
                rest.place = stretch.place
                self._stretches.appendleft(rest)
                self._rows += rest.rows
                self._bytes += rest.bytes
                break
            rows -= stretch.rows
        return pa.concat_tables(taken)
