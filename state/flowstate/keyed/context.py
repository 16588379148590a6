"""What keyed state knows of the moment: the key, the element's timestamp, the times."""

from __future__ import annotations

from typing import Any

from flowstate.clock import Clock
from flowstate.errors import NoCurrentKeyError
from flowstate.rows import NO_TIMESTAMP

__all__ = ["NO_KEY", "KeyContext"]


class _NoKey:
    __slots__ = ()

    def __repr__(self) -> str:
        return "NO_KEY"


NO_KEY = _NoKey()


class KeyContext:
    """Shared by all states of one backend, and set by the runtime, never by a function."""

    __slots__ = ("clock", "key", "place", "timestamp", "watermark")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.key: Any = NO_KEY
        self.place = -1
        """The key's place in the lists of values that are on loan, while some are."""
        self.timestamp: int | None = None
        self.watermark = NO_TIMESTAMP

    def checked_key(self) -> Any:
        """Return the current key, or raise where there is none."""
        if self.key is NO_KEY:
            raise NoCurrentKeyError(
                "No key set. Keyed state can be used only in process_element and on_timer, while "
                "the runtime has set the key of the element or timer"
            )
        return self.key
