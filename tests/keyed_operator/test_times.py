"""Watermarks, timers and ticks: what time it is, also after a crash at another parallelism."""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from flowspark.keyed.ticks import TickReader, register
from flowspark.keyed.watermarks import (
    WatermarkTracker,
    bounded_out_of_orderness,
    timestamps_ms,
)
from flowstate import KeyedProcessFunction
from flowstate.rows import NO_TIMESTAMP

from .harness import Query, row_factory

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def at(ms: float) -> dt.datetime:
    return EPOCH + dt.timedelta(milliseconds=ms)


class Alarm(KeyedProcessFunction[str, Any, Any]):
    """Sets a timer for 5 ms after each row's timestamp, and tells when it fires."""

    def process_element(self, row: Any, ctx: Any) -> Any:
        ctx.timer_service.register_event_time_timer(ctx.timestamp + 5)
        return [(row.word, f"row {ctx.timer_service.current_watermark()}")]

    def on_timer(self, timestamp: int, ctx: Any) -> Any:
        return [(ctx.current_key, f"timer {timestamp}")]


def timed(folder: Path, **arguments: Any) -> Query:
    strategy = bounded_out_of_orderness("at", "0 ms", **arguments)
    return Query(
        folder=folder,
        factory=row_factory(Alarm(), timestamp_column="at"),
        schema="word string, topic string, at timestamp",
        watermark=strategy,
    )


def texts(found: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((row["word"], row["text"]) for row in found)


def test_event_timers_fire_once_in_the_batch_that_brings_the_time_on_every_subtask(
    tmp_path: Path,
) -> None:
    query = timed(tmp_path)
    words = [f"w{number}" for number in range(6)]
    query.batch(0, [(word, "t", at(10)) for word in words])
    # The batch runs, and Spark dies before it is committed; then at another parallelism.
    for run in (query, query.restarted(parallelism=3)):
        found = texts(run.batch(1, [("w0", "t", at(16))]))

        assert {one for one in found if "timer" in one[1]} == {(w, "timer 15") for w in words}
        assert set(found.values()) == {1}
    last = run.restarted(parallelism=1)
    found = texts(last.batch(2, [("w1", "t", at(12))]))
    # The watermark is where it was, and no timer fires again.
    assert found == Counter({("w1", "row 15"): 1})
    found = texts(last.batch(3, [("w1", "t", at(30))]))
    assert found == Counter({("w1", "row 15"): 1, ("w1", "timer 17"): 1, ("w0", "timer 21"): 1})


@pytest.mark.parametrize("sources", [1, 2])
def test_the_slowest_input_holds_the_watermark(tmp_path: Path, sources: int) -> None:
    query = timed(tmp_path, by=["topic"])
    query.batch(0, [("a", "fast", at(100)), ("a", "slow", at(3))], sources=sources)
    found = texts(query.batch(1, [("b", "fast", at(200))], sources=sources))

    assert found == Counter({("b", "row 2"): 1})
    found = texts(query.restarted(parallelism=3).batch(2, [("c", "slow", at(300))]))
    assert found == Counter({("c", "row 2"): 1, ("a", "timer 8"): 1, ("a", "timer 105"): 1})


@pytest.mark.parametrize("name", ["stamp", "stamp_max", "0"])
def test_the_column_that_tells_inputs_apart_may_have_any_name(tmp_path: Path, name: str) -> None:
    query = dataclasses.replace(
        timed(tmp_path, by=[name]), schema=f"word string, {name} string, at timestamp"
    )
    query.batch(0, [("a", "fast", at(100)), ("a", "slow", at(3))])

    assert texts(query.batch(1, [("b", "fast", at(200))])) == Counter({("b", "row 2"): 1})


def test_timestamps_before_1970_are_rounded_down() -> None:
    micros = [-1, -1000, -1001, 0, 999, None, 1_000_001]

    found = timestamps_ms(pa.array(micros, pa.timestamp("us", "UTC"))).to_pylist()
    assert found == [-1, -1, -2, 0, 0, None, 1000]


def test_timers_before_1970_fire(tmp_path: Path) -> None:
    query = timed(tmp_path)
    query.batch(0, [("a", "t", at(-5000))])

    found = texts(query.batch(1, [("b", "t", at(-4000))]))
    assert found == Counter({("b", "row -5001"): 1, ("a", "timer -4995"): 1})


def test_a_watermark_never_goes_back_and_idle_inputs_do_not_hold_it() -> None:
    strategy = bounded_out_of_orderness("at", "10 ms", idle="1 second")
    tracker = WatermarkTracker(strategy, [])
    assert tracker.advance(0) == NO_TIMESTAMP
    tracker.observe({"a": 100, "b": 50}, 0)
    assert tracker.advance(0) == 39
    tracker.observe({"a": 90}, 999)
    assert tracker.advance(999) == 39
    assert tracker.advance(1000) == 89
    # The other one is back, and behind.
    tracker.observe({"b": 60}, 1001)
    assert tracker.advance(1001) == 89
    # With nothing active, time stands still.
    assert tracker.advance(10_000) == 89

    again = WatermarkTracker(strategy, [{}, tracker.attributes(), {"watermark": 7, "inputs": {}}])
    assert again.attributes() == tracker.attributes()
    again.observe({"b": 500}, 10_000)
    assert again.advance(10_000) == 489


def test_a_subtask_of_a_new_query_takes_the_time_but_not_the_inputs(tmp_path: Path) -> None:
    query = timed(tmp_path, by=["topic"])
    query.batch(0, [("a", "old", at(100))])
    query.seal(1)
    settings = {"restore_from": str(tmp_path / "state" / "query")}
    following = query.restarted(query_id="next", settings=settings)

    assert ("a", "row 99") in texts(following.batch(0, [("a", "new", at(200))]))
    assert ("a", "timer 205") in texts(following.batch(1, [("a", "new", at(900))]))


# Ticks.


@pytest.fixture
def now_ms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found = [1_000_000]
    monkeypatch.setattr(time, "time_ns", lambda: found[0] * 1_000_000)
    return found


def test_ticks_give_every_subtask_a_row_for_each_interval(now_ms: list[int]) -> None:
    reader = TickReader(interval_ms=500, parallelism=3)
    first = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    (partition,) = reader.partitions({"tick": 0}, first)
    (batch,) = reader.read(partition)
    assert batch.to_pydict() == {"subtask": [0, 1, 2]}
    assert first == {"tick": 1_000_000}

    now_ms[0] += 499
    assert reader.latestOffset(first, ReadAllAvailable()) == first
    assert reader.partitions(first, first) == []
    now_ms[0] += 1
    assert reader.latestOffset(first, ReadAllAvailable()) == {"tick": 1_000_500}
    # A clock that is set back does not set the offset back.
    now_ms[0] -= 100_000
    assert reader.latestOffset({"tick": 1_000_500}, ReadAllAvailable()) == {"tick": 1_000_500}


@pytest.mark.parametrize(("before_ms", "after_ms"), [(100, 1000), (1000, 100), (1, 60_000)])
def test_ticks_go_on_when_the_interval_has_become_another(
    now_ms: list[int], before_ms: int, after_ms: int
) -> None:
    old = TickReader(interval_ms=before_ms, parallelism=2)
    end = old.latestOffset(old.initialOffset(), ReadAllAvailable())
    now_ms[0] += after_ms
    new = TickReader(interval_ms=after_ms, parallelism=2)

    assert new.partitions(end, new.latestOffset(end, ReadAllAvailable()))


def test_every_session_is_told_of_the_source_once() -> None:
    class Session:
        """The next one may be at the same place in memory."""

        def __init__(self) -> None:
            self.dataSource, self.told = self, 0

        def register(self, source: type) -> None:
            self.told += 1

    for _ in range(20):
        session: Any = Session()
        register(session)
        register(session)

        assert session.told == 1
        session.dataSource = None


def test_ticks_end_when_everything_available_is_to_be_read(now_ms: list[int]) -> None:
    reader = TickReader(interval_ms=500, parallelism=3)
    reader.prepareForTriggerAvailableNow()
    now_ms[0] += 5000

    assert reader.latestOffset({"tick": 500}, ReadAllAvailable()) == {"tick": 1_000_000}
    assert reader.latestOffset({"tick": 1_000_000}, ReadAllAvailable()) == {"tick": 1_000_000}
