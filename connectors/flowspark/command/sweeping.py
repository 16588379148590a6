"""``flow sweep``: delete what no checkpoint needs any more."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from flowspark.command.arguments import add_url
from flowspark.command.contract import Command, CommandError, ExitCode, Invocation
from flowspark.command.locations import Location, find_operators
from flowspark.command.terminal import Style, Terminal
from flowspark.command.words import count_of, size
from flowstate.checkpoint import Swept

__all__ = ["COMMAND"]

_SHOWN = 20
_NOTHING_COMMITTED = -1


@dataclass(frozen=True, slots=True)
class _LeftOver:
    location: Location
    committed_batch_id: int
    swept: Swept


def _left_over(location: Location) -> _LeftOver:
    """Find what a sweep would delete: of batches up to that of the newest checkpoint."""
    record = location.storage.latest()
    batch_id = None if record is None else record.batch_id
    committed = _NOTHING_COMMITTED if batch_id is None else batch_id
    return _LeftOver(location, committed, location.storage.sweep(committed, dry_run=True))


def _run(invocation: Invocation) -> ExitCode:
    given, terminal = invocation.arguments, invocation.terminal
    locations = find_operators(given.url, invocation.storage_options)
    if any(location.checkpoint_id is not None for location in locations):
        raise CommandError(
            f"a sweep is about a whole operator, not one checkpoint: give {locations[0].url}",
            ExitCode.USAGE,
        )
    found = [_left_over(location) for location in locations]
    files = sum(len(one.swept.paths) for one in found)
    total = sum(one.swept.bytes for one in found)
    if not invocation.as_json:
        _show(found, terminal)
    if files and not given.dry_run and not given.yes:
        if invocation.as_json or not terminal.interactive:
            raise CommandError(
                f"{count_of(files, 'file')} would be deleted, and nobody is here to be asked. Add "
                f"--yes to delete, or --dry-run to look only",
                ExitCode.USAGE,
            )
        if not terminal.ask(f"Delete {count_of(files, 'file')}, {size(total)}?"):
            terminal.line("Nothing was deleted.")
            return ExitCode.OK
    if not given.dry_run:
        found = [_deleted(one) for one in found]
        files = sum(len(one.swept.paths) for one in found)
        total = sum(one.swept.bytes for one in found)
    _report(found, invocation, files=files, total=total)
    return ExitCode.OK


def _deleted(found: _LeftOver) -> _LeftOver:
    if not found.swept.paths:
        return found
    swept = found.location.storage.sweep(found.committed_batch_id)
    return _LeftOver(found.location, found.committed_batch_id, swept)


def _show(found: list[_LeftOver], terminal: Terminal) -> None:
    for one in found:
        title = terminal.styled(one.location.title, Style.BOLD)
        if not one.swept.paths:
            terminal.line(f"{title}: nothing is left over")
            continue
        count = count_of(len(one.swept.paths), "file")
        terminal.line(f"{title}: {count}, {size(one.swept.bytes)}, that no checkpoint needs")
        for path in one.swept.paths[:_SHOWN]:
            terminal.line(f"  {path}")
        if (left := len(one.swept.paths) - _SHOWN) > 0:
            terminal.line(f"  ... and {left:,} more (--json has all)")


def _report(found: list[_LeftOver], invocation: Invocation, *, files: int, total: int) -> None:
    terminal, dry_run = invocation.terminal, invocation.arguments.dry_run
    if invocation.as_json:
        operators = [
            {"url": one.location.url, "paths": one.swept.paths, "bytes": one.swept.bytes}
            for one in found
        ]
        terminal.json({"deleted": not dry_run, "operators": operators})
    elif files:
        what = f"{count_of(files, 'file')}, {size(total)}"
        terminal.line(f"{what} would be deleted." if dry_run else f"Deleted {what}.")


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser, what="a state location, a query's folder or an operator's folder")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument("--yes", action="store_true", help="delete without asking")


COMMAND = Command(
    "sweep",
    "delete files that no checkpoint needs any more; asks before",
    _run,
    _arguments,
    description="Delete files that no checkpoint needs any more and no batch can still be about to "
    "commit. A running query is not disturbed, and sweeps by itself now and then.",
)
