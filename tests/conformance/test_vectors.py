"""What Flink did, in the project's own files, the library does as well."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import lru_cache

import pytest

from flowstate.testing.conformance import Backend, FileReport, Report, run_folder

from .documents import FILES, VECTORS, load

SKIPPED = {
    "operator_and_broadcast_state.json": {"broadcast process function": 4},
    "restart_strategies.json": {"restart strategy": 8},
    "state_ttl.json": {"implementation detail": 3},
    "windows.json": {"windows": 17},
}


@lru_cache
def report_of(backend: Backend) -> Report:
    return run_folder(VECTORS, backend=backend)


def file_of(backend: Backend, name: str) -> FileReport:
    return next(file for file in report_of(backend).files if file.name == name)


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("name", FILES)
def test_every_file_passes(name: str, backend: Backend) -> None:
    file = file_of(backend, name)

    assert file.refused is None
    assert file.failed == {}
    assert dict(Counter(file.skipped.values())) == SKIPPED.get(name, {})
    assert file.passed or set(file.skipped.values()) <= {"windows", "restart strategy"}


def test_every_case_is_replayed_or_skipped() -> None:
    for name in FILES:
        file, document = file_of(Backend.MEMORY, name), load(name)
        if "cases" in document:
            assert len(file.passed) + len(file.skipped) == len(document["cases"])


def test_only_what_is_marked_as_a_detail_is_skipped_as_one() -> None:
    cases = load("state_ttl.json")["cases"]
    marked = {case["id"] for case in cases if case.get("implementation_detail")}

    assert set(file_of(Backend.MEMORY, "state_ttl.json").skipped) == marked


@pytest.mark.parametrize("backend", list(Backend))
def test_the_deliberate_differences_are_these(backend: Backend) -> None:
    found = {case for file in report_of(backend).files for case in file.differences}

    assert found == {
        "2.3.0 restore p=1 max=8",
        "aggregating_add_null",
        "broadcast_same_name_as_list_is_accepted_but_snapshot_corrupt",
        "reducing_add_null",
        "register_same_name_other_serializer",
        "restore_with_other_update_type_and_visibility",
    }


@pytest.mark.parametrize("backend", list(Backend))
def test_the_command_prints_a_line_for_each_file_and_the_totals_last(backend: Backend) -> None:
    command = [sys.executable, "-m", "flowstate.testing.conformance", VECTORS]
    done = subprocess.run(
        [*map(str, command), "--backend", backend.value], capture_output=True, text=True
    )
    lines = done.stdout.splitlines()

    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(":")[0] for line in lines if ".json: " in line] == FILES
    assert "timers.json: 16 passed, 0 failed, 0 skipped" in lines
    assert "deliberate differences, asserted as such:" in lines
    assert lines[-1] == "247 passed, 0 failed, 32 skipped"
