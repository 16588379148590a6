"""A sink into SQLite that is exactly-once: rows wait in a staging table until they are committed.

Used with the options ``sinkFunction`` = ``sqlite_sink:SqliteSink``, ``sink.database`` (a file) and
``sink.table``. The table has the columns of the query and must be there::

    create table words (word text, n integer);
"""

import sqlite3
import uuid
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa

from flowspark import Committable, SinkContext, TwoPhaseSink

TABLES = """
create table if not exists flow_staged (attempt text, row text);
create index if not exists flow_staged_attempt on flow_staged (attempt);
create table if not exists flow_committed (
    query text, batch integer, subtask integer, number integer,
    primary key (query, batch, subtask, number));
"""


class SqliteSink(TwoPhaseSink):
    """Prepares into ``flow_staged``; a commit moves the rows and remembers the buffer, at once."""

    def prepare(self, batch: pa.RecordBatch, context: SinkContext) -> Any:
        attempt = uuid.uuid4().hex
        columns = [f"'{name}', ?" for name in batch.schema.names]
        rows = zip([attempt] * len(batch), *(c.to_pylist() for c in batch.columns), strict=True)
        with closing(self._connect()) as database, database:
            database.executemany(
                f"insert into flow_staged values (?, json_object({', '.join(columns)}))", rows
            )
        return {"attempt": attempt, "columns": batch.schema.names}

    def commit(self, committables: Sequence[Committable]) -> None:
        with closing(self._connect()) as database, database:
            for committable in committables:
                where, attempt = committable.context, committable.value["attempt"]
                done = database.execute(
                    "insert or ignore into flow_committed values (?, ?, ?, ?)",
                    (where.query_id, where.batch_id, where.subtask_index, where.sequence_number),
                )
                # If it was there already, an earlier call has done all of this.
                if done.rowcount:
                    columns = committable.value["columns"]
                    values = ", ".join(f"json_extract(row, '$.{name}')" for name in columns)
                    database.execute(
                        f"insert into {self.options['table']} ({', '.join(columns)}) "
                        f"select {values} from flow_staged where attempt = ? order by rowid",
                        (attempt,),
                    )
                database.execute("delete from flow_staged where attempt = ?", (attempt,))

    def abort(self, committables: Sequence[Committable]) -> None:
        with closing(self._connect()) as database, database:
            for committable in committables:
                attempt = committable.value["attempt"]
                database.execute("delete from flow_staged where attempt = ?", (attempt,))

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.options["database"], timeout=60)
        database.executescript(TABLES)
        return database
