"""Where time comes from, so that a test can decide what time it is."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """A source of wall-clock time. Nothing promises that it never goes backwards."""

    def now_ms(self) -> int:
        """Return the milliseconds since 1970-01-01T00:00:00Z."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now_ms(self) -> int:
        # Integer arithmetic, because a float loses milliseconds' neighbours to rounding.
        return time.time_ns() // 1_000_000
