"""The command line of the conformance runner."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flowstate.testing.conformance.runner import NoVectorsError, run_folder
from flowstate.testing.conformance.trial import Backend

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay a folder, print what came of it, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flowstate.testing.conformance",
        description="Replay vector files against the library and report what differs.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the *.json files are")
    parser.add_argument(
        "--backend",
        type=Backend,
        choices=list(Backend),
        default=Backend.MEMORY,
        help="where keyed state is held (default: %(default)s)",
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="ID",
        help="replay only the case of this id; may be repeated",
    )
    options = parser.parse_args(arguments)
    encoding = sys.stdout.encoding or "utf-8"
    try:
        report = run_folder(options.folder, backend=options.backend, case_ids=options.case)
    except NoVectorsError as error:
        print(error, file=sys.stderr)
        return 2
    for line in report.lines():
        # Vectors may hold texts that are not valid Unicode, and a terminal may know even less.
        print(line.encode(encoding, "backslashreplace").decode(encoding))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
