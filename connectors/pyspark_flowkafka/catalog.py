"""Which partitions there are and where their logs begin and end: what the driver asks a cluster.

Positions of the options become offsets here, with the meaning that they have in Spark's source.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterable, Mapping, Set

from pyspark_flowkafka.client import KafkaClient
from pyspark_flowkafka.connections import retrying
from pyspark_flowkafka.errors import (
    AuthorizationError,
    DataLossError,
    KafkaSourceError,
    UnknownTopicError,
)
from pyspark_flowkafka.offsets import (
    EARLIEST,
    LATEST,
    Offsets,
    TopicPartition,
    names_of,
)
from pyspark_flowkafka.options import (
    NewPartitions,
    NoMatch,
    Position,
    PositionKind,
    SourceOptions,
    SubscriptionKind,
)
from pyspark_flowkafka.replies import RetriableClientError, Status, TopicMetadata

_LOG = logging.getLogger(__name__)


class Catalog:
    """The partitions of one query, and their offsets. Every call asks the cluster."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._settings = options.settings
        self.at_end: set[TopicPartition] = set()
        """Partitions whose position was the end of their log: asked for again, it is another."""

    # Partitions

    def partitions(self, *, must_exist: bool) -> frozenset[TopicPartition]:
        """Return the partitions that the query reads now.

        ``must_exist``: a topic that was named and is not there is an error. While a query runs it
        is a topic that was deleted, and what that means is for ``failOnDataLoss`` to say.
        """
        found = retrying(
            self._settings, "finding topics", lambda client: self._found(client, must_exist)
        )
        missing = sorted(name for name, one in found.items() if one.status is Status.UNKNOWN)
        if missing and must_exist:
            raise UnknownTopicError(
                f"there is no topic {', '.join(map(repr, missing))} on the cluster at "
                f"{', '.join(self._settings.bootstrap_servers)}. Create it first: this source "
                f"creates no topics"
            )
        all_of_them = {
            TopicPartition(topic, partition)
            for topic, one in found.items()
            if one.status is Status.OK
            for partition in one.leaders
        }
        subscription = self._options.subscription
        if subscription.kind is not SubscriptionKind.ASSIGN:
            return frozenset(all_of_them)
        absent = subscription.partitions - all_of_them
        if absent and must_exist:
            raise UnknownTopicError(f"there is no partition {names_of(absent)}")
        return subscription.partitions & all_of_them

    def _found(self, client: KafkaClient, must_exist: bool) -> dict[str, TopicMetadata]:
        subscription = self._options.subscription
        if subscription.kind is SubscriptionKind.PATTERN:
            # As in Spark's source, a part of the name is enough.
            pattern = re.compile(subscription.pattern)
            found = {
                name: one
                for name, one in client.topics(None).items()
                if pattern.search(name) and not one.is_internal
            }
        else:
            named = subscription.topics or {one.topic for one in subscription.partitions}
            # A running query looks again by itself, and must not wait for a deleted topic for ever.
            found = self._named(client, named, self._options.retries if must_exist else 1)
        for name, one in found.items():
            _check_topic(name, one)
        return found

    def _named(
        self, client: KafkaClient, names: Iterable[str], attempts: int
    ) -> dict[str, TopicMetadata]:
        """Ask for topics by name; one that was just created may not be known everywhere yet."""
        for attempt in range(attempts):
            found = client.topics(names)
            if all(one.status is not Status.UNKNOWN for one in found.values()):
                break
            if attempt + 1 < attempts:
                time.sleep(min(self._options.retry_interval_ms, 1000) / 1000)
        return found

    # Offsets

    def earliest(self, partitions: Iterable[TopicPartition]) -> Offsets:
        """Return where the logs of some partitions begin; deleted ones are left out."""
        return self._listed(dict.fromkeys(partitions, EARLIEST))

    def latest(self, partitions: Iterable[TopicPartition]) -> Offsets:
        """Return where the logs of some partitions end; deleted ones are left out."""
        return self._listed(dict.fromkeys(partitions, LATEST))

    def latest_after(self, known: Mapping[TopicPartition, int]) -> Offsets:
        """Return the ends of all partitions of the query, and look again if one went backwards.

        A broker that has just taken over may not know the newest end yet.
        """
        for attempt in range(self._options.retries):
            found = self.latest(self.partitions(must_exist=False))
            gone = known.keys() - found.keys()
            if not gone and all(found[one] >= known.get(one, 0) for one in found):
                break
            if attempt + 1 < self._options.retries:
                time.sleep(self._options.retry_interval_ms / 1000)
        return found

    def _listed(self, wanted: Mapping[TopicPartition, int]) -> Offsets:
        if not wanted:
            return {}

        def ask(client: KafkaClient) -> Offsets:
            found = client.list_offsets(wanted)
            listed: Offsets = {}
            for partition in wanted:
                status, offset = found.get(partition, (Status.RETRY, -1))
                match status:
                    case Status.OK:
                        listed[partition] = offset
                    case Status.UNKNOWN:
                        client.forget_leader(partition)
                    case Status.DENIED:
                        raise AuthorizationError(f"{partition} may not be read by this user")
                    case Status.FAILED:
                        raise KafkaSourceError(f"the offsets of {partition} cannot be found")
                    case _:
                        client.forget_leader(partition)
                        raise RetriableClientError(f"{partition} has no leader that answers")
            return listed

        return retrying(self._settings, "finding offsets", ask)

    # Positions

    def starting(self, position: Position) -> Offsets:
        """Return the offsets at which a query begins, or a batch query's first ones."""
        partitions = self.partitions(must_exist=True)
        if position.kind is PositionKind.COMMITTED:
            return self._within_log(self._committed(partitions), position.option)
        return self._resolve(position, partitions, self._options.no_match)

    def ending(self, position: Position) -> Offsets:
        """Return the offsets at which a query ends; a time without a match is the end."""
        return self._resolve(position, self.partitions(must_exist=True), NoMatch.LATEST)

    def ends(self, position: Position, partitions: Collection[TopicPartition]) -> Offsets:
        """Return where a stream ends, which may lie ahead; a time that has to come is left out."""
        match position.kind:
            case PositionKind.OFFSETS:
                fixed = {one: offset for one, offset in position.numbers.items() if offset >= 0}
                marks = {one: mark for one, mark in position.numbers.items() if mark < 0}
                return {**fixed, **self._listed(marks)}
            case PositionKind.TIMESTAMP:
                times: Offsets = dict.fromkeys(partitions, position.timestamp_ms)
            case PositionKind.TIMESTAMPS:
                named = position.numbers.keys() & partitions
                times = {one: position.numbers[one] for one in named}
            case _:
                return self._resolve(position, frozenset(partitions), NoMatch.LATEST)
        return {one: offset for one, offset in self._listed(times).items() if offset >= 0}

    def restored(self, offsets: Mapping[TopicPartition, int]) -> Offsets:
        """Return offsets of another run as those of this one, with partitions that are new."""
        partitions = self.partitions(must_exist=True)
        gone = offsets.keys() - partitions
        if gone:
            self.report_loss(f"{names_of(gone)} of 'restoreFrom' are gone")
        kept = {one: offsets[one] for one in partitions if one in offsets}
        added = self.begin_of(partitions - kept.keys())
        return self._within_log({**kept, **added}, "restoreFrom")

    def begin_of(self, new: Iterable[TopicPartition]) -> Offsets:
        """Return where partitions begin that the query has not seen before."""
        if self._options.new_partitions is NewPartitions.LATEST:
            return self._end_of(new)
        return self.earliest(new)

    def _end_of(self, partitions: Iterable[TopicPartition]) -> Offsets:
        found = self.latest(partitions)
        self.at_end |= found.keys()
        return found

    def _resolve(
        self, position: Position, partitions: frozenset[TopicPartition], no_match: NoMatch
    ) -> Offsets:
        match position.kind:
            case PositionKind.EARLIEST:
                return self.earliest(partitions)
            case PositionKind.LATEST:
                return self._end_of(partitions)
            case PositionKind.OFFSETS:
                check_complete(position, partitions)
                return self._specific(position)
            case PositionKind.TIMESTAMP:
                times = dict.fromkeys(partitions, position.timestamp_ms)
                return self._by_time(position, times, no_match)
        check_complete(position, partitions)
        return self._by_time(position, position.numbers, no_match)

    def _specific(self, position: Position) -> Offsets:
        """Return offsets, of which some may stand for the earliest and the latest."""
        fixed = {one: offset for one, offset in position.numbers.items() if offset >= 0}
        earliest = [one for one, offset in position.numbers.items() if offset == EARLIEST]
        latest = [one for one, offset in position.numbers.items() if offset == LATEST]
        within_log = self._within_log(fixed, position.option)
        return {**within_log, **self.earliest(earliest), **self._end_of(latest)}

    def _by_time(
        self, position: Position, times: Mapping[TopicPartition, int], no_match: NoMatch
    ) -> Offsets:
        found = self._listed(times)
        unmatched = [one for one, offset in found.items() if offset < 0]
        if unmatched and no_match is NoMatch.ERROR:
            raise KafkaSourceError(
                f"option {position.option!r}: no record of {names_of(unmatched)} is as young as "
                f"that. Set 'startingOffsetsByTimestampStrategy' to 'latest' to begin at the end "
                f"of such partitions"
            )
        return {**found, **self._end_of(unmatched)}

    def _committed(self, partitions: frozenset[TopicPartition]) -> Offsets:
        group = self._settings.group_id or ""
        found = retrying(
            self._settings,
            "finding committed offsets",
            lambda client: client.committed(group, partitions),
        )
        if not found:
            raise KafkaSourceError(
                f"option 'startingOffsets' is 'committed', but group {group!r} has committed "
                f"nothing for {names_of(partitions)}. Check 'kafka.group.id', or begin at "
                f"'earliest'"
            )
        return {**self.begin_of(partitions - found.keys()), **found}

    def _within_log(self, offsets: Offsets, option: str) -> Offsets:
        """Check that offsets are in the log; outside of it they are data that is lost."""
        earliest, latest = self.earliest(offsets), self.latest(offsets)
        checked: Offsets = {}
        for partition, offset in offsets.items():
            low, high = earliest.get(partition, 0), latest.get(partition, 0)
            checked[partition] = min(max(offset, low), high)
            if offset > high:
                self.at_end.add(partition)
            if checked[partition] != offset:
                self.report_loss(
                    f"option {option!r}: offset {offset} of {partition} is outside of the log, "
                    f"which has {low} to {high}"
                )
        return checked

    def report_loss(self, message: str) -> None:
        """Fail, or write a warning, as ``failOnDataLoss`` says."""
        report_loss(message, fail=self._options.fail_on_data_loss)


def report_loss(message: str, *, fail: bool) -> None:
    """Fail because records are lost, or write a warning and go on."""
    if fail:
        raise DataLossError(
            f"{message}. Records may have aged out of the log, or a topic was deleted. Set "
            f"'failOnDataLoss' to 'false' to go on with what is there"
        )
    _LOG.warning("[FLOWKAFKA_DATA_LOSS] %s; 'failOnDataLoss' is false: going on", message)


def _check_topic(name: str, found: TopicMetadata) -> None:
    match found.status:
        case Status.OK | Status.UNKNOWN:
            return
        case Status.RETRY:
            raise RetriableClientError(f"topic {name!r}: {found.error}")
        case Status.DENIED:
            raise AuthorizationError(f"topic {name!r} may not be read by this user")
    raise UnknownTopicError(f"topic {name!r} cannot be read: {found.error}")


def check_complete(position: Position, partitions: Set[TopicPartition]) -> None:
    """Refuse a position that leaves partitions of the query out, or names others."""
    different = position.numbers.keys() ^ partitions
    if different:
        raise KafkaSourceError(
            f"option {position.option!r} must name all partitions, with -1 for the latest and -2 "
            f"for the earliest offset. It names {names_of(position.numbers)}; the query has "
            f"{names_of(partitions) or 'none'}"
        )
