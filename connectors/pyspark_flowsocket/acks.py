"""The words of ``protocol=ack``, as both sides write them.

Each is a line of ASCII that ends with a newline, whatever the delimiter and the charset of the data
are. The sender begins::

    sender: HELLO <id>      1 to 200 visible ASCII characters, its own while the spool lives
    source: RESUME <n>      n lines of that sender are durable: go on with the next one
    sender: data, each line with its delimiter
    source: ACK <n>         now n lines are durable, skipped ones included; again and again
    source: ERR <code> <text>   and the connection ends; the sender may try again later
"""

from __future__ import annotations

import re

from pyspark_flowsocket.errors import ProtocolError

__all__ = ["GREETING_BYTES_MAX", "ack", "error", "hello", "parse_answer", "parse_hello", "resume"]

SENDER_LENGTH_MAX = 200
GREETING_BYTES_MAX = 512
_HELLO = re.compile(rb"HELLO ([\x21-\x7e]{1,%d})" % SENDER_LENGTH_MAX)
_ANSWER = re.compile(rb"(RESUME|ACK) (\d{1,19})")
_WAY_OUT = (
    "Set protocol=plain for peers that only send lines; 'python -m pyspark_flowsocket.send' is a "
    "sender that follows the protocol"
)


def hello(sender: str) -> bytes:
    """Return what a sender begins with."""
    line = b"HELLO " + sender.encode("ascii", "replace")
    if _HELLO.fullmatch(line) is None:
        raise ProtocolError(
            f"a sender's id has 1 to {SENDER_LENGTH_MAX} visible ASCII characters without spaces, "
            f"which {sender!r} has not"
        )
    return line + b"\n"


def resume(lines: int) -> bytes:
    """Return the answer to a greeting."""
    return b"RESUME %d\n" % lines


def ack(lines: int) -> bytes:
    """Return how many lines are durable."""
    return b"ACK %d\n" % lines


def error(code: str, text: str) -> bytes:
    """Return why the connection ends."""
    return f"ERR {code} {' '.join(text.split())}\n".encode("ascii", "replace")[:1000]


def parse_hello(line: bytes) -> str:
    """Return the sender's id."""
    match = _HELLO.fullmatch(line.removesuffix(b"\r"))
    if match is None:
        raise ProtocolError(f"a sender opens with 'HELLO <id>', not with {line[:40]!r}. {_WAY_OUT}")
    return match.group(1).decode("ascii")


def parse_answer(line: bytes) -> tuple[str, int]:
    """Return the word and the number of lines that the source has answered with."""
    match = _ANSWER.fullmatch(line)
    if match is None:
        what = line.decode("ascii", "replace")
        if line.startswith(b"ERR "):
            raise ProtocolError(f"the source has refused: {what[4:]}")
        raise ProtocolError(f"a source with protocol=ack does not answer {what[:80]!r}")
    return match.group(1).decode("ascii"), int(match.group(2))
