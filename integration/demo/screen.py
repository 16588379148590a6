"""What the demo shows: progress on one line, tables, and key groups as a row of blocks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from flowstate.key_groups import subtask_index_of

__all__ = ["Screen", "key_group_picture"]

_GROUPS_PER_CELL = 2
_COLOURS = (36, 33, 32, 35, 34)
_LETTERS = "ABCDE"


class Screen:
    """Writes to a terminal, or line by line to anything else."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._has_colours = self._is_terminal and "NO_COLOR" not in os.environ
        self._is_open = False
        self._shown_at = 0.0

    def heading(self, text: str) -> None:
        self._end_line()
        print(f"\n{self._in(1, text)}", flush=True)

    def line(self, text: str = "") -> None:
        self._end_line()
        print(text, flush=True)

    def progress(self, text: str) -> None:
        """Show how far something is; elsewhere than on a terminal only now and then."""
        now = time.monotonic()
        if self._is_terminal:
            print(f"\r\x1b[2K  {text}", end="", flush=True)
            self._is_open = True
        elif now - self._shown_at > 5:
            print(f"  {text}", flush=True)
            self._shown_at = now

    def table(self, rows: Sequence[tuple[str, Any]]) -> None:
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            shown = f"{value:,}" if isinstance(value, int) else str(value)
            self.line(f"  {name:<{width}}  {shown:>12}")

    def key_groups(self, parallelism: int) -> None:
        """Show which subtask owns which key groups."""
        letters = key_group_picture(parallelism)
        shown = "".join(map(self._block, letters)) if self._has_colours else letters
        self.line(f"  {parallelism} subtasks  {shown}  128 key groups")

    def _block(self, letter: str) -> str:
        return self._in(_COLOURS[_LETTERS.index(letter)], "█")

    def good(self, text: str) -> str:
        return self._in(32, text)

    def bad(self, text: str) -> str:
        return self._in(31, text)

    def _in(self, colour: int, text: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._has_colours else text

    def _end_line(self) -> None:
        if self._is_open:
            print()
            self._is_open = False


def key_group_picture(parallelism: int, max_parallelism: int = 128) -> str:
    """Return a letter for each subtask, as often as it owns key groups."""
    return "".join(
        _LETTERS[subtask_index_of(group, parallelism=parallelism, max_parallelism=max_parallelism)]
        for group in range(0, max_parallelism, _GROUPS_PER_CELL)
    )
