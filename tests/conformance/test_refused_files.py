"""What is not a vector file is said to be none, and nothing passes silently."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flowstate.testing.conformance.__main__ import main
from flowstate.testing.conformance.formats import FORMATS

from .documents import VECTORS, keyed, step, write

CONTENTS = [
    pytest.param(b"{", "is not JSON", id="half-an-object"),
    pytest.param(b"", "is not JSON", id="no-bytes"),
    pytest.param(b"\xff\xfe\x00", "is not JSON", id="not-text"),
    pytest.param(b"[" * 100_000, "is not JSON", id="too-deep"),
    pytest.param(b"[1, 2]", "has no object at its top", id="a-list"),
    pytest.param(b"{}", "has only []", id="an-empty-object"),
    pytest.param(b'{"cases": []}', "has no cases", id="no-cases"),
    pytest.param(b'{"keys": []}', "has no cases", id="an-empty-table"),
    pytest.param(b'{"keys": [], "errors": {}}', "has only", id="a-table-that-is-an-object"),
    pytest.param(
        b'{"threshold": 5, "events": [], "restore_examples": 1}', "has only", id="odd-examples"
    ),
    pytest.param(b'{"cases": [1]}', "case 1 is 1", id="a-case-that-is-a-number"),
    pytest.param(b'{"cases": [{"id": "x"}]}', "case 1 (x) has only", id="an-unknown-case"),
]


@pytest.mark.parametrize(("contents", "why"), CONTENTS)
def test_a_file_of_no_known_format_is_refused(
    contents: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.json").write_bytes(contents)
    code = main([str(tmp_path)])
    printed = capsys.readouterr().out

    assert code == 2
    assert f"odd.json: {why}" in printed
    assert all(name in printed for name in FORMATS)
    assert printed.splitlines()[-1] == "0 passed, 0 failed, 0 skipped"


def test_the_other_files_are_replayed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.json").write_text("{")
    timers = json.loads((VECTORS / "timers.json").read_text(encoding="utf-8"))
    write(tmp_path, timers, "good.json")
    code = main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()

    assert code == 2
    assert lines[0] == "good.json: 16 passed, 0 failed, 0 skipped"
    assert lines[-1] == "16 passed, 0 failed, 0 skipped"


def test_a_row_that_no_table_has_fails_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [7, "text", [], None, {}]
    sections = ("murmurHash", "keys", "ranges", "default_max_parallelism", "errors")
    good = {"default_max_parallelism": 128, "parallelism": 1}
    table = dict.fromkeys(sections, rows)
    write(tmp_path, {**table, "default_max_parallelism": [*rows, good]})
    code = main([str(tmp_path)])

    assert code == 1
    assert "1 passed, 25 failed, 0 skipped" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "document",
    [
        {"cases": [keyed("none", {"type": "value"})]},
        {"cases": [{"id": "none", "on_timer_actions": {}, "steps": []}]},
        {"threshold": 5, "parallelism": 1, "events": []},
    ],
    ids=["keyed-state", "timers", "trace"],
)
def test_a_script_without_a_step_does_not_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: dict[str, Any]
) -> None:
    write(tmp_path, document)
    code = main([str(tmp_path)])

    assert code == 1
    assert "has no step to replay: []" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_the_terminal_cannot_show_is_printed_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    case = keyed("half a \ud83d", {"type": "value"}, step(0, "k", "value", "\ud83d"))
    write(tmp_path, {"cases": [case]})
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding, write_through=True))

    assert main([str(tmp_path)]) == 1
    assert b"FAILED half a \\ud83d" in printed.getvalue()


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_a_vector_file_is_an_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.md").write_text("no vectors here")
    code = main([str(tmp_path / name)])
    captured = capsys.readouterr()

    assert code == 2
    assert captured.out == ""
    assert str(tmp_path / name) in captured.err


def test_a_case_that_no_file_has_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([str(VECTORS), "--case", "value_bounday"])

    assert code == 2
    assert "'value_bounday'" in capsys.readouterr().err


def test_an_unknown_backend_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(VECTORS), "--backend", "rocksdb"])

    assert stopped.value.code == 2
    assert "lmdb" in capsys.readouterr().err
