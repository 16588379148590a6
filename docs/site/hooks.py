"""What the site needs beyond the files in ``docs``: those of the top folder, and links to them.

The documents link to each other as they lie in the repository, so that they can be read there, too.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE.txt",
}
"""Where files of the top folder are on the site."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_IN_TOP = {uri: name for name, uri in TOP.items()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that they have in the repository."""
    config["mdx_configs"].setdefault("toc", {}).update(slugify=_anchor, permalink=True)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the top folder."""
    top = Path(config["docs_dir"]).parent
    for name, uri in TOP.items():
        text = (top / name).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: Any) -> str:
    """Let links lead to where things are on the site."""
    fenced = False
    lines = []
    for line in markdown.split("\n"):
        if line.startswith("```"):
            fenced = not fenced
        if not fenced:
            line = _LINK.sub(lambda match: _moved(match, page.file.src_uri, files), line)
        lines.append(line)
    return "\n".join(lines)


def _moved(match: re.Match[str], page_uri: str, files: Files) -> str:
    image, text, target = match.groups()
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return match.group()
    folder = posixpath.dirname(_IN_TOP.get(page_uri, f"docs/{page_uri}"))
    place = posixpath.normpath(posixpath.join(folder, path))
    uri = TOP.get(place, place.removeprefix("docs/"))
    if files.get_file_from_path(uri) is None:
        # In the repository, and not on the site.
        return text
    there = posixpath.relpath(uri, posixpath.dirname(page_uri) or ".")
    return f"{image}[{text}]({there}{mark}{anchor})"


def _anchor(heading: str, separator: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)
