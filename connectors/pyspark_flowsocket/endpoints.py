"""Where connections come from: this side calls a peer, or peers call this side."""

from __future__ import annotations

import errno
import logging
import math
import resource
import socket
import ssl
import threading
import time
from typing import Protocol

from flowspark.errors import OptionError
from pyspark_flowsocket.calling import connected
from pyspark_flowsocket.connections import Connection, keep_alive
from pyspark_flowsocket.errors import ConnectionLostError
from pyspark_flowsocket.intake import Intake
from pyspark_flowsocket.options import Mode, SocketOptions
from pyspark_flowsocket.tls import client_context, server_context

__all__ = ["Connector", "Endpoint", "Listener", "endpoint_of"]

_log = logging.getLogger(__name__)

_BACKLOG = 128
_ACCEPTED_PER_TURN = 64
_BIND_DELAY_S = 0.1
_LOG_EVERY_S = 10.0
_FILES_BESIDE = 128


class Endpoint(Protocol):
    """What the receiving thread asks for connections."""

    listening: socket.socket | None
    """Readable when somebody calls."""
    is_ended: bool
    """No connection will come any more."""
    rejected: int
    """How many connections were not taken because there were too many."""

    def open(self, stop: threading.Event) -> None: ...

    def due_in_s(self) -> float:
        """Return after how long ``connect`` is to be called."""
        ...

    def connect(self) -> Connection | None:
        """Return a new connection that this side has opened."""
        ...

    def accept(self, open_connections: int) -> list[Connection]:
        """Return the connections that peers have opened."""
        ...

    def lost(self, connection: Connection, *, is_orderly: bool, why: str) -> None:
        """Be told that a connection has ended."""
        ...

    def close(self) -> None: ...


def endpoint_of(options: SocketOptions, intake: Intake) -> Endpoint:
    """Return the endpoint that the options ask for."""
    return (Listener if options.mode is Mode.LISTEN else Connector)(options, intake)


class Connector:
    """Calls one peer, and again when the connection is lost, each time a bit later."""

    def __init__(self, options: SocketOptions, intake: Intake) -> None:
        self._options = options
        self._intake = intake
        self._context = client_context(options.tls) if options.tls is not None else None
        self._failures = 0
        self._next_at = 0.0
        self._is_connected = False
        self.listening: socket.socket | None = None
        self.is_ended = False
        self.rejected = 0

    def open(self, stop: threading.Event) -> None:
        pass

    def due_in_s(self) -> float:
        if self._is_connected or self.is_ended:
            return _LOG_EVERY_S
        return max(0.0, self._next_at - time.monotonic())

    def connect(self) -> Connection | None:
        if self._is_connected or self.is_ended or self.due_in_s() > 0:
            return None
        try:
            sock = self._connected()
        except (OSError, ValueError) as error:
            self._failed(f"{type(error).__name__}: {error}")
            return None
        self._is_connected = True
        return Connection(sock, self._options.address, self._options, self._intake)

    def accept(self, open_connections: int) -> list[Connection]:
        return []

    def lost(self, connection: Connection, *, is_orderly: bool, why: str) -> None:
        self._is_connected = False
        if is_orderly and not self._options.reconnecting.enabled:
            self.is_ended = True
            _log.warning("%s has ended the stream; reconnect is false", connection.peer)
            return
        # A peer that takes calls and says nothing is no better than one that does not answer.
        self._failures = 0 if connection.received_bytes else self._failures
        is_last = not self._options.reconnecting.enabled
        self._failed(why, is_counted=is_last or not connection.received_bytes)

    def close(self) -> None:
        pass

    def _connected(self) -> socket.socket:
        timeout_s = self._options.connect_timeout_ms / 1000
        sock = connected((self._options.host, self._options.port), timeout_s)
        try:
            keep_alive(sock)
            if self._context is not None and self._options.tls is not None:
                name = self._options.tls.server_name or self._options.host
                sock = self._context.wrap_socket(
                    sock, server_hostname=name, suppress_ragged_eofs=False
                )
        except BaseException:
            sock.close()
            raise
        return sock

    def _failed(self, why: str, *, is_counted: bool = True) -> None:
        reconnecting = self._options.reconnecting
        self._failures += is_counted
        allowed = reconnecting.attempts if reconnecting.enabled else 0
        if self._failures > allowed:
            raise ConnectionLostError(
                f"no connection to {self._options.address} (options 'host' and 'port') after "
                f"{self._failures} attempts; the last one: {why}. Check that the peer listens "
                f"there; {self._way_to_wait(allowed)}"
            )
        delay_s = reconnecting.delay_s(self._failures)
        self._next_at = time.monotonic() + delay_s
        _log.warning("%s: %s; trying again in %.1f s", self._options.address, why, delay_s)

    def _way_to_wait(self, allowed: int) -> str:
        if not self._options.reconnecting.enabled:
            return "it is called only once, because option 'reconnect' is false"
        return (
            f"'reconnectAttempts' (now {allowed}) and 'reconnectDelay' say how long to wait for it"
        )


class Listener:
    """Waits for peers on a port."""

    def __init__(self, options: SocketOptions, intake: Intake) -> None:
        self._options = options
        self._intake = intake
        self._context = server_context(options.tls) if options.tls is not None else None
        self._last_logged = -math.inf
        self.listening: socket.socket | None = None
        self.is_ended = False
        self.rejected = 0

    def open(self, stop: threading.Event) -> None:
        """Bind the port; an owner of the spool from before may need a moment to let it go."""
        _provide_for(self._options.max_connections)
        deadline = time.monotonic() + self._options.connect_timeout_ms / 1000
        while not stop.is_set():
            try:
                self.listening = self._bound()
                return
            except (OSError, ValueError) as error:
                # A name that can be no host's is a ValueError.
                number, text = getattr(error, "errno", None), getattr(error, "strerror", None)
                if number != errno.EADDRINUSE or time.monotonic() >= deadline:
                    raise ConnectionLostError(
                        f"cannot listen on {self._options.address}: {text or error}. "
                        f"Choose another 'port' or an address of this machine as 'host', or stop "
                        f"what listens there; 'connectTimeout' says how long to wait for that"
                    ) from None
                stop.wait(_BIND_DELAY_S)

    def due_in_s(self) -> float:
        return _LOG_EVERY_S

    def connect(self) -> Connection | None:
        return None

    def accept(self, open_connections: int) -> list[Connection]:
        accepted: list[Connection] = []
        assert self.listening is not None
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                sock, address = self.listening.accept()
            except BlockingIOError:
                break
            except OSError as error:
                self._log("a connection could not be taken: %s", error)
                break
            if open_connections + len(accepted) >= self._options.max_connections:
                self.rejected += 1
                sock.close()
                self._log("connections above maxConnections were closed: %d so far", self.rejected)
                continue
            connection = self._connection(sock, address)
            if connection is not None:
                accepted.append(connection)
        return accepted

    def lost(self, connection: Connection, *, is_orderly: bool, why: str) -> None:
        if not is_orderly:
            self._log("%s: %s", connection.peer, why)

    def close(self) -> None:
        if self.listening is not None:
            self.listening.close()

    def _bound(self) -> socket.socket:
        found = socket.getaddrinfo(
            self._options.host, self._options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, proto, _, address = found[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock

    def _connection(self, sock: socket.socket, address: tuple[object, ...]) -> Connection | None:
        host, port = str(address[0]), address[1]
        peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            sock.setblocking(False)
            keep_alive(sock)
            if self._context is not None:
                sock = self._context.wrap_socket(
                    sock,
                    server_side=True,
                    do_handshake_on_connect=False,
                    suppress_ragged_eofs=False,
                )
        except (OSError, ssl.SSLError) as error:
            sock.close()
            self._log("%s: %s", peer, error)
            return None
        has_tls = self._context is not None
        return Connection(sock, peer, self._options, self._intake, is_shaking_hands=has_tls)

    def _log(self, message: str, *arguments: object) -> None:
        # A hostile peer must not fill the log either.
        now = time.monotonic()
        if now - self._last_logged >= _LOG_EVERY_S:
            self._last_logged = now
            _log.warning(message, *arguments)


def _provide_for(connections: int) -> None:
    """Let this process open as many files as connections may come, and the spool's besides.

    Else clients that come in numbers would leave none for the next segment, and end the query.
    """
    needed = connections + _FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or hard >= needed:
        if soft != resource.RLIM_INFINITY and soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return
    raise OptionError(
        "flowsocket",
        f"option 'maxConnections' is {connections}, and this process may have no more than {hard} "
        f"files open, of which {_FILES_BESIDE} are for other things. Lower it to at most "
        f"{max(1, hard - _FILES_BESIDE)}, or raise the limit (ulimit -Hn)",
    )
