"""``flow verify``: whether everything that checkpoints consist of is there and undamaged."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from flowspark.command.arguments import add_url
from flowspark.command.contract import Command, ExitCode, Invocation
from flowspark.command.locations import Location, find_operators
from flowspark.command.terminal import Progress, Style, Terminal
from flowspark.command.words import count_of, size
from flowstate.checkpoint import CheckpointRecord
from flowstate.errors import CheckpointNotFoundError, SnapshotError

__all__ = ["COMMAND", "Verified"]


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found of one checkpoint."""

    url: str
    checkpoint_id: int
    files: int
    """Files in the store and states in the record."""
    bytes: int
    problems: tuple[str, ...]


def _verify(
    location: Location, checkpoint_id: int, child: CheckpointRecord | None, progress: Progress
) -> tuple[Verified | None, CheckpointRecord | None]:
    """Verify one checkpoint; the child is the record after it in the chain, if there is one."""
    storage = location.storage
    try:
        record = storage.read(checkpoint_id)
        report = storage.verify(checkpoint_id, progress.update)
    except CheckpointNotFoundError:
        if location.checkpoint_id is not None:
            raise
        return None, child  # Retired while we were at the others.
    except SnapshotError as error:
        return Verified(location.url, checkpoint_id, 0, 0, (str(error),)), None
    problems = [str(problem.error) for problem in report.problems]
    if problems and checkpoint_id not in storage.checkpoint_ids():
        return None, child  # Retired while it was read; its files may be gone by now.
    if child is not None and child.parent_id == checkpoint_id and not child.follows(record):
        problems.append(
            f"checkpoint {child.checkpoint_id} does not follow checkpoint {checkpoint_id}: one of "
            f"them was left by a run that was over, and the next retention removes it"
        )
    return Verified(
        location.url, checkpoint_id, report.files, report.bytes, tuple(problems)
    ), record


def _verify_all(location: Location, terminal: Terminal) -> Iterator[Verified]:
    ids = (
        [location.checkpoint_id]
        if location.checkpoint_id is not None
        else location.storage.checkpoint_ids()
    )
    child: CheckpointRecord | None = None
    for checkpoint_id in reversed(ids):
        with Progress(terminal, f"{location.title} chk-{checkpoint_id}") as progress:
            verified, child = _verify(location, checkpoint_id, child, progress)
        if verified is not None:
            yield verified


def _run(invocation: Invocation) -> ExitCode:
    terminal = invocation.terminal
    found: list[Verified] = []
    for location in find_operators(invocation.arguments.url, invocation.storage_options):
        ours = list(_verify_all(location, terminal))
        found += ours
        if not invocation.as_json:
            _show(location, ours, terminal)
    broken = any(one.problems for one in found)
    if invocation.as_json:
        terminal.json({"ok": not broken, "checkpoints": found})
    return ExitCode.FOUND if broken else ExitCode.OK


def _show(location: Location, found: list[Verified], terminal: Terminal) -> None:
    terminal.line(terminal.styled(location.title, Style.BOLD))
    if not found:
        terminal.line("  no complete checkpoint yet: nothing to verify")
    for one in found:
        good = not one.problems
        word = terminal.styled("ok", Style.GREEN) if good else terminal.styled("damaged", Style.RED)
        read = f"{count_of(one.files, 'file')}, {size(one.bytes)} read"
        terminal.line(f"  chk-{one.checkpoint_id}: {word}, {read}")
        for problem in one.problems:
            terminal.line(f"    {problem}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)


COMMAND = Command(
    "verify",
    "read all that checkpoints consist of: checksums, sizes, completeness",
    _run,
    _arguments,
    description="Read all that checkpoints consist of, and say what is damaged or missing. Exit "
    "code 1 if anything is.",
)
