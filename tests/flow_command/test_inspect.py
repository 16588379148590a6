from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowspark.command import inspecting
from flowspark.command.inspecting import overview_of
from flowspark.command.loads import loads_of
from flowspark.command.locations import DEPTH_MAX, Location, find_operators
from flowstate.checkpoint import CheckpointRecord, CheckpointStorage, SectionType, encode_name

from ..storage.conftest import S3Location, s3_location, s3_options
from .shell import flow
from .states import QUERY_ID, run_once, unsealed

__all__ = ["s3_location", "s3_options"]


def test_operators_are_found_below_a_location_a_query_and_themselves(read_only: Path) -> None:
    for url in (read_only, read_only / QUERY_ID, read_only / QUERY_ID / "words"):
        found = find_operators(str(url), {})

        assert [location.uid for location in found] == ["words"]
        assert found[0].query == QUERY_ID
        assert found[0].checkpoint_id is None


@pytest.mark.parametrize("ending", ["chk-2", "chk-2/", "chk-2/_metadata"])
def test_a_checkpoint_is_found_by_its_own_folder(words: Path, ending: str) -> None:
    (found,) = find_operators(f"{words}/{ending}", {})

    assert (found.url, found.checkpoint_id) == (str(words), 2)
    overview = overview_of(found)
    assert (overview.checkpoint_id, len(overview.checkpoints)) == (2, 1)


def test_names_are_shown_as_they_were_before_they_were_encoded(tmp_path: Path) -> None:
    run_once(tmp_path / "a_20query" / "words_2F1")

    (found,) = find_operators(str(tmp_path), {})
    assert (found.title, found.uid, found.query) == ("a query/words/1", "words/1", None)


def test_folders_are_looked_at_to_a_depth_and_those_of_files_never(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["x"] * DEPTH_MAX)
    for place in (deep, deep / "x", tmp_path / "shared" / "x", tmp_path / ".hidden"):
        unsealed(place)

    assert [location.url for location in find_operators(str(tmp_path), {})] == [str(deep)]


def test_all_is_shown_of_an_operator(words: Path) -> None:
    shown = flow("inspect", words)

    assert shown.code == 0
    assert shown.words("3 3")[2] == "3"  # checkpoint 3, batch 3, three subtasks
    assert "keys of type string, 128 key groups by flink" in shown.out
    # Of the keyed states all keys have been written, and one is new.
    assert shown.words("count")[1:] == ["reducing", "int64", "-", *shown.words("count")[4:]]
    assert shown.words("last")[3:5] == ["1", "d"]
    assert shown.words("pending")[1:4] == ["even-split", "list", "string"]
    assert shown.words("rules")[1:3] == ["broadcast", "map"]
    assert shown.words("_flow.timers.event")[1] == "timer"
    assert "key groups 0..127  |" in shown.out


def test_json_has_what_a_program_needs(words: Path) -> None:
    (operator,) = flow("inspect", words, "--json").json["operators"]

    assert [one["checkpoint_id"] for one in operator["checkpoints"]] == [1, 2, 3]
    assert [one["parent_id"] for one in operator["checkpoints"]] == [None, 1, 2]
    states = {state["name"]: state for state in operator["states"]}
    assert states["pending"]["count"] == 3 * 2 + 6
    assert states["last"]["ttl_ms"] == 86_400_000
    assert len(operator["key_group_bytes"]) == 128
    assert sum(one["keyed_bytes"] for one in operator["subtasks"]) == pytest.approx(
        sum(operator["key_group_bytes"]), abs=len(operator["key_group_bytes"])
    )


@pytest.mark.parametrize("inline", [True, False], ids=["in-the-record", "in-files"])
def test_loads_are_the_bytes_of_the_segments(tmp_path: Path, inline: bool) -> None:
    keys = [f"key-{number}" for number in range(5 if inline else 5000)]
    run_once(tmp_path, parallelism=1 if inline else 3, keys=keys)
    storage = CheckpointStorage(tmp_path)
    record = storage.latest()
    assert record is not None
    assert bool(record.files) is not inline

    loads = loads_of(storage, record)
    segments: dict[str, list[tuple[int, int]]] = {}
    for subtask in record.subtasks:
        for handle in subtask.keyed:
            for section in storage.reader(handle.file).footer.sections:
                assert section.type is SectionType.KEYED
                segments.setdefault(section.name, []).extend(
                    (segment.length, segment.rows) for segment in section.segments
                )
    for name, found in segments.items():
        assert loads.bytes_of(name) == sum(length for length, _ in found)
        assert loads.count_of(name) == sum(rows for _, rows in found)
    assert loads.key_groups.sum() == pytest.approx(
        sum(length for found in segments.values() for length, _ in found)
    )


def test_inline_rows_are_weighed_by_their_own_key_groups(tmp_path: Path) -> None:
    run_once(tmp_path, parallelism=1, keys=["only"])
    storage = CheckpointStorage(tmp_path)
    record = storage.latest()
    assert record is not None

    (loaded,) = loads_of(storage, record).key_groups.nonzero()
    assert len(loaded) == 1


def test_a_checkpoint_without_a_record_is_said_and_no_error(tmp_path: Path) -> None:
    unsealed(tmp_path / QUERY_ID / "keyed", 3)

    shown = flow("inspect", tmp_path)
    assert shown.code == 0
    assert "no record yet, a later batch makes it: chk-3, 1 file, 300 B" in shown.out
    (operator,) = flow("inspect", tmp_path, "--json").json["operators"]
    assert operator["checkpoint_id"] is None
    assert operator["unsealed"] == [
        {"checkpoint_id": 3, "files": 1, "bytes": 300, "is_left_over": False}
    ]


def test_what_is_left_of_a_retired_checkpoint_is_told_from_what_is_being_written(
    tmp_path: Path,
) -> None:
    run_once(tmp_path, checkpoints=3, checkpoints_retained=1)
    for checkpoint_id in (1, 4):
        unsealed(tmp_path, checkpoint_id)

    shown = flow("inspect", tmp_path).out
    assert "left over, for a sweep: chk-1, 1 file" in shown
    assert "no record yet, a later batch makes it: chk-4, 1 file" in shown


def test_a_damaged_record_is_said_and_the_other_operators_are_shown(
    words: Path, tmp_path: Path
) -> None:
    for name in ("sound", "broken"):
        shutil.copytree(words, tmp_path / name)
    record = tmp_path / "broken" / "chk-3" / "_metadata"
    record.write_bytes(record.read_bytes().replace(b"string", b"strong"))

    shown = flow("inspect", tmp_path)
    assert shown.code == 1
    assert "damaged: [FLOWSTATE_CORRUPT]" in shown.out
    assert str(record) in shown.out
    assert "keys of type string" in shown.out


@pytest.mark.parametrize("uid", ["shared", "taskowned"])
def test_an_operator_may_have_the_name_of_a_folder_of_ours(tmp_path: Path, uid: str) -> None:
    run_once(tmp_path / QUERY_ID / encode_name(uid), keys=["a"])
    run_once(tmp_path / QUERY_ID / "words", keys=["a"])

    found = find_operators(str(tmp_path), {})
    assert [location.uid for location in found] == sorted([uid, "words"])


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["words", "json"])
def test_a_path_that_is_no_text_is_named(tmp_path: Path, options: list[str]) -> None:
    run_once(tmp_path / "words", keys=["a"])
    (tmp_path / "words").rename(tmp_path / os.fsdecode(b"\xff"))

    shown = flow("inspect", tmp_path, *options)
    assert shown.code == 3
    assert "is not valid text, so it could not be shown: rename the folder" in shown.out + shown.err
    assert "udcff" in shown.out + shown.err


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: str) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "scandir", broken)
    shown = flow("verify", tmp_path)
    assert shown.code == 3
    assert f"[FLOW_COMMAND] cannot list {tmp_path}" in shown.err


def test_beside_a_damaged_old_record_the_newest_is_shown(words: Path, tmp_path: Path) -> None:
    shutil.copytree(words, tmp_path / "words")
    record = tmp_path / "words" / "chk-1" / "_metadata"
    record.write_bytes(record.read_bytes()[:-9])

    shown = flow("inspect", tmp_path)
    assert shown.code == 1
    assert shown.out.count("damaged: [FLOWSTATE_CORRUPT]") == 1
    assert str(record) in shown.out
    assert "Checkpoint 3: keys of type string" in shown.out
    (operator,) = flow("inspect", tmp_path, "--json").json["operators"]
    assert [one["checkpoint_id"] for one in operator["checkpoints"]] == [2, 3]


def test_a_query_that_runs_meanwhile_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, later = tmp_path / "now", tmp_path / "later"
    run_once(now, keys=[f"key-{number}" for number in range(2000)])
    run_once(later, checkpoints=3, checkpoints_retained=1)
    real = inspecting.kept_records

    def while_it_runs(location: Location, problems: list[str]) -> Iterator[CheckpointRecord]:
        records = list(real(location, problems))
        if later.exists():
            # As if the query had gone on: other checkpoints, and the files of the first are gone.
            shutil.rmtree(now)
            later.rename(now)
        yield from records

    monkeypatch.setattr(inspecting, "kept_records", while_it_runs)
    overview = overview_of(find_operators(str(now), {})[0])
    assert overview.problem is None
    assert [one.checkpoint_id for one in overview.checkpoints] == [3]


def test_a_checkpoint_that_is_retired_after_it_was_listed_is_left_out(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (location,) = find_operators(str(words), {})
    monkeypatch.setattr(location.storage, "checkpoint_ids", lambda: [0, 1, 2, 3])

    assert [one.checkpoint_id for one in overview_of(location).checkpoints] == [1, 2, 3]


def test_a_wide_line_is_cut_for_a_person_only(words: Path) -> None:
    plain = flow("inspect", words, width=60)
    cut = flow("inspect", words, width=60, cuts=True)

    assert max(map(len, plain.out.splitlines())) > 62
    tables = [line for line in cut.out.splitlines() if "|" not in line and "/" not in line]
    assert all(len(line) <= 60 for line in tables if line.endswith("..."))
    assert any(line.endswith("...") for line in tables)


def test_what_a_terminal_cannot_show_is_drawn_in_ascii(words: Path) -> None:
    class Ascii:
        encoding = "ascii"

        def __init__(self) -> None:
            self.lines: list[str] = []

        def write(self, text: str) -> None:
            self.lines.append(text.encode("ascii").decode())

    from flowspark.command.main import run
    from flowspark.command.terminal import Terminal

    out = Ascii()
    terminal = Terminal(out=out, err=out, unicode=False)  # type: ignore[arg-type]
    assert run(["inspect", str(words)], terminal) == 0
    assert any("####" in line for line in out.lines)


def test_state_in_memory_and_in_s3_is_found_too(s3_location: S3Location) -> None:
    for url, options in (("memory://inspected/state", {}), (s3_location.url, s3_location.options)):
        run_once(f"{url}/{QUERY_ID}/words", storage_options=options)

        (found,) = find_operators(url, options)
        assert found.title == f"{QUERY_ID}/words"
        assert found.url == f"{url}/{QUERY_ID}/words"
        assert overview_of(found).checkpoint_id == 1
        (found,) = find_operators(f"{found.url}/chk-1", options)
        assert overview_of(found).checkpoint_id == 1


def test_storage_options_lead_to_s3(s3_location: S3Location) -> None:
    run_once(f"{s3_location.url}/words", storage_options=s3_location.options)
    options = s3_location.options
    given = [
        f"--storage-option={name}={options[name]}" for name in ("key", "secret", "endpoint_url")
    ]

    shown = flow("inspect", s3_location.url, *given)
    assert shown.code == 0
    assert "keys of type string" in shown.out
    assert options["secret"] not in shown.out + shown.err
