"""What the suites of stores share: the store under test, bad names, and races."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from flowstate.storage.filesystems import StateFileSystem

__all__ = ["RACERS", "UNSAFE_PATHS", "FileSystemSuiteBase", "race"]

T = TypeVar("T")

RACERS = 8
_RACE_TIMEOUT_S = 60
_SWITCH_INTERVAL_S = 1e-5

UNSAFE_PATHS = [
    pytest.param("/file", id="absolute"),
    pytest.param("folder/", id="slash-last"),
    pytest.param("folder//file", id="empty-part"),
    pytest.param(".", id="dot"),
    pytest.param("folder/./file", id="dot-inside"),
    pytest.param("..", id="dots"),
    pytest.param("../file", id="dots-first"),
    pytest.param("folder/../../file", id="dots-inside"),
    pytest.param("folder\\file", id="backslash"),
    pytest.param("fi\0le", id="nul"),
]


class FileSystemSuiteBase(ABC):
    """The fixtures of the suites; ``files`` is empty at first."""

    @abstractmethod
    def open_file_system(self, tmp_path: Path) -> StateFileSystem:
        """Open an instance whose root is empty at first and shared by all calls of one test."""

    @pytest.fixture
    def files(self, tmp_path: Path) -> StateFileSystem:
        """Return the file system under test."""
        return self.open_file_system(tmp_path)


def race(run: Callable[[int], T]) -> list[T]:
    """Call ``run`` in as many threads as there are racers, all at once, and return the results."""
    start = threading.Barrier(RACERS, timeout=_RACE_TIMEOUT_S)

    def wait_and_run(racer: int) -> T:
        start.wait()
        return run(racer)

    # Left alone, a thread often runs to the end of a short operation, and no race takes place.
    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with ThreadPoolExecutor(RACERS) as threads:
            return list(threads.map(wait_and_run, range(RACERS)))
    finally:
        sys.setswitchinterval(switch_interval_s)
