"""A connection that only fetches, read by whoever waits for the answer.

kafka-python receives on a thread of its own, in pieces that it copies and puts together again,
which costs as much CPU as decoding the records. Here the operating system collects an answer while
the last one is decoded, and a few calls bring it into one buffer, which the next answer uses again.
What is in it is not of interest here.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from dataclasses import dataclass

_SIZE_BYTES = 4
_CORRELATION_BYTES = 4
_BUFFER_BYTES = 1 << 20
_BUFFER_BYTES_MAX = 32 << 20
"""Larger answers get a buffer of their own, which is not kept."""


class ChannelError(ConnectionError):
    """What came is no answer to what was asked; the connection is of no more use."""


@dataclass(slots=True, eq=False)
class Question:
    """A request that was sent, and its answer once that was read."""

    channel: Channel
    correlation_id: int
    version: int
    answer: bytes | None = None
    """Set if the answer had to be read because another one behind it was wanted."""


class Channel:
    """One socket, which is blocking and logged in. Answers come in the order of the questions.

    An answer that nobody waits for, because its task has ended early, is passed over when the next
    one is read. After any error the channel is closed.
    """

    def __init__(self, connected: socket.socket, *, send_seconds_max: float) -> None:
        self._socket = connected
        self._send_seconds_max = send_seconds_max
        self._asked: deque[Question] = deque()
        self._buffer = bytearray(_BUFFER_BYTES)
        self.is_closed = False
        self._is_quiet_until = 0.0
        self._used_at = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """For how long nothing was asked; brokers close what is idle for too long."""
        return time.monotonic() - self._used_at

    def ask(self, request: bytes, *, correlation_id: int, version: int) -> Question:
        """Send a request in its frame; do not wait for the answer."""
        if (pause := self._is_quiet_until - time.monotonic()) > 0:
            time.sleep(pause)
        try:
            self._socket.settimeout(self._send_seconds_max)
            self._socket.sendall(request)
        except OSError:
            self.close()
            raise
        self._used_at = time.monotonic()
        question = Question(self, correlation_id, version)
        self._asked.append(question)
        return question

    def answer(self, question: Question, *, seconds_max: float) -> memoryview | bytes:
        """Wait for an answer, without its size and its id; good until the next one is read."""
        if question.answer is not None:
            return question.answer
        deadline = time.monotonic() + seconds_max
        try:
            while self._asked:
                asked = self._asked.popleft()
                found = self._receive(asked, deadline)
                if asked is question:
                    return found
                asked.answer = bytes(found)
        except OSError:
            self.close()
            raise
        raise ChannelError("the connection was closed before the answer came")

    def keep_quiet(self, seconds: float) -> None:
        """Ask nothing for a while, as a broker that throttles its clients wants it."""
        self._is_quiet_until = time.monotonic() + seconds

    def close(self) -> None:
        """Close the connection; what was asked is not answered any more."""
        self.is_closed = True
        self._asked.clear()
        with contextlib.suppress(OSError):
            self._socket.close()

    def _receive(self, asked: Question, deadline: float) -> memoryview:
        size = int.from_bytes(self._read(_SIZE_BYTES, deadline), "big", signed=True)
        if size < _CORRELATION_BYTES:
            raise ChannelError(f"an answer cannot have {size} bytes")
        frame = self._read(size, deadline)
        found = int.from_bytes(frame[:_CORRELATION_BYTES], "big")
        if found != asked.correlation_id:
            raise ChannelError(f"answer {found} came for request {asked.correlation_id}")
        return frame[_CORRELATION_BYTES:]

    def _read(self, count: int, deadline: float) -> memoryview:
        buffer = self._buffer if count <= len(self._buffer) else bytearray(count)
        if count <= _BUFFER_BYTES_MAX:
            self._buffer = buffer
        wanted, done = memoryview(buffer)[:count], 0
        while done < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no answer in time")
            self._socket.settimeout(left)
            received = self._socket.recv_into(wanted[done:])
            if not received:
                raise ChannelError("the broker closed the connection")
            done += received
        return wanted
