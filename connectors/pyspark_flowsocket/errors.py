"""Errors of the source, on top of those that all connectors share.

::

    ConnectorError                   flowspark.errors
    └── SocketSourceError
        ├── ConnectionLostError      no connection, and no attempt is left
        ├── LineTooLongError         a line above maxLineBytes, with onLongLine=fail
        ├── UndecodableLineError     bytes that are no text, with onDecodeError=fail
        ├── ProtocolError            a peer that does not follow protocol=ack
        ├── TakenOverError           a newer query owns the spool
        ├── SpoolError               a spool that does not belong to this query or this version
        └── LinesGoneError           lines that Spark asks for are not in the spool

A wrong option is ``flowspark.errors.OptionError``; a store that fails for too long raises the
errors of ``flowstate.errors``.
"""

from __future__ import annotations

from typing import Any

from flowspark.errors import ConnectorError

__all__ = [
    "ConnectionLostError",
    "LineTooLongError",
    "LinesGoneError",
    "ProtocolError",
    "SocketSourceError",
    "SpoolError",
    "TakenOverError",
    "UndecodableLineError",
]


class SocketSourceError(ConnectorError):
    """Something went wrong that the source cannot repair by itself."""

    kind = "SOURCE"

    def __init__(self, message: str) -> None:
        super().__init__("flowsocket", message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,), self.__dict__


class ConnectionLostError(SocketSourceError):
    """There is no connection, or no port to listen on, and no attempt is left."""

    kind = "CONNECTION"


class LineTooLongError(SocketSourceError):
    """A line is longer than ``maxLineBytes`` and ``onLongLine`` is ``fail``."""

    kind = "LINE_TOO_LONG"


class UndecodableLineError(SocketSourceError):
    """A line is no text in ``charset`` and ``onDecodeError`` is ``fail``."""

    kind = "UNDECODABLE"


class ProtocolError(SocketSourceError):
    """The peer does not follow the protocol that ``protocol=ack`` asks for."""

    kind = "PROTOCOL"


class TakenOverError(SocketSourceError):
    """Another query has opened the same spool; the newer one goes on, this one must end."""

    kind = "TAKEN_OVER"


class SpoolError(SocketSourceError):
    """What is at the spool's place is of another source or of a newer version."""

    kind = "SPOOL"


class LinesGoneError(SocketSourceError):
    """Spark's checkpoint and the spool do not belong together: lines between them are missing."""

    kind = "LINES_GONE"
