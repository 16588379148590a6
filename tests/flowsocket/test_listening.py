"""Connections that peers open, some slow, some hostile; and senders that follow the protocol."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from flowspark.errors import OptionError
from pyspark_flowsocket.connections import Connection
from pyspark_flowsocket.errors import ConnectionLostError
from pyspark_flowsocket.intake import Intake
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
    wait_hang_up,
    wait_until,
    write_lines,
)

ACK = {"mode": "listen", "protocol": "ack"}


def test_lines_of_many_clients_are_all_there(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, mode="listen", includeSource="true") as reader:
        latest(reader)

        def push(name: int) -> None:
            with call(port) as sock:
                for number in range(200):
                    sock.sendall(b"%d-%d\n" % (name, number))

        threads = [threading.Thread(target=push, args=(name,)) for name in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        found = received(reader, 2000)

    assert len(found) == 2000
    for name in range(10):
        own = [line for line in found if line.startswith(f"{name}-")]
        assert own == [f"{name}-{number}" for number in range(200)]


def test_slow_silent_and_hostile_clients_stall_nobody(tmp_path: Path) -> None:
    port = free_port()
    limits = {"maxLineBytes": "1000", "maxConnections": "4", "onDecodeError": "fail"}
    with reading(tmp_path, port, mode="listen", **limits) as reader:
        latest(reader)
        with call(port), call(port) as slow:  # The first one never says a word.
            slow.sendall(b"half a li")
            with call(port) as endless:
                endless.sendall(b"before\n" + b"x" * 5000)
                wait_hang_up(endless)
            with call(port) as broken:
                broken.sendall(b"good\n\xff\xff\nnot taken\n")
                wait_hang_up(broken)
            with call(port) as good:
                good.sendall(b"fine\n")
                assert received(reader, 3) == ["before", "good", "fine"]
                slow.sendall(b"ne\n")
                assert received(reader, 4)[-1] == "half a line"


def test_a_stream_that_is_none_of_the_charset_ends_that_connection_only(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, charset="utf-16", **ACK) as reader:
        latest(reader)
        with call(port) as sock:
            sock.sendall(b"HELLO one\n")
            hear(sock)
            sock.sendall(b"no byte order mark\n")
            assert hear(sock)[0].startswith(b"ERR UNDECODABLE")
        with call(port) as sock:
            sock.sendall(b"HELLO other\n")
            hear(sock)
            sock.sendall("good\n".encode("utf-16"))

            assert received(reader, 1) == ["good"]


def test_many_clients_at_once_take_no_more_memory_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending: list[int] = []
    count = Intake._count_pending

    def counting(intake: Intake, added: int) -> None:
        count(intake, added)
        pending.append(intake._pending_bytes)

    monkeypatch.setattr(Intake, "_count_pending", counting)
    port = free_port()
    limits = {"segmentBytes": "64k", "maxSpoolBytes": "64k"}
    with reading(tmp_path, port, mode="listen", **limits) as reader:
        latest(reader)
        clients = [call(port) for _ in range(30)]
        clients[0].sendall(b"x" * 99_999 + b"\n")
        wait_for(lambda: report(reader)["isFull"])
        # Meanwhile the system takes what they send, so that all are readable when it goes on.
        for client in clients:
            client.sendall((b"x" * 99 + b"\n") * 640)
        done = 0
        while done < 30 * 640 + 1:
            wait_until(reader, done + 1, start=done)
            done = latest(reader, done)
        for client in clients:
            client.close()

    # A connection gets a segment's worth in its turn, and the turn of the last may begin just
    # below the limit.
    assert max(pending) <= 3 * (64 << 10)


def test_clients_that_never_stop_leave_turns_to_others(tmp_path: Path) -> None:
    port = free_port()
    limits = {"segmentBytes": "4k", "maxSpoolBytes": "4k", "idleTimeout": "0s"}
    with reading(tmp_path, port, mode="listen", **limits) as reader:
        latest(reader)
        greedy = [call(port) for _ in range(3)]
        polite = call(port)
        for client in greedy:
            client.setblocking(False)
        done, turns, seen = 0, 0, False
        deadline = time.monotonic() + WAIT_S
        while not seen and time.monotonic() < deadline:
            for client in greedy:
                with suppress(BlockingIOError):
                    client.send((b"x" * 99 + b"\n") * 640)
            turns += 1
            if turns == 10:
                polite.sendall(b"please\n")
            end = latest(reader, done)
            seen = "please" in lines(reader, done, end)
            done = end
        for client in (*greedy, polite):
            client.close()

    assert seen


def test_as_many_files_may_be_open_as_there_may_be_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"now": (500, 5000)}
    monkeypatch.setattr("resource.getrlimit", lambda _: limits["now"])
    monkeypatch.setattr("resource.setrlimit", lambda _, wanted: limits.update(now=wanted))
    for connections, soft in (("100", 500), ("1000", 1128)):
        with reading(tmp_path, free_port(), mode="listen", maxConnections=connections) as reader:
            latest(reader)
            wait_for(lambda: reader._started().receiver._is_reached)

        assert limits["now"] == (soft, 5000)
    with (
        reading(tmp_path, free_port(), mode="listen", maxConnections="5000") as reader,
        pytest.raises(OptionError, match="at most 4872"),
    ):
        wait_for(lambda: latest(reader))


def test_clients_that_say_nothing_leave_nothing_behind(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, mode="listen", onPartialLine="drop") as reader:
        latest(reader)
        for _ in range(20):
            with call(port) as sock:
                sock.sendall(b"no line")
        intake = reader._started().intake

        wait_for(lambda: intake._partial_lines == 20)
        assert intake._inflows == []


def test_clients_above_the_limit_are_turned_away(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, mode="listen", maxConnections="2") as reader:
        latest(reader)
        kept = [call(port), call(port)]
        wait_for(lambda: report(reader)["connections"] == 2)
        with call(port) as third:
            assert third.recv(10) == b""
        kept[0].sendall(b"kept\n")

        assert received(reader, 1) == ["kept"]
        assert report(reader)["rejectedConnections"] == 1
        for sock in kept:
            sock.close()


def test_idle_clients_are_sent_away(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, mode="listen", idleTimeout="200ms") as reader:
        latest(reader)
        with call(port) as sock:
            assert sock.recv(10) == b""


def test_a_port_that_is_taken_is_told_of(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port, mode="listen", connectTimeout="100ms") as one:
        with pytest.raises(ConnectionLostError, match="cannot listen") as caught:
            wait_for(lambda: latest(one))

        assert "'port'" in str(caught.value)


def test_a_new_owner_gets_the_port_of_the_old_one(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, mode="listen") as old:
        latest(old)
        with call(port) as sock:
            sock.sendall(b"one\n")
            assert received(old, 1) == ["one"]
        with reading(tmp_path, port, mode="listen") as new:
            latest(new)
            wait_for(lambda: new._started().receiver._is_reached)
            with call(port) as sock:
                sock.sendall(b"two\n")
                assert received(new, 2) == ["one", "two"]


# Senders that follow the protocol


def test_a_sender_hears_where_to_resume_and_what_is_durable(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, **ACK) as reader:
        latest(reader)
        with call(port) as sock:
            sock.sendall(b"HELLO one\n")
            assert hear(sock) == [b"RESUME 0"]
            sock.sendall(b"a\nb\nhalf")
            assert hear(sock) == [b"ACK 2"]
            assert latest(reader) == 2
        with call(port) as sock:
            sock.sendall(b"HELLO one\n")
            assert hear(sock) == [b"RESUME 2"]
        with call(port) as sock:
            sock.sendall(b"HELLO other\n")
            assert hear(sock) == [b"RESUME 0"]
    with reading(tmp_path, port, **ACK) as reader:
        latest(reader)
        with call(port) as sock:
            sock.sendall(b"HELLO one\n")

            assert hear(sock) == [b"RESUME 2"]
        assert received(reader, 2) == ["a", "b"]


def test_skipped_lines_count_for_the_sender(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, onDecodeError="skip", **ACK) as reader:
        latest(reader)
        with call(port) as sock:
            sock.sendall(b"HELLO one\n")
            hear(sock)
            sock.sendall(b"\xff\n")
            assert hear(sock) == [b"ACK 1"]
        with call(port) as sock:
            sock.sendall(b"HELLO one\n")
            assert hear(sock) == [b"RESUME 1"]
        assert latest(reader) == 0


def test_segments_of_skipped_lines_do_not_pile_up(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, onDecodeError="skip", **ACK) as reader:
        latest(reader)
        with call(port) as sock:
            sock.sendall(b"HELLO one\n")
            hear(sock)
            sock.sendall(b"taken\n")
            hear(sock)
            reader.commit({"line": 1})
            for number in range(2, 202):
                sock.sendall(b"\xff\n")
                assert hear(sock) == [b"ACK %d" % number]
            sock.sendall(b"more\n")
            hear(sock)

        assert report(reader)["segments"] < 100
        assert lines(reader, 1, latest(reader, 1)) == ["more"]
    with reading(tmp_path, port, onDecodeError="skip", **ACK) as reader:
        latest(reader, 1)
        with call(port) as sock:
            sock.sendall(b"HELLO one\n")
            assert hear(sock) == [b"RESUME 202"]


def test_a_second_connection_of_a_sender_replaces_the_first(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, **ACK) as reader:
        latest(reader)
        first, second = call(port), call(port)
        first.sendall(b"HELLO one\n")
        hear(first)
        first.sendall(b"a\n")
        assert hear(first) == [b"ACK 1"]
        second.sendall(b"HELLO one\n")

        assert hear(second) == [b"RESUME 1"]
        assert first.recv(10) == b""
        second.sendall(b"b\n")
        assert received(reader, 2) == ["a", "b"]
        for sock in (first, second):
            sock.close()


def test_a_sender_that_comes_back_before_its_lines_are_durable_gets_none_twice(
    tmp_path: Path,
) -> None:
    port = free_port()
    expected = [f"line {number}" for number in range(20)]
    with reading(tmp_path, port, segmentInterval="200ms", **ACK) as reader:
        latest(reader)
        done = 0
        for _ in range(200):
            with call(port) as sock:
                sock.sendall(b"HELLO one\n")
                done = int(hear(sock)[0].removeprefix(b"RESUME "))
                if done == len(expected):
                    break
                sock.sendall("".join(f"{line}\n" for line in expected[done : done + 2]).encode())
                time.sleep(0.02)

        assert done == 20
        assert received(reader, 20) == expected


def test_a_sender_that_waits_for_the_store_costs_nothing_meanwhile(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, segmentInterval="1 second", **ACK) as reader:
        latest(reader)
        with call(port) as sock:
            sock.sendall(b"HELLO one\n")
            hear(sock)
            sock.sendall(b"a\n")
            assert hear(sock) == [b"ACK 1"]
            sock.sendall(b"b\n")
        wait_for(lambda: report(reader)["connections"] == 0)
        before = time.process_time()
        with call(port) as sock:
            # It does not wait for the answer, so there is something to read all the time.
            sock.sendall(b"HELLO one\n")
            time.sleep(0.1)
            sock.sendall(b"c\n")
            assert hear(sock) == [b"RESUME 2"]

        assert time.process_time() - before < 0.3
        assert received(reader, 3) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"GET / HTTP/1.1\r\n", b"ERR PROTOCOL"),
        (b"HELLO \n", b"ERR PROTOCOL"),
        (b"HELLO two words\n", b"ERR PROTOCOL"),
        (b"x" * 600, b"ERR PROTOCOL"),
        (b"HELLO third\n", b"ERR PROTOCOL"),
    ],
    ids=["http", "empty", "words", "endless", "too many"],
)
def test_a_peer_without_the_protocol_is_refused(tmp_path: Path, said: bytes, code: bytes) -> None:
    port = free_port()
    with reading(tmp_path, port, maxSenders="2", **ACK) as reader:
        latest(reader)
        for name in (b"one", b"two"):
            with call(port) as sock:
                sock.sendall(b"HELLO %s\n" % name)
                hear(sock)
                sock.sendall(b"x\n")
                hear(sock)
        with call(port) as sock:
            sock.sendall(said)

            assert hear(sock)[0].startswith(code)
            assert sock.recv(10) == b""


def test_a_bad_line_is_refused_with_its_code_and_not_acknowledged(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, maxLineBytes="10", **ACK) as reader:
        latest(reader)
        with call(port) as sock:
            sock.sendall(b"HELLO one\n")
            hear(sock)
            sock.sendall(b"a\n" + b"x" * 50 + b"\nb\n")
            assert hear(sock)[0].startswith(b"ERR LINE_TOO_LONG")
        with call(port) as sock:
            sock.sendall(b"HELLO one\n")
            assert hear(sock) == [b"RESUME 1"]
        assert received(reader, 1) == ["a"]


def test_a_bad_line_that_did_not_wait_for_the_answer_ends_that_connection_only(
    tmp_path: Path,
) -> None:
    port = free_port()
    limits = {"maxLineBytes": "100", "segmentInterval": "1 second"}
    with reading(tmp_path, port, **limits, **ACK) as reader:
        latest(reader)
        with call(port) as sock:
            sock.sendall(b"HELLO one\n")
            hear(sock)
            sock.sendall(b"a\n")
            hear(sock)
            sock.sendall(b"b\n")
        wait_for(lambda: report(reader)["connections"] == 0)
        # Its answer waits until the line above is durable.
        with call(port) as sock:
            sock.sendall(b"HELLO one\n" + b"x" * 1000)
            resumed, refused = hear(sock, 2)
            assert resumed == b"RESUME 2"
            assert refused.startswith(b"ERR LINE_TOO_LONG")
        with call(port) as sock:
            sock.sendall(b"HELLO other\n")
            hear(sock)
            sock.sendall(b"c\n")

            assert received(reader, 3) == ["a", "b", "c"]


def test_the_protocol_works_on_a_connection_that_the_source_opens(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port, protocol="ack") as reader:
        latest(reader)
        with peer.accept() as sock:
            sock.sendall(b"HELLO one\n")
            assert hear(sock) == [b"RESUME 0"]
            sock.sendall(b"a\n")
            assert hear(sock) == [b"ACK 1"]


# Encryption


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate for localhost, which is its own authority, and a stranger's."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("own", "strange"):
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
                *("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"),
            ],
            check=True,
            capture_output=True,
        )
    return folder


def tls_options(folder: Path, **more: str) -> dict[str, str]:
    return {"tls": "true", "host": "localhost", "tlsCaFile": str(folder / "own.crt"), **more}


def serve_tls(peer: Peer, folder: Path, name: str = "own") -> ssl.SSLSocket | None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    try:
        return context.wrap_socket(peer.accept(), server_side=True)
    except (ssl.SSLError, OSError):
        return None


def test_lines_come_through_tls(tmp_path: Path, certificates: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port, **tls_options(certificates)) as reader:
        latest(reader)
        sock = serve_tls(peer, certificates)
        assert sock is not None
        text = [f"{number} secret" for number in range(50_000)]
        sock.sendall("".join(f"{line}\n" for line in text).encode())

        assert received(reader, 50_000) == text
        sock.close()


def test_a_stranger_is_not_believed_unless_told_so(tmp_path: Path, certificates: Path) -> None:
    options = tls_options(certificates, reconnectAttempts="0")
    with Peer() as peer, reading(tmp_path, peer.port, **options) as reader:
        latest(reader)
        serve_tls(peer, certificates, "strange")
        with pytest.raises(ConnectionLostError, match="CERTIFICATE_VERIFY_FAILED"):
            wait_for(lambda: latest(reader))
    options = tls_options(certificates, tlsVerify="false")
    with Peer() as peer, reading(tmp_path, peer.port, **options) as reader:
        latest(reader)
        sock = serve_tls(peer, certificates, "strange")
        assert sock is not None
        sock.sendall(b"hm\n")
        assert received(reader, 1) == ["hm"]
        sock.close()


def test_clients_with_a_certificate_push_lines_through_tls(
    tmp_path: Path, certificates: Path
) -> None:
    expected = write_lines(tmp_path / "file", 30_000)
    port = free_port()
    bundle = tmp_path / "own.pem"
    bundle.write_text(
        (certificates / "own.crt").read_text() + (certificates / "own.key").read_text()
    )
    options = {**tls_options(certificates), "tlsCertFile": str(bundle), **ACK}
    with reading(tmp_path, port, **options) as reader:
        latest(reader)
        hangers = [call(port), call(port)]
        hangers[0].sendall(b"no handshake at all\n")
        arguments = [str(tmp_path / "file"), "localhost", str(port), "--quiet"]
        given = ["--tls-ca-file", str(certificates / "own.crt"), "--attempts", "0"]
        assert send_main([*arguments, *given]) == 1
        assert send_main([*arguments, *given, "--tls-cert-file", str(bundle)]) == 0

        assert lines(reader, 0, latest(reader)) == expected
        for sock in hangers:
            sock.close()


def test_a_key_that_cannot_be_used_is_told_of(tmp_path: Path, certificates: Path) -> None:
    options = {"tls": "true", "tlsCertFile": str(certificates / "own.crt"), "mode": "listen"}
    with (
        reading(tmp_path, free_port(), **options) as reader,
        pytest.raises(ConnectionLostError, match="tlsKeyFile"),
    ):
        latest(reader)


def test_a_sender_that_does_not_read_acknowledgements_stalls_nobody(tmp_path: Path) -> None:
    port = free_port()
    with reading(tmp_path, port, segmentBytes="4k", **ACK) as reader:
        latest(reader)
        deaf = call(port)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.sendall(b"HELLO deaf\n")
        for _ in range(100):
            deaf.sendall(b"x\n" * 1000)
        wait_for(lambda: latest(reader) == 100_000)
        with call(port) as sock:
            sock.sendall(b"HELLO good\n")
            hear(sock)
            sock.sendall(b"a\n")

            assert hear(sock) == [b"ACK 1"]
        deaf.close()


def test_a_sender_that_reads_acknowledgements_late_gets_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes_nothing = threading.Event()
    send = Connection.send
    monkeypatch.setattr(
        Connection, "send", lambda self: None if takes_nothing.is_set() else send(self)
    )
    port = free_port()
    with reading(tmp_path, port, **ACK) as reader:
        latest(reader)
        with call(port) as sock:
            sock.sendall(b"HELLO late\n")
            hear(sock)
            takes_nothing.set()
            for count in (1, 2):
                sock.sendall(b"x\n")
                wait_until(reader, count)
            (connection,) = reader._started().receiver._connections
            wait_for(lambda: connection.outgoing)
            takes_nothing.clear()
            heard = hear(sock)
            while heard[-1] != b"ACK 2":
                heard += hear(sock)
