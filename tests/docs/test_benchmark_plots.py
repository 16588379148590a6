"""The plots that benchmarks draw of their tables."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from integration.benchmarks import _report
from integration.benchmarks.__main__ import names
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
    monkeypatch.setattr(_report, "DRAFTS", tmp_path)
    monkeypatch.setenv("FLOWDEMO_ROUNDS", "1")
    _report.heading("Speed")
    _report.table(("side", "rows/s"), [("a", 10), ("b", 20)])
    _report.aim("rows/s of b, times those of a", 1.5, 20 / 10, at_least=True)
    _report.aim("rows/s of a, times those of b", 0.6, 10 / 20, at_least=True, besides=" (so)")
    text = _report.save_report("demo").read_text()

    assert "### Speed" in text
    assert "| b | 20 |" in text
    assert "| rows/s of b, times those of a | ≥ 1.5 | 2.00 | met |" in text
    assert "| rows/s of a, times those of b | ≥ 0.6 | 0.50 (so) | **missed** |" in text
    assert "![the same as bars](images/benchmarks/demo-1.svg)" in text
    assert "rows/s" in (tmp_path / "images/benchmarks/demo-1.svg").read_text()
    # The next one begins anew.
    assert "Speed" not in _report.save_report("other").read_text()


def test_a_whole_run_replaces_its_own_figures_in_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text(
        "by hand\n<!-- figures of demo -->\nold\n<!-- end of figures of demo -->\n"
        "<!-- figures of other -->\nothers\n<!-- end of figures of other -->\nby hand as well\n"
    )
    monkeypatch.setattr(_report, "DOCUMENT", document)
    for name in [name for name in os.environ if name.startswith("FLOW")]:
        monkeypatch.delenv(name)
    for found in (10, 30):
        _report.heading("Speed")
        _report.table(("side", "rows/s"), [("a", found), ("b", 20)])
        assert _report.save_report("demo") == document
    text = document.read_text()

    assert text.startswith("by hand\n<!-- figures of demo -->\n\nWritten by `make bench NAME=demo`")
    assert text.endswith("others\n<!-- end of figures of other -->\nby hand as well\n")
    assert "| a | 30 |" in text
    assert "old" not in text
    assert "| a | 10 |" not in text
    assert len(list((tmp_path / "images/benchmarks").glob("*.svg"))) == 1
    with pytest.raises(RuntimeError, match="figures of unknown"):
        _report.save_report("unknown")


def test_each_benchmark_has_its_place_in_the_document() -> None:
    text = _report.DOCUMENT.read_text()

    for name in names():
        assert text.count(f"<!-- figures of {name} -->\n") == 1
        assert text.count(f"<!-- end of figures of {name} -->\n") == 1
