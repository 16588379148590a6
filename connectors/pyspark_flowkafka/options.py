"""The options of ``format("flowkafka")``: Spark's own names, meanings and defaults, and some more.

Parsed once, on the driver, into ``SourceOptions``. Whatever is wrong is said before any broker is
asked. No message repeats the value of a ``kafka.*`` option that could be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from flowspark.locations import shared_location
from flowspark.options import STORAGE_PREFIX, Options
from pyspark_flowkafka import properties
from pyspark_flowkafka.errors import FORMAT
from pyspark_flowkafka.offsets import (
    EARLIEST,
    LATEST,
    OFFSET_MAX,
    Offsets,
    OffsetsJsonError,
    TopicPartition,
    names_of,
    parse_offsets,
    parse_partitions,
)
from pyspark_flowkafka.properties import ClientSettings

KNOWN = (
    "assign",
    "subscribe",
    "subscribePattern",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "groupIdPrefix",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "kafkaConsumer.pollTimeoutMs",
    # Beyond Spark's.
    "badRecordPath",
    "commitOffsets",
    "maxBytesPerTrigger",
    "newPartitions",
    "onBadRecord",
    "reportLag",
    "restoreFrom",
)
SUBSCRIPTIONS = ("assign", "subscribe", "subscribePattern")


class SubscriptionKind(StrEnum):
    """How the partitions of a query are found."""

    ASSIGN = "assign"
    SUBSCRIBE = "subscribe"
    PATTERN = "subscribePattern"


@dataclass(frozen=True, slots=True)
class Subscription:
    """Which partitions a query reads."""

    kind: SubscriptionKind
    topics: tuple[str, ...] = ()
    pattern: str = ""
    partitions: frozenset[TopicPartition] = frozenset()


class PositionKind(StrEnum):
    """What a starting or ending position was given as."""

    EARLIEST = "earliest"
    LATEST = "latest"
    COMMITTED = "committed"
    OFFSETS = "offsets"
    TIMESTAMP = "timestamp"
    TIMESTAMPS = "timestamps"


@dataclass(frozen=True, slots=True)
class Position:
    """A starting or ending position, before a broker was asked where that is."""

    kind: PositionKind
    option: str
    """The option that it came from, for messages."""
    numbers: Offsets = field(default_factory=dict)
    """Offsets or times of each partition."""
    timestamp_ms: int = 0


class NoMatch(StrEnum):
    """Where a partition begins that has no record at or after a starting time."""

    ERROR = "error"
    LATEST = "latest"


class NewPartitions(StrEnum):
    """Where partitions begin that are found while a query runs."""

    EARLIEST = "earliest"
    LATEST = "latest"


class OnBadRecord(StrEnum):
    """What becomes of a record batch that cannot be decoded."""

    FAIL = "fail"
    SKIP = "skip"
    DEADLETTER = "deadletter"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Everything that a query asks of the source."""

    subscription: Subscription
    settings: ClientSettings
    starting: Position
    ending: Position | None
    no_match: NoMatch
    max_offsets: int | None
    min_offsets: int | None
    max_delay_ms: int
    max_bytes: int | None
    min_partitions: int | None
    max_records: int | None
    fail_on_data_loss: bool
    include_headers: bool
    retries: int
    retry_interval_ms: int
    poll_timeout_ms: int
    commit_offsets: bool
    new_partitions: NewPartitions
    on_bad_record: OnBadRecord
    bad_record_path: str | None
    report_lag: bool
    restore_from: str | None
    storage: Mapping[str, Any] = field(repr=False)


def parse(given: Mapping[str, str], *, is_stream: bool) -> SourceOptions:
    """Read the options of a query, or raise ``OptionError`` with what is wrong and the way out."""
    options = Options(FORMAT, given, known=KNOWN, prefixes=(STORAGE_PREFIX, properties.PREFIX))
    default = PositionKind.LATEST if is_stream else PositionKind.EARLIEST
    parsed = SourceOptions(
        subscription=_subscription(options),
        settings=_settings(options),
        starting=_position(options, "starting") or Position(default, "startingOffsets"),
        ending=_position(options, "ending"),
        no_match=options.choice("startingOffsetsByTimestampStrategy", NoMatch.ERROR),
        max_offsets=options.integer("maxOffsetsPerTrigger", minimum=1),
        min_offsets=options.integer("minOffsetsPerTrigger", minimum=0),
        max_delay_ms=_delay_ms(options),
        max_bytes=options.size_bytes("maxBytesPerTrigger", minimum=1),
        min_partitions=options.integer("minPartitions", minimum=1),
        max_records=options.integer("maxRecordsPerPartition", minimum=1),
        fail_on_data_loss=options.boolean("failOnDataLoss", True),
        include_headers=options.boolean("includeHeaders", False),
        retries=options.integer("fetchOffset.numRetries", 3, minimum=1) or 3,
        retry_interval_ms=options.integer("fetchOffset.retryIntervalMs", 1000, minimum=0) or 0,
        poll_timeout_ms=options.integer("kafkaConsumer.pollTimeoutMs", 120_000, minimum=1)
        or 120_000,
        commit_offsets=options.boolean("commitOffsets", False),
        new_partitions=options.choice("newPartitions", NewPartitions.EARLIEST),
        on_bad_record=options.choice("onBadRecord", OnBadRecord.FAIL),
        bad_record_path=_bad_record_path(options),
        report_lag=options.boolean("reportLag", False),
        restore_from=options.text("restoreFrom"),
        storage=options.storage_options(),
    )
    _check_together(options, parsed)
    if is_stream:
        return parsed
    return _checked_for_batch(options, parsed)


def _settings(options: Options) -> ClientSettings:
    settings = properties.translate(options.below(properties.PREFIX))
    prefix = options.text("groupIdPrefix")
    # There are no groups of ours to name; the prefix shows up where brokers tell clients apart.
    if prefix and "kafka.client.id" not in options:
        settings = replace(settings, client_id=prefix)
    return settings


def _subscription(options: Options) -> Subscription:
    given = [name for name in SUBSCRIPTIONS if name in options]
    if len(given) != 1:
        wrong = "one of them is needed" if not given else "only one of them can be given"
        raise options.error(f"options {', '.join(map(repr, SUBSCRIPTIONS))}: {wrong}")
    name = given[0]
    value = options.required(name, "it says what to read")
    kind = SubscriptionKind(name)
    match kind:
        case SubscriptionKind.ASSIGN:
            partitions = _json(options, name, parse_partitions)
            return Subscription(kind, partitions=partitions)
        case SubscriptionKind.SUBSCRIBE:
            topics = options.names(name)
            if not topics:
                raise options.error(f"option 'subscribe' names no topic: {value!r}")
            return Subscription(kind, topics=tuple(dict.fromkeys(topics)))
    try:
        re.compile(value.strip())
    except re.error as error:
        raise options.error(
            f"option 'subscribePattern' is not a regular expression of Python: {error}"
        ) from None
    return Subscription(kind, pattern=value.strip())


def _bad_record_path(options: Options) -> str | None:
    path = options.text("badRecordPath")
    if path is None or not path.strip():
        return None
    return shared_location(FORMAT, "option 'badRecordPath'", path)


def _position(options: Options, end: str) -> Position | None:
    """Read one family of options; a time for all goes before times, these before offsets."""
    name = f"{end}Timestamp"
    if name in options:
        time_ms = options.integer(name, minimum=0, maximum=OFFSET_MAX)
        return Position(PositionKind.TIMESTAMP, name, timestamp_ms=time_ms or 0)
    name = f"{end}OffsetsByTimestamp"
    if name in options:
        times = _json(options, name, lambda text: parse_offsets(text, smallest=0))
        return Position(PositionKind.TIMESTAMPS, name, times)
    name = f"{end}Offsets"
    if name not in options:
        return None
    word = options.required(name, "it says where to begin or end").strip().lower()
    words = [PositionKind.EARLIEST, PositionKind.LATEST]
    if end == "starting":
        words.append(PositionKind.COMMITTED)
    if word in words:
        return Position(PositionKind(word), name)
    if not word.startswith("{"):
        listed = ", ".join(repr(str(one)) for one in words)
        raise options.error(
            f"option {name!r} must be one of {listed}, or JSON such as "
            f'{{"topic": {{"0": 23, "1": -2}}}}, not {options.text(name)!r}'
        )
    return Position(PositionKind.OFFSETS, name, _json(options, name, parse_offsets))


def _json(options: Options, name: str, read: Any) -> Any:
    text = options.required(name, "it is a JSON object")
    try:
        return read(text)
    except OffsetsJsonError as error:
        raise options.error(f"option {name!r} {error}: {text!r}") from None


def _delay_ms(options: Options) -> int:
    value = (options.text("maxTriggerDelay") or "15m").strip()
    # Spark takes a bare number as milliseconds.
    if value.isdigit():
        return int(value)
    return options.duration_ms("maxTriggerDelay", default="15m") or 0


def _check_together(options: Options, parsed: SourceOptions) -> None:
    least, most = parsed.min_offsets, parsed.max_offsets
    if least is not None and most is not None and least > most:
        raise options.error(
            f"option 'minOffsetsPerTrigger' ({least}) is higher than 'maxOffsetsPerTrigger' "
            f"({most})"
        )
    needs_group = parsed.commit_offsets or parsed.starting.kind is PositionKind.COMMITTED
    if needs_group and parsed.settings.group_id is None:
        name = "commitOffsets" if parsed.commit_offsets else "startingOffsets"
        raise options.error(
            f"option {name!r} needs a consumer group: set 'kafka.group.id' to its name"
        )
    if parsed.on_bad_record is OnBadRecord.DEADLETTER and not parsed.bad_record_path:
        raise options.error(
            "option 'onBadRecord' is 'deadletter': set 'badRecordPath' to a folder for the batches "
            "that cannot be decoded"
        )
    if parsed.ending is not None:
        _check_order(options, parsed.starting, parsed.ending)


def _check_order(options: Options, starting: Position, ending: Position) -> None:
    kinds = {PositionKind.OFFSETS, PositionKind.TIMESTAMPS}
    if starting.kind is not ending.kind or starting.kind not in kinds:
        return
    if starting.numbers.keys() != ending.numbers.keys():
        different = starting.numbers.keys() ^ ending.numbers.keys()
        raise options.error(
            f"options {starting.option!r} and {ending.option!r} must name the same partitions; "
            f"only one of them has {names_of(different)}"
        )
    for partition, start in starting.numbers.items():
        end = ending.numbers[partition]
        if start > end >= 0:
            raise options.error(
                f"option {starting.option!r} begins {partition} at {start}, behind its end {end} "
                f"in {ending.option!r}"
            )


def _checked_for_batch(options: Options, parsed: SourceOptions) -> SourceOptions:
    """Refuse what has no meaning for a batch query, as Spark's source does."""
    if parsed.starting.kind is PositionKind.LATEST or LATEST in _offsets(parsed.starting):
        raise options.error(
            "option 'startingOffsets' cannot be 'latest' (-1) in a batch query: it would read "
            "nothing"
        )
    if parsed.commit_offsets or parsed.restore_from:
        name = "commitOffsets" if parsed.commit_offsets else "restoreFrom"
        raise options.error(f"option {name!r} is for streaming queries")
    ending = parsed.ending or Position(PositionKind.LATEST, "endingOffsets")
    if ending.kind is PositionKind.EARLIEST or EARLIEST in _offsets(ending):
        raise options.error(
            "option 'endingOffsets' cannot be 'earliest' (-2) in a batch query: it would read "
            "nothing"
        )
    return replace(parsed, ending=ending)


def _offsets(position: Position) -> set[int]:
    return set(position.numbers.values()) if position.kind is PositionKind.OFFSETS else set()
