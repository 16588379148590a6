"""Options of the source, read once into plain values."""

from __future__ import annotations

import codecs
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from flowspark.locations import shared_location
from flowspark.options import Options

__all__ = [
    "LineRules",
    "Mode",
    "OnBadLine",
    "OnLongLine",
    "OnPartialLine",
    "Protocol",
    "Reconnecting",
    "SocketOptions",
    "TlsOptions",
]

FORMAT = "flowsocket"

KNOWN = (
    "host",
    "port",
    "mode",
    "protocol",
    "stateLocation",
    "uid",
    "includeTimestamp",
    "includeSource",
    "delimiter",
    "charset",
    "onDecodeError",
    "maxLineBytes",
    "onLongLine",
    "onPartialLine",
    "numPartitions",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "maxSpoolBytes",
    "segmentBytes",
    "segmentInterval",
    "connectTimeout",
    "readTimeout",
    "reconnect",
    "reconnectAttempts",
    "reconnectDelay",
    "reconnectMaxDelay",
    "maxConnections",
    "maxSenders",
    "idleTimeout",
    "availableNowIdle",
    "storageTimeout",
    "tls",
    "tlsCaFile",
    "tlsCertFile",
    "tlsKeyFile",
    "tlsKeyPassword",
    "tlsVerify",
    "tlsServerName",
)

DELIMITER_BYTES_MAX = 16
# Offsets in an Arrow string column are 32 bits wide, and a segment is one such column.
SEGMENT_BYTES_MAX = 1 << 30
_ESCAPES = {"\\n": "\n", "\\r": "\r", "\\t": "\t", "\\0": "\0"}


class Mode(StrEnum):
    """Who opens the connection."""

    CONNECT = "connect"
    LISTEN = "listen"


class Protocol(StrEnum):
    """What is spoken on a connection."""

    PLAIN = "plain"
    ACK = "ack"


class OnBadLine(StrEnum):
    """What becomes of a line that is no text in the charset."""

    FAIL = "fail"
    REPLACE = "replace"
    SKIP = "skip"


class OnLongLine(StrEnum):
    """What becomes of a line above ``maxLineBytes``."""

    FAIL = "fail"
    TRUNCATE = "truncate"
    SKIP = "skip"


class OnPartialLine(StrEnum):
    """What becomes of what follows the last delimiter when a connection ends."""

    EMIT = "emit"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class LineRules:
    """How a stream of bytes becomes lines."""

    delimiter: bytes = b"\n"
    charset: str = "utf-8"
    max_line_bytes: int = 1 << 20
    on_decode_error: OnBadLine = OnBadLine.FAIL
    on_long_line: OnLongLine = OnLongLine.FAIL
    on_partial_line: OnPartialLine = OnPartialLine.EMIT

    @property
    def strips_cr(self) -> bool:
        """Whether a carriage return right before the delimiter belongs to it, as in Flink."""
        return self.delimiter == b"\n"


@dataclass(frozen=True, slots=True)
class Reconnecting:
    """How often and how fast a lost or refused connection is tried again."""

    enabled: bool = True
    attempts: int = 10
    delay_ms: int = 1000
    max_delay_ms: int = 30_000

    def delay_s(self, failures: int) -> float:
        """Return how long to wait after so many failures in a row: twice as long each time."""
        # The exponent is capped too, because a million failures would make a number of that size.
        return min(self.max_delay_ms, self.delay_ms << min(max(failures, 1) - 1, 32)) / 1000


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How connections are encrypted, and who is believed to be who."""

    ca_file: str | None
    cert_file: str | None
    key_file: str | None
    key_password: str | None = field(repr=False)
    verify: bool = True
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """Everything that a user may say about one source."""

    host: str
    port: int
    mode: Mode
    protocol: Protocol
    state_location: str
    uid: str
    include_timestamp: bool
    include_source: bool
    rules: LineRules
    num_partitions: int
    max_rows_per_trigger: int | None
    max_bytes_per_trigger: int | None
    max_spool_bytes: int
    segment_bytes: int
    segment_interval_ms: int
    connect_timeout_ms: int
    read_timeout_ms: int | None
    reconnecting: Reconnecting
    max_connections: int
    max_senders: int
    idle_timeout_ms: int | None
    available_now_idle_ms: int
    storage_timeout_ms: int
    tls: TlsOptions | None
    storage_options: Mapping[str, Any] = field(repr=False)

    @property
    def schema(self) -> str:
        """The columns, as Spark writes them."""
        columns = ["value string"]
        if self.include_timestamp:
            columns.append("timestamp timestamp")
        if self.include_source:
            columns.append("source string")
        return ", ".join(columns)

    @property
    def address(self) -> str:
        """Where lines come from or go to, for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SocketOptions:
        """Read the options as Spark hands them over."""
        options = Options(FORMAT, given, known=KNOWN)
        mode = options.choice("mode", Mode.CONNECT)
        protocol = options.choice("protocol", Protocol.PLAIN)
        host = _host(options, mode)
        port = int(options.required("port", "the TCP port of the lines") and _port(options))
        segment_bytes = _segment_bytes(options)
        return cls(
            host=host,
            port=port,
            mode=mode,
            protocol=protocol,
            state_location=_state_location(options),
            uid=_uid(options, default=f"{mode}-{host}-{port}"),
            include_timestamp=options.boolean("includeTimestamp", False),
            include_source=options.boolean("includeSource", False),
            rules=_rules(options, protocol),
            num_partitions=_count(options, "numPartitions", max(2, os.cpu_count() or 2), 10_000),
            max_rows_per_trigger=options.integer("maxRowsPerTrigger", minimum=1),
            max_bytes_per_trigger=options.size_bytes("maxBytesPerTrigger", minimum=1),
            max_spool_bytes=_max_spool_bytes(options, segment_bytes),
            segment_bytes=segment_bytes,
            segment_interval_ms=_span_ms(options, "segmentInterval", "50ms"),
            connect_timeout_ms=_span_ms(options, "connectTimeout", "10 seconds", minimum_ms=1),
            read_timeout_ms=_optional_span_ms(options, "readTimeout", None, mode, Mode.CONNECT),
            reconnecting=_reconnecting(options, mode),
            max_connections=_count(options, "maxConnections", 100, 10_000),
            max_senders=_count(options, "maxSenders", 1000, 10_000),
            idle_timeout_ms=_optional_span_ms(
                options, "idleTimeout", "10 minutes", mode, Mode.LISTEN
            ),
            available_now_idle_ms=_span_ms(options, "availableNowIdle", "1 second", minimum_ms=1),
            storage_timeout_ms=_span_ms(options, "storageTimeout", "1 minute"),
            tls=_tls(options, mode),
            storage_options=options.storage_options(),
        )


def _host(options: Options, mode: Mode) -> str:
    if mode is Mode.LISTEN:
        # A port that anybody can write to is opened only on purpose.
        host = options.text("host", "127.0.0.1")
        if host is not None and host.strip():
            return host.strip()
    return options.required("host", "the name or address that lines come from").strip()


def _port(options: Options) -> int:
    return options.integer("port", minimum=1, maximum=65535) or 0


def _state_location(options: Options) -> str:
    location = options.required(
        "stateLocation",
        "received lines are kept there until Spark is done with them. Give a folder that the "
        "driver and all executors reach, or the URL of an object store, as in s3://bucket/state",
    )
    return shared_location(FORMAT, "option 'stateLocation'", location)


def _uid(options: Options, *, default: str) -> str:
    uid = options.text("uid", default)
    if uid is None or not uid.strip():
        raise options.error("option 'uid' is empty: leave it out, or name this source")
    return uid


def _count(options: Options, name: str, default: int, maximum: int) -> int:
    number = options.integer(name, default, minimum=1, maximum=maximum)
    assert number is not None
    return number


def _span_ms(options: Options, name: str, default: str, *, minimum_ms: int = 0) -> int:
    span_ms = options.duration_ms(name, default, minimum_ms=minimum_ms)
    assert span_ms is not None
    return span_ms


def _optional_span_ms(
    options: Options, name: str, default: str | None, mode: Mode, wanted: Mode
) -> int | None:
    """Return a time-out that one mode has; 0 is the way to say that there is none."""
    if mode is not wanted:
        if name in options:
            raise options.error(f"option {name!r} is for mode={wanted}, not for mode={mode}")
        return None
    return options.duration_ms(name, default) or None


def _size(options: Options, name: str, default: str, minimum: int) -> int:
    size = options.size_bytes(name, default, minimum=minimum)
    assert size is not None
    return size


def _segment_bytes(options: Options) -> int:
    size = _size(options, "segmentBytes", "8m", 4096)
    if size > SEGMENT_BYTES_MAX:
        raise options.error(
            f"option 'segmentBytes' must be at most {SEGMENT_BYTES_MAX} (1g), not {size}"
        )
    return size


def _max_spool_bytes(options: Options, segment_bytes: int) -> int:
    size = _size(options, "maxSpoolBytes", "1g", 1)
    if size < segment_bytes:
        raise options.error(
            f"option 'maxSpoolBytes' must be at least 'segmentBytes', which is {segment_bytes}, "
            f"not {size}: a spool that cannot hold a segment would never go on"
        )
    return size


def _rules(options: Options, protocol: Protocol) -> LineRules:
    partial = options.choice("onPartialLine", OnPartialLine.EMIT)
    if protocol is Protocol.ACK:
        if partial is OnPartialLine.EMIT and "onPartialLine" in options:
            raise options.error(
                "option 'onPartialLine' must be drop with protocol=ack, not 'emit': the sender "
                "sends an unfinished line again, and it would be there twice"
            )
        partial = OnPartialLine.DROP
    size = _size(options, "maxLineBytes", "1m", 1)
    if size > SEGMENT_BYTES_MAX // 4:
        raise options.error(
            f"option 'maxLineBytes' must be at most {SEGMENT_BYTES_MAX // 4} (256m), not {size}"
        )
    return LineRules(
        delimiter=_delimiter(options),
        charset=_charset(options),
        max_line_bytes=size,
        on_decode_error=options.choice("onDecodeError", OnBadLine.FAIL),
        on_long_line=options.choice("onLongLine", OnLongLine.FAIL),
        on_partial_line=partial,
    )


def _delimiter(options: Options) -> bytes:
    text = options.text("delimiter", "\n") or ""
    # SQL and the command line have no easy way to write a control character.
    for escape, character in _ESCAPES.items():
        text = text.replace(escape, character)
    try:
        delimiter = text.encode()
    except UnicodeEncodeError:
        raise options.error(f"option 'delimiter' is not valid text: {text!r}") from None
    if "\ufffd" in text:
        raise options.error(
            "option 'delimiter' has U+FFFD in it, which stands for bytes that are no text: choose "
            "another one"
        )
    if not 1 <= len(delimiter) <= DELIMITER_BYTES_MAX:
        raise options.error(
            f"option 'delimiter' must have 1..{DELIMITER_BYTES_MAX} bytes, not {len(delimiter)}"
        )
    return delimiter


def _charset(options: Options) -> str:
    given = (options.text("charset") or "utf-8").strip()
    try:
        found = codecs.lookup(given)
        is_text = getattr(found, "_is_text_encoding", True)
        if not is_text or found.incrementaldecoder is None:
            raise LookupError
        # Some names are looked up and still decode nothing, such as "undefined", or only what is
        # right, such as "idna": bytes that are no text are to be marked, not to end everything.
        found.incrementaldecoder("surrogateescape").decode(b"")
    except (LookupError, UnicodeError, TypeError, ValueError):
        raise options.error(
            f"option 'charset' must be a charset that Python knows, such as utf-8, iso-8859-1 or "
            f"utf-16-le, not {given!r}"
        ) from None
    return found.name


def _reconnecting(options: Options, mode: Mode) -> Reconnecting:
    names = ("reconnect", "reconnectAttempts", "reconnectDelay", "reconnectMaxDelay")
    given = [name for name in names if name in options]
    if mode is Mode.LISTEN and given:
        raise options.error(f"option {given[0]!r} is for mode=connect: with mode=listen peers come")
    attempts = options.integer("reconnectAttempts", 10, minimum=0)
    assert attempts is not None
    delay_ms = _span_ms(options, "reconnectDelay", "1 second", minimum_ms=1)
    max_delay_ms = _span_ms(options, "reconnectMaxDelay", "30 seconds", minimum_ms=1)
    return Reconnecting(
        enabled=options.boolean("reconnect", True),
        attempts=attempts,
        delay_ms=delay_ms,
        max_delay_ms=max(delay_ms, max_delay_ms),
    )


def _tls(options: Options, mode: Mode) -> TlsOptions | None:
    if not options.boolean("tls", False):
        given = [name for name in KNOWN if name.startswith("tls") and name in options]
        if [name for name in given if name != "tls"]:
            raise options.error(
                f"option {next(name for name in given if name != 'tls')!r} has no effect without "
                f"tls=true: set it, or leave the option out"
            )
        return None
    for name in ("tlsCaFile", "tlsCertFile", "tlsKeyFile"):
        path = options.text(name)
        if path is not None and not os.path.isfile(path):
            raise options.error(f"option {name!r} names no file: {path!r}")
    if mode is Mode.LISTEN and options.text("tlsCertFile") is None:
        raise options.error(
            "option 'tlsCertFile' is missing: a server with TLS shows a certificate"
        )
    if options.text("tlsKeyFile") is not None and options.text("tlsCertFile") is None:
        raise options.error("option 'tlsCertFile' is missing: 'tlsKeyFile' is the key of it")
    return TlsOptions(
        ca_file=options.text("tlsCaFile"),
        cert_file=options.text("tlsCertFile"),
        key_file=options.text("tlsKeyFile"),
        key_password=options.text("tlsKeyPassword"),
        verify=options.boolean("tlsVerify", True),
        server_name=options.text("tlsServerName"),
    )
