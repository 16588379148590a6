"""Functions of tests and jobs: importable by Spark's Python workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from flowspark import ArrowContext, ArrowKeyedFunction, BulkStates
from flowstate import (
    AggregatingStateDescriptor,
    CheckpointedFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    Reducer,
    ValueStateDescriptor,
)

COUNT = ValueStateDescriptor("wordCountState", int, default=0)
COUNTED = "word string, n long"
RARE = OutputTag("rare `ones`")


class WordCount(KeyedProcessFunction[str, Any, tuple[str, int]]):
    """The word count of the guide."""

    def open(self, ctx: Any) -> None:
        self.count = ctx.get_state(COUNT)

    def process_element(self, value: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        n = (self.count.value() or 0) + 1
        self.count.update(n)
        yield value.word, n


class RenamedCount(WordCount):
    """Does not know the state of the word count any more."""

    def open(self, ctx: Any) -> None:
        self.count = ctx.get_state(ValueStateDescriptor("other", int, default=0))


class CountsQuietly(WordCount):
    """Emits nothing."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        list(super().process_element(value, ctx))
        return iter(())


class FirstSeen(WordCount):
    """Sends the first row of each key to a side output as well."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        for word, n in super().process_element(value, ctx):
            if n == 1:
                ctx.output(RARE, (word,))
            yield word, n


class FailsOn(WordCount):
    """Raises at one key."""

    def __init__(self, word: str) -> None:
        self.word = word

    def process_element(self, value: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        if value.word == self.word:
            raise ZeroDivisionError("this word is one too many")
        return super().process_element(value, ctx)


class KillsItsWorkerOnce(WordCount):
    """Ends its Python worker in the middle of the batch, the first time."""

    def __init__(self, marker: Path, word: str) -> None:
        self.marker, self.word = marker, word

    def process_element(self, value: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        if value.word == self.word and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().process_element(value, ctx)


class WaitsForAnotherAttempt(WordCount):
    """At a word, the first time, waits until another attempt of the task is through with it."""

    def __init__(self, folder: Path, word: str) -> None:
        self.folder, self.word = folder, word
        self.is_second = False

    def process_element(self, value: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        if value.word == self.word:
            try:
                (self.folder / "first").touch(exist_ok=False)
            except FileExistsError:
                self.is_second = True
            else:
                self._wait()
        return super().process_element(value, ctx)

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while not (self.folder / "second").exists():
            if time.monotonic() > deadline:
                (self.folder / "alone").touch()
                return
            time.sleep(0.05)

    def close(self) -> None:
        if self.is_second:
            (self.folder / "second").touch()


class Returns(KeyedProcessFunction[Any, Any, Any]):
    """Emits whatever it was made with."""

    def __init__(self, emitted: Any) -> None:
        self.emitted = emitted

    def process_element(self, value: Any, ctx: Any) -> Any:
        return self.emitted


class LastRow(KeyedProcessFunction[Any, Any, Any]):
    """Emits the row before the current one, out of state, with every type that there is."""

    def __init__(self, row_type: pa.DataType) -> None:
        self.row_type = row_type

    def open(self, ctx: Any) -> None:
        self.last = ctx.get_state(ValueStateDescriptor("last", self.row_type))

    def process_element(self, value: Any, ctx: Any) -> Iterable[tuple[Any, ...]]:
        before = self.last.value()
        self.last.update(tuple(value))
        return [tuple(before.values())] if before is not None else []


class Timeout(KeyedProcessFunction[str, Any, tuple[str, int]]):
    """Emits a key with its count when nothing has come for it for a while of processing time."""

    def __init__(self, gap_ms: int) -> None:
        self.gap_ms = gap_ms

    def open(self, ctx: Any) -> None:
        self.count = ctx.get_state(COUNT)

    def process_element(self, value: Any, ctx: Any) -> None:
        self.count.update((self.count.value() or 0) + 1)
        service = ctx.timer_service
        service.register_processing_time_timer(service.current_processing_time() + self.gap_ms)

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[tuple[str, int]]:
        n = self.count.value()
        if n:
            self.count.clear()
            yield ctx.current_key, n


class Window(KeyedProcessFunction[str, Any, tuple[str, int, int]]):
    """Counts per key and ten seconds of event time; emits when the watermark passes the end."""

    def open(self, ctx: Any) -> None:
        self.counts = ctx.get_map_state(MapStateDescriptor("counts", int, int))

    def process_element(self, value: Any, ctx: Any) -> None:
        end = ctx.timestamp - ctx.timestamp % 10_000 + 10_000
        self.counts.put(end, (self.counts.get(end) or 0) + 1)
        ctx.timer_service.register_event_time_timer(end - 1)

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[tuple[str, int, int]]:
        n = self.counts.get(timestamp + 1)
        if n is not None:
            self.counts.remove(timestamp + 1)
            yield ctx.current_key, timestamp + 1, n


class CountsRows(WordCount, CheckpointedFunction):
    """Keeps, as operator list state, how many rows each subtask has seen."""

    def initialize_state(self, ctx: Any) -> None:
        store = ctx.operator_state_store
        self.seen_state = store.get_list_state(ListStateDescriptor("seen", int))
        self.seen = sum(self.seen_state.get())

    def process_element(self, value: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        self.seen += 1
        return super().process_element(value, ctx)

    def snapshot_state(self, ctx: Any) -> None:
        self.seen_state.update([self.seen])


class ArrowCount(ArrowKeyedFunction):
    """The word count on columns: one row for each key of a piece of a batch."""

    def open(self, ctx: Any) -> None:
        ctx.get_aggregating_state(AggregatingStateDescriptor("n", Reducer.COUNT, int))

    def process_batch(
        self, batch: pa.RecordBatch, state: BulkStates, ctx: ArrowContext
    ) -> pa.RecordBatch:
        distinct = state["n"].add(ctx.keys, pa.repeat(pa.scalar(1, pa.int64()), len(ctx.keys)))
        columns = [*ctx.key_arrays(distinct), state["n"].results(distinct)]
        return pa.RecordBatch.from_arrays(columns, names=["word", "n"])
