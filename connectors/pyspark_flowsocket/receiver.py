"""The thread that receives: one loop over all connections, in which nothing waits for one peer."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress

from pyspark_flowsocket.connections import Connection, ConnectionState
from pyspark_flowsocket.endpoints import endpoint_of
from pyspark_flowsocket.errors import (
    LineTooLongError,
    ProtocolError,
    SocketSourceError,
    UndecodableLineError,
)
from pyspark_flowsocket.intake import Intake
from pyspark_flowsocket.options import Mode, SocketOptions

__all__ = ["Receiver"]

# What is wrong with one peer, and no reason to end more than its connection.
_REFUSED = (LineTooLongError, UndecodableLineError, ProtocolError)
_TURN_S = 0.5
_EXPIRY_S = 0.25
_QUIET_S = 0.02
_FLUSH_S = 5.0


class Receiver:
    """Reads from the sockets while the intake takes it, and answers senders."""

    def __init__(self, options: SocketOptions, intake: Intake) -> None:
        self._options = options
        self._intake = intake
        self._endpoint = endpoint_of(options, intake)
        self._connections: set[Connection] = set()
        self._waiting: set[Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._control = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._stop = threading.Event()
        self._is_draining = False
        self._was_paused = False
        self._next_expiry = 0.0
        self._is_reached = self._ended_once = False
        self._active_at = self._quiet_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="flowsocket-receiver", daemon=True)
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._watch(self._wake_in)
        intake.on_durable = self.wake

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Let the loop look around; any thread may call this."""
        # It may be full, and then the loop wakes up anyhow; or closed, when the loop has ended.
        with suppress(OSError):
            self._wake_out.send(b"\0")

    def stop(self, timeout_s: float = _FLUSH_S) -> None:
        """Receive nothing more, make durable and acknowledge what was received, and end."""
        self._is_draining = True
        self.wake()
        self._intake.flush(timeout_s)
        self._stop.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # For the reader.

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    @property
    def rejected(self) -> int:
        """How many connections were not taken."""
        return self._endpoint.rejected

    def wait_quiet(self, idle_s: float) -> None:
        """Wait until the peer's stream has ended, nothing comes, or the spool is full."""
        while self._intake.failure is None:
            # By the clock of the loop: a busy machine may let it run so late that what came in
            # time was not received yet.
            is_idle = self._is_reached and self._quiet_at - self._active_at >= idle_s
            is_over = self._options.mode is Mode.CONNECT and self._ended_once
            if is_idle or is_over or self._intake.is_full:
                return
            self.wake()
            time.sleep(_QUIET_S)

    # The loop.

    def _run(self) -> None:
        try:
            self._endpoint.open(self._stop)
            if self._endpoint.listening is not None:
                self._watch(self._endpoint.listening)
                self._mark_active()
            while not self._stop.is_set() and self._intake.failure is None:
                self._turn()
            self._answer_all()
        except BaseException as error:
            self._intake.flush(_FLUSH_S)
            self._intake.fail(error)
        finally:
            self._close()

    def _turn(self) -> None:
        if not self._is_draining and (connection := self._endpoint.connect()) is not None:
            self._admit(connection)
        is_paused = self._is_draining or self._intake.is_paused
        if self._was_paused and not is_paused:
            self._forgive()
        self._was_paused = is_paused
        if is_paused and not self._intake.is_full:
            self._active_at = time.monotonic()  # It is the store that is slow, not the peers.
        selector = self._control if is_paused else self._selector
        timeout_s = _TURN_S if self._is_draining else min(_TURN_S, self._endpoint.due_in_s())
        readable = []
        asked_at = time.monotonic()
        events = selector.select(timeout_s)
        for key, _ in events:
            if isinstance(key.data, Connection):
                readable.append(key.data)
            elif key.fileobj is self._wake_in:
                self._drain_wakes()
                self._answer_all()
            elif not self._is_draining:
                for connection in self._endpoint.accept(len(self._connections)):
                    self._admit(connection)
        if not is_paused and not readable:
            # Also if somebody calls who cannot be let in: there may be no end to that.
            self._quiet_at = asked_at
        # Thousands may be readable at once, and all of them together are more than memory is for.
        # Who has waited longest comes first, so that nobody waits for ever.
        for connection in sorted(readable, key=lambda one: one.served_at):
            if self._intake.is_paused:
                break
            self._serve(connection)
        self._expire()

    def _serve(self, connection: Connection) -> None:
        if connection not in self._connections:
            return  # Closed in this very turn.
        connection.served_at = time.monotonic()
        try:
            connection.send()
            is_open = connection.receive()
            self._active_at = time.monotonic()
            if connection.state is ConnectionState.RESUME:
                self._greet(connection)
        except _REFUSED as error:
            self._refuse(connection, error)
        except OSError as error:
            self._end(connection, is_orderly=False, why=f"{type(error).__name__}: {error}")
        else:
            if not is_open:
                self._end(connection, is_orderly=True, why="the peer has ended the connection")

    def _greet(self, connection: Connection) -> None:
        """Let a sender in; an earlier connection of it is dead, whether it knows that or not."""
        sender = connection.inflow.sender
        for other in list(self._connections):
            if other is not connection and other.inflow.sender == sender:
                self._intake.discard(other.inflow)
                self._end(other, is_orderly=False, why="its sender has opened another connection")
        present = {other.inflow.sender for other in self._connections if other.inflow.sender}
        known = self._intake.senders | present
        if sender not in self._intake.senders and len(known) > self._options.max_senders:
            raise ProtocolError(
                f"sender {sender!r} would be one more than option 'maxSenders' allows, which is "
                f"{self._options.max_senders}. Let senders keep their ids, or raise it"
            )
        self._answer(connection)

    def _answer(self, connection: Connection) -> None:
        """Say what there is to say. While a sender waits for that, it is not listened to."""
        connection.answer()
        is_waiting = connection.state is ConnectionState.RESUME
        if is_waiting and connection not in self._waiting:
            self._waiting.add(connection)
            self._selector.unregister(connection.sock)
        elif not is_waiting and connection in self._waiting:
            self._waiting.discard(connection)
            self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def _refuse(self, connection: Connection, error: SocketSourceError) -> None:
        named = type(error)(f"from {connection.peer}: {error.message}")
        connection.refuse(error.kind, error.message)
        if self._options.mode is Mode.CONNECT:
            raise named
        self._end(connection, is_orderly=False, why=str(named))

    def _answer_all(self) -> None:
        for connection in list(self._connections):
            fault = connection.inflow.fault
            try:
                if fault is not None:
                    connection.refuse(fault.kind, fault.message)
                    self._end(connection, is_orderly=False, why=str(fault))
                else:
                    self._answer(connection)
            except _REFUSED as error:
                self._refuse(connection, error)  # For what it has sent before it was answered.
            except OSError as error:
                self._end(connection, is_orderly=False, why=f"{type(error).__name__}: {error}")

    def _admit(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)
        self._mark_active()

    def _mark_active(self) -> None:
        """Note that a peer was reached, or can reach this side; silence counts from now on."""
        self._active_at = time.monotonic()
        self._is_reached = True

    def _end(self, connection: Connection, *, is_orderly: bool, why: str) -> None:
        self._connections.discard(connection)
        if connection in self._waiting:
            self._waiting.discard(connection)
        else:
            self._selector.unregister(connection.sock)
        self._intake.finish(connection.inflow, is_orderly=is_orderly)
        connection.close()
        self._ended_once = self._ended_once or connection.received_bytes > 0
        if not self._is_draining:
            self._endpoint.lost(connection, is_orderly=is_orderly, why=why)

    def _expire(self) -> None:
        """End connections that have been silent, or not yet open, for too long."""
        now = time.monotonic()
        if now < self._next_expiry:
            return
        self._next_expiry = now + _EXPIRY_S
        # A sender that read nothing for long may read now, and wait for the last count.
        self._answer_all()
        if self._was_paused:
            return
        idle_ms = self._options.idle_timeout_ms or self._options.read_timeout_ms
        opening_s = self._options.connect_timeout_ms / 1000
        for connection in list(self._connections):
            is_opening = connection.state is not ConnectionState.OPEN
            if is_opening and now - connection.opened_at > opening_s:
                self._end(connection, is_orderly=False, why=f"no greeting for {opening_s:g} s")
            elif idle_ms is not None and now - connection.active_at > idle_ms / 1000:
                self._end(connection, is_orderly=False, why=f"nothing received for {idle_ms} ms")

    def _forgive(self) -> None:
        # While this side did not read, silence was no fault of the peers.
        now = self._active_at = time.monotonic()
        for connection in self._connections:
            connection.active_at = now
            if connection.state is not ConnectionState.OPEN:
                connection.opened_at = now

    def _watch(self, sock: socket.socket) -> None:
        for selector in (self._selector, self._control):
            selector.register(sock, selectors.EVENT_READ)

    def _drain_wakes(self) -> None:
        with suppress(OSError):
            while self._wake_in.recv(4096):
                pass

    def _close(self) -> None:
        for connection in self._connections:
            self._intake.finish(connection.inflow, is_orderly=False)
            connection.close()
        self._endpoint.close()
        self._selector.close()
        self._control.close()
        for end in (self._wake_in, self._wake_out):
            end.close()
