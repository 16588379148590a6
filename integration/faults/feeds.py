"""Where the lines of a pipeline come from, slowly enough to be in the middle of it."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from integration.kafka.broker import Broker, single_broker
from integration.kafka.cluster import Cluster

__all__ = ["Feed", "KafkaFeed", "SocketFeed"]

_WORDS_PER_LINE = 3
_WORDS = 400


class Feed(ABC):
    """A source of lines with the words that are in them."""

    source: ClassVar[str]
    has_reader: ClassVar[bool] = False

    def __init__(self, folder: Path, seed: int, lines: int) -> None:
        folder.mkdir(parents=True)
        self._folder, self._count = folder, lines
        chance = random.Random(seed)
        self._lines = [
            " ".join(f"w{chance.randrange(_WORDS)}" for _ in range(_WORDS_PER_LINE))
            for _ in range(lines)
        ]

    def words(self) -> Counter[str]:
        """Count the words, independently of any pipeline."""
        return Counter(word for line in self._lines for word in line.split(" "))

    @abstractmethod
    def options(self, *, drain: bool) -> dict[str, str]:
        """Return the options of the source; to be broken, or to read all the rest at once."""

    @abstractmethod
    def interrupt(self) -> None:
        """Break what feeds the source, and have it come back."""

    @abstractmethod
    def finish(self) -> None:
        """Send what is left as fast as it is taken."""

    @abstractmethod
    def close(self) -> None:
        """End all processes and threads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class SocketFeed(Feed):
    """The sender of ``flowsocket``, in a process of its own that may be killed at any time."""

    source = "flowsocket"
    has_reader = True

    def __init__(self, folder: Path, seed: int, lines: int) -> None:
        super().__init__(folder, seed, lines)
        (folder / "lines").write_text("".join(line + "\n" for line in self._lines))
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._port = sock.getsockname()[1]
        self._sender = self._start()

    def options(self, *, drain: bool) -> dict[str, str]:
        # The sender is to be in the middle of the file at each fault, so little is taken then.
        # At the end it may be waiting before its next try.
        sizes = {
            "segmentBytes": "1m" if drain else "4k",
            "maxSpoolBytes": "64m" if drain else "16k",
            "maxRowsPerTrigger": "5000" if drain else "400",
            "availableNowIdle": "12 seconds",
        }
        return {
            "mode": "listen",
            "protocol": "ack",
            "port": str(self._port),
            "stateLocation": str(self._folder / "spool"),
            "connectTimeout": "60 seconds",
            **sizes,
        }

    def interrupt(self) -> None:
        if self._sender.poll() is None:
            self._sender.send_signal(signal.SIGKILL)
            self._sender.wait(30)
        self._sender = self._start()

    def finish(self) -> None:
        """Do nothing: the sender goes on as long as its lines are taken."""

    def close(self) -> None:
        if self._sender.poll() is None:
            self._sender.kill()
        self._sender.wait(30)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pyspark_flowsocket.send", str(self._folder / "lines")]
        command += ["127.0.0.1", str(self._port), "--attempts", "1000000"]
        with (self._folder / "sender.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)


class KafkaFeed(Feed):
    """A topic of a real broker, which may be killed and comes back; written to bit by bit."""

    source = "flowkafka"
    _TOPIC = "lines"
    _PARTITIONS = 3

    def __init__(self, folder: Path, seed: int, lines: int) -> None:
        super().__init__(folder, seed, lines)
        self._broker: Broker = single_broker(folder / "broker")
        self._broker.start()
        self._cluster = Cluster(self._broker.address)
        self._cluster.topic(self._PARTITIONS, name=self._TOPIC)
        self._sent = 0
        self._is_hurried = False
        self._is_closed = False
        self._idle = threading.Lock()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def options(self, *, drain: bool) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": self._broker.address,
            "subscribe": self._TOPIC,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "10000" if drain else "500",
        }

    def interrupt(self) -> None:
        # Between two pieces, so that what was written is known: producing is not what is tested.
        with self._idle:
            self._broker.kill()
            time.sleep(0.5)
            self._broker.start()

    def finish(self) -> None:
        self._is_hurried = True
        self._thread.join(120)
        if self._sent < self._count:
            raise AssertionError(f"only {self._sent} of {self._count} lines were written")

    def close(self) -> None:
        self._is_closed = True
        self._thread.join(60)
        self._broker.stop()

    def _feed(self) -> None:
        piece = 500
        while self._sent < self._count and not self._is_closed:
            with self._idle:
                lines: list[Any] = self._lines[self._sent : self._sent + piece]
                partition = self._sent // piece % self._PARTITIONS
                values = [line.encode() for line in lines]
                self._cluster.send(self._TOPIC, values, partition=partition, acks="all")
                self._sent += len(lines)
            time.sleep(0.0 if self._is_hurried else 0.4)
