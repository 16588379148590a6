"""From which checkpoint a query may start, and which it refuses, with the outcomes of Flink."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowstate import KeyedProcessFunction, ValueStateDescriptor
from flowstate.errors import (
    FlowError,
    MaxParallelismError,
    SnapshotError,
    StateMigrationError,
    UnclaimedStateError,
)
from flowstate.keyed import warm

from .functions import Everything, Sum
from .harness import Query, row_factory, words_of

# So long, and so hard to compress, that the state does not fit into a record.
LONG = [random.Random(number).randbytes(800).hex() for number in range(40)]


class Nothing(KeyedProcessFunction[str, Any, Any]):
    def process_element(self, row: Any, ctx: Any) -> Any:
        return [(row.word, "0")]


class Other(KeyedProcessFunction[str, Any, Any]):
    def open(self, ctx: Any) -> None:
        self.last = ctx.get_state(ValueStateDescriptor("last", str))

    def process_element(self, row: Any, ctx: Any) -> Any:
        self.last.update(row.word)
        return []


@pytest.fixture
def query(tmp_path: Path) -> Query:
    """A query with two batches, of which the second is not sealed."""
    query = Query(folder=tmp_path, factory=row_factory(Sum()), max_parallelism=8)
    for batch_id in range(2):
        query.batch(batch_id, rows())
    return query


def rows(n: int = 1) -> list[tuple[str, int]]:
    return [(word, n) for word in LONG]


def sums(found: list[dict[str, Any]]) -> set[int]:
    assert {row["word"] for row in found} == set(LONG)
    return {int(row["text"]) for row in found}


def test_another_parallelism_is_fine(query: Query) -> None:
    assert sums(query.restarted(parallelism=4).batch(2, rows())) == {3}


@pytest.mark.parametrize("parallelism", [2, 9], ids=["p2", "p9"])
def test_another_max_parallelism_is_refused(query: Query, parallelism: int) -> None:
    changed = query.restarted(max_parallelism=16, parallelism=parallelism)

    with pytest.raises(MaxParallelismError, match="Max parallelism mismatch"):
        changed.batch(2, rows())
    assert sums(query.restarted().batch(2, rows())) == {3}


def test_another_type_of_key_is_refused(query: Query) -> None:
    changed = query.restarted(keys=("n",), key_type=pa.int64())

    with pytest.raises(StateMigrationError, match="keys are of type string"):
        changed.batch(2, rows())


def test_state_that_the_function_does_not_ask_for_is_refused_unless_that_is_allowed(
    query: Query,
) -> None:
    other = query.restarted(factory=row_factory(Other()))
    with pytest.raises(UnclaimedStateError, match="'sum'"):
        other.batch(2, rows())

    other.restarted(settings={"allow_non_restored_state": True}).batch(2, rows())
    # It is still there for a function that does.
    again = query.restarted(settings={"allow_non_restored_state": True}, parallelism=3)
    assert sums(again.batch(3, rows())) == {3}


def test_operator_state_that_the_function_does_not_ask_for_is_refused(tmp_path: Path) -> None:
    query = Query(folder=tmp_path, factory=row_factory(Everything()))
    query.batch(0, rows())

    with pytest.raises(UnclaimedStateError, match=r"'elements'.*'rules'.*'union'"):
        query.restarted(factory=row_factory(Nothing())).batch(1, rows())


# Another query's checkpoint.


def after(query: Query, folder: str, **changes: Any) -> Query:
    """Return another query that starts from a checkpoint of this one."""
    base = query.folder / "state"
    where = {
        "root": base / "query" / "words",
        "query": base / "query",
        "checkpoint": base / "query" / "words" / "chk-1",
    }
    settings = {"restore_from": str(where[folder]), **changes.pop("settings", {})}
    return query.restarted(query_id="next", settings=settings, **changes)


@pytest.mark.parametrize(("folder", "total"), [("root", 3), ("query", 3), ("checkpoint", 2)])
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_another_querys_checkpoint_is_a_start(
    query: Query, folder: str, total: int, parallelism: int
) -> None:
    query.seal(2)
    following = after(query, folder, parallelism=parallelism)

    assert sums(following.batch(0, rows())) == {total}
    assert sums(following.batch(1, rows())) == {total + 1}


def test_a_uid_that_the_other_query_does_not_have_is_refused_with_those_it_has(
    query: Query,
) -> None:
    query.seal(2)

    with pytest.raises(UnclaimedStateError, match=r"'others'.*'words'"):
        after(query, "query", uid="others").batch(0, rows())


def test_an_operator_that_the_other_query_did_not_have_may_start_empty(query: Query) -> None:
    query.seal(2)
    settings = {"allow_non_restored_state": True}
    following = after(query, "query", uid="others", settings=settings)

    assert sums(following.batch(0, rows())) == {1}
    assert sums(following.batch(1, rows())) == {2}


@pytest.mark.parametrize("only", [None, 0, 2], ids=["all", "first", "last"])
@pytest.mark.parametrize("is_restarted", [False, True], ids=["same-run", "restarted"])
def test_after_the_first_checkpoint_nothing_of_the_other_root_is_needed(
    query: Query, only: int | None, is_restarted: bool
) -> None:
    query.seal(2)
    following = after(query, "root", parallelism=3)
    some = [row for row in rows() if only in {None, following.subtask_of(row[0])}]
    following.batch(0, some)
    if is_restarted:
        following = following.restarted()
    record = following.seal(1)
    assert record is not None
    (query.folder / "state" / "query").rename(query.folder / "gone")

    assert following.storage.verify(record.checkpoint_id).problems == ()
    following = following.restarted(settings={"restore_from": None}, parallelism=2)
    expected = {3, 4} if only is not None else {4}
    assert sums(following.batch(1, rows())) == expected


def test_restore_from_is_ignored_with_a_warning_where_there_are_own_checkpoints(
    query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    query.seal(2)
    following = after(query, "root")
    for batch_id in range(3):
        following.batch(batch_id, rows())
    with caplog.at_level(logging.WARNING):
        found = following.restarted().batch(3, rows())

    assert sums(found) == {6}
    assert "restore_from is ignored" in caplog.text


def test_a_root_that_goes_on_meanwhile_does_not_mix_two_of_its_checkpoints(query: Query) -> None:
    query.seal(2)
    following = after(query, "root", parallelism=3)
    words = words_of(following)
    following.batch(0, [(words[0][0], 1)])
    # The other query is still running, and makes another checkpoint.
    query.batch(2, rows())
    query.batch(3, rows())

    assert sums(following.batch(1, rows(), order=[2, 1, 0])) == {3}
    assert sums(following.batch(2, rows())) == {4}


# Damage.


def damaged(query: Query, pattern: str, *, how: str) -> int:
    count = 0
    for path in query.root.glob(pattern):
        data = path.read_bytes()
        middle = len(data) // 2
        changed = {
            "cut": data[:middle],
            "empty": b"",
            "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        }
        path.write_bytes(changed[how])
        count += 1
    return count


@pytest.fixture
def elsewhere(query: Query) -> Query:
    """The next run of the query, on a host that has nothing of it in memory or on its disk."""
    warm._kept.clear()
    return query.restarted(settings={"working_folder": str(query.folder / "other")})


@pytest.mark.parametrize("how", ["cut", "empty", "flipped"])
@pytest.mark.parametrize("pattern", ["chk-2/*/part-*", "chk-1/_metadata", "shared/*"])
def test_what_is_damaged_is_an_error_that_names_it(
    query: Query, elsewhere: Query, pattern: str, how: str
) -> None:
    assert damaged(query, pattern, how=how)

    with pytest.raises(FlowError) as caught:
        elsewhere.batch(2, rows())
    assert str(caught.value).startswith("[FLOW")
    assert isinstance(caught.value, SnapshotError)
    assert pattern.partition("/")[0] in str(caught.value)


@pytest.mark.parametrize("pattern", ["shared/*", "chk-1/_metadata"])
def test_what_is_missing_is_an_error_and_not_empty_state(
    query: Query, elsewhere: Query, pattern: str
) -> None:
    for path in query.root.glob(pattern):
        path.unlink()

    with pytest.raises(FlowError):
        elsewhere.batch(2, rows())
