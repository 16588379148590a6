"""The only module that knows kafka-python: connections, metadata, offsets, fetches, groups.

``KafkaClient`` sends single requests and says what came of them; it does not retry, except that it
asks for the cluster's metadata again. kafka-python's parts that are used here are not all in its
``__all__``, hence the narrow version range in ``pyproject.toml``.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import kafka.errors as kafka_errors
from kafka.net.connection import KafkaConnection
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.protocol.consumer import (
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
)
from kafka.protocol.metadata import FindCoordinatorRequest, MetadataRequest

from pyspark_flowkafka.batches import AbortedTransaction
from pyspark_flowkafka.channel import Channel, Question
from pyspark_flowkafka.errors import (
    AuthenticationError,
    AuthorizationError,
    KafkaSourceError,
    UnavailableError,
)
from pyspark_flowkafka.offsets import Offsets, TopicPartition
from pyspark_flowkafka.properties import ClientSettings, Isolation
from pyspark_flowkafka.replies import (
    FetchReply,
    RetriableClientError,
    Status,
    TopicMetadata,
    status_of,
)
from pyspark_flowkafka.tls import tls_context

# A response of any size is taken: a broker sends one batch whole even if it is larger than what
# was asked for. What is asked for is limited by the settings.
_RESPONSE_BYTES_MAX = 2**31 - 1
# From version 12 on an answer has another header; from 13 on, topics have ids instead of names.
_FETCH_VERSIONS = (4, 11)
# From version 8 on, groups are asked for in lists; from 10 on, topics have ids.
_OFFSET_FETCH_VERSIONS = (1, 7)
_OFFSET_COMMIT_VERSIONS = (2, 9)
_FIND_COORDINATOR_VERSIONS = (0, 3)
_GROUP = 0
_NO_GENERATION = -1
_CLOSE_SECONDS = 5.0
_LOGIN_ATTEMPTS = 3
_CERTIFICATE_REFUSED = "CERTIFICATE_VERIFY_FAILED"
_CONNECTION_CLOSED = "socket disconnected"

# A PLAIN password is in the bytes of a request, and these write requests out when somebody sets
# their level to DEBUG, whenever that is.
for _name in ("kafka.net.connection", "kafka.protocol.parser"):
    logging.getLogger(_name).addFilter(lambda record: record.levelno > logging.DEBUG)


class KafkaClient:
    """Connections to one cluster, driven by one thread of kafka-python, and those that fetch.

    Safe for one caller.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        config = _config(settings)
        self._net = NetworkSelector(client_id=settings.client_id)
        try:
            self._manager = KafkaConnectionManager(self._net, **config)
        except (OSError, ValueError, ssl.SSLError) as error:
            raise _translated(error, settings) from None
        self._net.start()
        self.is_broken = False
        """Its thread has ended: it answers nothing any more."""
        self._is_bootstrapped = False
        self._leaders: dict[TopicPartition, int] = {}
        self._channels: dict[int, tuple[Channel, Any]] = {}
        self._correlation_id = 0

    # Metadata

    def topics(self, names: Iterable[str] | None) -> dict[str, TopicMetadata]:
        """Ask for some topics, or for all with None. Topics are never created by asking."""
        wanted = (
            MetadataRequest.ALL_TOPICS
            if names is None
            else [MetadataRequest.MetadataRequestTopic(name=name) for name in sorted(set(names))]
        )
        response = self._metadata(wanted)
        found = {}
        for topic in response.topics:
            leaders = {one.partition_index: one.leader_id for one in topic.partitions}
            status = status_of(topic.error_code)
            found[topic.name] = TopicMetadata(
                status, bool(topic.is_internal), leaders, _error_name(topic.error_code)
            )
            if status is Status.OK:
                for partition, leader in leaders.items():
                    self._leaders[TopicPartition(topic.name, partition)] = leader
        return found

    def forget_leader(self, topic_partition: TopicPartition) -> None:
        """Look for a partition's leader anew before the next request."""
        self._leaders.pop(topic_partition, None)

    def forget_leaders(self) -> None:
        """Look for all leaders anew: a broker does not answer, and it may have led any of them."""
        self._leaders.clear()

    def _metadata(self, topics: Any) -> Any:
        def request() -> Any:
            return MetadataRequest(topics=topics, allow_auto_topic_creation=False)

        self._bootstrap()
        try:
            response = self._exchange(request(), None)
        except RetriableClientError:
            # All brokers that were known may be gone; the addresses of the options are not.
            self._is_bootstrapped = False
            self._bootstrap()
            response = self._exchange(request(), None)
        self._wait(self._call(self._manager.cluster.update_metadata, response))
        return response

    def _bootstrap(self) -> None:
        if not self._is_bootstrapped:
            limit_ms = self.settings.api_timeout_ms
            if self.settings.security_protocol != "PLAINTEXT":
                self._wait(self._call(self._try_login), limit_ms)
            self._wait(self._call(self._manager.bootstrap_async, limit_ms), limit_ms)
            self._is_bootstrapped = True

    async def _try_login(self) -> None:
        """Raise what a broker has against the user, or we against its certificate.

        kafka-python's bootstrap would try again and again until its time is up, and not say why.
        Anything else that goes wrong here is left to it. A broker answers a wrong password and
        closes; kafka-python may see only the latter, so several closed connections in a row count
        as that answer.
        """
        closed = 0
        for _ in range(_LOGIN_ATTEMPTS):
            for broker in self._manager.cluster.bootstrap_brokers():
                await self._net.sleep(self._manager.connection_delay(broker.node_id))
                reason = await self._login_error(broker)
                if reason is None:
                    return
                closed += _CONNECTION_CLOSED in reason
        is_sasl = self.settings.security_protocol.startswith("SASL")
        if is_sasl and closed == _LOGIN_ATTEMPTS * len(self.settings.bootstrap_servers):
            raise _login_refused(self.settings, "the connection was closed during the log-in")

    async def _login_error(self, broker: Any) -> str | None:
        """Connect once; return what went wrong, or raise it if trying again is no use."""
        try:
            connection = self._manager.get_connection(
                broker.node_id,
                timeout_ms=self.settings.connection_setup_ms,
                refresh_metadata_on_err=False,
            )
            await connection
        except kafka_errors.SaslAuthenticationFailedError:
            raise
        except kafka_errors.KafkaError as error:
            if _CERTIFICATE_REFUSED in str(error):
                raise AuthenticationError(
                    f"the certificate of {broker.host}:{broker.port} is not trusted. Check "
                    f"'kafka.ssl.truststore.location', and that the certificate names the host"
                ) from None
            return str(error)
        connection.close()
        return None

    def _leader(self, topic_partition: TopicPartition) -> int | None:
        """Return who leads a partition, or None if there is no such partition."""
        leader = self._leaders.get(topic_partition, -1)
        if leader < 0:
            topic, partition = topic_partition
            found = self.topics([topic])[topic]
            if found.status is Status.UNKNOWN:
                return None
            if found.status is Status.OK and partition not in found.leaders:
                return None
            leader = found.leaders.get(partition, -1)
        if leader < 0:
            raise RetriableClientError(f"{topic_partition} has no leader")
        return leader

    # Offsets

    def list_offsets(
        self, wanted: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, tuple[Status, int]]:
        """Return offsets for times in ms, or for ``LATEST`` and ``EARLIEST``; -1: no such time."""
        found: dict[TopicPartition, tuple[Status, int]] = {}
        by_leader: dict[int, list[TopicPartition]] = {}
        for topic_partition in wanted:
            leader = self._leader(topic_partition)
            if leader is None:
                found[topic_partition] = Status.UNKNOWN, -1
            else:
                by_leader.setdefault(leader, []).append(topic_partition)
        sent = [
            self._send(self._offsets_request({one: wanted[one] for one in asked}), leader)
            for leader, asked in by_leader.items()
        ]
        for answer in sent:
            for topic in self._wait(answer).topics:
                for one in topic.partitions:
                    topic_partition = TopicPartition(topic.name, one.partition_index)
                    found[topic_partition] = status_of(one.error_code), one.offset
        return found

    def _offsets_request(self, wanted: Mapping[TopicPartition, int]) -> Any:
        kind = ListOffsetsRequest.ListOffsetsTopic
        return ListOffsetsRequest(
            replica_id=-1,
            isolation_level=self._isolation_level,
            topics=[
                kind(
                    name=topic,
                    partitions=[
                        kind.ListOffsetsPartition(
                            partition_index=partition,
                            current_leader_epoch=-1,
                            timestamp=wanted[TopicPartition(topic, partition)],
                        )
                        for partition in partitions
                    ],
                )
                for topic, partitions in _by_topic(wanted).items()
            ],
            min_version=2,
        )

    # Records

    def fetch(self, topic_partition: TopicPartition, offset: int, size: int) -> Question | None:
        """Ask a partition's leader for up to ``size`` bytes from an offset on; do not wait.

        None: there is no such partition.
        """
        leader = self._leader(topic_partition)
        if leader is None:
            return None
        kind = FetchRequest.FetchTopic
        request = FetchRequest(
            replica_id=-1,
            max_wait_ms=self.settings.fetch_wait_ms,
            min_bytes=self.settings.fetch_bytes_min,
            max_bytes=max(self.settings.fetch_bytes_max, size),
            isolation_level=self._isolation_level,
            session_id=0,
            session_epoch=-1,
            topics=[
                kind(
                    topic=topic_partition.topic,
                    partitions=[
                        kind.FetchPartition(
                            partition=topic_partition.partition,
                            current_leader_epoch=-1,
                            fetch_offset=offset,
                            log_start_offset=-1,
                            partition_max_bytes=size,
                        )
                    ],
                )
            ],
            min_version=_FETCH_VERSIONS[0],
            max_version=_FETCH_VERSIONS[1],
        )
        channel, versions = self._channel(leader)
        self._correlation_id = (self._correlation_id + 1) % 2**31
        try:
            request.API_VERSION = versions.api_version(request)
            request.with_header(self._correlation_id, self.settings.client_id)
            return channel.ask(
                request.encode(header=True, framed=True),
                correlation_id=self._correlation_id,
                version=request.API_VERSION,
            )
        except Exception as error:
            raise _translated(error, self.settings) from None

    def _channel(self, leader: int) -> tuple[Channel, Any]:
        """Return the connection that fetches from a broker, and the versions of its requests."""
        found = self._channels.get(leader)
        if found is not None and found[0].idle_seconds * 1000 > self.settings.connection_idle_ms:
            found[0].close()
        if found is None or found[0].is_closed:
            limit_ms = self.settings.connection_setup_ms + self.settings.request_timeout_ms
            found = self._wait(self._call(self._open_channel, leader), limit_ms)
            self._channels[leader] = found
        return found

    async def _open_channel(self, leader: int) -> tuple[Channel, Any]:
        """Let kafka-python connect and log in, and take the socket away from it.

        Two of its private attributes and one private method are used; the tests with a broker
        fail without them.
        """
        node = self._manager.cluster.broker_metadata(leader)
        if node is None:
            raise kafka_errors.UnknownBrokerIdError(leader)
        self._manager.maybe_raise_auth_failure(leader)
        if self._manager.connection_delay(leader) > 0:
            raise RetriableClientError("the broker could not be reached a moment ago")
        versions = self._manager.broker_version_data
        connection = KafkaConnection(
            self._net, node_id=leader, broker_version_data=versions, **self._manager.config
        )
        timeout_at = time.monotonic() + self.settings.connection_setup_ms / 1000
        await self._manager._connect(node, connection, timeout_at=timeout_at)
        await connection
        transport, versions = connection.transport, connection.broker_version_data
        reading, transport._read_task = transport._read_task, None
        self._net.cancel(reading)
        taken, transport._sock = transport._sock, None
        connection.close()
        return Channel(taken, send_seconds_max=self.settings.request_timeout_ms / 1000), versions

    def fetched(self, question: Question | None) -> FetchReply:
        """Wait for a fetch, and return what came."""
        if question is None:
            return FetchReply(Status.UNKNOWN, "UnknownTopicOrPartitionError")
        limit_ms = self.settings.request_timeout_ms + self.settings.fetch_wait_ms
        try:
            answer = question.channel.answer(question, seconds_max=limit_ms / 1000)
            response = FetchResponse.decode(answer, version=question.version)
            one = None if response.error_code else response.responses[0].partitions[0]
        except (ValueError, IndexError, struct.error):
            question.channel.close()
            raise RetriableClientError("an answer that cannot be read") from None
        except OSError as error:
            raise _translated(error, self.settings) from None
        if response.throttle_time_ms:
            pause_ms = min(response.throttle_time_ms, self.settings.request_timeout_ms)
            question.channel.keep_quiet(pause_ms / 1000)
        if one is None:
            return FetchReply(Status.RETRY, _error_name(response.error_code))
        status = status_of(one.error_code)
        if status is Status.UNKNOWN:
            # Whether there is such a partition is for the cluster's metadata to say, which is asked
            # next: a broker that has just started may not know yet what it leads.
            status = Status.RETRY
        is_committed = self.settings.isolation is Isolation.READ_COMMITTED
        listed = one.aborted_transactions or () if is_committed else ()
        return FetchReply(
            status=status,
            error=_error_name(one.error_code),
            # Not a copy, unless a version to come hands out a view of the buffer.
            data=bytes(one.records) if one.records is not None else b"",
            log_start=one.log_start_offset,
            log_end=one.last_stable_offset if is_committed else one.high_watermark,
            aborted=[AbortedTransaction(txn.producer_id, txn.first_offset) for txn in listed]
            if is_committed
            else None,
            is_throttled=bool(response.throttle_time_ms),
        )

    # Groups

    def committed(self, group: str, partitions: Iterable[TopicPartition]) -> Offsets:
        """Return what a group has committed; partitions without a commit are left out."""
        topics = [
            OffsetFetchRequest.OffsetFetchRequestTopic(name=topic, partition_indexes=numbers)
            for topic, numbers in _by_topic(partitions).items()
        ]
        request = OffsetFetchRequest(
            group_id=group,
            topics=topics,
            require_stable=True,
            min_version=_OFFSET_FETCH_VERSIONS[0],
            max_version=_OFFSET_FETCH_VERSIONS[1],
        )
        response = self._exchange(request, self._coordinator(group))
        _check_group(group, response.error_code)
        found: Offsets = {}
        for topic in response.topics:
            for one in topic.partitions:
                _check_group(group, one.error_code)
                if one.committed_offset >= 0:
                    found[TopicPartition(topic.name, one.partition_index)] = one.committed_offset
        return found

    def commit(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit offsets for a group that has no members."""
        kind = OffsetCommitRequest.OffsetCommitRequestTopic
        topics = [
            kind(
                name=topic,
                partitions=[
                    kind.OffsetCommitRequestPartition(
                        partition_index=partition,
                        committed_offset=offsets[TopicPartition(topic, partition)],
                        committed_leader_epoch=-1,
                        committed_metadata="",
                    )
                    for partition in partitions
                ],
            )
            for topic, partitions in _by_topic(offsets).items()
        ]
        request = OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=_NO_GENERATION,
            member_id="",
            group_instance_id=None,
            topics=topics,
            min_version=_OFFSET_COMMIT_VERSIONS[0],
            max_version=_OFFSET_COMMIT_VERSIONS[1],
        )
        response = self._exchange(request, self._coordinator(group))
        for topic in response.topics:
            for one in topic.partitions:
                _check_group(group, one.error_code)

    def _coordinator(self, group: str) -> int:
        self._bootstrap()
        request = FindCoordinatorRequest(
            key=group,
            key_type=_GROUP,
            min_version=_FIND_COORDINATOR_VERSIONS[0],
            max_version=_FIND_COORDINATOR_VERSIONS[1],
        )
        response = self._exchange(request, None)
        _check_group(group, response.error_code)
        if self._manager.cluster.broker_metadata(response.node_id) is None:
            self._metadata(MetadataRequest.NO_TOPICS)
        node: int = response.node_id
        return node

    # Plumbing

    def close(self) -> None:
        """Close all connections; what is still under way fails."""
        for channel, _ in self._channels.values():
            channel.close()
        # What cannot be closed in order is dropped.
        with contextlib.suppress(RetriableClientError, KafkaSourceError):
            self._wait(self._call(self._manager.close), int(_CLOSE_SECONDS * 1000))
        self._net.stop(timeout_ms=_CLOSE_SECONDS * 1000)
        self._net.close()

    @property
    def _isolation_level(self) -> int:
        return 1 if self.settings.isolation is Isolation.READ_COMMITTED else 0

    def _exchange(self, request: Any, node: int | None) -> Any:
        return self._wait(self._send(request, node))

    def _send(self, request: Any, node: int | None) -> Future[Any]:
        return self._call(self._manager.send, request, node)

    def _call(self, function: Any, *arguments: Any) -> Future[Any]:
        """Run something on the client's thread; kafka-python's future becomes an ordinary one."""
        answer: Future[Any] = Future()

        async def call() -> None:
            try:
                result = function(*arguments)
                if hasattr(result, "__await__"):
                    result = await result
                answer.set_result(result)
            except BaseException as error:
                answer.set_exception(error)

        try:
            self._net.call_soon_threadsafe(call)
        except Exception:
            self.is_broken = True
            answer.set_exception(RetriableClientError("the client's thread has ended"))
        return answer

    def _wait(self, answer: Future[Any], limit_ms: int | None = None) -> Any:
        limit_ms = self.settings.request_timeout_ms if limit_ms is None else limit_ms
        # The client has its own limits; this one is for whatever escapes them.
        seconds = (limit_ms + self.settings.connection_setup_ms) / 1000 + 1
        try:
            return answer.result(timeout=seconds)
        except TimeoutError:
            raise RetriableClientError(f"no answer within {seconds:.0f} seconds") from None
        except (RetriableClientError, KafkaSourceError):
            raise
        except Exception as error:
            raise _translated(error, self.settings) from None


def _config(settings: ClientSettings) -> dict[str, Any]:
    """Return the settings in kafka-python's words."""
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    ]
    if settings.receive_buffer_bytes > 0:
        options.append((socket.SOL_SOCKET, socket.SO_RCVBUF, settings.receive_buffer_bytes))
    if settings.send_buffer_bytes > 0:
        options.append((socket.SOL_SOCKET, socket.SO_SNDBUF, settings.send_buffer_bytes))
    return {
        "bootstrap_servers": list(settings.bootstrap_servers),
        "client_id": settings.client_id,
        "security_protocol": settings.security_protocol,
        "sasl_mechanism": settings.sasl_mechanism,
        "sasl_plain_username": settings.sasl_username,
        "sasl_plain_password": settings.sasl_password,
        "ssl_context": tls_context(settings),
        "ssl_check_hostname": settings.ssl_check_hostname,
        "receive_message_max_bytes": _RESPONSE_BYTES_MAX,
        "request_timeout_ms": settings.request_timeout_ms + settings.fetch_wait_ms,
        "reconnect_backoff_ms": settings.reconnect_backoff_ms,
        "reconnect_backoff_max_ms": settings.reconnect_backoff_max_ms,
        "socket_connection_setup_timeout_ms": settings.connection_setup_ms,
        "socket_connection_setup_timeout_max_ms": settings.connection_setup_ms,
        "connections_max_idle_ms": settings.connection_idle_ms,
        "metadata_max_age_ms": settings.metadata_age_ms,
        "socket_options": options,
    }


def _translated(error: Exception, settings: ClientSettings) -> Exception:
    """Turn kafka-python's errors into ours; only their kind is told, never what they say."""
    kind = type(error).__name__
    servers = ", ".join(settings.bootstrap_servers)
    if isinstance(error, kafka_errors.SaslAuthenticationFailedError):
        return _login_refused(settings, kind)
    if isinstance(error, kafka_errors.AuthorizationError):
        return AuthorizationError(f"the brokers at {servers} deny it to this user ({kind})")
    if isinstance(error, kafka_errors.UnknownBrokerIdError):
        return RetriableClientError("a broker is not known yet")
    if getattr(error, "retriable", False) or isinstance(error, OSError):
        return RetriableClientError(kind)
    if isinstance(error, kafka_errors.KafkaConfigurationError):
        return AuthenticationError(f"the client refuses its settings ({kind})")
    return UnavailableError(f"the brokers at {servers} cannot be used ({kind})")


def _login_refused(settings: ClientSettings, why: str) -> AuthenticationError:
    return AuthenticationError(
        f"the brokers at {', '.join(settings.bootstrap_servers)} refused the user or the password "
        f"({why}). Check 'kafka.sasl.jaas.config' and 'kafka.sasl.mechanism'; their values are not "
        f"shown"
    )


def _error_name(code: int) -> str:
    return "" if code == 0 else str(kafka_errors.for_code(code).__name__)


def _check_group(group: str, code: int) -> None:
    match status_of(code):
        case Status.OK:
            return
        case Status.RETRY:
            raise RetriableClientError(f"group {group!r}: {_error_name(code)}")
        case Status.DENIED:
            raise AuthorizationError(f"group {group!r} is denied to this user")
    raise KafkaSourceError(f"group {group!r} cannot be used: {_error_name(code)}")


def _by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        topics.setdefault(topic, []).append(partition)
    return topics
