"""What the tests need to know of a Markdown file: its code blocks, links, headings and tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```(\w*)$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$")
_CODE = re.compile(r"`[^`]*`")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    language: str
    line: int
    """The number of its first line, for messages."""
    text: str
    output: str | None
    """The ``text`` block right behind it, with nothing but empty lines between."""


def documents() -> list[Path]:
    """Return the project's documents, those for readers and those for contributors."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks_of(path: Path) -> list[Block]:
    """Return the fenced blocks of a file in order."""
    found: list[tuple[str, int, int, list[str]]] = []
    language: str | None = None
    lines: list[str] = []
    start = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if language is None and fence is not None:
            language, start, lines = fence.group(1), number + 1, []
        elif language is not None and line == "```":
            found.append((language, start, number, lines))
            language = None
        elif language is not None:
            lines.append(line)
    assert language is None, f"{name_of(path)}: the block at line {start} has no end"
    return [
        Block(name, first, _joined(content), _output_after(path, last, found[index + 1 :]))
        for index, (name, first, last, content) in enumerate(found)
    ]


def _output_after(
    path: Path, last: int, following: list[tuple[str, int, int, list[str]]]
) -> str | None:
    if not following or following[0][0] != "text":
        return None
    _, first, _, content = following[0]
    between = path.read_text(encoding="utf-8").splitlines()[last : first - 2]
    return _joined(content) if not any(between) else None


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines outside of fenced blocks, with their numbers."""
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def links_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the targets of the links outside of code."""
    for number, line in prose_of(path):
        for match in _LINK.finditer(_CODE.sub("", line)):
            yield number, match.group(1)


def anchors_of(path: Path) -> set[str]:
    """Return the anchors that a renderer gives the headings of a file."""
    headings = (_HEADING.match(line) for _, line in prose_of(path))
    return {_anchor(match.group(1)) for match in headings if match is not None}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def table_rows(path: Path, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    lines = iter(prose_of(path))
    for _, line in lines:
        match = _HEADING.match(line)
        if match is not None and match.group(1) == heading:
            break
    rows: list[list[str]] = []
    for _, line in lines:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif rows:
            break
    return rows[2:]
