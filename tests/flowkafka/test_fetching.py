"""Reading a range from a leader that moves, lags, loses data, or sends nonsense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyspark_flowkafka import connections, fetching
from pyspark_flowkafka.errors import (
    AuthorizationError,
    BadRecordError,
    DataLossError,
    KafkaSourceError,
    UnavailableError,
)
from pyspark_flowkafka.offsets import EARLIEST, EARLIEST_LOCAL, LATEST, OffsetRange, TopicPartition
from pyspark_flowkafka.options import SourceOptions, parse
from pyspark_flowkafka.replies import FetchReply, RetriableClientError, Status

from .record_sets import Record, built

WHERE = TopicPartition("t", 0)
QUICK = {
    "kafka.bootstrap.servers": "a:1",
    "subscribe": "t",
    "kafka.retry.backoff.ms": "1",
    "kafka.retry.backoff.max.ms": "1",
    "fetchOffset.retryIntervalMs": "0",
}
# For those that are to give up.
IMPATIENT: dict[str, Any] = {"kafkaConsumer.pollTimeoutMs": "60"}


def batch(first: int, last: int) -> bytes:
    return built([Record(b"k", b"%d" % n) for n in range(first, last + 1)], base_offset=first)


def good(data: bytes, *, log_end: int = 1000) -> FetchReply:
    return FetchReply(Status.OK, data=data, log_start=0, log_end=log_end)


class FakeClient:
    """Answers fetches by a function of the offset, the size and the number of the fetch."""

    def __init__(self, answer: Callable[[int, int, int], FetchReply]) -> None:
        self.answer = answer
        self.asked: list[tuple[int, int]] = []
        self.forgotten = 0
        self.range = (0, 1000)
        self.local_start = 0

    def fetch(self, where: TopicPartition, offset: int, size: int) -> Any:
        self.asked.append((offset, size))
        return offset, size, len(self.asked)

    def fetched(self, sent: tuple[int, int, int]) -> FetchReply:
        return self.answer(*sent)

    def forget_leader(self, where: TopicPartition) -> None:
        self.forgotten += 1

    def list_offsets(self, wanted: dict[TopicPartition, int]) -> Any:
        known = {EARLIEST: self.range[0], LATEST: self.range[1], EARLIEST_LOCAL: self.local_start}
        return {one: (Status.OK, known[kind]) for one, kind in wanted.items()}


def options(**more: str) -> SourceOptions:
    return parse({**QUICK, **more}, is_stream=True)


def read(
    monkeypatch: pytest.MonkeyPatch,
    client: FakeClient,
    *,
    start: int = 0,
    until: int = 10,
    **more: Any,
) -> list[int]:
    monkeypatch.setattr(fetching, "client_for", lambda _: client)
    batches = fetching.read_range(options(**more), OffsetRange(WHERE, start, until))
    return [offset for one in batches for offset in one.column("offset").to_pylist()]


def from_log(*batches: tuple[int, int]) -> Callable[[int, int, int], FetchReply]:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        return good(b"".join(batch(a, b) for a, b in batches if b >= offset))

    return answer


def test_a_range_is_read_to_its_end_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(from_log((0, 3), (4, 12)))

    assert read(monkeypatch, client, start=2, until=10) == list(range(2, 10))
    assert [offset for offset, _ in client.asked] == [2]


def test_gaps_of_compaction_are_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(from_log((0, 1), (5, 6), (90, 91)))

    assert read(monkeypatch, client, until=50) == [0, 1, 5, 6]


def test_reading_goes_on_behind_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    log = {0: (0, 3), 4: (4, 5), 6: (6, 20)}
    client = FakeClient(lambda offset, size, number: good(batch(*log[offset])))

    assert read(monkeypatch, client) == list(range(10))
    assert [offset for offset, _ in client.asked] == [0, 4, 6]


def test_a_moved_leader_is_looked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        if number <= 2:
            return FetchReply(Status.RETRY, "NotLeaderForPartitionError")
        if number == 3:
            raise RetriableClientError("KafkaConnectionError")
        return good(batch(0, 9))

    client = FakeClient(answer)

    assert read(monkeypatch, client) == list(range(10))
    assert client.forgotten == 3


def test_a_fetch_ahead_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        if number == 2:
            raise RetriableClientError("KafkaConnectionError")
        return good(batch(offset, offset + 4))

    assert read(monkeypatch, FakeClient(answer)) == list(range(10))


def test_a_leader_that_never_comes_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(lambda *_: FetchReply(Status.RETRY, "NotLeaderForPartitionError"))

    with pytest.raises(UnavailableError, match="reading t-0 at offset 0 failed for 60 ms"):
        read(monkeypatch, client, **IMPATIENT)
    assert len(client.asked) < 100


def test_progress_begins_the_time_limit_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        if number % 2:
            return FetchReply(Status.RETRY, "x")
        return good(batch(offset, offset))

    assert read(monkeypatch, FakeClient(answer), until=40) == list(range(40))


def test_the_time_that_the_query_takes_for_its_records_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        if number % 2:
            return FetchReply(Status.RETRY, "x")
        return good(batch(offset, offset + 4))

    client = FakeClient(answer)
    monkeypatch.setattr(fetching, "client_for", lambda _: client)
    clock = ManualTime()
    monkeypatch.setattr(connections, "time", clock)
    found = []
    for one in fetching.read_range(options(), OffsetRange(WHERE, 0, 10)):
        found += one.column("offset").to_pylist()
        clock.now += 3600

    assert found == list(range(10))


class ManualTime:
    """Stands for the module ``time``; pauses pass at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_offsets_that_aged_out_fail_or_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        return FetchReply(Status.OUT_OF_RANGE) if offset < 5 else good(batch(5, 9))

    client = FakeClient(answer)
    client.range = (5, 10)

    with pytest.raises(DataLossError, match="offset 0 of t-0 is not in the log, which has 5 to 10"):
        read(monkeypatch, client)
    assert read(monkeypatch, client, failOnDataLoss="false") == [5, 6, 7, 8, 9]


def test_the_earliest_record_of_a_batch_query_may_have_aged_out_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        gone_before = 5 if number <= 2 else 8
        if offset < gone_before:
            return FetchReply(Status.OUT_OF_RANGE)
        return good(batch(offset, offset))

    client = FakeClient(answer)
    client.range = (5, 10)
    monkeypatch.setattr(fetching, "client_for", lambda _: client)
    found = fetching.read_range(options(), OffsetRange(WHERE, 0, 10), may_begin_later=True)

    assert next(found).column("offset").to_pylist() == [5]
    client.range = (8, 10)
    # What ages out while it is read is lost, as ever.
    with pytest.raises(DataLossError, match="offset 6 of t-0 is not in the log"):
        next(found)


def test_a_log_that_became_shorter_fails_or_ends_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        return good(batch(0, 4) if offset < 5 else b"", log_end=5)

    with pytest.raises(DataLossError, match="t-0 ends at 5, before 10"):
        read(monkeypatch, FakeClient(answer), **IMPATIENT)
    found = read(monkeypatch, FakeClient(answer), failOnDataLoss="false", **IMPATIENT)
    assert found == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_new_leader_that_does_not_know_the_end_yet_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, fail: str
) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        if offset < 5:
            return good(batch(0, 4), log_end=5)
        return good(batch(5, 9)) if number > 20 else good(b"", log_end=5)

    found = read(monkeypatch, FakeClient(answer), failOnDataLoss=fail)
    assert found == list(range(10))


def test_an_offset_beyond_the_log_fails_or_ends_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(lambda *_: FetchReply(Status.OUT_OF_RANGE))
    client.range = (0, 3)

    with pytest.raises(DataLossError, match="not in the log"):
        read(monkeypatch, client, start=7)
    assert read(monkeypatch, client, start=7, failOnDataLoss="false") == []


def test_a_deleted_topic_fails_or_ends_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(lambda *_: FetchReply(Status.UNKNOWN))

    with pytest.raises(DataLossError, match="t-0 is gone before offset 10 was read"):
        read(monkeypatch, client)
    assert read(monkeypatch, client, failOnDataLoss="false") == []


def test_a_broker_that_just_started_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        return FetchReply(Status.UNKNOWN) if number < 3 else good(batch(0, 9))

    assert read(monkeypatch, FakeClient(answer)) == list(range(10))


def test_what_is_denied_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = FakeClient(lambda *_: FetchReply(Status.DENIED, "TopicAuthorizationFailedError"))
    failed = FakeClient(lambda *_: FetchReply(Status.FAILED, "UnknownError"))

    with pytest.raises(AuthorizationError, match="t-0 may not be read"):
        read(monkeypatch, denied)
    with pytest.raises(KafkaSourceError, match="UnknownError"):
        read(monkeypatch, failed)


def test_an_empty_answer_below_the_end_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        return good(b"") if number < 3 else good(batch(0, 9))

    assert read(monkeypatch, FakeClient(answer)) == list(range(10))


def test_a_throttled_answer_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        if number < 9:
            return FetchReply(Status.OK, log_start=0, log_end=99, is_throttled=True)
        return good(batch(0, 9))

    assert read(monkeypatch, FakeClient(answer)) == list(range(10))


def test_a_broker_that_throttles_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    throttled = FetchReply(Status.OK, log_start=0, log_end=99, is_throttled=True)

    with pytest.raises(UnavailableError, match="throttles"):
        read(monkeypatch, FakeClient(lambda *_: throttled), **IMPATIENT)


def test_a_tail_that_was_compacted_away_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        return good(batch(0, 4)) if offset < 5 else good(b"", log_end=10)

    assert read(monkeypatch, FakeClient(answer)) == [0, 1, 2, 3, 4]


def test_remote_storage_that_is_too_slow_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        return good(b"") if number < 15 else good(batch(0, 9))

    client = FakeClient(answer)
    client.local_start = 100

    assert read(monkeypatch, client) == list(range(10))


def test_a_batch_larger_than_the_fetch_is_asked_for_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = batch(0, 9)
    client = FakeClient(lambda offset, size, number: good(whole[:size]))

    small: dict[str, Any] = {"kafka.max.partition.fetch.bytes": "50"}
    found = read(monkeypatch, client, **small)

    assert found == list(range(10))
    assert [size for _, size in client.asked] == [50, len(whole)]


# Damage


def damaged(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_damage_on_the_way_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        return good(damaged(batch(0, 9)) if number == 1 else batch(0, 9))

    assert read(monkeypatch, FakeClient(answer)) == list(range(10))


def bad_in_the_middle(offset: int, size: int, number: int) -> FetchReply:
    log = [batch(0, 3), damaged(batch(4, 6)), batch(7, 9)]
    lasts = [3, 6, 9]
    return good(b"".join(one for one, last in zip(log, lasts, strict=True) if last >= offset))


def test_damage_that_stays_fails_with_its_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRecordError, match="t-0, offsets 4 to 6") as caught:
        read(monkeypatch, FakeClient(bad_in_the_middle))

    assert "checksum" in str(caught.value)
    assert "'onBadRecord'" in str(caught.value)


def test_damage_can_be_skipped_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = read(monkeypatch, FakeClient(bad_in_the_middle), onBadRecord="skip")

    assert found == [0, 1, 2, 3, 7, 8, 9]
    assert "left out 1 batches with 3 offsets" in caplog.text


def test_a_dead_letter_is_there_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for _ in range(2):
        found = read(
            monkeypatch,
            FakeClient(bad_in_the_middle),
            onBadRecord="deadletter",
            badRecordPath=str(tmp_path),
        )
        assert found == [0, 1, 2, 3, 7, 8, 9]

    (letter,) = [path for path in tmp_path.rglob("*.json") if path.is_file()]
    content = json.loads(letter.read_text())
    assert (content["topic"], content["partition"]) == ("t", 0)
    assert (content["firstOffset"], content["lastOffset"]) == (4, 6)
    assert content["batch"]


def test_a_damaged_batch_at_the_end_of_the_log_is_one_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def answer(offset: int, size: int, number: int) -> FetchReply:
        return good((batch(0, 3) if offset < 4 else b"") + damaged(batch(4, 203)), log_end=204)

    for start, until in ((0, 50), (50, 204), (0, 204)):
        client = FakeClient(answer)
        given: dict[str, Any] = {"onBadRecord": "deadletter", "badRecordPath": str(tmp_path)}
        found = read(monkeypatch, client, start=start, until=until, **given)
        assert found == [*range(start, 4)]
        assert len(client.asked) < 6

    (letter,) = [path for path in tmp_path.rglob("*.json") if path.is_file()]
    content = json.loads(letter.read_text())
    assert (content["firstOffset"], content["lastOffset"]) == (4, 203)


def test_behind_a_damaged_batch_enough_is_fetched_to_find_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = damaged(batch(0, 99)) + batch(100, 199)

    def answer(offset: int, size: int, number: int) -> FetchReply:
        data = log if offset < 100 else batch(100, 199)
        return good(data[: max(size, len(batch(0, 99)))])

    client = FakeClient(answer)
    small: dict[str, Any] = {"kafka.max.partition.fetch.bytes": "100"}
    assert read(monkeypatch, client, until=200, onBadRecord="skip", **small) == [*range(100, 200)]
    assert len(client.asked) < 8


def test_a_batch_whose_length_nobody_can_read_is_set_aside_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = bytearray(batch(0, 40))
    old[16] = 1

    def answer(offset: int, size: int, number: int) -> FetchReply:
        return good((bytes(old) if offset < 41 else b"") + batch(41, 50))

    client = FakeClient(answer)
    given: dict[str, Any] = {"onBadRecord": "deadletter", "badRecordPath": str(tmp_path)}
    assert read(monkeypatch, client, until=51, **given) == [*range(41, 51)]
    assert len([path for path in tmp_path.rglob("*.json") if path.is_file()]) == 1


def test_a_batch_nobody_can_read_is_bad_too(monkeypatch: pytest.MonkeyPatch) -> None:
    old = bytearray(batch(0, 0))
    old[16] = 0
    client = FakeClient(lambda *_: good(bytes(old)))

    with pytest.raises(BadRecordError, match="message format 0"):
        read(monkeypatch, client)


# Clients that are kept


class Kept:
    def __init__(self, settings: object) -> None:
        self.settings, self.is_broken, self.is_closed = settings, False, False

    def close(self) -> None:
        self.is_closed = True


def test_a_process_keeps_one_client_for_each_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KafkaClient", Kept)
    monkeypatch.setattr(connections, "_clients", type(connections._clients)())
    settings = [
        options(**{"kafka.bootstrap.servers": f"a:{port}"}).settings for port in range(1, 11)
    ]
    first = connections.client_for(settings[0])

    assert connections.client_for(settings[0]) is first
    others = [connections.client_for(one) for one in settings[1:]]
    assert first.is_closed  # type: ignore[attr-defined]
    others[-1].is_broken = True
    assert connections.client_for(settings[-1]) is not others[-1]
