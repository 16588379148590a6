"""Clients that outlive a batch: one for each cluster and worker process.

A Python worker is used again for the next micro-batch, so what is kept in this module's globals
saves every batch the connections, the log-in and the search for leaders.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from pyspark_flowkafka.client import KafkaClient
from pyspark_flowkafka.errors import UnavailableError
from pyspark_flowkafka.properties import ClientSettings
from pyspark_flowkafka.replies import RetriableClientError

CLIENTS_MAX = 8
"""A worker that serves more clusters than that closes those it has not used for longest."""

_Result = TypeVar("_Result")

_clients: OrderedDict[tuple[int, ClientSettings], KafkaClient] = OrderedDict()
_lock = threading.Lock()


def client_for(settings: ClientSettings) -> KafkaClient:
    """Return this process's client for a cluster; connected or not yet."""
    # A forked process has no thread to drive its parent's connections.
    key = (os.getpid(), settings)
    with _lock:
        client = _clients.pop(key, None)
        if client is None or client.is_broken:
            client = KafkaClient(settings)
        _clients[key] = client
        dropped = [_clients.popitem(last=False)[1] for _ in range(len(_clients) - CLIENTS_MAX)]
    for one in dropped:
        one.close()
    return client


def discard(settings: ClientSettings) -> None:
    """Close this process's client for a cluster; the next use makes a new one."""
    with _lock:
        client = _clients.pop((os.getpid(), settings), None)
    if client is not None:
        client.close()


class Retries:
    """Attempts with growing pauses, until a limit of time without success is reached."""

    def __init__(self, settings: ClientSettings, limit_ms: int) -> None:
        self._settings = settings
        self._limit_ms = limit_ms
        self._pause_ms = float(settings.retry_backoff_ms)
        self._deadline = time.monotonic() + limit_ms / 1000

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def succeeded(self) -> None:
        """Begin anew: the limit is for the time since the last success."""
        self._pause_ms = float(self._settings.retry_backoff_ms)
        self._deadline = time.monotonic() + self._limit_ms / 1000

    def failed(self, what: str, reason: str) -> None:
        """Pause before the next attempt, or raise ``UnavailableError`` if there is none."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            servers = ", ".join(self._settings.bootstrap_servers)
            raise UnavailableError(
                f"{what} failed for {self._limit_ms} ms; the last reason was: {reason}. Check that "
                f"the brokers at {servers} run, that their advertised listeners can be reached "
                f"from here, and 'kafka.security.protocol'"
            )
        # Many tasks that lost the same broker should not all come back at the same moment.
        time.sleep(min(left, self._pause_ms / 1000 * random.uniform(0.8, 1.2)))
        self._pause_ms = min(self._pause_ms * 2, self._settings.retry_backoff_max_ms)


def retrying(
    settings: ClientSettings, what: str, action: Callable[[KafkaClient], _Result]
) -> _Result:
    """Run something with this process's client until it succeeds or the time is up."""
    retries = Retries(settings, settings.api_timeout_ms)
    while True:
        client = client_for(settings)
        try:
            return action(client)
        except RetriableClientError as error:
            client.forget_leaders()
            retries.failed(what, error.reason)
