"""The reader as Spark drives it: offsets, limits, partitions, replay, trimming, ends of runs."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)
from pyspark.sql.types import StringType, StructField, StructType

from flowspark.errors import OptionError
from pyspark_flowsocket import DefaultSource
from pyspark_flowsocket.endpoints import Listener
from pyspark_flowsocket.errors import LinesGoneError
from pyspark_flowsocket.reader import SocketStreamReader, split_slices
from pyspark_flowsocket.spool import SegmentSlice

from .peers import (
    WAIT_S,
    Peer,
    call,
    free_port,
    hear,
    latest,
    lines,
    options_of,
    reading,
    received,
    report,
    table,
    wait_for,
    wait_until,
)


def fill(reader: SocketStreamReader, peer: Peer, count: int, width: int = 100) -> None:
    latest(reader)
    with peer.accept() as sock:
        sock.sendall(b"".join(b"%0*d\n" % (width, number) for number in range(count)))
        wait_until(reader, count)


def test_a_range_is_the_same_bytes_again_after_a_crash_at_any_parallelism(tmp_path: Path) -> None:
    columns = {"includeTimestamp": "true", "includeSource": "true", "segmentBytes": "1m"}
    with Peer() as peer, reading(tmp_path, peer.port, numPartitions="1", **columns) as reader:
        fill(reader, peer, 60_000)
        before = table(reader, 1234, 56_789).combine_chunks()
        # It is left as a crash would leave it: the next one opens the spool while this one has it.
        for parts in ("1", "2", "7"):
            with reading(tmp_path, peer.port, numPartitions=parts, **columns) as again:
                after = table(again, 1234, 56_789)
                count = len(again.partitions({"line": 1234}, {"line": 56_789}))

                assert after.combine_chunks().equals(before)
                assert count == min(int(parts), 5)


def test_limits_hold_one_by_one_and_together(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port) as reader:
        fill(reader, peer, 10_000)
        assert latest(reader, 5, ReadMaxRows(10)) == 15
        assert 40 <= latest(reader, 0, ReadMaxBytes(5000)) <= 50
        assert latest(reader, 0, ReadMinRows(10_001)) == 0
        assert latest(reader, 0, ReadMinRows(10_000)) == 10_000
        assert isinstance(reader.getDefaultReadLimit(), ReadAllAvailable)
    both = {"maxRowsPerTrigger": "30", "maxBytesPerTrigger": "5000"}
    with reading(tmp_path, peer.port, **both) as reader:
        assert latest(reader) == 30
        assert reader.getDefaultReadLimit() == ReadMaxRows(30)
    with reading(tmp_path, peer.port, maxBytesPerTrigger="5000") as reader:
        assert 40 <= latest(reader) <= 50
        assert reader.getDefaultReadLimit() == ReadMaxBytes(5000)
        assert latest(reader, 9_999) == 10_000


def test_commit_trims_and_a_new_query_begins_at_what_is_retained(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port, segmentBytes="64k") as reader:
        fill(reader, peer, 5000)
        reader.commit({"line": 4000})
        wait_for(lambda: report(reader)["firstLine"] > 2000)
        first = report(reader)["firstLine"]

        assert first <= 4000
        assert lines(reader, 4000, 4001) == [f"{4000:0100d}"]
        with pytest.raises(LinesGoneError):
            reader.partitions({"line": 0}, {"line": 10})
    with reading(tmp_path, peer.port) as reader:
        assert reader.initialOffset() == {"line": first}


def test_a_checkpoint_without_its_spool_is_refused(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port) as reader:
        with pytest.raises(LinesGoneError, match="uid"):
            latest(reader, 100)
        with pytest.raises(LinesGoneError, match="checkpoint location"):
            reader.partitions({"line": 0}, {"line": 5})
        with pytest.raises(OptionError, match="another source"):
            reader.partitions({"part": 0}, {"part": 5})


def test_available_now_takes_what_there_is_and_ends(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port, availableNowIdle="300ms") as reader:
        latest(reader)
        with peer.accept() as sock:
            sock.sendall(b"a\nb\n")
            reader.prepareForTriggerAvailableNow()

        assert lines(reader, 0, latest(reader)) == ["a", "b"]
        assert latest(reader, 2) == 2


def test_available_now_ends_with_the_stream_and_acknowledges(tmp_path: Path) -> None:
    port = free_port()
    ack = {"mode": "listen", "protocol": "ack", "availableNowIdle": "200ms"}
    with reading(tmp_path, port, **ack) as reader:
        latest(reader)
        with call(port) as sock:
            sock.sendall(b"HELLO me\n")
            hear(sock)
            sock.sendall(b"a\n")
            reader.prepareForTriggerAvailableNow()
            assert latest(reader) == 1

            assert hear(sock) == [b"ACK 1"]
            assert sock.recv(10) == b""
        assert latest(reader) == 1
    with Peer() as peer, reading(tmp_path / "x", peer.port, availableNowIdle="1 hour") as reader:
        latest(reader)
        with peer.accept() as sock:
            sock.sendall(b"a\nlast")
        reader.prepareForTriggerAvailableNow()
        assert lines(reader, 0, latest(reader)) == ["a", "last"]


def test_available_now_ends_though_somebody_calls_who_cannot_be_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Listener, "accept", lambda *_: [])
    port = free_port()
    with reading(tmp_path, port, mode="listen", availableNowIdle="200ms") as reader:
        reader.prepareForTriggerAvailableNow()
        ends: list[int] = []
        asking = threading.Thread(target=lambda: ends.append(latest(reader)), daemon=True)
        with call(port):
            asking.start()
            asking.join(WAIT_S)

    assert ends == [0]


def test_available_now_goes_on_behind_a_batch_as_large_as_the_spool(tmp_path: Path) -> None:
    limits = {"segmentBytes": "64k", "maxSpoolBytes": "64k", "availableNowIdle": "10 seconds"}
    limits["storageTimeout"] = "1 minute"  # So long a busy machine may take to write them.
    ends = [0]
    with Peer() as peer:
        for text in (b"x" * 70_000 + b"\n", b"more\n"):
            # The last batch of a run is committed by the next run, when it has something new.
            with reading(tmp_path, peer.port, **limits) as reader:
                reader.prepareForTriggerAvailableNow()
                with peer.accept() as sock:
                    sock.sendall(text)
                ends.append(latest(reader, ends[-1]))

    assert ends == [0, 1, 2]


def test_what_was_not_listened_to_is_not_silent(tmp_path: Path) -> None:
    limits = {"segmentBytes": "64k", "maxSpoolBytes": "64k", "availableNowIdle": "200ms"}
    with Peer() as peer, reading(tmp_path, peer.port, **limits) as reader:
        latest(reader)
        with peer.accept() as sock:
            sock.sendall(b"x" * 70_000 + b"\n")
            wait_for(lambda: report(reader)["isFull"])
            sock.sendall(b"more\n")
            time.sleep(1.2)
            reader.prepareForTriggerAvailableNow()

            assert latest(reader, 1) == 2


def test_stopping_makes_durable_what_was_received(tmp_path: Path) -> None:
    with Peer() as peer:
        with reading(tmp_path, peer.port, segmentInterval="1 hour") as reader:
            latest(reader)
            sock = peer.accept()
            sock.sendall(b"sealed at once\n")
            received(reader, 1)
            sock.sendall(b"waits\n")
            wait_for(lambda: reader._started().intake._pending_bytes)
            assert latest(reader) == 1
        with reading(tmp_path, peer.port) as again:
            assert lines(again, 0, latest(again)) == ["sealed at once", "waits"]
        sock.close()


def test_a_reader_travels_without_its_threads(tmp_path: Path) -> None:
    with Peer() as peer, reading(tmp_path, peer.port) as reader:
        fill(reader, peer, 10)
        (part,) = reader.partitions({"line": 0}, {"line": 10})
        there = pickle.loads(pickle.dumps(reader))
        batches = list(there.read(pickle.loads(pickle.dumps(part))))

        assert sum(batch.num_rows for batch in batches) == 10
        assert there.reportLatestOffset() is None


def test_a_schema_of_ones_own_is_refused(tmp_path: Path) -> None:
    source = DefaultSource(options_of(tmp_path, 1))
    good = StructType([StructField("value", StringType())])
    other = StructType([StructField("line", StringType())])

    assert isinstance(source.streamReader(good), SocketStreamReader)
    with pytest.raises(OptionError, match="value string"):
        source.streamReader(other)


@pytest.mark.parametrize("parts", range(1, 9))
def test_slices_are_split_evenly_and_in_order(parts: int) -> None:
    slices = [SegmentSlice(n, 10 * n, 0, 10) for n in range(3)]
    groups = split_slices(slices, parts)
    flat = [p.first_line + n for group in groups for p in group for n in range(p.begin, p.end)]
    sizes = [sum(piece.end - piece.begin for piece in group) for group in groups]

    assert flat == list(range(30))
    assert len(groups) == parts
    assert max(sizes) - min(sizes) <= 1
