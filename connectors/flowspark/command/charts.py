"""Charts as inline SVG, and bars as HTML. Colours come from the page's style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "Column", "bars", "columns", "heat_map"]

_CHART_WIDTH, _CHART_HEIGHT = 320, 84
_SLOT_MAX = 64.0
_CELL = 12
_CELLS_PER_ROW = 32
_CELLS_MAX = 1024
_FAINTEST = 0.14


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of a bar chart."""

    label: str
    value: float
    text: str
    """The value, as a person reads it."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a chart over checkpoints."""

    value: float | None
    """None where it is not known."""
    text: str
    """What is said when it is pointed at."""
    marked: bool = False


def bars(found: Sequence[Bar]) -> str:
    """Return a bar for each line; the longest is as wide as there is room."""
    largest = max((bar.value for bar in found), default=0)
    lines = []
    for bar in found:
        percent = (
            0.0 if largest <= 0 else max(0.4 if bar.value > 0 else 0.0, bar.value / largest * 100)
        )
        detail = f'<span class="detail">{escape(bar.detail)}</span>' if bar.detail else ""
        lines.append(
            f'<li><span class="label">{escape(bar.label)}{detail}</span>'
            f'<span class="track"><span class="fill" style="width:{percent:.1f}%"></span></span>'
            f'<span class="value">{escape(bar.text)}</span></li>'
        )
    return f'<ul class="bars">{"".join(lines)}</ul>'


def columns(title: str, found: Sequence[Column], *, top: str, first: str, last: str) -> str:
    """Return a column for each checkpoint, oldest first, with what the highest one stands for."""
    known = [column.value for column in found if column.value is not None]
    largest = max(known, default=0)
    # Few columns stand together at the left, and the names of the first and last below them.
    slot = min(_CHART_WIDTH / max(1, len(found)), _SLOT_MAX)
    width = slot * 0.8
    drawn = []
    for index, column in enumerate(found):
        height = 0.0
        if column.value is not None and largest > 0:
            height = max(1.5, column.value / largest * _CHART_HEIGHT)
        x = index * slot
        kind = "column marked" if column.marked else "column"
        drawn.append(
            f'<g><title>{escape(column.text)}</title><rect class="hover" x="{x:.1f}" y="0" '
            f'width="{slot:.1f}" height="{_CHART_HEIGHT}"/><rect class="{kind}" '
            f'x="{x:.1f}" y="{_CHART_HEIGHT - height:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" rx="1.5"/></g>'
        )
    return (
        f"<figure><figcaption><b>{escape(title)}</b><span>{escape(top)}</span></figcaption>"
        f'<svg viewBox="0 0 {_CHART_WIDTH} {_CHART_HEIGHT + 2}" role="img" '
        f'aria-label="{escape(f"{title}, at most {top}")}">'
        f'{"".join(drawn)}<line class="axis" x1="0" x2="{_CHART_WIDTH}" '
        f'y1="{_CHART_HEIGHT + 1}" y2="{_CHART_HEIGHT + 1}"/></svg>'
        f'<div class="ends" style="width:{slot * len(found) / _CHART_WIDTH:.1%}">'
        f"<span>{escape(first)}</span><span>{escape(last)}</span></div></figure>"
    )


def heat_map(weights: Sequence[int], starts: Sequence[int], texts: Sequence[str]) -> str:
    """Return a cell for each key group, the darker the heavier.

    ``starts`` are the first key groups of the subtasks, which are marked; ``texts`` say what a
    cell is. With more key groups than cells, neighbours share one, which is as dark as the
    heaviest.
    """
    per_cell = -(-len(weights) // _CELLS_MAX)
    largest = max(weights, default=0)
    marked = {start // per_cell for start in starts}
    cells = []
    count = -(-len(weights) // per_cell)
    for index in range(count):
        begin = index * per_cell
        window = range(begin, min(begin + per_cell, len(weights)))
        heaviest = max(window, key=weights.__getitem__)
        weight = weights[heaviest]
        strength = 0.0 if not weight else _FAINTEST + (1 - _FAINTEST) * weight / largest
        x, y = index % _CELLS_PER_ROW * _CELL, index // _CELLS_PER_ROW * _CELL
        side = _CELL - 1.5
        mark = f'<path class="mark" d="M{x} {y}h3.6l-3.6 3.6z"/>' if index in marked else ""
        cells.append(
            f'<g><title>{escape(texts[heaviest])}</title><rect class="empty" x="{x}" y="{y}" '
            f'width="{side}" height="{side}" rx="1.5"/><rect class="heat" x="{x}" y="{y}" '
            f'width="{side}" height="{side}" rx="1.5" fill-opacity="{strength:.3f}"/>{mark}</g>'
        )
    rows = -(-count // _CELLS_PER_ROW)
    width, height = min(count, _CELLS_PER_ROW) * _CELL, rows * _CELL
    return (
        f'<svg class="map" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="bytes by key group">{"".join(cells)}</svg>'
    )
