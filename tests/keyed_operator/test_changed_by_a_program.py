"""State of a query that a program of its own has looked at and changed, in a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstate import CheckpointStorage, KeyGroupAssigner, LocalOperator, ValueStateDescriptor
from flowstate.errors import MaxParallelismError

from .functions import Sum
from .harness import Query, row_factory

SUM = ValueStateDescriptor("sum", int, default=0)


def test_a_copy_is_changed_by_a_program_and_a_query_goes_on_from_it(tmp_path: Path) -> None:
    old = Query(folder=tmp_path / "old", factory=row_factory(Sum()))
    old.batch(0, [("a", 1), ("b", 2)])
    record = old.seal(1)
    assert record is not None
    copy = CheckpointStorage(str(tmp_path / "copy"))
    old.storage.copy_to(record, copy)
    with pytest.raises(MaxParallelismError):
        LocalOperator(copy.url, parallelism=3, key_type=str)
    with LocalOperator(
        copy.url, parallelism=3, key_type=str, assigner=KeyGroupAssigner.XXHASH64
    ) as operator:
        state = operator.subtask_of("b").keyed.get_state(SUM)
        assert state.value() == 2
        state.update(40)
        operator.checkpoint()

    new = Query(
        folder=tmp_path / "new",
        factory=row_factory(Sum()),
        query_id="new",
        parallelism=4,
        settings={"restore_from": copy.url},
    )
    found = new.batch(0, [("a", 1), ("b", 2)])
    assert sorted(tuple(row.values()) for row in found) == [("a", "2"), ("b", "42")]
