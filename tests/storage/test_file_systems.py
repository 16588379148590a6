from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flowstate.storage.filesystems import StateFileSystem, open_file_system
from flowstate.testing.faults import FaultyFileSystem
from flowstate.testing.storage_suite import FileSystemSuite

if TYPE_CHECKING:
    from tests.storage.conftest import S3Location


class TestMemoryFiles(FileSystemSuite):
    def open_file_system(self, tmp_path: Path) -> StateFileSystem:
        return open_file_system(f"memory:/{tmp_path}")


class TestLocalFiles(FileSystemSuite):
    def open_file_system(self, tmp_path: Path) -> StateFileSystem:
        return open_file_system(tmp_path / "state")


class TestS3Files(FileSystemSuite):
    @pytest.fixture(autouse=True)
    def _use_bucket(self, s3_location: S3Location) -> None:
        self._location = s3_location
        self._fill_cache = itertools.cycle([True, False])

    def open_file_system(self, tmp_path: Path) -> StateFileSystem:
        # fsspec gives the same client to whoever has the same options. Two instances are to have
        # two, as two processes do, so that what one client remembers is not known to the other.
        options = {**self._location.options, "default_fill_cache": next(self._fill_cache)}
        return open_file_system(self._location.url, options)


class TestFaultyFilesWithoutFaults(FileSystemSuite):
    def open_file_system(self, tmp_path: Path) -> StateFileSystem:
        return FaultyFileSystem(open_file_system(tmp_path / "state"))
