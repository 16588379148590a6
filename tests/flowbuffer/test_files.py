"""Files of every format hold the rows that were buffered."""

from __future__ import annotations

import base64
import datetime as dt
import gzip
import io
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_flowbuffer.files import file_extension, write_table
from pyspark_flowbuffer.json_lines import encode_json_lines
from pyspark_flowbuffer.options import Compression, FileFormat, FileOutput
from pyspark_flowbuffer.partitions import split_by_folder

ROWS = pa.table(
    {
        "n": pa.array([1, None, 2**62]),
        "s": pa.array(['x"\\\n\x00\x1fé\U0001f600', None, ""]),
        "f": pa.array([1.5, None, -1e300]),
        "b": pa.array([True, None, False]),
        "d": pa.array([dt.date(2020, 1, 1), None, None]),
        "dec": pa.array([Decimal("12345678901234567890.10"), None, None], pa.decimal128(38, 2)),
    }
)


def written(table: pa.Table, file_format: FileFormat, compression: Compression) -> bytes:
    file = io.BytesIO()
    output = FileOutput(path="p", file_format=file_format, compression=compression)
    write_table(file, table, output)
    return file.getvalue()


def lines(table: pa.Table) -> list[Any]:
    return [json.loads(line) for line in encode_json_lines(table).to_pybytes().splitlines()]


@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip", "lz4", "none"])
def test_parquet_files_hold_the_rows(compression: str) -> None:
    data = written(ROWS, FileFormat.PARQUET, Compression(compression))

    assert pq.read_table(io.BytesIO(data)).to_pylist() == ROWS.to_pylist()


@pytest.mark.parametrize("compression", ["zstd", "lz4", "none"])
def test_arrow_files_hold_the_rows(compression: str) -> None:
    data = written(ROWS, FileFormat.ARROW, Compression(compression))

    assert pa.ipc.open_file(io.BytesIO(data)).read_all().equals(ROWS)


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
@pytest.mark.parametrize("file_format", [FileFormat.CSV, FileFormat.JSON])
def test_text_files_are_compressed_as_their_names_say(
    tmp_path: Path, file_format: FileFormat, compression: str
) -> None:
    plain = written(ROWS, file_format, Compression.NONE)
    output = FileOutput(path="p", file_format=file_format, compression=Compression(compression))
    ending = file_extension(output)
    path = tmp_path / f"file{ending}"
    path.write_bytes(written(ROWS, file_format, Compression(compression)))

    # Arrow goes by the ending, as Spark does.
    assert pa.input_stream(str(path), compression="detect").read() == plain
    if compression == "gzip":
        assert ending.endswith(".gz")
        assert gzip.decompress(path.read_bytes()) == plain


def test_csv_tells_an_empty_text_from_none() -> None:
    table = pa.table({"s": ["a,b", None, ""], "n": [1, 2, None]})
    data = written(table, FileFormat.CSV, Compression.NONE)

    assert data == b'"a,b",1\n,2\n"",\n'
    back = pcsv.read_csv(
        io.BytesIO(data),
        read_options=pcsv.ReadOptions(column_names=["s", "n"]),
        convert_options=pcsv.ConvertOptions(
            strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )
    assert back.to_pylist() == table.to_pylist()


def test_csv_has_no_row_without_a_character_and_spells_numbers_as_spark() -> None:
    assert written(pa.table({"s": ["a", None]}), FileFormat.CSV, Compression.NONE) == b'"a"\n""\n'
    floats = pa.table({"f": [1.5, math.nan, math.inf, -math.inf], "n": [1, 2, 3, 4]})
    data = written(floats, FileFormat.CSV, Compression.NONE)
    assert data == b'"1.5",1\n"NaN",2\n"Inf",3\n"-Inf",4\n'


# JSON.


def test_json_leaves_nulls_out_and_keeps_numbers_exact() -> None:
    encoded = encode_json_lines(ROWS).to_pybytes().decode().splitlines()

    assert json.loads(encoded[0])["s"] == ROWS["s"][0].as_py()
    assert '"dec":12345678901234567890.10' in encoded[0]
    assert encoded[1] == "{}"
    assert json.loads(encoded[2]) == {"n": 2**62, "s": "", "f": -1e300, "b": False}


def test_json_has_what_is_not_a_number_as_text() -> None:
    table = pa.table({"f": [math.nan, math.inf, -math.inf]})

    assert lines(table) == [{"f": "NaN"}, {"f": "Infinity"}, {"f": "-Infinity"}]


def test_json_has_whole_doubles_with_a_point() -> None:
    table = pa.table({"f": [1.0, -0.0, 1e22, 0.25]})

    encoded = encode_json_lines(table).to_pybytes()
    assert encoded == b'{"f":1.0}\n{"f":-0.0}\n{"f":1e+22}\n{"f":0.25}\n'


def test_json_has_times_in_utc_and_bytes_in_base64() -> None:
    moment = dt.datetime(2020, 7, 1, 12, 0, 0, 5, tzinfo=dt.UTC)
    table = pa.table(
        {
            "zoned": pa.array([moment], pa.timestamp("us", "Europe/Berlin")),
            "plain": pa.array([moment.replace(tzinfo=None)], pa.timestamp("us")),
            "raw": pa.array([b"\x00\xff"]),
        }
    )

    assert lines(table) == [
        {
            "zoned": "2020-07-01T12:00:00.000005Z",
            "plain": "2020-07-01T12:00:00.000005",
            "raw": base64.b64encode(b"\x00\xff").decode(),
        }
    ]


NESTED = pa.schema(
    [
        ("list", pa.list_(pa.list_(pa.string()))),
        ("struct", pa.struct([("a", pa.int64()), ("b", pa.list_(pa.int32()))])),
        ("map", pa.map_(pa.string(), pa.struct([("x", pa.string())]))),
        ("numbered", pa.map_(pa.int64(), pa.float64())),
    ]
)
TEXTS = st.text(max_size=5)
ROW = st.fixed_dictionaries(
    {
        "list": st.none()
        | st.lists(st.none() | st.lists(st.none() | TEXTS, max_size=2), max_size=3),
        "struct": st.none()
        | st.fixed_dictionaries(
            {
                "a": st.none() | st.integers(-(2**63), 2**63 - 1),
                "b": st.none() | st.lists(st.integers(0, 9), max_size=2),
            }
        ),
        "map": st.none()
        | st.dictionaries(TEXTS, st.none() | st.fixed_dictionaries({"x": st.none() | TEXTS})),
        "numbered": st.none() | st.dictionaries(st.integers(-9, 9), st.sampled_from([0.5, -2.25])),
    }
)


def without_nulls(value: Any, kind: pa.DataType) -> Any:
    """Return what JSON has of a value: a struct's fields that are null are left out."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        kept = {name: without_nulls(one, kind.field(name).type) for name, one in value.items()}
        return {name: one for name, one in kept.items() if one is not None}
    if pa.types.is_map(kind):
        return {str(key): without_nulls(one, kind.item_type) for key, one in value.items()}
    if pa.types.is_list(kind):
        return [without_nulls(one, kind.value_type) for one in value]
    return value


@given(st.lists(ROW, max_size=6), st.integers(0, 3))
def test_nested_values_come_back_from_json(rows: list[dict[str, Any]], skipped: int) -> None:
    columns = [[tuple_items(row[field.name], field.type) for row in rows] for field in NESTED]
    table = pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, NESTED, strict=True)],
        schema=NESTED,
    ).slice(skipped)

    kind = pa.struct(list(NESTED))
    assert lines(table) == [without_nulls(row, kind) for row in rows[skipped:]]


def tuple_items(value: Any, kind: pa.DataType) -> Any:
    return list(value.items()) if isinstance(value, dict) and pa.types.is_map(kind) else value


# Folders.


@given(
    st.lists(
        st.tuples(st.none() | st.sampled_from(["a", "b", "a=b", "é", ".."]), st.integers(0, 2)),
        max_size=20,
    )
)
def test_a_split_by_folder_keeps_every_row_in_order(rows: list[tuple[str | None, int]]) -> None:
    table = pa.table(
        {
            "k": pa.array([key for key, _ in rows], pa.string()),
            "m": pa.array([number for _, number in rows], pa.int64()),
            "row": pa.array(range(len(rows)), pa.int64()),
        }
    )

    parts = list(split_by_folder(table, ("k", "m")))

    assert len({folder for folder, _ in parts}) == len(parts) == len(set(rows))
    for _, part in parts:
        assert len(set(zip(part["k"].to_pylist(), part["m"].to_pylist(), strict=True))) == 1
        assert part["row"].to_pylist() == sorted(part["row"].to_pylist())
    found = sorted(number for _, part in parts for number in part["row"].to_pylist())
    assert found == list(range(len(rows)))


def test_folders_are_named_as_spark_names_them() -> None:
    table = pa.table(
        {
            "d": pa.array([dt.date(2020, 1, 2), None], pa.date32()),
            "b": pa.array([True, False]),
            "s": pa.array(["x y/1:2", ".."]),
            "v": pa.array([1, 2]),
        }
    )

    assert [folder for folder, _ in split_by_folder(table, ("d", "b", "s"))] == [
        "d=2020-01-02/b=true/s=x y%2F1%3A2",
        "d=__HIVE_DEFAULT_PARTITION__/b=false/s=..",
    ]
