from __future__ import annotations

from pathlib import Path

import pytest

from flowstate import CheckpointStorage

from .shell import flow
from .states import run_once, unsealed


@pytest.fixture
def location(tmp_path: Path) -> Path:
    """Return a location with three files that are left over, and one that is not."""
    run_once(tmp_path / "words", keys=["a"], checkpoints=3, checkpoints_retained=1)
    folder = tmp_path / "words"
    (folder / "shared").mkdir(exist_ok=True)
    (folder / "taskowned").mkdir()
    (folder / "shared" / "2-dead-abc.arrow").write_bytes(b"x" * 1000)
    (folder / "shared" / "4-alive-abc.arrow").write_bytes(b"x" * 10)
    (folder / "taskowned" / "1-dead-abc.arrow").write_bytes(b"x" * 24)
    unsealed(folder, 2)
    return tmp_path


def left(location: Path) -> set[str]:
    """Return the files that no checkpoint refers to."""
    record = CheckpointStorage(location / "words").latest()
    files = () if record is None else record.files
    needed = {"_metadata", *(path.rpartition("/")[2] for path in files)}
    return {path.name for path in location.rglob("*") if path.is_file()} - needed


EVERYTHING = {"2-dead-abc.arrow", "4-alive-abc.arrow", "1-dead-abc.arrow", "part-0"}


def test_a_dry_run_deletes_nothing(location: Path) -> None:
    shown = flow("sweep", location, "--dry-run")

    assert shown.code == 0
    assert "3 files, 1.3 KiB would be deleted." in shown.out
    assert left(location) == EVERYTHING


def test_what_no_checkpoint_needs_goes_and_the_rest_stays(location: Path) -> None:
    shown = flow("sweep", location, "--yes")

    assert shown.code == 0
    assert "Deleted 3 files, 1.3 KiB." in shown.out
    assert left(location) == {"4-alive-abc.arrow"}
    assert flow("verify", location).code == 0
    again = flow("sweep", location, "--yes")
    assert again.code == 0
    assert "words: nothing is left over" in again.out


def test_nobody_to_ask_is_a_refusal(location: Path) -> None:
    for options in ([], ["--json"]):
        shown = flow("sweep", location, *options)

        assert shown.code == 2
        assert "--yes" in shown.err + shown.out
        assert left(location) == EVERYTHING


@pytest.mark.parametrize(
    ("answer", "deleted"),
    [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)],
    ids=["y", "yes", "no", "empty", "end-of-input"],
)
def test_only_a_yes_deletes(
    location: Path, monkeypatch: pytest.MonkeyPatch, answer: str, deleted: bool
) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    shown = flow("sweep", location, interactive=True)

    assert shown.code == 0
    assert "Delete 3 files, 1.3 KiB? [y/N]" in shown.err
    assert ("Nothing was deleted." in shown.out) is not deleted
    assert (left(location) == EVERYTHING) is not deleted


def test_json_names_what_was_deleted(location: Path) -> None:
    found = flow("sweep", location, "--yes", "--json").json

    assert found["deleted"] is True
    (operator,) = found["operators"]
    assert sorted(operator["paths"]) == [
        "chk-2/run-a/part-0",
        "shared/2-dead-abc.arrow",
        "taskowned/1-dead-abc.arrow",
    ]
    assert operator["bytes"] == 1324


def test_one_checkpoint_cannot_be_swept(location: Path) -> None:
    shown = flow("sweep", location / "words" / "chk-3", "--yes")

    assert shown.code == 2
    assert left(location) == EVERYTHING


def test_before_the_first_record_nothing_is_left_over(tmp_path: Path) -> None:
    unsealed(tmp_path / "keyed")

    assert "nothing is left over" in flow("sweep", tmp_path, "--yes").out
    assert left(tmp_path) == {"part-0"}
