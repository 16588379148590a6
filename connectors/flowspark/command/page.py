"""The page of ``flow report``: what it shows and how it looks. It needs nothing from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from flowspark import __version__
from flowspark.command.charts import Bar, Column, bars, columns, heat_map
from flowspark.command.inspecting import CheckpointOverview, Overview, unsealed_words
from flowspark.command.loads import skew_of
from flowspark.command.words import count_of, duration, moment, size

__all__ = ["HistoryPoint", "OperatorReport", "page_of"]


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One checkpoint of the retained chain."""

    checkpoint: CheckpointOverview
    took_ms: int | None
    """How long it took, if the record says; else the time since the checkpoint before it."""
    is_interval: bool
    """The time is that since the checkpoint before."""
    bytes_new: int | None
    """In files that the checkpoint before does not refer to."""


@dataclass(frozen=True, slots=True)
class Rescaled:
    """A change of the parallelism between two checkpoints of the chain."""

    checkpoint_id: int
    before: int
    after: int
    created_ms: int


@dataclass(frozen=True, slots=True)
class OperatorReport:
    """All that the page says of one operator."""

    title: str
    overview: Overview
    history: tuple[HistoryPoint, ...]
    rescaled: tuple[Rescaled, ...]
    list_loads: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    """By operator state: elements and bytes of each subtask."""


_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b1f24;--soft:#5b6573;
--line:#dde1e7;--track:#eceff3;--accent:#1f6feb;--mark:#b35900;--bad:#b42318;--empty:#eceff3}
@media (prefers-color-scheme:dark){:root{--page:#0e1116;--card:#171b22;--ink:#e6eaf0;
--soft:#98a3b3;--line:#2a313c;--track:#232a34;--accent:#5aa2ff;--mark:#f0a24b;--bad:#ff8a80;
--empty:#232a34}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);line-height:1.45;
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:1.5rem;margin:0 0 2px}h2{font-size:1.15rem;margin:0;overflow-wrap:anywhere}
h3{font-size:.95rem;margin:22px 0 8px}
p{margin:6px 0}.soft{color:var(--soft);font-size:.87rem;overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:16px;margin:16px 0}
nav ul{list-style:none;margin:10px 0 0;padding:0;display:grid;gap:4px}
nav a{color:var(--accent);text-decoration:none;overflow-wrap:anywhere}nav a:hover{
text-decoration:underline}
nav li{display:flex;gap:12px;justify-content:space-between}nav li span{white-space:nowrap}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(120px,1fr));gap:10px 16px;
margin:14px 0 0}
dt{color:var(--soft);font-size:.8rem}dd{margin:0;font-variant-numeric:tabular-nums;
overflow-wrap:anywhere}
.bad{color:var(--bad);overflow-wrap:anywhere}
.bars{list-style:none;margin:0;padding:0;display:grid;gap:7px}
.bars li{display:grid;grid-template-columns:minmax(90px,220px) 1fr minmax(74px,auto);gap:12px;
align-items:center}
.label{overflow-wrap:anywhere;line-height:1.25}
.detail{display:block;color:var(--soft);font-size:.78rem}
.track{display:block;height:12px;border-radius:3px;background:var(--track)}
.fill{display:block;height:100%;border-radius:3px;background:var(--accent)}
.value{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:18px 28px}
figure{margin:0}figcaption{display:flex;justify-content:space-between;gap:8px;
margin-bottom:4px;font-size:.87rem}
figcaption b{font-weight:600}
figcaption span,.ends{color:var(--soft);font-variant-numeric:tabular-nums}
.ends{display:flex;justify-content:space-between;font-size:.78rem;margin-top:2px}
svg{display:block;width:100%;height:auto}
.column{fill:var(--accent)}.marked{fill:var(--mark)}.hover{fill:transparent}
g:hover .hover{fill:var(--track)}.axis{stroke:var(--line)}
.map{max-width:900px}.heat{fill:var(--accent)}.empty{fill:var(--empty)}.mark{fill:var(--mark)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 8px;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:500}th:last-child,td:last-child{text-align:left}
summary{cursor:pointer;color:var(--soft);font-size:.87rem;margin-top:12px}
.key{display:inline-block;width:.7em;height:.7em;border-radius:2px;background:var(--mark)}
ul.plain{margin:0;padding-left:20px}
@media (max-width:560px){main{padding:14px 10px 40px}.card{padding:12px}
.bars li{grid-template-columns:1fr auto;gap:3px 10px}.track{grid-column:1/-1;grid-row:2}}
@media print{.card{break-inside:avoid}}
"""


def page_of(reports: Sequence[OperatorReport], *, location: str, now_ms: int) -> str:
    """Return the whole page."""
    sections = "".join(_section(index, report) for index, report in enumerate(reports))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>State of {escape(location)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>State</h1><p class="soft">{escape(location)}<br>{moment(now_ms // 1000 * 1000)}, '
        f"flowspark {escape(__version__)}</p>{_contents(reports)}{sections}"
        "</main></body></html>\n"
    )


def _contents(reports: Sequence[OperatorReport]) -> str:
    if len(reports) < 2:
        return ""
    lines = []
    for index, report in enumerate(reports):
        weight = sum(state.bytes for state in report.overview.states)
        lines.append(
            f'<li><a href="#op-{index}">{escape(report.title)}</a><span>{size(weight)}</span></li>'
        )
    count = count_of(len(reports), "operator")
    return f'<nav class="card"><b>{count}</b><ul>{"".join(lines)}</ul></nav>'


def _section(index: int, report: OperatorReport) -> str:
    overview = report.overview
    parts = [
        f"<h2>{escape(report.title)}</h2>",
        f'<p class="soft">{escape(overview.url)}</p>',
    ]
    if overview.problem is not None:
        parts.append(f'<p class="bad"><b>Damaged.</b> {escape(overview.problem)}</p>')
    for unsealed in overview.unsealed:
        parts.append(
            f"<p>chk-{unsealed.checkpoint_id}: {unsealed_words(unsealed)} "
            f"({count_of(unsealed.files, 'file')}, {size(unsealed.bytes)}).</p>"
        )
    if overview.checkpoint_id is not None:
        parts += [
            _facts(report),
            _history(report),
            _states(overview),
            _subtasks(report),
            _key_groups(overview),
        ]
    return f'<section class="card" id="op-{index}">{"".join(parts)}</section>'


def _facts(report: OperatorReport) -> str:
    overview = report.overview
    newest = next(
        one for one in overview.checkpoints if one.checkpoint_id == overview.checkpoint_id
    )
    facts = {
        "checkpoint": str(newest.checkpoint_id),
        "batch": "-" if newest.batch_id is None else str(newest.batch_id),
        "created": moment(newest.created_ms // 1000 * 1000),
        "parallelism": str(newest.parallelism),
        "state": size(sum(state.bytes for state in overview.states)),
        "files": f"{newest.files:,} ({size(newest.bytes_in_files)})",
        "in the record": size(newest.bytes_inline),
        "keys": overview.key_type or "none",
    }
    if overview.key_type is not None:
        facts["key groups"] = f"{overview.max_parallelism:,} by {overview.assigner}"
    lines = "".join(
        f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items()
    )
    return f"<dl>{lines}</dl>"


# Checkpoints over time


def _history(report: OperatorReport) -> str:
    points = report.history
    if len(points) == 1:
        return (
            '<p class="soft">A single record is retained, so there is no history. More are kept '
            "with checkpointsRetained.</p>"
        )
    rescaled = {one.checkpoint_id for one in report.rescaled}
    first, last = (f"chk-{points[place].checkpoint.checkpoint_id}" for place in (0, -1))
    intervals = any(point.is_interval for point in points)

    def chart(title: str, values: list[float | None], texts: list[str]) -> str:
        known = [value for value in values if value is not None]
        top = texts[values.index(max(known))] if known else "not known"
        drawn = [
            Column(
                value,
                f"chk-{point.checkpoint.checkpoint_id}: {text}",
                point.checkpoint.checkpoint_id in rescaled,
            )
            for point, value, text in zip(points, values, texts, strict=True)
        ]
        return columns(title, drawn, top=f"at most {top}" if known else top, first=first, last=last)

    charts = "".join(
        (
            chart(
                "Time since the one before" if intervals else "Duration",
                [point.took_ms for point in points],
                [_span(point.took_ms) for point in points],
            ),
            chart(
                "Bytes",
                [_bytes(point.checkpoint) for point in points],
                [size(_bytes(point.checkpoint)) for point in points],
            ),
            chart(
                "Files",
                [point.checkpoint.files for point in points],
                [count_of(point.checkpoint.files, "file") for point in points],
            ),
        )
    )
    return (
        f'<h3>Checkpoints</h3><div class="charts">{charts}</div>{_rescaled(report)}'
        f'<p class="soft">{len(points)} records are retained; what came before them is not known '
        f"any more.</p>{_history_table(points, intervals)}"
    )


def _rescaled(report: OperatorReport) -> str:
    if not report.rescaled:
        return ""
    lines = "".join(
        f"<li>chk-{one.checkpoint_id}, {moment(one.created_ms // 1000 * 1000)}: "
        f"{one.before} &rarr; {one.after} subtasks</li>"
        for one in report.rescaled
    )
    return f'<h3><span class="key"></span> Rescaled</h3><ul class="plain">{lines}</ul>'


def _history_table(points: Sequence[HistoryPoint], intervals: bool) -> str:
    head = [
        "checkpoint",
        "batch",
        "parallelism",
        "since the last" if intervals else "took",
        "bytes",
        "new",
        "files",
        "created",
    ]
    rows = [
        [
            str(point.checkpoint.checkpoint_id),
            "-" if point.checkpoint.batch_id is None else str(point.checkpoint.batch_id),
            str(point.checkpoint.parallelism),
            _span(point.took_ms),
            size(_bytes(point.checkpoint)),
            "-" if point.bytes_new is None else size(point.bytes_new),
            f"{point.checkpoint.files:,}",
            moment(point.checkpoint.created_ms),
        ]
        for point in reversed(points)
    ]
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    heads = "".join(f"<th>{name}</th>" for name in head)
    return (
        '<details><summary>as a table</summary><div class="scroll"><table>'
        f"<tr>{heads}</tr>{lines}</table></div></details>"
    )


def _span(span_ms: int | None) -> str:
    return "not known" if span_ms is None else duration(span_ms)


def _bytes(checkpoint: CheckpointOverview) -> int:
    return checkpoint.bytes_in_files + checkpoint.bytes_inline


# The newest checkpoint


def _states(overview: Overview) -> str:
    found = sorted(overview.states, key=lambda state: -state.bytes)
    lines = [
        Bar(
            state.name,
            state.bytes,
            size(state.bytes),
            " ".join(
                filter(
                    None,
                    (
                        state.mode,
                        f"{state.kind} {state.type}".strip() + ",",
                        count_of(state.count, "row" if state.mode is None else "element"),
                    ),
                )
            ),
        )
        for state in found
    ]
    return f"<h3>States</h3>{bars(lines)}" if lines else ""


def _subtasks(report: OperatorReport) -> str:
    parts = []
    keyed = [one for one in report.overview.subtasks if one.first_key_group is not None]
    if keyed:
        lines = [
            Bar(
                f"subtask {one.subtask_index}",
                one.keyed_bytes,
                size(one.keyed_bytes),
                f"key groups {one.first_key_group}..{one.last_key_group}",
            )
            for one in keyed
        ]
        skew = skew_of([one.keyed_bytes for one in keyed])
        parts.append(
            f"<h3>Keyed state of the subtasks</h3>{bars(lines)}"
            f'<p class="soft">The heaviest has {skew:.1f} times the mean.</p>'
        )
    for name, loads in report.list_loads:
        lines = [
            Bar(f"subtask {index}", elements, count_of(elements, "element"), size(weight))
            for index, (elements, weight) in enumerate(loads)
        ]
        parts.append(f"<h3>{escape(name)}: what each subtask has</h3>{bars(lines)}")
    return "".join(parts)


def _key_groups(overview: Overview) -> str:
    weights = overview.key_group_bytes
    if not any(weights):
        return ""
    starts = [one.first_key_group for one in overview.subtasks if one.first_key_group is not None]
    texts = [f"key group {group}: {size(weight)}" for group, weight in enumerate(weights)]
    heaviest = max(range(len(weights)), key=weights.__getitem__)
    return (
        f"<h3>Key groups</h3>{heat_map(weights, starts, texts)}"
        f'<p class="soft">Key group 0 is at the top left; the stronger the colour of a cell, the '
        f"heavier. A corner marks the first of a subtask. The heaviest is {heaviest}: "
        f"{size(weights[heaviest])}, {skew_of(weights):.1f} times the mean. Files are indexed by "
        f"stretches of key groups, so light neighbours look alike.</p>"
    )
