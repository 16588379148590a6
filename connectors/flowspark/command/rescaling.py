"""``flow rescale --dry-run``: who would read what at another parallelism."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from flowspark.command.arguments import add_url, positive
from flowspark.command.contract import Command, CommandError, ExitCode, Invocation
from flowspark.command.loads import Readers, Share, loads_of, share_of, skew_of
from flowspark.command.locations import Location, find_operators
from flowspark.command.showing import record_of
from flowspark.command.terminal import Style, Terminal
from flowspark.command.words import count_of, size
from flowstate.key_groups import key_group_range_of
from flowstate.restoring import check_restorable

__all__ = ["COMMAND", "Rescaling", "rescaling_of"]

_BAR = 20
_SUBTASKS_SHOWN = 64

_HOW = (
    "a rescale is not a command: stop the query, and start it with another parallelism. Each "
    "subtask then reads its share of the checkpoint, and nothing is written before the next one. "
    "See what would happen with: flow rescale --dry-run URL --parallelism N"
)


@dataclass(frozen=True, slots=True)
class Rescaling:
    """What a start at another parallelism would be like for one operator."""

    url: str
    checkpoint_id: int
    max_parallelism: int
    before: tuple[Share, ...]
    after: tuple[Share, ...]
    skew_before: float
    """How much more the heaviest subtask has than the mean."""
    skew_after: float
    bytes_read: int


def rescaling_of(location: Location, parallelism: int) -> Rescaling:
    """Work out the shares of an operator's subtasks now and at another parallelism."""
    record = record_of(location)
    check_restorable(
        record, parallelism=parallelism, max_parallelism=None, assigner=None, key_type=None
    )
    # Each file is opened once, whatever the number of subtasks that read of it.
    readers = Readers(location.storage)
    weights = loads_of(location.storage, record).key_groups
    keyed = any(subtask.key_groups is not None for subtask in record.subtasks)

    def shares(count: int, *, are_now: bool) -> tuple[Share, ...]:
        return tuple(
            share_of(
                readers,
                record,
                weights,
                key_groups=key_group_range_of(
                    subtask_index=index, parallelism=count, max_parallelism=record.max_parallelism
                )
                if keyed
                else None,
                subtask_index=index,
                parallelism=None if are_now else count,
            )
            for index in range(count)
        )

    before = shares(record.parallelism, are_now=True)
    after = shares(parallelism, are_now=False)
    return Rescaling(
        url=location.url,
        checkpoint_id=record.checkpoint_id,
        max_parallelism=record.max_parallelism,
        before=before,
        after=after,
        skew_before=skew_of([share.bytes for share in before]),
        skew_after=skew_of([share.bytes for share in after]),
        bytes_read=sum(share.bytes_read for share in after),
    )


def _run(invocation: Invocation) -> ExitCode:
    given = invocation.arguments
    if not given.dry_run:
        raise CommandError(_HOW, ExitCode.USAGE)
    terminal = invocation.terminal
    locations = find_operators(given.url, invocation.storage_options)
    found = [rescaling_of(location, given.parallelism) for location in locations]
    if invocation.as_json:
        terminal.json({"parallelism": given.parallelism, "operators": found})
        return ExitCode.OK
    for index, (location, rescaling) in enumerate(zip(locations, found, strict=True)):
        if index:
            terminal.line()
        _show(location, rescaling, terminal)
    terminal.line()
    terminal.line("Nothing was written. To do it: stop the query, and start it with")
    terminal.line(f"parallelism={given.parallelism}; each subtask reads its share by itself.")
    return ExitCode.OK


def _show(location: Location, found: Rescaling, terminal: Terminal) -> None:
    terminal.line(terminal.styled(location.title, Style.BOLD))
    terminal.line(
        f"  checkpoint {found.checkpoint_id}: {count_of(len(found.before), 'subtask')} -> "
        f"{len(found.after)}, of at most {found.max_parallelism}"
    )
    largest = max(share.bytes for share in (*found.before, *found.after))
    _show_shares("now", found.before, largest, found.skew_before, terminal)
    _show_shares("then", found.after, largest, found.skew_after, terminal)
    keyed = found.after[0].key_groups is not None
    wider = len(found.after) > len(found.before)
    if keyed and wider and found.skew_after > found.skew_before * 1.5:
        terminal.line("  A key group is never cut: more subtasks do not help a heavy one.")
    terminal.line(f"  To be read at the start: {size(found.bytes_read)}")


def _show_shares(
    when: str, shares: Sequence[Share], largest: int, skew: float, terminal: Terminal
) -> None:
    terminal.line()
    terminal.table(
        [when, "key groups", "elements", "state", "load".ljust(_BAR), "reads", "from subtasks"],
        [
            [
                str(share.subtask_index),
                "-" if share.key_groups is None else str(share.key_groups),
                f"{share.elements:,}",
                size(share.bytes),
                terminal.bar(share.bytes, largest, _BAR),
                size(share.bytes_read),
                _ranges(share.sources) or "-",
            ]
            for share in shares[:_SUBTASKS_SHOWN]
        ],
        aligned="><>><><",
    )
    if len(shares) > _SUBTASKS_SHOWN:
        left = len(shares) - _SUBTASKS_SHOWN
        terminal.line(f"  ... and {count_of(left, 'subtask')} more (--json has all)")
    terminal.line(f"  the heaviest has {skew:.2f} times the mean")


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers, as in ``0..3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--parallelism", type=positive, required=True, metavar="N", help="the new parallelism"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show who would read what; without it the command only says how a rescale is done",
    )


COMMAND = Command(
    "rescale",
    "who would read what at another parallelism (only with --dry-run)",
    _run,
    _arguments,
    description="Show who would read what if the query were started with another parallelism. "
    "Nothing is ever written: a rescale is done by starting the query so.",
)
