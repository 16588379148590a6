"""The sink as Spark calls it: ``write`` in tasks, ``commit`` and ``abort`` on the driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from flowspark.errors import OptionError, OutputError
from flowspark.workers import settle
from pyspark_flowbuffer.committing import Committer
from pyspark_flowbuffer.files import check_columns
from pyspark_flowbuffer.lineage import find_query_id, open_storage
from pyspark_flowbuffer.options import FORMAT, BufferOptions, FileFormat, FileOutput
from pyspark_flowbuffer.partitions import check_partition_columns, file_schema
from pyspark_flowbuffer.state import describe
from pyspark_flowbuffer.subtask import SubtaskResult, TaskIdentity, owners_of, run_subtask
from pyspark_flowbuffer.user_sinks import load_sink

__all__ = ["BufferWriter", "arrow_schema"]

# What pyspark marks the fields of such a value with.
_ENCODED = frozenset({b"variant", b"geometry", b"geography"})


@dataclass
class _Message(WriterCommitMessage):
    result: SubtaskResult


class BufferWriter(DataSourceStreamArrowWriter):
    """Cheap to make and without effects: Spark makes two of them for each batch."""

    def __init__(self, options: BufferOptions, schema: pa.Schema) -> None:
        self._options, self._schema = options, schema

    @classmethod
    def of(cls, options: BufferOptions, schema: StructType, *, complete_mode: bool) -> BufferWriter:
        """Check the options against the query."""
        if complete_mode:
            raise OptionError(
                FORMAT,
                "outputMode 'complete' writes all rows again in each batch, which a buffer would "
                "add up: use outputMode 'append'",
            )
        columns = arrow_schema(schema)
        check_encoded(options, schema)
        check_query(options, columns)
        return cls(options, columns)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        message = _Message(run_subtask(self._options, self._schema, _current_task(), iterator))
        settle()
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        results = [message.result for message in messages if isinstance(message, _Message)]
        if not results or len(results) != len(messages):
            raise OutputError(
                FORMAT,
                f"{len(messages) - len(results)} of {len(messages)} partitions of batch {batchId} "
                f"sent no result. Nothing of the batch was kept: restart the query",
            )
        self._committer(results[0].task.query_id).commit(results, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        results = [message.result for message in messages if isinstance(message, _Message)]
        # Where no task has come to its end, none says which query it is.
        query_id = results[0].task.query_id if results else find_query_id(self._options)
        if query_id is not None:
            self._committer(query_id).abort(batchId)

    def _committer(self, query_id: str) -> Committer:
        storage = open_storage(self._options, query_id)
        return Committer(self._options, self._schema, query_id, storage)


def check_query(options: BufferOptions, schema: pa.Schema) -> None:
    """Refuse columns that are missing, or that cannot be kept or written."""
    describe(schema, options.redistribution)
    for name in options.buffer_key:
        if name not in schema.names:
            raise OptionError(
                FORMAT,
                f"option 'bufferKey' names the column {name!r}, which is not there: the columns "
                f"are {', '.join(schema.names)}",
            )
    if options.buffer_key:
        # Types that have no hash are refused here, and not when rows wait already.
        owners_of(schema.empty_table(), options.buffer_key, parallelism=1)
    output = options.output
    if isinstance(output, FileOutput):
        check_partition_columns(schema, output.partition_by)
        check_columns(file_schema(schema, output.partition_by), output)
    else:
        load_sink(output.function)


def check_encoded(options: BufferOptions, schema: StructType) -> None:
    """Refuse JSON of values that are bytes of Spark's own making, such as variants."""
    output = options.output
    if not isinstance(output, FileOutput) or output.file_format is not FileFormat.JSON:
        return
    for field, column in zip(to_arrow_schema(schema, timezone="UTC"), schema, strict=True):
        if _is_encoded(field):
            raise OptionError(
                FORMAT,
                f"column {field.name!r} of type {column.dataType.simpleString()} cannot be written "
                f"with fileFormat=json: Spark's own bytes would be in it. Use parquet, or turn it "
                f"into text, as with to_json",
            )


def _is_encoded(field: pa.Field) -> bool:
    kind = field.type
    if not _ENCODED.isdisjoint(field.metadata or ()):
        return True
    return pa.types.is_nested(kind) and any(
        _is_encoded(kind.field(index)) for index in range(kind.num_fields)
    )


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return a query's columns as they are buffered: times in UTC, everything nullable.

    Whether a column may be null is a conclusion of Spark's optimizer, which may change its mind.
    """
    try:
        columns = to_arrow_schema(schema, timezone="UTC")
    except PySparkException as error:
        raise OptionError(FORMAT, f"a column cannot be buffered: {error}") from error
    names = [name.lower() for name in columns.names]
    if len(set(names)) != len(names):
        raise OptionError(
            FORMAT, f"two columns have one name: {', '.join(columns.names)}. Rename one of them"
        )
    if not names:
        raise OptionError(FORMAT, "the query has no columns")
    return pa.schema([_nullable(field) for field in columns])


def _nullable(field: pa.Field) -> pa.Field:
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_nullable(kind.field(i)) for i in range(kind.num_fields)])
    elif pa.types.is_map(kind):
        kind = pa.map_(_nullable(kind.key_field).type, _nullable(kind.item_field))
    elif pa.types.is_list(kind):
        kind = pa.list_(_nullable(kind.value_field))
    return pa.field(field.name, kind, nullable=True)


def _current_task() -> TaskIdentity:
    context = TaskContext.get()
    batch = query = None
    if context is not None:
        batch = context.getLocalProperty("streaming.sql.batchId")
        query = context.getLocalProperty("sql.streaming.queryId")
    if context is None or batch is None or query is None:
        raise OutputError(
            FORMAT, "this is no streaming query: use df.writeStream.format('flowbuffer')"
        )
    return TaskIdentity(
        query_id=query,
        batch_id=int(batch),
        run=context.getLocalProperty("spark.jobGroup.id") or f"run-of-{query}",
        subtask_index=context.partitionId(),
    )
