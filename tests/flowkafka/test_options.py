"""Options as a user types them: Spark's own, those beyond, and wrong ones."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest

from flowspark.errors import OptionError
from pyspark_flowkafka.offsets import TopicPartition
from pyspark_flowkafka.options import NewPartitions, OnBadRecord, PositionKind, SourceOptions, parse
from pyspark_flowkafka.properties import Isolation, parse_jaas

BROKERS = {"kafka.bootstrap.servers": "a:9092"}
BASE = {**BROKERS, "subscribe": "t"}
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


def parsed(*, is_stream: bool = True, **more: Any) -> SourceOptions:
    named = {name.replace("__", "."): value for name, value in more.items()}
    return parse({**BASE, **named}, is_stream=is_stream)


def refused(given: dict[str, str], *, is_stream: bool = True) -> str:
    with pytest.raises(OptionError) as caught:
        parse(given, is_stream=is_stream)
    return str(caught.value)


def test_the_defaults_are_those_of_sparks_source() -> None:
    stream, batch = parsed(), parsed(is_stream=False)

    assert stream.starting.kind is PositionKind.LATEST
    assert stream.ending is None
    assert batch.starting.kind is PositionKind.EARLIEST
    assert batch.ending is not None
    assert batch.ending.kind is PositionKind.LATEST
    assert stream.fail_on_data_loss
    assert not stream.include_headers
    assert (stream.max_offsets, stream.min_offsets, stream.min_partitions) == (None, None, None)
    assert stream.max_delay_ms == 15 * 60 * 1000
    assert (stream.retries, stream.retry_interval_ms) == (3, 1000)
    assert stream.poll_timeout_ms == 120_000
    assert stream.settings.isolation is Isolation.READ_UNCOMMITTED


def test_the_defaults_of_what_goes_beyond() -> None:
    options = parsed()

    assert not options.commit_offsets
    assert options.new_partitions is NewPartitions.EARLIEST
    assert options.on_bad_record is OnBadRecord.FAIL
    assert (options.max_bytes, options.restore_from) == (None, None)


def test_bad_records_are_set_aside_where_all_tasks_see_them() -> None:
    deadletter = {**BASE, "onBadRecord": "deadletter"}

    assert parsed(badRecordPath="bad").bad_record_path == os.path.abspath("bad")
    assert "'badRecordPath' must be seen" in refused({**deadletter, "badRecordPath": "memory://x"})
    assert "set 'badRecordPath'" in refused({**deadletter, "badRecordPath": " "})


def test_options_reach_workers_by_pickle() -> None:
    options = parsed(startingOffsets='{"t": {"0": 5}}', kafka__isolation__level="read_committed")

    assert pickle.loads(pickle.dumps(options)) == options


def test_topics_partitions_and_patterns_are_read() -> None:
    topics = parsed(subscribe=" b, a ,,b").subscription
    partitions = parse({**BROKERS, "assign": '{"t": [0, 2]}'}, is_stream=True).subscription
    pattern = parse({**BROKERS, "subscribePattern": "t-.*"}, is_stream=True).subscription

    assert topics.topics == ("b", "a")
    assert partitions.partitions == {TopicPartition("t", 0), TopicPartition("t", 2)}
    assert pattern.pattern == "t-.*"


def test_a_time_for_all_goes_before_times_and_these_before_offsets() -> None:
    times: dict[str, Any] = {
        "startingTimestamp": "5",
        "startingOffsetsByTimestamp": '{"t": {"0": 7}}',
    }
    offsets: dict[str, Any] = {"startingOffsets": "earliest"}

    assert parsed(**times, **offsets).starting.kind is PositionKind.TIMESTAMP
    del times["startingTimestamp"]
    assert parsed(**times, **offsets).starting.kind is PositionKind.TIMESTAMPS
    assert parsed(**offsets).starting.kind is PositionKind.EARLIEST


def test_offsets_may_stand_for_the_earliest_and_the_latest() -> None:
    starting = parsed(startingOffsets='{"t": {"0": 23, "1": -1, "2": -2}}').starting

    assert list(starting.numbers.values()) == [23, -1, -2]
    assert parsed(startingOffsets=" LATEST ").starting.kind is PositionKind.LATEST


def test_a_least_number_of_records_may_be_none() -> None:
    assert parsed(minOffsetsPerTrigger="0").min_offsets == 0


def test_a_bare_delay_is_in_milliseconds() -> None:
    assert parsed(maxTriggerDelay="1500").max_delay_ms == 1500
    assert parsed(maxTriggerDelay="2m").max_delay_ms == 120_000


def test_a_protocol_in_front_of_a_broker_is_passed_over() -> None:
    settings = parsed(kafka__bootstrap__servers="SASL_SSL://a.b:9092, c:1").settings

    assert settings.bootstrap_servers == ("a.b:9092", "c:1")


def test_a_prefix_for_groups_names_the_client() -> None:
    assert parsed(groupIdPrefix="mine").settings.client_id == "mine"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"subscribePattern": "x"}, "only one of them can be given"),
        ({"startingOffsets": "sometime"}, "must be one of 'earliest', 'latest', 'committed', or"),
        ({"startingOffsets": '{"t": {"0": 1}'}, "'startingOffsets' is not valid JSON"),
        ({"startingOffsets": '{"t": {"0": -3}}'}, "has no offset for t-0, but -3"),
        ({"startingOffsets": '{"t": {"0": "5"}}'}, "has no offset for t-0, but '5'"),
        ({"startingOffsets": '{"t": {"x": 5}}'}, "has a partition of 't' that is 'x'"),
        ({"startingOffsets": '{"t": {"0": 5, "0": 6}}'}, "twice"),
        ({"startingOffsets": '{"t": {"0": 5, "00": 6}}'}, "names t-0 twice"),
        ({"startingOffsets": '{"t": [0]}'}, "must be an object of partitions for 't'"),
        ({"startingOffsets": "{}"}, "names no partition"),
        ({"startingOffsets": f'{{"t": {{"0": {2**63}}}}}'}, "has no offset for t-0, but 9223372"),
        ({"startingTimestamp": str(2**63)}, "'startingTimestamp' must be 0..9223372036854775807"),
        ({"startingTimestamp": "noon"}, "'startingTimestamp' must be a whole number"),
        ({"startingOffsetsByTimestamp": '{"t": {"0": -1}}'}, "has no offset for t-0, but -1"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "must be one of error, latest"),
        ({"maxOffsetsPerTrigger": "0"}, "'maxOffsetsPerTrigger' must be at least 1"),
        ({"minPartitions": "0"}, "'minPartitions' must be at least 1"),
        ({"maxRecordsPerPartition": "-1"}, "'maxRecordsPerPartition' must be at least 1"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "is higher than"),
        ({"failOnDataLoss": "perhaps"}, "must be true or false"),
        ({"maxTriggerDelay": "soon"}, "'maxTriggerDelay' must be a time span"),
        ({"startingOffset": "earliest"}, "did you mean 'startingOffsets'?"),
        ({"commitOffsets": "true"}, "'commitOffsets' needs a consumer group"),
        ({"startingOffsets": "committed"}, "'startingOffsets' needs a consumer group"),
        ({"onBadRecord": "deadletter"}, "set 'badRecordPath'"),
        ({"kafka.auto.offset.reset": "latest"}, "set the option 'startingOffsets'"),
        ({"kafka.key.deserializer": "x"}, "keys are always binary"),
        ({"kafka.value.deserializer": "x"}, "values are always binary"),
        ({"kafka.enable.auto.commit": "true"}, "is not supported"),
        ({"kafka.interceptor.classes": "x"}, "is not supported"),
        ({"kafka.bootstrap.servers": " "}, "'kafka.bootstrap.servers' is missing"),
        ({"kafka.bootstrap.servers": "host"}, "must be a list of host:port, not 'host'"),
        ({"kafka.isolation.level": "some"}, "must be one of read_uncommitted, read_committed"),
        ({"kafka.fetch.max.byte": "1"}, "did you mean 'kafka.fetch.max.bytes'?"),
        ({"kafka.fetch.max.bytes": "0"}, "must be a number from 1"),
        ({"kafka.check.crcs": "1"}, "must be one of true, false"),
        ({"kafka.ssl.truststore.location": "s.jks"}, "is a JKS store. Python reads PEM"),
        ({"kafka.ssl.truststore.password": "x"}, "Python reads PEM files"),
        ({"kafka.ssl.keystore.key": "x"}, "into one PEM file"),
        ({"kafka.security.protocol": "SASL_SSL"}, "'kafka.sasl.mechanism' must be one of PLAIN"),
        ({"kafka.ssl.enabled.protocols": "TLSv1"}, "must name TLSv1.2, TLSv1.3 or both"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named_with_the_way_out(more: dict[str, str], message: str) -> None:
    text = refused({**BASE, **more})

    assert text.startswith("[FLOWKAFKA_OPTION] ")
    assert message in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"subscribe": "t"}, "'kafka.bootstrap.servers' is missing"),
        (BROKERS, "one of them is needed"),
        ({**BROKERS, "subscribe": " , "}, "names no topic"),
        ({**BROKERS, "assign": "t"}, "'assign' is not valid JSON"),
        ({**BROKERS, "assign": '{"t": [-1]}'}, "has a partition of 't' that is -1"),
        ({**BROKERS, "subscribePattern": "("}, "is not a regular expression"),
        ({**BROKERS, "subscribePattern": " "}, "'subscribePattern' is missing"),
    ],
    ids=str,
)
def test_what_to_read_must_be_said_once(given: dict[str, str], message: str) -> None:
    assert message in refused(given)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"startingOffsets": "latest"}, "cannot be 'latest' (-1) in a batch query"),
        ({"startingOffsets": '{"t": {"0": -1}}'}, "cannot be 'latest' (-1) in a batch query"),
        ({"endingOffsets": "earliest"}, "cannot be 'earliest' (-2) in a batch query"),
        ({"endingOffsets": '{"t": {"0": -2}}'}, "cannot be 'earliest' (-2) in a batch query"),
        ({"endingOffsets": "committed"}, "must be one of 'earliest', 'latest', or JSON"),
        ({"restoreFrom": "c"}, "'restoreFrom' is for streaming queries"),
        (
            {"startingOffsets": '{"t": {"0": 9}}', "endingOffsets": '{"t": {"0": 8}}'},
            "begins t-0 at 9, behind its end 8",
        ),
        (
            {"startingOffsets": '{"t": {"0": 9}}', "endingOffsets": '{"t": {"1": 10}}'},
            "must name the same partitions",
        ),
    ],
    ids=str,
)
def test_what_a_batch_query_cannot_do(more: dict[str, str], message: str) -> None:
    assert message in refused({**BASE, **more}, is_stream=False)


# Security


def sasl(jaas: str, **more: str) -> dict[str, str]:
    return {
        **BASE,
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.jaas.config": jaas,
        **more,
    }


@pytest.mark.parametrize(
    ("jaas", "user", "password"),
    [
        (f'{SCRAM} required username="u" password="p w";', "u", "p w"),
        (f"{SCRAM}  required\n username='u'\n password='p;\"x' ;", "u", 'p;"x'),
        (f'{SCRAM} required username=u password=p tokenauth="false";', "u", "p"),
        (f'{SCRAM} required username="u\\"" password="a\\\\b"', 'u"', "a\\b"),
        (f'{SCRAM} required username="u" password="";', "u", ""),
        ("a.b.PlainLoginModule required username='u' password='s=e';", "u", "s=e"),
    ],
)
def test_user_and_password_are_found_in_a_jaas_configuration(
    jaas: str, user: str, password: str
) -> None:
    assert parse_jaas(jaas) == (user, password)


@pytest.mark.parametrize(
    "jaas",
    [
        "s3cret",
        "x.Krb5LoginModule required s3cret=true;",
        f"{SCRAM} required username='u' passwort='s3cret';",
        f"{SCRAM} s3cret username='u' password='p';",
    ],
)
def test_a_jaas_configuration_is_never_repeated(jaas: str) -> None:
    text = refused(sasl(jaas))

    assert "sasl.jaas.config" in text
    assert "s3cret" not in text


def test_secrets_are_in_no_representation() -> None:
    jaas = f"{SCRAM} required username='u' password='s3cret';"
    options = parse(
        sasl(jaas, **{"kafka.ssl.key.password": "s3cret", "storage.secret": "s3cret"}),
        is_stream=True,
    )

    assert options.settings.sasl_password == "s3cret"
    assert "s3cret" not in repr(options)


def test_pem_files_and_certificates_are_taken() -> None:
    jaas = f"{SCRAM} required username='u' password='p';"
    more = {
        "kafka.ssl.truststore.type": "pem",
        "kafka.ssl.truststore.location": "ca.pem",
        "kafka.ssl.endpoint.identification.algorithm": "",
        "kafka.ssl.enabled.protocols": "TLSv1.3",
    }
    settings = parse(sasl(jaas, **more), is_stream=True).settings

    assert settings.ssl_ca_file == "ca.pem"
    assert not settings.ssl_check_hostname
    assert settings.ssl_protocols == ("TLSv1.3",)
    assert settings.sasl_mechanism == "SCRAM-SHA-512"


def test_what_has_no_meaning_here_is_taken_and_ignored() -> None:
    more = {
        "kafka.max.poll.records": "10000",
        "kafka.session.timeout.ms": "1",
        "kafka.client.rack": "r",
    }

    assert parse({**BASE, **more}, is_stream=True).settings == parsed().settings
