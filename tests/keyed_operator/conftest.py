from __future__ import annotations

from collections.abc import Iterator

import pyspark
import pytest

from .harness import current_context


@pytest.fixture(autouse=True, scope="package")
def _tasks_are_played() -> Iterator[None]:
    """Let each thread be the task that the harness says it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyspark.TaskContext, "get", staticmethod(current_context))
        yield
