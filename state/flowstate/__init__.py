"""Flink's keyed and operator state for Python, checkpointed on any fsspec storage.

A name's module is imported when the name is first used: the connectors import this package in
every process that Spark starts, and most of these need no more of it than the errors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowstate.aggregates import Reducer
    from flowstate.checkpoint import CheckpointRecord, CheckpointStorage, SubtaskSnapshot
    from flowstate.clock import Clock, SystemClock
    from flowstate.descriptors import (
        AggregatingStateDescriptor,
        ListStateDescriptor,
        MapStateDescriptor,
        ReducingStateDescriptor,
        StateTtlConfig,
        StateVisibility,
        TtlTime,
        UpdateType,
        ValueStateDescriptor,
    )
    from flowstate.errors import FlowError
    from flowstate.functions import (
        AggregateFunction,
        CheckpointedFunction,
        CheckpointListener,
        KeyedProcessFunction,
        ListCheckpointed,
        OutputTag,
        ReduceFunction,
        TimeDomain,
    )
    from flowstate.key_groups import (
        KeyGroupAssigner,
        KeyGroupRange,
        default_max_parallelism,
        key_group_of,
        key_group_range_of,
        key_grouper,
        key_groups_of,
        subtask_index_of,
        subtask_indexes_of,
    )
    from flowstate.keyed.backend import KeyedStateBackend
    from flowstate.keyed.bulk import BulkState
    from flowstate.keyed.single_states import AggregatingState, ReducingState, ValueState
    from flowstate.keyed.states import ListState, MapState
    from flowstate.operator_state import BroadcastMap, OperatorList, OperatorStateBackend
    from flowstate.operators import LocalOperator, commit_checkpoint
    from flowstate.redistribution import Redistribution
    from flowstate.runner import FunctionRunner
    from flowstate.subtask import OperatorDescription, Subtask, SubtaskConfig
    from flowstate.types import StateSerializer

__all__ = [
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

_MODULES = {
    "aggregates": ("Reducer",),
    "checkpoint": ("CheckpointRecord", "CheckpointStorage", "SubtaskSnapshot"),
    "clock": ("Clock", "SystemClock"),
    "descriptors": (
        "AggregatingStateDescriptor",
        "ListStateDescriptor",
        "MapStateDescriptor",
        "ReducingStateDescriptor",
        "StateTtlConfig",
        "StateVisibility",
        "TtlTime",
        "UpdateType",
        "ValueStateDescriptor",
    ),
    "errors": ("FlowError",),
    "functions": (
        "AggregateFunction",
        "CheckpointedFunction",
        "CheckpointListener",
        "KeyedProcessFunction",
        "ListCheckpointed",
        "OutputTag",
        "ReduceFunction",
        "TimeDomain",
    ),
    "key_groups": (
        "KeyGroupAssigner",
        "KeyGroupRange",
        "default_max_parallelism",
        "key_group_of",
        "key_group_range_of",
        "key_grouper",
        "key_groups_of",
        "subtask_index_of",
        "subtask_indexes_of",
    ),
    "keyed.backend": ("KeyedStateBackend",),
    "keyed.bulk": ("BulkState",),
    "keyed.single_states": ("AggregatingState", "ReducingState", "ValueState"),
    "keyed.states": ("ListState", "MapState"),
    "operator_state": ("BroadcastMap", "OperatorList", "OperatorStateBackend"),
    "operators": ("LocalOperator", "commit_checkpoint"),
    "redistribution": ("Redistribution",),
    "runner": ("FunctionRunner",),
    "subtask": ("OperatorDescription", "Subtask", "SubtaskConfig"),
    "types": ("StateSerializer",),
}

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
