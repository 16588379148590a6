"""``format("flowkafka")``: Kafka for Spark without a jar, with the options of Spark's own source.

Spark imports this module to look for data sources, and one that fails to import hides all of them;
so nothing is imported here that is not needed to answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
    from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """Reads Kafka topics, in batches and in streams."""

    @classmethod
    def name(cls) -> str:
        return "flowkafka"

    def schema(self) -> StructType:
        from pyspark_flowkafka.source import schema_of

        return schema_of(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from pyspark_flowkafka.source import KafkaBatchReader

        return KafkaBatchReader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from pyspark_flowkafka.stream import KafkaStreamReader

        return KafkaStreamReader(self.options, schema)
