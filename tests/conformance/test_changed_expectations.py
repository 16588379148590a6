"""An expectation that is wrong is noticed, and the case that has it is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flowstate.testing.conformance import Backend, run_folder
from flowstate.testing.conformance.__main__ import main

from .documents import VECTORS, load, write


def changed(name: str, path: Sequence[str | int], value: Any) -> dict[str, Any]:
    """Return a file's contents with one field changed; cases are found by their ids."""
    document = load(name)
    node: Any = document
    for part in path[:-1]:
        if isinstance(part, str) and isinstance(node, list):
            node = next(case for case in node if part in (case.get("id"), case.get("case")))
        else:
            node = node[part]
    assert json.dumps(node[path[-1]]) != json.dumps(value)
    node[path[-1]] = value
    return document


CHANGES = [
    pytest.param(
        "state_ttl.json",
        ["cases", "value_boundary", "steps", 1, "result"],
        6,
        "value_boundary",
        "step 2, value: expected 6, got 5",
        id="a-value",
    ),
    pytest.param(
        "state_ttl.json",
        ["cases", "value_boundary", "steps", 2, "result"],
        5,
        "value_boundary",
        "step 3, value: expected 5, got null",
        id="an-expired-value",
    ),
    pytest.param(
        "state_ttl.json",
        ["cases", "value_read_removes_entry", "steps", 3, "result"],
        1,
        "value_read_removes_entry",
        "step 4, entries_in_backend: expected 1, got 0",
        id="a-number-of-entries",
    ),
    pytest.param(
        "state_null_semantics.json",
        ["cases", "list_add_null", "steps", 1, "result"],
        "void",
        "list_add_null",
        "step 2, add null: expected void, got StateTypeError: ",
        id="a-refusal",
    ),
    pytest.param(
        "state_null_semantics.json",
        ["cases", "map_clear", "steps", 1, "result"],
        {"exception": "RuntimeException"},
        "map_clear",
        "step 2, clear: expected a StateError",
        id="no-refusal",
    ),
    pytest.param(
        "state_null_semantics.json",
        ["cases", "reducing_add_null", "steps", 2, "result"],
        1,
        "reducing_add_null",
        "step 3, get: expected 1, got null",
        id="after-a-deliberate-difference",
    ),
    pytest.param(
        "state_null_semantics.json",
        ["cases", "register_same_name_same_type", "steps", 1, "result"],
        "ok:6",
        "register_same_name_same_type",
        "step 2, register value s: expected ok:6, got ok:5",
        id="what-a-registered-state-holds",
    ),
    pytest.param(
        "state_null_semantics.json",
        ["cases", "map_null_value", "steps", 2, "result"],
        1,
        "map_null_value",
        "step 3, contains x: expected 1, got True",
        id="a-number-for-a-truth-value",
    ),
    pytest.param(
        "timers.json",
        ["cases", "rescale_1_to_3", "steps", 7, "subtasks", 1, "event_timers"],
        2,
        "rescale_1_to_3",
        "step 8, restore 3, subtasks: ",
        id="timers-of-a-subtask",
    ),
    pytest.param(
        "timers.json",
        ["cases", "dedup", "steps", 2, "fired", 0, "output_timestamp"],
        None,
        "dedup",
        "step 3, wm 10, fired: ",
        id="a-timer-that-fires",
    ),
    pytest.param(
        "operator_and_broadcast_state.json",
        ["cases", "op_list_addAll_null_element_partial", "steps", 1, "result"],
        [],
        "op_list_addAll_null_element_partial",
        "step 2, get: expected [], got [1]",
        id="an-operator-list",
    ),
    pytest.param(
        "operator_state_redistribution.json",
        ["cases", "up_2_3", "expected", 1, "buf", "elements"],
        ["a3", "a1"],
        "up_2_3",
        "new subtask 1, by redistribute(): ",
        id="a-share",
    ),
    pytest.param(
        "key_groups.json",
        ["ranges", 1, "ranges_inclusive", 0, 1],
        43,
        "ranges 128/3",
        "ranges: ",
        id="a-range",
    ),
    pytest.param(
        "key_groups.json",
        ["keys", 0, "key_group", "128"],
        95,
        "key int 0",
        "key group of 128: expected 95, got 94",
        id="a-key-group",
    ),
    pytest.param(
        "restore_outcomes.json",
        ["cases", "restore p=9 max unset", "outcome"],
        "running",
        "2.3.0 restore p=9 max unset",
        "outcome: expected running, got MaxParallelismError: ",
        id="an-outcome",
    ),
    pytest.param(
        "restore_outcomes.json",
        ["cases", "restore p=4 max=8", "outcome"],
        "rejected at submission",
        "2.3.0 restore p=4 max=8",
        "restored checkpoint ids of what is refused: ",
        id="an-outcome-with-ids",
    ),
    pytest.param(
        "seed003_buffering_sink_trace.json",
        ["events", 11, "emitted", 4],
        "a10",
        "events",
        "event 12, input a9, emitted: ",
        id="an-emission",
    ),
    pytest.param(
        "seed003_buffering_sink_trace.json",
        ["restore_examples", "chk3_to_2", "0", 0],
        "a1",
        "chk3_to_2",
        "checkpoint 3 at parallelism 2: ",
        id="a-restored-buffer",
    ),
]


@pytest.mark.parametrize(("name", "path", "value", "case_id", "detail"), CHANGES)
def test_the_case_with_a_wrong_expectation_fails(
    name: str, path: list[str | int], value: Any, case_id: str, detail: str, tmp_path: Path
) -> None:
    write(tmp_path, changed(name, path, value))
    report = run_folder(tmp_path)
    (file,) = report.files

    assert list(file.failed) == [case_id]
    assert file.failed[case_id].startswith(detail)
    assert report.exit_code == 1


def test_the_command_names_the_case_and_what_differed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(VECTORS, tmp_path, dirs_exist_ok=True)
    path: list[str | int] = ["cases", "value_boundary", "steps", 1, "result"]
    write(tmp_path, changed("state_ttl.json", path, 6), "state_ttl.json")
    code = main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()

    assert code == 1
    start = lines.index("state_ttl.json: 37 passed, 1 failed, 3 skipped")
    assert lines[start + 1 : start + 3] == [
        "  FAILED value_boundary",
        "    step 2, value: expected 6, got 5",
    ]
    assert lines[-1] == "246 passed, 1 failed, 32 skipped"


def test_one_case_can_be_replayed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([str(VECTORS), "--case", "value_boundary", "--backend", "lmdb"])

    assert code == 0
    assert capsys.readouterr().out.splitlines() == [
        "state_ttl.json: 1 passed, 0 failed, 0 skipped",
        "1 passed, 0 failed, 0 skipped",
    ]


@pytest.mark.parametrize("backend", list(Backend))
def test_a_case_that_cannot_be_replayed_fails_and_the_others_go_on(
    backend: Backend, tmp_path: Path
) -> None:
    document = load("state_ttl.json")
    document["cases"][0]["steps"][0]["op"] = "upsert 5"
    write(tmp_path, document)
    (file,) = run_folder(tmp_path, backend=backend).files

    assert list(file.failed) == ["value_boundary"]
    assert "a value state has no operation 'upsert'" in file.failed["value_boundary"]
    assert len(file.passed) == 37
