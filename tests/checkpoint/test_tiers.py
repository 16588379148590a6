from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from flowstate.checkpoint import (
    FAN_IN,
    CheckpointStorage,
    FileHandle,
    KeyedHandle,
    KeyedSection,
    MergePlan,
    MergeTimes,
    folding,
    handles_max,
    merge_handles,
    merge_rows,
    plan_merge,
)
from flowstate.checkpoint.tiers import LEVEL_MAX
from flowstate.key_groups import KeyGroupRange, key_group_range_of
from flowstate.rows import StateKind, StateRows, row_schema

from .cases import (
    ALL,
    DELETE,
    MAX_PARALLELISM,
    PUT,
    SpyFileSystem,
    int_rows,
    keyed_handle,
    rows_of,
    values_of,
)

ENTRY_BYTES = 20
OVERHEAD_BYTES = 600


def sized_handle(
    size: int,
    *,
    checkpoint: int = 1,
    level: int = 0,
    full: bool = False,
    key_groups: KeyGroupRange = ALL,
) -> KeyedHandle:
    file = FileHandle(
        path=f"shared/{checkpoint}-run-0.arrow",
        size=size,
        footer_length=0,
        footer_checksum="",
        digest="",
        rows=0,
    )
    return keyed_handle(
        file, first=checkpoint, last=checkpoint, level=level, full=full, key_groups=key_groups
    )


class Costs(NamedTuple):
    handles_max: int
    amplification: float
    read_amplification: float


@dataclass
class Simulation:
    """A subtask's handles as sets of keys, with sizes as real files have them."""

    fan_in: int = FAN_IN
    handles: tuple[KeyedHandle, ...] = ()
    keys: dict[str, frozenset[int]] = field(default_factory=dict)
    delta_bytes: int = 0
    merged_bytes: int = 0
    most_handles: int = 0

    def _handle(self, keys: Iterable[int], **fields: object) -> KeyedHandle:
        held = frozenset(keys)
        size = OVERHEAD_BYTES + ENTRY_BYTES * len(held)
        handle = sized_handle(size, **fields)  # type: ignore[arg-type]
        name = f"shared/{len(self.keys)}"
        self.keys[name] = held
        return msgspec.structs.replace(handle, file=msgspec.structs.replace(handle.file, path=name))

    def checkpoint(self, number: int, keys: Iterable[int]) -> None:
        delta = self._handle(keys, checkpoint=number)
        self.handles += (delta,)
        self.delta_bytes += delta.file.size
        if (plan := plan_merge(self.handles, fan_in=self.fan_in)) is not None:
            self.carry_out(plan, number)
        assert plan_merge(self.handles, fan_in=self.fan_in) is None
        self.most_handles = max(self.most_handles, len(self.handles))

    def carry_out(self, plan: MergePlan, number: int) -> None:
        held = (self.keys[handle.file.path or ""] for handle in plan.handles)
        merged = self._handle(
            frozenset().union(*held), checkpoint=number, level=plan.level, full=plan.full
        )
        self.handles = plan.apply(self.handles, merged)
        self.merged_bytes += merged.file.size

    def costs(self) -> Costs:
        state = OVERHEAD_BYTES + ENTRY_BYTES * len(frozenset().union(*self.keys.values()))
        to_read = sum(handle.file.size for handle in self.handles)
        return Costs(
            self.most_handles,
            (self.delta_bytes + self.merged_bytes) / self.delta_bytes,
            to_read / state,
        )


Changes = Callable[[int, np.random.Generator], Iterable[int]]

WORKLOADS: dict[str, Changes] = {
    "always the same key": lambda number, rng: [1],
    "only new keys": lambda number, rng: range(number * 100, number * 100 + 100),
    "updates of a large state": lambda number, rng: (
        range(50_000) if number == 1 else rng.integers(0, 50_000, 100).tolist()
    ),
    "updates of a small state": lambda number, rng: rng.integers(0, 500, 100).tolist(),
    "sizes that vary": lambda number, rng: rng.integers(
        0, 20_000, int(10 ** rng.uniform(0, 3.5))
    ).tolist(),
}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("fan_in", [2, 4, 8])
def test_a_thousand_checkpoints_keep_handles_and_writes_within_bounds(
    workload: str, fan_in: int
) -> None:
    simulation = Simulation(fan_in)
    rng = np.random.default_rng(3)

    for number in range(1, 1001):
        simulation.checkpoint(number, WORKLOADS[workload](number, rng))

    costs = simulation.costs()
    # A thousand changes reach level 3 with a fan-in of 8; the bound holds for any number.
    assert costs.handles_max <= handles_max(fan_in)
    assert costs.handles_max <= 3 * (FAN_IN - 1) + 1 or fan_in != FAN_IN
    # Once per level, and twice for the full snapshots.
    assert costs.amplification <= (4 if fan_in == FAN_IN else 10)
    assert costs.read_amplification <= 2


def test_levels_cascade_and_end_in_a_full_handle() -> None:
    base = sized_handle(10_000, full=True)
    ones = [sized_handle(20, level=1, checkpoint=2) for _ in range(FAN_IN - 1)]
    zeros = [sized_handle(20, checkpoint=3) for _ in range(FAN_IN)]
    tops = [sized_handle(20, level=LEVEL_MAX, checkpoint=2) for _ in range(FAN_IN)]

    cascade = plan_merge([base, *ones, *zeros])
    single = plan_merge([base, *ones[1:], *zeros])
    top = plan_merge([base, *tops])

    assert cascade == MergePlan((*ones, *zeros), level=2, full=False)
    assert single == MergePlan(tuple(zeros), level=1, full=False)
    assert top == MergePlan((base, *tops), level=0, full=True)
    assert plan_merge([base, *ones, *zeros[1:]]) is None


def test_a_run_below_newer_handles_is_found() -> None:
    base = sized_handle(10_000, full=True)
    ones = [sized_handle(20, level=1, checkpoint=2) for _ in range(FAN_IN)]
    zero = sized_handle(20, checkpoint=3)

    assert plan_merge([base, *ones, zero]) == MergePlan((*ones, zero), level=2, full=False)


def test_changes_as_large_as_the_state_are_folded_into_it() -> None:
    base = sized_handle(100, full=True)

    assert plan_merge([base, sized_handle(99)]) is None
    assert plan_merge([base, sized_handle(60), sized_handle(40)]) is not None
    assert plan_merge([base]) is None
    assert plan_merge([]) is None


def test_without_a_full_handle_a_run_that_reaches_the_oldest_becomes_one() -> None:
    zeros = [sized_handle(20) for _ in range(FAN_IN)]

    assert plan_merge(zeros) == MergePlan(tuple(zeros), level=0, full=True)
    assert plan_merge(zeros[1:]) is None


@pytest.mark.parametrize("old_parallelism", [2, 16, 128])
def test_the_lists_of_many_old_subtasks_are_merged_down(old_parallelism: int) -> None:
    handles = [
        sized_handle(
            1000 if full else 20,
            checkpoint=1 if full else number,
            full=full,
            key_groups=key_group_range_of(
                subtask_index=index,
                parallelism=old_parallelism,
                max_parallelism=MAX_PARALLELISM,
            ),
        )
        for number in range(1, 5)
        for index in range(old_parallelism)
        for full in [number == 1]
    ]

    plan = plan_merge(handles)

    left = handles
    if plan is not None:
        merged = sized_handle(plan.size, checkpoint=4, level=plan.level, full=plan.full)
        left = list(plan.apply(handles, merged))
    assert len(left) <= handles_max()
    assert plan_merge(left) is None


def test_handles_that_came_after_the_plan_stay_behind_the_result() -> None:
    base = sized_handle(10_000, full=True)
    zeros = [sized_handle(20, checkpoint=number) for number in range(2, 2 + FAN_IN)]
    late = sized_handle(20, checkpoint=50)
    merged = sized_handle(50, checkpoint=9, level=1)
    plan = plan_merge([base, *zeros])
    assert plan is not None

    assert plan.apply([base, *zeros, late], merged) == (base, merged, late)
    with pytest.raises(ValueError, match="no longer there"):
        plan.apply([base, late], merged)


# Carrying plans out


def written(storage: CheckpointStorage, number: int, *states: StateRows) -> KeyedHandle:
    sections = [KeyedSection.of(rows) for rows in states]
    file = storage.write_file(sections, batch_id=number, run="run")
    return keyed_handle(file, first=number, last=number, full=number == 1)


def merge(
    storage: CheckpointStorage,
    handles: Iterable[KeyedHandle],
    *,
    full: bool,
    times: MergeTimes | None = None,
    states: dict[str, dict[str, object]] | None = None,
) -> KeyedHandle:
    return merge_handles(
        storage,
        MergePlan(tuple(handles), level=0, full=full),
        batch_id=9,
        run="run",
        states=states or {},
        times=times or MergeTimes(),
    )


@pytest.mark.parametrize("stretch_bytes", [1, 5000, 8 << 20])
def test_merged_files_hold_what_the_last_changes_say(
    storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch, stretch_bytes: int
) -> None:
    monkeypatch.setattr(folding, "STRETCH_BYTES", stretch_bytes)
    rng = np.random.default_rng(11)
    model = {key: key for key in range(20_000)}
    handles = [written(storage, 1, int_rows(model), int_rows([7], name="other"))]
    for number in range(2, 6):
        last = dict.fromkeys(rng.integers(0, 30_000, 500).tolist(), number)
        model.update(last)
        handles.append(written(storage, number, int_rows(last, last.values())))

    merged = merge(storage, handles, full=True)

    reader = storage.reader(merged.file)
    assert values_of(reader.read_rows("count", ALL)) == model
    assert values_of(reader.read_rows("other", ALL)) == {7: 7}
    assert (merged.first_checkpoint, merged.last_checkpoint, merged.full) == (1, 5, True)


def test_each_byte_is_read_once_whatever_the_number_of_stretches(
    storage: CheckpointStorage, spy: SpyFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "STRETCH_BYTES", 100_000)
    watched = CheckpointStorage(storage.url, file_system=spy)
    rng = np.random.default_rng(4)
    handles = [
        written(watched, number, int_rows(rng.permutation(300_000), rng.permutation(300_000)))
        for number in (1, 2)
    ]

    merge(watched, handles, full=True)

    assert spy.bytes_read <= sum(handle.file.size for handle in handles) * 1.01
    assert spy.reads <= 40


def test_only_the_clipped_key_groups_are_merged(storage: CheckpointStorage) -> None:
    low, high = KeyGroupRange(0, 63), KeyGroupRange(64, 127)
    handles = [
        msgspec.structs.replace(
            written(storage, number, int_rows(range(256), [worth] * 256)), key_groups=clip
        )
        for number, worth, clip in ((1, 1, low), (1, 2, high), (2, 3, KeyGroupRange(0, 9)))
    ]

    merged = merge(storage, handles, full=True)

    expected = {key: 3 if key % 128 < 10 else 1 if key % 128 < 64 else 2 for key in range(256)}
    assert merged.key_groups == ALL
    assert values_of(storage.reader(merged.file).read_rows("count", ALL)) == expected


def test_deletions_go_with_a_full_result_alone(storage: CheckpointStorage) -> None:
    schema = row_schema(key=pa.int64(), value=pa.int64())
    put = written(storage, 1, rows_of("count", StateKind.VALUE, schema, [(0, PUT, 0, 1)]))
    gone = written(storage, 2, rows_of("count", StateKind.VALUE, schema, [(0, DELETE, 0, None)]))

    kept = merge(storage, [put, gone], full=False)
    dropped = merge(storage, [put, gone], full=True)

    assert kept.file.rows == 1
    assert dropped.file.rows == 0
    assert storage.reader(dropped.file).schema("count").equals(schema)


@pytest.mark.parametrize(
    ("meta", "alive"),
    [
        ({"ttl_ms": 10}, [2]),
        ({"ttl_ms": 10, "ttl_time": "processing"}, [2]),
        ({"ttl_ms": 10, "ttl_time": "event"}, [1, 2]),
        ({}, [0, 1, 2]),
    ],
    ids=str,
)
def test_what_has_expired_is_left_out_of_a_full_result(
    storage: CheckpointStorage, meta: dict[str, object], alive: list[int]
) -> None:
    schema = row_schema(key=pa.int64(), value=pa.int64(), ts=pa.int64())
    rows = [(0, PUT, key, key, key * 100) for key in range(3)]
    handle = written(storage, 1, rows_of("s", StateKind.VALUE, schema, rows))
    times = MergeTimes(processing_ms=110, event_ms=10)

    full = merge(storage, [handle], full=True, times=times, states={"s": meta})
    partial = merge(storage, [handle], full=False, times=times, states={"s": meta})

    keys = storage.reader(full.file).read_rows("s", ALL).table.column("key").to_pylist()
    assert keys == alive
    assert partial.file.rows == 3


def test_a_state_that_has_changed_its_type_takes_the_newest(storage: CheckpointStorage) -> None:
    narrow = rows_of(
        "s", StateKind.VALUE, row_schema(key=pa.int64(), value=pa.int32()), [(0, PUT, 1, 5)]
    )
    wide = rows_of(
        "s", StateKind.VALUE, row_schema(key=pa.int64(), value=pa.int64()), [(99, PUT, 2, 6)]
    )

    merged = merge(storage, [written(storage, 1, narrow), written(storage, 2, wide)], full=True)

    rows = storage.reader(merged.file).read_rows("s", ALL)
    assert rows.table.schema.equals(wide.table.schema)
    assert values_of(rows) == {1: 5, 2: 6}


def test_a_newest_file_without_rows_still_decides_the_type(storage: CheckpointStorage) -> None:
    wide = row_schema(key=pa.int64(), value=pa.string())
    nothing = StateRows("count", StateKind.VALUE, wide.empty_table())

    merged = merge(
        storage, [written(storage, 1, int_rows([5])), written(storage, 2, nothing)], full=True
    )

    rows = storage.reader(merged.file).read_rows("count", ALL)
    assert rows.table.schema.equals(wide)
    assert rows.table.column("value").to_pylist() == ["5"]


def change_of(changes: dict[int, int | None]) -> StateRows:
    schema = row_schema(key=pa.int64(), value=pa.int64())
    rows = [
        (key % MAX_PARALLELISM, DELETE if value is None else PUT, key, value)
        for key, value in changes.items()
    ]
    return rows_of("count", StateKind.VALUE, schema, rows)


def restored(storage: CheckpointStorage, handles: Iterable[KeyedHandle]) -> dict[int, int]:
    sets = [storage.reader(handle.file).read_rows("count", handle.key_groups) for handle in handles]
    return values_of(merge_rows(sets, drop_tombstones=True))


def clipped(handles: Iterable[KeyedHandle], key_groups: KeyGroupRange) -> list[KeyedHandle]:
    return [
        msgspec.structs.replace(handle, key_groups=within)
        for handle in handles
        if (within := handle.key_groups.intersect(key_groups)) is not None
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_long_life_with_merges_and_rescaling_loses_nothing(
    storage: CheckpointStorage, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    model: dict[int, int] = {}
    subtasks: list[list[KeyedHandle]] = [[]]
    for number in range(1, 61):
        if number % 9 == 0:
            # The lists of all old subtasks, in order of age, clipped to what each new one owns.
            together = sorted(
                (handle for handles in subtasks for handle in handles),
                key=lambda handle: handle.last_checkpoint,
            )
            parallelism = int(rng.integers(1, 5))
            subtasks = [
                clipped(
                    together,
                    key_group_range_of(
                        subtask_index=index,
                        parallelism=parallelism,
                        max_parallelism=MAX_PARALLELISM,
                    ),
                )
                for index in range(parallelism)
            ]
        for index, handles in enumerate(subtasks):
            owned = key_group_range_of(
                subtask_index=index, parallelism=len(subtasks), max_parallelism=MAX_PARALLELISM
            )
            keys = [key for key in rng.integers(0, 400, 40).tolist() if key % 128 in owned]
            changes = {key: number if rng.random() < 0.7 else None for key in keys}
            model.update({key: value for key, value in changes.items() if value is not None})
            for key in [key for key, value in changes.items() if value is None]:
                model.pop(key, None)
            file = storage.write_file(
                [KeyedSection.of(change_of(changes))], batch_id=number, run="run"
            )
            handles.append(keyed_handle(file, first=number, last=number, key_groups=owned))
            plan = plan_merge(handles, fan_in=3)
            if plan is not None:
                merged = merge_handles(
                    storage, plan, batch_id=number, run="run", states={}, times=MergeTimes()
                )
                subtasks[index] = list(plan.apply(handles, merged))
            assert len(subtasks[index]) <= handles_max(3)

        found: dict[int, int] = {}
        for handles in subtasks:
            found |= restored(storage, handles)
        assert found == model
