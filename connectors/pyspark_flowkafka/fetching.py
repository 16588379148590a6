"""Reading one range of one partition, whatever happens to its leader meanwhile.

``read_range`` runs in a task. It asks for the next bytes while Spark works on the last ones, and
ends when everything below the end was seen: by offsets, never by counting records, because
compaction and transactions leave gaps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pyspark_flowkafka.batches import size_of_first
from pyspark_flowkafka.catalog import report_loss
from pyspark_flowkafka.client import KafkaClient
from pyspark_flowkafka.connections import Retries, client_for
from pyspark_flowkafka.deadletter import BadBatches
from pyspark_flowkafka.errors import AuthorizationError, KafkaSourceError
from pyspark_flowkafka.offsets import EARLIEST, EARLIEST_LOCAL, LATEST, OffsetRange, TopicPartition
from pyspark_flowkafka.options import SourceOptions
from pyspark_flowkafka.records import (
    BadBatch,
    Damage,
    Decoder,
    Fetched,
    Scanned,
    scan_fetch,
)
from pyspark_flowkafka.replies import FetchReply, RetriableClientError, Status

_LOG = logging.getLogger(__name__)

# How often an answer without records is asked for again although the log goes on behind it.
_EMPTY_MAX = 3
# Beyond what a range is expected to have, so that one fetch is usually enough.
_SPARE_BYTES = 64 << 10
_SIZES_MAX = 10_000
_SECOND_LOOK_BYTES_MAX = 64 << 20

_bytes_per_offset: dict[TopicPartition, float] = {}
"""What this worker has seen of each partition: the end of a small range is not asked for twice as
large as it is."""


@dataclass(slots=True)
class RangeReader:
    """The state of reading one range: where it is, and what has gone wrong lately."""

    options: SourceOptions
    range: OffsetRange
    offset: int
    retries: Retries
    bad: BadBatches
    decoder: Decoder
    size: int
    may_begin_later: bool = False
    """Records that are gone before the first one was read are no loss."""
    empty_answers: int = 0
    unknown_answers: int = 0
    suspicious: int | None = None
    """An offset at which something was damaged, and is fetched once more before it is believed."""
    known_bad: bytes = b""
    """A damaged batch whose end is not known; further offsets may turn out to be in it, too."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all records of the range."""
        ahead: Any = None
        while self.offset < self.range.until:
            try:
                client = client_for(self.options.settings)
                answer = ahead or self._ask(client)
                ahead = None
                reply = client.fetched(answer)
                if not self._is_usable(client, reply):
                    continue
                scanned = self._scan(reply)
                if scanned is None:
                    continue
            except RetriableClientError as error:
                self._failed(error.reason)
                continue
            self._advance(scanned.next_offset)
            ahead = self._ask_ahead(client)
            yield from self.decoder.decode(scanned)
            # What whoever takes the records did meanwhile is not time without success.
            self.retries.succeeded()
        self.bad.report()

    def _ask(self, client: KafkaClient) -> Any:
        return client.fetch(self.range.topic_partition, self.offset, self._fetch_size())

    def _fetch_size(self) -> int:
        usual = self.options.settings.partition_fetch_bytes
        seen = _bytes_per_offset.get(self.range.topic_partition)
        if seen is None or self.size != usual:
            return self.size
        return min(usual, int((self.range.until - self.offset) * seen * 1.2) + _SPARE_BYTES)

    def _ask_ahead(self, client: KafkaClient) -> Any:
        """Let the broker work on the next answer while this one is decoded."""
        try:
            return self._ask(client) if self.offset < self.range.until else None
        except RetriableClientError:
            return None  # Asked for again when it is needed.

    def _advance(self, offset: int) -> None:
        if offset > self.offset:
            self.retries.succeeded()
            self.empty_answers = self.unknown_answers = 0
            self.size = self.options.settings.partition_fetch_bytes
        self.offset = offset

    def _failed(self, reason: str) -> None:
        where = self.range.topic_partition
        client_for(self.options.settings).forget_leader(where)
        self.retries.failed(f"reading {where} at offset {self.offset}", reason)

    def _is_usable(self, client: KafkaClient, reply: FetchReply) -> bool:
        """Say whether an answer has records; if not, do what it takes to get another one."""
        where = self.range.topic_partition
        match reply.status:
            case Status.OK:
                return bool(reply.data) or self._empty(client, reply)
            case Status.OUT_OF_RANGE:
                self._find_range(client)
            case Status.UNKNOWN:
                self._unknown()
            case Status.DENIED:
                raise AuthorizationError(f"{where} may not be read by this user ({reply.error})")
            case Status.RETRY:
                self._failed(reply.error)
            case Status.FAILED:
                raise KafkaSourceError(f"{where} cannot be read at {self.offset}: {reply.error}")
        return False

    def _empty(self, client: KafkaClient, reply: FetchReply) -> bool:
        """Handle an answer without records: too early, too fast, or nothing left."""
        if reply.is_throttled:
            # Brokers answer at once and want to be left alone for a while; the client waits.
            if self.retries.is_over:
                self._failed("the broker throttles this client")
            return False
        self.empty_answers += 1
        if reply.log_end >= self.range.until:
            if self.empty_answers >= _EMPTY_MAX:
                self._pass_gap(client)
        elif reply.log_end > self.offset or not self.retries.is_over:
            # The end of the range was once there. A new leader may not know it for half a minute.
            self._failed(f"the log ends at {reply.log_end}")
        else:
            report_loss(
                f"{self.range.topic_partition} ends at {reply.log_end}, before {self.range.until}",
                fail=self.options.fail_on_data_loss,
            )
            self.offset = self.range.until
        return False

    def _pass_gap(self, client: KafkaClient) -> None:
        """Nothing but compacted records is left below the end, if the broker has looked.

        One that gets older records from remote storage answers without any if that takes too long.
        """
        where = self.range.topic_partition
        status, local_start = client.list_offsets({where: EARLIEST_LOCAL})[where]
        is_unknown = status in {Status.RETRY, Status.UNKNOWN}
        if is_unknown or (status is Status.OK and self.offset < local_start):
            self._failed("the broker's remote storage does not answer in time")
        else:
            self.offset = self.range.until

    def _find_range(self, client: KafkaClient) -> None:
        """The offset is not in the log (any more): find out what is."""
        where = self.range.topic_partition
        low = client.list_offsets({where: EARLIEST})[where]
        high = client.list_offsets({where: LATEST})[where]
        if low[0] is not Status.OK or high[0] is not Status.OK:
            self._failed("the log's range is not known")
            return
        if low[1] <= self.offset <= high[1]:
            self._failed("the offset is in the log after all")
            return
        if not (self.may_begin_later and self.offset == self.range.start < low[1]):
            report_loss(
                f"offset {self.offset} of {where} is not in the log, which has {low[1]} to "
                f"{high[1]}",
                fail=self.options.fail_on_data_loss,
            )
        self.offset = min(low[1], self.range.until) if self.offset < low[1] else self.range.until

    def _unknown(self) -> None:
        """The partition is not known: it was deleted, or the broker has just started."""
        self.unknown_answers += 1
        client_for(self.options.settings).forget_leader(self.range.topic_partition)
        if self.unknown_answers <= self.options.retries:
            time.sleep(self.options.retry_interval_ms / 1000)
            return
        report_loss(
            f"{self.range.topic_partition} is gone before offset {self.range.until} was read",
            fail=self.options.fail_on_data_loss,
        )
        self.offset = self.range.until

    def _scan(self, reply: FetchReply) -> Scanned | None:
        """Find the batches of an answer; None if it has to be fetched again."""
        log_end = reply.log_end if reply.log_end >= 0 else None
        fetched = Fetched(reply.data, self.offset, log_end, reply.aborted)
        scanned = scan_fetch(
            fetched, until=self.range.until, check_crcs=self.options.settings.check_crcs
        )
        if scanned.headers:
            self._note_size(scanned)
            return scanned
        first = reply.data[: size_of_first(reply.data)]
        if scanned.damage is None:
            self._grow(reply.data)
        elif first == self.known_bad:
            self._advance(self.offset + 1)
        elif self.suspicious != self.offset:
            # It may have been damaged on its way. If not, the batch behind it is wanted as well.
            self.suspicious = self.offset
            usual = self.options.settings.partition_fetch_bytes
            self.size = max(2 * usual, min(4 * len(first), _SECOND_LOOK_BYTES_MAX))
            self._failed(scanned.damage.reason)
        else:
            self._skip(scanned.damage, first)
        return None

    def _note_size(self, scanned: Scanned) -> None:
        first, last = scanned.headers[0], scanned.headers[-1]
        if len(_bytes_per_offset) >= _SIZES_MAX:
            _bytes_per_offset.clear()
        offsets = last.last_offset - first.base_offset + 1
        _bytes_per_offset[self.range.topic_partition] = (last.end - first.start) / offsets

    def _grow(self, data: bytes) -> None:
        """Ask for more: the first batch is larger than what was asked for."""
        needed = size_of_first(data) or 2 * self.size
        if self.size >= needed:
            self._failed("a batch was cut off although it fits")
        self.size = min(max(needed, 2 * self.size), 2**31 - 1)

    def _skip(self, damage: Damage, whole: bytes) -> None:
        """Leave out a batch whose second copy is no better, or fail."""
        behind = damage.next_offset
        if behind is None:
            self.known_bad, behind = whole, self.offset + 1
        # Whichever range meets the batch calls it the same, so that it is set aside once.
        base = int.from_bytes(whole[:8], "big", signed=True)
        first = base if 0 <= base <= self.offset else self.offset
        self.bad(BadBatch(first, behind - 1, damage.reason, whole))
        self._advance(min(behind, self.range.until))


def read_range(
    options: SourceOptions, one: OffsetRange, *, may_begin_later: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a range as Arrow batches."""
    topic, partition = one.topic_partition
    bad = BadBatches(options, one.topic_partition)
    decoder = Decoder(
        topic=topic,
        partition=partition,
        start=one.start,
        until=one.until,
        include_headers=options.include_headers,
        on_bad_batch=bad,
    )
    reader = RangeReader(
        options=options,
        range=one,
        offset=one.start,
        retries=Retries(options.settings, options.poll_timeout_ms),
        bad=bad,
        decoder=decoder,
        size=options.settings.partition_fetch_bytes,
        may_begin_later=may_begin_later,
    )
    return reader.batches()
