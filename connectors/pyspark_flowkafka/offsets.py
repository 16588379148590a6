"""Offsets as Spark's Kafka source writes them: ``{"topic": {"0": 23, "1": -1}}``. No I/O here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

LATEST = -1
EARLIEST = -2
OFFSET_MAX = (1 << 63) - 1
EARLIEST_LOCAL = -4
"""What is older is in remote storage, if anywhere."""


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


Offsets = dict[TopicPartition, int]
"""Where reading goes on: one more than the last record's offset."""

PartitionNumbers = Mapping[str, Mapping[str, int]]
"""The same as JSON has it: topics, with partitions as texts."""


class OffsetsJsonError(ValueError):
    """A text is not offsets; the message goes behind the name of an option."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Records of one partition from an offset up to another, which is not included."""

    topic_partition: TopicPartition
    start: int
    until: int

    @property
    def size(self) -> int:
        return self.until - self.start


def to_json_value(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Return offsets in the form that goes into Spark's checkpoint, sorted."""
    value: dict[str, dict[str, int]] = {}
    for topic_partition in sorted(offsets):
        topic, partition = topic_partition
        value.setdefault(topic, {})[str(partition)] = offsets[topic_partition]
    return value


def from_json_value(value: PartitionNumbers) -> Offsets:
    """Return the offsets that Spark hands back."""
    return {
        TopicPartition(topic, int(partition)): offset
        for topic, partitions in value.items()
        for partition, offset in partitions.items()
    }


def parse_offsets(text: str, *, smallest: int = EARLIEST) -> Offsets:
    """Read what a user types: a JSON object of topics, each with its partitions and a number."""
    offsets: Offsets = {}
    for topic, partitions in _object(_json(text), "a JSON object").items():
        for name, offset in _object(partitions, f"an object of partitions for {topic!r}").items():
            topic_partition = TopicPartition(topic, _partition(topic, name))
            if topic_partition in offsets:
                raise OffsetsJsonError(f"names {topic_partition} twice")
            is_number = isinstance(offset, int) and not isinstance(offset, bool)
            if not is_number or not smallest <= offset <= OFFSET_MAX:
                raise OffsetsJsonError(f"has no offset for {topic_partition}, but {offset!r}")
            offsets[topic_partition] = offset
    if not offsets:
        raise OffsetsJsonError("names no partition")
    return offsets


def parse_partitions(text: str) -> frozenset[TopicPartition]:
    """Read the option ``assign``: a JSON object of topics, each with a list of partitions."""
    found = set()
    for topic, partitions in _object(_json(text), "a JSON object").items():
        if not isinstance(partitions, list):
            raise OffsetsJsonError(f"has no list of partitions for {topic!r}")
        for number in partitions:
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise OffsetsJsonError(f"has a partition of {topic!r} that is {number!r}")
            found.add(TopicPartition(topic, number))
    if not found:
        raise OffsetsJsonError("names no partition")
    return frozenset(found)


def names_of(partitions: Iterable[TopicPartition]) -> str:
    """Return partitions for a message, a few of them if there are many."""
    ordered = sorted(partitions)
    shown = ", ".join(map(str, ordered[:10]))
    return shown if len(ordered) <= 10 else f"{shown} and {len(ordered) - 10} more"


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise OffsetsJsonError(f"is not valid JSON ({error})") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise OffsetsJsonError("names something twice")
    return found


def _object(value: Any, expected: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise OffsetsJsonError(f"must be {expected}")
    return value


def _partition(topic: str, name: str) -> int:
    if not (name.isascii() and name.isdigit()):
        raise OffsetsJsonError(f"has a partition of {topic!r} that is {name!r}")
    return int(name)
