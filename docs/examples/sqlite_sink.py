"""A sink into SQLite that is exactly-once: rows wait in a staging table until they are committed.

Used with the options ``sinkFunction`` = ``sqlite_sink:SqliteSink``, ``sink.database`` (a file) and
``sink.table``. The table has the columns of the query and must be there::

    create table words (word text, n integer);
"""

import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa

from flowspark import Committable, SinkContext, TwoPhaseSink

TABLES = """
create table if not exists flow_staged (attempt text primary key, rows blob);
create table if not exists flow_committed (
    query text, batch integer, subtask integer, number integer,
    primary key (query, batch, subtask, number));
"""


class SqliteSink(TwoPhaseSink):
    """Prepares into ``flow_staged``; a commit moves the rows and remembers the buffer, at once."""

    def prepare(self, batch: pa.RecordBatch, context: SinkContext) -> Any:
        # What the database cannot take must fail here: a commit that fails is repeated for ever.
        for value in (value for row in rows_of(batch) for value in row):
            if not isinstance(value, int | float | str | bytes | None):
                raise TypeError(f"SQLite has no type for {value!r}: cast it to a text or a number")
        stored = pa.BufferOutputStream()
        with pa.ipc.new_stream(stored, batch.schema) as stream:
            stream.write_batch(batch)
        # The name belongs to this attempt alone, as another one may have other rows.
        attempt = uuid.uuid4().hex
        with closing(self._connect()) as database, database:
            database.execute(
                "insert into flow_staged values (?, ?)", (attempt, stored.getvalue().to_pybytes())
            )
        return attempt

    def commit(self, committables: Sequence[Committable]) -> None:
        with closing(self._connect()) as database, database:
            for committable in committables:
                where, attempt = committable.context, committable.value
                done = database.execute(
                    "insert or ignore into flow_committed values (?, ?, ?, ?)",
                    (where.query_id, where.batch_id, where.subtask_index, where.sequence_number),
                )
                # If it was there already, an earlier call has done all of this.
                if done.rowcount:
                    self._insert(database, attempt)
                database.execute("delete from flow_staged where attempt = ?", (attempt,))

    def abort(self, committables: Sequence[Committable]) -> None:
        with closing(self._connect()) as database, database:
            for committable in committables:
                database.execute("delete from flow_staged where attempt = ?", (committable.value,))

    def _insert(self, database: sqlite3.Connection, attempt: str) -> None:
        staged = database.execute("select rows from flow_staged where attempt = ?", (attempt,))
        (stored,) = staged.fetchone()
        with pa.ipc.open_stream(stored) as stream:
            batch = stream.read_next_batch()
        columns = ", ".join('"' + name.replace('"', '""') + '"' for name in batch.schema.names)
        values = ", ".join("?" for _ in batch.columns)
        database.executemany(
            f"insert into {self.options['table']} ({columns}) values ({values})", rows_of(batch)
        )

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.options["database"], timeout=60)
        database.executescript(TABLES)
        return database


def rows_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Return the rows as Python values."""
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)
