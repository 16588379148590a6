"""The plots that benchmarks draw of their tables."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from integration.benchmarks import _report
from integration.benchmarks._plots import bars, plotted_column


def test_the_first_column_of_numbers_is_plotted() -> None:
    rows = [("a <b>", "x", "1,200", "3"), ("c", "y", "600", "4")]

    assert plotted_column(("", "kind", "ms", "files"), rows) == 2
    assert plotted_column(("", "kind"), [row[:2] for row in rows]) is None
    assert plotted_column(("", "ms"), [("a", "1")]) is None


def test_bars_are_as_long_as_their_numbers() -> None:
    root = ET.fromstring(bars("t < u", ["a <b>", "c"], ["1,200 ms", "600 ms"]))
    widths = [float(bar.attrib["width"]) for bar in root.iter("{http://www.w3.org/2000/svg}rect")]

    assert widths[0] == 2 * widths[1]
    assert [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")][:2] == [
        "t < u",
        "a <b>",
    ]


def test_a_report_has_the_tables_and_a_plot_behind_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_report, "DOCUMENTS", tmp_path)
    _report.heading("Speed")
    _report.table(("side", "rows/s"), [("a", 10), ("b", 20)])
    text = _report.save_report("demo").read_text()

    assert "## Speed" in text
    assert "| b | 20 |" in text
    assert "![the same as bars](images/demo-1.svg)" in text
    assert "rows/s" in (tmp_path / "images/demo-1.svg").read_text()
    # The next one begins anew.
    assert "Speed" not in _report.save_report("other").read_text()
