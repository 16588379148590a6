"""``flow flush``: the flush of a stopped query as a command of ``flow``."""

from __future__ import annotations

import argparse

from flowspark.command.arguments import add_url
from flowspark.command.contract import Command, CommandError, ExitCode, Invocation
from flowspark.command.words import count_of
from pyspark_flowbuffer.flush import Flushed, flush

__all__ = ["COMMAND"]


def _run(invocation: Invocation) -> ExitCode:
    given = invocation.arguments
    pairs = [text.partition("=") for text in given.sink]
    if any(not name or not equals for name, equals, _ in pairs):
        # It may be a secret, so it is not repeated.
        raise CommandError("--sink takes NAME=VALUE, with a '=' in it", ExitCode.USAGE)
    flushed = flush(
        given.url,
        storage_options=invocation.storage_options,
        sink_options={name.lower(): value for name, _, value in pairs},
        dry_run=given.dry_run,
    )
    if invocation.as_json:
        invocation.terminal.json(flushed)
    else:
        _show(flushed, invocation)
    return ExitCode.OK


def _show(flushed: Flushed, invocation: Invocation) -> None:
    rows, terminal = count_of(flushed.rows, "row"), invocation.terminal
    if invocation.arguments.dry_run:
        terminal.line(f"{rows} would be emitted from {flushed.url}")
        return
    terminal.line(f"{rows} emitted from {flushed.url}")
    for name in flushed.files:
        terminal.line(f"  {name}")
    terminal.line(f"The newest checkpoint is chk-{flushed.checkpoint_id}.")


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser, what="the query's checkpointLocation or stateLocation, or its sink's folder")
    parser.add_argument("--dry-run", action="store_true", help="only say how many rows wait")
    parser.add_argument(
        "--sink",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of a sink function, as sink.NAME of the query; may be repeated",
    )


COMMAND = Command(
    "flush",
    "emit what waits in the buffers of a stopped flowbuffer query, once",
    _run,
    _arguments,
    description="Emit what waits in the buffers of a stopped flowbuffer query, once. The flush is "
    "one more checkpoint: started again, the query goes on after it.",
    secret_arguments=("sink",),
)
