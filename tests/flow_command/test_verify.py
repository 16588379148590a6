from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flowspark.command.terminal import Progress
from flowstate.checkpoint import CheckpointStorage

from .shell import flow
from .states import run_once, unsealed


@pytest.fixture
def location(tmp_path: Path) -> Path:
    keys = [f"key-{number}" for number in range(2000)]
    run_once(tmp_path / "words", keys=keys, checkpoints=2)
    return tmp_path


def a_file(location: Path) -> Path:
    record = CheckpointStorage(location / "words").latest()
    assert record is not None
    return location / "words" / min(record.files)


def test_a_sound_location_is_sound(location: Path) -> None:
    unsealed(location / "other")

    shown = flow("verify", location)
    assert shown.code == 0
    assert shown.out.count(": ok, ") == 2
    assert "no complete checkpoint yet: nothing to verify" in shown.out
    report = flow("verify", location, "--json").json
    assert report["ok"] is True
    assert [one["checkpoint_id"] for one in report["checkpoints"]] == [2, 1]


def test_a_flipped_bit_is_found(location: Path) -> None:
    path = a_file(location)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)

    shown = flow("verify", location)
    assert shown.code == 1
    assert "chk-2: damaged" in shown.out
    assert f"[FLOWSTATE_CORRUPT] {path}" in shown.out
    report = flow("verify", location, "--json").json
    assert report["ok"] is False
    assert any("FLOWSTATE_CORRUPT" in text for text in report["checkpoints"][0]["problems"])


def test_a_missing_file_is_found(location: Path) -> None:
    path = a_file(location)
    path.unlink()

    shown = flow("verify", location / "words" / "chk-2")
    assert shown.code == 1
    assert f"[FLOWSTATE_MISSING] {path}" in shown.out


def test_a_damaged_record_is_found_and_the_others_are_verified(location: Path) -> None:
    record = location / "words" / "chk-1" / "_metadata"
    record.write_bytes(record.read_bytes()[:-9])

    shown = flow("verify", location)
    assert shown.code == 1
    assert "chk-2: ok" in shown.out
    assert "chk-1: damaged" in shown.out


def test_a_record_of_another_chain_is_found(location: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    run_once(other, keys=["other"])
    shutil.copy(other / "chk-1" / "_metadata", location / "words" / "chk-1" / "_metadata")

    shown = flow("verify", location / "words")
    assert shown.code == 1
    assert "checkpoint 2 does not follow checkpoint 1" in shown.out


def test_a_checkpoint_that_is_not_there_is_an_error(location: Path) -> None:
    shown = flow("verify", location / "words" / "chk-9")

    assert shown.code == 3
    assert "there is no checkpoint 9" in shown.err
    assert "The checkpoints there are: 1, 2" in shown.err


def test_a_person_sees_how_far_it_is(location: Path) -> None:
    shown = flow("verify", location, progress=True)

    assert "words chk-2 " in shown.err
    assert "100%" in shown.err
    # The line is gone when it is done.
    assert shown.err.endswith("\r\x1b[K")
    assert flow("verify", location).err == ""


def test_a_checkpoint_that_is_retired_meanwhile_is_not_damaged(
    location: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def retire(progress: Progress, done: int, total: int) -> None:
        # What a running query does after its next checkpoint.
        storage = CheckpointStorage(location / "words")
        storage.retain(1)
        storage.sweep(2)

    only_in_the_first = CheckpointStorage(location / "words").read(1).files.keys()
    monkeypatch.setattr(Progress, "update", retire)
    shown = flow("verify", location)

    assert only_in_the_first
    assert shown.code == 0
    assert shown.out.count(": ok, ") == 1
