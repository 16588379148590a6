"""Buffers as files: parquet, JSON lines, CSV or Arrow."""

from __future__ import annotations

import gzip
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from flowspark.errors import OptionError
from pyspark_flowbuffer.json_lines import encode_json_lines, unsupported_in_json
from pyspark_flowbuffer.options import FORMAT, Compression, FileFormat, FileOutput

__all__ = ["check_columns", "file_extension", "write_table"]

_ROW_GROUP_ROWS = 1 << 20
_COMPRESSED_ENDINGS = {Compression.GZIP: ".gz", Compression.ZSTD: ".zst"}


def file_extension(output: FileOutput) -> str:
    """Return how the names of the files end; text files say how they are compressed."""
    if output.file_format in {FileFormat.PARQUET, FileFormat.ARROW}:
        return f".{output.file_format.value}"
    return f".{output.file_format.value}{_COMPRESSED_ENDINGS.get(output.compression, '')}"


def write_table(file: BinaryIO, table: pa.Table, output: FileOutput) -> None:
    """Write one complete file."""
    if output.file_format is FileFormat.PARQUET:
        _write_parquet(file, table, output)
    elif output.file_format is FileFormat.ARROW:
        _write_arrow(file, table, output)
    elif output.file_format is FileFormat.CSV:
        file.write(_compressed(_csv(table, header=output.header), output.compression))
    else:
        file.write(_compressed(encode_json_lines(table), output.compression))


def check_columns(schema: pa.Schema, output: FileOutput) -> None:
    """Refuse columns that files of this format cannot have, before any row is taken."""
    if output.file_format is FileFormat.PARQUET:
        refused, why = _no_parquet, "parquet has no such type"
    elif output.file_format is FileFormat.CSV:
        refused, why = _no_csv, "a CSV field is one plain value. Use parquet or json"
    elif output.file_format is FileFormat.JSON:
        refused, why = unsupported_in_json, "JSON has no such value. Use parquet, or cast it"
    else:
        return
    for field in schema:
        if refused(field.type):
            raise OptionError(
                FORMAT,
                f"column {field.name!r} of type {field.type} cannot be written with fileFormat="
                f"{output.file_format.value}: {why}",
            )


def _no_parquet(kind: pa.DataType) -> bool:
    if pat.is_nested(kind):
        # An empty struct has no columns, of which parquet consists.
        return not kind.num_fields or any(
            _no_parquet(kind.field(i).type) for i in range(kind.num_fields)
        )
    return bool(pat.is_interval(kind) or pat.is_duration(kind))


def _no_csv(kind: pa.DataType) -> bool:
    return bool(pat.is_nested(kind) or pat.is_duration(kind) or pat.is_binary(kind))


def _write_parquet(file: BinaryIO, table: pa.Table, output: FileOutput) -> None:
    import pyarrow.parquet as pq

    pq.write_table(
        table,
        file,
        compression=output.compression.value,
        row_group_size=_ROW_GROUP_ROWS,
        # Spark does not need Arrow's own schema in the file, and a zone's name would change types.
        store_schema=False,
    )


def _write_arrow(file: BinaryIO, table: pa.Table, output: FileOutput) -> None:
    compression = None if output.compression is Compression.NONE else output.compression.value
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=_ROW_GROUP_ROWS)


def _csv(table: pa.Table, *, header: bool) -> pa.Buffer:
    import pyarrow.csv as pcsv

    for index, field in enumerate(table.schema):
        if pat.is_floating(field.type):
            table = table.set_column(index, field.name, _spark_floats(table.column(index)))
    if table.num_columns == 1 and table.column(0).null_count:
        # A line with nothing in it is no row for most readers.
        texts = table.column(0).cast(pa.string()).fill_null("")
        table = table.set_column(0, table.column_names[0], texts)
    sink = pa.BufferOutputStream()
    pcsv.write_csv(table, sink, pcsv.WriteOptions(include_header=header))
    return sink.getvalue()


def _spark_floats(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return numbers, or texts that Spark reads where some are no numbers or infinite."""
    if pc.all(pc.is_finite(column)).as_py() is not False:
        return column
    texts = column.cast(pa.string())
    for ours, sparks in (("nan", "NaN"), ("inf", "Inf"), ("-inf", "-Inf")):
        texts = pc.if_else(pc.equal(texts, ours), sparks, texts)
    return texts


def _compressed(data: pa.Buffer, compression: Compression) -> bytes | memoryview:
    if compression is Compression.GZIP:
        return gzip.compress(data, compresslevel=6, mtime=0)
    if compression is Compression.ZSTD:
        sink = pa.BufferOutputStream()
        # A stream, because a bare block has no frame that other programs know.
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(data)
        return memoryview(sink.getvalue())
    return memoryview(data)
