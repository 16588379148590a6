"""What a person sees: colours, tables, bars and progress; plain text where nobody looks."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TextIO

import msgspec

from flowspark.command.words import one_line

__all__ = ["Align", "OutputError", "Progress", "Style", "Terminal"]

_WIDTH_MIN, _WIDTH_MAX = 60, 120
_BLOCKS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = ".:-=+*#@"
_ELLIPSIS = "..."
_STYLED = re.compile(r"\x1b\[[0-9;]*m")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


class OutputError(OSError):
    """What is printed cannot be written, as on a full disk."""


class Style(StrEnum):
    """How a piece of text stands out; the values are the terminal's own."""

    BOLD = "1"
    DIM = "2"
    RED = "31"
    GREEN = "32"
    YELLOW = "33"
    CYAN = "36"


class Align(StrEnum):
    """On which side of a column a cell stands."""

    LEFT = "<"
    RIGHT = ">"


@dataclass(frozen=True, slots=True)
class Terminal:
    """Where output goes, and what may be done there."""

    out: TextIO
    err: TextIO
    colour: bool = False
    unicode: bool = True
    width: int = 100
    cuts: bool = False
    """Lines that are wider than the terminal end in dots; whoever reads a pipe gets all."""
    interactive: bool = False
    """Somebody is there to answer a question."""
    progress: bool = False
    """Standard error is a terminal, where a line may be written over."""

    @classmethod
    def of_process(cls, environment: Mapping[str, str] = os.environ) -> Terminal:
        """Return that of this process; colours as https://no-color.org has it."""
        out, err = sys.stdout, sys.stderr
        dumb = environment.get("TERM") == "dumb"
        columns = shutil.get_terminal_size((100, 24)).columns
        return cls(
            out=out,
            err=err,
            colour=out.isatty() and not dumb and not environment.get("NO_COLOR"),
            unicode="utf" in (out.encoding or "").lower(),
            cuts=out.isatty(),
            width=max(_WIDTH_MIN, min(columns, _WIDTH_MAX)),
            interactive=sys.stdin is not None and sys.stdin.isatty() and err.isatty(),
            progress=err.isatty() and not dumb,
        )

    def line(self, text: str = "") -> None:
        """Print a line."""
        text = self._visible(text)
        if not self.unicode:
            # What the terminal's encoding does not have is shown by its number.
            encoding = self.out.encoding or "ascii"
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        self.write(f"{text.rstrip()}\n")

    def note(self, text: str) -> None:
        """Print a line beside the output proper."""
        self.err.write(f"{self._visible(text)}\n")

    def _visible(self, text: str) -> str:
        """Return lines in which names, that may be anybody's, move no cursor."""
        styles = _STYLED.findall(text) if self.colour else []
        parts = _STYLED.split(text) if self.colour else [text]
        lines = ["\n".join(map(one_line, part.split("\n"))) for part in parts]
        return "".join(line + style for line, style in zip(lines, [*styles, ""], strict=True))

    def json(self, value: Any) -> None:
        """Print a value for a program to read: dataclasses, enums and times are known."""
        encoded = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode()
        if not self.unicode:
            encoded = _NOT_ASCII.sub(_escaped, encoded)
        self.write(f"{encoded}\n")

    def write(self, text: str) -> None:
        """Print a text as it is; ``OutputError`` if it cannot be written."""
        try:
            self.out.write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error

    def ask(self, question: str) -> bool:
        """Ask for a yes; anything else is a no."""
        self.err.write(f"{question} [y/N] ")
        self.err.flush()
        return sys.stdin.readline().strip().lower() in {"y", "yes"}

    def styled(self, text: str, *styles: Style) -> str:
        """Return the text, of one line, with its styles, where there are colours."""
        text = one_line(text)
        if not self.colour or not styles or not text:
            return text
        return f"\x1b[{';'.join(styles)}m{text}\x1b[0m"

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        aligned: str = "",
        indent: int = 2,
    ) -> None:
        """Print columns; ``aligned`` has a ``<`` or ``>`` for each, left where it has none."""
        sides = [Align(side) for side in aligned.ljust(len(head), Align.LEFT.value)]
        cells = [[one_line(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        heads = self._cut(_row(head, widths, sides), indent)
        self.line(" " * indent + self.styled(heads, Style.DIM))
        for row in cells:
            self.line(" " * indent + self._cut(_row(row, widths, sides), indent))

    def _cut(self, text: str, indent: int) -> str:
        text = text.rstrip()
        space = self.width - indent
        if not self.cuts or len(text) <= space:
            return text
        return text[: space - len(_ELLIPSIS)] + _ELLIPSIS

    def bar(self, value: float, largest: float, width: int = 24) -> str:
        """Return a bar whose length is to the width as the value is to the largest."""
        share = 0.0 if largest <= 0 else min(1.0, value / largest)
        if not self.unicode:
            return "#" * round(share * width)
        eighths = round(share * width * 8)
        # What is there at all is seen.
        if value > 0 and eighths == 0:
            eighths = 1
        return "█" * (eighths // 8) + _BLOCKS[eighths % 8].strip()

    def skyline(self, values: Sequence[float]) -> str:
        """Return one character per value, as high as the value."""
        levels = _LEVELS if self.unicode else _PLAIN_LEVELS
        largest = max(values, default=0)
        if largest <= 0:
            return " " * len(values)
        top = len(levels) - 1
        return "".join(levels[round(value / largest * top)] if value else " " for value in values)


class Progress:
    """A line on standard error that says how far something is; nothing where nobody sees it."""

    def __init__(self, terminal: Terminal, what: str) -> None:
        self._terminal, self._what = terminal, what
        self._shown = -1

    def update(self, done: int, total: int) -> None:
        """Say that so much of it is done."""
        percent = 100 if total <= 0 else done * 100 // total
        if not self._terminal.progress or percent == self._shown:
            return
        self._shown = percent
        bar = self._terminal.bar(percent, 100).ljust(24)
        self._terminal.err.write(f"\r\x1b[K{self._what} {bar} {percent:3d}%")
        self._terminal.err.flush()

    def close(self) -> None:
        """Remove the line."""
        if self._shown >= 0:
            self._terminal.err.write("\r\x1b[K")
            self._terminal.err.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _row(cells: Sequence[str], widths: Sequence[int], sides: Sequence[Align]) -> str:
    padded = [
        f"{cell:{side.value}{width}}"
        for cell, width, side in zip(cells, widths, sides, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _escaped(match: re.Match[str]) -> str:
    """Return a character as JSON has it in ASCII: in two halves if it is beyond 16 bits."""
    return json.dumps(match.group())[1:-1]
