"""One connection: its socket, what is spoken on it, and where its lines go."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from enum import StrEnum

from pyspark_flowsocket import acks
from pyspark_flowsocket.buffers import LineBuffer
from pyspark_flowsocket.intake import Inflow, Intake
from pyspark_flowsocket.options import Protocol, SocketOptions

__all__ = ["Connection", "ConnectionState", "keep_alive"]

RECEIVE_BYTES = 256 << 10
"""As much as one connection gets before the others have their turn."""
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ConnectionState(StrEnum):
    """How far a connection has come."""

    HANDSHAKE = "handshake"
    HELLO = "hello"
    """Waiting for the sender to say who it is."""
    RESUME = "resume"
    """Waiting for the spool to know how many lines of the sender are durable."""
    OPEN = "open"


class Connection:
    """A connection as the receiving thread sees it; nothing of it ever blocks."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        options: SocketOptions,
        intake: Intake,
        *,
        is_shaking_hands: bool = False,
    ) -> None:
        self.sock = sock
        self.peer = peer
        self.inflow = Inflow(peer, LineBuffer(options.rules))
        self.received_bytes = 0
        self.opened_at = self.active_at = self.served_at = time.monotonic()
        self.outgoing = bytearray()
        self._intake = intake
        self._greeting = bytearray()
        self._acked = 0
        # No more at once than makes a segment, so that small segments stay small.
        self._receive_bytes = min(RECEIVE_BYTES, options.segment_bytes)
        self._speaks_ack = options.protocol is Protocol.ACK
        self.state = ConnectionState.HANDSHAKE if is_shaking_hands else self._first_state()
        sock.setblocking(False)

    def receive(self) -> bool:
        """Receive what is there, and say whether the peer may send more."""
        if self.state is ConnectionState.HANDSHAKE and not self._shake_hands():
            return True
        if self.state is ConnectionState.RESUME:
            return True  # A sender waits for the answer; one that does not is read later.
        total = 0
        while True:
            try:
                data = self.sock.recv(self._receive_bytes)
            except _WOULD_BLOCK:
                return True
            if not data:
                return False
            self.active_at = time.monotonic()
            self.received_bytes += len(data)
            total += len(data)
            self._feed(data)
            # What TLS has decrypted already makes no socket readable, so it is read to its end.
            if not isinstance(self.sock, ssl.SSLSocket):
                return True
            if total >= self._receive_bytes and not self.sock.pending():
                return True

    def answer(self) -> None:
        """Say what there is to say: where to resume, and what is durable."""
        if self.state is ConnectionState.RESUME and self.inflow.sender is not None:
            count = self._intake.durable_count(self.inflow.sender)
            if count is not None:
                self.inflow.durable = self._acked = count
                self.state = ConnectionState.OPEN
                self._intake.add(self.inflow)
                self.outgoing += acks.resume(count)
                self._feed_rest()
        # Only the last count matters, so a sender that reads slowly gets fewer of them.
        if self.inflow.durable > self._acked and not self.outgoing:
            self._acked = self.inflow.durable
            self.outgoing += acks.ack(self._acked)
        self.send()

    def refuse(self, code: str, text: str) -> None:
        """Tell a sender why the connection ends, if it understands that."""
        if self._speaks_ack:
            self.outgoing += acks.error(code, text)
            # One that has hung up already does not hear it, and that is all.
            with suppress(OSError):
                self.send()

    def send(self) -> None:
        """Send what waits to be sent, as far as the peer takes it."""
        while self.outgoing:
            try:
                sent = self.sock.send(self.outgoing)
            except _WOULD_BLOCK:
                return
            del self.outgoing[:sent]

    def close(self) -> None:
        """Close the socket; whatever is wrong with it, it is not used any more."""
        with suppress(OSError):
            self.sock.close()

    def _first_state(self) -> ConnectionState:
        if self._speaks_ack:
            return ConnectionState.HELLO
        self._intake.add(self.inflow)
        return ConnectionState.OPEN

    def _shake_hands(self) -> bool:
        assert isinstance(self.sock, ssl.SSLSocket)
        try:
            self.sock.do_handshake()
        except _WOULD_BLOCK:
            return False
        self.state = self._first_state()
        return True

    def _feed(self, data: bytes) -> None:
        if self.state is ConnectionState.OPEN:
            self._intake.feed(self.inflow, data)
            return
        self._greeting += data
        if self.state is not ConnectionState.HELLO:
            return
        end = self._greeting.find(b"\n")
        if end < 0 and len(self._greeting) <= acks.GREETING_BYTES_MAX:
            return
        # Without an end the greeting is longer than any that can be parsed.
        self.inflow.sender = acks.parse_hello(bytes(self._greeting[: end if end >= 0 else None]))
        del self._greeting[: end + 1]
        self.state = ConnectionState.RESUME

    def _feed_rest(self) -> None:
        # A sender waits for the answer, but what it may have sent before is its data all the same.
        rest, self._greeting = bytes(self._greeting), bytearray()
        if rest:
            self._intake.feed(self.inflow, rest)


def keep_alive(sock: socket.socket) -> None:
    """Let the system find out that a silent peer is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
