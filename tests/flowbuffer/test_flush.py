"""Emitting what waits in the buffers of a stopped query."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from flowspark.errors import OutputError
from flowstate.checkpoint import CheckpointRecord
from flowstate.errors import CheckpointNotFoundError, CheckpointSupersededError
from pyspark_flowbuffer.flush import flush, main
from pyspark_flowbuffer.publishing import Publisher

from .harness import Query

PAIRS = pa.schema([("k", pa.string()), ("n", pa.int64())])


def test_a_flush_emits_what_waits_once(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=5)
    query.batch(0, ["a", "b"], ["c"], [])

    flushed = flush(str(tmp_path / "checkpoint"))

    assert flushed.rows == 3
    assert flushed.files == tuple(query.files())
    assert list(query.files().values()) == [["a", "b"], ["c"]]
    assert query.buffers() == [[], [], []]
    again = flush(str(tmp_path / "checkpoint"))
    assert (again.rows, again.files, again.checkpoint_id) == (0, (), flushed.checkpoint_id)


def test_a_query_goes_on_after_a_flush(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=2)
    query.batch(0, ["a"])
    flush(query.storage.url)

    # Spark did not learn of the end of batch 0, and runs it again.
    query.batch(0, ["a"])
    query.batch(1, ["b", "c", "d"])

    assert sorted(query.published()) == ["a", "b", "c"]
    assert query.buffers() == [["d"]]


def test_a_flush_of_a_running_query_cannot_emit_twice(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=2)
    query.batch(0, ["a"])
    running = query.tasks(1, [["b"]])
    flush(query.storage.url)

    with pytest.raises(CheckpointSupersededError, match="The buffers were flushed"):
        query.committer.commit(running, 1)
    query.batch(1, ["b"])

    assert query.published() == ["a"]
    assert query.buffers() == [["b"]]


def test_a_flush_that_comes_second_emits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(tmp_path, threshold=9)
    query.batch(0, ["a"])
    import pyspark_flowbuffer.flush as module

    emit_list = module._emit_list

    def meanwhile(*arguments: object) -> object:
        if query.storage.checkpoint_ids() == [1]:
            query.batch(1, ["b"])
        return emit_list(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_emit_list", meanwhile)
    with pytest.raises(CheckpointSupersededError):
        flush(query.storage.url)

    assert query.published() == []
    assert query.staged() == []
    assert query.buffers() == [["a", "b"]]


def test_a_sweep_leaves_the_files_of_a_flush_of_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(tmp_path, threshold=100)
    for batch_id in range(7):
        query.batch(batch_id, [f"r{batch_id}"])
    publish = Publisher.publish

    def swept_before(publisher: Publisher, record: CheckpointRecord) -> None:
        query.committer._tidy_up(query.storage.read(8), 7)
        publish(publisher, record)

    query.batch(7, ["r7"])
    monkeypatch.setattr(Publisher, "publish", swept_before)
    flush(query.storage.url)
    assert sorted(query.published()) == [f"r{batch_id}" for batch_id in range(8)]


def test_a_flush_knows_the_partition_columns_and_the_format(tmp_path: Path) -> None:
    query = Query(
        tmp_path, threshold=9, schema=PAIRS, partitionBy="k", fileFormat="json", uid="my sink"
    )
    query.batch(0, [("a", 1), ("b", 2), ("a", 3)])

    flushed = flush(str(tmp_path / "checkpoint"))

    texts = {name.split("/")[0]: (tmp_path / "out" / name).read_text() for name in flushed.files}
    assert texts == {"k=a": '{"n":1}\n{"n":3}\n', "k=b": '{"n":2}\n'}


def test_a_location_without_a_sink_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="give the query's checkpointLocation"):
        flush(str(tmp_path))


def test_a_location_with_several_sinks_is_refused(tmp_path: Path) -> None:
    for query_id in ("one", "two"):
        Query(tmp_path, threshold=9, query_id=query_id).batch(0, ["a"])

    with pytest.raises(OutputError, match="several sinks below"):
        flush(str(tmp_path / "checkpoint"))


def test_the_command_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = Query(tmp_path, threshold=9)
    query.batch(0, ["a", "b"])
    url = str(tmp_path / "checkpoint")

    assert main([url, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("2 rows wait in the buffers of ")
    assert query.published() == []
    assert main([url]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("2 rows emitted from ")
    assert query.published() == ["a", "b"]
    assert main([url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 0


def test_the_command_reports_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("[FLOWSTATE_NO_CHECKPOINT] there is no checkpoint of a flowbuffer sink")
    assert error.count("\n") == 1


def test_the_command_refuses_an_option_without_a_value(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--storage", "key"])
