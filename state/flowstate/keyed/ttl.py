"""The life of units of state: when one is stamped, renewed and expired."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flowstate.descriptors import StateTtlConfig, StateVisibility, TtlTime, UpdateType
from flowstate.keyed.context import KeyContext
from flowstate.rows import NO_TIMESTAMP

__all__ = ["IncrementalCleanup", "Ttl"]

_LONG_MAX = (1 << 63) - 1


class Ttl:
    """The TTL of one state, with the clock that it is measured by."""

    def __init__(self, config: StateTtlConfig, context: KeyContext) -> None:
        self._ttl_ms = config.ttl_ms
        self._context = context
        self._event_time = config.time is TtlTime.EVENT_TIME
        self.renew_on_read = config.update_type is UpdateType.ON_READ_AND_WRITE
        self.return_expired = config.visibility is not StateVisibility.NEVER_RETURN_EXPIRED
        self.cleanup = config.cleanup_incrementally

    def stamp(self) -> int:
        """Return the time that a unit written now is stamped with."""
        if not self._event_time:
            return self._context.clock.now_ms()
        timestamp = self._context.timestamp
        return self._context.watermark if timestamp is None else timestamp

    def now(self) -> int:
        """Return the time against which stamps are held."""
        return self._context.watermark if self._event_time else self._context.clock.now_ms()

    def is_expired(self, stamp: int, now: int) -> bool:
        """Say whether a unit with this stamp is over.

        What was stamped before any event time was known does not expire until it is written again.
        """
        if self._event_time and stamp == NO_TIMESTAMP:
            return False
        return min(stamp + self._ttl_ms, _LONG_MAX) <= now


class IncrementalCleanup:
    """Looks at a few entries for each access to a state, and goes around all of them in turn."""

    def __init__(
        self,
        entries: int,
        slots: Callable[[], list[Any]],
        clean: Callable[[Any], None],
    ) -> None:
        self._entries, self._slots, self._clean = entries, slots, clean
        self._round: Iterator[Any] = iter(())

    def accessed(self) -> None:
        """Look at the next entries; a round that has ended begins anew at the next access."""
        for _ in range(self._entries):
            slot = next(self._round, self)
            if slot is self:
                self._round = iter(self._slots())
                return
            self._clean(slot)
