"""The picture of the demo: how a recording becomes one, and what the one in the README shows."""

from __future__ import annotations

from xml.etree import ElementTree

from integration.demo.picture import lines_of, picture

from .markdown import ROOT

RECORDING = (
    "Script started on 2026-01-01 [COMMAND]\n"
    "\r\n\x1b[1mA heading\x1b[0m\r\n"
    "\r\x1b[2K  one\r\x1b[2K  two < 3\r\n"
    "  \x1b[36m█\x1b[0m\x1b[36m█\x1b[0m\x1b[33m█\x1b[0m end\r\n"
    "\r\nScript done on 2026-01-01 [COMMAND]\n"
)
_SVG = "{http://www.w3.org/2000/svg}"


def test_what_was_written_over_is_gone_and_styles_are_kept() -> None:
    lines = lines_of(RECORDING)

    assert lines == [
        [("A heading", 1)],
        [("  two < 3", 0)],
        [("  ", 0), ("█", 36), ("█", 36), ("█", 33), (" end", 0)],
    ]


def test_a_picture_is_an_svg_with_the_words_and_the_blocks() -> None:
    root = ElementTree.fromstring(picture(lines_of(RECORDING)))

    texts = [element.text for element in root.iter(f"{_SVG}text")]
    assert [(text or "").replace("\N{NO-BREAK SPACE}", " ") for text in texts] == [
        "A heading",
        "  two < 3",
        "  ",
        " end",
    ]
    blocks = [element.get("width") for element in root.iter(f"{_SVG}rect")][1:]
    assert blocks == ["16", "8"]


def test_the_picture_in_the_readme_is_of_a_run_that_lost_nothing() -> None:
    root = ElementTree.parse(ROOT / "docs/images/demo.svg").getroot()

    shown = [" ".join((element.text or "").split()) for element in root.iter(f"{_SVG}text")]
    assert "lost 0" in shown
    assert "counted twice 0" in shown
    assert "right: every word was counted once" in shown
