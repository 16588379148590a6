"""The spool of ``flowsocket`` in an object store, through the options that a user gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyspark_flowsocket.errors import TakenOverError

from ..storage.conftest import S3Location, s3_location, s3_options
from .peers import Peer, latest, lines, reading, received, wait_for

__all__ = ["s3_location", "s3_options"]


def storage_options(options: dict[str, Any]) -> dict[str, str]:
    return {
        f"storage.{name}": json.dumps(value) if isinstance(value, dict) else value
        for name, value in options.items()
    }


def test_lines_are_spooled_replayed_and_trimmed_in_s3(
    tmp_path: Path,
    s3_location: S3Location,
) -> None:
    given = {"stateLocation": s3_location.url, **storage_options(s3_location.options)}
    with Peer() as peer, reading(tmp_path, peer.port, **given) as old:
        latest(old)
        with peer.accept() as sock:
            sock.sendall(b"one\n")
            received(old, 1)
            sock.sendall(b"two\n")
            assert received(old, 2) == ["one", "two"]
            with reading(tmp_path, peer.port, **given) as new:
                assert lines(new, 0, latest(new)) == ["one", "two"]
                sock.sendall(b"stale\n")
                with pytest.raises(TakenOverError):
                    wait_for(lambda: latest(old) > 2)
                new.commit({"line": 1})
                wait_for(lambda: new.initialOffset() == {"line": 1})
                assert lines(new, 1, 2) == ["two"]
