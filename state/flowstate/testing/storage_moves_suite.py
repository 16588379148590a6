"""The contract of ``StateFileSystem.move`` as tests."""

from __future__ import annotations

import pytest

from flowstate.errors import SnapshotMissingError, UnsafeNameError
from flowstate.storage.filesystems import StateFileSystem
from flowstate.testing.storage_base import UNSAFE_PATHS, FileSystemSuiteBase, race

__all__ = ["MovingSuite"]

_DATA = bytes(range(256)) * 4


class MovingSuite(FileSystemSuiteBase):
    """Files get other names: durably, at once for a reader, and as often as it is asked for."""

    def test_moved_files_have_their_new_names_alone(self, files: StateFileSystem) -> None:
        files.write("staged/one", _DATA)
        files.write("staged/two", b"")
        files.write("staged/three", b"stays")
        files.move({"staged/one": "one", "staged/two": "new/folder/two"})

        assert files.read("one") == _DATA
        assert files.read("new/folder/two") == b""
        assert [entry.path for entry in files.list("")] == ["new/folder/two", "one", "staged/three"]

    def test_a_move_may_be_repeated(self, files: StateFileSystem) -> None:
        files.write("staged/one", b"data")
        for _ in range(3):
            files.move({"staged/one": "one", "staged/never": "never"})
        files.move({})

        assert [entry.path for entry in files.list("")] == ["one"]
        assert files.read("one") == b"data"

    def test_a_move_replaces_what_has_the_new_name(self, files: StateFileSystem) -> None:
        files.write("one", b"old and longer")
        files.write("staged/one", b"new")
        files.move({"staged/one": "one"})

        assert files.read("one") == b"new"

    def test_a_reader_sees_nothing_or_all_of_a_file_that_is_being_moved(
        self, files: StateFileSystem
    ) -> None:
        data = _DATA * 1024
        files.write("staged", data)

        def move_or_read(racer: int) -> bytes | None:
            if racer == 0:
                files.move({"staged": "folder/final"})
            try:
                return files.read("folder/final")
            except SnapshotMissingError:
                return None

        seen = race(move_or_read)

        assert seen[0] == data
        assert set(seen) <= {None, data}

    @pytest.mark.parametrize("path", UNSAFE_PATHS)
    def test_nothing_is_moved_if_a_name_is_unsafe(self, files: StateFileSystem, path: str) -> None:
        files.write("one", b"data")
        with pytest.raises(UnsafeNameError):
            files.move({"one": "two", "three": path})
        with pytest.raises(UnsafeNameError):
            files.move({"one": "two", path: "three"})

        assert [entry.path for entry in files.list("")] == ["one"]
