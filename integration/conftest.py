from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from integration.kafka.broker import single_broker
from integration.kafka.cluster import Cluster
from integration.sessions import local_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Start one local Spark for the whole run; it listens on the loopback interface only."""
    session = local_session("flowspark-integration")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start one Kafka broker for the whole run."""
    broker = single_broker(tmp_path_factory.mktemp("kafka"))
    broker.start()
    try:
        yield Cluster(broker.address)
    finally:
        broker.stop()
