"""Generator of lines for the benchmark of ``flowsocket``, in a process of its own.

``python -m integration.benchmarks._lines COUNT WIDTH RATE`` prints its port, sends to the first who
connects, and prints when it began. A rate of 0 is as fast as it goes. With a rate each line begins
with the time at which it was sent, in microseconds.
"""

from __future__ import annotations

import random
import socket
import sys
import time

BLOCK_BYTES = 1 << 20
WORDS = [f"{random.Random(n).getrandbits(24):x}" for n in range(2000)]


def block_of(width: int, size: int = BLOCK_BYTES) -> list[bytes]:
    """Return lines of words, each with its end, of exactly this width."""
    rng = random.Random(1)
    found = []
    for _ in range(max(1, size // width)):
        text = ""
        while len(text) < width - 1:
            text += rng.choice(WORDS) + " "
        found.append(text[: width - 1].encode() + b"\n")
    return found


def send_fast(sock: socket.socket, count: int, width: int) -> None:
    lines = block_of(width)
    block, left = b"".join(lines), count
    while left > 0:
        lines_now = min(left, len(lines))
        sock.sendall(block[: lines_now * width])
        left -= lines_now


def send_at(sock: socket.socket, count: int, width: int, rate: int) -> None:
    padding = b"x" * max(0, width - 18) + b"\n"
    begin, sent = time.monotonic(), 0
    while sent < count:
        due = min(count, int((time.monotonic() - begin) * rate) + 1)
        now = b"%016d " % (time.time_ns() // 1000)
        if due > sent:
            sock.sendall((now + padding) * (due - sent))
            sent = due
        time.sleep(0.002)


def main(count: int, width: int, rate: int) -> None:
    block_of(width)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        sock, _ = listening.accept()
        with sock:
            print(time.time(), flush=True)
            if rate:
                send_at(sock, count, width, rate)
            else:
                send_fast(sock, count, width)
            # The peer may need the connection until it has read everything.
            sock.shutdown(socket.SHUT_WR)
            sys.stdin.readline()


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
