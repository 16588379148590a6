"""The documents say what is so: their code runs, their links lead somewhere, their tables hold."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowstate.checkpoint import RECORD_FORMAT
from flowstate.checkpoint.files import FILE_FORMAT
from flowstate.errors import FlowError
from flowstate.storage.filesystems import STORES
from flowstate.types import arrow_type

from .markdown import (
    ROOT,
    anchors_of,
    blocks_of,
    documents,
    links_of,
    name_of,
    prose_of,
    table_rows,
)

RUNNABLE = [
    ROOT / "README.md",
    ROOT / "docs" / "operations.md",
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
]
STATE_GUIDE = ROOT / "docs" / "guide" / "state.md"
STORAGE_GUIDE = ROOT / "docs" / "guide" / "storage.md"

NAMED_PATH = re.compile(r"`((?:tests|integration|state|connectors|docs)/[\w./-]*)(?:::(\w+))?`")
CODE = re.compile(r"`([^`]+)`")


# Code


@pytest.mark.parametrize("path", RUNNABLE, ids=name_of)
def test_the_code_runs_and_prints_what_is_shown(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    blocks = [block for block in blocks_of(path) if block.language == "python"]
    assert blocks
    for block in blocks:
        printed = io.StringIO()
        # Empty lines in front make the lines of a traceback those of the document.
        code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)

        where = f"{name_of(path)}:{block.line}"
        assert printed.getvalue() == (block.output or ""), f"{where} prints something else"


# Links and paths


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    broken = []
    for number, target in links_of(path):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.is_relative_to(ROOT) or not file.exists():
            broken.append(f"{name_of(path)}:{number}: {target}")
        elif anchor and anchor not in anchors_of(file):
            broken.append(f"{name_of(path)}:{number}: {target} (no such heading)")

    assert broken == []


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_every_path_and_test_that_is_named_exists(path: Path) -> None:
    missing = []
    for number, line in prose_of(path):
        for match in NAMED_PATH.finditer(line):
            file, test = ROOT / match.group(1), match.group(2)
            if not file.exists() or (test and f"def {test}(" not in file.read_text("utf-8")):
                missing.append(f"{name_of(path)}:{number}: {match.group()}")

    assert missing == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=name_of)
def test_every_document_can_be_reached_from_the_readme(path: Path) -> None:
    readme = ROOT / "README.md"
    targets = {
        (readme.parent / target.partition("#")[0]).resolve() for _, target in links_of(readme)
    }

    assert path.resolve() in targets


# Tables


def errors_of(kind: type[FlowError]) -> Iterator[type[FlowError]]:
    if kind.__module__.startswith("flowstate."):
        yield kind
    for child in kind.__subclasses__():
        yield from errors_of(child)


def test_the_table_of_errors_has_every_error_with_its_code() -> None:
    rows = table_rows(STORAGE_GUIDE, "Errors")
    assert all(len(row) == 4 and all(row) for row in rows)
    shown = [(CODE.findall(row[0])[0], CODE.findall(row[1])[0]) for row in rows]
    assert len(shown) == len(set(shown))
    assert set(shown) == {(kind.code, kind.__name__) for kind in errors_of(FlowError)}


def test_the_table_of_types_says_which_arrow_type_each_becomes() -> None:
    rows = table_rows(STATE_GUIDE, "Types")
    shown = {CODE.findall(row[0])[0]: CODE.findall(row[1])[0] for row in rows}

    assert len(shown) >= 12
    for spec, arrow in shown.items():
        assert str(arrow_type(eval(spec, {"dt": dt}))) == arrow, spec


def test_the_table_of_stores_has_every_protocol() -> None:
    rows = table_rows(ROOT / "README.md", "Stores")
    shown = {
        protocol.removesuffix("://"): row[1] for row in rows for protocol in CODE.findall(row[0])
    }

    assert {name: store.exclusive_create.value for name, store in STORES.items()} == shown


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.match(r"[\w-]+", text).group() for text in wanted}  # type: ignore[union-attr]
    design = ROOT / "docs" / "design" / "dependencies.md"
    rows = [
        row
        for heading in ("Run time", "Extras", "Development")
        for row in table_rows(design, heading)
    ]

    assert {CODE.findall(row[0])[0] for row in rows} == names - {"flowspark"}


def test_the_changelog_names_the_state_format_and_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert RECORD_FORMAT == FILE_FORMAT
    newest = text.split("\n## ")[1]
    assert f"State format: {RECORD_FORMAT}" in newest
    assert project["version"] in newest.splitlines()[0]
