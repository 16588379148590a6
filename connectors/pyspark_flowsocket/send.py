"""A sender that follows ``protocol=ack``: ``python -m pyspark_flowsocket.send FILE host port``.

It sends the lines of a file to a source with ``mode=listen`` and ``protocol=ack``, goes on where
the source has stopped, also after a crash of either side, and ends when all lines are durable.
The file may grow meanwhile only behind its end as it was found.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from pyspark_flowsocket import acks
from pyspark_flowsocket.calling import connected
from pyspark_flowsocket.errors import ConnectionLostError, ProtocolError, SocketSourceError

__all__ = ["FileSender", "main"]

_BLOCK_BYTES = 256 << 10
_SHOW_EVERY_S = 0.5
_DELAY_MAX_S = 10.0
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a file is."""

    lines: int
    sent: int
    durable: int
    sent_bytes: int
    connections: int

    def __str__(self) -> str:
        share = 100 if not self.lines else 100 * self.durable // self.lines
        return (
            f"{share:3d} %  durable {self.durable:,} of {self.lines:,} lines, sent {self.sent:,} "
            f"({self.sent_bytes / 1e6:,.1f} MB), connections {self.connections}"
        )


class FileSender:
    """Sends one file. The source keeps the count, so nothing is kept here."""

    def __init__(
        self,
        path: str,
        host: str,
        port: int,
        *,
        sender: str | None = None,
        context: ssl.SSLContext | None = None,
        attempts: int = 20,
        delay_s: float = 0.5,
        silence_s: float = 60.0,
        show: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._path = path
        self._address = (host, port)
        self._hello = acks.hello(sender or default_sender(path))
        self._context = context
        self._attempts = attempts
        self._delay_s = delay_s
        self._silence_s = silence_s
        self._show = show
        self._shown_at = 0.0
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise SocketSourceError(
                f"{path} is no regular file: lines must be there to be read again after a crash. "
                f"Write them to a file first"
            )
        self._size = found.st_size
        self._lines = _count_lines(path, self._size)
        self._sent = self._durable = self._sent_bytes = self._connections = 0

    @property
    def progress(self) -> Progress:
        """How far the file is."""
        return Progress(self._lines, self._sent, self._durable, self._sent_bytes, self._connections)

    def run(self) -> Progress:
        """Send until every line is durable; ``ConnectionLostError`` after too many failures."""
        failures = 0
        while True:
            before = self._durable
            try:
                self._send_once()
                self._show(self.progress)
                return self.progress
            except (OSError, ConnectionResetError) as error:
                failures = 1 if self._durable > before else failures + 1
                if failures > self._attempts:
                    host, port = self._address
                    raise ConnectionLostError(
                        f"no source took the lines at {host}:{port} in {failures} attempts; the "
                        f"last one: {type(error).__name__}: {error}. {self._durable} of "
                        f"{self._lines} lines are durable; run this again to go on"
                    ) from None
                time.sleep(min(self._delay_s * 2 ** min(failures - 1, 10), _DELAY_MAX_S))

    def _send_once(self) -> None:
        with self._connected() as sock, open(self._path, "rb") as file:
            self._connections += 1
            answers = _Answers(sock)
            sock.sendall(self._hello)
            self._durable = self._sent = answers.resume()
            if self._durable > self._lines:
                raise ProtocolError(
                    f"the source has {self._durable} lines of this sender, and {self._path} has "
                    f"{self._lines}: it is another file. Give it an id of its own with --id"
                )
            for block, lines in _blocks_from(file, self._durable, self._size):
                self._send_all(sock, block, answers)
                self._sent += lines
                self._sent_bytes += len(block)
                self._tell(answers)
            while self._durable < self._lines:
                answers.wait(self._silence_s)
                self._tell(answers)

    def _connected(self) -> socket.socket:
        sock = connected(self._address, self._silence_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is None:
            return sock
        try:
            return self._context.wrap_socket(sock, server_hostname=self._address[0])
        except BaseException:
            sock.close()
            raise

    def _send_all(self, sock: socket.socket, block: bytes, answers: _Answers) -> None:
        # While the source does not read, because its spool is full, it still acknowledges; what it
        # says is read now and then, or it could not say more.
        answers.look()
        sock.settimeout(None)
        try:
            sock.sendall(block)
        except OSError:
            answers.hear_out()
            raise

    def _tell(self, answers: _Answers) -> None:
        self._durable = max(self._durable, answers.durable)
        now = time.monotonic()
        if now - self._shown_at >= _SHOW_EVERY_S:
            self._shown_at = now
            self._show(self.progress)


class _Answers:
    """What the source says, as it comes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = b""
        self.durable = 0

    def resume(self) -> int:
        while b"\n" not in self._buffer:
            self._receive()
        line, _, self._buffer = self._buffer.partition(b"\n")
        word, count = acks.parse_answer(line)
        if word != "RESUME":
            raise ProtocolError(f"a source answers a greeting with RESUME, not with {word}")
        self.durable = count
        return count

    def look(self) -> None:
        """Take what is there, without waiting."""
        self._sock.setblocking(False)
        with suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._receive()
        self._parse()

    def hear_out(self) -> None:
        """Take what the source has said before it ended the connection: perhaps why it did."""
        self._sock.settimeout(_LAST_WORDS_S)
        with suppress(OSError):
            while True:
                self._receive()
        self._parse()

    def wait(self, timeout_s: float) -> None:
        self._sock.settimeout(timeout_s)
        self._receive()
        self._parse()

    def _receive(self) -> None:
        data = self._sock.recv(65536)
        if not data:
            self._parse()
            raise ConnectionResetError("the source has ended the connection")
        self._buffer += data

    def _parse(self) -> None:
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self.durable = acks.parse_answer(line)[1]


def default_sender(path: str) -> str:
    """Return an id that is the same each time for the same file on the same machine."""
    name = f"{socket.gethostname()}:{os.path.abspath(path)}"
    visible = "".join(c if "!" <= c <= "~" else f"%{ord(c):x}" for c in name)
    if len(visible) <= acks.SENDER_LENGTH_MAX:
        return visible
    # Ends alone may be those of another file, whose lines would then count as sent.
    digest = hashlib.sha256(visible.encode()).hexdigest()[:32]
    return f"{digest}:{visible[len(digest) + 1 - acks.SENDER_LENGTH_MAX :]}"


def _count_lines(path: str, size: int) -> int:
    """Count the lines, the last of which may lack its end."""
    lines, last, left = 0, b"\n", size
    with open(path, "rb") as file:
        while left and (block := file.read(min(left, 4 * _BLOCK_BYTES))):
            lines += block.count(b"\n")
            last, left = block[-1:], left - len(block)
    return lines + (last != b"\n")


def _blocks_from(file: BinaryIO, line: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the file from a line on, in blocks with the number of lines that end in each."""
    left, last, to_skip = size, b"\n", line
    while left and (block := file.read(min(left, _BLOCK_BYTES))):
        left -= len(block)
        last = block[-1:]
        ends = block.count(b"\n")
        if to_skip > ends:
            to_skip -= ends
            continue
        # The wanted line begins in this block, right at its end perhaps.
        place = 0
        for _ in range(to_skip):
            place = block.index(b"\n", place) + 1
        if place < len(block):
            yield block[place:], ends - to_skip
        to_skip = 0
    if left:
        raise SocketSourceError(
            f"{file.name} has become shorter than the {size} bytes it had at the beginning. Send a "
            f"file that only grows, or another one with an id of its own"
        )
    # A last line without an end is one all the same, unless it was among those to skip.
    if last != b"\n" and not to_skip:
        yield b"\n", 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when every line is durable."""
    parser = argparse.ArgumentParser(
        prog="python -m pyspark_flowsocket.send",
        description="Send the lines of a file to a flowsocket source with mode=listen and "
        "protocol=ack; each line is there exactly once, also after crashes of either side.",
    )
    parser.add_argument("file")
    parser.add_argument("host")
    parser.add_argument("port", type=_port)
    parser.add_argument("--id", help="who sends; default: this host and the file's path")
    parser.add_argument("--attempts", type=int, default=20, help="failures in a row (default 20)")
    parser.add_argument("--tls-ca-file", help="use TLS, and trust the certificates in this file")
    parser.add_argument("--tls-cert-file", help="this sender's certificate, with its key")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    given = parser.parse_args(arguments)
    try:
        sender = FileSender(
            given.file,
            given.host,
            given.port,
            sender=given.id,
            context=_context(given),
            attempts=given.attempts,
            show=(lambda progress: None) if given.quiet else _print,
        )
        done = sender.run()
    # A host's name that can be none is a ValueError.
    except (SocketSourceError, OSError, ValueError) as error:
        _say(f"\n{error}\n")
        return 1
    except KeyboardInterrupt:
        _say("\ninterrupted; run it again to go on\n")
        return 130
    _say(f"\n{done.durable} lines are durable\n")
    return 0


def _context(given: argparse.Namespace) -> ssl.SSLContext | None:
    if given.tls_ca_file is None and given.tls_cert_file is None:
        return None
    try:
        context = ssl.create_default_context(cafile=given.tls_ca_file)
        if given.tls_cert_file is not None:
            context.load_cert_chain(given.tls_cert_file)
    except OSError as error:
        raise SocketSourceError(
            f"the files of --tls-ca-file and --tls-cert-file cannot be used: {error}"
        ) from None
    return context


def _port(text: str) -> int:
    # A larger one would be taken for what is left of it in 16 bits: another port.
    number = int(text)
    if not 1 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"must be 1..65535, not {number}")
    return number


def _print(progress: Progress) -> None:
    _say(f"\r{progress}" if sys.stderr.isatty() else f"{progress}\n")


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
