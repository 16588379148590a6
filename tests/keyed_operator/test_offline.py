"""The state of a stopped query: sealing its last batch, and starting from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspark.keyed.offline import seal_last_batch, unsealed_groups
from flowstate.checkpoint import CheckpointStorage
from tests.flow_command.shell import flow

from .functions import Sum
from .harness import Query, row_factory, words_of


@pytest.fixture
def query(tmp_path: Path) -> Query:
    """A stopped query with two batches, of which the second is not sealed."""
    query = Query(folder=tmp_path, factory=row_factory(Sum()), max_parallelism=8)
    for batch_id in range(2):
        query.batch(batch_id, rows(query))
    return query


def rows(query: Query) -> list[tuple[str, int]]:
    return [(word, 1) for words in words_of(query) for word in words]


def commits(query: Query, *batch_ids: int) -> Path:
    folder = query.folder / "checkpoint"
    (folder / "commits").mkdir(parents=True)
    for batch_id in batch_ids:
        (folder / "commits" / str(batch_id)).write_text("v1\n{}")
        (folder / "commits" / f".{batch_id}.crc").write_text("")
    return folder


def test_the_last_batch_is_sealed_as_the_next_one_would(query: Query) -> None:
    (group,) = unsealed_groups(query.storage)
    record = seal_last_batch(query.storage, "words", {0, 1})

    assert record is not None
    assert (group.batch_id, record.batch_id, record.checkpoint_id) == (1, 1, 2)
    assert seal_last_batch(query.storage, "words", {0, 1}) is None
    assert {row["text"] for row in query.batch(2, rows(query))} == {"3"}
    following = query.restarted(
        query_id="next", parallelism=3, settings={"restore_from": f"{query.root}/chk-2"}
    )
    assert {row["text"] for row in following.batch(0, rows(query))} == {"3"}


def test_a_batch_that_spark_has_not_committed_is_left_alone(query: Query) -> None:
    assert seal_last_batch(query.storage, "words", {0}) is None
    assert len(unsealed_groups(query.storage)) == 1


def test_the_last_run_of_a_batch_is_what_counts(query: Query) -> None:
    again = query.restarted(parallelism=3)
    again.batch(1, rows(query))
    record = seal_last_batch(query.storage, "words", {0, 1})

    assert record is not None
    assert record.parallelism == 3


def test_nothing_is_retired_by_sealing(query: Query) -> None:
    query.batch(2, rows(query))
    before = query.storage.checkpoint_ids()
    seal_last_batch(query.storage, "words", range(10))

    assert query.storage.checkpoint_ids() == [*before, 3]


def test_the_command_asks_sparks_commit_log(query: Query) -> None:
    folder = commits(query, 0)
    shown = flow("seal", query.root, "--checkpoint-location", folder)
    assert shown.code == 0
    assert "Spark has not committed batch 1 and will run it again" in shown.out

    (folder / "commits" / "1").write_text("v1\n{}")
    shown = flow("seal", query.root.parent, "--checkpoint-location", folder)
    assert "words: chk-2 is the state after batch 1" in shown.out
    shown = flow("seal", query.root, "--checkpoint-location", folder, "--json")
    assert '"checkpoint_id": null' in shown.out


def test_a_folder_that_is_no_checkpoint_location_is_refused(query: Query) -> None:
    shown = flow("seal", query.root, "--checkpoint-location", query.folder / "nothing")

    assert shown.code == 3
    assert "it is not the checkpointLocation of a query that has run" in shown.err


def test_the_commits_of_another_query_say_nothing(query: Query) -> None:
    ours, other = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "ab")
    folder = commits(query, 0, 1)
    (folder / "metadata").write_text(f'{{"id":"{other}"}}')
    location = query.folder / "moved"
    location.mkdir()
    query.root.parent.rename(location / ours)
    storage = CheckpointStorage(location / ours / query.root.name)

    for url in (location, location / ours, storage.url):
        shown = flow("seal", url, "--checkpoint-location", folder)
        assert shown.code == 2
        assert f"is the checkpointLocation of query {other}, and {storage.url} belongs" in shown.err
        assert len(unsealed_groups(storage)) == 1
    (folder / "metadata").write_text(f'{{"id":"{ours}"}}')
    shown = flow("seal", location, "--checkpoint-location", folder)
    assert "words: chk-2 is the state after batch 1" in shown.out
