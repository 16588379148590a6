"""Patience with a store that fails for a while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from flowstate.errors import StoreFullError, StoreUnavailableError

__all__ = ["Patience"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_DELAY_FIRST_S, _DELAY_MAX_S = 0.05, 2.0


class Patience:
    """Repeats an operation of a store until it works or its time is over.

    The operation must be one that may be repeated. ``stop`` ends the waiting early.
    """

    def __init__(self, timeout_ms: int, stop: threading.Event | None = None) -> None:
        self._timeout_s = timeout_ms / 1000
        self._stop = stop or threading.Event()

    def call(self, operation: Callable[[], _Result]) -> _Result:
        """Return what the operation returns; raise its last error when the time is over."""
        deadline = time.monotonic() + self._timeout_s
        delay_s = _DELAY_FIRST_S
        while True:
            try:
                return operation()
            except (StoreUnavailableError, StoreFullError) as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._stop.is_set():
                    error.add_note(
                        f"tried for {self._timeout_s:g} s, which is option 'storageTimeout'"
                    )
                    raise
                _log.warning("%s; trying again for %.0f s", error, left_s)
                self._stop.wait(min(delay_s, left_s))
                delay_s = min(2 * delay_s, _DELAY_MAX_S)
