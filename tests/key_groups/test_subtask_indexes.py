from __future__ import annotations

import numpy as np
import pytest

from flowstate.errors import KeyGroupError
from flowstate.key_groups import subtask_index_of, subtask_indexes_of


@pytest.mark.parametrize(("parallelism", "max_parallelism"), [(1, 1), (3, 128), (32767, 32768)])
def test_the_subtasks_of_a_column_are_those_of_its_key_groups(
    parallelism: int, max_parallelism: int
) -> None:
    groups = np.arange(max_parallelism, dtype=np.uint16)
    sizes = {"parallelism": parallelism, "max_parallelism": max_parallelism}
    expected = [subtask_index_of(group, **sizes) for group in range(max_parallelism)]

    assert subtask_indexes_of(groups, **sizes).tolist() == expected
    with pytest.raises(KeyGroupError, match="key group must be"):
        subtask_indexes_of(np.array([max_parallelism], dtype=np.uint16), **sizes)
