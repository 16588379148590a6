"""Trying a state location and a broker out, leaving nothing behind."""

from __future__ import annotations

import os
import re
import socket
import struct
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowspark.command.contract import CommandError, ExitCode
from flowstate.checkpoint.names import checkpoint_of_url
from flowstate.errors import StorageError
from flowstate.storage.filesystems import open_file_system

__all__ = ["BrokerAnswer", "address_of", "probe_broker", "probe_state"]

_TIMEOUT_S = 5.0
_PORT = re.compile(r"[0-9]{1,5}")
_REPLY_BYTES_MAX = 1 << 20
_API_VERSIONS = 18
_CORRELATION_ID = 7


class BrokerAnswer(Exception):  # noqa: N818 (an answer that is not the one that was hoped for)
    """The address answered, but not as a plain Kafka broker does; the message says how."""


def probe_state(url: str, storage_options: Mapping[str, Any]) -> str:
    """Create a file exclusively, twice, and return the location; raises ``StorageError``.

    The second attempt must be refused, or two committers could not be told apart.
    """
    root, _ = checkpoint_of_url(url)
    files = open_file_system(root, storage_options)
    missing = _missing_folders(files.url)
    name = f"flow-doctor-{uuid.uuid4().hex}"
    try:
        first = files.create_exclusively(name, b"first")
        second = files.create_exclusively(name, b"second")
        content = files.read(name)
        if (first, second, content) != (True, False, b"first"):
            raise StorageError(
                f"{files.url} does not create files exclusively: a second creator of one file was "
                f"not refused. Do not keep state there"
            )
    finally:
        with suppress(StorageError):
            files.delete([name])
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
    return files.url


def _missing_folders(url: str) -> list[Path]:
    """Return the folders that a file there would make, the innermost first."""
    if not os.path.isabs(url):
        return []
    path = Path(url)
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def address_of(text: str) -> tuple[str, int]:
    """Split HOST:PORT; an IPv6 address stands in brackets."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise CommandError(
            f"--kafka takes HOST:PORT, as in localhost:9092, not {text!r}", ExitCode.USAGE
        )
    return host, int(port)


def probe_broker(host: str, port: int) -> int:
    """Ask a broker which requests it knows, and return how many.

    Raises ``OSError`` if nobody answers, ``BrokerAnswer`` if somebody else does.
    """
    # A request of Kafka: length, which one, its version, a number, and no client id.
    request = struct.pack(">hhih", _API_VERSIONS, 0, _CORRELATION_ID, -1)
    with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
        try:
            connection.sendall(struct.pack(">i", len(request)) + request)
            length, correlation_id = struct.unpack(">ii", _received(connection, 8))
            if not 8 <= length <= _REPLY_BYTES_MAX or correlation_id != _CORRELATION_ID:
                raise BrokerAnswer("what answers does not speak Kafka without TLS")
            error, count = struct.unpack(">hi", _received(connection, 6))
        except (TimeoutError, ConnectionError) as failure:
            raise BrokerAnswer(
                "the connection was taken, but no answer came: TLS or SASL may be wanted"
            ) from failure
    if error:
        raise BrokerAnswer(f"the broker answered with error {error}")
    return int(count)


def _received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        data += piece
    return data
