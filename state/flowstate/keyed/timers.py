"""Timers: what fires later for a key, in event time or in processing time.

A timer is (domain, key, namespace, timestamp); registering it twice is registering it once. Timers
are kept as rows of two states of the library's own, so they are checkpointed with the keyed state
and follow their keys when the parallelism changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from flowstate.errors import StateTypeError
from flowstate.functions import TimeDomain
from flowstate.keyed.codec import BaseStore, Change, ChangeColumns, RowCodec, timer_bound
from flowstate.keyed.context import KeyContext
from flowstate.keys import KeyType
from flowstate.rows import NO_TIMESTAMP, RESERVED_PREFIX, RowOp, StateKind

__all__ = ["TIMER_NAMES", "KeyedTimerService", "Timer", "TimerQueue"]

TIMER_NAMES = {domain: f"{RESERVED_PREFIX}timers.{domain.value}" for domain in TimeDomain}

_LONG_MAX = (1 << 63) - 1


class Timer(NamedTuple):
    """A timer that fires."""

    domain: TimeDomain
    key: Any
    namespace: Any
    timestamp: int


class TimerQueue:
    """The timers of one domain, over those of a checkpoint in a base store."""

    def __init__(self, name: str, key: KeyType, base: BaseStore | None) -> None:
        timestamp = KeyType(pa.int64())
        self.codec = RowCodec(name, StateKind.TIMER, key, namespace=_NAMESPACE, sub=timestamp)
        self._base = base
        self._heap: list[tuple[int, int, Any, Any]] = []
        self._order = 0
        self._live: dict[tuple[int, Any, Any], None] = {}
        self._gone: set[tuple[int, Any, Any]] = set()
        self._fetched_to: int | None = None
        self.dirty: dict[tuple[int, Any, Any], None] = {}

    def add(self, timestamp: int, key: Any, namespace: Any) -> None:
        """Register a timer, unless it is registered already."""
        identity = (timestamp, key, namespace)
        if self._has(identity):
            return
        self._gone.discard(identity)
        self._push(identity)
        self.dirty[identity] = None

    def remove(self, timestamp: int, key: Any, namespace: Any) -> None:
        """Delete a timer; a missing one is no error."""
        identity = (timestamp, key, namespace)
        if not self._has(identity):
            return
        self._live.pop(identity, None)
        if self._base is not None:
            self._gone.add(identity)
        self.dirty[identity] = None

    def pop_due(self, now: int) -> tuple[int, Any, Any] | None:
        """Remove and return the earliest timer that is due, or None."""
        self._fetch(now)
        while self._heap and self._heap[0][0] <= now:
            timestamp, _, key, namespace = heapq.heappop(self._heap)
            # A timer that was deleted stays in the heap until it comes up.
            if (timestamp, key, namespace) in self._live:
                self.remove(timestamp, key, namespace)
                return timestamp, key, namespace
        return None

    def next_timestamp(self) -> int | None:
        """Return when the earliest timer is due, or None where there is none."""
        while self._heap and self._head() not in self._live:
            heapq.heappop(self._heap)
        earliest = self._heap[0][0] if self._heap else None
        for identity in self._in_base():
            if identity not in self._gone:
                return identity[0] if earliest is None else min(earliest, identity[0])
        return earliest

    def _head(self) -> tuple[int, Any, Any]:
        timestamp, _, key, namespace = self._heap[0]
        return timestamp, key, namespace

    def __len__(self) -> int:
        others = (one for one in self._in_base() if one not in self._live)
        return len(self._live) + sum(1 for one in others if one not in self._gone)

    def _has(self, identity: tuple[int, Any, Any]) -> bool:
        if identity in self._live:
            return True
        if self._base is None or identity in self._gone:
            return False
        timestamp, key, namespace = identity
        row = self.codec.row(key, namespace, timestamp)
        return self._base.get(self.codec.name, row) is not None

    def _push(self, identity: tuple[int, Any, Any]) -> None:
        timestamp, key, namespace = identity
        self._live[identity] = None
        # Timers of one time fire in the order they came; keys need not be comparable.
        self._order += 1
        heapq.heappush(self._heap, (timestamp, self._order, key, namespace))

    def _in_base(self) -> Iterator[tuple[int, Any, Any]]:
        """Yield what the base store has and was not brought into memory yet, in order of time."""
        if self._base is None or self._fetched_to == _LONG_MAX:
            return
        fetched = self._fetched_to
        start = b"" if fetched is None else timer_bound(fetched + 1)
        for row, _ in self._base.scan(self.codec.name, start=start):
            key, namespace, timestamp = self.codec.identity(bytes(row))
            yield timestamp, key, namespace

    def _fetch(self, now: int) -> None:
        """Bring the timers of the base store that are due into memory."""
        if self._base is None or (self._fetched_to is not None and now <= self._fetched_to):
            return
        for identity in self._in_base():
            if identity[0] > now:
                break
            if identity not in self._live and identity not in self._gone:
                self._push(identity)
        self._fetched_to = now

    def load(self, table: pa.Table) -> None:
        """Take restored timers into memory."""
        keys = self.codec.key.to_list(table["key"])
        namespaces = _NAMESPACE.to_list(table["namespace"])
        for timestamp, key, namespace in zip(
            table["sub"].to_pylist(), keys, namespaces, strict=True
        ):
            self._push((timestamp, key, namespace))

    def changes(self) -> list[Change]:
        """Return what has changed since the last snapshot."""
        return [
            Change(
                RowOp.PUT if identity in self._live else RowOp.DELETE,
                identity[1],
                identity[2],
                identity[0],
                None,
                None,
            )
            for identity in self.dirty
        ]

    def change_columns(self) -> ChangeColumns:
        """Return the same by columns."""
        return ChangeColumns.of(self.changes())

    def settle(self) -> None:
        """Take note that the changes are in a snapshot."""
        self.dirty = {}

    def changed(self) -> Any:
        """Return what ``unsettle`` is to be given if these changes turn out to be void."""
        return list(self.dirty)

    def unsettle(self, identities: Any) -> None:
        """Take note that the snapshot that held these changes is void."""
        self.dirty.update(dict.fromkeys(identities))

    def evict(self) -> None:
        """Forget what is in the base store, now that it holds all settled changes."""
        if self._base is None:
            return
        unsaved = [identity for identity in self.dirty if identity in self._live]
        self._gone = {identity for identity in self.dirty if identity not in self._live}
        self._live, self._heap, self._fetched_to = {}, [], None
        for identity in unsaved:
            self._push(identity)


# The namespace of timers is bytes, so that windows of any type fit; most timers have none.
_NAMESPACE = KeyType(pa.binary())


class KeyedTimerService:
    """Registers timers for the current key, and fires them when time moves on.

    Time moves in one place: the runtime calls ``advance_watermark`` and
    ``advance_processing_time`` and runs what they yield, with the timer's key set.
    """

    def __init__(self, context: KeyContext, queues: dict[TimeDomain, TimerQueue]) -> None:
        self._context = context
        self._queues = queues
        self._processing_time: int | None = None

    def current_watermark(self) -> int:
        """Return the event time up to which all is thought to have come."""
        return self._context.watermark

    def current_processing_time(self) -> int:
        """Return the time of the last tick, or that of the clock before the first one."""
        if self._processing_time is None:
            return self._context.clock.now_ms()
        return self._processing_time

    def register_event_time_timer(self, timestamp: int, namespace: bytes | None = None) -> None:
        """Fire when the watermark reaches the timestamp."""
        self._add(TimeDomain.EVENT_TIME, timestamp, namespace)

    def register_processing_time_timer(
        self, timestamp: int, namespace: bytes | None = None
    ) -> None:
        """Fire when the processing time reaches the timestamp."""
        self._add(TimeDomain.PROCESSING_TIME, timestamp, namespace)

    def delete_event_time_timer(self, timestamp: int, namespace: bytes | None = None) -> None:
        """Delete a timer of the current key; a missing one is no error."""
        self._remove(TimeDomain.EVENT_TIME, timestamp, namespace)

    def delete_processing_time_timer(self, timestamp: int, namespace: bytes | None = None) -> None:
        """Delete a timer of the current key; a missing one is no error."""
        self._remove(TimeDomain.PROCESSING_TIME, timestamp, namespace)

    def advance_watermark(self, watermark: int) -> Iterator[Timer]:
        """Move event time and yield what is due, each with its key set.

        A timer that is registered meanwhile and already due fires in the same call; one that is
        deleted meanwhile does not. Nothing is fired that the caller does not take.
        """
        self._context.watermark = _checked_timestamp(watermark)
        return self._fire(TimeDomain.EVENT_TIME, watermark)

    def advance_processing_time(self, now_ms: int) -> Iterator[Timer]:
        """Move processing time and yield what is due; as ``advance_watermark``."""
        self._processing_time = _checked_timestamp(now_ms)
        return self._fire(TimeDomain.PROCESSING_TIME, now_ms)

    def restore_watermark(self, watermark: int) -> None:
        """Go on from a watermark, firing nothing."""
        self._context.watermark = _checked_timestamp(watermark)

    def count(self, domain: TimeDomain) -> int:
        """Return how many timers are registered."""
        return len(self._queues[domain])

    def next_timestamp(self, domain: TimeDomain) -> int | None:
        """Return when the earliest timer of a domain is due, or None where there is none."""
        return self._queues[domain].next_timestamp()

    def _add(self, domain: TimeDomain, timestamp: int, namespace: bytes | None) -> None:
        key = self._context.checked_key()
        self._queues[domain].add(_checked_timestamp(timestamp), key, _checked_namespace(namespace))

    def _remove(self, domain: TimeDomain, timestamp: int, namespace: bytes | None) -> None:
        key = self._context.checked_key()
        timer = _checked_timestamp(timestamp), key, _checked_namespace(namespace)
        self._queues[domain].remove(*timer)

    def _fire(self, domain: TimeDomain, now: int) -> Iterator[Timer]:
        queue, context = self._queues[domain], self._context
        while (due := queue.pop_due(now)) is not None:
            timestamp, key, namespace = due
            context.key = key
            context.timestamp = timestamp if domain is TimeDomain.EVENT_TIME else None
            yield Timer(domain, key, namespace, timestamp)


def _checked_namespace(namespace: bytes | None) -> bytes | None:
    checked: bytes | None = None if namespace is None else _NAMESPACE.canonical(namespace)
    return checked


def _checked_timestamp(timestamp: int) -> int:
    if isinstance(timestamp, bool) or not isinstance(timestamp, int):
        raise StateTypeError(f"a timestamp is an int of milliseconds, not {timestamp!r}")
    if not NO_TIMESTAMP <= timestamp <= _LONG_MAX:
        raise StateTypeError(f"the timestamp {timestamp} is out of the range of int64")
    return timestamp
