"""State for the commands to look at."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

from flowstate import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    LocalOperator,
    MapStateDescriptor,
    Reducer,
    ReducingStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)
from flowstate.subtask import Subtask

QUERY_ID = "3f2a9c1e-7b44-4c55-9d0f-1b2c3d4e5f60"
KEYS = [f"user-{number}" for number in range(40)]

COUNT = ReducingStateDescriptor("count", Reducer.SUM, int)
LAST = ValueStateDescriptor("last", str, ttl=StateTtlConfig(ttl=dt.timedelta(days=1)))
PLACES = ListStateDescriptor("places", int)
SCORES = MapStateDescriptor("scores", str, int)
MEAN = AggregatingStateDescriptor("mean", Reducer.MEAN, int)
PENDING = ListStateDescriptor("pending", str)
OWNERS = ListStateDescriptor("owners", str)
RULES = MapStateDescriptor("rules", str, float)


def write_key(subtask: Subtask, number: int) -> None:
    """Write the current key's every kind of state."""
    keyed = subtask.keyed
    keyed.get_reducing_state(COUNT).add(number)
    keyed.get_state(LAST).update(f"text {number}")
    keyed.get_list_state(PLACES).add_all([number, number + 1])
    keyed.get_map_state(SCORES).put(f"m{number % 3}", number)
    keyed.get_aggregating_state(MEAN).add(number)
    keyed.timer_service.register_event_time_timer(1_700_000_000_000 + number * 1000)


def run_once(
    root: Path | str,
    *,
    parallelism: int = 2,
    keys: list[str] = KEYS,
    checkpoints: int = 1,
    **options: Any,
) -> None:
    """Run an operator with every kind of state for some checkpoints."""
    options.setdefault("checkpoints_retained", 5)
    with LocalOperator(root, parallelism=parallelism, key_type=str, **options) as operator:
        for _ in range(checkpoints):
            for number, key in enumerate(keys):
                write_key(operator.subtask_of(key), number)
            for index, subtask in enumerate(operator.subtasks):
                pending = subtask.operator.get_list_state(PENDING)
                pending.add_all([f"{index}-{number}" for number in range(index + 1)])
                subtask.operator.get_union_list_state(OWNERS).update([f"subtask {index}"])
                subtask.operator.get_broadcast_state(RULES).put("limit", 2.5)
            operator.checkpoint()


def one_value(root: Path | str, key_type: Any, values: dict[Any, Any], **options: Any) -> None:
    """Write one value of each key, of any type, and take a checkpoint."""
    descriptor = ValueStateDescriptor("value", type(next(iter(values.values()))))
    with LocalOperator(root, parallelism=2, key_type=key_type, **options) as operator:
        for key, value in values.items():
            operator.subtask_of(key).keyed.get_state(descriptor).update(value)
        operator.checkpoint()


def unsealed(root: Path, checkpoint_id: int = 1, run: str = "run-a") -> None:
    """Leave what a keyed operator of Spark writes before its checkpoint has a record."""
    folder = root / f"chk-{checkpoint_id}" / run
    folder.mkdir(parents=True)
    (folder / "part-0").write_bytes(b"x" * 300)
