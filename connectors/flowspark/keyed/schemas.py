"""Between Spark's types and Arrow's, as the operator uses them: times in UTC, all nullable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from flowspark.errors import OptionError
from flowspark.keyed.identity import NAME
from flowspark.keyed.row_work import TAG_COLUMN
from flowstate.errors import FlowError
from flowstate.key_groups import KeyGroupAssigner, key_grouper
from flowstate.keys import KeyType

__all__ = [
    "SchemaLike",
    "arrow_schema",
    "key_type_of",
    "nullable",
    "struct_type",
    "tagged_type",
]

SchemaLike = Any
"""A ``StructType``, or its text as in ``word string, n long``."""


def struct_type(schema: SchemaLike) -> StructType:
    """Return a schema that was given as a text or as a type."""
    if isinstance(schema, str):
        try:
            schema = StructType.fromDDL(schema)
        except PySparkException as error:
            raise OptionError(NAME, f"the schema {schema!r} is not valid: {error}") from error
    if not isinstance(schema, StructType) or not schema.fields:
        raise OptionError(NAME, f"a schema is a text such as 'word string, n long', not {schema!r}")
    return nullable(schema)


def nullable(schema: StructType) -> StructType:
    """Return the columns, of which each may be null."""
    return StructType([StructField(field.name, field.dataType, True) for field in schema])


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the columns as they are in batches."""
    try:
        return to_arrow_schema(schema, timezone="UTC")
    except PySparkException as error:
        raise OptionError(NAME, f"a column has a type that Arrow lacks: {error}") from error


def key_type_of(schema: StructType, columns: Sequence[str]) -> pa.DataType:
    """Return the type of keys: that of the column, or a struct of several columns."""
    chosen = nullable(StructType([schema[name] for name in columns]))
    fields = list(arrow_schema(chosen))
    key_type = fields[0].type if len(fields) == 1 else pa.struct(fields)
    try:
        KeyType(key_type)
        # Refuses what Spark does not hash.
        key_grouper(key_type, max_parallelism=1, assigner=KeyGroupAssigner.XXHASH64)
    except FlowError as error:
        raise OptionError(
            NAME, f"{', '.join(columns)} cannot be the key: {error.message}"
        ) from error
    return key_type


def tagged_type(main: StructType, sides: Mapping[str, StructType]) -> StructType:
    """Return the columns of an operator with side outputs: the tag, and a struct for each."""
    for tag in sides:
        if not tag.strip() or tag.lower() in {TAG_COLUMN, "main"}:
            raise OptionError(NAME, f"a side output cannot be named {tag!r}: choose another name")
    return StructType(
        [
            StructField(TAG_COLUMN, StringType()),
            StructField("main", main),
            *(StructField(tag, columns) for tag, columns in sides.items()),
        ]
    )
