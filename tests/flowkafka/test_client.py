"""What a fetch's answer means, whatever the broker puts into it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.protocol.consumer import FetchResponse
from kafka.protocol.parser import KafkaProtocol
from kafka.protocol.sasl import SaslAuthenticateRequest

from pyspark_flowkafka.client import KafkaClient
from pyspark_flowkafka.properties import ClientSettings
from pyspark_flowkafka.replies import FetchReply, RetriableClientError, Status

VERSION = 11


class Answered:
    """A channel that has the answer already."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.is_closed = False
        self.quiet_seconds = 0.0

    def answer(self, question: object, *, seconds_max: float) -> bytes:
        return self._answer

    def close(self) -> None:
        self.is_closed = True

    def keep_quiet(self, seconds: float) -> None:
        self.quiet_seconds = seconds


def encoded(error_code: int = 0, *, is_empty: bool = False, throttle_ms: int = 0) -> bytes:
    topic = FetchResponse.FetchableTopicResponse
    partition = topic.PartitionData(
        partition_index=0,
        error_code=error_code,
        high_watermark=9,
        last_stable_offset=9,
        log_start_offset=0,
        aborted_transactions=None,
        preferred_read_replica=-1,
        records=b"records",
    )
    response = FetchResponse(
        throttle_time_ms=throttle_ms,
        error_code=0,
        session_id=0,
        responses=[] if is_empty else [topic(topic="t", partitions=[partition])],
    )
    return bytes(response.encode(version=VERSION))


def fetched(answer: bytes) -> tuple[FetchReply, Answered]:
    channel = Answered(answer)
    question: Any = SimpleNamespace(channel=channel, version=VERSION)
    client: Any = SimpleNamespace(settings=ClientSettings(("a:1",)))
    return KafkaClient.fetched(client, question), channel


def test_records_and_the_end_of_the_log_are_found() -> None:
    reply, channel = fetched(encoded())

    assert (reply.status, reply.data, reply.log_end) == (Status.OK, b"records", 9)
    assert not channel.is_closed


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (-1, Status.RETRY),
        (1, Status.OUT_OF_RANGE),
        # Only the cluster's metadata can tell that a partition is gone.
        (3, Status.RETRY),
        (6, Status.RETRY),
        (29, Status.DENIED),
        (76, Status.FAILED),
    ],
)
def test_an_error_of_the_broker_is_what_to_do_about_it(code: int, status: Status) -> None:
    assert fetched(encoded(code))[0].status is status


@pytest.mark.parametrize(("throttle_ms", "seconds"), [(0, 0), (700, 0.7), (2**31 - 1, 30)])
def test_a_broker_that_throttles_is_left_alone_but_not_for_ever(
    throttle_ms: int, seconds: float
) -> None:
    reply, channel = fetched(encoded(throttle_ms=throttle_ms))

    assert channel.quiet_seconds == seconds
    assert reply.is_throttled == (throttle_ms > 0)


@pytest.mark.parametrize("answer", [b"", encoded()[:-20], encoded(is_empty=True)])
def test_an_answer_that_cannot_be_read_is_asked_for_again(answer: bytes) -> None:
    with pytest.raises(RetriableClientError):
        fetched(answer)


def test_a_password_is_not_logged_at_any_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("kafka", "kafka.net.connection", "kafka.protocol.parser"):
        caplog.set_level(logging.DEBUG, logger=name)
    protocol = KafkaProtocol()

    protocol.send_request(SaslAuthenticateRequest(b"\0alice\0s3cret", version=1))

    assert b"s3cret" in protocol.send_bytes()
    assert "s3cret" not in caplog.text
