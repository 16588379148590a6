"""Aggregates on whole columns, against a model in plain Python that goes row by row."""

from __future__ import annotations

import datetime as dt
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings

from flowspark.errors import FunctionError
from flowspark.keyed.aggregation import Emit, aggregation_of
from flowspark.keyed.arrow_work import ArrowWorkFactory
from flowspark.keyed.running import running
from flowspark.keyed.schemas import arrow_schema, key_type_of
from flowstate.aggregates import Reducer

from .harness import Query, struct_type

SCHEMA = "word string, k int, i long, d double, s string, at timestamp"
AGGREGATES = {
    "n": "count",
    "ni": ("count", "i"),
    "si": ("sum", "i"),
    "sd": ("sum", "d"),
    "mi": ("mean", "i"),
    "md": ("mean", "d"),
    "low": ("min", "d"),
    "high": ("max", "d"),
    "first": ("min", "s"),
    "last": ("max", "s"),
    "early": ("min", "at"),
    "late": ("max", "at"),
}
NAN = math.nan
UTC = dt.UTC

# Sums of these are exact in any order, as far as there are any.
FLOATS = st.sampled_from([None, NAN, -0.0, 0.0, 0.5, -1.5, 1e12, math.inf, -math.inf])
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "ü"]),
        st.sampled_from([None, 0, 1]),
        st.none() | st.integers(-5, 5) | st.sampled_from([2**50, -(2**50)]),
        FLOATS,
        st.sampled_from([None, "", "x", "yy"]),
        st.sampled_from([None, dt.datetime(1960, 1, 1, tzinfo=UTC), dt.datetime(2026, 1, 1, 5)]),
    ).map(lambda row: (*row[:5], None if row[5] is None else row[5].replace(tzinfo=UTC))),
    max_size=7,
)


def aggregating(
    folder: Path,
    aggregates: dict[str, Any],
    emit: str,
    keys: Sequence[str],
    schema: str = SCHEMA,
    **settings: Any,
) -> Query:
    """Return a query as ``key_by(...).aggregate(...)`` plans it."""
    columns = struct_type(schema)
    function, output = aggregation_of(aggregates, emit, columns, keys)
    return Query(
        folder=folder,
        factory=ArrowWorkFactory(function=function, output_schema=arrow_schema(output)),
        schema=schema,
        keys=tuple(keys),
        key_type=key_type_of(columns, keys),
        **settings,
    )


def _extreme(pick: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    def of(values: list[Any]) -> Any:
        numbers = [value for value in values if value == value]
        return pick(numbers) if numbers else (values[0] if values else None)

    return of


MODEL: dict[str, Callable[[list[Any]], Any]] = {
    "count": len,
    "sum": lambda values: sum(values[1:], values[0]) if values else None,
    "mean": lambda values: sum(map(float, values)) / len(values) if values else None,
    "min": _extreme(min),
    "max": _extreme(max),
}


class Model:
    """The values of each key, and what they amount to."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.names = [column.split()[0] for column in SCHEMA.split(", ")]
        self.keys = keys
        self.rows: dict[Any, list[dict[str, Any]]] = {}

    def key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(canonical(row[name]) for name in self.keys)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.setdefault(self.key(row), []).append(row)

    def result(self, key: Any) -> dict[str, Any]:
        found = {}
        for name, how in AGGREGATES.items():
            reducer, source = (how, None) if isinstance(how, str) else how
            values = [1 if source is None else row[source] for row in self.rows[key]]
            found[name] = MODEL[reducer]([value for value in values if value is not None])
            if how == ("count", "i") and not found[name]:
                found[name] = 0
        return found


def canonical(value: Any) -> Any:
    if isinstance(value, float):
        return "nan" if value != value else value + 0.0
    return value


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, float) and value == value and not math.isinf(value):
            assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-3), name
        else:
            assert canonical(found[name]) == canonical(value), name


BOUNDED = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
KEYS = pytest.mark.parametrize("keys", [("word",), ("word", "k"), ("d",), ("k", "at")], ids=str)
POISON = [("a", 0, 2**50, NAN, "x", None), ("b", 0, 1, 0.5, None, None)]


@KEYS
@pytest.mark.parametrize("emit", list(Emit), ids=str)
@given(batches=st.lists(ROWS, min_size=1, max_size=3), chunk_rows=st.integers(1, 5))
@example(batches=[POISON, POISON], chunk_rows=2)
@BOUNDED
def test_aggregates_are_those_of_the_rows_one_by_one(
    keys: tuple[str, ...], emit: Emit, batches: list[list[Any]], chunk_rows: int
) -> None:
    model = Model(keys)
    with tempfile.TemporaryDirectory() as folder:
        query = aggregating(Path(folder), AGGREGATES, emit, keys, chunk_rows=chunk_rows)
        for batch_id, rows in enumerate(batches):
            if len(keys) == 1:
                place = model.names.index(keys[0])
                rows = [row for row in rows if row[place] is not None]
            query = query.restarted(parallelism=(2, 3)[batch_id % 2])
            found = query.batch(batch_id, rows)
            named = [dict(zip(model.names, row, strict=True)) for row in rows]
            if emit is Emit.PER_KEY:
                for row in named:
                    model.add(row)
                by_key = {model.key(row): row for row in found}
                assert len(by_key) == len(found)
                assert by_key.keys() == {model.key(row) for row in named}
                for key, row in by_key.items():
                    assert_same(row, model.result(key))
            else:
                # Within a key the rows keep their order.
                assert len(found) == len(named)
                for key in {model.key(row) for row in named}:
                    emitted = iter([row for row in found if model.key(row) == key])
                    for row in (row for row in named if model.key(row) == key):
                        model.add(row)
                        assert_same(next(emitted), model.result(key))


@pytest.mark.parametrize("emit", list(Emit), ids=str)
def test_a_sum_up_to_the_ends_of_int64_is_right_and_beyond_is_an_error(
    tmp_path: Path, emit: Emit
) -> None:
    query = aggregating(tmp_path, {"s": ("sum", "i")}, emit, ["word"], "word string, i long")
    largest = 2**63 - 1

    found = query.batch(0, [("a", largest), ("b", -largest), ("b", -1)])
    assert [row["s"] for row in found if row["word"] == "a"] == [largest]
    assert [row["s"] for row in found if row["word"] == "b"][-1] == -(2**63)
    for rows in ([("a", 1)], [("b", -1)]):
        with pytest.raises(FunctionError, match="int64"):
            query.restarted().batch(1, rows)
    assert query.batch(1, [("a", -1)])[0]["s"] == largest - 1


@pytest.mark.parametrize("emit", list(Emit), ids=str)
def test_a_restart_at_another_parallelism_goes_on_from_the_aggregates(
    tmp_path: Path, emit: Emit
) -> None:
    query = aggregating(tmp_path, {"n": "count"}, emit, ["word"], "word string, i long")
    words = [(f"w{number}", 1) for number in range(40)]
    for batch_id, parallelism in enumerate([1, 128, 3, 7]):
        found = query.restarted(parallelism=parallelism).batch(batch_id, words)

        assert {row["n"] for row in found} == {batch_id + 1}


# The running aggregates alone.


@pytest.mark.parametrize("reducer", [Reducer.SUM, Reducer.MEAN], ids=str)
@pytest.mark.parametrize("value", [NAN, math.inf, 1e300], ids=str)
def test_what_one_key_has_does_not_reach_the_running_sums_of_others(
    reducer: Reducer, value: float
) -> None:
    before = pa.nulls(2, pa.float64())
    if reducer is Reducer.MEAN:
        before = pa.nulls(2, pa.struct([("sum", pa.float64()), ("count", pa.int64())]))
    found = running(reducer, before, pa.array([value, 1.0, 3.0]), np.array([0, 1, 1]))

    assert found.to_pylist()[1:] == [1.0, 4.0 if reducer is Reducer.SUM else 2.0]


@given(
    values=st.lists(st.none() | st.integers(-(2**62), 2**62), min_size=1, max_size=20),
    groups=st.lists(st.integers(0, 3), min_size=20, max_size=20),
    before=st.lists(st.none() | st.integers(-(2**62), 2**62), min_size=4, max_size=4),
)
@BOUNDED
def test_a_running_sum_is_exact_or_an_error(
    values: list[Any], groups: list[int], before: list[Any]
) -> None:
    groups = groups[: len(values)]
    totals, expected = list(before), []
    for value, group in zip(values, groups, strict=True):
        if value is not None:
            totals[group] = value + (totals[group] or 0)
        expected.append(totals[group])
    arrays = pa.array(before, pa.int64()), pa.array(values, pa.int64()), np.array(groups)
    fits = all(total is None or -(2**63) <= total < 2**63 for total in expected)

    if fits:
        assert running(Reducer.SUM, *arrays).to_pylist() == expected
    else:
        with pytest.raises(OverflowError):
            running(Reducer.SUM, *arrays)
