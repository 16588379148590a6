"""Functions that the tests run: a sum per word, and one with every kind of state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from flowstate import (
    AggregatingStateDescriptor,
    CheckpointedFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    Reducer,
    ReducingStateDescriptor,
    TimeDomain,
    ValueStateDescriptor,
)
from flowstate.key_groups import KeyGroupAssigner, key_group_of, subtask_index_of


class Sum(KeyedProcessFunction[str, Any, Any]):
    """Emits the sum of each word after each row."""

    def open(self, ctx: Any) -> None:
        self.sum = ctx.get_state(ValueStateDescriptor("sum", int, default=0))

    def process_element(self, row: Any, ctx: Any) -> Any:
        total = self.sum.value() + row.n
        self.sum.update(total)
        return [(row.word, str(total))]


class Everything(KeyedProcessFunction[str, Any, Any], CheckpointedFunction):
    """Every kind of state; what it emits shows all that it has of a key.

    A row with n divisible by 5 sets a timer for the processing time n, one divisible by 3 adds an
    element to the list of the operator and one to the union list. The union list is kept as in
    Flink: after a restore each subtask takes its own elements out of all of them.
    """

    def initialize_state(self, ctx: Any) -> None:
        store = ctx.operator_state_store
        self.elements = store.get_list_state(ListStateDescriptor("elements", str))
        self.union = store.get_union_list_state(ListStateDescriptor("union", str))
        self.rules = store.get_broadcast_state(MapStateDescriptor("rules", str, str))

    def open(self, ctx: Any) -> None:
        self.value = ctx.get_state(ValueStateDescriptor("value", int, default=0))
        self.list = ctx.get_list_state(ListStateDescriptor("list", int))
        self.map = ctx.get_map_state(MapStateDescriptor("map", str, int))
        self.sum = ctx.get_reducing_state(ReducingStateDescriptor("sum", Reducer.SUM, int))
        self.mean = ctx.get_aggregating_state(
            AggregatingStateDescriptor("mean", Reducer.MEAN, float)
        )
        self.rules.put("rule", "always")

        def is_own(element: str) -> bool:
            group = key_group_of(
                element.partition(":")[0],
                pa.string(),
                max_parallelism=ctx.max_parallelism,
                assigner=KeyGroupAssigner.XXHASH64,
            )
            index = subtask_index_of(
                group, parallelism=ctx.parallelism, max_parallelism=ctx.max_parallelism
            )
            return bool(index == ctx.subtask_index)

        self.union.update([element for element in self.union.get() if is_own(element)])

    def snapshot_state(self, ctx: Any) -> None:
        pass

    def process_element(self, row: Any, ctx: Any) -> Iterator[Any]:
        n = row.n
        self.value.update(self.value.value() + n)
        self.list.add(n)
        if n % 7 == 0:
            self.list.clear()
        self.map.put(str(n % 4), n)
        if n % 11 == 0:
            self.map.remove("0")
        self.sum.add(n)
        self.mean.add(float(n))
        if n % 5 == 0:
            ctx.timer_service.register_processing_time_timer(n)
        if n % 3 == 0:
            self.elements.add(f"{row.word}:{n}")
            self.union.add(f"{row.word}:{n}")
        yield row.word, self._shown()

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        assert ctx.time_domain is TimeDomain.PROCESSING_TIME
        yield ctx.current_key, f"timer {timestamp}"

    def _shown(self) -> str:
        everything = {
            "value": self.value.value(),
            "list": list(self.list.get() or []),
            "map": dict(sorted(self.map.items())),
            "sum": self.sum.get(),
            "mean": self.mean.get(),
            "rule": self.rules.get("rule"),
        }
        return json.dumps(everything)
