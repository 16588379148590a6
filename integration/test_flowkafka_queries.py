"""``format("flowkafka")`` in a real Spark, against a real broker."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.docs.markdown import ROOT, blocks_of

from integration.kafka.broker import free_ports
from integration.kafka.cluster import TIME_MS, Cluster
from integration.kafka.queries import Stream, batch, failure, options, rows, texts

pytestmark = pytest.mark.spark

# Batch queries


@pytest.mark.main_path
def test_a_query_written_for_kafka_runs_with_another_format_name(
    spark: SparkSession, kafka: Cluster
) -> None:
    topic = kafka.topic(2)
    kafka.send(topic, texts(0, 9))
    kafka.send(topic, texts(10, 14), partition=1)
    frame = (
        spark.read.format("flowkafka")
        .option("kafka.bootstrap.servers", kafka.address)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("endingOffsets", "latest")
        .option("failOnDataLoss", "true")
        .option("kafka.group.id", "ignored")
        .option("kafka.max.poll.records", "500")
        .load()
    )
    found = (
        frame.selectExpr(
            "CAST(key AS STRING)",
            "CAST(value AS STRING)",
            "topic",
            "partition",
            "offset",
            "timestamp",
            "timestampType",
        )
        .orderBy("partition", "offset")
        .collect()
    )

    assert [row.value for row in found] == [str(n) for n in range(15)]
    assert {row.topic for row in found} == {topic}
    assert [row.timestamp.timestamp() * 1000 for row in found[:2]] == [TIME_MS, TIME_MS + 1]
    assert {row.timestampType for row in found} == {0}


def test_the_columns_are_those_of_sparks_source(spark: SparkSession, kafka: Cluster) -> None:
    plain = batch(spark, kafka, subscribe="any")
    headers = batch(spark, kafka, subscribe="any", includeHeaders="true")

    assert plain.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    assert headers.schema["headers"].dataType.simpleString() == (
        "array<struct<key:string,value:binary>>"
    )


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_every_codec_is_read(spark: SparkSession, kafka: Cluster, codec: str) -> None:
    topic = kafka.topic()
    values: list[bytes | None] = [b"x" * (n % 300) for n in range(2000)]
    kafka.send(topic, values, compression_type=codec)

    assert [value for _, _, value in rows(batch(spark, kafka, subscribe=topic))] == values


def test_a_query_that_stops_early_does_not_disturb_the_next(
    spark: SparkSession, kafka: Cluster
) -> None:
    topic = kafka.topic()
    values = texts(1, 3000)
    kafka.send(topic, values, batch_size=1024)
    # Many small fetches, of which one is always under way.
    small = {"subscribe": topic, "kafka.max.partition.fetch.bytes": "2048"}
    for _ in range(3):
        assert len(batch(spark, kafka, **small).take(1)) == 1
    frame = batch(spark, kafka, **small)

    assert [value for _, _, value in rows(frame)] == values


def test_nulls_headers_and_append_times_arrive(spark: SparkSession, kafka: Cluster) -> None:
    topic = kafka.topic(config={"message.timestamp.type": "LogAppendTime"})
    with kafka.producer() as producer:
        producer.send(topic, key=b"k", value=None, headers=[("h", b"1"), ("h", b"2")])
        producer.send(topic, key=None, value=b"v")
        producer.flush(30)
    found = batch(spark, kafka, subscribe=topic, includeHeaders="true").orderBy("offset").collect()

    assert [(row.key, row.value) for row in found] == [(b"k", None), (None, b"v")]
    assert [(h.key, bytes(h.value)) for h in found[0].headers] == [("h", b"1"), ("h", b"2")]
    assert found[1].headers is None
    assert {row.timestampType for row in found} == {1}
    assert found[0].timestamp.timestamp() > time.time() - 600


def test_offsets_and_times_bound_a_batch_query(spark: SparkSession, kafka: Cluster) -> None:
    topic = kafka.topic(2)
    kafka.send(topic, texts(0, 9))
    kafka.send(topic, texts(100, 109), partition=1)

    def between(**more: str) -> list[bytes | None]:
        return [value for _, _, value in rows(batch(spark, kafka, subscribe=topic, **more))]

    bounds = {
        "startingOffsets": json.dumps({topic: {"0": 8, "1": -2}}),
        "endingOffsets": json.dumps({topic: {"0": -1, "1": 2}}),
    }
    assert between(**bounds) == [b"8", b"9", b"100", b"101"]
    times = {"startingTimestamp": str(TIME_MS + 7), "endingTimestamp": str(TIME_MS + 9)}
    assert between(**times) == [b"7", b"8", b"107", b"108"]
    each = {
        "startingOffsetsByTimestamp": json.dumps({topic: {"0": TIME_MS + 9, "1": TIME_MS + 99}}),
        "startingOffsetsByTimestampStrategy": "latest",
    }
    assert between(**each) == [b"9"]
    text = failure(lambda: between(startingTimestamp=str(TIME_MS + 99)))
    assert "startingOffsetsByTimestampStrategy" in text


def test_partitions_are_assigned_matched_and_split(spark: SparkSession, kafka: Cluster) -> None:
    topic = kafka.topic(2)
    kafka.send(topic, texts(0, 99))
    kafka.send(topic, texts(100, 109), partition=1)

    assigned = batch(spark, kafka, assign=json.dumps({topic: [1]}))
    matched = batch(spark, kafka, subscribePattern=topic[:-1] + ".", minPartitions="5")
    bounded = batch(spark, kafka, subscribe=topic, maxRecordsPerPartition="30")

    assert len(rows(assigned)) == 10
    assert len(rows(matched)) == 110
    assert matched.rdd.getNumPartitions() == 5
    assert len(rows(bounded)) == 110
    assert bounded.rdd.getNumPartitions() == 5


def test_compacted_topics_have_gaps(spark: SparkSession, kafka: Cluster) -> None:
    config = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.001",
        "max.compaction.lag.ms": "100",
    }
    topic = kafka.topic(config=config)
    for turn in range(3):
        with kafka.producer() as producer:
            for number in range(50):
                producer.send(topic, key=b"%d" % (number % 5), value=b"%d-%d" % (turn, number))
            producer.flush(30)
        time.sleep(0.3)
    # Whether the cleaner has run by now or not: the last value of each key is there.
    found = rows(batch(spark, kafka, subscribe=topic))

    assert [value for _, _, value in found][-5:] == [b"2-%d" % n for n in range(45, 50)]
    assert len({offset for _, offset, _ in found}) == len(found)


def test_a_record_larger_than_the_fetch_is_read(spark: SparkSession, kafka: Cluster) -> None:
    topic = kafka.topic()
    kafka.send(topic, [b"x" * 500_000, b"y"])
    frame = batch(spark, kafka, subscribe=topic, **{"kafka.max.partition.fetch.bytes": "1000"})

    assert [len(value or b"") for _, _, value in rows(frame)] == [500_000, 1]


# Streams


def test_a_stream_reads_in_limited_batches_and_reports(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    topic = kafka.topic(2)
    kafka.send(topic, texts(0, 99))
    kafka.send(topic, texts(100, 199), partition=1)
    stream = Stream(
        spark,
        kafka,
        tmp_path,
        subscribe=topic,
        startingOffsets="earliest",
        maxOffsetsPerTrigger="80",
        reportLag="true",
    ).run()

    assert [len(batch) for batch in stream.batches.values()] == [80, 80, 40]
    assert set(stream.values) == set(texts(0, 199))
    assert stream.query is not None
    progress = stream.query.recentProgress
    source = progress[0]["sources"][0]
    assert json.loads(source["endOffset"]) == {topic: {"0": 40, "1": 40}}
    latest = json.loads(source["latestOffset"])
    assert latest[topic] == {"0": 100, "1": 100}
    assert latest["offsetsBehindLatest "][topic] == {"0": 100, "1": 100}


@pytest.mark.main_path
def test_a_stream_begins_at_the_end_and_goes_on_after_a_restart(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    topic = kafka.topic()
    kafka.send(topic, texts(0, 4))
    stream = Stream(spark, kafka, tmp_path, subscribe=topic)
    try:
        stream.start()
        stream.wait_for(lambda: 0 in stream.batches)
        kafka.send(topic, texts(5, 9))
        stream.wait_for(lambda: len(stream.values) == 5)
    finally:
        stream.stop()
    kafka.send(topic, texts(10, 11))
    again = Stream(spark, kafka, tmp_path, subscribe=topic).run()

    assert stream.values == texts(5, 9)
    assert again.values[-2:] == texts(10, 11)
    assert set(again.values) <= set(texts(5, 11))


def test_a_first_batch_at_the_end_is_run_again_after_a_crash(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    topic = kafka.topic()
    kafka.send(topic, texts(0, 4))
    Stream(spark, kafka, tmp_path, subscribe=topic).run()
    # As if the driver had been killed before the batch was finished.
    for path in (tmp_path / "checkpoint" / "commits").iterdir():
        path.unlink()
    kafka.send(topic, texts(5, 9))
    kafka.grow(topic, 2)
    again = Stream(spark, kafka, tmp_path, subscribe=topic).run()

    assert again.values == texts(5, 9)


def test_new_partitions_are_found_while_running(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    topic = kafka.topic()
    kafka.send(topic, texts(0, 4))
    stream = Stream(spark, kafka, tmp_path, subscribe=topic, startingOffsets="earliest")
    try:
        stream.start()
        stream.wait_for(lambda: len(stream.values) == 5)
        kafka.grow(topic, 2)
        kafka.send(topic, texts(5, 9), partition=1)
        stream.wait_for(lambda: len(stream.values) == 10)
    finally:
        stream.stop()

    assert stream.values == texts(0, 9)


def test_new_partitions_may_begin_at_their_end(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    topic = kafka.topic()
    more = {"subscribe": topic, "startingOffsets": "earliest", "newPartitions": "latest"}
    kafka.send(topic, texts(0, 1))
    Stream(spark, kafka, tmp_path, **more).run()
    kafka.grow(topic, 2)
    kafka.send(topic, texts(10, 14), partition=1)
    first = Stream(spark, kafka, tmp_path, **more).run()
    kafka.send(topic, texts(15, 16), partition=1)
    second = Stream(spark, kafka, tmp_path, **more).run()

    assert not set(first.values) & set(texts(10, 14))
    assert second.values[-2:] == texts(15, 16)


def test_a_stream_may_end_at_given_offsets(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    topic = kafka.topic()
    kafka.send(topic, texts(0, 9))
    more = {
        "subscribe": topic,
        "startingOffsets": "earliest",
        "endingOffsets": json.dumps({topic: {"0": 7}}),
        "maxOffsetsPerTrigger": "5",
    }

    assert Stream(spark, kafka, tmp_path, **more).run().values == texts(0, 6)
    assert Stream(spark, kafka, tmp_path, **more).run().values in ([], texts(5, 6))


def test_a_stream_may_be_limited_in_bytes(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    topic = kafka.topic()
    kafka.send(topic, [b"x" * 1000] * 200, batch_size=5000)
    stream = Stream(
        spark,
        kafka,
        tmp_path,
        subscribe=topic,
        startingOffsets="earliest",
        maxBytesPerTrigger="50k",
    ).run()

    sizes = [len(batch) for batch in stream.batches.values()]
    assert sum(sizes) == 200
    assert all(30 <= size <= 60 for size in sizes[:-1])


def test_a_batch_waits_for_enough_records(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    topic = kafka.topic()
    kafka.send(topic, texts(0, 0))
    stream = Stream(
        spark,
        kafka,
        tmp_path,
        subscribe=topic,
        startingOffsets="earliest",
        minOffsetsPerTrigger="5",
        maxTriggerDelay="10m",
    )
    try:
        stream.start()
        # As in Spark's source, the first batch does not wait.
        stream.wait_for(lambda: len(stream.values) == 1)
        kafka.send(topic, texts(1, 3))
        time.sleep(1.5)
        assert len(stream.values) == 1
        kafka.send(topic, texts(4, 6))
        stream.wait_for(lambda: len(stream.values) == 7)
    finally:
        stream.stop()

    assert [len(batch) for batch in stream.batches.values()] == [1, 6]


def test_offsets_are_committed_for_lag_tools_and_a_query_may_begin_there(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    topic = kafka.topic()
    group = {"kafka.group.id": f"group-{topic}"}
    kafka.send(topic, texts(0, 9))
    missing = failure(
        Stream(
            spark, kafka, tmp_path / "0", subscribe=topic, startingOffsets="committed", **group
        ).run
    )
    Stream(
        spark,
        kafka,
        tmp_path / "1",
        subscribe=topic,
        startingOffsets="earliest",
        maxOffsetsPerTrigger="4",
        commitOffsets="true",
        **group,
    ).run()
    committed = kafka.committed(group["kafka.group.id"])
    other = Stream(
        spark, kafka, tmp_path / "2", subscribe=topic, startingOffsets="committed", **group
    ).run()

    assert "has committed nothing" in missing
    # The end of a batch is committed when the next one begins.
    assert committed == {(topic, 0): 8}
    assert other.values == texts(8, 9)


def test_a_new_query_goes_on_from_another_ones_checkpoint_or_a_file(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    topic = kafka.topic()
    kafka.send(topic, texts(0, 4))
    Stream(spark, kafka, tmp_path / "old", subscribe=topic, startingOffsets="earliest").run()
    kafka.send(topic, texts(5, 9))
    from_checkpoint = Stream(
        spark, kafka, tmp_path / "a", subscribe=topic, restoreFrom=str(tmp_path / "old/checkpoint")
    ).run()
    file = tmp_path / "offsets.json"
    file.write_text(json.dumps({topic: {"0": 8}}))
    from_file = Stream(spark, kafka, tmp_path / "b", subscribe=topic, restoreFrom=str(file)).run()
    nowhere = failure(
        Stream(spark, kafka, tmp_path / "c", subscribe=topic, restoreFrom=str(tmp_path / "x")).run
    )

    assert from_checkpoint.values == texts(5, 9)
    assert from_file.values == texts(8, 9)
    assert "[FLOWKAFKA_RESTORE]" in nowhere


def test_a_query_goes_on_where_sparks_own_source_has_left_off(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    topic = kafka.topic()
    kafka.send(topic, texts(0, 9))
    more = {"subscribe": topic, "startingOffsets": "earliest"}
    Stream(spark, kafka, tmp_path, **more, maxOffsetsPerTrigger="4").run()
    *head, last = sorted((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"))
    version, conf, ours = last.read_text().splitlines()
    # As the JVM writes them.
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
    last.write_text("\n".join([version, conf, f'{{"{topic}":{{"0":6}}}}']))
    again = Stream(spark, kafka, tmp_path, **more).run()

    assert head
    assert ours == json.dumps({topic: {"0": 10}})
    assert again.values == texts(6, 9)


# Data that is lost


@pytest.mark.parametrize("fail", [True, False], ids=["fail", "go on"])
def test_a_deleted_topic_is_what_fail_on_data_loss_says(
    spark: SparkSession, kafka: Cluster, tmp_path: Path, fail: bool
) -> None:
    kept, deleted = kafka.topic(), kafka.topic()
    more = {
        "subscribe": f"{kept},{deleted}",
        "startingOffsets": "earliest",
        "failOnDataLoss": str(fail).lower(),
    }
    for topic in (kept, deleted):
        kafka.send(topic, texts(0, 4))
    stream = Stream(spark, kafka, tmp_path, **more)
    try:
        stream.start()
        stream.wait_for(lambda: len(stream.values) == 10)
        kafka.delete(deleted)
        kafka.send(kept, texts(5, 6))
        if fail:
            text = failure(lambda: stream.wait_for(lambda: False))
            assert "[FLOWKAFKA_DATA_LOSS]" in text
            assert deleted in text
        else:
            stream.wait_for(lambda: len(stream.values) == 12)
    finally:
        stream.stop()


@pytest.mark.parametrize("fail", [True, False], ids=["fail", "go on"])
def test_records_that_aged_out_are_what_fail_on_data_loss_says(
    spark: SparkSession, kafka: Cluster, tmp_path: Path, fail: bool
) -> None:
    topic = kafka.topic()
    more = {"subscribe": topic, "startingOffsets": "earliest", "failOnDataLoss": str(fail).lower()}
    kafka.send(topic, texts(0, 4))
    Stream(spark, kafka, tmp_path, **more).run()
    kafka.send(topic, texts(5, 9))
    kafka.delete_records(topic, 0, 8)
    again = Stream(spark, kafka, tmp_path, **more)
    if fail:
        text = failure(again.run)
        assert "[FLOWKAFKA_DATA_LOSS]" in text
        assert "offset 5" in text
    else:
        assert again.run().values[-2:] == texts(8, 9)


# Wrong input


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"subscribe": "no-such-topic"}, "[FLOWKAFKA_UNKNOWN_TOPIC] there is no topic 'no-such"),
        ({"assign": '{"<topic>": [7]}'}, "there is no partition <topic>-7"),
        ({"startingOffsets": '{"<topic>": {"0": 1'}, "'startingOffsets' is not valid JSON"),
        (
            {"startingOffsets": '{"<topic>": {"0": 99}}'},
            "offset 99 of <topic>-0 is outside of the log",
        ),
        ({"startingOffsets": '{"<topic>": {"0": 0, "5": 0}}'}, "must name all partitions"),
        ({"startingOffset": "earliest"}, "did you mean 'startingOffsets'?"),
        ({"kafka.ssl.truststore.location": "a.jks"}, "Python reads PEM files"),
    ],
    ids=["topic", "partition", "json", "offset", "partitions", "name", "jks"],
)
def test_wrong_input_is_told_in_plain_words(
    spark: SparkSession, kafka: Cluster, more: dict[str, str], message: str
) -> None:
    topic = kafka.topic()
    kafka.send(topic, texts(0, 1))
    given = {name: value.replace("<topic>", topic) for name, value in more.items()}
    if not {"subscribe", "assign"} & given.keys():
        given["subscribe"] = topic
    text = failure(lambda: batch(spark, kafka, **given).collect())

    assert message.replace("<topic>", topic) in text
    assert re.search(r"\[FLOWKAFKA_[A-Z_]+\]", text)


def test_an_offset_outside_of_the_log_may_be_moved_into_it(
    spark: SparkSession, kafka: Cluster
) -> None:
    topic = kafka.topic()
    kafka.send(topic, texts(0, 4))
    kafka.delete_records(topic, 0, 3)
    frame = batch(
        spark,
        kafka,
        subscribe=topic,
        startingOffsets=json.dumps({topic: {"0": 1}}),
        failOnDataLoss="false",
    )

    assert [value for _, _, value in rows(frame)] == texts(3, 4)


def test_no_broker_is_an_error_in_bounded_time(spark: SparkSession) -> None:
    (port,) = free_ports(1)
    nowhere = Cluster(f"127.0.0.1:{port}")
    start = time.monotonic()
    text = failure(
        lambda: batch(
            spark, nowhere, subscribe="t", **{"kafka.default.api.timeout.ms": "2000"}
        ).collect()
    )

    assert "[FLOWKAFKA_UNAVAILABLE]" in text
    assert nowhere.address in text
    assert time.monotonic() - start < 30


def test_columns_of_ones_own_are_refused(spark: SparkSession, kafka: Cluster) -> None:
    reader = spark.read.format("flowkafka").options(**options(kafka, subscribe="t"))
    text = failure(lambda: reader.schema("value string").load().collect())

    assert "the columns are fixed" in text


def test_an_empty_topic_has_no_rows(spark: SparkSession, kafka: Cluster) -> None:
    assert rows(batch(spark, kafka, subscribe=kafka.topic(2))) == []


# Documents


@pytest.mark.parametrize("document", ["README.md", "docs/guide/flowkafka.md"])
def test_the_code_of_the_documents_runs(
    spark: SparkSession, kafka: Cluster, tmp_path: Path, document: str
) -> None:
    topic = kafka.topic()
    kafka.send(topic, texts(0, 4))
    places = {
        "localhost:9092": kafka.address,
        "host:9092": kafka.address,
        '"orders"': f'"{topic}"',
        '"checkpoint"': f'"{tmp_path}/{document}"',
    }
    namespace: dict[str, Any] = {"spark": spark, "checkpoint": str(tmp_path / "checkpoint")}
    blocks = [one for one in blocks_of(ROOT / document) if one.language == "py"]
    blocks = [one for one in blocks if "flowkafka" in one.text]
    assert blocks
    try:
        for block in blocks:
            text = block.text.replace('.queryName("orders")', '.queryName("read_orders")')
            for name, place in places.items():
                text = text.replace(name, place)
            exec(compile(text, document, "exec"), namespace)
        if "yesterday" in namespace:
            assert namespace["yesterday"].count() == 3
            assert spark.sql("SELECT value FROM read_orders").count() == 5
    finally:
        for query in spark.streams.active:
            query.stop()
