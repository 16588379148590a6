"""The example that the README shows, run as its readers run it: killed, and started again."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .markdown import ROOT, blocks_of

TOUR = ROOT / "docs" / "examples" / "state_tour.py"
LINE = "to be or not to be"
TIMEOUT_S = 60


def run_tour(*arguments: object, folder: Path) -> list[str]:
    """Run the example until it has killed itself, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(TOUR), *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert done.stderr == ""
    assert done.returncode == -signal.SIGKILL
    return done.stdout.splitlines()


def keyed_lines(runs: int) -> set[str]:
    """Return what must be found of the keys after so many runs, whatever the parallelism."""
    words = LINE.split()
    following = [*words[1:], "."]
    found = set()
    for word in words:
        places = [place for place, other in enumerate(words) if other == word]
        pairs = {(following[place], place) for place in places}
        # A map has one entry per key: of several places of a pair the last one stays.
        latest = sorted(dict(sorted(pairs, key=lambda pair: pair[1])).items())
        found.add(
            f"key {word}: count {len(places) * runs}, places {places * runs}, next {latest}, "
            f"last {max(places)}, mean {sum(places) / len(places)}"
        )
    return found


def parts(lines: list[str], kind: str) -> dict[int, list[str]]:
    """Return the lines of one kind of state by subtask, without their beginnings."""
    found: dict[int, list[str]] = {}
    for line in lines:
        if match := re.fullmatch(rf"(\d+) {kind} (.*)", line):
            found.setdefault(int(match.group(1)), []).append(match.group(2))
    return found


@pytest.mark.parametrize("on_disk", [False, True], ids=["in-memory", "in-lmdb"])
def test_every_type_of_state_survives_kill_9_and_other_parallelisms(
    tmp_path: Path, on_disk: bool
) -> None:
    working = ["working"] if on_disk else []
    parallelism_before = 0
    for runs, parallelism in enumerate([2, 3, 5, 5, 1]):
        lines = run_tour("state", parallelism, *working, folder=tmp_path)

        assert lines[0] == f"restored: {f'checkpoint {runs}' if runs else 'nothing'}"
        assert lines[-2:] == [f"committed: checkpoint {runs + 1}", "killed"]
        found = [line.partition(" ")[2] for line in lines if " key " in line]
        assert len(found) == len(set(found))
        assert set(found) == (keyed_lines(runs) if runs else set())
        timers = sorted(timer for some in parts(lines, "timer").values() for timer in some)
        assert timers == (["of be at 1000", "of or at 2000", "of to at 0"] if runs else [])

        lists = [ast.literal_eval(text) for (text,) in parts(lines, "list").values()]
        assert len(lists) == parallelism
        assert Counter(word for some in lists for word in some) == Counter(LINE.split() * runs)
        if parallelism != parallelism_before:
            assert max(map(len, lists)) - min(map(len, lists)) <= 1
        owners = [f"subtask {index}" for index in range(parallelism_before)]
        assert parts(lines, "union") == {index: [repr(owners)] for index in range(parallelism)}
        rules = [("line", LINE)] if runs else []
        assert parts(lines, "broadcast") == {index: [repr(rules)] for index in range(parallelism)}
        parallelism_before = parallelism


def test_the_readme_shows_what_the_example_prints(tmp_path: Path) -> None:
    (block,) = [
        block
        for block in blocks_of(ROOT / "README.md")
        if block.language == "sh" and block.output is not None
    ]
    commands = [line.split() for line in block.text.splitlines()]

    shown = []
    for command in commands:
        assert command[:2] == [".venv/bin/python", "docs/examples/state_tour.py"]
        shown += run_tour(*command[2:], folder=tmp_path)
    assert "".join(f"{line}\n" for line in shown) == block.output


def test_wrong_arguments_are_answered_with_the_right_ones(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TOUR)], capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert done.returncode == 1
    assert "FOLDER PARALLELISM [WORKING_FOLDER]" in done.stderr
