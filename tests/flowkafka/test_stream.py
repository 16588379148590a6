"""What the stream reader answers to Spark, with a cluster that is a dict."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

from pyspark_flowkafka import DefaultSource, sampling, stream
from pyspark_flowkafka.errors import (
    DataLossError,
    KafkaSourceError,
    RestoreSourceError,
    UnknownTopicError,
)
from pyspark_flowkafka.offsets import EARLIEST, LATEST, TopicPartition
from pyspark_flowkafka.replies import RetriableClientError, Status, TopicMetadata
from pyspark_flowkafka.source import KafkaBatchReader, RangePartition, schema_of
from pyspark_flowkafka.stream import KafkaStreamReader

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
BASE = {
    "kafka.bootstrap.servers": "a:1",
    "subscribe": "t",
    "startingoffsets": "earliest",
    "fetchoffset.retryintervalms": "0",
}


class FakeCluster:
    """Logs as (begin, end); stands for the client of every module."""

    def __init__(self, **logs: tuple[int, int]) -> None:
        self.logs = {TopicPartition("t", int(name[1:])): log for name, log in logs.items()}
        self.group: dict[TopicPartition, int] = {}
        self.commits: list[dict[TopicPartition, int]] = []
        self.forgotten = 0
        self.failures = 0
        self.questions = 0
        self.names = ["t"]

    def topics(self, names: Iterable[str] | None) -> dict[str, Any]:
        self.questions += 1
        if names is None:
            return {
                one: TopicMetadata(Status.OK, one.startswith("__"), {0: 1}) for one in self.names
            }
        leaders = {one.partition: 1 for one in self.logs}
        status = Status.OK if leaders else Status.UNKNOWN
        return {"t": TopicMetadata(status, False, leaders)}

    def list_offsets(self, wanted: dict[TopicPartition, int]) -> dict[TopicPartition, Any]:
        if self.forgotten < self.failures:
            raise RetriableClientError("KafkaConnectionError")
        found = {}
        for one, kind in wanted.items():
            if one not in self.logs:
                found[one] = (Status.UNKNOWN, -1)
                continue
            begin, end = self.logs[one]
            # A record's time is its offset.
            offset = {EARLIEST: begin, LATEST: end}.get(kind, kind if kind < end else -1)
            found[one] = (Status.OK, offset)
        return found

    def forget_leader(self, one: TopicPartition) -> None: ...

    def forget_leaders(self) -> None:
        self.forgotten += 1

    def committed(self, group: str, partitions: Iterable[TopicPartition]) -> Any:
        return {one: self.group[one] for one in partitions if one in self.group}

    def commit(self, group: str, offsets: dict[TopicPartition, int]) -> None:
        self.commits.append(offsets)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster(p0=(0, 100), p1=(0, 50))
    monkeypatch.setattr("pyspark_flowkafka.connections.client_for", lambda _: fake)
    monkeypatch.setattr("pyspark_flowkafka.commits.client_for", lambda _: fake)
    return fake


def reader(**more: str) -> KafkaStreamReader:
    return KafkaStreamReader({**BASE, **more}, schema_of({}))


def ranges(parts: Any) -> list[tuple[int, int, int]]:
    assert all(isinstance(part, RangePartition) for part in parts)
    found = [part.range for part in parts]
    return [(one.topic_partition.partition, one.start, one.until) for one in found]


def test_a_query_begins_where_it_is_told_to(cluster: FakeCluster) -> None:
    cluster.logs[A] = (10, 100)
    cluster.group = {A: 70}

    assert reader().initialOffset() == {"t": {"0": 10, "1": 0}}
    assert reader(startingoffsets="latest").initialOffset() == {"t": {"0": 100, "1": 50}}
    specific = json.dumps({"t": {"0": 40, "1": -1}})
    assert reader(startingoffsets=specific).initialOffset() == {"t": {"0": 40, "1": 50}}
    assert reader(startingtimestamp="30").initialOffset() == {"t": {"0": 30, "1": 30}}
    group = {"kafka.group.id": "g", "startingoffsets": "committed"}
    assert reader(**group).initialOffset() == {"t": {"0": 70, "1": 0}}
    assert reader(**group, newPartitions="latest").initialOffset() == {"t": {"0": 70, "1": 50}}


def test_the_beginning_is_asked_for_once(cluster: FakeCluster) -> None:
    latest = reader(startingoffsets="latest")
    first = latest.initialOffset()
    cluster.logs[A] = (0, 999)

    assert latest.initialOffset() == first


def test_a_broker_that_does_not_answer_is_no_leader_any_more(cluster: FakeCluster) -> None:
    cluster.failures = 2

    assert reader(**{"kafka.retry.backoff.ms": "1"}).initialOffset() == {"t": {"0": 0, "1": 0}}
    assert cluster.forgotten == 2


def test_a_topic_that_is_not_there_is_an_error_at_the_beginning(cluster: FakeCluster) -> None:
    cluster.logs.clear()

    with pytest.raises(UnknownTopicError, match="there is no topic 't'"):
        reader().initialOffset()


def test_a_batch_goes_to_the_end_or_to_the_limit(cluster: FakeCluster) -> None:
    start = {"t": {"0": 0, "1": 0}}
    limited = reader(maxoffsetspertrigger="15")

    assert limited.getDefaultReadLimit() == ReadMaxRows(15)
    assert limited.latestOffset(start, ReadMaxRows(15)) == {"t": {"0": 10, "1": 5}}
    # A one-time trigger asks for everything, whatever the options say.
    assert limited.latestOffset(start, ReadAllAvailable()) == {"t": {"0": 100, "1": 50}}
    assert limited.reportLatestOffset() == {"t": {"0": 100, "1": 50}}
    assert reader().getDefaultReadLimit() == ReadAllAvailable()


def test_available_now_stays_with_what_was_there(cluster: FakeCluster) -> None:
    now = reader(maxoffsetspertrigger="30", minoffsetspertrigger="20")
    now.prepareForTriggerAvailableNow()
    first = now.latestOffset({"t": {"0": 0, "1": 0}}, ReadMaxRows(30))
    cluster.logs[A] = (0, 1000)
    offsets, seen = first, [first]
    while (offsets := now.latestOffset(offsets, ReadMaxRows(30))) != seen[-1]:
        seen.append(offsets)

    assert seen[-1] == {"t": {"0": 100, "1": 50}}


def test_a_batch_waits_for_the_least_number_of_records(cluster: FakeCluster) -> None:
    waiting = reader(minoffsetspertrigger="100", maxtriggerdelay="1h")
    first = waiting.latestOffset({"t": {"0": 0, "1": 0}}, ReadMinRows(100))
    cluster.logs[A] = (0, 150)

    assert first == {"t": {"0": 100, "1": 50}}
    assert waiting.latestOffset(first, ReadMinRows(100)) == first
    cluster.logs[A] = (0, 200)
    assert waiting.latestOffset(first, ReadMinRows(100)) == {"t": {"0": 200, "1": 50}}


def test_nothing_beyond_the_ending_offsets_is_offered(cluster: FakeCluster) -> None:
    ends = reader(endingoffsets=json.dumps({"t": {"0": 60, "1": -1}}))
    start = {"t": {"0": 0, "1": 0}}

    assert ends.latestOffset(start, ReadAllAvailable()) == {"t": {"0": 60, "1": 50}}
    cluster.logs[B] = (0, 80)
    # The latest offset is what it was when the query began.
    assert ends.latestOffset(start, ReadAllAvailable()) == {"t": {"0": 60, "1": 50}}


def test_an_end_may_lie_ahead_of_the_log(cluster: FakeCluster) -> None:
    ends = reader(endingoffsets=json.dumps({"t": {"0": 130, "1": 20}}))
    start = ends.initialOffset()

    assert ends.latestOffset(start, ReadAllAvailable()) == {"t": {"0": 100, "1": 20}}
    cluster.logs[A] = (0, 200)
    assert ends.latestOffset(start, ReadAllAvailable()) == {"t": {"0": 130, "1": 20}}
    # What was read long ago may age out of the log.
    cluster.logs = {A: (150, 200), B: (60, 70)}
    again = reader(endingoffsets=json.dumps({"t": {"0": 130, "1": 20}}))
    end = {"t": {"0": 130, "1": 20}}
    assert again.latestOffset(end, ReadAllAvailable()) == end


def test_an_end_names_all_partitions_that_there_are_when_the_query_begins(
    cluster: FakeCluster,
) -> None:
    ends = {"endingoffsets": json.dumps({"t": {"0": 60}})}
    new = reader(**ends)
    start = new.initialOffset()

    with pytest.raises(KafkaSourceError, match="must name all partitions"):
        new.latestOffset(start, ReadAllAvailable())
    # One that was added since is not begun.
    assert reader(**ends).latestOffset({"t": {"0": 5}}, ReadAllAvailable()) == {"t": {"0": 60}}


def test_a_time_that_has_not_come_is_no_end_yet(cluster: FakeCluster) -> None:
    ends = reader(endingtimestamp="70")
    start = {"t": {"0": 0, "1": 0}}

    assert ends.latestOffset(start, ReadAllAvailable()) == {"t": {"0": 70, "1": 50}}
    cluster.logs[B] = (0, 60)
    assert ends.latestOffset(start, ReadAllAvailable()) == {"t": {"0": 70, "1": 60}}
    cluster.logs[B] = (0, 90)
    assert ends.latestOffset(start, ReadAllAvailable()) == {"t": {"0": 70, "1": 70}}
    each = reader(endingoffsetsbytimestamp=json.dumps({"t": {"0": 70, "1": 95}}))
    assert each.latestOffset(start, ReadAllAvailable()) == {"t": {"0": 70, "1": 90}}


@pytest.mark.parametrize(
    ("more", "first"),
    [
        ({"startingoffsets": "latest"}, {"0": 100, "1": 50}),
        ({"startingoffsets": '{"t": {"0": 5, "1": -1}}'}, {"0": 130, "1": 50}),
        (
            {"startingtimestamp": "60", "startingoffsetsbytimestampstrategy": "latest"},
            {"0": 130, "1": 50},
        ),
        (
            {"startingoffsets": '{"t": {"0": 5, "1": 70}}', "failondataloss": "false"},
            {"0": 130, "1": 50},
        ),
    ],
    ids=["latest", "offsets", "times", "beyond"],
)
def test_a_first_batch_that_is_planned_again_reads_the_same(
    cluster: FakeCluster, more: dict[str, str], first: dict[str, int]
) -> None:
    before = reader(**more)
    start = before.initialOffset()
    cluster.logs = {A: (0, 130), B: (0, 60)}
    end = before.latestOffset(start, ReadAllAvailable())
    planned = ranges(before.partitions(start, end))
    # The driver is killed, and goes on when more was written and a partition was added.
    cluster.logs = {A: (0, 500), B: (0, 500)}
    if not more.get("startingoffsets", "").startswith("{"):
        cluster.logs[TopicPartition("t", 2)] = (0, 7)
    after = reader(**more)
    replayed = ranges(after.partitions(after.initialOffset(), end))

    assert end == {"t": first}
    assert replayed == planned
    goes_on = {"t": {str(one.partition): end for one, (_, end) in cluster.logs.items()}}
    assert before.latestOffset(end, ReadAllAvailable()) == goes_on
    assert after.latestOffset(end, ReadAllAvailable()) == goes_on


def test_a_limit_in_bytes_uses_the_measured_size(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pyspark_flowkafka.sampling.bytes_per_offset", lambda *_: {A: 10.0, B: 10.0}
    )
    limited = reader(maxbytespertrigger="150")

    start = {"t": {"0": 0, "1": 0}}
    assert limited.latestOffset(start, limited.getDefaultReadLimit()) == {"t": {"0": 10, "1": 5}}
    assert sampling.SAMPLE_BYTES == 64 << 10


def test_a_batch_query_that_ends_before_it_begins_is_an_error(cluster: FakeCluster) -> None:
    given = {name: value for name, value in BASE.items() if name != "startingoffsets"}
    times = {"startingtimestamp": "40", "endingtimestamp": "20"}

    with pytest.raises(KafkaSourceError, match="begins t-0 at 40, behind its end 20"):
        KafkaBatchReader({**given, **times}, schema_of({})).partitions()
    times["endingtimestamp"] = "45"
    parts = KafkaBatchReader({**given, **times}, schema_of({})).partitions()
    assert ranges(parts) == [(0, 40, 45), (1, 40, 45)]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"startingoffsets": "earliest"}, [True, True]),
        ({"startingoffsets": '{"t": {"0": -2, "1": 3}}'}, [True, False]),
        ({"startingoffsets": '{"t": {"0": 1, "1": 3}}'}, [False, False]),
        ({"startingtimestamp": "3"}, [False, False]),
    ],
)
def test_only_the_earliest_record_of_a_batch_query_may_be_another_one(
    cluster: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, str],
    expected: list[bool],
) -> None:
    seen: list[bool] = []

    def read_range(options: object, one: object, *, may_begin_later: bool) -> Iterator[Any]:
        seen.append(may_begin_later)
        return iter(())

    monkeypatch.setattr("pyspark_flowkafka.fetching.read_range", read_range)
    batch = KafkaBatchReader({**BASE, **more}, schema_of({}))
    for part in batch.partitions():
        assert list(batch.read(part)) == []

    assert seen == expected


def test_ranges_are_those_of_the_offsets(cluster: FakeCluster) -> None:
    parts = reader().partitions({"t": {"0": 5, "1": 50}}, {"t": {"0": 9, "1": 50}})

    assert ranges(parts) == [(0, 5, 9)]
    (part,) = parts
    assert ranges([pickle.loads(pickle.dumps(part))]) == [(0, 5, 9)]


def test_a_new_partition_begins_at_the_beginning_or_the_end(cluster: FakeCluster) -> None:
    start, end = {"t": {"0": 5}}, {"t": {"0": 5, "1": 30}}

    assert ranges(reader().partitions(start, end)) == [(1, 0, 30)]
    assert ranges(reader(newpartitions="latest").partitions(start, end)) == []
    cluster.logs[B] = (7, 50)
    with pytest.raises(DataLossError, match="t-1 begins at 7, not at 0"):
        reader().partitions(start, end)
    assert ranges(reader(failondataloss="false").partitions(start, end)) == [(1, 7, 30)]


def test_a_partition_that_is_gone_is_a_loss(cluster: FakeCluster) -> None:
    del cluster.logs[B]
    start = {"t": {"0": 5, "1": 5}}
    end = reader().latestOffset(start, ReadAllAvailable())

    assert end == {"t": {"0": 100}}
    with pytest.raises(DataLossError, match="t-1 are gone"):
        reader().partitions(start, end)
    assert ranges(reader(failondataloss="false").partitions(start, end)) == [(0, 5, 100)]


def test_a_deleted_topic_does_not_slow_the_others_down(cluster: FakeCluster) -> None:
    cluster.logs.clear()
    going_on = reader(failondataloss="false")

    assert going_on.latestOffset({}, ReadAllAvailable()) == {}
    assert cluster.questions == 1


def test_a_pattern_may_match_any_part_of_a_name(cluster: FakeCluster) -> None:
    given = {name: value for name, value in BASE.items() if name != "subscribe"}
    cluster.names = ["orders", "all-orders-eu", "other", "__orders"]
    found = {}
    for pattern in ("orders", "^orders$"):
        matched = KafkaStreamReader({**given, "subscribepattern": pattern}, schema_of({}))
        found[pattern] = set(matched._catalog._found(cluster, must_exist=True))  # type: ignore[arg-type]

    assert found == {"orders": {"orders", "all-orders-eu"}, "^orders$": {"orders"}}


def test_a_topic_that_was_created_anew_is_a_loss(cluster: FakeCluster) -> None:
    cluster.logs[A] = (0, 3)
    start = {"t": {"0": 100, "1": 50}}
    end = reader().latestOffset(start, ReadAllAvailable())

    assert end == {"t": {"0": 3, "1": 50}}
    with pytest.raises(DataLossError, match="went back from 100 to 3"):
        reader().partitions(start, end)
    assert ranges(reader(failondataloss="false").partitions(start, end)) == []


def test_offsets_are_committed_only_if_asked_for(cluster: FakeCluster) -> None:
    reader().commit({"t": {"0": 5}})
    reader(commitoffsets="true", **{"kafka.group.id": "g"}).commit({"t": {"0": 6}})

    assert cluster.commits == [{A: 6}]


def test_lag_is_reported_for_each_partition(cluster: FakeCluster) -> None:
    lagging = reader(reportlag="true")
    lagging.latestOffset({"t": {"0": 60, "1": 50}}, ReadAllAvailable())
    report = lagging.reportLatestOffset()

    assert report is not None
    assert report[stream.LAG_KEY] == {"t": {"0": 40, "1": 0}}
    assert report["t"] == {"0": 100, "1": 50}


def test_the_source_is_found_by_its_name() -> None:
    assert DefaultSource.name() == "flowkafka"
    assert len(DefaultSource({}).schema()) == 7
    assert DefaultSource({"includeheaders": "true"}).schema().names[-1] == "headers"
    assert len(DefaultSource({}).schema()) == 7


# Restoring


def checkpoint(folder: Path, lines: list[str], *, committed: bool = True) -> str:
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "offsets" / "3").write_text("\n".join(["v1", "{}", *lines]))
    (folder / "offsets" / "4").write_text('v1\n{}\n{"t":{"0":99,"1":49}}')
    if committed:
        (folder / "commits" / "2").write_text("v1\n{}")
        (folder / "commits" / "3").write_text("v1\n{}")
    return str(folder)


def test_a_query_goes_on_behind_the_last_finished_batch(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    where = checkpoint(tmp_path, ['{"other":{"0":1}}', '{"t":{"0":33}}', "-"])

    # Partition 1 came later, and begins at its beginning.
    assert reader(restorefrom=where).initialOffset() == {"t": {"0": 33, "1": 0}}


@pytest.mark.parametrize(
    ("lines", "committed", "message"),
    [
        (['{"t":{"0":1}}'], False, "no folder 'commits' with a finished batch"),
        (['{"other":{"0":1}}'], True, "0 have topics of this query"),
        (['{"t":{"0":1}}', '{"t":{"0":2}}'], True, "2 have topics of this query"),
    ],
)
def test_a_checkpoint_without_offsets_is_an_error(
    cluster: FakeCluster, tmp_path: Path, lines: list[str], committed: bool, message: str
) -> None:
    where = checkpoint(tmp_path, lines, committed=committed)

    with pytest.raises(RestoreSourceError, match=message):
        reader(restorefrom=where).initialOffset()


def test_restored_offsets_outside_of_the_log_are_a_loss(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    file = tmp_path / "offsets.json"
    file.write_text('{"t": {"0": 500, "1": 5}}')

    with pytest.raises(DataLossError, match="offset 500 of t-0 is outside of the log"):
        reader(restorefrom=str(file)).initialOffset()
    moved = reader(restorefrom=str(file), failondataloss="false").initialOffset()
    assert moved == {"t": {"0": 100, "1": 5}}


@pytest.mark.parametrize("content", ["{", "[]", '{"t": {"0": -1}}'])
def test_a_file_without_offsets_is_an_error(
    cluster: FakeCluster, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "offsets.json"
    file.write_text(content)

    with pytest.raises(RestoreSourceError, match=r"offsets\.json"):
        reader(restorefrom=str(file)).initialOffset()
    with pytest.raises(RestoreSourceError):
        reader(restorefrom=str(tmp_path / "absent.json")).initialOffset()
