"""``flow seal``: the record of the last batch of a stopped query with keyed operators."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

import msgspec

from flowspark.command.arguments import add_url
from flowspark.command.contract import Command, CommandError, ExitCode, Invocation
from flowspark.command.locations import Location, find_operators
from flowspark.command.words import count_of
from flowspark.keyed.offline import seal_last_batch, unsealed_groups
from flowstate.checkpoint import CheckpointRecord
from flowstate.errors import SnapshotMissingError
from flowstate.storage.filesystems import StateFileSystem, open_file_system

__all__ = ["COMMAND"]

_COMMIT = re.compile(r"commits/(0|[1-9][0-9]*)")


def _run(invocation: Invocation) -> ExitCode:
    given = invocation.arguments
    locations = find_operators(given.url, invocation.storage_options)
    files = open_file_system(given.checkpoint_location, invocation.storage_options)
    committed = _committed_batches(files)
    _check_query(files, locations)
    sealed = [(one, seal_last_batch(one.storage, one.uid, committed)) for one in locations]
    if invocation.as_json:
        found = [
            {
                "url": location.url,
                "checkpoint_id": None if record is None else record.checkpoint_id,
                "batch_id": None if record is None else record.batch_id,
            }
            for location, record in sealed
        ]
        invocation.terminal.json({"sealed": found})
    else:
        for location, record in sealed:
            invocation.terminal.line(f"{location.title}: {_outcome(location, record)}")
    return ExitCode.OK


def _outcome(location: Location, record: CheckpointRecord | None) -> str:
    if record is not None:
        return f"chk-{record.checkpoint_id} is the state after batch {record.batch_id}"
    waiting = {group.batch_id for group in unsealed_groups(location.storage)}
    if waiting:
        batches = ", ".join(map(str, sorted(waiting)))
        return f"nothing to seal; Spark has not committed batch {batches} and will run it again"
    return "nothing to seal: the newest batch has its checkpoint"


def _committed_batches(files: StateFileSystem) -> set[int]:
    paths = [entry.path for entry in files.list("commits")]
    found = {int(match[1]) for path in paths if (match := _COMMIT.fullmatch(path))}
    if not found:
        raise CommandError(
            f"there are no commits below {files.url}: it is not the checkpointLocation of a query "
            f"that has run ({count_of(len(paths), 'file')} in its folder 'commits')"
        )
    return found


def _check_query(files: StateFileSystem, locations: Sequence[Location]) -> None:
    """Refuse the commits of another query: its batches say nothing of these operators'."""
    try:
        query_id = msgspec.json.decode(files.read("metadata"), type=dict[str, str]).get("id")
    except (SnapshotMissingError, msgspec.DecodeError):
        return
    foreign = [one for one in locations if one.query is not None and one.query != query_id]
    if foreign:
        raise CommandError(
            f"{files.url} is the checkpointLocation of query {query_id}, and {foreign[0].url} "
            f"belongs to another. Give the folder of that query, or the checkpointLocation of this "
            f"one",
            ExitCode.USAGE,
        )


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser, what="a query's folder below its state location, or an operator's folder")
    parser.add_argument(
        "--checkpoint-location",
        required=True,
        metavar="URL",
        help="Spark's checkpointLocation of the query, which says what it has committed",
    )


COMMAND = Command(
    "seal",
    "make the checkpoint of the last batch of a stopped query with keyed operators",
    _run,
    _arguments,
    description="The checkpoint of a batch is made by the batch after it, because only then it is "
    "known that Spark has committed it. So when a query stops, its last batch has none yet. That "
    "does not matter to the query itself, but to one that starts from its state (restore_from).",
)
