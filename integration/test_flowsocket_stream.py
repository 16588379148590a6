"""The source in a real Spark: offsets in the progress, restarts, AvailableNow, word count."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tests.docs.markdown import ROOT, blocks_of

pytestmark = pytest.mark.spark


def wait_for(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not come true in time")


@pytest.fixture
def peer() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        yield listening


def source(spark: SparkSession, peer: socket.socket, folder: Path, **options: str) -> DataFrame:
    return (
        spark.readStream.format("flowsocket")
        .option("host", "127.0.0.1")
        .option("port", peer.getsockname()[1])
        .option("stateLocation", str(folder / "state"))
        .option("reconnectDelay", "50ms")
        .options(**options)
        .load()
    )


class Collected:
    """The rows of each batch, the last execution of which counts."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Any]] = {}

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        self.batches[batch_id] = batch.collect()

    @property
    def values(self) -> list[str]:
        return [row.value for rows in self.batches.values() for row in rows]


def start(lines: DataFrame, folder: Path, collected: Collected) -> StreamingQuery:
    writer = lines.writeStream.foreachBatch(collected)
    return writer.option("checkpointLocation", str(folder / "checkpoint")).start()


def offsets_at(query: StreamingQuery, line: int) -> Any:
    """Return what the progress says of the source, once it has come to a line."""
    found = [progress.sources[0] for progress in query.recentProgress]
    return next((one for one in found if re.search(rf"\b{line}\b", str(one.endOffset))), None)


@pytest.mark.main_path
def test_lines_go_on_after_a_restart_and_the_progress_tells_of_the_spool(
    spark: SparkSession, peer: socket.socket, tmp_path: Path
) -> None:
    collected = Collected()
    lines = source(spark, peer, tmp_path, includeTimestamp="true", onDecodeError="skip")
    query = start(lines, tmp_path, collected)
    with peer.accept()[0] as sock:
        sock.sendall(b"one\n\xff\ntwo\n")
        wait_for(lambda: len(collected.values) == 2)
        told = wait_for(lambda: offsets_at(query, 2))
        query.stop()
    query = start(lines, tmp_path, collected)
    with peer.accept()[0] as sock:
        sock.sendall(b"three\n")
        wait_for(lambda: len(collected.values) == 3)
        query.stop()

    assert collected.values == ["one", "two", "three"]
    assert all(row.timestamp is not None for rows in collected.batches.values() for row in rows)
    assert re.search(r"skippedLines\W+1", str(told.latestOffset))
    assert re.search(r"spoolBytes\W+\d+", str(told.latestOffset))


def test_available_now_ends_by_itself_and_goes_on_next_time(
    spark: SparkSession, peer: socket.socket, tmp_path: Path
) -> None:
    collected = Collected()
    options = {"availableNowIdle": "500ms", "maxRowsPerTrigger": "2"}
    for text in (b"a\nb\nc\n", b"d\n"):
        writer = source(spark, peer, tmp_path, **options).writeStream.foreachBatch(collected)
        query = (
            writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        with peer.accept()[0] as sock:
            sock.sendall(text)
            assert query.awaitTermination(60)

    assert collected.values == ["a", "b", "c", "d"]
    assert [len(rows) for rows in collected.batches.values()] == [2, 1, 1]


def test_wrong_options_are_told_of_where_the_user_sees_them(
    spark: SparkSession, peer: socket.socket, tmp_path: Path
) -> None:
    with pytest.raises(AnalysisException, match=r"\[FLOWSOCKET_OPTION\].*'stateLocation'"):
        spark.readStream.format("flowsocket").option("host", "h").option("port", "1").load()
    with pytest.raises(AnalysisException, match="did you mean 'maxLineBytes'"):
        source(spark, peer, tmp_path, maxLineByte="5")


def test_the_older_of_two_queries_fails_with_the_reason(
    spark: SparkSession, peer: socket.socket, tmp_path: Path
) -> None:
    lines = source(spark, peer, tmp_path)
    old = start(lines, tmp_path / "old", Collected())
    with peer.accept()[0] as first:
        first.sendall(b"one\n")
        wait_for(lambda: old.recentProgress)
        collected = Collected()
        new = start(lines, tmp_path / "new", collected)
        with peer.accept()[0] as second:
            second.sendall(b"two\n")
            wait_for(lambda: collected.values == ["one", "two"])
            with pytest.raises(StreamingQueryException, match=r"\[FLOWSOCKET_TAKEN_OVER\]"):
                old.awaitTermination(60)
            new.stop()


def test_the_words_of_the_readme_are_counted(spark: SparkSession, tmp_path: Path) -> None:
    blocks = [block for block in blocks_of(ROOT / "README.md") if block.language == "py"]
    (block,) = [block for block in blocks if "flowsocket" in block.text]
    code, expected = block.text, block.output or ""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        port = listening.getsockname()[1]

        def push() -> None:
            with listening.accept()[0] as sock:
                sock.sendall(b"to be or not to be\n")

        thread = threading.Thread(target=push)
        thread.start()
        code = code.replace("9999", str(port)).replace('"state"', repr(str(tmp_path / "state")))
        printed: list[str] = []
        namespace = {
            "spark": spark,
            "print": lambda *words: printed.append(" ".join(map(str, words))),
        }
        exec(code, namespace)
        thread.join(60)

    assert "\n".join(printed) == expected.strip()
