"""Kafka's own property names (``kafka.*`` options), translated to what the client needs.

Everything is decided here, before any connection: what is understood, what may be ignored because
it has no meaning for this source, what is refused because Spark refuses it, and what is refused
because Python has no equivalent, with the way out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from flowspark.errors import OptionError
from pyspark_flowkafka.errors import FORMAT

PREFIX = "kafka."


class Isolation(StrEnum):
    """Whether records of open and aborted transactions are read."""

    READ_UNCOMMITTED = "read_uncommitted"
    READ_COMMITTED = "read_committed"


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How to reach a cluster, and how to fetch from it. Hashable: it is the key of a cache."""

    bootstrap_servers: tuple[str, ...]
    client_id: str = "flowkafka"
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str | None = None
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)
    ssl_ca_file: str | None = None
    ssl_ca_data: str | None = field(default=None, repr=False)
    ssl_certificate_file: str | None = None
    ssl_key_password: str | None = field(default=None, repr=False)
    ssl_check_hostname: bool = True
    ssl_protocols: tuple[str, ...] = ("TLSv1.2", "TLSv1.3")
    isolation: Isolation = Isolation.READ_UNCOMMITTED
    group_id: str | None = None
    check_crcs: bool = True
    # Kafka's default is 1 MiB; four times as much halves the cost of a large read.
    partition_fetch_bytes: int = 4 << 20
    fetch_bytes_max: int = 50 << 20
    fetch_bytes_min: int = 1
    fetch_wait_ms: int = 500
    request_timeout_ms: int = 30_000
    api_timeout_ms: int = 60_000
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1_000
    reconnect_backoff_ms: int = 50
    reconnect_backoff_max_ms: int = 1_000
    connection_setup_ms: int = 10_000
    connection_idle_ms: int = 540_000
    metadata_age_ms: int = 300_000
    receive_buffer_bytes: int = -1
    send_buffer_bytes: int = -1


_SECURITY = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_LOGIN_MODULES = ("PlainLoginModule", "ScramLoginModule")

# As in Spark's source, with its reasons.
_FORBIDDEN = {
    "auto.offset.reset": "set the option 'startingOffsets' to 'earliest' or 'latest' instead: the "
    "query keeps track of its offsets by itself",
    "key.deserializer": "keys are always binary; convert them with DataFrame operations",
    "value.deserializer": "values are always binary; convert them with DataFrame operations",
    "enable.auto.commit": "the query's checkpoint keeps the offsets; the option 'commitOffsets' "
    "also commits them to a group, for lag tools",
    "interceptor.classes": "interceptors could change records",
}

_PEM = (
    "Python reads PEM files, not Java's key stores. Export it, for example with "
    "`keytool -importkeystore -srckeystore STORE -destkeystore store.p12 -deststoretype PKCS12` "
    "and `openssl pkcs12 -in store.p12 -out store.pem`"
)
_NO_EQUIVALENT = {
    "ssl.truststore.password": _PEM,
    "ssl.keystore.password": _PEM,
    "ssl.keystore.key": "put the key and its certificates into one PEM file and name it with "
    "'kafka.ssl.keystore.location' and 'kafka.ssl.keystore.type' = 'PEM'",
    "ssl.keystore.certificate.chain": "put the key and its certificates into one PEM file and name "
    "it with 'kafka.ssl.keystore.location' and 'kafka.ssl.keystore.type' = 'PEM'",
    "ssl.cipher.suites": "leave it out: Python's own choice of ciphers is used",
    "ssl.engine.factory.class": "it names a Java class; use PEM files",
    "ssl.provider": "it names a Java provider; leave it out",
    "sasl.client.callback.handler.class": "it names a Java class; use PLAIN or SCRAM",
    "sasl.login.callback.handler.class": "it names a Java class; use PLAIN or SCRAM",
    "sasl.login.class": "it names a Java class; use PLAIN or SCRAM",
    "sasl.oauthbearer.token.endpoint.url": "OAUTHBEARER is not supported; use PLAIN or SCRAM",
    "sasl.kerberos.service.name": "Kerberos is not supported; use PLAIN or SCRAM",
    "security.providers": "it names Java classes; leave it out",
}

# Without a meaning here: there is no group membership, no poll loop, no JMX. A query that sets
# them reads the same records with and without.
_IGNORED = frozenset(
    {
        "allow.auto.create.topics",
        "auto.commit.interval.ms",
        "auto.include.jmx.reporter",
        "client.dns.lookup",
        "client.rack",
        "enable.metrics.push",
        "exclude.internal.topics",
        "group.instance.id",
        "group.protocol",
        "group.remote.assignor",
        "heartbeat.interval.ms",
        "max.poll.interval.ms",
        "max.poll.records",
        "metadata.recovery.rebootstrap.trigger.ms",
        "metadata.recovery.strategy",
        "metric.reporters",
        "metrics.num.samples",
        "metrics.recording.level",
        "metrics.sample.window.ms",
        "partition.assignment.strategy",
        "session.timeout.ms",
        "socket.connection.setup.timeout.max.ms",
        "ssl.keymanager.algorithm",
        "ssl.protocol",
        "ssl.secure.random.implementation",
        "ssl.trustmanager.algorithm",
    }
)


def translate(properties: Mapping[str, str]) -> ClientSettings:
    """Return the settings that some properties (without ``kafka.``) stand for."""
    given = {name.lower(): value.strip() for name, value in properties.items()}
    for name in given:
        _check_name(name)
    values: dict[str, object] = {}
    for name, (setting, read) in _TRANSLATED.items():
        if name in given:
            values[setting] = read(name, given[name])
    if not values.get("bootstrap_servers"):
        raise _error("bootstrap.servers", "is missing: it names the brokers, as in 'host:9092'")
    values.update(_tls(given))
    values.update(_sasl(given, str(values.get("security_protocol", "PLAINTEXT"))))
    return ClientSettings(**values)  # type: ignore[arg-type]


def _check_name(name: str) -> None:
    if name in _FORBIDDEN:
        raise _error(name, f"is not supported: {_FORBIDDEN[name]}")
    if name in _NO_EQUIVALENT:
        raise _error(name, f"has no equivalent in Python. {_NO_EQUIVALENT[name]}")
    if name in _TRANSLATED or name in _IGNORED or name in _ELSEWHERE:
        return
    known = sorted({*_TRANSLATED, *_IGNORED, *_ELSEWHERE})
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f"did you mean 'kafka.{near[0]}'?" if near else "leave it out."
    raise _error(name, f"is not a property that this source understands: {hint}")


def _tls(given: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for store, setting in (("truststore", "ssl_ca_file"), ("keystore", "ssl_certificate_file")):
        location, kind = given.get(f"ssl.{store}.location"), given.get(f"ssl.{store}.type", "JKS")
        if location is not None:
            if kind.upper() != "PEM":
                raise _error(
                    f"ssl.{store}.location",
                    f"is a {kind} store. {_PEM}, then name the "
                    f"file and set 'kafka.ssl.{store}.type' to 'PEM'",
                )
            values[setting] = location
    if "ssl.truststore.certificates" in given:
        values["ssl_ca_data"] = given["ssl.truststore.certificates"]
    if "ssl.key.password" in given:
        values["ssl_key_password"] = given["ssl.key.password"]
    return values


def _sasl(given: Mapping[str, str], protocol: str) -> dict[str, object]:
    if not protocol.startswith("SASL_"):
        return {}
    mechanism = given.get("sasl.mechanism", "GSSAPI").upper()
    if mechanism not in _MECHANISMS:
        raise _error("sasl.mechanism", f"must be one of {', '.join(_MECHANISMS)}, not {mechanism}")
    if "sasl.jaas.config" not in given:
        raise _error(
            "sasl.jaas.config",
            "is missing: it has the user and the password, as in "
            "'org.apache.kafka.common.security.scram.ScramLoginModule required "
            'username="..." password="...";\'',
        )
    username, password = parse_jaas(given["sasl.jaas.config"])
    return {"sasl_mechanism": mechanism, "sasl_username": username, "sasl_password": password}


_JAAS = re.compile(
    r"\s*([\w.$]+)\s+(required|requisite|sufficient|optional)\s+(.*?);?\s*", re.DOTALL
)
_JAAS_OPTION = re.compile(
    r"""(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s;"']+))"""
)


def parse_jaas(text: str) -> tuple[str, str]:
    """Return user and password of a JAAS configuration. Nothing of it is ever repeated."""
    match = _JAAS.fullmatch(text)
    if match is None:
        raise _error(
            "sasl.jaas.config",
            'is not of the form \'module required username="..." '
            'password="...";\' (its value is not shown)',
        )
    module = match[1].rpartition(".")[2]
    if module not in _LOGIN_MODULES:
        raise _error(
            "sasl.jaas.config",
            f"names {module}; only {' and '.join(_LOGIN_MODULES)} are understood",
        )
    found: dict[str, str] = {}
    for name, double, single, plain in _JAAS_OPTION.findall(match[3]):
        found[name.lower()] = re.sub(r"\\(.)", r"\1", double or single) or plain
    if not found.get("username") or "password" not in found:
        raise _error("sasl.jaas.config", "has no username or no password")
    return found["username"], found["password"]


def _error(name: str, message: str) -> OptionError:
    return OptionError(FORMAT, f"option '{PREFIX}{name}' {message}")


def _servers(name: str, value: str) -> tuple[str, ...]:
    # Kafka's own clients pass over a protocol in front, as providers' consoles show it.
    servers = tuple(
        re.sub(r"^[0-9A-Za-z_]+://", "", server.strip())
        for server in value.split(",")
        if server.strip()
    )
    for server in servers:
        if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/]+):\d{1,5}", server):
            raise _error(name, f"must be a list of host:port, not {server!r}")
    return servers


def _text(name: str, value: str) -> str:
    if not value:
        raise _error(name, "is empty")
    return value


def _one_of(*words: str) -> Callable[[str, str], str]:
    def read(name: str, value: str) -> str:
        for word in words:
            if word.lower() == value.lower():
                return word
        raise _error(name, f"must be one of {', '.join(words)}, not {value!r}")

    return read


def _isolation(name: str, value: str) -> Isolation:
    return Isolation(_one_of(*Isolation)(name, value))


def _number(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str, str], int]:
    def read(name: str, value: str) -> int:
        if not re.fullmatch(r"-?\d+", value) or not minimum <= int(value) <= maximum:
            raise _error(name, f"must be a number from {minimum} to {maximum}, not {value!r}")
        return int(value)

    return read


def _boolean(name: str, value: str) -> bool:
    return _one_of("true", "false")(name, value) == "true"


def _identification(name: str, value: str) -> bool:
    # An empty text is Kafka's way to say that the host's name is not checked.
    if value.lower() not in {"", "https"}:
        raise _error(name, f"must be 'https' or empty, not {value!r}")
    return value != ""


def _protocols(name: str, value: str) -> tuple[str, ...]:
    names = tuple(one.strip() for one in value.split(",") if one.strip())
    if not names or not set(names) <= {"TLSv1.2", "TLSv1.3"}:
        raise _error(name, f"must name TLSv1.2, TLSv1.3 or both, not {value!r}")
    return names


_TRANSLATED: Mapping[str, tuple[str, Callable[[str, str], object]]] = {
    "bootstrap.servers": ("bootstrap_servers", _servers),
    "client.id": ("client_id", _text),
    "security.protocol": ("security_protocol", _one_of(*_SECURITY)),
    "ssl.endpoint.identification.algorithm": ("ssl_check_hostname", _identification),
    "ssl.enabled.protocols": ("ssl_protocols", _protocols),
    "isolation.level": ("isolation", _isolation),
    "group.id": ("group_id", _text),
    "check.crcs": ("check_crcs", _boolean),
    "max.partition.fetch.bytes": ("partition_fetch_bytes", _number(1)),
    "fetch.max.bytes": ("fetch_bytes_max", _number(1)),
    "fetch.min.bytes": ("fetch_bytes_min", _number(0)),
    "fetch.max.wait.ms": ("fetch_wait_ms", _number(0)),
    "request.timeout.ms": ("request_timeout_ms", _number(1)),
    "default.api.timeout.ms": ("api_timeout_ms", _number(1)),
    "retry.backoff.ms": ("retry_backoff_ms", _number(0)),
    "retry.backoff.max.ms": ("retry_backoff_max_ms", _number(0)),
    "reconnect.backoff.ms": ("reconnect_backoff_ms", _number(0)),
    "reconnect.backoff.max.ms": ("reconnect_backoff_max_ms", _number(0)),
    "socket.connection.setup.timeout.ms": ("connection_setup_ms", _number(1)),
    "connections.max.idle.ms": ("connection_idle_ms", _number(1)),
    "metadata.max.age.ms": ("metadata_age_ms", _number(1)),
    "receive.buffer.bytes": ("receive_buffer_bytes", _number(-1)),
    "send.buffer.bytes": ("send_buffer_bytes", _number(-1)),
}

# Read by ``_tls`` and ``_sasl``.
_ELSEWHERE = frozenset(
    {
        "sasl.jaas.config",
        "sasl.mechanism",
        "ssl.key.password",
        "ssl.keystore.location",
        "ssl.keystore.type",
        "ssl.truststore.certificates",
        "ssl.truststore.location",
        "ssl.truststore.type",
    }
)
