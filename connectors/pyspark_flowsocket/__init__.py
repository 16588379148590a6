"""The streaming source ``format("flowsocket")``: lines from TCP that survive crashes.

Spark imports every package named ``pyspark_*`` at its first lookup of a format, and one that fails
hides them all. So nothing is imported here but pyspark; the rest is, when a method is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamReader
    from pyspark.sql.types import StructType

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """Lines received over TCP, kept in a durable spool until Spark is done with them."""

    @classmethod
    def name(cls) -> str:
        return "flowsocket"

    def schema(self) -> str:
        from pyspark_flowsocket.options import SocketOptions

        return SocketOptions.parse(self.options).schema

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from pyspark_flowsocket.reader import SocketStreamReader

        return SocketStreamReader.of(self.options, schema)
