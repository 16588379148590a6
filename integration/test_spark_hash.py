"""What our ``xxhash64`` computes is what a real Spark computes."""

from __future__ import annotations

import datetime as dt
import decimal
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from flowstate import _spark_hash
from flowstate.key_groups import KeyGroupAssigner, key_grouper, key_groups_of

pytestmark = pytest.mark.spark

XXHASH64 = KeyGroupAssigner.XXHASH64
MAX_PARALLELISMS = [1, 7, 100, 128, 32768]
_EXACT = decimal.Context(prec=60)


def ints(bits: int) -> list[Any]:
    limit = 1 << (bits - 1)
    return [0, 1, -1, 42, -42, limit - 1, -limit, None]


def decimals(precision: int, scale: int) -> list[Any]:
    most = 10**precision - 1
    # Around the powers of 256 the minimal two's complement form grows by a byte.
    places = [1 << bits for bits in (7, 8, 15, 63, 64, 95, 120)]
    edges = [sign * (place + step) for place in places for sign in (1, -1) for step in (-1, 0, 1)]
    numbers = [0, 1, -1, most, -most, *(edge for edge in edges if abs(edge) <= most)]
    return [*(Decimal(number).scaleb(-scale, _EXACT) for number in numbers), None]


FLOATS = [0.0, -0.0, 1.0, -1.5, math.nan, -math.nan, math.inf, -math.inf, None]
SIZES = [0, 1, 3, 4, 5, 7, 8, 11, 12, 15, 16, 23, 31, 32, 33, 36, 63, 64, 65, 255, 256, 257, 5000]
SIZED_TEXTS = ["abcdefghijk"[index % 11] * size for index, size in enumerate(SIZES)]
TEXTS = ["", " ", "a1", "\x00", "é", "中文", "a😀b", "日本語テキスト" * 9, *SIZED_TEXTS, None]
MOMENTS = [
    dt.datetime(1970, 1, 1),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999999),
    dt.datetime(2024, 2, 29, 12, 30, 45, 123456),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999999),
    dt.datetime(1, 1, 1),
    None,
]
SPANS = [dt.timedelta(0), dt.timedelta(microseconds=-1), dt.timedelta(days=99999), None]

COLUMNS: dict[str, pa.Array] = {
    "int8": pa.array(ints(8), pa.int8()),
    "int16": pa.array(ints(16), pa.int16()),
    "int32": pa.array(ints(32), pa.int32()),
    "int64": pa.array(ints(64), pa.int64()),
    "bool": pa.array([True, False, None]),
    "float": pa.array([*FLOATS, 3.4028234663852886e38, 1e-45], pa.float32()),
    "double": pa.array([*FLOATS, 1.7976931348623157e308, 5e-324], pa.float64()),
    "string": pa.array(TEXTS),
    "large_string": pa.array(TEXTS, pa.large_string()),
    "binary": pa.array([*(text and text.encode() for text in TEXTS), b"\xff\x80"], pa.binary()),
    "large_binary": pa.array([b"", b"\xff\x80", b"x" * 100, None], pa.large_binary()),
    "date": pa.array([moment and moment.date() for moment in MOMENTS], pa.date32()),
    "timestamp_ntz": pa.array(MOMENTS, pa.timestamp("us")),
    "timestamp": pa.array(MOMENTS, pa.timestamp("us", tz="UTC")),
    "duration": pa.array(SPANS, pa.duration("us")),
    "decimal_9_2": pa.array(decimals(9, 2), pa.decimal128(9, 2)),
    "decimal_18_4": pa.array(decimals(18, 4), pa.decimal128(18, 4)),
    "decimal_19_0": pa.array(decimals(19, 0), pa.decimal128(19, 0)),
    "decimal_38_10": pa.array(decimals(38, 10), pa.decimal128(38, 10)),
    "strings": pa.array([[], ["a", None, "b"], [None], ["é" * 40], None], pa.list_(pa.string())),
    "nested_lists": pa.array(
        [[], [[1, 2], None, [], [None, 3]], None], pa.list_(pa.list_(pa.int32()))
    ),
    "struct": pa.array(
        [{"a": 1, "b": "x"}, {"a": None, "b": "y"}, {"a": None, "b": None}, None],
        pa.struct([("a", pa.int32()), ("b", pa.string())]),
    ),
    "nested_struct": pa.array(
        [
            {"s": {"d": Decimal("1.5"), "f": -0.0}, "l": [1, None]},
            {"s": {"d": None, "f": math.nan}, "l": None},
            {"s": None, "l": [7]},
        ],
        pa.struct(
            [
                ("s", pa.struct([("d", pa.decimal128(38, 2)), ("f", pa.float64())])),
                ("l", pa.list_(pa.int64())),
            ]
        ),
    ),
}


def cycled(column: pa.Array, *, rows: int) -> pa.Array:
    return column.take(pa.array(np.arange(rows) % len(column)))


def composite(names: list[str]) -> pa.StructArray:
    """Put columns side by side: their lengths differ, so edge values meet in many ways."""
    columns = [cycled(COLUMNS[name], rows=300) for name in names]
    return pa.StructArray.from_arrays(columns, names=names)


COMPOSITES: dict[str, pa.Array] = {
    "two": composite(["string", "int64"]),
    "numbers": composite(["int8", "int16", "int32", "int64", "bool", "float", "double"]),
    "bytes": composite(["decimal_38_10", "string", "binary", "decimal_19_0", "large_string"]),
    "times": composite(["date", "timestamp", "timestamp_ntz", "duration"]),
    "all": composite(sorted(COLUMNS)),
}


def spark_rows(spark: SparkSession, table: pa.Table, hashed: str) -> list[dict[str, Any]]:
    """Let Spark compute the hash and the key groups, in the order of the table."""
    expressions = [f"xxhash64({hashed}) as hash"]
    expressions += [f"pmod(xxhash64({hashed}), {n}) as g{n}" for n in MAX_PARALLELISMS]
    frame = spark.createDataFrame(table).orderBy("row").selectExpr(*expressions)
    rows: list[dict[str, Any]] = frame.toArrow().to_pylist()
    return rows


def with_row_numbers(columns: dict[str, pa.Array], *, rows: int) -> pa.Table:
    return pa.table({"row": pa.array(np.arange(rows)), **columns})


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_hashes_as_in_spark(spark: SparkSession, name: str) -> None:
    column = COLUMNS[name]
    rows = spark_rows(spark, with_row_numbers({"k": column}, rows=len(column)), "k")
    ours = _spark_hash.hash_array(column).view(np.int64)

    assert ours.tolist() == [row["hash"] for row in rows]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_key_has_the_key_group_that_spark_computes(spark: SparkSession, name: str) -> None:
    # Enough rows for the path that hashes many texts at once, and none of them null.
    keys = cycled(COLUMNS[name].drop_null(), rows=500)
    rows = spark_rows(spark, with_row_numbers({"k": keys}, rows=len(keys)), "k")

    for n in MAX_PARALLELISMS:
        expected = [row[f"g{n}"] for row in rows]
        group_of = key_grouper(keys.type, max_parallelism=n, assigner=XXHASH64)
        assert key_groups_of(keys, max_parallelism=n, assigner=XXHASH64).tolist() == expected
        assert [group_of(key) for key in keys.to_pylist()] == expected


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_key_has_the_key_group_that_spark_computes(
    spark: SparkSession, name: str
) -> None:
    keys = COMPOSITES[name]
    columns = {field.name: keys.field(i) for i, field in enumerate(keys.type)}
    table = with_row_numbers(columns, rows=len(keys))
    rows = spark_rows(spark, table, ", ".join(columns))
    as_struct = spark_rows(spark, table, f"struct({', '.join(columns)})")
    hashes = _spark_hash.hash_columns(list(columns.values()), rows=len(keys)).view(np.int64)

    assert rows == as_struct
    assert hashes.tolist() == [row["hash"] for row in rows]
    for n in MAX_PARALLELISMS:
        expected = [row[f"g{n}"] for row in rows]
        group_of = key_grouper(keys.type, max_parallelism=n, assigner=XXHASH64)
        assert key_groups_of(keys, max_parallelism=n, assigner=XXHASH64).tolist() == expected
        assert [group_of(key) for key in keys.to_pylist()] == expected


def test_spark_itself_does_not_hash_maps(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match="HASH_MAP_TYPE"):
        spark.sql("select xxhash64(map('a', 1))").collect()
