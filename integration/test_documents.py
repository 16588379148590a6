"""Blocks marked ``py`` in the documents: they run in a real Spark and print what is shown."""

from __future__ import annotations

import contextlib
import io
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.docs.markdown import ROOT, Block, blocks_of

pytestmark = pytest.mark.spark

WAIT_S = 120
PORT = "9999"
_SENT = re.compile(rf'echo "(.*)" \| nc -lN {PORT}')
# Spark resolves a relative path in the folder of its JVM, so the code is given whole ones.
_PLACE = re.compile(r'(?<=")((?:numbers|out|checkpoint|state|words|history)(?:[-/][\w/-]+)?)(?=")')


class LineServer:
    """Does what the reader of a document does with ``nc``: one line for each connection."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(WAIT_S)
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> LineServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The thread ends with its lines, or with the process if a block has failed before.
        self._listening.close()

    def _serve(self) -> None:
        for line in self._lines:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                connection.sendall(f"{line}\n".encode())


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_blocks(spark: SparkSession, document: str, blocks: list[Block], folder: Path) -> None:
    """Run blocks one after the other in one namespace."""
    sent = _SENT.findall((ROOT / document).read_text(encoding="utf-8"))
    # Functions are pickled by value if they are of the main program, as those of a reader are.
    namespace: dict[str, Any] = {"spark": spark, "__name__": "__main__"}
    with LineServer(sent) as server:
        for block in blocks:
            text = block.text.replace(PORT, str(server.port))
            text = _PLACE.sub(lambda match: f"{folder}/{match.group()}", text)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * (block.line - 1) + text, document, "exec"), namespace)

            assert printed.getvalue() == (block.output or ""), f"{document}:{block.line}"


@pytest.mark.parametrize(
    ("document", "about"),
    [
        ("README.md", "flowbuffer"),
        ("README.md", "key_by"),
        ("docs/guide/flowbuffer.md", ""),
    ],
    ids=["readme-flowbuffer", "readme-keyed", "flowbuffer"],
)
def test_the_code_runs_and_prints_what_is_shown(
    spark: SparkSession, own_folder: Path, document: str, about: str
) -> None:
    blocks = [b for b in blocks_of(ROOT / document) if b.language == "py" and about in b.text]

    assert blocks
    run_blocks(spark, document, blocks, own_folder)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", ["docs/guide/keyed.md", "docs/tutorial.md"])
def test_the_code_runs_from_top_to_bottom(
    spark: SparkSession, own_folder: Path, document: str
) -> None:
    blocks = [b for b in blocks_of(ROOT / document) if b.language in {"py", "python"}]

    assert any(block.language == "py" for block in blocks)
    run_blocks(spark, document, blocks, own_folder)
