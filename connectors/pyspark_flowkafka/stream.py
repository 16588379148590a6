"""The stream reader: what the driver process answers to Spark, batch by batch.

One instance lives as long as the query's run and plans its batches; pickled copies of it read.
Offsets that Spark has written to its checkpoint are the only truth: the same start and end give the
same records, however often they are asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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

from pyspark_flowkafka.catalog import Catalog, check_complete
from pyspark_flowkafka.commits import commit
from pyspark_flowkafka.offsets import (
    OffsetRange,
    Offsets,
    TopicPartition,
    from_json_value,
    names_of,
    to_json_value,
)
from pyspark_flowkafka.options import NewPartitions, NoMatch, Position, PositionKind, parse
from pyspark_flowkafka.planning import backlog, cap, is_delayed, limit_bytes, rate_limit
from pyspark_flowkafka.source import check_schema, read, tasks

if TYPE_CHECKING:
    import pyarrow as pa

_LOG = logging.getLogger(__name__)

LAG_KEY = "offsetsBehindLatest "
"""Where ``reportLag`` puts its figures: no topic is called that, for the space at its end."""


class KafkaStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches over the partitions of a query, and reads them."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        check_schema(schema, given)
        self._options = parse(given, is_stream=True)
        self._initial: Offsets | None = None
        self._latest: Offsets = {}
        self._start: Offsets = {}
        self._ending: Offsets | None = None
        self._at_end: set[TopicPartition] = set()
        self._has_offered = False
        self._is_available_now = False
        self._available: Offsets | None = None
        # As in Spark's source, the first batch never waits for more records.
        self._triggered_at = float("-inf")

    # Where a query begins

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        if self._initial is None:
            catalog, options = self._catalog, self._options
            if options.restore_from is not None:
                from pyspark_flowkafka.restoring import offsets_from

                stored = offsets_from(options.restore_from, options)
                self._initial = catalog.restored(stored)
            else:
                self._initial = catalog.starting(options.starting)
            self._at_end = catalog.at_end
        return to_json_value(self._initial)

    # How far a batch goes

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Tell Spark that there are limits; which ones, ``latestOffset`` takes from the options.

        Spark has no way to pass several limits through Python. What it does pass tells whether
        limits count at all: a one-time trigger asks for everything.
        """
        options = self._options
        if options.max_offsets is not None:
            return ReadMaxRows(options.max_offsets)
        if options.max_bytes is not None:
            return ReadMaxBytes(options.max_bytes)
        if options.min_offsets is not None:
            return ReadMinRows(options.min_offsets)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._is_available_now = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        begin = from_json_value(start)
        self._start = begin
        latest = self._offered(begin)
        if not isinstance(limit, ReadAllAvailable):
            latest = self._limited(begin, latest)
        if begin == self._initial and not self._has_offered:
            # Spark writes down where a batch ends, not where the first one begins. So that batch is
            # empty where a restart would find another beginning, and its end is the beginning.
            latest = {
                one: begin.get(one, offset) if one in self._at_end else offset
                for one, offset in latest.items()
            }
        self._has_offered = True
        return to_json_value(latest)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        if not self._latest:
            return None
        report: dict[str, Any] = to_json_value(self._latest)
        if self._options.report_lag:
            behind = {one: end - self._start.get(one, 0) for one, end in self._latest.items()}
            report[LAG_KEY] = to_json_value(behind)
        return report

    def _offered(self, begin: Offsets) -> Offsets:
        """Return the ends of the logs, or what stands for them."""
        if self._available is not None:
            return self._available
        self._latest = self._catalog.latest_after(begin)
        offered = self._latest
        if self._options.ending is not None:
            offered = cap(offered, self._ends(self._options.ending, offered), begin)
        if self._is_available_now:
            self._available = offered
        return offered

    def _ends(self, ending: Position, offered: Offsets) -> Offsets:
        """Return where the query ends; a partition whose time has not come ends where it is."""
        is_timed = ending.kind in {PositionKind.TIMESTAMP, PositionKind.TIMESTAMPS}
        if self._ending is None:
            # A query that goes on may have found partitions that nobody knew when it began.
            if ending.numbers and self._initial is not None:
                check_complete(ending, offered.keys())
            self._ending = self._catalog.ends(ending, offered.keys())
        elif is_timed:
            self._ending |= self._catalog.ends(ending, offered.keys() - self._ending.keys())
        if not is_timed:
            return self._ending
        named = offered.keys() & ending.numbers.keys() if ending.numbers else offered.keys()
        return {**{one: offered[one] for one in named}, **self._ending}

    def _limited(self, begin: Offsets, latest: Offsets) -> Offsets:
        options = self._options
        begin = {**self._begin_of_new(begin, latest), **begin}
        if options.min_offsets is not None and not self._is_available_now:
            now = time.monotonic()
            if is_delayed(
                available=sum(backlog(begin, latest).values()),
                minimum=options.min_offsets,
                waited_ms=(now - self._triggered_at) * 1000,
                delay_max_ms=options.max_delay_ms,
            ):
                return dict(self._start)
            self._triggered_at = now
        if options.max_offsets is not None:
            latest = rate_limit(options.max_offsets, begin, latest)
        if options.max_bytes is not None:
            from pyspark_flowkafka.sampling import bytes_per_offset

            sizes = bytes_per_offset(options, begin, latest)
            latest = limit_bytes(options.max_bytes, begin, latest, sizes)
        return latest

    def _begin_of_new(self, begin: Offsets, latest: Offsets) -> Offsets:
        new = latest.keys() - begin.keys()
        if self._options.new_partitions is NewPartitions.LATEST:
            # The end at which a partition is first seen is where it begins.
            return {one: latest[one] for one in new}
        return self._catalog.earliest(new)

    # What a batch reads

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, until = from_json_value(start), from_json_value(end)
        if begin == self._initial and not self._has_offered:
            # An earlier run has planned this batch. Where the query began then was the end of the
            # log, which has moved since; and partitions may have been added.
            begin = {
                one: min(offset, until[one]) if self._may_have_moved(one, until[one]) else offset
                for one, offset in begin.items()
                if one in until
            }
        begin = {**begin, **self._new_partitions(begin, until)}
        gone = begin.keys() - until.keys()
        if gone:
            self._catalog.report_loss(f"{names_of(gone)} are gone")
        ranges = []
        for one in sorted(until.keys() & begin.keys()):
            if until[one] < begin[one]:
                self._catalog.report_loss(
                    f"the end of {one} went back from {begin[one]} to {until[one]}: the topic was "
                    f"created anew, or its log was truncated"
                )
            ranges.append(OffsetRange(one, begin[one], until[one]))
        return tasks(self._options, ranges)

    def _may_have_moved(self, one: TopicPartition, until: int) -> bool:
        """Say whether a query that begins now may begin further on than it did, without a loss."""
        starting = self._options.starting
        is_timed = starting.kind in {PositionKind.TIMESTAMP, PositionKind.TIMESTAMPS}
        # What was named was beyond the end of the log then, and may be in it now.
        lay_ahead = starting.kind is PositionKind.OFFSETS and starting.numbers.get(one, 0) > until
        is_at_end = one in self._at_end or lay_ahead
        return is_at_end or (is_timed and self._options.no_match is NoMatch.LATEST)

    def _new_partitions(
        self, begin: Mapping[TopicPartition, int], until: Mapping[TopicPartition, int]
    ) -> Offsets:
        """Return where partitions begin that are in a batch's end, but not in its start."""
        new = until.keys() - begin.keys()
        if self._options.new_partitions is NewPartitions.LATEST:
            return {one: until[one] for one in new}
        earliest = self._catalog.earliest(new)
        if deleted := new - earliest.keys():
            self._catalog.report_loss(f"{names_of(deleted)} were deleted as soon as created")
        for one, offset in earliest.items():
            if offset:
                self._catalog.report_loss(f"the new partition {one} begins at {offset}, not at 0")
        return earliest

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(self._options, partition)

    # What is done

    def commit(self, end: dict[str, Any]) -> None:
        if self._options.commit_offsets:
            commit(self._options, from_json_value(end))

    def stop(self) -> None:
        from pyspark_flowkafka.connections import discard

        discard(self._options.settings)

    @property
    def _catalog(self) -> Catalog:
        return Catalog(self._options)
