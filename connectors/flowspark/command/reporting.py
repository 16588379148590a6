"""``flow report``: one page that shows the checkpoints of a location."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path

from flowspark.command.arguments import add_url
from flowspark.command.contract import Command, CommandError, ExitCode, Invocation
from flowspark.command.inspecting import (
    CheckpointOverview,
    look_at,
    overview_of,
)
from flowspark.command.locations import Location, find_operators
from flowspark.command.page import HistoryPoint, OperatorReport, Rescaled, page_of
from flowspark.command.words import count_of, size
from flowstate.checkpoint import CheckpointRecord
from flowstate.clock import SystemClock

__all__ = ["COMMAND", "DURATION", "report_of"]

DURATION = "duration_ms"
"""The attribute in which a record may say how long its checkpoint took."""


def report_of(location: Location) -> OperatorReport:
    """Gather what the page says of one operator."""
    seen = look_at(location)
    overview = overview_of(location, seen)
    if seen.loads is None:
        return OperatorReport(location.title, overview, (), (), ())
    return OperatorReport(
        title=location.title,
        overview=overview,
        history=_history(seen.records, {one.checkpoint_id: one for one in overview.checkpoints}),
        rescaled=_rescaled(seen.records),
        list_loads=tuple(
            (name, tuple((load.elements, load.bytes) for load in loads))
            for name, loads in sorted(seen.loads.lists.items())
        ),
    )


def _history(
    records: Sequence[CheckpointRecord], overviews: Mapping[int, CheckpointOverview]
) -> tuple[HistoryPoint, ...]:
    points = []
    before: CheckpointRecord | None = None
    said = any(isinstance(record.attributes.get(DURATION), int | float) for record in records)
    for record in records:
        took = record.attributes.get(DURATION)
        if not isinstance(took, int | float):
            # Of some records that say it and some that do not, the two are not mixed.
            took = None if said or before is None else record.created_ms - before.created_ms
        new = None
        if before is not None:
            new = sum(file.size for path, file in record.files.items() if path not in before.files)
        points.append(
            HistoryPoint(
                checkpoint=overviews[record.checkpoint_id],
                took_ms=None if took is None else max(0, round(took)),
                is_interval=not said,
                bytes_new=new,
            )
        )
        before = record
    return tuple(points)


def _rescaled(records: Sequence[CheckpointRecord]) -> tuple[Rescaled, ...]:
    return tuple(
        Rescaled(after.checkpoint_id, before.parallelism, after.parallelism, after.created_ms)
        for before, after in pairwise(records)
        if before.parallelism != after.parallelism
    )


def _run(invocation: Invocation) -> ExitCode:
    given = invocation.arguments
    out = Path(given.out)
    if out.is_dir():
        raise CommandError(f"{out} is a folder: give the name of a file", ExitCode.USAGE)
    locations = find_operators(given.url, invocation.storage_options)
    reports = [report_of(location) for location in locations]
    page = page_of(reports, location=_shown(locations), now_ms=SystemClock().now_ms())
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {out}: {error.strerror}") from error
    length = len(page.encode())
    if invocation.as_json:
        invocation.terminal.json(
            {"file": str(out.resolve()), "bytes": length, "operators": [r.title for r in reports]}
        )
    else:
        operators = count_of(len(reports), "operator")
        invocation.terminal.line(f"{operators} on one page of {size(length)}: {out.resolve()}")
    broken = any(report.overview.problem is not None for report in reports)
    return ExitCode.FOUND if broken else ExitCode.OK


def _shown(locations: Sequence[Location]) -> str:
    """Return what the operators' folders have in common; it has no secrets in it."""
    folders = zip(*(location.url.split("/") for location in locations), strict=False)
    common = takewhile(lambda names: len(set(names)) == 1, folders)
    return "/".join(names[0] for names in common)


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="the page, as in report.html; replaced if it is there",
    )


COMMAND = Command(
    "report",
    "one page of HTML: checkpoints over time, sizes, key groups, buffers",
    _run,
    _arguments,
    description="Write one page of HTML, which needs nothing else: checkpoints over time, sizes "
    "of states, the load of key groups and subtasks, changes of the parallelism.",
)
