from __future__ import annotations

from pathlib import Path

import pytest

from .states import QUERY_ID, run_once


@pytest.fixture(scope="session")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a state location whose operator has run at two parallelisms; it stays as it is."""
    root = tmp_path_factory.mktemp("location")
    run_once(root / QUERY_ID / "words", parallelism=2, checkpoints=2)
    run_once(root / QUERY_ID / "words", parallelism=3, keys=["user-1", "new"])
    return root


@pytest.fixture(scope="session")
def words(read_only: Path) -> Path:
    """Return the folder of the operator in it, which has the checkpoints 1, 2 and 3."""
    return read_only / QUERY_ID / "words"
