"""Options that several commands take, and what they are turned into."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from flowspark.errors import OptionError
from flowspark.options import STORAGE_PREFIX, Options

__all__ = ["add_common", "add_limit", "add_url", "natural", "positive", "storage_options_of"]


_MOST = 1 << 62


def add_url(parser: argparse.ArgumentParser, name: str = "url", what: str = "") -> None:
    """Add a state location as a positional argument."""
    parser.add_argument(
        name,
        metavar=name.upper(),
        help=what or "a state location, a query's folder, an operator's folder, or a chk-<id>",
    )


def add_limit(parser: argparse.ArgumentParser, default: int, what: str) -> None:
    """Add ``--limit``, where 0 means all."""
    parser.add_argument(
        "--limit",
        type=natural,
        default=default,
        metavar="N",
        help=f"{what}; 0 for all (default: {default})",
    )


def add_common(parser: argparse.ArgumentParser, *, touches_state: bool) -> None:
    """Add what every command takes."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    if touches_state:
        parser.add_argument(
            "--storage-option",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="an option of the store's package, as storage.KEY of a query; may be repeated. "
            "Every user of this computer can see it: better give secrets by the store's own "
            "environment variables or files",
        )


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    return _number(text, 1)


def natural(text: str) -> int:
    """Return a whole number of at least 0; one that is more than there can be is cut."""
    return min(_number(text, 0), _MOST)


def _number(text: str, minimum: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"must be a whole number from {minimum} on, not {text!r}")
    return int(text)


def storage_options_of(given: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return what goes to the store's package."""
    pairs = [text.partition("=") for text in given]
    if any(not name or not equals for name, equals, _ in pairs):
        # It may be a secret, so it is not repeated.
        parser.error("--storage-option takes KEY=VALUE, with a '=' in it")
    options = {f"{STORAGE_PREFIX}{name}": value for name, _, value in pairs}
    try:
        return Options("flow", options, known=()).storage_options()
    except OptionError as error:
        parser.error(error.message)
