from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowstate.checkpoint import CheckpointStorage

from .cases import SpyFileSystem


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty root."""
    if request.param == "file":
        yield str(tmp_path / "operator")
        return
    url = f"memory://{uuid.uuid4().hex}/operator"
    yield url
    storage = CheckpointStorage(url)
    storage.file_system.delete([entry.path for entry in storage.file_system.list("")])


@pytest.fixture
def storage(root: str) -> CheckpointStorage:
    return CheckpointStorage(root)


@pytest.fixture
def spy(storage: CheckpointStorage) -> SpyFileSystem:
    return SpyFileSystem(storage.file_system)
