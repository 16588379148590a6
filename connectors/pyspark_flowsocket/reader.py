"""The reader that Spark drives: offsets from the spool on the driver, lines on the executors."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from flowspark.errors import OptionError
from flowstate.checkpoint.names import encode_name
from flowstate.storage.filesystems import StateFileSystem, open_file_system
from pyspark_flowsocket.intake import Intake
from pyspark_flowsocket.options import SocketOptions
from pyspark_flowsocket.receiver import Receiver
from pyspark_flowsocket.retrying import Patience
from pyspark_flowsocket.segments import SOURCE_TYPE, TIMESTAMP_TYPE
from pyspark_flowsocket.spool import SegmentSlice, Spool, read_slice

__all__ = ["LinesPartition", "SocketStreamReader"]

_log = logging.getLogger(__name__)

# A task costs some milliseconds, so fewer bytes than these are not worth one of their own.
_PARTITION_BYTES_MIN = 1 << 20
_STOP_S = 5.0
_RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"


@dataclass(frozen=True, slots=True)
class LinesPartition(InputPartition):
    """What one task reads: slices of segments, in the order of their lines."""

    slices: tuple[SegmentSlice, ...]


class SocketStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One source of one query.

    Spark makes one of these in the process that it asks for offsets, and another one for each
    place that reads; only the first ever opens the spool, at the first question.
    """

    def __init__(self, options: SocketOptions) -> None:
        self._options = options
        self._running: _Running | None = None
        self._is_available_now = False
        self._target_line: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, str], schema: StructType) -> SocketStreamReader:
        """Return the reader for options as Spark gives them."""
        options = SocketOptions.parse(given)
        # Compared as texts: only a process with a session could parse one.
        columns = [f"{field.name} {field.dataType.simpleString()}" for field in schema.fields]
        if ", ".join(columns) != options.schema:
            raise OptionError(
                "flowsocket",
                f"the schema is {options.schema!r} with these options, not "
                f"{schema.simpleString()!r}: leave .schema(...) out",
            )
        return cls(options)

    def __getstate__(self) -> dict[str, Any]:
        # Threads and sockets stay where they are; executors only read.
        return {**self.__dict__, "_running": None}

    # On the driver.

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return _offset(self._started().spool.first_line)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        # Both of our own limits are applied in any case; Spark has no way to tell of two.
        if self._options.max_rows_per_trigger is not None:
            return ReadMaxRows(self._options.max_rows_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        # What is available is received at the first question for it: only then Spark tells how far
        # it is. The spool may be full of lines of its last batch, and nothing would be received.
        self._started()
        self._is_available_now = True

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        running = self._started()
        running.check()
        spool, line = running.spool, _line(start)
        spool.check_retained(line, line)
        running.intake.processed(line)
        if self._is_available_now and self._target_line is None:
            self._target_line = self._received_now(running)
        available = spool.end_line if self._target_line is None else self._target_line
        end = max(line, available)
        rows = _least(self._options.max_rows_per_trigger, getattr(limit, "max_rows", None))
        size = _least(self._options.max_bytes_per_trigger, getattr(limit, "max_bytes", None))
        # With AvailableNow nothing more will come, so nobody may wait for it.
        if isinstance(limit, ReadMinRows) and self._target_line is None:
            end = end if end - line >= limit.min_rows else line
        if rows is not None:
            end = min(end, line + rows)
        if size is not None and end > line:
            end = min(end, spool.line_after_bytes(line, size))
        return _offset(end)

    def _received_now(self, running: _Running) -> int:
        """Receive what is available now and no more; return the line behind it."""
        running.receiver.wait_quiet(self._options.available_now_idle_ms / 1000)
        running.receiver.stop(self._options.storage_timeout_ms / 1000 + _STOP_S)
        running.check()
        return running.spool.end_line

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return None if self._running is None else self._running.report()

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        spool = self._started().spool
        slices = spool.slices(_line(start), _line(end))
        groups = split_slices(slices, self._parts(spool, slices))
        return [LinesPartition(tuple(group)) for group in groups]

    def commit(self, end: dict[str, int]) -> None:
        running = self._started()
        running.check()
        running.intake.trim(_line(end))

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _started(self) -> _Running:
        if self._running is None:
            _end_in_order_on_sigterm()
            self._running = _Running(self._options)
        return self._running

    def _parts(self, spool: Spool, slices: list[SegmentSlice]) -> int:
        size = spool.size_of(slices)
        return max(1, min(self._options.num_partitions, size // _PARTITION_BYTES_MIN))

    # On an executor.

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LinesPartition)
        files = spool_files(self._options)
        patience = Patience(self._options.storage_timeout_ms)
        for wanted in partition.slices:
            batches = patience.call(partial(read_slice, files, self._options.uid, wanted))
            yield from map(self._columns, batches)

    def _columns(self, lines: pa.RecordBatch) -> pa.RecordBatch:
        fields, columns = [pa.field("value", pa.string())], [lines["value"]]
        if self._options.include_timestamp:
            fields.append(pa.field("timestamp", TIMESTAMP_TYPE))
            columns.append(pc.run_end_decode(lines["timestamp"]))
        if self._options.include_source:
            fields.append(pa.field("source", SOURCE_TYPE))
            columns.append(pc.run_end_decode(lines["source"]))
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


class _Running:
    """What runs in the driver's process: the spool, and the threads that fill it."""

    def __init__(self, options: SocketOptions) -> None:
        self._interrupted = threading.Event()
        patience = Patience(options.storage_timeout_ms, self._interrupted)
        self.spool = Spool.open(spool_files(options), options.uid, patience)
        self.intake = Intake(self.spool, options)
        self.receiver = Receiver(options, self.intake)
        self.intake.start()
        self.receiver.start()

    def check(self) -> None:
        """Raise what has ended one of the threads."""
        if self.intake.failure is not None:
            raise self.intake.failure

    def report(self) -> dict[str, Any]:
        counts = self.spool.counts
        return {
            "line": self.spool.end_line,
            "firstLine": self.spool.first_line,
            "spoolBytes": self.spool.size_bytes(),
            "segments": self.spool.segments,
            "epoch": self.spool.epoch,
            "receivedLines": counts.received,
            "skippedLines": counts.skipped,
            "truncatedLines": counts.truncated,
            "undecodableLines": counts.undecodable,
            "droppedPartialLines": self.spool.partial_lines,
            "connections": self.receiver.connections,
            "rejectedConnections": self.receiver.rejected,
            "isFull": self.intake.is_full,
        }

    def stop(self) -> None:
        if self.intake.failure is None:
            self.receiver.stop(_STOP_S)
        self._interrupted.set()
        self.intake.stop(_STOP_S)
        self.receiver.stop(0.0)


def spool_files(options: SocketOptions) -> StateFileSystem:
    """Open the folder of a source's spool."""
    root = f"{options.state_location.rstrip('/')}/{encode_name(options.uid)}"
    return open_file_system(root, options.storage_options)


def split_slices(slices: list[SegmentSlice], parts: int) -> list[list[SegmentSlice]]:
    """Split lines into at most so many groups of about equal numbers of lines."""
    total = sum(piece.end - piece.begin for piece in slices)
    bounds = [total * part // parts for part in range(1, parts + 1)]
    groups: list[list[SegmentSlice]] = [[] for _ in bounds]
    done = part = 0
    for piece in slices:
        begin = piece.begin
        while begin < piece.end:
            while done >= bounds[part]:
                part += 1
            end = min(piece.end, begin + bounds[part] - done)
            groups[part].append(SegmentSlice(piece.number, piece.first_line, begin, end))
            done += end - begin
            begin = end
    return [group for group in groups if group]


def _offset(line: int) -> dict[str, int]:
    return {"line": line}


def _line(offset: Mapping[str, Any]) -> int:
    line = offset.get("line")
    if not isinstance(line, int) or line < 0:
        raise OptionError(
            "flowsocket",
            f"an offset is a JSON object such as {{'line': 0}}, not {dict(offset)!r}: the "
            f"checkpoint location is that of another source. Choose a new one",
        )
    return line


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _end_in_order_on_sigterm() -> None:
    """Let ``stop`` run when Spark ends its process, which it does by SIGTERM.

    Only in that process: elsewhere signals are not this module's business.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None or spec.name != _RUNNER:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
