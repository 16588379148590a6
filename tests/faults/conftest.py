from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from flowstate.storage.filesystems import StateFileSystem, open_file_system


@pytest.fixture
def new_file_system() -> Callable[[], StateFileSystem]:
    """Return a function that opens an empty store in memory."""
    return lambda: open_file_system(f"memory://faults/{uuid.uuid4().hex}")
