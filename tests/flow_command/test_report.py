from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flowspark.command import inspecting, reporting
from flowspark.command.locations import Location, only_operator
from flowspark.command.reporting import report_of
from flowstate import LocalOperator

from ..flowbuffer.harness import Query
from .browser import measure
from .shell import flow
from .states import COUNT, QUERY_ID, run_once, unsealed

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """A strict look at a page: every element is closed, and nothing comes from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str, kind: str) -> int:
        return sum(
            one == tag and kind in (attrs.get("class") or "").split()
            for one, attrs in self.elements
        )


def page_of(url: Path, folder: Path) -> tuple[Page, Path]:
    path = folder / "report.html"
    shown = flow("report", url, "--out", path)
    assert shown.code == 0, shown.err
    assert str(path) in shown.out
    return Page(path.read_text(encoding="utf-8")), path


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a location with keyed state at two parallelisms, a sink's buffers, and an unsealed
    checkpoint."""
    root = tmp_path_factory.mktemp("report")
    keys = [f"key-{number}" for number in range(1500)]
    run_once(root / "state" / QUERY_ID / "words", keys=keys, checkpoints=3)
    run_once(root / "state" / QUERY_ID / "words", keys=keys[:9], parallelism=5)
    unsealed(root / "state" / QUERY_ID / "next")
    query = Query(root / "sink", threshold=100)
    query.batch(0, ["a"] * 7, ["b"] * 3)
    query.batch(1, ["a"] * 2, ["b"])
    return root


def test_the_page_needs_nothing_from_outside_and_runs_nothing(
    location: Path, tmp_path: Path
) -> None:
    page, path = page_of(location, tmp_path)

    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "object"}
    for _, attributes in page.elements:
        assert not {"src", "onload", "onclick", "xlink:href"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    assert "default-src 'none'" in text
    assert len(text) < 200_000


def test_the_page_shows_each_operator(location: Path, tmp_path: Path) -> None:
    page, _ = page_of(location, tmp_path)

    for text in (
        "3 operators",
        f"state/{QUERY_ID}/words",
        "chk-1: no record yet",
        "2 → 5 subtasks",
        "4 records are retained",
        "buffer: what each subtask has",
        "9 elements",
        "key groups 0..25",
    ):
        assert text in page.text, text
    assert page.count("rect", "heat") == 128
    assert page.count("path", "mark") == 5
    # Four checkpoints in three charts, and two of the sink's; one of them at a new parallelism.
    assert page.count("rect", "column") == (4 + 2) * 3
    assert page.count("rect", "marked") == 3


def test_names_and_values_cannot_become_part_of_the_page(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>&\"'"
    with LocalOperator(tmp_path / "a", parallelism=1, key_type=str) as operator:
        from flowstate import ListStateDescriptor, ValueStateDescriptor

        operator.subtask_of("k").keyed.get_state(ValueStateDescriptor(bad, int)).update(1)
        listed = ListStateDescriptor(f"list {bad}", str)
        operator.subtasks[0].operator.get_list_state(listed).add("x")
        operator.checkpoint()
    (tmp_path / "a").rename(tmp_path / "_3Cscript_3E")

    page, _ = page_of(tmp_path, tmp_path)
    assert "script" not in {tag for tag, _ in page.elements}
    assert bad in page.text
    assert "<script>" in page.text


def test_a_duration_is_taken_from_the_records_that_have_one(tmp_path: Path) -> None:
    durations: list[dict[str, Any]] = [{"duration_ms": 40}, {}, {"duration_ms": 70.4}]
    with LocalOperator(tmp_path, parallelism=1, key_type=str, checkpoints_retained=3) as operator:
        for attributes in durations:
            operator.subtask_of("k").keyed.get_reducing_state(COUNT).add(1)
            operator.checkpoint(attributes)

    report = report_of(only_operator(str(tmp_path), {}))
    assert [point.took_ms for point in report.history] == [40, None, 70]
    assert not any(point.is_interval for point in report.history)


def test_without_durations_the_time_between_records_is_shown(location: Path) -> None:
    words = location / "state" / QUERY_ID / "words"
    report = report_of(only_operator(str(words), {}))

    created = [one.created_ms for one in report.overview.checkpoints]
    assert [point.took_ms for point in report.history] == [
        None,
        *(after - before for before, after in pairwise(created)),
    ]
    assert all(point.is_interval for point in report.history)
    assert [(one.before, one.after) for one in report.rescaled] == [(2, 5)]
    assert report.history[0].bytes_new is None
    assert all(point.bytes_new is not None for point in report.history[1:])


def test_many_key_groups_share_cells(tmp_path: Path) -> None:
    run_once(tmp_path / "wide", max_parallelism=32768, keys=["a", "b"])

    page, _ = page_of(tmp_path / "wide", tmp_path)
    assert page.count("rect", "heat") == 1024


def test_a_damaged_record_is_on_the_page(location: Path, tmp_path: Path) -> None:
    run_once(tmp_path / "words")
    record = tmp_path / "words" / "chk-1" / "_metadata"
    record.write_bytes(record.read_bytes()[:-5])

    shown = flow("report", tmp_path, "--out", tmp_path / "r.html")
    assert shown.code == 1
    assert "Damaged." in Page((tmp_path / "r.html").read_text("utf-8")).text


def test_a_query_that_goes_on_meanwhile_does_not_disturb_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_once(tmp_path / "words", keys=[f"key-{number}" for number in range(2000)])
    real = inspecting.look_at

    def and_it_goes_on(location: Location) -> inspecting.Look:
        seen = real(location)
        shutil.rmtree(tmp_path / "words")
        return seen

    monkeypatch.setattr(reporting, "look_at", and_it_goes_on)
    page, _ = page_of(tmp_path / "words", tmp_path)
    assert "pending: what each subtask has" in page.text


def test_a_page_that_cannot_be_written_is_an_error(location: Path, tmp_path: Path) -> None:
    folder = flow("report", location, "--out", tmp_path)
    assert folder.code == 2
    assert "is a folder" in folder.err
    missing = flow("report", location, "--out", tmp_path / "no" / "r.html")
    assert missing.code == 3
    assert "cannot write" in missing.err


# What a browser makes of it.

OVERFLOW = "return d.documentElement.scrollWidth - w.innerWidth;"
COLOURS = "return w.getComputedStyle(d.body).backgroundColor;"
CELLS = """
const cells = [...d.querySelectorAll(".heat")].map((cell) => cell.getBoundingClientRect());
return Math.min(...cells.map((cell) => Math.min(cell.width, cell.height))).toFixed(1);
"""


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_nothing_is_wider_than_the_window(location: Path, tmp_path: Path, width: int) -> None:
    _, path = page_of(location, tmp_path)

    assert measure(path, OVERFLOW, width=width) == "0"


def test_cells_can_be_told_apart_on_a_phone(location: Path, tmp_path: Path) -> None:
    _, path = page_of(location, tmp_path)

    assert float(measure(path, CELLS, width=390)) > 6


def test_the_page_is_dark_where_that_is_preferred(location: Path, tmp_path: Path) -> None:
    _, path = page_of(location, tmp_path)

    light = measure(path, COLOURS, "--blink-settings=preferredColorScheme=1", width=800)
    dark = measure(path, COLOURS, "--blink-settings=preferredColorScheme=0", width=800)
    assert light == "rgb(246, 247, 249)"
    assert dark == "rgb(14, 17, 22)"
