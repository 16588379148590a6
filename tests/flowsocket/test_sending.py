"""The sender that comes with the package: what it sends, goes on with, and refuses."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from pyspark_flowsocket.calling import connected
from pyspark_flowsocket.errors import ProtocolError, SocketSourceError
from pyspark_flowsocket.send import FileSender, default_sender
from pyspark_flowsocket.send import main as send_main

from .peers import (
    WAIT_S,
    Peer,
    call,
    free_port,
    hear,
    latest,
    lines,
    reading,
    received,
    report,
    wait_for,
    wait_until,
    write_lines,
)

ACK = {"mode": "listen", "protocol": "ack"}


@pytest.mark.parametrize("count", [0, 1, 3, 60_000], ids=str)
@pytest.mark.parametrize("end", ["\n", ""], ids=["ended", "unended"])
def test_the_sender_sends_a_file_once(
    tmp_path: Path, count: int, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = write_lines(tmp_path / "file", count, end=end)
    port = free_port()
    with reading(tmp_path, port, **ACK) as reader:
        latest(reader)
        call(port).close()
        for _ in range(2):
            assert send_main([str(tmp_path / "file"), "127.0.0.1", str(port)]) == 0

        assert latest(reader) == count
        assert lines(reader, 0, count) == expected
    assert f"{count} lines are durable" in capsys.readouterr().err


def test_the_sender_goes_on_at_every_line_it_may_be_told(tmp_path: Path) -> None:
    expected = write_lines(tmp_path / "file", 7, end="")
    for done in range(8):
        port = free_port()
        with reading(tmp_path / str(done), port, **ACK) as reader:
            latest(reader)
            with call(port) as sock:
                sock.sendall(b"HELLO me\n")
                hear(sock)
                if done:
                    sock.sendall("".join(f"{line}\n" for line in expected[:done]).encode())
                    wait_until(reader, done)
            FileSender(str(tmp_path / "file"), "127.0.0.1", port, sender="me").run()

            assert lines(reader, 0, latest(reader)) == expected


def test_the_sender_outlives_the_source(tmp_path: Path) -> None:
    expected = write_lines(tmp_path / "file", 200_000)
    port = free_port()
    sender = FileSender(str(tmp_path / "file"), "127.0.0.1", port, delay_s=0.05, attempts=200)
    thread = threading.Thread(target=sender.run, daemon=True)
    thread.start()
    limits = {"segmentBytes": "64k", **ACK}
    for number in range(3):
        with reading(tmp_path, port, **limits) as reader:
            wait_until(reader, number * 20_000 + 1)
    with reading(tmp_path, port, **limits) as reader:
        wait_for(lambda: latest(reader) == 200_000)
        thread.join(WAIT_S)

        assert lines(reader, 0, 200_000) == expected
        assert sender.progress.durable == 200_000
        assert not thread.is_alive()


def test_the_sender_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "file", 3)
    port = free_port()
    arguments = [str(tmp_path / "file"), "127.0.0.1", str(port), "--attempts", "0"]

    assert send_main(arguments) == 1
    assert "no source took the lines" in capsys.readouterr().err
    assert send_main([str(tmp_path / "none"), "127.0.0.1", str(port)]) == 1
    assert "none" in capsys.readouterr().err
    with reading(tmp_path, port, **ACK) as reader:
        latest(reader)
        with call(port) as sock:
            sock.sendall(b"HELLO me\n")
            hear(sock)
            sock.sendall(b"1\n2\n3\n4\n")
            assert hear(sock) == [b"ACK 4"]
        assert send_main([*arguments, "--id", "me"]) == 1
        assert "another file" in capsys.readouterr().err


def test_the_sender_hears_why_it_was_refused_in_the_middle_of_sending(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (32 << 20))
    with Peer() as source:

        def refuse() -> None:
            with source.accept() as sock:
                hear(sock)
                sock.sendall(b"RESUME 0\n")
                sock.recv(10)
                time.sleep(0.3)
                # What was not read makes this a reset.
                sock.sendall(b"ERR LINE_TOO_LONG of course\n")

        thread = threading.Thread(target=refuse)
        thread.start()
        sender = FileSender(str(tmp_path / "file"), "127.0.0.1", source.port, attempts=0)
        with pytest.raises(ProtocolError, match="LINE_TOO_LONG of course"):
            sender.run()
        thread.join(WAIT_S)


def test_the_sender_refuses_what_it_cannot_send_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    address = ["127.0.0.1", str(free_port()), "--attempts", "0"]

    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        assert send_main([str(path), *address]) == 1
        assert "no regular file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["a..b", "9"], "label"),
        (["127.0.0.1", "9", "--id", "two words"], "'two words'"),
        (["127.0.0.1", "9", "--tls-ca-file", "/none"], "--tls-ca-file"),
    ],
    ids=["host", "id", "file"],
)
def test_wrong_arguments_of_the_sender_are_told_of(
    tmp_path: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "file", 1)

    assert send_main([str(tmp_path / "file"), *arguments, "--attempts", "0"]) == 1
    assert told in capsys.readouterr().err


def test_a_port_that_is_none_is_not_cut_to_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "file", 1)
    with pytest.raises(SystemExit) as ended:
        send_main([str(tmp_path / "file"), "127.0.0.1", "75535"])

    assert ended.value.code == 2
    assert "1..65535" in capsys.readouterr().err


def test_a_file_that_becomes_shorter_is_told_of_and_nothing_made_up(tmp_path: Path) -> None:
    write_lines(tmp_path / "file", 3)
    port = free_port()
    with reading(tmp_path, port, **ACK) as reader:
        latest(reader)
        sender = FileSender(str(tmp_path / "file"), "127.0.0.1", port)
        (tmp_path / "file").write_text("line 0\nli")
        with pytest.raises(SocketSourceError, match="shorter"):
            sender.run()
        wait_until(reader, 1)
        wait_for(lambda: report(reader)["connections"] == 0)

        assert received(reader, 1) == ["line 0"]


def test_files_far_down_have_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    far = "/" + "x" * 300
    ids = {default_sender(path) for path in (far, f"/y{far}", "/short")}
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    ids.add(default_sender(far))

    assert len(ids) == 4
    assert all(1 <= len(one) <= 200 for one in ids)
    assert default_sender(far) in ids


def test_a_socket_that_is_connected_with_itself_has_reached_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = socket.socket()
    own.bind(("127.0.0.1", 0))
    address = own.getsockname()
    own.connect(address)
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: own)

    with pytest.raises(ConnectionRefusedError):
        connected(address, 1.0)
    assert own.fileno() == -1


@pytest.mark.parametrize("said", [b"what?\n", b"HELLO one\n" + b"x" * 5000])
def test_who_is_refused_and_has_hung_up_ends_its_own_connection_only(
    tmp_path: Path, said: bytes
) -> None:
    port = free_port()
    with reading(tmp_path, port, maxLineBytes="1000", **ACK) as reader:
        latest(reader)
        for _ in range(20):
            with call(port) as sock:
                # Closed so, it tells the other side that nothing of it is wanted any more.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.sendall(said)
        with call(port) as sock:
            sock.sendall(b"HELLO other\ngood\n")

            assert received(reader, 1) == ["good"]
