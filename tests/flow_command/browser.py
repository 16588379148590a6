"""A real browser without a window, for what only a browser can say of a page."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 90
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
    "--run-all-compositor-stages-before-draw",
    "--virtual-time-budget=5000",
)


def find_browser() -> str:
    """Return the command of a browser, or skip the test."""
    for name in NAMES:
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip(
        f"no browser on the PATH (looked for {', '.join(NAMES)}); 'make browser' installs one "
        f"where that is possible"
    )


def browse(page: Path, *options: str) -> str:
    """Open a page, and return its document when all is loaded."""
    with tempfile.TemporaryDirectory(prefix="flow-browser-") as profile:
        done = subprocess.run(
            [
                find_browser(),
                *FLAGS,
                f"--user-data-dir={profile}",
                *options,
                "--dump-dom",
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
    return done.stdout


def measure(page: Path, script: str, *options: str, width: int) -> str:
    """Open a page in a frame of some width, and return what a script says of its document.

    A window of a browser without a head has a least width; a frame has none. The page itself allows
    no scripts, so the script is that of the page around it.
    """
    around = page.with_name(f"around-{page.name}")
    around.write_text(
        f'<!doctype html><body style="margin:0"><iframe id="f" src="{page.name}" '
        f'style="width:{width}px;height:2000px;border:0"></iframe><output></output><script>'
        'document.getElementById("f").addEventListener("load", (event) => {'
        "const d = event.target.contentDocument, w = event.target.contentWindow;"
        f'document.querySelector("output").textContent = String((() => {{ {script} }})());'
        "});</script>",
        encoding="utf-8",
    )
    document = browse(around, *options)
    return document.partition("<output>")[2].partition("</output>")[0]
