"""A clock that moves only when a test moves it."""

from __future__ import annotations

import threading

__all__ = ["ManualClock"]


class ManualClock:
    """A ``Clock`` set by hand. It may also be set back, as a machine's clock sometimes is."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        return self._now_ms

    def set(self, ms: int) -> None:
        """Make it ``ms`` milliseconds after the epoch."""
        with self._lock:
            self._now_ms = ms

    def advance(self, ms: int) -> int:
        """Let ``ms`` milliseconds pass, and return the new time."""
        if ms < 0:
            raise ValueError(f"time passes forwards, not by {ms} ms: use set() to turn it back")
        with self._lock:
            self._now_ms += ms
            return self._now_ms
