from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from flowstate.errors import StoreUnavailableError, StoreUnsupportedError
from flowstate.storage._object_store import ObjectStoreFileSystem
from flowstate.storage.filesystems import (
    STORES,
    ExclusiveCreate,
    FileEntry,
    open_file_system,
)

SECRET = "wJalrXUtn"


def _shown(error: BaseException) -> str:
    """Return all that a log would hold of an error."""
    return "".join(traceback.format_exception(error)) + repr(error)


# Local paths


@pytest.mark.parametrize(
    "location",
    [
        pytest.param("{}", id="a-path"),
        pytest.param("{}/", id="slash-last"),
        pytest.param("{}/../{name}", id="dots"),
        pytest.param("file://{}", id="url"),
        pytest.param("file:{}", id="url-as-java-writes-it"),
        pytest.param("FILE://{}", id="capital-letters"),
        pytest.param("local://{}", id="local"),
    ],
)
def test_one_folder_has_many_spellings(tmp_path: Path, location: str) -> None:
    files = open_file_system(location.format(tmp_path, name=tmp_path.name))
    files.write("file", b"data")

    assert (tmp_path / "file").read_bytes() == b"data"
    assert files.url == str(tmp_path)


def test_a_path_object_is_a_location(tmp_path: Path) -> None:
    open_file_system(tmp_path / "new" / "folder").write("file", b"data")

    assert (tmp_path / "new" / "folder" / "file").read_bytes() == b"data"


def test_a_relative_path_is_taken_from_where_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = open_file_system("state")
    monkeypatch.chdir("/")
    files.write("file", b"data")

    assert (tmp_path / "state" / "file").read_bytes() == b"data"


@pytest.mark.parametrize("name", ["a::b", "a?b=c", "a#b", "100%", "a:b@c"])
def test_a_local_folder_may_have_what_means_something_in_a_url(tmp_path: Path, name: str) -> None:
    open_file_system(tmp_path / name).write("file", b"data")

    assert (tmp_path / name / "file").read_bytes() == b"data"


def test_opening_creates_nothing(tmp_path: Path) -> None:
    files = open_file_system(tmp_path / "state")
    listed = files.list("")

    assert listed == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "location", ["", "file://", "file://host/folder", "file:folder", "file:", "local://folder"]
)
def test_what_names_no_local_folder_is_refused(location: str) -> None:
    with pytest.raises(StoreUnsupportedError):
        open_file_system(location)


# Memory


def test_the_root_of_the_memory_is_a_location_too() -> None:
    files = open_file_system("memory://")
    files.write("folder-of-the-root/file", b"data")
    listed = files.list("folder-of-the-root")
    files.delete(["folder-of-the-root/file"])

    assert listed == [FileEntry("folder-of-the-root/file", 4)]
    assert files.url == "memory://"


def test_two_roots_in_memory_are_apart(tmp_path: Path) -> None:
    one, two = open_file_system(f"memory:/{tmp_path}/1"), open_file_system(f"memory:/{tmp_path}/12")
    one.write("file", b"one")
    two.write("file", b"two")

    assert one.read("file") == b"one"
    assert one.list("") == [FileEntry("file", 3)]


# Other stores


def test_every_store_says_how_it_creates_exclusively() -> None:
    for protocol, store in STORES.items():
        assert protocol == protocol.lower()
        assert isinstance(store.exclusive_create, ExclusiveCreate)


@pytest.mark.parametrize(
    ("location", "protocol"),
    [
        ("ftp://host/folder", "ftp"),
        ("http://host/folder", "http"),
        ("hdfs://host/folder", "hdfs"),
        ("hdfs:/folder", "hdfs"),
        ("simplecache::s3://bucket/folder", "simplecache::s3"),
        ("dbfs:/folder", "dbfs"),
    ],
)
def test_a_store_without_a_known_exclusive_create_is_refused(location: str, protocol: str) -> None:
    with pytest.raises(StoreUnsupportedError) as caught:
        open_file_system(location)

    assert location in str(caught.value)
    assert f"no exclusive create is known for {protocol}://" in str(caught.value)
    assert "s3://" in str(caught.value)


@pytest.mark.parametrize("location", ["s3:bucket/folder", "S3:bucket", "memory:folder", "gs:"])
def test_a_url_without_its_slashes_is_not_taken_for_a_local_path(location: str) -> None:
    with pytest.raises(StoreUnsupportedError, match="neither a URL nor clearly a local path"):
        open_file_system(location)


@pytest.mark.parametrize("location", ["memory://a::memory://b", "s3://bucket/a::b"])
def test_locations_are_not_chained(location: str) -> None:
    with pytest.raises(StoreUnsupportedError, match="chains"):
        open_file_system(location)


@pytest.mark.parametrize("location", ["s3://", "s3:///", "s3a://"])
def test_an_object_store_needs_a_bucket(location: str) -> None:
    with pytest.raises(StoreUnsupportedError, match="names no bucket"):
        open_file_system(location)


@pytest.mark.parametrize(
    ("protocol", "package", "extra"),
    [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs"), ("abfss", "adlfs", "azure")],
)
def test_a_missing_package_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, protocol: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(StoreUnsupportedError) as caught:
        open_file_system(f"{protocol}://bucket/folder")

    assert f"needs the package {package}" in str(caught.value)
    assert f"pip install 'flowspark[{extra}]'" in str(caught.value)


@pytest.mark.parametrize("version", ["2024.10.0", "2025.2", "0.6.0"])
def test_a_package_that_does_not_yet_create_exclusively_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("s3fs.__version__", version)

    with pytest.raises(StoreUnsupportedError, match=r"Install s3fs>=2025\.3"):
        open_file_system("s3://bucket/folder")


@pytest.mark.parametrize("version", ["2025.3.0", "2026.9.0", "2027.1.0.dev1+g123"])
def test_a_package_that_creates_exclusively_is_taken(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("s3fs.__version__", version)

    assert open_file_system("s3://bucket/folder").url == "s3://bucket/folder"


def test_a_protocol_may_be_written_in_any_case() -> None:
    assert open_file_system("S3://Bucket/Folder").url == "s3://Bucket/Folder"


# Secrets


@pytest.mark.parametrize(
    "location",
    [
        pytest.param(f"s3://key:{SECRET}@bucket/folder", id="password"),
        pytest.param(f"s3://key:a/{SECRET}@bucket/folder", id="password-with-slash"),
        pytest.param(f"s3://key:{SECRET}/b@bucket/folder", id="password-with-slash-last"),
        pytest.param(f"s3://key:{SECRET}#b@bucket/folder", id="password-with-hash"),
        pytest.param(f"s3://key:{SECRET}?b@bucket/folder", id="password-with-question-mark"),
        pytest.param(f"s3://key:{SECRET}@b@bucket/folder", id="password-with-at"),
        pytest.param(f"s3://key:{SECRET}\n@bucket/folder", id="password-with-line-end"),
        pytest.param(f"s3://:{SECRET}@bucket/folder", id="password-without-user"),
        pytest.param(f"s3://bucket/folder?secret={SECRET}", id="query"),
        pytest.param(f"s3://bucket/folder#{SECRET}", id="fragment"),
        pytest.param(f"s3://bucket?a:{SECRET}@b", id="query-like-a-password"),
        pytest.param(f"ftp://user:{SECRET}@host/folder", id="unknown-store"),
        pytest.param(f"ftp://user:{SECRET}/x@host/folder", id="unknown-store-with-slash"),
        pytest.param(f"http://host/folder?token={SECRET}", id="unknown-store-with-query"),
        pytest.param(f"file://user:{SECRET}@host/folder", id="local"),
        pytest.param(f"simplecache::s3://key:{SECRET}@bucket/folder", id="chain"),
        pytest.param(f"s3://bucket/a::s3://key:{SECRET}@bucket", id="second-of-a-chain"),
        pytest.param(f"s3:key:{SECRET}@bucket/folder", id="no-slashes"),
    ],
)
def test_a_secret_in_a_location_is_refused_and_not_repeated(location: str) -> None:
    with pytest.raises(StoreUnsupportedError) as caught:
        open_file_system(location)

    assert SECRET not in _shown(caught.value)


def test_the_container_before_the_at_of_azure_is_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)

    # It gets as far as the package, which is not there.
    with pytest.raises(StoreUnsupportedError, match="needs the package adlfs"):
        open_file_system("abfss://container@account.dfs.core.windows.net/folder")


def test_a_client_that_fails_to_open_tells_the_options_names_but_not_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def url_to_fs(url: str, **options: Any) -> None:
        raise OSError(f"the client cannot use {options}")

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    options = {"secret": SECRET, "client_kwargs": {"token": f"{SECRET}-2"}}

    with pytest.raises(StoreUnavailableError) as caught:
        open_file_system("s3://bucket/folder", options)

    assert SECRET not in _shown(caught.value)
    assert "cannot open s3://bucket/folder: OSError" in str(caught.value)
    assert "client_kwargs, secret" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"secret": SECRET}, id="text"),
        pytest.param({"client_kwargs": {"headers": [SECRET]}}, id="deep-inside"),
        pytest.param({"endpoint_url": f"http://user:{SECRET}@localhost:1"}, id="in-a-url"),
    ],
)
def test_a_client_that_fails_later_does_not_repeat_the_options_either(
    options: dict[str, Any],
) -> None:
    files = ObjectStoreFileSystem("s3://bucket", "bucket", FailingClient(options), options)

    for use in (lambda: files.write("file", b""), lambda: files.list("")):
        with pytest.raises(StoreUnavailableError) as caught:
            use()
        assert SECRET not in _shown(caught.value)
        assert "OSError" in str(caught.value)


def test_a_cause_that_tells_no_secret_is_shown() -> None:
    files = ObjectStoreFileSystem("s3://bucket", "bucket", FailingClient({}), {"secret": SECRET})

    with pytest.raises(StoreUnavailableError) as caught:
        files.write("file", b"")

    assert "pipe_file failed" in str(caught.value)
    assert "LookupError: {}" in _shown(caught.value)


class FailingClient:
    """A client whose every error repeats its options."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def __getattr__(self, name: str) -> Any:
        def fail(*args: object, **kwargs: object) -> None:
            try:
                raise LookupError(str(self._options))
            except LookupError as error:
                raise OSError(f"{name} failed") from error

        return fail
