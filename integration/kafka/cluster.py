"""A running cluster as the tests use it: topics, and records written by kafka-python."""

from __future__ import annotations

import gc
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import NewPartitions, NewTopic

TIME_MS = 1_700_000_000_000


class Cluster:
    """Topics and records on some brokers; ``security`` goes to kafka-python as it is."""

    def __init__(self, address: str, **security: Any) -> None:
        self.address = address
        self._security = security

    def topic(
        self,
        partitions: int = 1,
        *,
        name: str | None = None,
        replicas: int = 1,
        config: Mapping[str, str] | None = None,
    ) -> str:
        """Create a topic, by a name of its own unless one is given."""
        name = name or f"topic-{uuid.uuid4().hex[:12]}"
        with self._admin() as admin:
            admin.create_topics(
                [NewTopic(name, partitions, replicas, topic_configs=dict(config or {}))]
            )
        return name

    def delete(self, topic: str) -> None:
        with self._admin() as admin:
            admin.delete_topics([topic])

    def grow(self, topic: str, partitions: int) -> None:
        with self._admin() as admin:
            admin.create_partitions({topic: NewPartitions(partitions)})

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        from kafka import TopicPartition

        with self._admin() as admin:
            admin.delete_records({TopicPartition(topic, partition): before})

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        with self._admin() as admin:
            found = admin.list_group_offsets([group])[group]
        return {(one.topic, one.partition): meta.offset for one, meta in found.items()}

    def send(
        self, topic: str, values: Iterable[bytes | None], *, partition: int = 0, **more: Any
    ) -> None:
        """Write values with keys that number them; ``more`` configures the producer."""
        with self.producer(**more) as producer:
            for number, value in enumerate(values):
                producer.send(
                    topic,
                    value=value,
                    key=b"%d" % number,
                    partition=partition,
                    timestamp_ms=TIME_MS + number,
                )
            producer.flush(60)

    @contextmanager
    def producer(self, **more: Any) -> Iterator[KafkaProducer]:
        producer = KafkaProducer(
            bootstrap_servers=self.address, **{"linger_ms": 10, **self._security, **more}
        )
        try:
            yield producer
        finally:
            producer.close(timeout=10)
            _collect_quietly()

    @contextmanager
    def _admin(self) -> Iterator[KafkaAdminClient]:
        admin = KafkaAdminClient(bootstrap_servers=self.address, **self._security)
        try:
            yield admin
        finally:
            admin.close()


def _collect_quietly() -> None:
    """Let go of sockets that kafka-python's producer forgets to close when a broker is lost."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
