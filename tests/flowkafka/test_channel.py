"""The connection that fetches: answers in order, left over, late, cut off, or to something else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pyspark_flowkafka import channel as channels
from pyspark_flowkafka.channel import Channel, ChannelError, Question

LARGE = bytes(range(256)) * 20_000


def frame(correlation_id: int, body: bytes) -> bytes:
    content = correlation_id.to_bytes(4, "big") + body
    return len(content).to_bytes(4, "big") + content


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, send_seconds_max=5)
    yield channel, theirs
    channel.close()
    theirs.close()


Ends = tuple[Channel, socket.socket]


def ask(channel: Channel, number: int) -> Question:
    return channel.ask(b"?", correlation_id=number, version=11)


def answer(channel: Channel, question: Question, *, seconds: float = 5) -> bytes:
    return bytes(channel.answer(question, seconds_max=seconds))


def test_answers_belong_to_their_questions_in_any_order(ends: Ends) -> None:
    channel, broker = ends
    first, second, third = (ask(channel, number) for number in (1, 2, 3))
    broker.sendall(frame(1, b"one") + frame(2, b"two") + frame(3, b"three"))

    assert answer(channel, second) == b"two"
    assert answer(channel, first) == b"one"
    assert answer(channel, third) == b"three"
    assert broker.recv(10) == b"???"


def test_an_answer_that_nobody_waits_for_is_passed_over(ends: Ends) -> None:
    channel, broker = ends
    ask(channel, 1)
    wanted = ask(channel, 2)
    broker.sendall(frame(1, b"of a task that has ended") + frame(2, b"wanted"))

    assert answer(channel, wanted) == b"wanted"


def test_an_answer_of_any_size_comes_whole(ends: Ends) -> None:
    channel, broker = ends
    questions = [ask(channel, number) for number in range(3)]
    data = frame(0, LARGE) + frame(1, b"") + frame(2, LARGE[1:])
    sender = threading.Thread(target=broker.sendall, args=(data,))
    sender.start()

    assert [answer(channel, one) for one in questions] == [LARGE, b"", LARGE[1:]]
    sender.join()


def test_an_answer_that_is_late_closes_the_connection(ends: Ends) -> None:
    channel, broker = ends
    question = ask(channel, 1)
    broker.sendall(frame(1, b"only in part")[:-1])

    with pytest.raises(TimeoutError):
        answer(channel, question, seconds=0.05)
    assert channel.is_closed
    with pytest.raises(ChannelError, match="closed before the answer came"):
        answer(channel, question)


def test_no_time_is_left_to_an_answer_that_drips(ends: Ends) -> None:
    channel, broker = ends
    question = ask(channel, 1)
    stopped = threading.Event()

    def drip() -> None:
        for byte in frame(1, b"x" * 200):
            if stopped.wait(0.02):
                return
            broker.send(bytes([byte]))

    sender = threading.Thread(target=drip)
    sender.start()
    start = time.monotonic()

    with pytest.raises(TimeoutError):
        answer(channel, question, seconds=0.2)
    assert time.monotonic() - start < 2
    stopped.set()
    sender.join()


def test_a_broker_that_goes_away_is_an_error(ends: Ends) -> None:
    channel, broker = ends
    question = ask(channel, 1)
    broker.close()

    with pytest.raises(OSError, match=r"closed the connection|reset"):
        answer(channel, question)
    assert channel.is_closed
    with pytest.raises(OSError):  # noqa: PT011 - the system says it in its own words
        ask(channel, 2)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (frame(7, b"x"), "answer 7 came for request 1"),
        (b"\x00\x00\x00\x03abc", "an answer cannot have 3 bytes"),
        (b"\xff\xff\xff\xff", "an answer cannot have -1 bytes"),
    ],
    ids=["another id", "too short", "negative"],
)
def test_what_is_no_answer_is_not_taken_for_one(ends: Ends, sent: bytes, says: str) -> None:
    channel, broker = ends
    question = ask(channel, 1)
    broker.sendall(sent)

    with pytest.raises(ChannelError, match=says):
        answer(channel, question)
    assert channel.is_closed


def test_a_channel_that_is_to_keep_quiet_waits(ends: Ends) -> None:
    channel, broker = ends
    channel.keep_quiet(0.05)
    start = time.monotonic()
    ask(channel, 1)

    assert time.monotonic() - start >= 0.05
    assert broker.recv(10) == b"?"


def test_a_channel_knows_for_how_long_nothing_was_asked(ends: Ends) -> None:
    channel, _ = ends
    time.sleep(0.05)
    idle = channel.idle_seconds
    ask(channel, 1)

    assert channel.idle_seconds < 0.05 <= idle


def test_a_buffer_that_is_too_large_is_not_kept(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_BUFFER_BYTES_MAX", len(LARGE))
    channel, broker = ends
    first, second, third = (ask(channel, number) for number in (1, 2, 3))
    data = frame(1, LARGE) + frame(2, b"small") + frame(3, LARGE[:-4])
    sender = threading.Thread(target=broker.sendall, args=(data,))
    sender.start()

    assert answer(channel, first) == LARGE
    assert len(channel._buffer) < len(LARGE)
    assert answer(channel, second) == b"small"
    assert answer(channel, third) == LARGE[:-4]
    assert len(channel._buffer) == len(LARGE)
    sender.join()
