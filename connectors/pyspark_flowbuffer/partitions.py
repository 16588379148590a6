"""Rows by the values of their partition columns, and the folders these have in a path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from flowspark.errors import OptionError, OutputError
from pyspark_flowbuffer.options import FORMAT

__all__ = ["check_folder", "check_partition_columns", "file_schema", "split_by_folder"]

_CODES_MAX = 1 << 62
_NAME_BYTES_MAX = 255
# Of a path on Linux, and of a key in S3 and Google Cloud Storage, without the name of the file.
_FILE_NAME_BYTES = 96
_PATH_BYTES_MAX, _KEY_BYTES_MAX = 4095 - _FILE_NAME_BYTES, 1024 - _FILE_NAME_BYTES
_LOCAL_URL = ("file:", "local:")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
# As Hive and Spark escape them, and what this library's own stores refuse in a name.
_ESCAPED = frozenset("\"#%'*/:=?\\\x7f{[]^") | {chr(code) for code in range(32)}


def check_partition_columns(schema: pa.Schema, columns: Sequence[str]) -> None:
    """Refuse partition columns that are not there, or whose values cannot be a folder's name."""
    for name in columns:
        if name not in schema.names:
            raise OptionError(
                FORMAT,
                f"option 'partitionBy' names the column {name!r}, which is not there: the columns "
                f"are {', '.join(schema.names)}",
            )
        kind = schema.field(name).type
        if not any(is_kind(kind) for is_kind in _FOLDER_TYPES):
            raise OptionError(
                FORMAT,
                f"option 'partitionBy' names the column {name!r} of type {kind}, of whose values "
                f"no folders can be named: cast it to a string, a number or a date",
            )
    if len(set(columns)) != len(columns):
        raise OptionError(FORMAT, f"option 'partitionBy' names a column twice: {columns}")
    if columns and len(columns) == len(schema.names):
        raise OptionError(FORMAT, "option 'partitionBy' names every column: files would be empty")


_FOLDER_TYPES = (pat.is_string, pat.is_integer, pat.is_boolean, pat.is_date, pat.is_decimal)


def file_schema(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """Return the columns that are in the files: those that are not in the folders' names."""
    return pa.schema([field for field in schema if field.name not in columns])


def check_folder(folder: str, path: str) -> None:
    """Refuse a folder in which no file can be; found out when one is published, it is too late."""
    _, is_url, place = path.partition("://")
    full, limit = f"{path}/{folder}", _PATH_BYTES_MAX
    if is_url and not path.lower().startswith(_LOCAL_URL):
        full, limit = f"{place.partition('/')[2]}/{folder}", _KEY_BYTES_MAX
    if len(full.encode()) > limit:
        raise OutputError(
            FORMAT,
            f"values of the 'partitionBy' columns make a folder of {len(full.encode())} bytes, "
            f"{limit} are possible: {folder[:80]!r}... Partition by fewer or shorter columns",
        )


def split_by_folder(table: pa.Table, columns: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """Yield the rows of each folder, in the order in which they are in the table.

    Without partition columns all of them are in the folder ``""``.
    """
    if not columns or not table.num_rows:
        if table.num_rows:
            yield "", table
        return
    codes, values_max = np.zeros(table.num_rows, np.int64), 1
    texts: list[pa.Array] = []
    for name in columns:
        encoded = _texts(table.column(name)).dictionary_encode(null_encoding="encode")
        if values_max * len(encoded.dictionary) > _CODES_MAX:
            codes, values_max = np.unique(codes, return_inverse=True)[1], table.num_rows
        values_max *= len(encoded.dictionary)
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy()
        texts.append(encoded)
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    # Taking from many chunks would put them together anew for each folder.
    table = table.combine_chunks()
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        first = int(order[start])
        values = [encoded.dictionary[encoded.indices[first].as_py()].as_py() for encoded in texts]
        yield _folder(columns, values), table.take(pa.array(order[start:stop]))


def _texts(column: pa.ChunkedArray) -> pa.Array:
    """Return the values as texts; an empty one has the folder of those without a value."""
    texts = pc.cast(column.combine_chunks(), pa.string())
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)


def _folder(columns: Sequence[str], values: Sequence[str | None]) -> str:
    parts = [
        f"{_escaped(name)}={_escaped(value) if value else _NO_VALUE}"
        for name, value in zip(columns, values, strict=True)
    ]
    for part in parts:
        # Found out only when a file is published, it would be too late.
        if len(part.encode()) > _NAME_BYTES_MAX:
            raise OutputError(
                FORMAT,
                f"a value of the 'partitionBy' columns is too long for the name of a folder: "
                f"{part[:80]!r}... has {len(part.encode())} bytes, {_NAME_BYTES_MAX} are possible. "
                f"Partition by a shorter column, such as a hash of it",
            )
    return "/".join(parts)


def _escaped(text: str) -> str:
    return "".join(f"%{ord(c):02X}" if c in _ESCAPED else c for c in text)
