"""A checkpoint that dies or fails at any of its storage operations leaves the old one or the new.

Every operation is tried, not a sample of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flowstate.errors import CheckpointSupersededError, FlowError
from flowstate.storage.filesystems import StateFileSystem, open_file_system
from flowstate.testing.faults import (
    Fault,
    FaultAction,
    FaultyFileSystem,
    Operation,
    OperationName,
    SimulatedCrashError,
)
from tests.faults import scenario
from tests.faults.scenario import PREPARED_CHECKPOINTS, Program, copy_files, prepare

NewFileSystem = Callable[[], StateFileSystem]

CRASHES = {
    "before": [FaultAction.CRASH_BEFORE],
    "after": [FaultAction.CRASH_AFTER],
    "in-the-middle": [FaultAction.TRUNCATE, FaultAction.CRASH_AFTER],
}
FAILURES = [FaultAction.FAIL, FaultAction.FAIL_AFTER, FaultAction.FULL]


class Prepared:
    """A store with checkpoints, what they hold, and what the next one does and would hold."""

    def __init__(self, new_file_system: NewFileSystem) -> None:
        self.files = new_file_system()
        prepare(self.files)
        self.old = Program(self.files, parallelism=3).contents()
        recorded = FaultyFileSystem(self.copy(new_file_system))
        program = Program(recorded, parallelism=2)
        program.work(PREPARED_CHECKPOINTS)
        opened = len(recorded.operations)
        program.operator.checkpoint()
        self.new = program.contents()
        self.operations = recorded.operations[opened:]

    def name_before(self, operation: Operation) -> OperationName:
        index = operation.number - self.operations[0].number
        return self.operations[max(0, index - 1)].name

    def copy(self, new_file_system: NewFileSystem) -> StateFileSystem:
        files = new_file_system()
        copy_files(self.files, files)
        return files


@pytest.fixture
def prepared(new_file_system: NewFileSystem) -> Prepared:
    return Prepared(new_file_system)


def check_recovery(files: StateFileSystem, prepared: Prepared) -> None:
    """A new process at another parallelism finds the old or the new, and goes on from there."""
    program = Program(files, parallelism=3)
    found = program.contents()
    assert found in (prepared.old, prepared.new)
    for checkpoint_id in program.operator.storage.checkpoint_ids():
        assert program.operator.storage.verify(checkpoint_id).ok

    program.work(99)
    record = program.operator.checkpoint()
    check_nothing_is_left_over(program)
    assert Program(files, parallelism=5).contents() == program.contents()
    assert record.checkpoint_id == PREPARED_CHECKPOINTS + (1 if found == prepared.old else 2)


def try_again(program: Program, files: StateFileSystem, *, after: OperationName) -> Program:
    """Take the checkpoint again; where its outcome is unknown, open the operator anew instead."""
    if after is not OperationName.CREATE_EXCLUSIVELY:
        program.operator.checkpoint()
        return program
    with pytest.raises(CheckpointSupersededError, match="open the operator anew"):
        program.operator.checkpoint()
    again = Program(files, parallelism=2)
    again.operator.checkpoint()
    return again


def check_nothing_is_left_over(program: Program) -> None:
    storage = program.operator.storage
    ids = storage.checkpoint_ids()
    needed = {path for checkpoint_id in ids for path in storage.read(checkpoint_id).files}
    records = {f"chk-{checkpoint_id}/_metadata" for checkpoint_id in ids}

    assert {entry.path for entry in storage.file_system.list("")} == needed | records
    assert len(ids) <= 2


def test_the_scenario_writes_deltas_merges_operator_state_and_a_record(prepared: Prepared) -> None:
    names = [operation.name for operation in prepared.operations]
    outputs = names.count(OperationName.OPEN_OUTPUT)

    # Two deltas, a tier that is complete, and the operator state of one subtask.
    assert outputs >= 4
    assert names.count(OperationName.READ_RANGES) >= 8
    assert names.count(OperationName.CREATE_EXCLUSIVELY) == 1
    assert names.count(OperationName.DELETE) >= 2


@pytest.mark.parametrize("crash", CRASHES)
def test_a_crash_at_any_operation_leaves_the_old_or_the_new_checkpoint(
    crash: str, prepared: Prepared, new_file_system: NewFileSystem
) -> None:
    outcomes = set()
    for operation in prepared.operations:
        actions = CRASHES[crash]
        if FaultAction.TRUNCATE in actions and operation.name is not OperationName.WRITE_OUTPUT:
            # A record is created as a whole or not at all; the storage suite is the proof of it.
            continue
        files = prepared.copy(new_file_system)
        faulty = FaultyFileSystem(files)
        program = Program(faulty, parallelism=2)
        program.work(PREPARED_CHECKPOINTS)
        at = len(faulty.operations) + operation.number - prepared.operations[0].number
        faulty.inject(*(Fault(action, at=at) for action in actions))
        with pytest.raises(SimulatedCrashError):
            program.operator.checkpoint()
        outcomes.add(Program(files, parallelism=2).contents() == prepared.new)
        check_recovery(files, prepared)

    # Crashes before the record is there keep the old checkpoint, later ones the new.
    assert outcomes == ({False} if crash == "in-the-middle" else {False, True})


@pytest.mark.parametrize("action", FAILURES)
def test_a_failure_at_any_operation_is_an_error_after_which_the_program_may_go_on(
    action: FaultAction, prepared: Prepared, new_file_system: NewFileSystem
) -> None:
    for operation in prepared.operations:
        files = prepared.copy(new_file_system)
        faulty = FaultyFileSystem(files)
        program = Program(faulty, parallelism=2)
        program.work(PREPARED_CHECKPOINTS)
        at = len(faulty.operations) + operation.number - prepared.operations[0].number
        faulty.inject(Fault(action, at=at))
        is_create = operation.name is OperationName.CREATE_EXCLUSIVELY
        if action is FaultAction.FAIL_AFTER and is_create:
            # The record is there and it is ours, so nothing has failed.
            program.operator.checkpoint()
        else:
            with pytest.raises(FlowError):
                program.operator.checkpoint()
            program = try_again(program, files, after=prepared.name_before(operation))

        assert program.contents() == prepared.new
        check_nothing_is_left_over(program)
        assert Program(files, parallelism=3).contents() == prepared.new


def test_a_process_killed_at_any_write_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, prepared: Prepared
) -> None:
    chosen = [
        number
        for number, operation in enumerate(prepared.operations)
        if operation.name not in {OperationName.READ_RANGES, OperationName.LIST}
    ]

    def run(number: int) -> tuple[int, StateFileSystem]:
        folder = tmp_path / str(number)
        files = open_file_system(folder)
        copy_files(prepared.files, files)
        command = [sys.executable, scenario.__file__, str(folder), str(number)]
        done = subprocess.run(command, check=False, capture_output=True, timeout=120)
        return done.returncode, files

    with ThreadPoolExecutor(2) as threads:
        results: list[Any] = list(threads.map(run, chosen))

    for code, files in results:
        assert code == -9
        check_recovery(files, prepared)
