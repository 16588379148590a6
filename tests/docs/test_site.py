"""The documents as a site: it builds without a warning, and is complete in itself."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from .markdown import ROOT, documents

TIMEOUT_S = 120


class Page(HTMLParser):
    """What a page fetches, where it leads, and which anchors it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag in {"script", "img", "iframe", "source"} and "src" in given:
            self.fetched.append(given["src"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.fetched.append(given["href"])
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it as ``make docs`` does, in a folder of the test."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    command += ["--config-file", str(ROOT / "docs/site/mkdocs.yml"), "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def pages_of(site: Path) -> dict[Path, Page]:
    # The page for what is not found is made for a server's root.
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_document_is_a_page(site: Path) -> None:
    found = {path.relative_to(site).as_posix() for path in pages_of(site)}

    guides = [path for path in documents() if path.is_relative_to(ROOT / "docs")]
    wanted = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in guides}
    assert found == wanted | {"index.html", "contributing.html", "changelog.html"}


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    elsewhere = {
        (path.name, url)
        for path, page in pages_of(site).items()
        for url in page.fetched
        if urlsplit(url).netloc
    }

    assert elsewhere == set()


def test_every_link_within_the_site_leads_somewhere(site: Path) -> None:
    pages = pages_of(site)
    broken = []
    for path, page in pages.items():
        for link in [*page.links, *page.fetched]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists():
                broken.append(f"{path.name}: {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                broken.append(f"{path.name}: {link} (no such heading)")

    assert broken == []
