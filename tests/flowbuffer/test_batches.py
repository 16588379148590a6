"""Batches: what is emitted, what waits, and what happens to a batch that is run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspark.errors import OutputError
from flowstate.checkpoint import encode_record
from flowstate.errors import (
    CheckpointNotFoundError,
    CheckpointSupersededError,
    SnapshotCorruptError,
    StateMigrationError,
    StoreUnavailableError,
    StoreUnsupportedError,
)
from pyspark_flowbuffer.publishing import Publisher
from pyspark_flowbuffer.state import HANDLES_MAX

from .harness import VALUES, Query

VECTORS = Path(__file__).parents[1] / "vectors"
PAIRS = pa.schema([("k", pa.string()), ("n", pa.int64())])


def numbers(start: int, stop: int) -> list[str]:
    return [f"r{number:04d}" for number in range(start, stop)]


# Thresholds.


def test_a_full_buffer_is_a_file_of_exactly_the_threshold(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=5)

    query.batch(0, numbers(0, 12))

    assert list(query.files().values()) == [numbers(0, 5), numbers(5, 10)]
    assert query.buffers() == [numbers(10, 12)]


def test_rows_wait_over_batches_and_the_oldest_go_first(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=5)

    query.batch(0, numbers(0, 2))
    query.batch(1, numbers(2, 4))
    assert query.files() == {}
    query.batch(2, numbers(4, 7))

    assert query.published() == numbers(0, 5)
    assert query.buffers() == [numbers(5, 7)]


def test_a_batch_without_rows_leaves_the_buffer_as_it_is(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=5)
    query.batch(0, numbers(0, 2), numbers(2, 3))

    query.batch(1, [], [])
    query.batch(2, [])

    assert query.buffers() == [numbers(0, 2), numbers(2, 3)]
    query.batch(3, [], numbers(3, 7))
    assert query.published() == numbers(2, 7)


def test_the_buffer_is_full_by_its_bytes(tmp_path: Path) -> None:
    query = Query(tmp_path, maxBytes=100)
    rows = ["x" * 40] * 7

    query.batch(0, rows)

    assert all(len(found) == 3 for found in query.files().values())
    assert query.everything() == rows
    assert len(query.buffers()[0]) == 1


@pytest.mark.parametrize("partition_by", ["", "k"], ids=["plain", "partitioned"])
def test_the_buffer_is_emitted_when_its_oldest_row_is_too_old(
    tmp_path: Path, partition_by: str
) -> None:
    query = Query(tmp_path, maxAge="10 s", schema=PAIRS, partitionBy=partition_by)
    query.batch(0, [("a", 1)], now_ms=1000)
    query.batch(1, [("b", 2)], now_ms=6000)
    query.batch(2, [], now_ms=10_999)
    assert query.published() == []

    query.batch(3, [], now_ms=11_000)

    if partition_by:
        # Each value has a buffer of its own, with an age of its own.
        assert query.published() == [1]
        query.batch(4, [], now_ms=16_000)
        assert query.published() == [1, 2]
    else:
        assert query.published() == [("a", 1), ("b", 2)]
    assert query.buffers() == [[]]


def test_full_buffers_go_before_old_ones(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=3, maxAge="1 s")

    query.batch(0, numbers(0, 2), now_ms=0)
    query.batch(1, numbers(2, 4), now_ms=5000)

    # What is left of the full buffer came just now.
    assert list(query.files().values()) == [numbers(0, 3)]
    assert query.buffers() == [numbers(3, 4)]


# Files of partition values.


def test_with_partition_columns_each_value_has_its_own_threshold(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=2, schema=PAIRS, partitionBy="k")
    query.batch(0, [("a", 1), ("b", 2), (None, 3)])
    assert query.files() == {}

    query.batch(1, [("b", 4), ("", 5), ("c/d", 6), ("c/d", 7)])

    by_folder = {name.rpartition("/")[0]: rows for name, rows in query.files().items()}
    assert by_folder == {
        "k=b": [2, 4],
        # As in Hive and Spark, an empty text has no folder of its own.
        "k=__HIVE_DEFAULT_PARTITION__": [3, 5],
        "k=c%2Fd": [6, 7],
    }
    assert query.buffers() == [[("a", 1)]]


def test_an_empty_text_and_none_share_a_folder_in_their_order(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=3, schema=PAIRS, partitionBy="k")

    query.batch(0, [("", 1), (None, 2), ("", 3)])

    assert query.published() == [1, 2, 3]


def test_partitioned_rows_keep_their_order_when_clocks_do_not(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=4, maxAge="1 day", schema=PAIRS, partitionBy="k")
    query.batch(0, [("a", 1)], now_ms=2000)
    query.batch(1, [("a", 2)], now_ms=1000)
    query.batch(2, [("b", number) for number in range(4)], now_ms=3000)
    query.batch(3, [("a", 3), ("a", 4)], now_ms=4000)

    assert [rows for name, rows in query.files().items() if name.startswith("k=a")] == [
        [1, 2, 3, 4]
    ]


def test_a_value_too_long_for_a_folder_is_refused_before_it_counts(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=1, schema=PAIRS, partitionBy="k")

    with pytest.raises(OutputError, match="too long for the name of a folder"):
        query.batch(0, [("x" * 300, 1), ("y", 2)])
    query.batch(0, [("y", 2)])
    assert query.published() == [2]


def test_values_too_long_for_a_path_are_refused_before_they_count(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(20)]
    schema = pa.schema([*((name, pa.string()) for name in names), ("n", pa.int64())])
    query = Query(tmp_path, threshold=2, schema=schema, partitionBy=",".join(names))

    with pytest.raises(OutputError, match="'partitionBy' columns make a folder of"):
        query.batch(0, [(*["x" * 240] * 20, 1)])
    query.batch(0, [(*["x" * 150] * 20, 1), (*["x" * 150] * 20, 2)])
    assert query.published() == [1, 2]


def test_partitioned_rows_that_only_wait_are_not_written_again(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=1000, schema=PAIRS, partitionBy="k")
    big = [(f"{number:030d}", number) for number in range(900)]
    first = query.batch(0, big)
    second = query.batch(1, [("x", 1)])

    assert first is not None
    assert second is not None
    assert set(first.files) <= set(second.files)
    assert sorted(query.buffers()[0]) == sorted([*big, ("x", 1)])


# A batch that is run again.


def test_a_batch_that_was_committed_is_not_taken_again(tmp_path: Path) -> None:
    Query(tmp_path, threshold=5).batch(0, numbers(0, 7))
    again = Query(tmp_path, threshold=5)

    again.batch(0, numbers(0, 7))

    assert again.everything() == numbers(0, 7)
    assert again.storage.checkpoint_ids() == [1]
    assert again.staged() == []


def test_of_two_attempts_of_a_batch_one_counts(tmp_path: Path) -> None:
    first, second = Query(tmp_path, threshold=5), Query(tmp_path, threshold=5)
    early, late = first.tasks(0, [numbers(0, 7)]), second.tasks(0, [numbers(0, 7)])

    second.committer.commit(late, 0)
    first.committer.commit(early, 0)

    assert second.everything() == numbers(0, 7)
    assert len(second.files()) == 1
    assert second.staged() == []


def test_a_task_that_was_run_twice_counts_once(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=2)
    query.task(0, 0, numbers(0, 3))

    query.batch(0, numbers(0, 3))

    assert query.everything() == numbers(0, 3)


def test_what_a_lost_attempt_has_staged_is_swept(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=1)
    query.task(0, 0, ["lost"])
    assert len(query.staged()) == 1

    for batch_id in range(8):
        query.batch(batch_id, [f"r{batch_id}"])

    assert query.staged() == []
    assert query.published() == [f"r{batch_id}" for batch_id in range(8)]


def test_a_late_attempt_of_an_older_batch_is_refused(tmp_path: Path) -> None:
    late = Query(tmp_path, threshold=5).tasks(0, [numbers(0, 7)])
    query = Query(tmp_path, threshold=5)
    query.batch(0, numbers(0, 7))
    query.batch(1, numbers(7, 9))

    with pytest.raises(OutputError, match="was set back"):
        query.committer.commit(late, 0)
    assert query.everything() == numbers(0, 9)


def test_two_runs_at_once_do_not_mix(tmp_path: Path) -> None:
    one, other = Query(tmp_path, threshold=9), Query(tmp_path, threshold=9)
    one.batch(0, ["a"])
    of_one = one.tasks(1, [["b"], ["c"]])
    other.batch(1, ["b", "c"])
    mixed = [of_one[0], other.task(2, 1, ["d"])]

    with pytest.raises(CheckpointSupersededError, match="another run of this query"):
        one.committer.commit(mixed, 2)
    assert other.everything() == ["a", "b", "c"]


def test_output_goes_where_the_run_that_wrote_it_wanted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(tmp_path, threshold=2)
    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "publish", _die)
        with pytest.raises(KeyboardInterrupt):
            query.batch(0, ["a", "b", "c"])
    moved = Query(tmp_path, threshold=2, path=tmp_path / "elsewhere")

    moved.batch(0, ["a", "b", "c"])
    moved.batch(1, ["d"])

    assert query.published() == ["a", "b"]
    assert len(list((tmp_path / "elsewhere").glob("*.parquet"))) == 1


def _die(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_query_that_is_restored_finishes_the_output_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = Query(tmp_path / "a", threshold=2)
    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "publish", _die)
        with pytest.raises(KeyboardInterrupt):
            dead.batch(0, ["a", "b", "c"])

    options = {"query_id": "other", "restoreFrom": dead.storage.url}
    Query(tmp_path / "b", threshold=2, **options).batch(0, ["d"])

    assert dead.published() == ["a", "b"]
    assert Query(tmp_path / "b", threshold=2, **options).published() == ["c", "d"]


def test_an_older_record_that_is_damaged_does_not_stop_the_query(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for batch_id in range(7):
        Query(tmp_path, threshold=100, checkpointsRetained=5).batch(batch_id, ["r"])
    query = Query(tmp_path, threshold=100, checkpointsRetained=5)
    (Path(query.storage.url) / "chk-6" / "_metadata").write_bytes(b"xx")

    query.batch(7, ["r"])

    assert query.buffers() == [["r"] * 8]
    assert "stay for now" in caplog.text


# Where the state and the output must be.


def test_output_that_the_driver_does_not_find_does_not_count(tmp_path: Path) -> None:
    """As where the path is a folder of each machine and not one for all of them."""
    query = Query(tmp_path, threshold=2)
    results = query.tasks(0, [numbers(0, 5)])
    (elsewhere, _) = (tmp_path / "out").rglob("*.parquet")
    elsewhere.unlink()

    with pytest.raises(OutputError, match=r"1 of 2 files that tasks have staged are not there"):
        query.committer.commit(results, 0)
    assert query.storage.latest() is None
    query.batch(0, numbers(0, 5))
    assert query.everything() == numbers(0, 5)


def test_buffers_that_the_driver_does_not_find_do_not_count(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=100_000)
    results = query.tasks(0, [[f"{number * 7919:040x}" for number in range(5000)]])
    (elsewhere,) = Path(query.storage.url).rglob("*.arrow")
    elsewhere.unlink()

    with pytest.raises(OutputError, match="1 of 1 files of the buffers are not there"):
        query.committer.commit(results, 0)
    assert query.storage.latest() is None


def test_a_path_that_cannot_be_written_is_refused_before_rows_wait_for_it(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=100, path="/proc/nowhere")

    with pytest.raises(StoreUnavailableError, match="cannot write /proc/nowhere"):
        query.batch(0, ["a"])
    assert query.storage.latest() is None


def test_a_location_without_its_slashes_is_refused_in_the_first_batch(tmp_path: Path) -> None:
    with pytest.raises(StoreUnsupportedError, match="s3: but no slash behind it"):
        Query(tmp_path, threshold=100, path="s3:bucket/out").batch(0, ["a"])


def test_a_later_batch_without_state_is_an_error(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=5)

    with pytest.raises(CheckpointNotFoundError, match="startEmpty=true"):
        query.batch(3, ["a"])
    Query(tmp_path, threshold=5, startEmpty="true").batch(3, ["a"])
    assert query.everything() == ["a"]


def test_a_changed_uid_does_not_start_from_nothing(tmp_path: Path) -> None:
    Query(tmp_path, threshold=5).batch(0, ["a"])

    with pytest.raises(CheckpointNotFoundError):
        Query(tmp_path, threshold=5, uid="other").batch(1, ["b"])


@pytest.mark.parametrize(
    ("schema", "row", "message"),
    [
        (pa.schema([("k", pa.string())]), "a", "column 'n' was removed"),
        (
            pa.schema([*PAIRS, ("m", pa.int64())]),
            ("a", 1, 2),
            "column 'm' was added",
        ),
        (
            pa.schema([("k", pa.string()), ("n", pa.float64())]),
            ("a", 1.0),
            "column 'n' was int64 and is double",
        ),
        (pa.schema([("n", pa.int64()), ("k", pa.string())]), (1, "a"), "in the order k, n"),
    ],
    ids=["removed", "added", "retyped", "reordered"],
)
def test_other_columns_are_refused_and_the_rows_stay(
    tmp_path: Path, schema: pa.Schema, row: Any, message: str
) -> None:
    before = Query(tmp_path, threshold=5, schema=PAIRS)
    before.batch(0, [("a", 1)])

    with pytest.raises(StateMigrationError, match=message):
        Query(tmp_path, threshold=5, schema=schema).batch(1, [row])
    assert before.buffers() == [[("a", 1)]]


def test_an_empty_buffer_takes_other_columns(tmp_path: Path) -> None:
    Query(tmp_path, threshold=1).batch(0, ["a"])
    after = Query(tmp_path, threshold=2, schema=PAIRS)

    after.batch(1, [("a", 1)])

    assert after.buffers() == [[("a", 1)]]


@pytest.mark.parametrize("name", ["words", "buffer"])
def test_state_of_another_operator_is_refused(tmp_path: Path, name: str) -> None:
    from flowstate import ListStateDescriptor, LocalOperator

    query = Query(tmp_path, threshold=5)
    with LocalOperator(query.storage.url, parallelism=1) as operator:
        words = ListStateDescriptor(name, pa.struct(list(VALUES)))
        operator.subtasks[0].operator.get_list_state(words).add({"value": "a"})
        operator.checkpoint()

    with pytest.raises(StateMigrationError, match="belongs to another operator"):
        query.batch(2, ["a"])


def test_a_damaged_record_stops_the_query(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=5)
    query.batch(0, ["a"])
    record = Path(query.storage.url) / "chk-1" / "_metadata"
    record.write_bytes(record.read_bytes().replace(b'"batch_id":0', b'"batch_id":7'))

    with pytest.raises(SnapshotCorruptError, match="the checksum"):
        query.batch(1, ["b"])


# The list in its files.


def test_a_batch_writes_its_rows_and_not_the_buffer(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=100_000)
    rows = [f"{number:040x}" for number in range(5000)]
    first = query.batch(0, rows)
    second = query.batch(1, ["one more"])

    assert first is not None
    assert second is not None
    (name,) = first.files
    assert name in second.files
    assert query.buffers() == [[*rows, "one more"]]


def test_a_list_of_many_files_is_put_together(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=1_000_000)
    rows = [f"{number * 7919:040x}{number:040x}" for number in range(300)]
    for batch_id in range(2 * HANDLES_MAX):
        query.batch(batch_id, [f"{batch_id}:{row}" for row in rows])

    record = query.storage.latest()
    assert record is not None
    assert len(record.subtasks[0].operator) <= HANDLES_MAX
    assert query.buffers() == [
        [f"{batch_id}:{row}" for batch_id in range(2 * HANDLES_MAX) for row in rows]
    ]


def test_small_buffers_are_in_the_record_alone(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=100)
    for batch_id in range(5):
        record = query.batch(batch_id, [f"a{batch_id}"], [f"b{batch_id}"])

    assert record is not None
    assert record.files == {}
    assert [len(subtask.operator) for subtask in record.subtasks] == [1, 1]


def test_rows_of_many_ages_are_in_the_record_once(tmp_path: Path) -> None:
    for max_age in ({}, {"maxAge": "1 day"}):
        query = Query(tmp_path / str(len(max_age)), threshold=10_000, **max_age)
        for batch_id in range(20):
            record = query.batch(batch_id, [f"{batch_id}" * 400], now_ms=batch_id)

        assert record is not None
        assert len(encode_record(record)) < 40_000


def test_every_checkpoint_is_sound_and_old_ones_go(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=7, checkpointsRetained=3)
    for batch_id in range(20):
        rows = [f"{batch_id:03d}-{n}-{'x' * 300}" for n in range(60)]
        query.batch(batch_id, rows, rows[:5])
        for checkpoint_id in query.storage.checkpoint_ids():
            assert query.storage.verify(checkpoint_id).problems == ()

    assert query.storage.checkpoint_ids() == [18, 19, 20]


# The trace of Flink's own buffering sink.


def trace_batches(until: int) -> list[tuple[list[str], list[str]]]:
    """Return the inputs of the two subtasks between the checkpoints of the reference run."""
    trace = json.loads((VECTORS / "seed003_buffering_sink_trace.json").read_text())
    batches: list[tuple[list[str], list[str]]] = [([], [])]
    for event in trace["events"]:
        if "checkpoint" in event:
            batches.append(([], []))
        else:
            batches[-1][event["subtask"]].append(event["input"])
    return batches[:until]


def trace_contents() -> list[list[list[str]]]:
    trace = json.loads((VECTORS / "seed003_buffering_sink_trace.json").read_text())
    found = [event["contents"] for event in trace["events"] if "checkpoint" in event]
    return [[contents["0"], contents["1"]] for contents in found]


def test_the_trace_of_flinks_buffering_sink(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=5, checkpointsRetained=10)
    for batch_id, partitions in enumerate(trace_batches(5)):
        query.batch(batch_id, *partitions)

    assert [query.buffers(number) for number in range(1, 6)] == trace_contents()
    assert sorted(query.files().values()) == [
        ["a1", "a3", "a5", "a7", "a9"],
        ["a2", "a4", "a6", "a8", "a10"],
    ]


@pytest.mark.parametrize(
    ("parallelism", "emitted", "waiting"),
    [
        # Eight rows on one subtask are more than the threshold, so five of them go at once.
        (1, [["a2", "a4", "a6", "a8", "a1"]], [["a3", "a5", "a7"]]),
        (3, [], [["a2", "a4", "a6"], ["a8", "a1", "a3"], ["a5", "a7"]]),
    ],
)
def test_the_traces_third_checkpoint_restores_at_another_parallelism(
    tmp_path: Path, parallelism: int, emitted: list[list[str]], waiting: list[list[str]]
) -> None:
    source = Query(tmp_path / "one", threshold=5, checkpointsRetained=10)
    for batch_id, partitions in enumerate(trace_batches(5)):
        source.batch(batch_id, *partitions)
    restored = Query(
        tmp_path / "two",
        threshold=5,
        query_id="another",
        parallelism=parallelism,
        restoreFrom=f"{source.storage.url}/chk-3",
    )

    restored.batch(0, *([[]] * parallelism))

    assert list(restored.files().values()) == emitted
    assert restored.buffers() == waiting


# Random programs.


@given(
    st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=4),
        min_size=1,
        max_size=7,
    ),
    st.integers(1, 6),
    st.sampled_from(["none", "same", "crash"]),
)
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_or_doubled_whatever_the_partitions_are(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[list[int]],
    threshold: int,
    again: str,
) -> None:
    folder = tmp_path_factory.mktemp("random")
    expected: list[str] = []
    for batch_id, counts in enumerate(sizes):
        partitions = [
            [f"{batch_id}.{index}.{n}" for n in range(count)] for index, count in enumerate(counts)
        ]
        query = Query(folder, threshold=threshold)
        if again == "crash":
            query.tasks(batch_id, partitions)
        query.batch(batch_id, *partitions)
        if again == "same":
            Query(folder, threshold=threshold).batch(batch_id, *partitions)
        expected += [row for rows in partitions for row in rows]

    query = Query(folder, threshold=threshold)
    assert query.everything() == sorted(expected)
    assert all(len(rows) == threshold for rows in query.files().values())
