"""The guide of ``flow`` shows what the commands print."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from flowspark.command.main import added_commands, commands

from ..docs.markdown import ROOT, blocks_of, table_rows
from ..flowbuffer.harness import Query
from .shell import flow

GUIDE = ROOT / "docs" / "guide" / "flow.md"

# What another day, another computer or another version of Arrow prints differently.
VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?Z +[\d.]+ (ms|s|min)"), "TIME"),
    (re.compile(r"[\d.,]+ (B|KiB|MiB)"), "SIZE"),
    (re.compile(r"[\d.]+ times"), "SO MANY times"),
    (re.compile(r"[▏▎▍▌▋▊▉█]+"), "BAR"),
    (re.compile(r"\|[ ▁▂▃▄▅▆▇█]+\|"), "SKYLINE"),
    (re.compile(r" +"), " "),
)


def settled(text: str) -> str:
    """Return the text without what varies."""
    for pattern, word in VARYING:
        text = pattern.sub(word, text)
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_the_guide_shows_what_the_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"row {number}" for number in range(400)]
    Query(tmp_path, threshold=1000).batch(0, rows[:200], rows[200:])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    checked = []
    for block in blocks_of(GUIDE):
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("\n" * (block.line - 1) + block.text, str(GUIDE), "exec"), namespace)
        words = block.text.split()
        if block.language != "sh" or words[1] in {"doctor", "completion"}:
            continue
        printed = ""
        for line in block.text.splitlines():
            shown = flow(*shlex.split(line)[1:])
            printed += (shown.out + shown.err).replace(str(tmp_path), "/data")
        assert block.output is not None
        assert settled(printed) == settled(block.output), f"flow.md:{block.line}"
        checked.append(words[1])
    assert set(checked) == {command.name for command in (*commands(), *added_commands())} - {
        "doctor"
    }


def test_the_guide_has_every_command_and_exit_code() -> None:
    names = {command.name for command in (*commands(), *added_commands())} | {"completion"}
    shown = [row[0] for row in table_rows(GUIDE, "`flow`: looking at state from a shell")]
    codes = {row[0] for row in table_rows(GUIDE, "For programs")}

    assert {match[1] for cell in shown if (match := re.search(r"`flow (\w+)", cell))} == names
    assert codes == {"0", "1", "2", "3", "130", "141"}
