"""Files and state of ``flowbuffer`` in an object store, through the options that a user gives."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flowspark.errors import OutputError
from flowstate.storage.filesystems import open_file_system
from pyspark_flowbuffer.flush import flush
from pyspark_flowbuffer.partitions import check_folder
from pyspark_flowbuffer.publishing import Publisher

from ..storage.conftest import S3Location, s3_location, s3_options
from .harness import Query

__all__ = ["s3_location", "s3_options"]


def query(folder: Path, location: S3Location) -> Query:
    storage = {
        f"storage.{name}": json.dumps(value) if isinstance(value, dict) else value
        for name, value in location.options.items()
    }
    places = {"path": f"{location.url}/out", "stateLocation": f"{location.url}/flow"}
    return Query(folder, threshold=2, **places, **storage)


def published(location: S3Location) -> list[Any]:
    files = open_file_system(f"{location.url}/out", location.options)
    found = [entry.path for entry in files.list("") if not entry.path.startswith("_flow")]
    tables = [pq.read_table(io.BytesIO(files.read(path))) for path in found]
    return [row for table in tables for row in table.column(0).to_pylist()]


def test_batches_and_a_flush_are_exactly_once_in_s3(
    tmp_path: Path, s3_location: S3Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    query(tmp_path, s3_location).batch(0, ["a", "b", "c"])
    with monkeypatch.context() as patch:
        # The process dies between the record and the publication.
        patch.setattr(Publisher, "publish", _die)
        with pytest.raises(KeyboardInterrupt):
            query(tmp_path, s3_location).batch(1, ["d", "e", "f"])
    assert published(s3_location) == ["a", "b"]

    again = query(tmp_path, s3_location)
    again.batch(1, ["d", "e", "f"])
    again.batch(1, ["d", "e", "f"])
    assert published(s3_location) == ["a", "b", "c", "d", "e", "f"]

    again.batch(2, ["g"])
    url = f"{s3_location.url}/flow"
    assert flush(url, storage_options=s3_location.options).rows == 1
    assert flush(url, storage_options=s3_location.options).rows == 0
    assert sorted(published(s3_location)) == ["a", "b", "c", "d", "e", "f", "g"]


def test_a_key_too_long_for_the_store_is_refused_before_it_counts() -> None:
    with pytest.raises(OutputError, match="a folder of 1216 bytes, 928 are possible"):
        check_folder("/".join(f"c={'x' * 240}" for _ in range(5)), "s3://bucket/a")
    check_folder("c=" + "x" * 240, "s3://bucket/a")


def test_secrets_are_in_no_record(tmp_path: Path, s3_location: S3Location) -> None:
    record = query(tmp_path, s3_location).batch(0, ["a", "b", "c"])

    assert record is not None
    assert s3_location.options["secret"] not in str(record)


def _die(*_: object) -> None:
    raise KeyboardInterrupt
