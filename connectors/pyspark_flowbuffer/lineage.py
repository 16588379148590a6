"""Where the state of a query's sink is, and from which checkpoint a batch goes on."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from flowspark.errors import OutputError
from flowspark.locations import absolute_location
from flowstate.checkpoint import CheckpointRecord, CheckpointStorage, encode_name
from flowstate.errors import CheckpointNotFoundError, FlowError
from flowstate.storage.filesystems import open_file_system
from pyspark_flowbuffer.options import FORMAT, BufferOptions

__all__ = ["Parent", "find_parent", "find_query_id", "open_storage"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parent:
    """The checkpoint that a batch follows."""

    record: CheckpointRecord | None
    storage: CheckpointStorage
    """Where the record's files are."""
    is_foreign: bool = False
    """It is another query's: nothing of the new checkpoint may refer to its files."""
    is_committed: bool = False
    """The record is not before the batch but of it: there is nothing left to do."""

    @property
    def identity(self) -> str:
        """Tells two parents apart."""
        return "" if self.record is None else f"{self.storage.url} {self.record.digest}"


def open_storage(options: BufferOptions, query_id: str) -> CheckpointStorage:
    """Open the root of this sink in this query."""
    root = f"{options.state_location}/{encode_name(query_id)}/{encode_name(options.uid)}"
    return CheckpointStorage(root, options.storage_options)


def find_query_id(options: BufferOptions) -> str | None:
    """Return the query's id as Spark keeps it, or None if that is not to be found."""
    if options.checkpoint_location is None:
        return None
    location = absolute_location(options.checkpoint_location)
    try:
        metadata = open_file_system(location, options.storage_options).read("metadata")
        return str(json.loads(metadata)["id"])
    except (FlowError, ValueError, LookupError, TypeError):
        return None


def find_parent(options: BufferOptions, storage: CheckpointStorage, batch_id: int) -> Parent:
    """Find the checkpoint that a batch follows, the same for all who ask before it is committed.

    A query that has run before must find its state: a location with a mistake in it would
    otherwise look like a query that has nothing in its buffers.
    """
    head = storage.latest()
    if head is not None:
        return Parent(head, storage, is_committed=_is_committed(head, storage, batch_id))
    if options.restore_from is not None:
        source, record = CheckpointStorage.resolve(options.restore_from, options.storage_options)
        return Parent(record, source, is_foreign=True)
    if batch_id == 0 or options.start_empty:
        return Parent(None, storage)
    raise CheckpointNotFoundError(
        f"batch {batch_id} of the query needs the buffers of the batch before, and there is no "
        f"checkpoint below {storage.url}. Correct 'stateLocation' or 'uid', or give "
        f"'restoreFrom'; if this query had another sink before, or its buffers may be forgotten, "
        f"set startEmpty=true"
    )


def _is_committed(head: CheckpointRecord, storage: CheckpointStorage, batch_id: int) -> bool:
    reached = -1 if head.batch_id is None else head.batch_id
    if reached > batch_id:
        raise OutputError(
            FORMAT,
            f"Spark wants to run batch {batch_id}, but checkpoint {head.checkpoint_id} below "
            f"{storage.url} is of batch {reached}: the query's checkpointLocation was set back. "
            f"Its rows may be in the output already. Restore the newer checkpointLocation, or "
            f"start with a new one and 'restoreFrom' the chk-<id> that belongs to it",
        )
    return reached == batch_id
