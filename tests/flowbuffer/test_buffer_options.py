"""Options of the sink, right and wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import types as spark_types
from pyspark.sql.datasource import CaseInsensitiveDict

from flowspark.errors import OptionError
from flowstate.errors import KeyGroupError
from flowstate.redistribution import Redistribution
from pyspark_flowbuffer import DefaultSource
from pyspark_flowbuffer.options import (
    DEFAULT_THRESHOLD,
    BufferOptions,
    Compression,
    FileFormat,
    FileOutput,
    FunctionOutput,
)
from pyspark_flowbuffer.writer import BufferWriter, arrow_schema

ENOUGH = {"path": "out", "checkpointLocation": "chk"}


def parse(**options: str) -> BufferOptions:
    return BufferOptions.parse({**ENOUGH, **options})


def test_two_options_are_enough() -> None:
    options = parse()

    assert options.output == FileOutput(
        path=os.path.abspath("out"),
        file_format=FileFormat.PARQUET,
        compression=Compression.SNAPPY,
    )
    assert options.triggers.threshold == DEFAULT_THRESHOLD
    assert options.state_location == os.path.abspath("chk") + "/flow"
    assert options.redistribution is Redistribution.EVEN_SPLIT
    assert (options.uid, options.checkpoints_retained) == ("flowbuffer", 2)


def test_another_trigger_takes_the_place_of_the_default_threshold() -> None:
    triggers = parse(maxBytes="64 MB", maxAge="5 minutes").triggers

    assert triggers.threshold is None
    assert (triggers.max_bytes, triggers.max_age_ms) == (64 << 20, 300_000)


def test_urls_stay_as_they_are() -> None:
    options = BufferOptions.parse(
        {"path": "s3://bucket/out", "checkpointLocation": "file:/tmp/c", "storage.key": "k"}
    )

    assert isinstance(options.output, FileOutput)
    assert options.output.path == "s3://bucket/out"
    assert options.state_location == "file:/tmp/c/flow"
    assert options.storage_options == {"key": "k"}
    assert "'k'" not in repr(options)


@pytest.mark.parametrize("option", ["path", "stateLocation", "checkpointLocation", "restoreFrom"])
def test_a_location_that_only_one_process_sees_is_refused(option: str) -> None:
    with pytest.raises(OptionError, match=rf"option '{option}' must be seen by the driver and"):
        parse(**{option: "memory://there"})


def test_options_of_a_sink_are_handed_to_it() -> None:
    given = {"sinkFunction": "a.b:C", "sink.url": "u", "checkpointLocation": "c"}

    assert BufferOptions.parse(given).output == FunctionOutput(
        function="a.b:C", options={"url": "u"}
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": "0"}, "option 'threshold' must be at least 1, not '0'"),
        ({"threshold": "many"}, "option 'threshold' must be a whole number"),
        ({"treshold": "5"}, "there is no option 'treshold': did you mean 'threshold'?"),
        ({"maxBytes": "0"}, "option 'maxBytes' must be at least 1 bytes"),
        ({"maxAge": "soon"}, "option 'maxAge' must be a time span"),
        ({"fileFormat": "orc"}, "must be one of parquet, json, csv, arrow, not 'orc'"),
        ({"compression": "brotli"}, "option 'compression' must be one of"),
        (
            {"fileFormat": "json", "compression": "snappy"},
            "which json files cannot have: use one of none, gzip, zstd",
        ),
        ({"header": "true"}, "option 'header' is for csv files only"),
        ({"redistribution": "broadcast"}, "must be one of even-split, union, not 'broadcast'"),
        ({"redistribution": "union", "parallelism": "2"}, "option 'bufferKey' is missing"),
        ({"redistribution": "union", "bufferKey": "k"}, "option 'parallelism' is missing"),
        ({"bufferKey": "k"}, "option 'bufferKey' is for redistribution=union"),
        ({"parallelism": "0"}, "option 'parallelism' must be 1..32768"),
        ({"checkpointsRetained": "0"}, "option 'checkpointsRetained' must be at least 1"),
        ({"sinkFunction": "a:B"}, "options 'sinkFunction' and 'path' contradict"),
        ({"sink.url": "u"}, "option 'sink.url' is for a sink of yours"),
        ({"restoreFrom": "x", "startEmpty": "true"}, "'restoreFrom' and 'startEmpty' contradict"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(**options)

    assert str(caught.value).startswith("[FLOWBUFFER_OPTION] ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpointLocation": "c"}, "give 'path' for files, or 'sinkFunction'"),
        ({"path": "p"}, "option 'stateLocation' is missing, and so is 'checkpointLocation'"),
    ],
)
def test_a_missing_location_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        BufferOptions.parse(options)


# Against the query's columns.

SCHEMA = (
    spark_types.StructType()
    .add("id", spark_types.LongType())
    .add("name", spark_types.StringType())
    .add("at", spark_types.TimestampType())
    .add("tags", spark_types.ArrayType(spark_types.StringType()))
    .add("raw", spark_types.BinaryType())
    .add("d", spark_types.DayTimeIntervalType())
)


def writer(columns: str, options: dict[str, str], *, complete_mode: bool = False) -> BufferWriter:
    schema = spark_types.StructType([SCHEMA[name] for name in columns.split()])
    return BufferWriter.of(parse(**options), schema, complete_mode=complete_mode)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("id", {"partitionBy": "nane"}, "names the column 'nane', which is not there"),
        ("id at", {"partitionBy": "at"}, "of whose values no folders can be named"),
        ("id name", {"partitionBy": "id,name"}, "names every column"),
        ("id name", {"partitionBy": "id,id"}, "names a column twice"),
        ("id tags", {"fileFormat": "csv"}, "column 'tags' of type list<element: string>"),
        ("id raw", {"fileFormat": "csv"}, "column 'raw' of type binary"),
        ("id d", {}, "column 'd' of type duration[us] cannot be written with fileFormat=parquet"),
        ("id d", {"fileFormat": "json"}, "JSON has no such value"),
        (
            "id",
            {"redistribution": "union", "bufferKey": "x", "parallelism": "1"},
            "option 'bufferKey' names the column 'x'",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    columns: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        writer(columns, options)

    assert message in str(caught.value)


@pytest.mark.parametrize("depth", [0, 1], ids=["plain", "in an array"])
def test_variants_are_no_json(depth: int) -> None:
    kind: spark_types.DataType = spark_types.VariantType()
    if depth:
        kind = spark_types.ArrayType(kind)
    schema = spark_types.StructType().add("id", "long").add("v", kind)

    with pytest.raises(OptionError, match=r"column 'v' of type .*variant.* cannot be written"):
        BufferWriter.of(parse(fileFormat="json"), schema, complete_mode=False)
    BufferWriter.of(parse(), schema, complete_mode=False)


def test_a_buffer_key_without_a_hash_is_refused() -> None:
    schema = spark_types.StructType().add(
        "m", spark_types.MapType(spark_types.StringType(), spark_types.LongType())
    )
    options = parse(redistribution="union", bufferKey="m", parallelism="2")

    with pytest.raises(KeyGroupError):
        BufferWriter.of(options, schema, complete_mode=False)


def test_complete_mode_is_refused() -> None:
    with pytest.raises(OptionError, match="use outputMode 'append'"):
        writer("id", {}, complete_mode=True)


def test_two_columns_of_one_name_are_refused() -> None:
    schema = spark_types.StructType().add("id", "long").add("ID", "string")

    with pytest.raises(OptionError, match="two columns have one name"):
        arrow_schema(schema)


def test_nullability_is_no_part_of_the_columns() -> None:
    strict, loose = (
        spark_types.StructType()
        .add("a", "long", nullable)
        .add("b", spark_types.StructType().add("c", "integer", nullable), nullable)
        for nullable in (False, True)
    )

    assert arrow_schema(strict).equals(arrow_schema(loose))
    assert arrow_schema(SCHEMA).field("at").type == pa.timestamp("us", "UTC")


def test_a_batch_write_and_a_read_are_refused(tmp_path: Path) -> None:
    source = DefaultSource(CaseInsensitiveDict({"path": str(tmp_path)}))

    with pytest.raises(OptionError, match="a batch write has no next batch"):
        source.writer(SCHEMA, False)
    with pytest.raises(OptionError, match="it is a sink and cannot be read"):
        source.schema()
