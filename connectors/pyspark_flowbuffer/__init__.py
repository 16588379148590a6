"""``format("flowbuffer")``: a buffering sink whose buffer is Flink's operator list state.

Spark imports this package at the first lookup of any format, so it imports nothing but pyspark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceStreamWriter, DataSourceWriter
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """The sink, as Spark finds it."""

    @classmethod
    def name(cls) -> str:
        return "flowbuffer"

    def streamWriter(  # noqa: N802 (Spark's name)
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        from pyspark_flowbuffer.options import BufferOptions
        from pyspark_flowbuffer.writer import BufferWriter

        options = BufferOptions.parse(self.options)
        return BufferWriter.of(options, schema, complete_mode=overwrite)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        self._refuse(
            "a batch write has no next batch that a buffer could wait for: use "
            "df.writeStream.format('flowbuffer'), or write the files with "
            "df.write.format('parquet')"
        )

    def schema(self) -> StructType:
        self._refuse(
            "it is a sink and cannot be read: read the files in its path, as in "
            "spark.read.parquet(path)"
        )

    def _refuse(self, why: str) -> NoReturn:
        from flowspark.errors import OptionError

        raise OptionError("flowbuffer", why)
