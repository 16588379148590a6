"""A crash and a failure at every storage operation of a batch, and then the batch again."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flowstate.errors import StorageError
from flowstate.testing.faults import FaultAction, Operation, OperationName, SimulatedCrashError

from .functions import Everything
from .harness import Query, crashing, row_factory

# Two batches; the first one's record is made in the second. Texts too long to be inlined.
WORDS = [f"w{number}{'x' * 300}" for number in range(12)]
Scenario = tuple[Query, list[Operation], list[Counter[tuple[str, str]]]]
READS = {OperationName.READ, OperationName.READ_RANGES, OperationName.LIST}
ACTIONS = [FaultAction.CRASH_AFTER, FaultAction.FAIL, FaultAction.FAIL_AFTER]


def rows(n: int, count: int = 12) -> list[tuple[str, int]]:
    return [(word, n) for word in WORDS[:count]]


def prepare(folder: Path) -> Query:
    """Return a query at parallelism 2 before batch 2, of which batch 1 is not sealed."""
    query = Query(folder=folder, factory=row_factory(Everything()), parallelism=3)
    query.batch(0, rows(15))
    second = query.restarted(parallelism=2)
    # In batch 1 only some subtasks have rows.
    second.batch(1, rows(30, 1))
    return second


def texts(found: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((row["word"], row["text"]) for row in found)


def run(query: Query) -> list[Counter[tuple[str, str]]]:
    """Run two batches, of which the second makes the record of the first."""
    return [texts(query.batch(2, rows(45))), texts(query.batch(3, rows(15), batch_ms=20))]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Counter[tuple[str, str]]]:
    return run(prepare(tmp_path_factory.mktemp("expected")))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Query:
    return prepare(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def operations(prepared: Query, tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    query = copied(prepared, tmp_path_factory.mktemp("counted"))
    with crashing(None) as found:
        query.batch(2, rows(45))
    names = {operation.name for operation in found}

    assert {OperationName.CREATE_EXCLUSIVELY, OperationName.CLOSE_OUTPUT} <= names
    return found


@pytest.fixture(scope="module")
def scenario(
    prepared: Query, operations: list[Operation], expected: list[Counter[tuple[str, str]]]
) -> Scenario:
    return prepared, operations, expected


def copied(prepared: Query, folder: Path) -> Query:
    """Return the same run of the query in another folder, without any local state."""
    shutil.copytree(prepared.folder / "state", folder / "state")
    return dataclasses.replace(prepared, folder=folder)


def broken(prepared: Query, folder: Path, number: int, action: FaultAction) -> Query:
    """Return the query after a batch in which an operation went wrong."""
    query = copied(prepared, folder)
    with crashing(number, action), suppress(StorageError, SimulatedCrashError):
        query.batch(2, rows(45))
    return query


def chosen(operations: list[Operation], action: FaultAction) -> list[int]:
    """Return operations that write, and where they fail some that read.

    All of them are crashed after; of the two kinds of failure each is for every second one.
    """
    reads = [found.number for found in operations if found.name in READS]
    writes = [found.number for found in operations if found.name not in READS]
    if action is FaultAction.FAIL:
        return [*writes[::2], *reads[::7]]
    return writes[1::2] if action is FaultAction.FAIL_AFTER else [0, *writes]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.value.replace(" ", "-"))
def test_a_batch_counts_once_whatever_operation_goes_wrong(
    tmp_path: Path, action: FaultAction, scenario: Scenario
) -> None:
    prepared, operations, expected = scenario
    for number in chosen(operations, action):
        query = broken(prepared, tmp_path / str(number), number, action)
        again = query.restarted(parallelism=(2, 3, 1)[number % 3])

        assert run(again) == expected, number
        record = again.seal(4)
        assert record is not None
        assert record.batch_id == 3
        assert again.storage.verify(record.checkpoint_id).problems == ()


@pytest.mark.parametrize("action", [FaultAction.FAIL, FaultAction.FAIL_AFTER], ids=str)
def test_a_task_that_spark_tries_again_counts_once(
    tmp_path: Path, action: FaultAction, scenario: Scenario
) -> None:
    """The same run, as with ``spark.task.maxFailures``."""
    prepared, operations, expected = scenario
    for number in chosen(operations, action)[::2]:
        query = broken(prepared, tmp_path / str(number), number, action)

        assert run(query) == expected, number


def test_a_store_that_fails_is_not_blamed_on_the_users_function(
    tmp_path: Path, prepared: Query, operations: list[Operation]
) -> None:
    for number in chosen(operations, FaultAction.FAIL)[::2]:
        query = copied(prepared, tmp_path / str(number))
        with crashing(number, FaultAction.FAIL), pytest.raises(StorageError):
            query.batch(2, rows(45))
