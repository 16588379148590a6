"""Another number of partitions: who gets which rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowspark.errors import OutputError
from flowstate.errors import StateMigrationError
from flowstate.key_groups import KeyGroupAssigner, key_group_of, subtask_index_of

from .harness import Query

VECTORS = Path(__file__).parents[1] / "vectors" / "operator_state_redistribution.json"
PAIRS = pa.schema([("k", pa.string()), ("n", pa.int64())])


def sink_cases(mode: str) -> list[Any]:
    """Return the reference cases that a sink can express: one state, which each subtask has."""
    found = []
    for case in json.loads(VECTORS.read_text())["cases"]:
        states = case["states"]
        if len(states) == 1 and states[0]["mode"] == mode:
            found.append(pytest.param(case, id=case["id"]))
    return found


def written(folder: Path, case: Any, **options: Any) -> Query:
    """Bring a sink to the lists of a case; a subtask that reported none has an empty one."""
    source = Query(folder, threshold=1000, parallelism=case["old_parallelism"], **options)
    source.batch(0, *(rows or [] for rows in case["states"][0]["per_subtask"]))
    return source


def expected_lists(case: Any) -> list[list[str]]:
    """Return the lists as ours: elements of several old subtasks in the order of these."""
    name = case["states"][0]["name"]
    return [
        [row for _, rows in sorted(of[name]["by_old_subtask"].items()) for row in rows]
        for of in case["expected"]
    ]


@pytest.mark.parametrize("how", ["restart", "restore"])
@pytest.mark.parametrize("case", sink_cases("SPLIT_DISTRIBUTE"))
def test_even_split_gives_each_subtask_what_flink_gives_it(
    tmp_path: Path, case: Any, how: str
) -> None:
    source = written(tmp_path / "a", case)
    parallelism = case["new_parallelism"]
    if how == "restart":
        query, batch_id = Query(tmp_path / "a", threshold=1000, parallelism=parallelism), 1
    else:
        query, batch_id = (
            Query(
                tmp_path / "b",
                query_id="other",
                threshold=1000,
                parallelism=parallelism,
                restoreFrom=source.storage.url,
            ),
            0,
        )

    query.batch(batch_id, *([[]] * parallelism))

    assert query.buffers() == expected_lists(case)


@pytest.mark.parametrize("case", sink_cases("UNION"))
def test_union_gives_everything_to_all_of_which_each_keeps_its_own(
    tmp_path: Path, case: Any
) -> None:
    settings = {"redistribution": "union", "bufferKey": "value"}
    written(tmp_path, case, **settings)
    parallelism = case["new_parallelism"]
    query = Query(tmp_path, threshold=1000, parallelism=parallelism, **settings)

    query.batch(1, *([[]] * parallelism))

    # Each subtask of the reference has all rows, and every row is kept by its owner alone.
    owners = {
        row: subtask_index_of(
            key_group_of(
                (row,),
                key_type=pa.struct([("value", pa.string())]),
                max_parallelism=32768,
                assigner=KeyGroupAssigner.XXHASH64,
            ),
            parallelism=parallelism,
            max_parallelism=32768,
        )
        for row in expected_lists(case)[0]
    }
    for index, rows in enumerate(query.buffers()):
        assert rows == [row for row in expected_lists(case)[index] if owners[row] == index]
    assert sorted(row for rows in query.buffers() for row in rows) == sorted(owners)


def test_union_brings_the_rows_of_one_key_together(tmp_path: Path) -> None:
    query = Query(
        tmp_path,
        threshold=4,
        schema=PAIRS,
        parallelism=2,
        redistribution="union",
        bufferKey="k",
    )

    query.batch(0, [("a", 1), ("b", 2)], [("a", 3), ("b", 4)])
    query.batch(1, [("a", 5), ("b", 6)], [("a", 7), ("b", 8)])
    query.batch(2, [], [])

    assert all(len({key for key, _ in rows}) <= 1 for rows in query.buffers())
    assert query.everything() == [
        (k, n) for k in "ab" for n in range(1, 9) if (n % 2) == (k == "a")
    ]


def test_without_a_parallelism_the_rows_follow_the_partitions(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=100)
    query.batch(0, ["a", "b", "c"], ["d"], ["e", "f"])

    query.batch(1, ["g"])
    assert query.buffers() == [["a", "b", "c", "g", "d", "e", "f"]]

    query.batch(2, ["h"], [], [])
    assert query.buffers() == [["a", "b", "c"], ["g", "d", "e"], ["f", "h"]]


def test_a_restored_query_with_fewer_partitions_copies_what_no_task_had(tmp_path: Path) -> None:
    source = Query(tmp_path / "a", threshold=100)
    source.batch(0, ["a"], ["b"], ["c"])
    query = Query(tmp_path / "b", query_id="other", threshold=100, restoreFrom=source.storage.url)

    query.batch(0, ["d"])

    assert query.buffers() == [["a", "d", "b", "c"]]
    record = query.storage.latest()
    assert record is not None
    assert query.storage.verify(record.checkpoint_id).problems == ()


def test_restore_from_is_ignored_where_there_are_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Query(tmp_path / "a", threshold=100)
    source.batch(0, ["a"])
    options: dict[str, Any] = {
        "query_id": "other",
        "threshold": 100,
        "restoreFrom": source.storage.url,
    }
    Query(tmp_path / "b", **options).batch(0, ["b"])

    again = Query(tmp_path / "b", **options)
    again.batch(1, ["c"])
    again.batch(2, ["d"])

    assert again.buffers() == [["a", "b", "c", "d"]]
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    Query(tmp_path / "b", query_id="other", startEmpty="true").batch(3, ["e"])
    assert "startEmpty is ignored" in caplog.text


@pytest.mark.parametrize("partitions", [1, 3])
def test_another_number_of_partitions_than_declared_is_refused(
    tmp_path: Path, partitions: int
) -> None:
    query = Query(tmp_path, threshold=1, parallelism=2)
    query.batch(0, ["a"], ["b"])

    with pytest.raises(OutputError, match=r"add \.repartition\(2\) in front"):
        query.batch(1, *([["c"]] * partitions))
    assert query.published() == ["a", "b"]


def test_an_empty_batch_of_one_partition_is_no_contradiction(tmp_path: Path) -> None:
    query = Query(tmp_path, threshold=5, parallelism=2)
    query.batch(0, [])
    query.batch(1, ["a"], ["b"])

    query.batch(2, [])
    assert query.buffers() == [["a"], ["b"]]
    query.batch(3, ["c"], ["d"])
    assert query.buffers() == [["a", "c"], ["b", "d"]]
    again = Query(tmp_path, threshold=5, parallelism=3)
    again.batch(4, [])
    assert again.buffers() == [["a", "c"], ["b"], ["d"]]


def test_an_empty_batch_of_one_partition_leaves_a_union_list_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"parallelism": 2, "redistribution": "union", "bufferKey": "value"}
    query = Query(tmp_path, threshold=5, maxAge="1 s", **options)
    query.batch(0, ["a", "b"], ["c", "d"], now_ms=0)

    assert query.batch(1, [], now_ms=9000) is None
    assert query.everything() == ["a", "b", "c", "d"]
    assert query.staged() == []


def test_another_redistribution_is_refused_while_rows_wait(tmp_path: Path) -> None:
    Query(tmp_path, threshold=5, parallelism=1).batch(0, ["a"])
    union = Query(tmp_path, threshold=5, parallelism=1, redistribution="union", bufferKey="value")

    with pytest.raises(StateMigrationError, match="redistribution=even-split"):
        union.batch(1, ["b"])
