"""Makes a picture of what the demo showed on a terminal: a still SVG without scripts or fonts.

``script -qfec "make demo" demo.txt``, then
``python -m integration.demo.picture demo.txt docs/images/demo.svg``.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

__all__ = ["lines_of", "picture"]

_COLOURS = {
    31: "#e06c75",
    32: "#98c379",
    33: "#e5c07b",
    34: "#61afef",
    35: "#c678dd",
    36: "#56b6c2",
}
_PLAIN, _BOLD, _GROUND = "#c8ccd4", "#ffffff", "#21252b"
_STYLE = re.compile(r"\x1b\[(\d*)m")
_CLEAR = "\x1b[2K"
_WIDTH, _HEIGHT, _MARGIN = 8.0, 18.0, 16.0
_BLOCK = "█"

Run = tuple[str, int]
"""Characters of one style: 0, 1 for bold, or a colour of the terminal."""


def lines_of(text: str) -> list[list[Run]]:
    """Return what stands on the terminal at the end."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        # Progress is written over itself: only what came last is still there.
        shown = line.rpartition(_CLEAR)[2].replace("\r", "")
        if shown.startswith(("Script started", "Script done")):
            continue
        style, runs = 0, list[Run]()
        for place, piece in enumerate(_STYLE.split(shown)):
            if place % 2:
                style = int(piece or 0)
            elif piece:
                runs.append((piece, style))
        lines.append(runs)
    while lines and not lines[-1]:
        del lines[-1]
    while lines and not lines[0]:
        del lines[0]
    return lines


def picture(lines: list[list[Run]]) -> str:
    """Return the lines as an SVG document."""
    columns = max(sum(len(text) for text, _ in line) for line in lines)
    width, height = columns * _WIDTH + 2 * _MARGIN, len(lines) * _HEIGHT + 2 * _MARGIN
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="The output of make demo">',
        f'<rect width="100%" height="100%" rx="8" fill="{_GROUND}"/>',
        "<g font-family=\"ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace\" "
        'font-size="13">',
    ]
    for number, line in enumerate(lines):
        column = 0
        for text, style in _joined(line):
            elements.append(_element(text, style, column, number))
            column += len(text)
    return "\n".join([*elements, "</g>", "</svg>", ""])


def _joined(line: list[Run]) -> list[Run]:
    """Put neighbours of one style together."""
    found: list[Run] = []
    for text, style in line:
        if found and found[-1][1] == style:
            found[-1] = (found[-1][0] + text, style)
        else:
            found.append((text, style))
    return found


def _element(text: str, style: int, column: int, number: int) -> str:
    left, top = _MARGIN + column * _WIDTH, _MARGIN + number * _HEIGHT
    colour = _COLOURS.get(style, _BOLD if style == 1 else _PLAIN)
    width = len(text) * _WIDTH
    if set(text) == {_BLOCK}:
        # Letters of blocks leave gaps in many fonts.
        return (
            f'<rect x="{left:g}" y="{top + 3:g}" width="{width:g}" height="{_HEIGHT - 6:g}" '
            f'fill="{colour}"/>'
        )
    weight = ' font-weight="bold"' if style == 1 else ""
    # Ordinary spaces become one.
    text = text.replace(" ", "\N{NO-BREAK SPACE}")
    return (
        f'<text x="{left:g}" y="{top + 14:g}" textLength="{width:g}" fill="{colour}"{weight}>'
        f"{escape(text)}</text>"
    )


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(f"usage: {__package__}.picture RECORDING SVG", file=sys.stderr)
        return 2
    recording, target = map(Path, arguments)
    target.parent.mkdir(parents=True, exist_ok=True)
    # As bytes: reading as text would turn each return into a new line.
    text = recording.read_bytes().decode("utf-8")
    target.write_text(picture(lines_of(text)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
