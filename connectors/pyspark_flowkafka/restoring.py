"""Offsets of another run: ``restoreFrom`` names a checkpoint of Spark, or a file with offsets.

The checkpoint may be one of Spark's own Kafka source. Its last finished batch counts: an entry in
``commits`` says that the batch of that number in ``offsets`` is done.
"""

from __future__ import annotations

import json
import re

from flowstate.errors import FlowError
from flowstate.storage.filesystems import StateFileSystem, open_file_system
from pyspark_flowkafka.errors import RestoreSourceError
from pyspark_flowkafka.offsets import Offsets, OffsetsJsonError, TopicPartition, parse_offsets
from pyspark_flowkafka.options import SourceOptions, Subscription, SubscriptionKind

_VERSION = "v1"


def offsets_from(location: str, options: SourceOptions) -> Offsets:
    """Return the offsets that a checkpoint or a file holds."""
    text = location.rstrip("/")
    if text.endswith(".json"):
        return _from_file(text, options)
    files = open_file_system(text, options.storage)
    batch = _last_committed(files)
    if batch is None:
        raise RestoreSourceError(
            f"option 'restoreFrom': {files.url} has no folder 'commits' with a finished batch. "
            f"Give the checkpoint location of a query that has run, or a file with offsets whose "
            f"name ends with .json"
        )
    return _from_batch(files, batch, options.subscription)


def _from_file(text: str, options: SourceOptions) -> Offsets:
    folder, _, name = text.rpartition("/")
    files = open_file_system(folder or ".", options.storage)
    try:
        return parse_offsets(files.read(name).decode(), smallest=0)
    except (OffsetsJsonError, UnicodeDecodeError) as error:
        raise RestoreSourceError(f"option 'restoreFrom': {name} {error}") from None
    except FlowError as error:
        raise RestoreSourceError(f"option 'restoreFrom': {error}") from None


def _last_committed(files: StateFileSystem) -> int | None:
    names = (entry.path.rpartition("/")[2] for entry in files.list("commits"))
    return max((int(name) for name in names if name.isdigit()), default=None)


def _from_batch(files: StateFileSystem, batch: int, subscription: Subscription) -> Offsets:
    try:
        lines = files.read(f"offsets/{batch}").decode().splitlines()
    except FlowError as error:
        raise RestoreSourceError(
            f"option 'restoreFrom': batch {batch} is finished, but its offsets are gone: {error}"
        ) from None
    if not lines or lines[0].strip() != _VERSION:
        raise RestoreSourceError(
            f"option 'restoreFrom': offsets/{batch} is not a file of version {_VERSION}"
        )
    # The second line is about the batch; then there is one for each source of the query.
    found = [offsets for line in lines[2:] if (offsets := _offsets_of(line)) is not None]
    fitting = [one for one in found if _fits(one, subscription)]
    if len(fitting) != 1:
        raise RestoreSourceError(
            f"option 'restoreFrom': of the {len(found)} Kafka sources of that checkpoint, "
            f"{len(fitting)} have topics of this query; exactly one must. Write the offsets into a "
            f"file and name that"
        )
    return fitting[0]


def _offsets_of(line: str) -> Offsets | None:
    try:
        # Python sources are stored as JSON in JSON.
        text = json.loads(line)
        return parse_offsets(text if isinstance(text, str) else line, smallest=0)
    except (ValueError, OffsetsJsonError):
        return None


def _fits(offsets: Offsets, subscription: Subscription) -> bool:
    topics = {one.topic for one in offsets}
    match subscription.kind:
        case SubscriptionKind.PATTERN:
            return all(re.search(subscription.pattern, topic) for topic in topics)
        case SubscriptionKind.SUBSCRIBE:
            return bool(topics & set(subscription.topics))
    wanted: frozenset[TopicPartition] = subscription.partitions
    return bool(offsets.keys() & wanted)
