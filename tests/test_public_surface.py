"""What a user imports, and what comes along with it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import flowstate

NAMES = [
    "AggregateFunction",
    "AggregatingState",
    "AggregatingStateDescriptor",
    "BroadcastMap",
    "BulkState",
    "CheckpointListener",
    "CheckpointRecord",
    "CheckpointStorage",
    "CheckpointedFunction",
    "Clock",
    "FlowError",
    "FunctionRunner",
    "KeyGroupAssigner",
    "KeyGroupRange",
    "KeyedProcessFunction",
    "KeyedStateBackend",
    "ListCheckpointed",
    "ListState",
    "ListStateDescriptor",
    "LocalOperator",
    "MapState",
    "MapStateDescriptor",
    "OperatorDescription",
    "OperatorList",
    "OperatorStateBackend",
    "OutputTag",
    "Redistribution",
    "ReduceFunction",
    "Reducer",
    "ReducingState",
    "ReducingStateDescriptor",
    "StateSerializer",
    "StateTtlConfig",
    "StateVisibility",
    "Subtask",
    "SubtaskConfig",
    "SubtaskSnapshot",
    "SystemClock",
    "TimeDomain",
    "TtlTime",
    "UpdateType",
    "ValueState",
    "ValueStateDescriptor",
    "commit_checkpoint",
    "default_max_parallelism",
    "key_group_of",
    "key_group_range_of",
    "key_grouper",
    "key_groups_of",
    "subtask_index_of",
    "subtask_indexes_of",
]

IMPORTED_ON_DEMAND = [
    "pyspark",
    "flowspark",
    "pandas",
    "fsspec",
    "s3fs",
    "pytest",
    "hypothesis",
    "flowstate.testing",
]
"""What a worker need not wait for: Spark is not ours to import, file systems come with a URL."""


def test_the_public_names_are_these() -> None:
    assert flowstate.__all__ == NAMES
    assert sorted(NAMES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    found: Any = getattr(flowstate, name)
    words = (vars(found).get("__doc__") if isinstance(found, type) else found.__doc__) or ""

    assert found.__name__ == name
    assert words.strip().endswith(".")
    assert not words.startswith(f"{name}("), "which is what a dataclass says of itself"


def imported_by(code: str) -> set[str]:
    code = f"import json, sys; {code}; print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return set(json.loads(done.stdout))


def test_the_whole_library_imports_neither_spark_nor_pandas() -> None:
    modules = imported_by("from flowstate import *")

    assert {"flowstate.runner", "pyarrow"} <= modules
    assert modules.isdisjoint(IMPORTED_ON_DEMAND)


def test_who_only_needs_the_errors_imports_nothing_else() -> None:
    """Spark's processes import them with each connector, and wait for it."""
    modules = imported_by("import flowstate.errors")

    assert {one for one in modules if one.startswith("flowstate")} == {
        "flowstate",
        "flowstate.errors",
    }
    assert modules.isdisjoint({"numpy", "pyarrow", "msgspec"})


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Manager'"):
        getattr(flowstate, "Manager")  # noqa: B009
    assert set(NAMES) <= set(dir(flowstate))
