"""The contract of ``StateFileSystem`` as tests; a store's own test subclasses them.

::

    class TestMemoryFiles(FileSystemSuite):
        def open_file_system(self, tmp_path: Path) -> StateFileSystem:
            return open_file_system(f"memory:/{tmp_path}")
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from flowstate.errors import SnapshotCorruptError, SnapshotMissingError, UnsafeNameError
from flowstate.storage.filesystems import TEMPORARY_PREFIX, FileEntry, StateFileSystem
from flowstate.testing.storage_base import RACERS, UNSAFE_PATHS, race
from flowstate.testing.storage_moves_suite import MovingSuite

__all__ = ["FileSystemSuite"]

_RACE_ROUNDS = 5

_DATA = bytes(range(256)) * 4
_END = len(_DATA)

_CONTENTS = [
    pytest.param(b"", id="no-bytes"),
    pytest.param(b"\0", id="one-byte"),
    pytest.param(bytes(range(256)), id="every-byte"),
    pytest.param(b"line\r\nline\n\xff\xfe", id="line-ends"),
    pytest.param(bytes(range(256)) * 12_289, id="3-MiB"),
]

_NAMES = [
    pytest.param("file", id="plain"),
    pytest.param("a/b/c/d/e/f/g/file", id="deep"),
    pytest.param("folder with space/a file", id="spaces"),
    pytest.param("op=1,key=2/part+1&2;3", id="punctuation"),
    pytest.param("50%25/%2e%2e/100%", id="percent"),
    pytest.param("Größe/状態/🙂", id="not-ascii"),
    pytest.param("[a-z]*/{b}", id="wildcards"),
    pytest.param("a#b/c:d@e", id="url-characters"),
    pytest.param(".hidden/.file", id="dots-first"),
    pytest.param("a..b/...", id="dots-inside"),
    pytest.param("n" * 200, id="long"),
]

# While folder/file is the only file.
_NO_FILES = [
    pytest.param("folder", id="a-folder"),
    pytest.param("folder/file/below", id="below-a-file"),
    pytest.param("folder/fil", id="the-beginning-of-a-name"),
]

_RANGES = [
    pytest.param([], id="none"),
    pytest.param([(0, _END)], id="whole"),
    pytest.param([(0, 1)], id="first-byte"),
    pytest.param([(_END - 1, 1)], id="last-byte"),
    pytest.param([(0, 10), (10, 10), (20, 5)], id="adjacent"),
    pytest.param([(0, 100), (50, 100), (60, 5)], id="overlapping"),
    pytest.param([(10, 20), (10, 20)], id="the-same-twice"),
    pytest.param([(10, 20), (10, 5), (10, 30)], id="one-start"),
    pytest.param([(900, 10), (5, 10), (400, 10), (0, 3)], id="unordered"),
    pytest.param([(5, 0), (0, 4), (4, 0), (_END, 0)], id="with-empty-ones"),
    pytest.param([(7, 0)], id="only-an-empty-one"),
    pytest.param([(_END + 100, 0)], id="empty-beyond-the-end"),
    pytest.param([(start, 3) for start in range(0, _END - 3, 17)], id="many"),
]

_RANGES_BEYOND_THE_END = [
    pytest.param([(_END - 1, 2)], id="across-the-end"),
    pytest.param([(_END, 1)], id="at-the-end"),
    pytest.param([(_END + 1000, 10)], id="behind-the-end"),
    pytest.param([(0, _END + 1)], id="longer-than-the-file"),
    pytest.param([(0, 10), (_END + 5, 10)], id="one-of-two"),
    pytest.param([(_END - 10, 10), (_END, 10)], id="merged-across-the-end"),
]


class FileSystemSuite(MovingSuite):
    """Every promise that ``StateFileSystem`` makes, on the store of the subclass."""

    # Writing

    @pytest.mark.parametrize("data", _CONTENTS)
    def test_what_was_written_is_read_back(self, files: StateFileSystem, data: bytes) -> None:
        files.write("folder/file", data)

        assert files.read("folder/file") == data

    @pytest.mark.parametrize("path", _NAMES)
    def test_a_plain_relative_path_may_have_any_characters(
        self, files: StateFileSystem, path: str
    ) -> None:
        files.write(path, b"written")
        created = files.create_exclusively(f"{path}-created", b"created")

        assert created
        assert files.read(path) == b"written"
        assert files.read_ranges(path, [(1, 3)]) == [b"rit"]
        assert files.list("") == [FileEntry(path, 7), FileEntry(f"{path}-created", 7)]
        files.delete([path, f"{path}-created"])
        assert files.list("") == []

    @pytest.mark.parametrize("after", [b"shorter", b"longer" * 100], ids=["shorter", "longer"])
    def test_a_writer_may_write_its_own_file_again(
        self, files: StateFileSystem, after: bytes
    ) -> None:
        files.write("file", b"before " * 50)
        files.write("file", after)

        assert files.read("file") == after
        assert files.list("") == [FileEntry("file", len(after))]

    def test_an_output_may_write_its_own_file_again(self, files: StateFileSystem) -> None:
        files.write("file", b"before " * 100)
        with files.open_output("file") as output:
            output.write(b"after")

        assert files.read("file") == b"after"

    def test_an_output_takes_its_data_in_pieces(self, files: StateFileSystem) -> None:
        pieces = [bytes([number]) * (number * 1000) for number in range(40)]
        with files.open_output("folder/file") as output:
            for piece in pieces:
                output.write(piece)

        assert files.read("folder/file") == b"".join(pieces)

    def test_an_output_without_data_is_an_empty_file(self, files: StateFileSystem) -> None:
        with files.open_output("folder/file"):
            pass

        assert files.read("folder/file") == b""
        assert files.list("") == [FileEntry("folder/file", 0)]

    def test_an_output_takes_any_buffer_and_counts_its_bytes(self, files: StateFileSystem) -> None:
        numbers = array("q", [1, -1])
        with files.open_output("file") as output:
            lengths = [
                output.write(b"bytes"),
                output.write(bytearray(b"array")),
                output.write(memoryview(b"a view of it")[2:6]),
                output.write(numbers),
                output.write(b""),
            ]
            position = output.tell()

        assert lengths == [5, 5, 4, 16, 0]
        assert position == 30
        assert files.read("file") == b"bytesarrayview" + numbers.tobytes()

    def test_an_output_keeps_nothing_of_a_buffer_that_is_used_again(
        self, files: StateFileSystem
    ) -> None:
        buffer = bytearray(b"first ")
        with files.open_output("file") as output:
            output.write(buffer)
            buffer[:] = b"second"
            output.write(buffer)

        assert files.read("file") == b"first second"

    def test_two_outputs_at_a_time_do_not_mix(self, files: StateFileSystem) -> None:
        with files.open_output("folder/one") as one, files.open_output("folder/two") as two:
            for _ in range(100):
                one.write(b"1")
                two.write(b"22")

        assert files.read("folder/one") == b"1" * 100
        assert files.read("folder/two") == b"2" * 200

    @pytest.mark.parametrize("length", [0, 10, 3 << 20])
    @pytest.mark.parametrize("error", [LookupError("no"), KeyboardInterrupt(), GeneratorExit()])
    def test_an_error_in_the_block_passes_and_leaves_no_file(
        self, files: StateFileSystem, error: BaseException, length: int
    ) -> None:
        with pytest.raises(type(error)) as caught:
            _write_and_raise(files, "folder/file", b"x" * length, error)

        assert caught.value is error
        assert files.list("") == []
        with pytest.raises(SnapshotMissingError):
            files.read("folder/file")

    def test_a_name_whose_output_failed_may_be_written_again(self, files: StateFileSystem) -> None:
        with pytest.raises(LookupError):
            _write_and_raise(files, "folder/file", b"a long first attempt", LookupError())
        files.write("folder/file", b"second")

        assert files.read("folder/file") == b"second"

    # Creating exclusively

    @pytest.mark.parametrize("data", _CONTENTS)
    def test_only_the_first_create_creates(self, files: StateFileSystem, data: bytes) -> None:
        outcomes = [
            files.create_exclusively("folder/record", data),
            files.create_exclusively("folder/record", b"second"),
            files.create_exclusively("folder/record", data),
        ]

        assert outcomes == [True, False, False]
        assert files.read("folder/record") == data

    def test_a_file_that_was_written_is_not_created(self, files: StateFileSystem) -> None:
        files.write("record", b"written")
        created = files.create_exclusively("record", b"created")

        assert not created
        assert files.read("record") == b"written"

    def test_a_file_that_was_deleted_is_created_again(self, files: StateFileSystem) -> None:
        files.create_exclusively("folder/record", b"first")
        files.delete(["folder/record"])
        created = files.create_exclusively("folder/record", b"second")

        assert created
        assert files.read("folder/record") == b"second"

    def test_creates_leave_no_other_files_whether_won_or_lost(self, files: StateFileSystem) -> None:
        for number in range(3):
            files.create_exclusively("folder/record", b"x" * number)

        assert files.list("") == [FileEntry("folder/record", 0)]

    def test_of_racing_creates_exactly_one_creates(self, files: StateFileSystem) -> None:
        for number in range(_RACE_ROUNDS):
            path = f"round-{number}/record"
            outcomes = _race_to_create([files] * RACERS, path)

            assert sorted(outcomes) == [False] * (RACERS - 1) + [True]
            assert files.read(path) == _mark(outcomes.index(True))
            assert files.list(f"round-{number}") == [FileEntry(path, len(_mark(0)))]

    def test_of_racing_creates_of_several_instances_exactly_one_creates(
        self, tmp_path: Path
    ) -> None:
        instances = [self.open_file_system(tmp_path) for _ in range(RACERS)]
        for number in range(_RACE_ROUNDS):
            path = f"round-{number}/record"
            outcomes = _race_to_create(instances, path)

            assert outcomes.count(True) == 1
            for instance in instances:
                assert instance.read(path) == _mark(outcomes.index(True))

    def test_the_losers_of_a_race_see_the_complete_file_of_the_winner(
        self, files: StateFileSystem
    ) -> None:
        def create_and_read(racer: int) -> tuple[bool, bytes]:
            return files.create_exclusively("record", _mark(racer)), files.read("record")

        outcomes = race(create_and_read)

        winners = [racer for racer, (created, _) in enumerate(outcomes) if created]
        assert len(winners) == 1
        assert {seen for _, seen in outcomes} == {_mark(winners[0])}

    def test_a_reader_sees_nothing_or_all_of_a_file_that_is_being_created(
        self, files: StateFileSystem
    ) -> None:
        data = _DATA * 1024

        def create_or_read(racer: int) -> bytes | None:
            if racer == 0:
                files.create_exclusively("record", data)
            try:
                return files.read("record")
            except SnapshotMissingError:
                return None

        seen = race(create_or_read)

        assert seen[0] == data
        assert set(seen) <= {None, data}

    def test_creates_of_different_names_do_not_hinder_each_other(
        self, files: StateFileSystem
    ) -> None:
        outcomes = race(lambda racer: files.create_exclusively(f"folder/{racer}", _mark(racer)))

        assert outcomes == [True] * RACERS
        assert [files.read(entry.path) for entry in files.list("folder")] == [
            _mark(racer) for racer in range(RACERS)
        ]

    def test_racing_creates_and_deletes_in_one_folder_all_succeed(
        self, files: StateFileSystem
    ) -> None:
        # The folder comes and goes meanwhile, on a store that has folders.
        def create_and_delete(racer: int) -> list[bool]:
            created = []
            for number in range(_RACE_ROUNDS):
                path = f"upper/folder/{racer}-{number}"
                created.append(files.create_exclusively(path, b"data"))
                files.delete([path])
            return created

        outcomes = race(create_and_delete)

        assert outcomes == [[True] * _RACE_ROUNDS] * RACERS
        assert files.list("") == []

    # Reading

    def test_a_missing_file_is_reported_with_its_path(self, files: StateFileSystem) -> None:
        with pytest.raises(SnapshotMissingError) as of_read:
            files.read("folder/file")
        with pytest.raises(SnapshotMissingError) as of_ranges:
            files.read_ranges("folder/file", [(0, 1)])

        for caught in (of_read, of_ranges):
            assert caught.value.path == f"{files.url}/folder/file"
            assert caught.value.path in str(caught.value)

    @pytest.mark.parametrize("path", _NO_FILES)
    def test_what_is_no_file_is_missing(self, files: StateFileSystem, path: str) -> None:
        files.write("folder/file", b"data")

        with pytest.raises(SnapshotMissingError):
            files.read(path)
        with pytest.raises(SnapshotMissingError):
            files.read_ranges(path, [(0, 1)])

    @pytest.mark.parametrize("ranges", _RANGES)
    def test_ranges_come_in_the_order_they_were_asked_for(
        self, files: StateFileSystem, ranges: list[tuple[int, int]]
    ) -> None:
        files.write("file", _DATA)
        pieces = files.read_ranges("file", ranges)

        assert pieces == [_DATA[offset : offset + length] for offset, length in ranges]
        assert {type(piece) for piece in pieces} <= {bytes}

    @pytest.mark.parametrize("ranges", _RANGES_BEYOND_THE_END)
    def test_a_range_beyond_the_end_is_a_corrupt_file(
        self, files: StateFileSystem, ranges: list[tuple[int, int]]
    ) -> None:
        files.write("file", _DATA)

        with pytest.raises(SnapshotCorruptError) as caught:
            files.read_ranges("file", ranges)

        assert caught.value.path == f"{files.url}/file"
        assert caught.value.actual < caught.value.expected

    def test_an_empty_file_has_no_range(self, files: StateFileSystem) -> None:
        files.write("file", b"")

        assert files.read_ranges("file", [(0, 0)]) == [b""]
        with pytest.raises(SnapshotCorruptError):
            files.read_ranges("file", [(0, 1)])

    @pytest.mark.parametrize("ranges", [[(-1, 2)], [(0, -1)], [(0, 1), (-5, 0)]])
    def test_a_negative_range_is_refused(
        self, files: StateFileSystem, ranges: list[tuple[int, int]]
    ) -> None:
        files.write("file", _DATA)

        with pytest.raises(ValueError, match="at least 0"):
            files.read_ranges("file", ranges)

    def test_racing_readers_do_not_disturb_each_other(self, files: StateFileSystem) -> None:
        files.write("file", _DATA)

        def read(racer: int) -> bool:
            ranges = [(racer * 100, 50), (racer, 7)]
            expected = [_DATA[offset : offset + length] for offset, length in ranges]
            return all(
                files.read("file") == _DATA and files.read_ranges("file", ranges) == expected
                for _ in range(_RACE_ROUNDS)
            )

        assert race(read) == [True] * RACERS

    # Listing

    def test_an_absent_folder_has_no_files(self, files: StateFileSystem) -> None:
        assert files.list("") == []
        assert files.list("no/such/folder") == []

    def test_a_listing_has_every_file_below_with_its_path_from_the_root_and_its_size(
        self, files: StateFileSystem
    ) -> None:
        for length, path in enumerate(["folder/b", "folder/a/deep/file", "top", "other/x"]):
            files.write(path, b"x" * length)

        assert files.list("folder") == [("folder/a/deep/file", 1), ("folder/b", 0)]
        assert files.list("folder/a") == [FileEntry("folder/a/deep/file", 1)]
        assert [size for _, size in files.list("")] == [1, 0, 3, 2]

    def test_a_listing_is_sorted_by_the_whole_path(self, files: StateFileSystem) -> None:
        # A folder's name sorts with its slash: between "a-b" and "a0", not before or behind both.
        paths = ["a-b", "a/z", "a0", "aa", "B", "a/b/c", "a/b-c", "10", "9", "ä"]
        for path in paths:
            files.write(path, b"")

        assert [entry.path for entry in files.list("")] == sorted(paths)

    def test_a_listing_leaves_out_what_only_begins_like_the_folder(
        self, files: StateFileSystem
    ) -> None:
        for path in ["job/file", "job-2/file", "jobs", "jo"]:
            files.write(path, b"")

        assert files.list("job") == [FileEntry("job/file", 0)]

    def test_nothing_is_below_a_file(self, files: StateFileSystem) -> None:
        files.write("folder/file", b"data")

        assert files.list("folder/file") == []
        assert files.list("folder/file/below") == []

    def test_a_listing_shows_what_another_instance_just_did(self, tmp_path: Path) -> None:
        ours, theirs = self.open_file_system(tmp_path), self.open_file_system(tmp_path)
        seen = [ours.list("folder")]
        theirs.write("folder/one", b"1")
        seen.append(ours.list("folder"))
        theirs.create_exclusively("folder/two", b"2")
        seen.append(ours.list("folder"))
        theirs.write("folder/one", b"longer")
        seen.append(ours.list("folder"))
        theirs.delete(["folder/one", "folder/two"])
        seen.append(ours.list("folder"))

        one, two, longer = ("folder/one", 1), ("folder/two", 1), ("folder/one", 6)
        assert seen == [[], [one], [one, two], [longer, two], []]

    def test_a_listing_shows_temporary_files_that_a_crash_left(
        self, files: StateFileSystem
    ) -> None:
        left = f"folder/{TEMPORARY_PREFIX}0123"
        files.write(left, b"half")

        assert files.list("folder") == [FileEntry(left, 4)]

    def test_another_instance_reads_what_this_one_wrote(self, tmp_path: Path) -> None:
        ours, theirs = self.open_file_system(tmp_path), self.open_file_system(tmp_path)
        ours.write("folder/file", _DATA)
        with ours.open_output("folder/output") as output:
            output.write(b"pieces")
        ours.create_exclusively("folder/record", b"record")

        assert theirs.url == ours.url
        assert theirs.read("folder/file") == _DATA
        assert theirs.read_ranges("folder/file", [(3, 2)]) == [_DATA[3:5]]
        assert theirs.read("folder/output") == b"pieces"
        assert not theirs.create_exclusively("folder/record", b"other")

    # Deleting

    def test_a_deleted_file_is_gone_and_the_others_stay(self, files: StateFileSystem) -> None:
        for path in ["folder/one", "folder/two", "folder/three", "other/one"]:
            files.write(path, b"data")
        files.delete(["folder/one", "folder/three"])

        assert [entry.path for entry in files.list("")] == ["folder/two", "other/one"]
        with pytest.raises(SnapshotMissingError):
            files.read("folder/one")
        with pytest.raises(SnapshotMissingError):
            files.read_ranges("folder/one", [(0, 1)])

    def test_a_delete_may_be_repeated(self, files: StateFileSystem) -> None:
        files.write("folder/file", b"data")
        for _ in range(3):
            files.delete(["folder/file", "folder/file", "folder/never", "no/such/folder/file"])

        assert files.list("") == []

    def test_a_delete_takes_any_iterable(self, files: StateFileSystem) -> None:
        for number in range(40):
            files.write(f"folder/{number}", b"")
        files.delete([])
        files.delete(f"folder/{number}" for number in range(39))

        assert files.list("") == [FileEntry("folder/39", 0)]

    @pytest.mark.parametrize("path", _NO_FILES)
    def test_a_delete_leaves_what_is_no_file_alone(self, files: StateFileSystem, path: str) -> None:
        files.write("folder/file", b"data")
        files.delete([path])

        assert files.read("folder/file") == b"data"

    def test_a_name_that_was_a_folder_may_become_a_file(self, files: StateFileSystem) -> None:
        files.write("name/file", b"below")
        files.delete(["name/file"])
        files.write("name", b"a file now")

        assert files.read("name") == b"a file now"

    # Paths

    @pytest.mark.parametrize("path", [*UNSAFE_PATHS, pytest.param("", id="empty")])
    def test_an_unsafe_path_is_refused_by_every_operation(
        self, files: StateFileSystem, path: str
    ) -> None:
        operations: list[Callable[[], object]] = [
            lambda: files.write(path, b"data"),
            lambda: files.open_output(path).__enter__(),
            lambda: files.create_exclusively(path, b"data"),
            lambda: files.read(path),
            lambda: files.read_ranges(path, [(0, 1)]),
            lambda: files.read_ranges(path, []),
            lambda: files.delete([path]),
        ]
        for operation in operations:
            with pytest.raises(UnsafeNameError):
                operation()

        assert files.list("") == []

    @pytest.mark.parametrize("folder", UNSAFE_PATHS)
    def test_an_unsafe_folder_is_not_listed(self, files: StateFileSystem, folder: str) -> None:
        with pytest.raises(UnsafeNameError):
            files.list(folder)

    def test_a_delete_with_an_unsafe_path_deletes_nothing(self, files: StateFileSystem) -> None:
        files.write("file", b"data")

        with pytest.raises(UnsafeNameError):
            files.delete(["file", "../file"])
        assert files.read("file") == b"data"


def _mark(racer: int) -> bytes:
    """Return data that is one racer's own, and long enough that a mixture would show."""
    return bytes([racer]) * 4096


def _write_and_raise(files: StateFileSystem, path: str, data: bytes, error: BaseException) -> None:
    with files.open_output(path) as output:
        output.write(data)
        raise error


def _race_to_create(instances: Sequence[StateFileSystem], path: str) -> list[bool]:
    return race(lambda racer: instances[racer].create_exclusively(path, _mark(racer)))
