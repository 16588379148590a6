"""Connections that this side opens, to peers that are away, slow, silent or send bad lines."""

from __future__ import annotations

import datetime as dt
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from flowstate.testing.faults import Fault, FaultAction, FaultyFileSystem, OperationName
from pyspark_flowsocket import reader as reader_module
from pyspark_flowsocket.errors import (
    ConnectionLostError,
    LineTooLongError,
    SocketSourceError,
    UndecodableLineError,
)
from pyspark_flowsocket.options import SocketOptions
from pyspark_flowsocket.reader import SocketStreamReader

from .peers import (
    WAIT_S,
    Peer,
    free_port,
    latest,
    lines,
    reading,
    received,
    report,
    table,
    wait_for,
    wait_until,
)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[FaultyFileSystem]:
    """The stores that readers open, in which faults can be put."""
    opened: list[FaultyFileSystem] = []
    real = reader_module.spool_files

    def faulty(options: SocketOptions) -> FaultyFileSystem:
        opened.append(FaultyFileSystem(real(options)))
        return opened[-1]

    monkeypatch.setattr(reader_module, "spool_files", faulty)
    return opened


def failure_of(reader: SocketStreamReader) -> Exception:
    def attempt() -> Exception | None:
        try:
            latest(reader)
        except Exception as error:
            return error
        return None

    found = wait_for(attempt)
    assert isinstance(found, Exception)
    return found


def test_lines_arrive_with_the_time_and_the_peer(tmp_path: Path) -> None:
    with (
        Peer() as peer,
        reading(tmp_path, peer.port, includeTimestamp="true", includeSource="true") as reader,
    ):
        assert reader.initialOffset() == {"line": 0}
        sock = peer.accept()
        sock.sendall(b"to be\nor not\n")
        assert received(reader, 2) == ["to be", "or not"]

        first = table(reader, 0, 2)
        age = dt.datetime.now(dt.UTC) - first["timestamp"][0].as_py()
        assert dt.timedelta(0) <= age < dt.timedelta(seconds=60)
        assert first["source"].to_pylist() == [f"127.0.0.1:{peer.port}"] * 2
        sock.sendall(b"to be\n")
        wait_for(lambda: latest(reader) == 3)
        assert table(reader, 0, 3).slice(0, 2).equals(first)
        sock.close()


def test_nobody_listening_is_tried_again_and_then_told_of(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, reconnectAttempts="2") as reader:
        error = failure_of(reader)

    assert isinstance(error, ConnectionLostError)
    assert f"127.0.0.1:{port}" in str(error)
    assert "after 3 attempts" in str(error)
    assert "reconnectAttempts" in str(error)


def test_a_peer_that_comes_late_is_found(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, reconnectAttempts="100") as reader:
        assert latest(reader) == 0
        time.sleep(0.1)
        with Peer(port) as peer, peer.accept() as sock:
            sock.sendall(b"late\n")
            assert received(reader, 1) == ["late"]


def test_a_name_that_is_nobody_is_told_of(tmp_path: Path) -> None:
    with reading(tmp_path, 1, host="no.such.host.invalid", reconnectAttempts="0") as reader:
        assert "no.such.host.invalid" in str(failure_of(reader))


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example", "nul\0.example"], ids=ascii)
@pytest.mark.parametrize("mode", ["connect", "listen"])
def test_a_name_that_can_be_no_hosts_is_told_of(tmp_path: Path, mode: str, host: str) -> None:
    more = {} if mode == "listen" else {"reconnectAttempts": "0"}
    with reading(tmp_path, 1, host=host, mode=mode, uid="u", **more) as reader:
        assert isinstance(failure_of(reader), ConnectionLostError)


def test_a_lost_connection_is_opened_again_and_lines_go_on(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port) as reader:
        latest(reader)
        for number, total in enumerate((1, 3, 4, 6)):
            sock = peer.accept()
            sock.sendall(b"line %d\nhalf" % number)
            wait_until(reader, total)
            if number % 2:
                # Without lingering a close resets the connection.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

        # After an orderly end the unfinished line counts; after a reset it may be broken.
        expected = ["line 0", "half", "line 1", "line 2", "half", "line 3"]
        assert received(reader, 6) == expected
        sock = peer.accept()
        sock.sendall(b"on\n")
        wait_for(lambda: latest(reader) == 7)
        assert report(reader)["droppedPartialLines"] == 2
        sock.close()


def test_without_reconnect_the_end_of_the_stream_is_its_end(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port, reconnect="false") as reader:
        latest(reader)
        with peer.accept() as sock:
            sock.sendall(b"all\n")
        wait_for(lambda: latest(reader) == 1)
        time.sleep(0.1)

        assert latest(reader) == 1


@pytest.mark.parametrize("ending", ["reset", "silence"])
def test_without_reconnect_a_connection_that_breaks_is_told_of(tmp_path: Path, ending: str) -> None:
    options = {"reconnect": "false", "readTimeout": "1 second"}
    with Peer() as peer, reading(tmp_path, peer.port, **options) as reader:
        latest(reader)
        sock = peer.accept()
        sock.sendall(b"one\nha")
        wait_until(reader, 1)
        if ending == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        error = failure_of(reader)
        sock.close()

        assert isinstance(error, ConnectionLostError)
        assert "'reconnect' is false" in str(error)
        assert latest_end(reader) == 1


def test_a_long_line_without_reconnect_is_told_of_as_such(tmp_path: Path) -> None:
    options = {"reconnect": "false", "maxLineBytes": "100"}
    with Peer() as peer, reading(tmp_path, peer.port, **options) as reader:
        latest(reader)
        with peer.accept() as sock:
            sock.sendall(b"x" * 5000)

            assert isinstance(failure_of(reader), LineTooLongError)


def test_a_peer_that_ends_at_once_again_and_again_is_given_up(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port, reconnectAttempts="2") as reader:
        latest(reader)
        for _ in range(3):
            peer.accept().close()

        assert isinstance(failure_of(reader), ConnectionLostError)
        assert latest_end(reader) == 0


def latest_end(reader: SocketStreamReader) -> int:
    return int(report(reader)["line"])


def test_a_half_open_peer_is_left_after_the_read_timeout(tmp_path: Path) -> None:
    # Long enough for the second peer to be heard in time on a busy machine.
    with Peer() as peer, reading(tmp_path, peer.port, readTimeout="2 seconds") as reader:
        latest(reader)
        silent = peer.accept()
        silent.sendall(b"one\n")
        with peer.accept() as sock:
            sock.sendall(b"two\n")
            assert received(reader, 2) == ["one", "two"]
        silent.close()


def test_one_byte_at_a_time_is_a_line_at_the_end(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port) as reader:
        latest(reader)
        with peer.accept() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in b"slow\n":
                assert latest(reader) == 0
                sock.sendall(bytes([byte]))
                time.sleep(0.02)
            assert received(reader, 1) == ["slow"]


def test_a_hundred_megabytes_without_a_delimiter_are_one_skipped_line(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port, onLongLine="skip") as reader:
        latest(reader)
        with peer.accept() as sock:
            block = b"x" * (1 << 20)
            for _ in range(100):
                sock.sendall(block)
            sock.sendall(b"\nnext\n")
            assert received(reader, 1) == ["next"]

        assert report(reader)["skippedLines"] == 1
        assert report(reader)["receivedLines"] == 2


def test_a_long_line_ends_the_query_if_it_is_told_so(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port, maxLineBytes="100") as reader:
        latest(reader)
        with peer.accept() as sock:
            sock.sendall(b"fine\n" + b"x" * 5000)
            error = failure_of(reader)

        assert isinstance(error, LineTooLongError)
        assert f"127.0.0.1:{peer.port}" in str(error)
        assert latest_end(reader) == 1


@pytest.mark.parametrize(
    ("policy", "expected", "counts"),
    [("replace", ["a", "\ufffd", "b"], (0, 1)), ("skip", ["a", "b"], (1, 1))],
    ids=["replace", "skip"],
)
def test_invalid_utf8_is_counted(
    tmp_path: Path, policy: str, expected: list[str], counts: tuple[int, int]
) -> None:
    with Peer() as peer, reading(tmp_path, peer.port, onDecodeError=policy) as reader:
        latest(reader)
        with peer.accept() as sock:
            sock.sendall(b"a\n\xff\nb\n")
            assert received(reader, len(expected)) == expected

        found = report(reader)
        assert (found["skippedLines"], found["undecodableLines"]) == counts
    with reading(tmp_path, peer.port, onDecodeError=policy) as reader:
        latest(reader)
        assert report(reader)["undecodableLines"] == 1


def test_invalid_utf8_ends_the_query_and_the_lines_before_stay(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port) as reader:
        latest(reader)
        with peer.accept() as sock:
            sock.sendall(b"a\n\xff\nb\n")
            error = failure_of(reader)

        assert isinstance(error, UndecodableLineError)
        assert lines(reader, 0, latest_end(reader)) == ["a"]


def test_an_empty_stream_is_no_lines(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port, reconnect="false") as reader:
        latest(reader)
        peer.accept().close()
        time.sleep(0.05)

        assert latest(reader) == 0
        assert reader.partitions({"line": 0}, {"line": 0}) == []


def send_until_full(sock: socket.socket, reader: SocketStreamReader, data: bytes) -> bytes:
    """Send until the spool is full, and the system takes no more; return what is left to send."""
    deadline = time.monotonic() + WAIT_S
    sock.setblocking(False)
    while time.monotonic() < deadline:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            if report(reader)["isFull"]:
                return data
            time.sleep(0.005)
    raise AssertionError("everything was read")


def test_a_full_spool_stops_reading_and_goes_on_when_lines_are_processed(tmp_path: Path) -> None:
    limits = {"segmentBytes": "64k", "maxSpoolBytes": "256k"}
    with Peer() as peer, reading(tmp_path, peer.port, **limits) as reader:
        latest(reader)
        with peer.accept() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            total = 16 << 10
            left = send_until_full(sock, reader, (b"x" * 1023 + b"\n") * total)
            assert report(reader)["spoolBytes"] < 2 * (256 << 10)
            # No commit is needed: that a later batch is asked for says enough.
            sock.setblocking(True)
            thread = threading.Thread(target=sock.sendall, args=(left,))
            thread.start()
            done = 0
            while done < total:
                wait_until(reader, done + 1, start=done)
                done = latest(reader, done)
            thread.join(WAIT_S)
            assert done == total
            assert report(reader)["firstLine"] == 0


def test_a_store_that_fails_for_a_while_is_waited_for(
    tmp_path: Path, stores: list[FaultyFileSystem]
) -> None:
    with Peer() as peer, reading(tmp_path, peer.port) as reader:
        latest(reader)
        stores[0].inject(
            Fault(
                FaultAction.FAIL,
                at=lambda op: op.name is OperationName.CREATE_EXCLUSIVELY,
                times=3,
            )
        )
        with peer.accept() as sock:
            sock.sendall(b"patience\n")
            assert received(reader, 1) == ["patience"]


def test_a_store_that_fails_for_good_ends_the_query(
    tmp_path: Path, stores: list[FaultyFileSystem]
) -> None:
    with Peer() as peer, reading(tmp_path, peer.port, storageTimeout="100ms") as reader:
        latest(reader)
        stores[0].inject(Fault(FaultAction.FULL, at=lambda op: True, times=None))
        with peer.accept() as sock:
            sock.sendall(b"lost for this run\n")
            assert "[FLOWSTATE_STORE_FULL]" in str(failure_of(reader))


def test_the_older_of_two_queries_fails_and_the_newer_goes_on(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port) as old:
        latest(old)
        first = peer.accept()
        first.sendall(b"one\n")
        assert received(old, 1) == ["one"]
        with reading(tmp_path, peer.port) as new:
            latest(new)
            second = peer.accept()
            second.sendall(b"two\n")
            wait_for(lambda: latest(new) == 2)
            first.sendall(b"stale\n")
            error = failure_of(old)

            assert isinstance(error, SocketSourceError)
            assert str(error).startswith("[FLOWSOCKET_TAKEN_OVER]")
            assert lines(new, 0, latest(new)) == ["one", "two"]
            for sock in (first, second):
                sock.close()
