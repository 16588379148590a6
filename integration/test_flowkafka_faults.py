"""Killed drivers, lost brokers, transactions and secrets, with real processes."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from integration.children import Child, child
from integration.kafka.broker import Broker, single_broker, two_brokers
from integration.kafka.certificates import write_certificates
from integration.kafka.cluster import Cluster

pytestmark = pytest.mark.spark

WAIT_SECONDS = 90.0
KILLS = int(os.environ.get("FLOW_KILLS", "3"))


def driver(log: Path, **settings: Any) -> AbstractContextManager[Child]:
    return child("integration.kafka.driver", json.dumps(settings), log=log)


def options(cluster: Cluster, topic: str, **more: str) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": cluster.address,
        "subscribe": topic,
        "startingOffsets": "earliest",
        **more,
    }


def values(spark: SparkSession, given: dict[str, str]) -> list[str]:
    frame = spark.read.format("flowkafka").options(**given).load()
    found = frame.selectExpr("string(value)", "partition", "offset").orderBy("partition", "offset")
    return [row[0] for row in found.collect()]


def numbers(first: int, last: int) -> list[bytes | None]:
    return [b"%d" % number for number in range(first, last + 1)]


# The driver


def written(folder: Path) -> list[tuple[int, int, str]]:
    return [
        (row[0], row[1], row[2])
        for path in folder.glob("*.json")
        for row in json.loads(path.read_text())
    ]


@pytest.mark.timeout(180 + 60 * KILLS)
def test_a_driver_killed_at_random_times_loses_and_doubles_nothing(
    kafka: Cluster, tmp_path: Path
) -> None:
    seed = int(os.environ.get("FLOW_SEED", random.randrange(1 << 30)))
    print(f"FLOW_SEED={seed}")
    topic = kafka.topic(2)
    rng = random.Random(seed)
    output = tmp_path / "out"
    settings = {
        "options": options(kafka, topic, maxOffsetsPerTrigger="150"),
        "checkpoint": str(tmp_path / "checkpoint"),
        "output": str(output),
    }
    for turn in range(KILLS):
        for partition in range(2):
            kafka.send(topic, numbers(turn * 1000, turn * 1000 + 999), partition=partition)
        with driver(tmp_path / "log", ends=False, **settings) as running:
            for _ in range(2):
                running.wait_for("batch", WAIT_SECONDS)
            time.sleep(rng.uniform(0, 0.6))
            running.kill()
    with driver(tmp_path / "log", ends=True, **settings) as running:
        assert running.wait(WAIT_SECONDS + 10 * KILLS) == 0, running.errors()[-3000:]

    expected = [(p, n, str(n)) for p in range(2) for n in range(1000 * KILLS)]
    assert sorted(written(output)) == expected


# Brokers


class Writer(threading.Thread):
    """Writes numbers until it is stopped; what a broker did not acknowledge is sent again."""

    def __init__(self, cluster: Cluster, topic: str, partitions: int) -> None:
        super().__init__(daemon=True)
        self._cluster, self._topic, self._partitions = cluster, topic, partitions
        self._ended = threading.Event()
        self.sent = 0

    def run(self) -> None:
        with self._cluster.producer(acks="all", retries=200, enable_idempotence=True) as producer:
            while not self._ended.wait(0.005):
                producer.send(
                    self._topic, value=b"%d" % self.sent, partition=self.sent % self._partitions
                )
                self.sent += 1
            producer.flush(60)

    def stop(self) -> None:
        self._ended.set()
        self.join(70)
        assert not self.is_alive()


class Collected:
    """What a stream has read so far."""

    def __init__(self) -> None:
        self.rows: dict[int, list[tuple[int, int, str]]] = {}

    def keep(self, frame: DataFrame, number: int) -> None:
        found = frame.selectExpr("partition", "offset", "string(value)").collect()
        self.rows[number] = [tuple(row) for row in found]

    def all_rows(self) -> list[tuple[int, int, str]]:
        return [row for rows in list(self.rows.values()) for row in rows]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Broker, Broker]]:
    brokers = two_brokers(tmp_path / "brokers")
    try:
        for broker in brokers:
            broker.start()
        yield brokers
    finally:
        for broker in reversed(brokers):
            broker.kill()


def test_a_stream_outlives_the_leader_of_its_partitions(
    spark: SparkSession, pair: tuple[Broker, Broker], tmp_path: Path
) -> None:
    first, second = pair
    cluster = Cluster(f"{first.address},{second.address}")
    topic = create_replicated(cluster, partitions=4)
    writer, collected = Writer(cluster, topic, 4), Collected()
    writer.start()
    frame = spark.readStream.format("flowkafka").options(**options(cluster, topic)).load()
    query = (
        frame.writeStream.foreachBatch(collected.keep)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        await_rows(collected, 100)
        second.kill()
        before = len(collected.all_rows())
        await_rows(collected, before + 200)
        second.start()
        await_rows(collected, len(collected.all_rows()) + 200)
        writer.stop()
        await_rows(collected, writer.sent)
    finally:
        query.stop()
        writer.stop()
    rows = collected.all_rows()

    assert query.exception() is None
    assert sorted(int(value) for _, _, value in rows) == list(range(writer.sent))
    assert len({(partition, offset) for partition, offset, _ in rows}) == len(rows)


def create_replicated(cluster: Cluster, *, partitions: int) -> str:
    """Create a topic on both brokers; the second one may need a moment to join."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return cluster.topic(partitions, replicas=2)
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def await_rows(collected: Collected, count: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while len(collected.all_rows()) < count:
        assert time.monotonic() < deadline, f"{len(collected.all_rows())} of {count} rows"
        time.sleep(0.1)


def test_a_read_goes_on_when_its_only_broker_restarts(spark: SparkSession, tmp_path: Path) -> None:
    broker = single_broker(tmp_path / "broker")
    broker.start()
    try:
        cluster = Cluster(broker.address)
        topic = cluster.topic()
        cluster.send(topic, [b"x" * 1000] * 3000, batch_size=20_000)
        # Small fetches, so that the read is still under way when the broker goes.
        given = options(cluster, topic, **{"kafka.max.partition.fetch.bytes": "20000"})
        result: list[int] = []
        reader = threading.Thread(target=lambda: result.append(len(values(spark, given))))
        reader.start()
        time.sleep(0.5)
        broker.kill()
        time.sleep(1)
        broker.start()
        reader.join(WAIT_SECONDS)
    finally:
        broker.kill()

    assert result == [3000]


# Transactions


def test_only_committed_transactions_are_read(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    topic = kafka.topic()
    committed = {"kafka.isolation.level": "read_committed"}
    with kafka.producer(transactional_id=f"id-{topic}", acks="all") as producer:
        producer.init_transactions()
        for number, ends_well in enumerate([True, False, True, False]):
            producer.begin_transaction()
            for index in range(50):
                producer.send(topic, value=b"%d-%d" % (number, index), partition=0)
            producer.flush(30)
            if ends_well:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
        producer.begin_transaction()
        producer.send(topic, value=b"open", partition=0)
        producer.flush(30)

        read_committed = values(spark, options(kafka, topic, **committed))
        read_all = values(spark, options(kafka, topic))
        split = values(spark, options(kafka, topic, minPartitions="7", **committed))
        producer.abort_transaction()

    expected = [f"{number}-{index}" for number in (0, 2) for index in range(50)]
    assert read_committed == expected
    assert split == expected
    assert len(read_all) == 201


# Secrets

PASSWORD = "s3cret-Passw0rd"
JAAS = (
    "org.apache.kafka.common.security.scram.ScramLoginModule required "
    'username="alice" password="{}";'
)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    folder = tmp_path_factory.mktemp("secured")
    ca_file, broker_file = write_certificates(folder / "certificates")
    broker = single_broker(
        folder / "broker",
        protocol="SASL_SSL",
        properties={
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(broker_file),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(ca_file),
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": JAAS.format(PASSWORD),
        },
        format_arguments=("--add-scram", f"SCRAM-SHA-512=[name=alice,password={PASSWORD}]"),
    )
    broker.start()
    cluster = Cluster(
        broker.address,
        security_protocol="SASL_SSL",
        ssl_cafile=str(ca_file),
        sasl_mechanism="SCRAM-SHA-512",
        sasl_plain_username="alice",
        sasl_plain_password=PASSWORD,
    )
    try:
        yield cluster, ca_file
    finally:
        broker.kill()


def secured_options(cluster: Cluster, ca_file: Path, topic: str, password: str) -> dict[str, str]:
    return options(
        cluster,
        topic,
        **{
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "SCRAM-SHA-512",
            "kafka.sasl.jaas.config": JAAS.format(password),
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": str(ca_file),
            "kafka.default.api.timeout.ms": "10000",
        },
    )


def everything_written(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_a_secured_cluster_is_read_and_no_password_is_written_anywhere(
    secured: tuple[Cluster, Path], tmp_path: Path
) -> None:
    cluster, ca_file = secured
    topic = cluster.topic()
    cluster.send(topic, numbers(0, 99))
    outcomes: list[int] = []
    for password in (PASSWORD, "wr0ng-" + PASSWORD):
        folder = tmp_path / str(len(outcomes))
        folder.mkdir()
        with driver(
            folder / "log",
            options=secured_options(cluster, ca_file, topic, password),
            checkpoint=str(folder / "checkpoint"),
            output=str(folder / "out"),
            ends=True,
            explain=True,
            log_level="INFO",
        ) as running:
            lines = []
            while (line := running.next_line(WAIT_SECONDS)) is not None:
                lines.append(line)
            outcomes.append(running.wait(WAIT_SECONDS))
        assert PASSWORD not in everything_written(folder)
        assert PASSWORD not in "\n".join(lines)

    assert outcomes[0] == 0
    assert sorted(int(value) for _, _, value in written(tmp_path / "0" / "out")) == list(range(100))
    assert outcomes[1] != 0
    log = (tmp_path / "1" / "log").read_text()
    assert "[FLOWKAFKA_AUTHENTICATION]" in log
    assert "kafka.sasl.jaas.config" in log


def test_a_certificate_of_somebody_else_is_refused(
    spark: SparkSession, secured: tuple[Cluster, Path], tmp_path: Path
) -> None:
    cluster, _ = secured
    other, _ = write_certificates(tmp_path)
    given = secured_options(cluster, other, "t", PASSWORD)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        values(spark, given)

    assert "[FLOWKAFKA_AUTHENTICATION] the certificate of 127.0.0.1" in str(caught.value)
    assert PASSWORD not in str(caught.value)
