"""What functions hand on, and what is said when they fail."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowspark.errors import FunctionError, InputError, OutputError
from flowspark.keyed.arrow_work import ArrowKeyedFunction, ArrowWorkFactory
from flowspark.keyed.output import OutputBuffer, RowWriter
from flowspark.keyed.schemas import arrow_schema
from flowstate import KeyedProcessFunction, Reducer, ReducingStateDescriptor
from flowstate.functions import OutputTag

from .functions import Sum
from .harness import Query, row_factory, rows_of, struct_type

SCHEMA = pa.schema([("word", pa.string()), ("n", pa.int64())])


@pytest.mark.parametrize("limit", [0, 100, 1 << 20], ids=lambda limit: f"spill-{limit}")
def test_output_comes_back_in_order_whether_it_was_spilled_or_not(limit: int) -> None:
    buffer = OutputBuffer(SCHEMA, spill_bytes=limit)
    batches = [
        pa.record_batch([pa.array([f"w{i}"] * (i % 4)), pa.array([i] * (i % 4))], schema=SCHEMA)
        for i in range(50)
    ]
    for batch in batches:
        buffer.add(batch)
    found = pa.Table.from_batches(buffer.drain(), SCHEMA)
    buffer.close()

    assert found.equals(pa.Table.from_batches(batches, SCHEMA))


def test_spilled_output_that_nobody_reads_is_let_go() -> None:
    buffer = OutputBuffer(SCHEMA, spill_bytes=0)
    buffer.add(pa.record_batch([pa.array(["a"]), pa.array([1])], schema=SCHEMA))
    buffer.close()
    buffer.close()


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (("a", "b"), "column 'n' is of type int64, and the function emitted 'b' (str)"),
        ((1, 2), "column 'word' is of type string, and the function emitted 1 (int)"),
        (("a", 1 << 63), "emitted 9223372036854775808 (int)"),
        (("a",), "a tuple of 2 values (word, n)"),
        ("ab", "not 'ab' (str)"),
        ({"word": "a", "m": 1}, "'m'"),
        (None, "not None (NoneType)"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_row_that_does_not_fit_is_named(row: Any, named: str) -> None:
    with pytest.raises(OutputError) as caught:
        RowWriter(SCHEMA, uid="words").batch([("a", 1), row])

    assert named in str(caught.value)
    assert "operator 'words'" in str(caught.value)


def test_rows_may_be_tuples_lists_and_dicts() -> None:
    writer = RowWriter(SCHEMA, uid="words")

    assert writer.batch([("a", 1), ["b", None]]).to_pydict() == {"word": ["a", "b"], "n": [1, None]}
    assert writer.batch([{"n": 1}, {"word": "b"}]).to_pydict() == {
        "word": [None, "b"],
        "n": [1, None],
    }


class Failing(Sum):
    def __init__(self, where: str) -> None:
        self.where = where

    def open(self, ctx: Any) -> None:
        super().open(ctx)
        if self.where == "open":
            raise ValueError("no way")

    def process_element(self, row: Any, ctx: Any) -> Any:
        if self.where == "process_element":
            raise ValueError("no way")
        ctx.timer_service.register_processing_time_timer(5)
        return super().process_element(row, ctx)

    def on_timer(self, timestamp: int, ctx: Any) -> Any:
        if self.where == "on_timer":
            raise ValueError("no way")
        return []

    def close(self) -> None:
        if self.where == "close":
            raise ValueError("no way")


@pytest.mark.parametrize("where", ["open", "process_element", "on_timer", "close"])
def test_a_function_that_fails_is_named_with_subtask_and_key_and_nothing_is_kept(
    tmp_path: Path, where: str
) -> None:
    query = Query(folder=tmp_path, factory=row_factory(Failing(where)))
    with pytest.raises(FunctionError) as caught:
        query.subtask(0, [("a", 1)], query.subtask_of("a"))
    again = pickle.loads(pickle.dumps(caught.value))

    assert str(again) == str(caught.value)
    message = str(again)
    assert message.startswith("[FLOWKEYED_FUNCTION] operator 'words', subtask ")
    assert f"{where} failed: ValueError: no way" in message
    assert ("key 'a'" in message) == (where in {"process_element", "on_timer"})
    assert not any("part-" in path for path in query.files())
    fine = query.restarted(factory=row_factory(Failing("")))
    assert [row["text"] for row in fine.batch(0, [("a", 1)])] == ["1"]


def test_a_row_without_a_key_is_refused(tmp_path: Path) -> None:
    query = Query(folder=tmp_path, factory=row_factory(Sum()))

    with pytest.raises(InputError, match="'word' is null"):
        query.batch(0, [("a", 1), (None, 2)])


def test_a_value_that_python_cannot_hold_is_named_with_its_column(tmp_path: Path) -> None:
    schema = "word string, n long, at timestamp"
    query = Query(folder=tmp_path, factory=row_factory(Sum()), schema=schema)
    index = query.subtask_of("a")
    (batch,) = query.partitions([("a", 1, None)])[index]
    far = pa.array([1 << 62], batch.schema.field("at").type)

    with pytest.raises(InputError, match="the column 'at' has a value that Python cannot hold"):
        rows_of(query.execute(0, [batch.set_column(2, "at", far)]))


class Sides(KeyedProcessFunction[str, Any, Any]):
    def process_element(self, row: Any, ctx: Any) -> Any:
        ctx.output(OutputTag("late" if row.n < 9 else "unknown"), (row.n,))
        return [(row.word, "main")]


def test_side_outputs_are_tagged_and_unknown_ones_are_named(tmp_path: Path) -> None:
    query = Query(folder=tmp_path, factory=row_factory(Sides(), sides={"late": "n long"}))
    found = query.batch(0, [("a", 7)])

    main = {"tag": None, "main": {"word": "a", "text": "main"}, "late": None}
    assert main in found
    assert {"tag": "late", "main": None, "late": {"n": 7}} in found
    with pytest.raises(OutputError, match="there is no side output 'unknown'; there are: 'late'"):
        query.batch(1, [("a", 9)])


class Bulk(ArrowKeyedFunction):
    def __init__(self, make: Callable[[pa.Array, pa.Array], Any]) -> None:
        self.make = make

    def open(self, ctx: Any) -> None:
        ctx.get_reducing_state(ReducingStateDescriptor("sum", Reducer.SUM, int))

    def process_batch(self, batch: pa.RecordBatch, state: Any, ctx: Any) -> Any:
        keys = state["sum"].add(ctx.keys, batch["n"])
        return self.make(keys, state["sum"].results(keys))


def bulk(folder: Path, make: Callable[[pa.Array, pa.Array], Any]) -> Query:
    schema = arrow_schema(struct_type("word string, n long"))
    return Query(folder=folder, factory=ArrowWorkFactory(function=Bulk(make), output_schema=schema))


@pytest.mark.parametrize(
    "make",
    [
        lambda k, n: pa.record_batch([n, k], ["n", "word"]),
        lambda k, n: pa.table([k, n], ["word", "n"]),
        lambda k, n: iter([pa.record_batch([k, n], ["word", "n"])]),
        lambda k, n: [pa.record_batch([k, n.cast(pa.int32())], ["word", "n"])],
    ],
    ids=["columns-in-another-order", "table", "generator", "narrower-type"],
)
def test_an_arrow_function_may_return_batches_of_any_kind(tmp_path: Path, make: Any) -> None:
    query = bulk(tmp_path, make)
    query.batch(0, [("a", 1), ("b", 5), ("a", 2)])

    found = query.restarted(parallelism=3).batch(1, [("a", 10), ("b", 1)])
    assert {row["word"]: row["n"] for row in found} == {"a": 13, "b": 6}


def test_large_texts_are_texts_like_others(tmp_path: Path) -> None:
    """Spark hands them out if ``spark.sql.execution.arrow.useLargeVarTypes`` is set."""
    query = Query(folder=tmp_path, factory=row_factory(Sum()))

    def run(batch_id: int, kind: pa.DataType) -> list[dict[str, Any]]:
        found = []
        for index, batches in enumerate(query.partitions([("a", 1), ("b", 5)])):
            tables = [pa.Table.from_batches([batch]) for batch in batches]
            changed = [table.set_column(0, "word", table["word"].cast(kind)) for table in tables]
            given = [batch for table in changed for batch in table.to_batches()]
            found += rows_of(query.execute(batch_id, given, partition=index))
        return found

    run(0, pa.large_string())
    run(1, pa.string())
    found = run(2, pa.large_string())
    assert {row["word"]: row["text"] for row in found} == {"a": "3", "b": "15"}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda k, n: pa.record_batch([k], ["word"]), "has the columns word, n"),
        (lambda k, n: pa.record_batch([k, k], ["word", "n"]), "the declared types"),
        (lambda k, n: [5], "not <class 'int'>"),
    ],
    ids=["columns", "types", "no-batch"],
)
def test_an_arrow_function_that_returns_something_else_is_told_so(
    tmp_path: Path, make: Any, named: str
) -> None:
    with pytest.raises(OutputError, match=named):
        bulk(tmp_path, make).batch(0, [("a", 1)])
