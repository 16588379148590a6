"""The state library: operations, checkpoints against the state's size, restores, key groups."""

from __future__ import annotations

import builtins
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flowstate import (
    AggregatingStateDescriptor,
    BulkState,
    CheckpointStorage,
    KeyedStateBackend,
    KeyGroupAssigner,
    ListStateDescriptor,
    MapStateDescriptor,
    Reducer,
    ReducingStateDescriptor,
    Subtask,
    SubtaskConfig,
    ValueStateDescriptor,
    commit_checkpoint,
    key_groups_of,
)
from flowstate.storage.filesystems import StateFileSystem, open_file_system
from integration.benchmarks._report import aim, heading, machine, medians, progress, table

SIZES = (100_000, 1_000_000, 5_000_000)
CHANGED = 10_000
BATCHES = 24
VALUE = ValueStateDescriptor("value", int)


def main() -> None:
    """Print all figures of the library."""
    print(f"# flowstate ({machine()})")
    operations()
    bulk_operations()
    key_groups()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints(Path(folder))


# Single operations.


def operations() -> None:
    heading("Nanoseconds per operation, state in memory, 100,000 operations on 10,000 keys")
    keys = [f"key-{number % 10_000}" for number in range(100_000)]
    backend = KeyedStateBackend(str, max_parallelism=128)
    cases = {"dict: d[k] = d.get(k, 0) + 1": _dict_case(keys)}
    cases.update(_value_cases(backend, keys))
    cases.update(_other_cases(backend, keys))
    found = medians(cases)
    plain = found["dict: d[k] = d.get(k, 0) + 1"]
    rows = [
        (name, f"{seconds / len(keys) * 1e9:.0f}", f"{seconds / plain:.1f}")
        for name, seconds in found.items()
    ]
    table(("operation", "ns", "times a dict"), rows)


def _dict_case(keys: Sequence[str]) -> Callable[[], None]:
    counts: dict[str, int] = {}

    def run() -> None:
        for key in keys:
            counts[key] = counts.get(key, 0) + 1

    return run


def _value_cases(backend: KeyedStateBackend, keys: Sequence[str]) -> dict[str, Callable[[], None]]:
    value = backend.get_state(ValueStateDescriptor("value", int, default=0))

    def set_key() -> None:
        for key in keys:
            backend.set_canonical_key(key)

    def count() -> None:
        for key in keys:
            backend.set_canonical_key(key)
            value.update((value.value() or 0) + 1)

    return {"set the key": set_key, "set the key, value(), update()": count}


def _other_cases(backend: KeyedStateBackend, keys: Sequence[str]) -> dict[str, Callable[[], None]]:
    listed = backend.get_list_state(ListStateDescriptor("list", int))
    mapped = backend.get_map_state(MapStateDescriptor("map", str, int))
    summed = backend.get_reducing_state(ReducingStateDescriptor("sum", Reducer.SUM, int))
    mean = backend.get_aggregating_state(AggregatingStateDescriptor("mean", Reducer.MEAN, float))

    def each(call: Callable[[str], Any]) -> Callable[[], None]:
        def run() -> None:
            backend.set_canonical_key("one")
            listed.clear()
            for key in keys:
                call(key)

        return run

    return {
        "list add()": each(lambda _: listed.add(1)),
        "map put()": each(lambda key: mapped.put(key, 1)),
        "map get()": each(mapped.get),
        "reducing add()": each(lambda _: summed.add(1)),
        "aggregating add()": each(lambda _: mean.add(1.0)),
    }


def bulk_operations() -> None:
    heading("Nanoseconds per row in bulk, 1,000,000 rows of 100,000 keys, state in memory")
    rng = np.random.default_rng(1)
    keys = pa.array(rng.integers(0, 100_000, 1_000_000))
    values = pa.array(rng.integers(0, 1000, 1_000_000))
    backend = KeyedStateBackend(int, max_parallelism=128)
    backend.get_aggregating_state(AggregatingStateDescriptor("mean", Reducer.MEAN, float))
    backend.get_reducing_state(ReducingStateDescriptor("sum", Reducer.SUM, int))
    backend.get_state(VALUE)
    sums, means = BulkState(backend, "sum"), BulkState(backend, "mean")
    single = BulkState(backend, "value")
    distinct = pa.array(np.arange(100_000))
    found = medians(
        {
            "add, sum": lambda: sums.add(keys, values),
            "add, mean": lambda: means.add(keys, values.cast(pa.float64())),
            "get (a row is a key)": lambda: single.get(distinct),
            "update (a row is a key)": lambda: single.update(distinct, distinct),
        }
    )
    rows = [
        (name, f"{seconds / (100_000 if 'is a key' in name else 1_000_000) * 1e9:.0f}")
        for name, seconds in found.items()
    ]
    table(("operation", "ns a row"), rows)


def key_groups() -> None:
    heading("Nanoseconds per key for the key groups of an Arrow string column, 1,000,000 keys")
    cases: dict[str, Callable[[], object]] = {}
    for length in (8, 16, 32):
        keys = pa.array([f"{number:0{length}d}" for number in range(1_000_000)])
        for assigner in KeyGroupAssigner:
            cases[f"{assigner.value}, {length} characters"] = _groups_case(keys, assigner)
    found = medians(cases)
    table(
        ("assigner", "ns a key"),
        [(name, f"{seconds / 1e6 * 1e9:.1f}") for name, seconds in found.items()],
    )
    for name, seconds in found.items():
        if name.startswith(KeyGroupAssigner.FLINK.value):
            aim(f"ns for the key group of a text: {name}", 40, seconds * 1e3, at_least=False)


def _groups_case(keys: pa.Array, assigner: KeyGroupAssigner) -> Callable[[], object]:
    return lambda: key_groups_of(keys, max_parallelism=128, assigner=assigner)


# Checkpoints and restores.


class CountingFileSystem:
    """Counts the bytes that go through a store."""

    def __init__(self, inner: StateFileSystem) -> None:
        self._inner, self.url = inner, inner.url
        self.read_bytes = self.written_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, path: str) -> bytes:
        data = self._inner.read(path)
        self.read_bytes += len(data)
        return data

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        pieces = self._inner.read_ranges(path, ranges)
        self.read_bytes += sum(map(len, pieces))
        return pieces

    def stored_bytes(self) -> int:
        return sum(entry.size for entry in self._inner.list(""))


class Run:
    """One subtask with LMDB working state, whose phases are timed apart."""

    def __init__(self, folder: Path, *, compact: bool) -> None:
        self.files = CountingFileSystem(open_file_system(folder / "state"))
        self.storage = CheckpointStorage("", file_system=self.files)
        self.record = self.storage.latest()
        config = SubtaskConfig(
            subtask_index=0,
            parallelism=1,
            key_type=int,
            working_folder=folder / "work",
            compact=compact,
        )
        self.subtask = Subtask(self.storage, config, restored=self.record)
        self.subtask.keyed.get_state(VALUE)
        self.bulk = BulkState(self.subtask.keyed, "value")

    def update(self, keys: np.ndarray[Any, Any], value: int) -> None:
        column = pa.array(keys)
        self.bulk.get(column)
        self.bulk.update(column, pa.array(np.full(len(keys), value)))

    def checkpoint(self) -> tuple[float, float, float, int]:
        """Return the checkpoint's seconds, its CPU seconds, those of the cache, and the bytes."""
        checkpoint_id = 1 if self.record is None else self.record.checkpoint_id + 1
        before = self.files.stored_bytes()
        start, cpu = time.perf_counter(), time.process_time()
        snapshot = self.subtask.snapshot(checkpoint_id)
        self.record = commit_checkpoint(
            self.storage,
            [snapshot],
            [self.subtask.describe()],
            parent=self.record,
            run=self.subtask.run,
            batch_id=checkpoint_id,
        ).record
        taken, used = time.perf_counter(), time.process_time() - cpu
        self.subtask.notify_checkpoint_complete(checkpoint_id)
        advanced = time.perf_counter() - taken
        return taken - start, used, advanced, self.files.stored_bytes() - before


def checkpoints(folder: Path) -> None:
    for size in SIZES:
        progress(f"building a state of {size:,} keys")
        _build(folder / str(size), size)
    plain = _measure(folder, compact=False)
    heading(f"A checkpoint of {CHANGED:,} changed keys; LMDB working state, local disk, fsync")
    first = plain[SIZES[0]].checkpoint_ms
    columns = ("keys", "checkpoint ms", "ratio", "CPU ms", "bytes", "cache advance ms", "update ms")
    rows: list[tuple[object, ...]] = []
    for size, found in plain.items():
        ratio = f"{found.checkpoint_ms / first:.2f}"
        wall, cpu, advance, update = (
            f"{ms:.1f}"
            for ms in (found.checkpoint_ms, found.cpu_ms, found.advance_ms, found.update_ms)
        )
        rows.append((f"{size:,}", wall, ratio, cpu, f"{found.bytes:,}", advance, update))
    table(columns, rows)
    last = plain[SIZES[-1]]
    what = f"a checkpoint of {CHANGED:,} changed keys of {SIZES[-1]:,}, times that of {SIZES[0]:,}"
    aim(f"{what}: wall time", 1.2, last.checkpoint_ms / first, at_least=False)
    aim(f"{what}: bytes", 1.01, last.bytes / plain[SIZES[0]].bytes, at_least=False)
    merged = _measure(folder, compact=True)
    heading(f"The same with merging: means over {BATCHES} checkpoints")
    rows = []
    for size, found in merged.items():
        ratio = f"{found.mean_bytes / plain[size].bytes:.1f}"
        mean = f"{found.mean_bytes:,.0f}"
        rows.append((f"{size:,}", mean, ratio, f"{found.mean_ms:.1f}", found.files))
    table(("keys", "bytes", "times the delta", "checkpoint ms", "files at the end"), rows)
    restores(folder / str(SIZES[-1]), SIZES[-1])


def _keys(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Spread numbers over all of int64, so that keys are as long in a small state as in a large."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mixed.view(np.int64)


def _build(folder: Path, size: int) -> None:
    run = Run(folder, compact=True)
    for start in range(0, size, 500_000):
        run.update(_keys(np.arange(start, min(size, start + 500_000))), 0)
        run.checkpoint()
        run.storage.retain(1)
        run.storage.sweep(10**9)
    run.subtask.close()


@dataclass(frozen=True, slots=True)
class Found:
    """Medians of one size of state, the first checkpoints left out; the means are over all."""

    checkpoint_ms: float
    cpu_ms: float
    advance_ms: float
    update_ms: float
    bytes: int
    mean_ms: float
    mean_bytes: float
    files: int


def _measure(folder: Path, *, compact: bool) -> dict[int, Found]:
    """Take checkpoints of all sizes in turn, in rotated order."""
    runs = {size: Run(folder / str(size), compact=compact) for size in SIZES}
    rng = np.random.default_rng(7)
    taken: dict[int, list[tuple[float, float, float, int, float]]] = {size: [] for size in SIZES}
    gc.collect()
    for number in range(BATCHES):
        shift = number % len(SIZES)
        for size in SIZES[shift:] + SIZES[:shift]:
            keys = _keys(rng.choice(size, CHANGED, replace=False))
            start = time.perf_counter()
            runs[size].update(keys, number)
            updated = time.perf_counter() - start
            taken[size].append((*runs[size].checkpoint(), updated))
    found = {size: _summary(runs[size], taken[size]) for size in SIZES}
    for run in runs.values():
        run.subtask.close()
    return found


def _summary(run: Run, taken: list[tuple[float, float, float, int, float]]) -> Found:
    # The first ones warm the caches up.
    seconds, cpu, advances, written, updates = zip(*taken[4:], strict=True)
    return Found(
        checkpoint_ms=statistics.median(seconds) * 1e3,
        cpu_ms=statistics.median(cpu) * 1e3,
        advance_ms=statistics.median(advances) * 1e3,
        update_ms=statistics.median(updates) * 1e3,
        bytes=int(statistics.median(written)),
        mean_ms=statistics.fmean(row[0] for row in taken) * 1e3,
        mean_bytes=statistics.fmean(row[3] for row in taken),
        files=0 if run.record is None else len(run.record.subtasks[0].keyed),
    )


def restores(folder: Path, size: int) -> None:
    heading(f"Restoring {size:,} keys: bytes read by each subtask, and seconds of the slowest")
    rows = []
    whole = 0
    for parallelism in (1, 4, 16):
        read, seconds = _restore(folder, parallelism)
        whole = whole or sum(read)
        share = max(read) / (whole / parallelism)
        rows.append((parallelism, f"{max(read):,}", f"{share:.3f}", f"{max(seconds):.2f}"))
        if parallelism > 1:
            what = f"bytes that one of {parallelism} subtasks reads in a restore, times total/n"
            aim(what, 1.1, share, at_least=False)
    table(("subtasks", "bytes a subtask (most)", "times total/n", "seconds"), rows)


def _restore(folder: Path, parallelism: int) -> tuple[list[int], list[float]]:
    read, seconds = [], []
    for index in range(parallelism):
        files = CountingFileSystem(open_file_system(folder / "state"))
        storage = CheckpointStorage("", file_system=files)
        record = storage.latest()
        files.read_bytes = 0
        config = SubtaskConfig(subtask_index=index, parallelism=parallelism, key_type=int)
        start = time.perf_counter()
        subtask = Subtask(storage, config, restored=record)
        subtask.keyed.get_state(VALUE)
        seconds.append(time.perf_counter() - start)
        read.append(files.read_bytes)
        subtask.close()
    return read, seconds
