"""What a batch leaves behind, whoever runs it, how often, and in what order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowspark.errors import IncompleteBatchError, OptionError, OutputError
from flowstate.errors import CheckpointNotFoundError, FlowError

from .functions import Sum
from .harness import Query, row_factory, rows_of, words_of


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(folder=tmp_path, factory=row_factory(Sum()))


def everywhere(query: Query, n: int = 1) -> list[tuple[str, int]]:
    """Return rows for all subtasks, three words for each."""
    return [(word, n) for words in words_of(query) for word in words]


def sums(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return the last sum of each word."""
    return {row["word"]: int(row["text"]) for row in rows}


def each(rows: list[tuple[str, int]], total: int) -> dict[str, int]:
    return {word: total for word, _ in rows}


def test_the_next_batch_of_a_run_goes_on_from_the_parts(query: Query) -> None:
    rows = everywhere(query)
    for batch_id in range(4):
        found = sums(query.batch(batch_id, rows))

        assert found == each(rows, batch_id + 1)
    assert [path for path in query.files() if path.endswith("_metadata")] == [
        "chk-2/_metadata",
        "chk-3/_metadata",
    ]


def test_two_runs_at_two_parallelisms_write_one_batch_and_the_second_counts_once(
    query: Query,
) -> None:
    rows = everywhere(query.restarted(parallelism=3))
    query.batch(0, rows)
    query.batch(1, rows)
    # Spark dies before it commits batch 1.
    second = query.restarted(parallelism=3)

    assert sums(second.batch(1, rows)) == each(rows, 2)
    assert sums(second.batch(2, rows)) == each(rows, 3)


@pytest.mark.parametrize("committed", [1, 2, 3], ids=lambda number: f"run-{number}")
def test_of_three_runs_that_wrote_one_batch_any_may_have_been_committed(
    query: Query, committed: int
) -> None:
    rows = everywhere(query.restarted(parallelism=5))
    runs = [query, query.restarted(parallelism=3), query.restarted(parallelism=5)]
    query.batch(0, rows)
    for run in runs[:committed]:
        run.batch(1, rows)
    # The last of them committed the batch, and died.
    last = query.restarted(parallelism=4)

    assert sums(last.batch(2, rows)) == each(rows, 3)


def test_an_unfinished_run_of_a_batch_does_not_stand_in_for_the_one_that_finished(
    query: Query,
) -> None:
    rows = everywhere(query.restarted(parallelism=3))
    query.batch(0, rows, order=[1])
    second = query.restarted(parallelism=3)
    second.batch(0, rows)
    third = query.restarted()

    assert sums(third.batch(1, rows)) == each(rows, 2)


@pytest.mark.parametrize("has_begun", [False, True], ids=["before-batch-2", "in-batch-2"])
def test_late_tasks_of_a_dead_run_change_nothing(query: Query, has_begun: bool) -> None:
    rows = everywhere(query.restarted(parallelism=3))
    query.batch(0, rows)
    query.batch(1, rows, order=[0])
    second = query.restarted(parallelism=3)
    second.batch(1, rows)
    if has_begun:
        second.batch(2, rows, order=[2])
    # The dead run's last task comes after all tasks of the newer run.
    query.batch(1, rows, order=[1])

    order = [0, 1] if has_begun else None
    found = sums(second.batch(2, rows, order=order))
    assert set(found.values()) == {3}
    assert sums(second.restarted(parallelism=2).batch(3, rows)) == each(rows, 4)


def test_a_late_task_whose_batch_is_long_past_fails_and_writes_no_part(query: Query) -> None:
    rows = everywhere(query)
    query.batch(0, rows)
    late = query.restarted()
    for batch_id in range(1, 5):
        query.batch(batch_id, rows)
    before = query.files()

    with pytest.raises(FlowError):
        late.batch(1, rows, order=[0])
    assert query.files() == before


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_partition_that_never_ran_makes_the_next_batch_fail_with_what_to_do(
    query: Query, skipped: int
) -> None:
    rows = everywhere(query)
    query.batch(0, rows)
    query.batch(1, rows, order=[1 - skipped])

    for run in (query, query.restarted(), query.restarted(parallelism=3)):
        with pytest.raises(IncompleteBatchError) as caught:
            run.batch(2, rows)

        message = str(caught.value)
        assert message.startswith("[FLOWKEYED_INCOMPLETE")
        assert "commits/1 and offsets/2" in message
    again = query.restarted()
    assert sums(again.batch(1, rows)) == each(rows, 2)
    assert sums(again.batch(2, rows)) == each(rows, 3)


def test_output_that_nobody_reads_to_its_end_does_not_cost_state(query: Query) -> None:
    rows = [(word, 1) for words in words_of(query) for word in words for _ in range(9000)]
    for index, batches in enumerate(query.partitions(rows)):
        output = query.execute(0, batches, partition=index)
        next(output)
        del output

    assert sums(query.batch(1, everywhere(query))) == each(everywhere(query), 9001)


def test_one_batch_that_runs_twice_at_once_on_a_host_counts_once(query: Query) -> None:
    rows = [(word, 1) for words in words_of(query, 40) for word in words]
    for batch_id in range(3):
        found: list[list[dict[str, Any]]] = []
        errors: list[BaseException] = []

        def run(
            batch_id: int = batch_id,
            found: list[list[dict[str, Any]]] = found,
            errors: list[BaseException] = errors,
        ) -> None:
            try:
                found.append(query.batch(batch_id, rows))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert not errors
        assert [sums(one) for one in found] == [each(rows, batch_id + 1)] * 3


def test_a_second_execution_hands_on_the_same_rows_and_overwrites_nothing(
    query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    rows = everywhere(query)
    query.batch(0, rows)
    first = query.batch(1, rows)
    parts = {path: query.storage.file_system.read(path) for path in query.files()}

    again = query.batch(1, rows, order=[1, 0, 0, 1])
    assert again == [*first[3:], *first[:3], *first[:3], *first[3:]]
    assert all(query.storage.file_system.read(path) == data for path, data in parts.items())
    assert "FLOWKEYED_NOT_REPEATABLE" not in caplog.text


def test_a_second_execution_that_comes_to_other_state_is_warned_of(
    query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    rows = everywhere(query)
    query.batch(0, rows)
    with caplog.at_level(logging.WARNING):
        query.batch(0, everywhere(query, 7))

    assert caplog.text.count("[FLOWKEYED_NOT_REPEATABLE]") == 2
    assert "operator 'words', subtask 1" in caplog.text
    assert sums(query.batch(1, rows)) == each(rows, 2)


def test_a_batch_that_spark_forgot_to_have_committed_runs_again_and_counts_once(
    query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    rows = everywhere(query.restarted(parallelism=3))
    query.batch(0, rows)
    query.batch(1, rows)
    query.batch(2, rows)
    # The record of batch 1 is there, and Spark's commit log ends with batch 0.
    again = query.restarted(parallelism=3)

    assert sums(again.batch(1, rows)) == each(rows, 2)
    assert sums(again.batch(2, rows)) == each(rows, 3)
    assert "FLOWKEYED_NOT_REPEATABLE" not in caplog.text


def test_a_checkpoint_location_that_was_set_back_is_refused(query: Query) -> None:
    rows = everywhere(query)
    for batch_id in range(5):
        query.batch(batch_id, rows)

    with pytest.raises(FlowError, match="has been retired"):
        query.restarted().batch(2, rows)


# Batch jobs.


def test_a_batch_job_is_sealed_by_its_last_subtask(tmp_path: Path) -> None:
    job = Query(folder=tmp_path, factory=row_factory(Sum()), query_id=None, parallelism=3)
    rows = everywhere(job)
    job.batch(None, rows, order=[0, 2])
    assert not job.storage.checkpoint_ids()
    job.batch(None, rows, order=[1])

    assert job.storage.checkpoint_ids() == [1]
    stream = Query(
        folder=tmp_path,
        factory=row_factory(Sum()),
        settings={"restore_from": str(tmp_path / "state" / "batch")},
    )
    assert sums(stream.batch(0, rows)) == each(rows, 2)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_a_batch_job_is_sealed_when_some_subtasks_have_no_rows(
    tmp_path: Path, order: list[int]
) -> None:
    job = Query(folder=tmp_path, factory=row_factory(Sum()), query_id=None, parallelism=3)
    rows = [(word, 1) for word in words_of(job)[1]]
    job.batch(None, rows, order=order)

    assert job.storage.checkpoint_ids() == [1]
    assert sums(job.batch(None, rows)) == each(rows, 1)
    assert job.storage.checkpoint_ids() == [1]


def test_another_batch_job_at_the_same_place_is_refused(tmp_path: Path) -> None:
    job = Query(folder=tmp_path, factory=row_factory(Sum()), query_id=None)
    rows = everywhere(job)
    job.batch(None, rows)

    with pytest.raises(OptionError, match="another batch job"):
        job.restarted().batch(None, rows)


def test_of_two_batch_jobs_at_once_one_fails(tmp_path: Path) -> None:
    job = Query(folder=tmp_path, factory=row_factory(Sum()), query_id=None)
    other = job.restarted()
    rows = everywhere(job)
    # The other one has looked around before the first one is through.
    job.batch(None, rows, order=[0])
    inputs = other.partitions(rows)
    rows_of(other.execute(None, inputs[0]))

    def slow() -> Any:
        job.batch(None, rows, order=[1])
        yield from inputs[1][1:]

    def late() -> Any:
        yield inputs[1][0]
        yield from slow()

    with pytest.raises(OptionError, match="another batch job"):
        rows_of(other.execute(None, late()))


def test_a_stream_of_which_spark_hides_the_batch_is_no_batch_job(query: Query) -> None:
    hidden = query.restarted(query_id=None, settings={"is_streaming": True})

    for rows in (everywhere(query), []):
        with pytest.raises(OptionError, match="does not say which micro-batch this is"):
            hidden.batch(0, rows)
    assert hidden.files() == []


# Empty partitions.


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
def test_subtasks_without_rows_keep_what_they_have(query: Query, first: int, second: int) -> None:
    query = query.restarted(parallelism=3)
    words = words_of(query)
    rows = everywhere(query)
    query.batch(0, rows)
    query.batch(1, [(word, 1) for word in words[first]])
    query.batch(2, [(word, 1) for word in words[second]])
    expected = {
        word: 2 + (index == first) + (index == second)
        for index, mine in enumerate(words)
        for word in mine
    }

    assert sums(query.batch(3, rows)) == expected
    last = query.restarted(parallelism=2)
    found = sums(last.batch(4, rows))
    assert found == {word: total + 1 for word, total in expected.items()}


@pytest.mark.parametrize("only", range(3))
def test_subtasks_without_rows_get_their_share_after_a_rescale(query: Query, only: int) -> None:
    wide = query.restarted(parallelism=3)
    rows = everywhere(wide)
    query.batch(0, rows)
    mine = words_of(wide)[only]
    wide.batch(1, [(word, 1) for word in mine])
    found = sums(wide.batch(2, rows))

    assert found == {word: 3 if word in mine else 2 for word, _ in rows}


@pytest.mark.parametrize("only", range(2))
def test_a_batch_in_which_nobody_has_rows_changes_nothing(query: Query, only: int) -> None:
    rows = everywhere(query)
    mine = [(word, 1) for word in words_of(query)[only]]
    query.batch(0, [])
    query.batch(1, mine)
    query.batch(2, [])
    query.restarted(parallelism=3).batch(3, [])
    last = query.restarted()
    last.batch(4, [])

    assert sums(last.batch(5, mine)) == each(mine, 2)
    assert sums(last.batch(6, rows))[mine[0][0]] == 3


def test_the_signs_of_many_batches_without_rows_do_not_pile_up(query: Query) -> None:
    mine = [(word, 1) for word in words_of(query)[0]]
    query.batch(0, mine)
    for batch_id in range(1, 120):
        query.batch(batch_id, [])
    signs = [path for path in query.files() if "/none-" in path]

    assert 0 < len(signs) < 40 * query.parallelism
    assert sums(query.restarted(parallelism=3).batch(120, mine)) == each(mine, 2)


def test_a_task_of_coalesced_partitions_runs_several_subtasks(query: Query) -> None:
    query = query.restarted(parallelism=4)
    words = words_of(query)
    some = [(word, 1) for word in words[1]]
    for batch_id in range(3):
        inputs = query.partitions(some)
        for index in (0, 1, 2, 3):
            rows_of(query.execute(batch_id, inputs[index], partition=0, stage=7, task=batch_id))

    assert sums(query.batch(3, some)) == each(some, 4)


def test_empty_partitions_that_were_tried_twice_do_not_stand_for_others(query: Query) -> None:
    query = query.restarted(parallelism=3)
    rows = [(word, 1) for word in words_of(query)[2]]
    inputs = query.partitions(rows)
    for stage in (1, 2):
        for _ in range(3):
            rows_of(query.execute(0, inputs[0], partition=0, stage=stage))
    rows_of(query.execute(0, inputs[2], partition=2, stage=1))

    with pytest.raises(IncompleteBatchError):
        query.batch(1, rows)


def test_an_action_that_reads_everything_in_several_stages_is_complete(query: Query) -> None:
    """As ``isEmpty()`` does, whose first job has one partition, if nothing is emitted."""
    query = query.restarted(parallelism=4)
    rows = [(word, 1) for word in words_of(query)[3]]
    inputs = query.partitions(rows)
    for stage, indexes in ((1, [0]), (2, [1, 2, 3])):
        for index in indexes:
            rows_of(query.execute(0, inputs[index], partition=index, stage=stage, action=7))

    assert sums(query.batch(1, rows)) == each(rows, 2)


@pytest.mark.parametrize(
    "calls",
    [[(1, 0, 7), (2, 0, 7)], [(1, 0, 7), (1, 0, 8)], [(1, 0, None), (2, 1, None)]],
    ids=["one-partition-in-two-stages", "two-actions", "no-action"],
)
def test_what_may_be_the_same_subtask_does_not_count_twice(
    query: Query, calls: list[tuple[int, int, int | None]]
) -> None:
    query = query.restarted(parallelism=3)
    rows = [(word, 1) for word in words_of(query)[2]]
    inputs = query.partitions(rows)
    for stage, partition, action in calls:
        rows_of(query.execute(0, inputs[0], partition=partition, stage=stage, action=action))
    rows_of(query.execute(0, inputs[2], partition=2, stage=1, action=7))

    with pytest.raises(IncompleteBatchError):
        query.batch(1, rows)


def test_a_later_batch_without_any_trace_of_state_is_refused(query: Query) -> None:
    rows = everywhere(query)
    with pytest.raises(CheckpointNotFoundError, match="start_empty=True"):
        query.batch(3, rows)
    assert query.files() == []
    with pytest.raises(CheckpointNotFoundError, match="start_empty=True"):
        query.batch(3, [])

    empty = query.restarted(settings={"start_empty": True})
    assert sums(empty.batch(3, rows)) == each(rows, 1)
    assert sums(query.restarted().batch(4, rows)) == each(rows, 2)


# Who it is.


def test_two_operators_with_one_uid_are_refused(query: Query) -> None:
    rows = everywhere(query)
    twin = query.restarted(run=query.run)
    query.batch(0, rows)

    with pytest.raises(OptionError, match="two operators of this query have the uid 'words'"):
        twin.batch(0, rows)


def test_two_operators_with_one_uid_are_refused_though_no_subtask_ran_in_both(
    query: Query,
) -> None:
    words = words_of(query)
    twin = query.restarted(run=query.run)
    query.batch(0, [(words[0][0], 1)], order=[0])
    twin.batch(0, [(words[1][0], 1)], order=[1])

    with pytest.raises(OptionError, match="two operators of this query have the uid 'words'"):
        query.batch(1, everywhere(query))


@pytest.mark.parametrize("is_at_once", [False, True], ids=["one-by-one", "at-once"])
def test_two_operators_with_one_uid_are_refused_though_their_parallelism_differs(
    query: Query, is_at_once: bool
) -> None:
    rows = everywhere(query)
    twin = query.restarted(run=query.run, parallelism=3)
    message = "two operators of this query have the uid 'words'"
    if not is_at_once:
        query.batch(0, rows)
        with pytest.raises(OptionError, match=message):
            twin.batch(0, rows)
        return

    def run_all(inputs: list[tuple[Query, list[pa.RecordBatch]]]) -> None:
        (one, batches), *others = inputs

        def given() -> Iterator[pa.RecordBatch]:
            yield batches[0]
            # This one has looked around, and has written nothing yet.
            if others:
                run_all(others)
            yield from batches[1:]

        rows_of(one.execute(0, given()))

    run_all([(one, batches) for one in (query, twin) for batches in one.partitions(rows)])
    for one in (query, twin, query.restarted(), twin.restarted(run=query.run)):
        with pytest.raises(OptionError, match=message):
            one.batch(1, rows)


def test_a_job_group_of_the_users_own_does_not_stop_a_batch_from_running_again(
    query: Query,
) -> None:
    # The same group in both runs, so it does not tell them apart.
    query = query.restarted(run="nightly")
    rows = everywhere(query)
    query.batch(0, rows)
    query.batch(1, rows, order=[0])
    again = query.restarted(run="nightly")

    assert sums(again.batch(1, rows)) == each(rows, 2)
    assert sums(again.batch(2, rows)) == each(rows, 3)


def test_rows_of_another_subtask_are_an_error_and_not_lost(query: Query) -> None:
    words = words_of(query)
    (first,) = query.partitions([(words[0][0], 1)])[0]
    (second,) = query.partitions([(words[1][0], 1)])[1]

    with pytest.raises((FlowError, OutputError)):
        rows_of(query.execute(0, [first, second]))
