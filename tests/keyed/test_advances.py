"""Working state that moves on by checkpoints: wholly or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.keyed.stores import contents, map_rows
from tests.keyed.test_working_state import CHANGES, V2, V3, open_state, opened


def raise_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_several_checkpoints_are_one_step(tmp_path: Path) -> None:
    with open_state(tmp_path, "v1") as state:
        state.advance([[map_rows(CHANGES[name])] for name in ("v2", "v3")], "v3")
        assert (state.identity, contents(state)) == ("v3", V3)
    assert opened(tmp_path, "v3") == "reused"


def test_who_has_advanced_it_reads_on_where_no_mark_can_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_state(tmp_path, "v1") as state:
        monkeypatch.setattr(os, "replace", raise_full)
        state.advance([[map_rows(CHANGES["v2"])]], "v2")
        assert (state.identity, contents(state)) == ("v2", V2)
        monkeypatch.undo()
    assert opened(tmp_path, "v2") == "rebuilt"


def test_a_relative_folder_is_the_same_one_wherever_the_process_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_state(Path("state"), "v1") as state:
        monkeypatch.chdir("/")
        state.advance([[map_rows(CHANGES["v2"])]], "v2")
    assert opened(tmp_path / "state", "v2") == "reused"
