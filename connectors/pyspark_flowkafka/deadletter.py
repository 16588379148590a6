"""What becomes of record batches that cannot be decoded: fail, skip, or keep them aside.

A dead letter is named by its topic, partition and offsets, and created exclusively: however often
a batch is read again, it is there once.
"""

from __future__ import annotations

import base64
import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark_flowkafka.errors import BadRecordError
from pyspark_flowkafka.offsets import TopicPartition
from pyspark_flowkafka.options import OnBadRecord, SourceOptions
from pyspark_flowkafka.records import BadBatch

if TYPE_CHECKING:
    from flowstate.storage.filesystems import StateFileSystem

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class BadBatches:
    """Applies ``onBadRecord`` to the bad batches of one partition, and counts them."""

    options: SourceOptions
    topic_partition: TopicPartition
    batches: int = 0
    offsets: int = 0
    _files: StateFileSystem | None = field(default=None, repr=False)

    def __call__(self, bad: BadBatch) -> None:
        where = f"{self.topic_partition}, offsets {bad.first_offset} to {bad.last_offset}"
        if self.options.on_bad_record is OnBadRecord.FAIL:
            raise BadRecordError(
                f"a record batch cannot be decoded ({where}): {bad.reason}. Set 'onBadRecord' to "
                f"'skip' to go on without it, or to 'deadletter' to keep it aside"
            )
        if self.options.on_bad_record is OnBadRecord.DEADLETTER:
            self._keep(bad)
        self.batches += 1
        self.offsets += bad.last_offset - bad.first_offset + 1
        _LOG.warning("[FLOWKAFKA_BAD_RECORD] left out %s: %s", where, bad.reason)

    def report(self) -> None:
        """Write how much was left out, if anything was."""
        if self.batches:
            _LOG.warning(
                "[FLOWKAFKA_BAD_RECORD] %s: left out %d batches with %d offsets",
                self.topic_partition,
                self.batches,
                self.offsets,
            )

    def _keep(self, bad: BadBatch) -> None:
        # Imported late: hardly any task needs it.
        from flowstate.storage.filesystems import open_file_system

        if self._files is None:
            path = self.options.bad_record_path or ""
            self._files = open_file_system(path, self.options.storage)
        letter = {
            "topic": self.topic_partition.topic,
            "partition": self.topic_partition.partition,
            "firstOffset": bad.first_offset,
            "lastOffset": bad.last_offset,
            "reason": bad.reason,
            "batch": base64.b64encode(bad.data).decode(),
        }
        topic, partition = self.topic_partition
        # Kafka's topic names have no slash and no character that a path could not have.
        name = f"{topic}/{partition}/{bad.first_offset:020d}-{bad.last_offset:020d}.json"
        self._files.create_exclusively(name, json.dumps(letter).encode())
