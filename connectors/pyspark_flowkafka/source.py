"""The batch reader, and what it shares with the stream's: the schema and how a task reads."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from flowspark.errors import OptionError
from flowspark.options import Options
from pyspark_flowkafka.errors import FORMAT, KafkaSourceError
from pyspark_flowkafka.offsets import EARLIEST, OffsetRange
from pyspark_flowkafka.options import PositionKind, SourceOptions, parse
from pyspark_flowkafka.planning import split

if TYPE_CHECKING:
    import pyarrow as pa

_LOG = logging.getLogger(__name__)

SCHEMA = (
    StructType()
    .add("key", BinaryType())
    .add("value", BinaryType())
    .add("topic", StringType())
    .add("partition", IntegerType())
    .add("offset", LongType())
    .add("timestamp", TimestampType())
    .add("timestampType", IntegerType())
)
HEADERS = ArrayType(StructType().add("key", StringType()).add("value", BinaryType()))

_STREAM_ONLY = (
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "maxBytesPerTrigger",
)


class RangePartition(InputPartition):
    """One task's range; the only thing that travels from the planning process to a worker."""

    def __init__(self, one: OffsetRange) -> None:
        super().__init__(one)
        self.range = one


def schema_of(given: Mapping[str, str]) -> StructType:
    """Return the columns, which are always the same but for the headers."""
    include = {name.lower(): value for name, value in given.items()}.get("includeheaders", "false")
    asked = Options(FORMAT, {"includeHeaders": include}, known=("includeHeaders",))
    # A copy of the list: `add` changes it.
    columns = StructType(list(SCHEMA.fields))
    return columns.add("headers", HEADERS) if asked.boolean("includeHeaders", False) else columns


def check_schema(given: StructType, options: Mapping[str, str]) -> None:
    """Refuse columns other than Kafka's, as Spark's source does."""
    expected = schema_of(options)
    if [(one.name, one.dataType) for one in given] != [
        (one.name, one.dataType) for one in expected
    ]:
        raise OptionError(
            FORMAT, f"the columns are fixed: {expected.simpleString()}. Leave .schema(...) out"
        )


def tasks(options: SourceOptions, ranges: Sequence[OffsetRange]) -> list[InputPartition]:
    """Divide ranges into tasks."""
    parts = split(ranges, min_partitions=options.min_partitions, max_records=options.max_records)
    return [RangePartition(one) for one in parts]


def read(
    options: SourceOptions, partition: InputPartition, *, may_begin_later: bool = False
) -> Iterator[pa.RecordBatch]:
    """Read one task's range."""
    from flowspark.workers import settle
    from pyspark_flowkafka.fetching import read_range

    # A batch query without any partition still has one task, with nothing to read.
    if isinstance(partition, RangePartition):
        yield from read_range(options, partition.range, may_begin_later=may_begin_later)
        settle()


class KafkaBatchReader(DataSourceReader):
    """Reads from fixed offsets to fixed offsets, found when the query is planned."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        check_schema(schema, given)
        self._options = parse(given, is_stream=False)
        for name in _STREAM_ONLY:
            if name.lower() in given:
                _LOG.warning("option %r is ignored in batch queries", name)

    def partitions(self) -> Sequence[InputPartition]:
        from pyspark_flowkafka.catalog import Catalog

        options = self._options
        catalog = Catalog(options)
        start = catalog.starting(options.starting)
        assert options.ending is not None
        until = catalog.ending(options.ending)
        # A partition that was created or deleted between the two questions is left out.
        both = sorted(start.keys() & until.keys())
        if reversed_ := [one for one in both if start[one] > until[one]]:
            one = reversed_[0]
            raise KafkaSourceError(
                f"option {options.starting.option!r} begins {one} at {start[one]}, behind its end "
                f"{until[one]} in {options.ending.option!r}"
            )
        return tasks(options, [OffsetRange(one, start[one], until[one]) for one in both])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # As in Spark's source, the earliest record is the one that is there when a task begins.
        starting = self._options.starting
        is_earliest = starting.kind is PositionKind.EARLIEST
        if isinstance(partition, RangePartition) and starting.kind is PositionKind.OFFSETS:
            is_earliest = starting.numbers.get(partition.range.topic_partition) == EARLIEST
        return read(self._options, partition, may_begin_later=is_earliest)
