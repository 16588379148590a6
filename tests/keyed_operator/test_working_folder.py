"""What is removed from the local disk, and what is not."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from flowspark.errors import OptionError

from .functions import Sum
from .harness import Query, row_factory

WEEKS_AGO = time.time() - 30 * 86_400


def age(folder: Path) -> None:
    os.utime(folder, (WEEKS_AGO, WEEKS_AGO))


def run(folder: Path, uid: str) -> set[str]:
    """Run an operator, and return the names of the folders that are there then."""
    query = Query(folder=folder, factory=row_factory(Sum()), uid=uid)
    query.batch(0, [("a", 1)])
    query.restarted().batch(1, [("a", 1)])
    return {entry.name for entry in (folder / "work").iterdir()}


def test_the_working_state_of_an_operator_of_long_ago_is_removed(tmp_path: Path) -> None:
    (old,) = run(tmp_path, "old")
    other = tmp_path / "work" / old
    (other / "0-63-of-128").mkdir(exist_ok=True)
    age(other)

    assert old not in run(tmp_path, "new")


def test_what_else_is_in_the_working_folder_is_left_alone(tmp_path: Path) -> None:
    hexadecimal = "0123456789abcdef" * 2
    for name in ("photos", hexadecimal):
        mine = tmp_path / "work" / name / "album"
        mine.mkdir(parents=True)
        (mine / "picture").touch()
        age(mine.parent)
    (tmp_path / "work" / "letter").touch()
    age(tmp_path / "work" / "letter")

    assert run(tmp_path, "new") >= {"photos", hexadecimal, "letter"}
    assert (tmp_path / "work" / "photos" / "album" / "picture").exists()
    assert (tmp_path / "work" / hexadecimal / "album" / "picture").exists()


def test_a_folder_that_somebody_else_has_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    query = Query(folder=tmp_path, factory=row_factory(Sum()), settings={"working_folder": None})
    query.batch(0, [("a", 1)])
    assert (tmp_path / f"flowspark-{os.getuid()}").is_dir()
    other = os.getuid() + 1
    (tmp_path / f"flowspark-{other}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: other)

    with pytest.raises(OptionError, match=f"flowspark-{other} belongs to the user {other - 1}"):
        query.batch(1, [("a", 1)])
