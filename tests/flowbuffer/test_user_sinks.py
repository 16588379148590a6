"""Sinks of the user's: at least once in the task, exactly once in two phases."""

from __future__ import annotations

import math
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from flowspark import Committable, SinkContext, SinkFunction, TwoPhaseSink
from flowspark.errors import OptionError, OutputError
from flowspark.sinks import FLUSH_SEQUENCE
from flowstate import CheckpointListener
from pyspark_flowbuffer.flush import flush
from pyspark_flowbuffer.user_sinks import load_sink
from pyspark_flowbuffer.writer import BufferWriter

from .harness import Query


class Log:
    """What the sinks of one test did; sinks are made anew in each task."""

    events: ClassVar[list[Any]] = []
    failures: ClassVar[dict[str, int]] = {}

    @classmethod
    def add(cls, name: str, *values: Any) -> None:
        if cls.failures.get(name, 0):
            cls.failures[name] -= 1
            raise RuntimeError(f"{name} fails")
        cls.events.append((name, *values))

    @classmethod
    def of(cls, name: str) -> list[Any]:
        return [event[1:] for event in cls.events if event[0] == name]


@pytest.fixture(autouse=True)
def _clean_log() -> None:
    Log.events.clear()
    Log.failures.clear()


class Collecting(SinkFunction, CheckpointListener):
    def write(self, batch: pa.RecordBatch, context: SinkContext) -> None:
        Log.add("write", context, batch.column(0).to_pylist())

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        Log.add("complete", checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        Log.add("aborted", checkpoint_id)

    def close(self) -> None:
        Log.add("close")


class Preparing(TwoPhaseSink, CheckpointListener):
    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self.value: Any = {"table": options.get("table")}

    def prepare(self, batch: pa.RecordBatch, context: SinkContext) -> Any:
        Log.add("prepare", context, batch.column(0).to_pylist())
        return {**self.value, "rows": batch.column(0).to_pylist()}

    def commit(self, committables: Sequence[Committable]) -> None:
        Log.add("commit", list(committables))

    def abort(self, committables: Sequence[Committable]) -> None:
        Log.add("abort", list(committables))

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        Log.add("complete", checkpoint_id)


class Attempt(Preparing):
    """Prepares under a name that no other attempt has."""

    def prepare(self, batch: pa.RecordBatch, context: SinkContext) -> Any:
        return uuid.uuid4().hex


class Stable(Preparing):
    """Prepares under the context, which is the same for each attempt."""

    def prepare(self, batch: pa.RecordBatch, context: SinkContext) -> Any:
        return f"{context.batch_id}-{context.subtask_index}-{context.sequence_number}"


class NotJson(Preparing):
    def prepare(self, batch: pa.RecordBatch, context: SinkContext) -> Any:
        return {"when": (1, 2)}


class Unfinished(TwoPhaseSink):
    def prepare(self, batch: pa.RecordBatch, context: SinkContext) -> Any:
        return None


class NoSink:
    pass


def query(folder: Path, sink: type, **options: Any) -> Query:
    return Query(folder, threshold=2, sinkFunction=f"{__name__}:{sink.__name__}", **options)


def test_a_sink_function_is_given_full_buffers_with_their_place(tmp_path: Path) -> None:
    query(tmp_path, Collecting).batch(0, ["a", "b", "c", "d", "e"], ["f", "g"])

    assert Log.of("write") == [
        (SinkContext("query", 0, 0, 0), ["a", "b"]),
        (SinkContext("query", 0, 0, 1), ["c", "d"]),
        (SinkContext("query", 0, 1, 0), ["f", "g"]),
    ]
    assert Log.of("complete") == [(1,)]
    assert len(Log.of("close")) == 3


def test_a_sink_function_that_raises_fails_the_task_and_nothing_is_lost(tmp_path: Path) -> None:
    sink = query(tmp_path, Collecting)
    Log.failures["write"] = 1

    with pytest.raises(RuntimeError, match="write fails"):
        sink.batch(0, ["a", "b", "c"])
    sink.committer.abort(0)
    sink.batch(0, ["a", "b", "c"])

    assert Log.of("aborted") == [(1,)]
    assert Log.of("write") == [(SinkContext("query", 0, 0, 0), ["a", "b"])]
    assert sink.buffers() == [["c"]]


@pytest.mark.parametrize(
    ("metadata", "aborted"),
    [('{"id":"query"}', [(2,)]), ("{}", []), ("", []), (None, [])],
    ids=["known", "without an id", "empty", "absent"],
)
def test_a_batch_of_which_no_task_ended_is_aborted_too(
    tmp_path: Path, metadata: str | None, aborted: list[Any]
) -> None:
    sink = query(tmp_path, Collecting)
    sink.batch(0, ["a"])
    if metadata is not None:
        (tmp_path / "checkpoint" / "metadata").write_text(metadata)

    BufferWriter(sink.options, sink.schema).abort([None, None], 1)

    assert Log.of("aborted") == aborted


def test_an_abort_after_the_record_is_no_abort(tmp_path: Path) -> None:
    sink = query(tmp_path, Collecting)
    Log.failures["complete"] = 1

    with pytest.raises(RuntimeError, match="complete fails"):
        sink.batch(0, ["a", "b"])
    sink.committer.abort(0)

    assert Log.of("aborted") == []


def test_a_two_phase_sink_commits_what_the_record_keeps(tmp_path: Path) -> None:
    sink = query(tmp_path, Preparing, **{"sink.table": "t"})

    record = sink.batch(0, ["a", "b", "c"])

    ((committed,),) = Log.of("commit")
    assert committed == [
        Committable(SinkContext("query", 0, 0, 0), {"table": "t", "rows": ["a", "b"]})
    ]
    assert record is not None
    assert "'t'" not in str(record.attributes)


def test_a_commit_that_raises_is_repeated_when_the_batch_runs_again(tmp_path: Path) -> None:
    sink = query(tmp_path, Preparing)
    Log.failures["commit"] = 1

    with pytest.raises(RuntimeError, match="commit fails"):
        sink.batch(0, ["a", "b"])
    assert Log.of("commit") == []
    sink.batch(0, ["a", "b"])

    assert len(Log.of("prepare")) == 1
    assert len(Log.of("commit")) == 1
    assert Log.of("complete") == [(1,)]


def test_what_an_attempt_prepared_in_vain_is_aborted(tmp_path: Path) -> None:
    first, second = query(tmp_path, Attempt), query(tmp_path, Attempt)
    early, late = first.tasks(0, [["a", "b"]]), second.tasks(0, [["a", "b"]])

    first.committer.commit(early, 0)
    second.committer.commit(late, 0)

    assert len(Log.of("abort")) == 1
    assert len(Log.of("commit")) == 2
    assert Log.of("commit")[0] == Log.of("commit")[1]


def test_what_the_winner_has_prepared_too_is_not_aborted(tmp_path: Path) -> None:
    first, second = query(tmp_path, Stable), query(tmp_path, Stable)
    early, late = first.tasks(0, [["a", "b"]]), second.tasks(0, [["a", "b"]])

    first.committer.commit(early, 0)
    second.committer.commit(late, 0)

    assert Log.of("abort") == []
    assert len(Log.of("commit")) == 2


def test_a_batch_without_partitions_writes_nothing_that_does_not_count(tmp_path: Path) -> None:
    sink = query(tmp_path, Collecting, maxAge="1 s")
    sink.batch(0, ["a"], ["b"], now_ms=1000)
    sink.batch(1, [], now_ms=9000)
    sink.batch(2, ["c"], ["d"], now_ms=9001)

    assert [rows for _, rows in Log.of("write")] == [["a"], ["b", "d"]]
    assert sink.buffers() == [["c"], []]


def test_another_sink_is_refused_while_output_may_be_uncommitted(tmp_path: Path) -> None:
    Log.failures["commit"] = 1
    with pytest.raises(RuntimeError, match="commit fails"):
        query(tmp_path, Preparing).batch(0, ["a", "b"])

    with pytest.raises(OutputError, match="may not be committed yet"):
        Query(tmp_path, threshold=2).batch(0, ["a", "b"])
    query(tmp_path, Preparing).batch(0, ["a", "b"])
    assert len(Log.of("commit")) == 1


@pytest.mark.parametrize("rows", ["abc", "ab"], ids=["rows wait", "nothing waits"])
def test_a_flush_is_the_way_to_another_sink(tmp_path: Path, rows: str) -> None:
    before = query(tmp_path, Preparing)
    before.batch(0, list(rows))
    flush(before.storage.url)
    commits = len(Log.of("commit"))

    after = Query(tmp_path, threshold=2)
    # Spark did not learn of the end of batch 0, and runs it again.
    after.batch(0, list(rows))
    after.batch(1, ["d", "e"])

    assert after.published() == ["d", "e"]
    assert len(Log.of("commit")) == commits


def test_a_flush_that_dies_before_it_has_settled_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    def die(*_: object) -> None:
        raise KilledError

    before = query(tmp_path, Preparing)
    before.batch(0, list("abc"))
    with monkeypatch.context() as killed:
        killed.setattr("pyspark_flowbuffer.flush._settle", die)
        with pytest.raises(KilledError):
            flush(before.storage.url)
    with pytest.raises(OutputError, match="may not be committed yet"):
        Query(tmp_path, threshold=2).batch(1, ["d", "e"])

    assert flush(before.storage.url).rows == 0
    after = Query(tmp_path, threshold=2)
    after.batch(1, ["d", "e"])
    assert after.published() == ["d", "e"]
    assert sorted(row for _, rows in Log.of("prepare") for row in rows) == ["a", "b", "c"]


def test_what_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="must return something of JSON"):
        query(tmp_path, NotJson).batch(0, ["a", "b"])


@pytest.mark.parametrize("sink", [Collecting, Preparing])
def test_a_flush_reaches_the_sink_under_a_number_of_its_own(tmp_path: Path, sink: type) -> None:
    stopped = query(tmp_path, sink)
    stopped.batch(0, ["a", "b", "c"])

    assert flush(stopped.storage.url, sink_options={"table": "t"}).rows == 1
    assert flush(stopped.storage.url).rows == 0

    name = "write" if sink is Collecting else "prepare"
    assert Log.of(name)[-1] == (SinkContext("query", 0, 0, FLUSH_SEQUENCE), ["c"])
    assert stopped.buffers() == [[]]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "must be written as package.module:Class"),
        ("no.such.module:Class", "cannot be imported (ModuleNotFoundError"),
        (f"{__name__}:Missing", "has no 'Missing'"),
        (f"{__name__}:NoSink", "is neither a flowspark.SinkFunction nor a flowspark.TwoPhaseSink"),
        (f"{__name__}:query", "is neither a flowspark.SinkFunction"),
        (f"{__name__}:Unfinished", "does not implement commit"),
    ],
)
def test_a_sink_that_cannot_be_is_refused(function: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        load_sink(function)

    assert message in str(caught.value)
    assert function in str(caught.value)


# The example.

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_the_sqlite_example_keeps_every_value_and_commits_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    database = str(tmp_path / "rows.db")
    columns: dict[str, list[Any]] = {
        "a b": [0.1 + 0.2, math.inf, None],
        "n": [2**63 - 1, -(2**63), 0],
    }
    columns |= {"s": ["x", "'\"\n", None], "raw": [b"\x00", b"", None]}
    rows = list(zip(*columns.values(), strict=True))
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute('create table rows ("a b" real, n integer, s text, raw blob)')
    sink = load_sink("sqlite_sink:SqliteSink")({"database": database, "table": "rows"})
    assert isinstance(sink, TwoPhaseSink)
    context = SinkContext("query", 0, 0, 0)

    kept, lost = (sink.prepare(pa.record_batch(columns), context) for _ in range(2))
    sink.abort([Committable(context, lost)])
    for _ in range(2):
        sink.commit([Committable(context, kept)])

    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("select * from rows").fetchall() == rows
        assert connection.execute("select count(*) from flow_staged").fetchone() == (0,)


def test_the_sqlite_example_refuses_what_it_could_not_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sink = load_sink("sqlite_sink:SqliteSink")({"database": str(tmp_path / "rows.db")})
    assert isinstance(sink, TwoPhaseSink)

    with pytest.raises(TypeError, match="cast it to a text or a number"):
        sink.prepare(pa.record_batch({"d": [Decimal(1)]}), SinkContext("query", 0, 0, 0))
