from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from flowspark.command.loads import skew_of
from flowspark.command.locations import only_operator
from flowspark.command.rescaling import rescaling_of
from flowstate import LocalOperator
from flowstate.checkpoint import CheckpointStorage, FileHandle, StateFileReader
from flowstate.restoring import keyed_share

from .shell import flow
from .states import PENDING, run_once


def files_below(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5, 127, 128])
def test_the_shares_are_those_of_a_real_start(tmp_path: Path, parallelism: int) -> None:
    run_once(tmp_path, parallelism=3, keys=[f"key-{number}" for number in range(3000)])
    record = CheckpointStorage(tmp_path).latest()
    assert record is not None

    found = rescaling_of(only_operator(str(tmp_path), {}), parallelism)

    assert len(found.after) == parallelism
    assert sum(share.bytes for share in found.before) == pytest.approx(
        sum(share.keyed_bytes for share in found.after)
        + sum(share.list_bytes for share in found.before),
        abs=2 * parallelism + 6,
    )
    for share in found.after:
        assert share.key_groups is not None
        # It reads what the restore would, from those whose files these are.
        files = {handle.file for handle in keyed_share(record, share.key_groups).handles}
        owners = {
            subtask.subtask_index
            for subtask in record.subtasks
            if any(handle.file in files for handle in subtask.keyed)
        }
        assert owners <= set(share.sources)
        assert share.bytes_read >= share.keyed_bytes
    with LocalOperator(tmp_path, parallelism=parallelism, key_type=str) as operator:
        for share, subtask in zip(found.after, operator.subtasks, strict=True):
            assert share.key_groups == subtask.keyed.key_groups
            # Beside its part of the list it has all owners and a copy of the one rule.
            pending = subtask.operator.get_list_state(PENDING).get()
            assert share.elements == len(pending) + 3 + 1


def test_each_file_is_opened_twice_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_once(tmp_path, parallelism=8, keys=[f"key-{number}" for number in range(3000)])
    opened: Counter[FileHandle] = Counter()
    real = CheckpointStorage.reader

    def reader(storage: CheckpointStorage, handle: FileHandle) -> StateFileReader:
        opened[handle] += 1
        return real(storage, handle)

    monkeypatch.setattr(CheckpointStorage, "reader", reader)
    rescaling_of(only_operator(str(tmp_path), {}), 64)
    # Once to weigh them all, and once for the shares.
    assert max(opened.values()) == 2


def test_what_there_is_now_is_what_each_subtask_has(words: Path) -> None:
    (found,) = flow("rescale", "--dry-run", words, "--parallelism", 3, "--json").json["operators"]
    (inspected,) = flow("inspect", words, "--json").json["operators"]

    have = [subtask["elements"] for subtask in inspected["subtasks"]]
    # A start gives the two owners of the others to each subtask as well.
    assert [share["elements"] for share in found["before"]] == have
    assert [share["elements"] for share in found["after"]] == [count + 2 for count in have]
    assert [share["sources"] for share in found["before"]] == [[0], [1], [2]]


def test_nothing_is_written(tmp_path: Path) -> None:
    run_once(tmp_path / "words")
    before = files_below(tmp_path)

    shown = flow("rescale", "--dry-run", tmp_path, "--parallelism", 7)
    assert shown.code == 0
    assert "2 subtasks -> 7, of at most 128" in shown.out
    assert "Nothing was written. To do it: stop the query, and start it with" in shown.out
    assert files_below(tmp_path) == before


def test_lists_alone_say_nothing_of_key_groups(tmp_path: Path) -> None:
    with LocalOperator(tmp_path, parallelism=2, key_type=None) as operator:
        for subtask in operator.subtasks:
            subtask.operator.get_list_state(PENDING).add_all(["a" * 4000, "b"])
        operator.checkpoint()

    shown = flow("rescale", "--dry-run", tmp_path, "--parallelism", 16)
    assert shown.code == 0
    assert "A key group is never cut" not in shown.out


def test_without_dry_run_it_only_says_how_a_rescale_is_done(words: Path) -> None:
    shown = flow("rescale", words, "--parallelism", 4)

    assert shown.code == 2
    assert "stop the query, and start it with another parallelism" in shown.err


def test_bars_and_skew_show_before_and_after(words: Path) -> None:
    shown = flow("rescale", "--dry-run", words, "--parallelism", 2)

    assert shown.out.count("█") > 10
    assert shown.out.count("times the mean") == 2
    assert shown.words("1 64..127")[-1] == "0..2"  # For the owners it reads of all.
    (operator,) = flow("rescale", "--dry-run", words, "--parallelism", 2, "--json").json[
        "operators"
    ]
    assert [len(operator[when]) for when in ("before", "after")] == [3, 2]
    weights = [share["keyed_bytes"] + share["list_bytes"] for share in operator["after"]]
    assert operator["skew_after"] == pytest.approx(skew_of(weights))


def test_more_than_the_key_groups_is_refused_with_the_most_there_can_be(words: Path) -> None:
    shown = flow("rescale", "--dry-run", words, "--parallelism", 129)

    assert shown.code == 3
    assert "[FLOWSTATE_MAX_PARALLELISM]" in shown.err
    assert "128 or less" in shown.err


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5", ""])
def test_a_parallelism_is_a_number_from_one_on(words: Path, number: str) -> None:
    shown = flow("rescale", "--dry-run", words, f"--parallelism={number}")

    assert shown.code == 2
    assert "must be a whole number from 1 on" in shown.err


def test_an_even_load_has_no_skew() -> None:
    assert skew_of([3, 3, 3]) == 1
    assert skew_of([9, 0, 0]) == 3
    assert skew_of([0, 0]) == 1
    assert skew_of([]) == 1
