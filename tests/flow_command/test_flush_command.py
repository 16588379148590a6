from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from flowspark import SinkContext, SinkFunction

from ..flowbuffer.harness import Query
from .shell import flow


def test_a_flush_emits_what_waits_once(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=10)
    query.batch(0, ["a", "b", "c"], ["d"])
    url = tmp_path / "checkpoint"

    waiting = flow("flush", url, "--dry-run")
    assert waiting.code == 0
    assert "4 rows would be emitted" in waiting.out
    assert query.published() == []
    shown = flow("flush", url)
    assert "4 rows emitted" in shown.out
    assert "The newest checkpoint is chk-2." in shown.out
    assert sorted(query.published()) == ["a", "b", "c", "d"]
    again = flow("flush", url, "--json").json
    assert (again["rows"], again["checkpoint_id"]) == (0, 2)


def test_state_without_a_sink_is_refused(words: Path) -> None:
    shown = flow("flush", words)

    assert shown.code == 3
    assert "no checkpoint of a flowbuffer sink" in shown.err


def test_an_empty_location_is_not_the_folder_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(tmp_path, threshold=10)
    query.batch(0, ["a"])
    monkeypatch.chdir(tmp_path)

    assert flow("flush", "").code == 3
    assert query.published() == []


def test_sink_options_may_be_secrets(tmp_path: Path) -> None:
    shown = flow("flush", tmp_path, "--sink", "hunter22")

    assert shown.code == 2
    assert "--sink takes NAME=VALUE" in shown.err
    assert "hunter22" not in shown.err


class FailingSink(SinkFunction):
    """Says in its error what it was given."""

    def write(self, batch: pa.RecordBatch, context: SinkContext) -> None:
        raise RuntimeError(f"no login with {self.options['password']}")


def test_a_failing_sink_does_not_tell_its_options(tmp_path: Path) -> None:
    function = f"{FailingSink.__module__}:{FailingSink.__name__}"
    Query(tmp_path, threshold=10, sinkFunction=function).batch(0, ["a"])

    shown = flow("flush", tmp_path / "checkpoint", "--sink", "password=hunter22")
    assert shown.code == 3
    assert "no login with ***" in shown.err
    assert "hunter22" not in shown.err
