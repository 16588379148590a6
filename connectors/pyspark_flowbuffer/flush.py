"""Emit what is left in the buffers of a stopped query, once.

::

    python -m pyspark_flowbuffer.flush URL [--dry-run] [--json]

The URL is the query's checkpointLocation or stateLocation, or the folder of one sink in it.
A flush is one more checkpoint: the query, when it is started again, goes on after it. If the query
is running, one of the two is refused and nothing is written twice.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import pyarrow as pa

from flowspark.errors import OutputError
from flowspark.locations import absolute_location
from flowspark.options import Options
from flowspark.sinks import FLUSH_SEQUENCE
from flowstate.checkpoint import CheckpointRecord, CheckpointStorage, SubtaskSnapshot
from flowstate.errors import CheckpointNotFoundError, CheckpointSupersededError, FlowError
from flowstate.redistribution import Redistribution
from flowstate.storage.filesystems import open_file_system
from flowstate.types import type_from_text
from pyspark_flowbuffer.committing import Committer
from pyspark_flowbuffer.emitting import committables
from pyspark_flowbuffer.options import (
    FORMAT,
    BufferOptions,
    FileOutput,
    FunctionOutput,
    Triggers,
)
from pyspark_flowbuffer.partitions import split_by_folder
from pyspark_flowbuffer.publishing import SETTINGS
from pyspark_flowbuffer.staging import staged_files
from pyspark_flowbuffer.state import STATE_NAME, buffered_rows, restored_ranges, stretch_of
from pyspark_flowbuffer.subtask import TaskIdentity, list_digest, open_emitter

__all__ = ["Flushed", "flush"]

_RECORD = re.compile(r"(?:(.*)/)?chk-[1-9][0-9]*/_metadata")


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush has emitted, or, in a dry run, would emit."""

    url: str
    rows: int
    files: tuple[str, ...]
    """Below the sink's path; none for a sink of the user's, and none in a dry run."""
    checkpoint_id: int
    """The newest checkpoint afterwards."""


def flush(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    sink_options: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> Flushed:
    """Emit the buffered rows of a stopped query; a second call finds nothing to emit.

    ``sink_options`` are the ``sink.`` options of a sink function, which no checkpoint keeps.
    """
    storage = CheckpointStorage(_find_root(url, storage_options), storage_options)
    head = storage.latest()
    if head is None:
        raise _no_sink(url)
    committer = _committer(storage, head, storage_options or {}, sink_options or {})
    rows = buffered_rows(head)
    if dry_run:
        return Flushed(storage.url, rows, (), head.checkpoint_id)
    # A crash may have come between the last record and the end of its publication.
    committer.publisher.publish(head)
    if not rows:
        return Flushed(storage.url, 0, (), _settle(committer, head).checkpoint_id)
    run = f"flush-{uuid.uuid4().hex}"
    snapshots = [_emit_list(committer, head, index, run) for index in range(head.parallelism)]
    try:
        committed = committer.create_record(head, snapshots, run=run, batch_id=head.batch_id)
    except CheckpointSupersededError:
        committer.publisher.drop(snapshots, None)
        raise _came_second(storage) from None
    if not committed.won:
        committer.publisher.drop(snapshots, committed.record)
        raise _came_second(storage)
    committer.publisher.publish(committed.record)
    files = tuple(file.published for file in staged_files(snapshots))
    return Flushed(storage.url, rows, files, _settle(committer, committed.record).checkpoint_id)


def _settle(committer: Committer, record: CheckpointRecord) -> CheckpointRecord:
    """Follow a record by one without its committables, now that these are committed.

    Otherwise the query could never have another sink: only this one could commit them again.
    """
    if not committables(record.subtasks):
        return record
    subtasks = [msgspec.structs.replace(subtask, attributes={}) for subtask in record.subtasks]
    run = f"flush-{uuid.uuid4().hex}"
    try:
        return committer.create_record(record, subtasks, run=run, batch_id=record.batch_id).record
    except CheckpointSupersededError:
        # The query has gone on, with its sink.
        return record


def _find_root(url: str, storage_options: Mapping[str, Any] | None) -> str:
    """Return the folder of the only sink at or below a URL."""
    if not url.strip():
        # Of a shell's variable that is not set; it must not become the folder one is in.
        raise _no_sink("an empty location")
    location = absolute_location(url).rstrip("/")
    entries = open_file_system(location, storage_options).list("")
    matches = (_RECORD.fullmatch(entry.path) for entry in entries)
    folders = sorted({match.group(1) or "" for match in matches if match})
    roots = [f"{location}/{folder}".rstrip("/") for folder in folders]
    sinks = [root for root in roots if _is_sink(root, storage_options)]
    if not sinks:
        raise _no_sink(url)
    if len(sinks) > 1:
        raise OutputError(FORMAT, f"there are several sinks below {url}: give one of {sinks}")
    return sinks[0]


def _is_sink(root: str, storage_options: Mapping[str, Any] | None) -> bool:
    record = CheckpointStorage(root, storage_options).latest()
    return record is not None and SETTINGS in record.attributes


def _no_sink(url: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"there is no checkpoint of a flowbuffer sink at or below {url}: give the query's "
        f"checkpointLocation, or its stateLocation if it has one"
    )


def _came_second(storage: CheckpointStorage) -> CheckpointSupersededError:
    return CheckpointSupersededError(
        f"the checkpoints below {storage.url} went on during the flush: the query is running, or "
        f"somebody else is flushing it. Nothing was committed here; stop the query, and repeat it"
    )


def _committer(
    storage: CheckpointStorage,
    head: CheckpointRecord,
    storage_options: Mapping[str, Any],
    sink_options: Mapping[str, str],
) -> Committer:
    settings = head.attributes[SETTINGS]
    output: FileOutput | FunctionOutput
    if "sinkFunction" in settings:
        output = FunctionOutput(function=settings["sinkFunction"], options=dict(sink_options))
    else:
        output = FileOutput.from_json(settings)
    meta = head.operator_states[STATE_NAME]
    options = BufferOptions(
        output=output,
        triggers=Triggers(threshold=None, max_bytes=None, max_age_ms=None),
        redistribution=Redistribution(meta["mode"]),
        buffer_key=(),
        parallelism=None,
        state_location=storage.url,
        uid=settings["uid"],
        restore_from=None,
        start_empty=False,
        checkpoints_retained=2,
        storage_options=dict(storage_options),
    )
    schema = pa.schema(list(type_from_text(meta["value"]["arrow"])))
    return Committer(options, schema, settings["queryId"], storage)


def _emit_list(
    committer: Committer, head: CheckpointRecord, index: int, run: str
) -> SubtaskSnapshot:
    """Emit the rows of one subtask, and return its snapshot with an empty list."""
    options = committer.options
    task = TaskIdentity(
        query_id=committer.query_id, batch_id=head.batch_id or 0, run=run, subtask_index=index
    )
    emitter = open_emitter(options, task, prefix="flush", sequence_number=FLUSH_SEQUENCE)
    try:
        parts = restored_ranges(head, subtask_index=index, parallelism=None)
        tables = [
            stretch_of(part, committer.storage.reader(part.handle.file), committer.schema).load()
            for part in parts
        ]
        columns = options.output.partition_by if isinstance(options.output, FileOutput) else ()
        if tables:
            for folder, rows in split_by_folder(pa.concat_tables(tables), columns):
                emitter.emit(folder, rows)
        return SubtaskSnapshot(
            subtask_index=index, digest=list_digest(()), attributes=emitter.attributes()
        )
    finally:
        emitter.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pyspark_flowbuffer.flush",
        description="Emit what is left in the buffers of a stopped flowbuffer query, once.",
    )
    parser.add_argument("url", help="the query's checkpointLocation or stateLocation")
    parser.add_argument("--dry-run", action="store_true", help="only say how many rows wait")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--storage",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the store, as storage.NAME of the query",
    )
    parser.add_argument(
        "--sink",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of a sink function, as sink.NAME of the query",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        storage = {f"storage.{name}": value for name, value in _pairs(parser, given.storage)}
        flushed = flush(
            given.url,
            storage_options=Options(FORMAT, storage, known=()).storage_options(),
            sink_options=dict(_pairs(parser, given.sink)),
            dry_run=given.dry_run,
        )
    except FlowError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{_report(flushed, as_json=given.json, dry_run=given.dry_run)}\n")
    return 0


def _pairs(parser: argparse.ArgumentParser, given: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [text.partition("=") for text in given]
    if any(not name or not equals for name, equals, _ in pairs):
        parser.error("--storage and --sink take NAME=VALUE")
    return [(name.lower(), value) for name, _, value in pairs]


def _report(flushed: Flushed, *, as_json: bool, dry_run: bool) -> str:
    if as_json:
        return json.dumps(asdict(flushed))
    if dry_run:
        return f"{flushed.rows} rows wait in the buffers of {flushed.url}"
    lines = [f"{flushed.rows} rows emitted from {flushed.url}"]
    lines += [f"  {name}" for name in flushed.files]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
