"""Scans that begin somewhere behind, and who needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowstate import LocalOperator
from flowstate.functions import TimeDomain
from flowstate.keyed.lmdb_store import LmdbStore
from flowstate.keyed.working_state import WorkingState
from tests.keyed.stores import map_rows, row


def test_a_scan_may_begin_anywhere(tmp_path: Path) -> None:
    # The first 240 bytes of the long ones are the same.
    keys = ["", "a", "b", "bb", "k" * 400, "k" * 600, "k" * 600 + "x", "k" * 600 + "y"]
    entries = {(key, sub): key[-1:] for key in keys for sub in ("", "s", "t" * 300)}
    rows = sorted(map(row, entries))
    with closing(LmdbStore(tmp_path)) as store:
        store.apply([[map_rows(entries)]], expected=None, identity="v1")
        with closing(store.snapshot()) as snapshot:
            for start in (b"", b"\xff", *rows, *(data[:-1] for data in rows)):
                for prefix in (b"", rows[1], rows[-1][:300]):
                    expected = [data for data in rows if data >= start and data.startswith(prefix)]
                    found = [data for data, _ in snapshot.scan("map", prefix, start=start)]
                    assert found == expected


def test_a_timer_is_read_once_however_often_time_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    scan = WorkingState.scan

    def counting(*arguments: Any, **options: Any) -> Iterator[tuple[bytes, bytes]]:
        nonlocal read
        for found in scan(*arguments, **options):
            read += 1
            yield found

    with LocalOperator(
        tmp_path / "state", parallelism=1, key_type=str, working_folder=tmp_path / "working"
    ) as operator:
        for time in range(100):
            timers = operator.subtask_of(f"key {time}").keyed.timer_service
            timers.register_event_time_timer(time)
        operator.checkpoint()
        monkeypatch.setattr(WorkingState, "scan", counting)
        for time in range(100):
            assert [timer.timestamp for timer in timers.advance_watermark(time)] == [time]
        assert timers.next_timestamp(TimeDomain.EVENT_TIME) is None
        assert timers.count(TimeDomain.EVENT_TIME) == 0

    # Each one, and the one behind it, by which the end is known.
    assert read <= 200
