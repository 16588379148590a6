"""The spool: what is durable stays under its number, whoever dies or comes in between."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowstate.errors import SnapshotCorruptError, StoreFullError, StoreUnavailableError
from flowstate.storage.filesystems import FileEntry, StateFileSystem, open_file_system
from flowstate.testing.faults import (
    Fault,
    FaultAction,
    FaultyFileSystem,
    OperationName,
    SimulatedCrashError,
)
from pyspark_flowsocket.errors import LinesGoneError, SpoolError, TakenOverError
from pyspark_flowsocket.lines import LineCounts
from pyspark_flowsocket.retrying import Patience
from pyspark_flowsocket.segments import (
    SEGMENT_FORMAT,
    SegmentHeader,
    batch_of,
    decode_header,
    decode_segment,
    encode_segment,
)
from pyspark_flowsocket.spool import CLAIMS_KEPT, Spool, read_slice, segment_path

UID = "words"
AT_ONCE = Patience(0)


def new_files(tmp_path: Path) -> StateFileSystem:
    return open_file_system(tmp_path / "spool")


def open_spool(files: StateFileSystem, patience: Patience = AT_ONCE) -> Spool:
    return Spool.open(files, UID, patience)


def batch(values: list[str], time_us: int = 7) -> pa.RecordBatch:
    ends = [len(values)] if values else []
    return batch_of(pa.array(values, pa.string()), ends, [time_us] * len(ends), ["p"] * len(ends))


def append(spool: Spool, *values: str, sender: str = "s") -> None:
    """Append lines of one sender, with totals as the intake keeps them."""
    senders = dict(spool.senders)
    senders[sender] = senders.get(sender, 0) + len(values)
    spool.append(
        [batch(list(values))],
        counts=spool.counts + LineCounts(received=len(values)),
        partial_lines=0,
        senders=senders,
    )


def lines_of(
    spool: Spool, files: StateFileSystem, start: int | None = None, end: int | None = None
) -> list[str]:
    start = spool.first_line if start is None else start
    slices = spool.slices(start, spool.end_line if end is None else end)
    found: list[str] = []
    for piece in slices:
        for one in read_slice(files, UID, piece):
            found += one["value"].to_pylist()
    return found


# Lines and their numbers


def test_lines_keep_their_numbers_when_the_spool_is_opened_again(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    spool = open_spool(files)
    append(spool, "a", "b")
    append(spool, "c")
    again = open_spool(files)
    append(again, "d")

    assert (again.first_line, again.end_line, again.epoch) == (0, 4, 2)
    assert lines_of(again, files) == ["a", "b", "c", "d"]
    assert lines_of(again, files, 1, 3) == ["b", "c"]
    assert lines_of(again, files, 2, 2) == []
    assert again.counts == LineCounts(received=4)
    assert again.senders == {"s": 4}


def test_trimming_lets_whole_segments_go_and_never_the_newest(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    spool = open_spool(files)
    for values in (["a", "b"], ["c", "d"], ["e"]):
        append(spool, *values)
    spool.trim(3)

    assert (spool.first_line, lines_of(spool, files)) == (2, ["c", "d", "e"])
    with pytest.raises(LinesGoneError, match="lines 1 to 2 are no longer"):
        spool.slices(1, 3)
    spool.trim(5)
    assert (spool.first_line, spool.end_line, spool.segments) == (4, 5, 1)
    again = open_spool(files)
    assert (again.first_line, again.end_line, again.senders) == (4, 5, {"s": 5})


def test_a_checkpoint_that_is_ahead_of_the_spool_is_refused(tmp_path: Path) -> None:
    spool = open_spool(new_files(tmp_path))

    with pytest.raises(LinesGoneError, match="stateLocation"):
        spool.check_retained(7, 7)


def test_a_limit_in_bytes_gives_about_so_many_and_at_least_one_line(tmp_path: Path) -> None:
    spool = open_spool(new_files(tmp_path))
    for _ in range(4):
        append(spool, *["x" * 100] * 1000)
    size = spool.size_bytes() // 4

    assert spool.line_after_bytes(0, 10**9) == 4000
    assert spool.line_after_bytes(0, 1) == 1
    assert 1900 <= spool.line_after_bytes(0, 2 * size) <= 2100
    assert 2400 <= spool.line_after_bytes(1500, size) <= 2600


# Who owns the spool


def test_an_owner_that_was_replaced_fails_at_its_next_segment(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    old = open_spool(files)
    append(old, "a")
    new = open_spool(files)

    with pytest.raises(TakenOverError, match=r"^\[FLOWSOCKET_TAKEN_OVER\].*uid"):
        append(old, "stale")
    with pytest.raises(TakenOverError):
        old.check_owner()
    append(new, "b")
    new.check_owner()
    assert lines_of(new, files) == ["a", "b"]


class _ListedMeanwhile:
    """Files of which the first listing takes so long that an owner writes two segments meanwhile.

    A local file system may show the second of them and not the first.
    """

    def __init__(self, files: StateFileSystem, owner: Spool) -> None:
        self._files = files
        self._owner = owner
        self._listings = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def list(self, folder: str) -> list[FileEntry]:
        self._listings += 1
        if self._listings > 1:
            return self._files.list(folder)
        append(self._owner, "missed")
        missed = segment_path(self._owner._newest.number)
        append(self._owner, "seen")
        return [file for file in self._files.list(folder) if file.path != missed]


def test_what_the_old_owner_writes_during_the_takeover_is_not_taken_for_a_gap(
    tmp_path: Path,
) -> None:
    files = new_files(tmp_path)
    old = open_spool(files)
    for value in "ab":
        append(old, value)
    new = open_spool(_ListedMeanwhile(files, old))

    assert lines_of(new, files, 0) == ["a", "b", "missed", "seen"]
    new.trim(1)
    assert lines_of(open_spool(files), files) == ["b", "missed", "seen"]


def test_it_fails_also_when_everything_of_that_time_is_trimmed(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    old = open_spool(files)
    append(old, "a")
    for number in range(3):
        new = open_spool(files)
        append(new, f"b{number}")
        append(new, f"c{number}")
        new.trim(new.end_line)

    with pytest.raises(TakenOverError):
        append(old, "stale")
    assert lines_of(open_spool(files), files) == ["c2"]


def test_an_owner_that_was_replaced_trims_nothing(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    old = open_spool(files)
    for value in "abc":
        append(old, value)
    new = open_spool(files)

    with pytest.raises(TakenOverError):
        old.trim(2)
    assert lines_of(new, files) == ["a", "b", "c"]


def test_claims_do_not_pile_up(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    for _ in range(3 * CLAIMS_KEPT):
        spool = open_spool(files)
        append(spool, "x")
        append(spool, "y")
        spool.trim(spool.end_line)
        spool.trim(spool.end_line)

    assert len(files.list("")) <= CLAIMS_KEPT + 3


def test_racing_owners_write_one_row_of_segments(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    offered: dict[int, str] = {}
    lock = threading.Lock()
    faults: list[BaseException] = []

    def run(name: str) -> None:
        try:
            for turn in range(5):
                # One's unfinished file may be swept by another, so it is tried again.
                spool = open_spool(files, Patience(10_000))
                try:
                    for number in range(5):
                        append(spool, f"{name}-{turn}-{number}")
                        with lock:
                            offered[spool.end_line - 1] = f"{name}-{turn}-{number}"
                except TakenOverError:
                    pass
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert faults == []
    assert dict(enumerate(lines_of(open_spool(files), files))) == offered


# Crashes and failures at every operation


def life(files: StateFileSystem, offered: list[str], patience: Patience = AT_ONCE) -> None:
    """Do everything that an owner does; what is offered is known even if it dies."""
    spool = open_spool(files, patience)
    for number in range(2):
        append(spool, f"first {number}", f"second {number}")
        offered += [f"first {number}", f"second {number}"]
    spool.trim(2)
    append(spool, "third")
    offered.append("third")
    spool = open_spool(files, patience)
    append(spool, "fourth")
    offered.append("fourth")
    spool.trim(5)


def operations_of(tmp_path: Path) -> int:
    recorded = FaultyFileSystem(open_file_system(tmp_path / "recorded"))
    life(recorded, [])
    return len(recorded.operations)


def check_recovery(files: StateFileSystem, offered: list[str]) -> None:
    spool = open_spool(files)
    found = lines_of(spool, files)
    everything = ["first 0", "second 0", "first 1", "second 1", "third", "fourth"]

    assert found == everything[spool.first_line : spool.end_line]
    assert spool.end_line >= len(offered)
    assert spool.senders.get("s", 0) == spool.counts.received == spool.end_line
    append(spool, "after")
    assert lines_of(spool, files)[-1] == "after"


@pytest.mark.parametrize("action", [FaultAction.CRASH_BEFORE, FaultAction.CRASH_AFTER], ids=str)
def test_after_a_crash_at_any_operation_every_offered_line_is_there(
    tmp_path: Path, action: FaultAction
) -> None:
    count = operations_of(tmp_path)
    assert count > 15
    for number in range(count):
        files = open_file_system(tmp_path / f"{number}")
        offered: list[str] = []
        # A read that finds nothing has no effect behind which to crash.
        with suppress(SimulatedCrashError):
            life(FaultyFileSystem(files, [Fault(action, at=number)]), offered)

        check_recovery(files, offered)


@pytest.mark.parametrize(
    "action", [FaultAction.FAIL, FaultAction.FAIL_AFTER, FaultAction.FULL], ids=str
)
def test_a_failure_at_any_operation_is_made_up_for(tmp_path: Path, action: FaultAction) -> None:
    for number in range(operations_of(tmp_path)):
        files = open_file_system(tmp_path / f"{number}")
        offered: list[str] = []
        life(FaultyFileSystem(files, [Fault(action, at=number)]), offered, Patience(5000))

        check_recovery(files, offered)


@pytest.mark.parametrize(
    ("action", "kind"),
    [(FaultAction.FAIL, StoreUnavailableError), (FaultAction.FULL, StoreFullError)],
    ids=str,
)
def test_a_store_that_fails_for_good_is_told_of(
    tmp_path: Path, action: FaultAction, kind: type[Exception]
) -> None:
    files = FaultyFileSystem(new_files(tmp_path))
    spool = open_spool(files, Patience(120))
    files.inject(Fault(action, at=lambda operation: True, times=None))

    with pytest.raises(kind) as caught:
        append(spool, "a")
    assert "storageTimeout" in "".join(caught.value.__notes__)
    files.heal()
    append(spool, "a")
    assert lines_of(spool, files) == ["a"]


def test_a_trim_that_fails_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    files = FaultyFileSystem(new_files(tmp_path))
    spool = open_spool(files)
    for value in "abc":
        append(spool, value)
    files.inject(Fault(FaultAction.FAIL, at=lambda op: op.name is OperationName.DELETE))
    spool.trim(2)
    assert spool.first_line == 0
    spool.trim(2)

    assert spool.first_line == 2


def test_what_an_interrupted_trim_left_behind_a_gap_is_removed(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    spool = open_spool(files)
    for value in "abcd":
        append(spool, value)
    files.delete([segment_path(3)])
    again = open_spool(files)

    assert (again.first_line, lines_of(again, files)) == (2, ["c", "d"])
    again.trim(2)
    assert segment_path(2) not in {file.path for file in files.list("")}


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    append(open_spool(files), "a")
    (tmp_path / "spool" / "segments" / ".tmp-0123").write_bytes(b"half a segment")
    spool = open_spool(files)

    assert [file.path for file in files.list("") if ".tmp-" in file.path] == []
    assert lines_of(spool, files) == ["a"]


# What is at the place of a spool and is none of ours


def segment(number: int = 1, **more: object) -> bytes:
    header = SegmentHeader(number, UID, 1, "owner", 0, 1)
    return encode_segment(replace(header, **more), [batch(["a"])])  # type: ignore[arg-type]


def test_a_spool_of_another_uid_is_refused(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    files.write(segment_path(1), segment(uid="other"))

    with pytest.raises(SpoolError, match="'other'"):
        open_spool(files)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    # Equally long, so that only the number differs.
    old, new = f'"format":{SEGMENT_FORMAT}', f'"format":{SEGMENT_FORMAT + 8}'
    files.write(segment_path(1), segment().replace(old.encode(), new.encode()))

    with pytest.raises(SpoolError, match=f"format {SEGMENT_FORMAT + 8}"):
        open_spool(files)


def test_a_segment_under_another_number_is_refused(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    files.write(segment_path(5), segment(number=4))

    with pytest.raises(SpoolError, match="another one"):
        open_spool(files)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"no segment at all",
        lambda data: data.replace(b"words", b"worms"),
        lambda data: data[:-60] + bytes([data[-60] ^ 1]) + data[-59:],
    ],
    ids=["short", "half", "empty", "foreign", "header", "body"],
)
def test_damage_is_found_before_anything_is_used(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    files = new_files(tmp_path)
    files.write(segment_path(1), damage(segment()))

    with pytest.raises((SnapshotCorruptError, SpoolError)):
        open_spool(files)


def test_a_segment_that_is_gone_or_replaced_is_told_of(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    spool = open_spool(files)
    append(spool, "a")
    (piece,) = spool.slices(0, 1)

    with pytest.raises(SpoolError, match="replaced"):
        read_slice(files, "other", piece)
    shutil.rmtree(tmp_path / "spool")
    with pytest.raises(LinesGoneError, match="stateLocation"):
        read_slice(files, UID, piece)


def test_any_arrow_reads_a_segment() -> None:
    data = segment()
    table = pa.ipc.open_stream(data).read_all()

    assert table["value"].to_pylist() == ["a"]
    header, _ = decode_segment("x", data)
    assert decode_header("x", data) == header
    assert decode_header("x", data[:100]) is None
