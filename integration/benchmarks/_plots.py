"""Tables as bars: SVG files that need nothing from elsewhere and are readable in the dark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

__all__ = ["bars", "plotted_column"]

_LINE, _LABEL_CHARACTER, _BAR_WIDTH, _VALUE_WIDTH = 24, 7.2, 380, 110
_NUMBER = re.compile(r"-?[\d,]*\.?\d+")
_STYLE = """<style>
  text { font: 13px ui-monospace, monospace; fill: #24292f }
  .title { font-weight: bold } .bar { fill: #0969da }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .bar { fill: #58a6ff } }
</style>"""


def plotted_column(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> int | None:
    """Return the first column that is a number in every row, and not the same in all."""
    for place in range(1, len(columns)):
        numbers = [number_of(row[place]) for row in rows]
        if len(rows) > 1 and None not in numbers and len(set(numbers)) > 1:
            return place
    return None


def number_of(cell: object) -> float | None:
    """Return the number that a cell begins with."""
    match = _NUMBER.match(str(cell))
    return float(match[0].replace(",", "")) if match else None


def bars(title: str, labels: Sequence[str], cells: Sequence[object]) -> str:
    """Return one bar for each label, as long as its number."""
    values = [max(number_of(cell) or 0.0, 0.0) for cell in cells]
    longest = max(values) or 1.0
    left = max(len(label) for label in labels) * _LABEL_CHARACTER + 16
    width, height = left + _BAR_WIDTH + _VALUE_WIDTH, _LINE * (len(labels) + 1) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img" aria-label="{escape(title)}">',
        _STYLE,
        f'<text class="title" x="8" y="18">{escape(title)}</text>',
    ]
    for place, (label, value, cell) in enumerate(zip(labels, values, cells, strict=True), 1):
        top, size = _LINE * place + 8, value / longest * _BAR_WIDTH
        lines += [
            f'<text x="8" y="{top + 13}">{escape(label)}</text>',
            f'<rect class="bar" x="{left:.0f}" y="{top}" width="{size:.1f}" height="16"/>',
            f'<text x="{left + size + 6:.0f}" y="{top + 13}">{escape(str(cell))}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
