"""Kafka brokers in KRaft mode on free ports of the loopback interface."""

from __future__ import annotations

import base64
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from integration.kafka.distribution import java, kafka_jars

_START_SECONDS_MAX = 90.0
_STOP_SECONDS_MAX = 20.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@dataclass
class Broker:
    """One broker process; ``properties`` are added to its own, and win."""

    folder: Path
    node_id: int
    port: int
    controller_port: int
    voters: str
    cluster_id: str
    protocol: str = "PLAINTEXT"
    properties: Mapping[str, str] = field(default_factory=dict)
    format_arguments: tuple[str, ...] = ()
    roles: str = "broker,controller"
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the broker, formatting its folder the first time, and wait until it listens."""
        config = self.folder / "server.properties"
        if not config.exists():
            self._format(config)
        log = open(self.folder / "broker.log", "ab")  # noqa: SIM115
        command = self._command("-Xmx512m", "kafka.Kafka", str(config))
        # In a session of its own, so that nobody takes its CPU time for Spark's.
        self._process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
        )
        log.close()
        self._await_port()

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End the process in order."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(_STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_SECONDS_MAX)

    def _format(self, config: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{name}={value}\n" for name, value in self._settings().items())
        config.write_text(text, encoding="utf-8")
        command = self._command("-Xmx128m", "kafka.tools.StorageTool", "format")
        command += ["-t", self.cluster_id, "-c", str(config), *self.format_arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def _settings(self) -> dict[str, str]:
        listeners = [f"{self.protocol}://127.0.0.1:{self.port}"]
        if "controller" in self.roles:
            listeners.append(f"CONTROLLER://127.0.0.1:{self.controller_port}")
        return {
            "process.roles": self.roles,
            "node.id": str(self.node_id),
            "controller.quorum.voters": self.voters,
            "listeners": ",".join(listeners),
            "advertised.listeners": f"{self.protocol}://127.0.0.1:{self.port}",
            "inter.broker.listener.name": self.protocol,
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": f"{self.protocol}:{self.protocol},"
            "CONTROLLER:PLAINTEXT",
            "log.dirs": str(self.folder / "logs"),
            "offsets.topic.num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.num.partitions": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            # Tests write records of any age.
            "log.retention.ms": "-1",
            "log.message.timestamp.after.max.ms": "9223372036854775807",
            **self.properties,
        }

    def _command(self, heap: str, main: str, *arguments: str) -> list[str]:
        # A quiet machine matters more than a fast broker: fewer compiler and collector threads.
        options = [heap, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
        options.append("-Djava.net.preferIPv4Stack=true")
        return [java(), *options, "-cp", str(kafka_jars() / "*"), main, *arguments]

    def _await_port(self) -> None:
        deadline = time.monotonic() + _START_SECONDS_MAX
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError((self.folder / "broker.log").read_text(errors="replace")[-3000:])
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise RuntimeError(f"no broker at {self.address} after {_START_SECONDS_MAX} s")


def single_broker(folder: Path, **more: object) -> Broker:
    """Return a broker that is its own controller; not started yet."""
    port, controller = free_ports(2)
    return Broker(
        folder=folder,
        node_id=1,
        port=port,
        controller_port=controller,
        voters=f"1@127.0.0.1:{controller}",
        cluster_id=_cluster_id(),
        **more,  # type: ignore[arg-type]
    )


def two_brokers(folder: Path) -> tuple[Broker, Broker]:
    """Return two brokers of one cluster; the first is also the controller and must stay alive."""
    first_port, second_port, controller = free_ports(3)
    cluster_id = _cluster_id()
    shared = {
        "default.replication.factor": "2",
        "offsets.topic.replication.factor": "2",
        "replica.lag.time.max.ms": "2000",
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
    }
    voters = f"1@127.0.0.1:{controller}"
    first = Broker(folder / "1", 1, first_port, controller, voters, cluster_id, properties=shared)
    second = Broker(
        folder / "2",
        2,
        second_port,
        controller,
        voters,
        cluster_id,
        properties=shared,
        roles="broker",
    )
    return first, second


def _cluster_id() -> str:
    # With a zero in front it never begins with a dash, which would be taken for an argument.
    return base64.urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
