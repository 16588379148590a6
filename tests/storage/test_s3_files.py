from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem
from s3fs.core import ClientError
from s3fs.errors import translate_boto_error

from flowstate.errors import (
    SnapshotMissingError,
    StoreUnavailableError,
    StoreUnsupportedError,
)
from flowstate.storage.filesystems import FileEntry, StateFileSystem, open_file_system

if TYPE_CHECKING:
    from tests.storage.conftest import S3Location

MIB = 1 << 20
# The shortest part that S3 takes, unless it is the last one.
PART_BYTES = 5 * MIB


@pytest.fixture
def files(s3_location: S3Location) -> StateFileSystem:
    return open_file_system(s3_location.url, s3_location.options)


class Requests:
    """The requests that go through s3fs; ``answer`` may give an error to one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.answer: Callable[[str, dict[str, Any]], BaseException | None] = lambda *_: None
        self.change: Callable[[dict[str, Any]], dict[str, Any]] = dict
        call = S3FileSystem._call_s3

        async def record_and_call(fs: Any, method: str, *args: Any, **kwargs: Any) -> Any:
            self.sent.append((method, kwargs))
            error = self.answer(method, kwargs)
            if error is not None:
                raise error
            return await call(fs, method, *args, **self.change(kwargs))

        monkeypatch.setattr(S3FileSystem, "_call_s3", record_and_call)
        # The same for the files of s3fs, which are not asynchronous.
        monkeypatch.setattr(S3FileSystem, "call_s3", sync_wrapper(record_and_call))

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.sent)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


def _refusal(code: str) -> BaseException:
    """Return what s3fs makes of an answer with this code."""
    answer = {"Error": {"Code": code, "Message": "no"}}
    error: BaseException = translate_boto_error(ClientError(answer, "PutObject"))
    return error


def _uploads(location: S3Location) -> list[Any]:
    """Return the uploads that were begun but neither completed nor given up."""
    bucket = location.url.split("/")[2]
    client = S3FileSystem(**location.options)
    return list(client.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", []))


def _write(files: StateFileSystem, length_mib: int, error: BaseException | None = None) -> None:
    with files.open_output("folder/file") as output:
        for _ in range(length_mib):
            output.write(b"x" * MIB)
        if error is not None:
            raise error


# Creating exclusively


def test_a_store_that_ignores_the_condition_is_refused(
    files: StateFileSystem, requests: Requests
) -> None:
    requests.change = lambda kwargs: {
        name: value for name, value in kwargs.items() if name != "IfNoneMatch"
    }

    for _ in range(2):
        with pytest.raises(StoreUnsupportedError, match="honours If-None-Match") as caught:
            files.create_exclusively("record", b"record")

    assert files.url in str(caught.value)
    # Neither the record nor the attempt that showed it is left.
    assert files.list("") == []


def test_a_store_that_does_not_know_the_condition_is_a_failure_and_leaves_nothing(
    files: StateFileSystem, requests: Requests
) -> None:
    requests.answer = lambda method, kwargs: (
        _refusal("NotImplemented") if "IfNoneMatch" in kwargs else None
    )

    with pytest.raises(StoreUnavailableError):
        files.create_exclusively("record", b"record")
    assert files.list("") == []


def test_the_condition_is_tried_once_per_bucket(files: StateFileSystem, requests: Requests) -> None:
    for number in range(3):
        files.create_exclusively(f"record-{number}", b"record")

    assert requests.count("put_object") == 2 + 3
    assert all(kwargs["IfNoneMatch"] == "*" for name, kwargs in requests.sent if "put" in name)


@pytest.mark.parametrize("code", ["PreconditionFailed", "412"])
def test_a_store_that_does_not_name_the_failed_condition_is_understood(
    files: StateFileSystem, requests: Requests, code: str
) -> None:
    files.create_exclusively("other", b"the condition is tried with the first create")
    requests.answer = lambda method, kwargs: _refusal(code) if method == "put_object" else None

    assert not files.create_exclusively("record", b"record")


def test_a_conflict_decides_nothing_so_the_create_is_sent_again(
    files: StateFileSystem, requests: Requests
) -> None:
    files.create_exclusively("other", b"the condition is tried with the first create")
    requests.sent.clear()
    requests.answer = lambda method, kwargs: (
        _refusal("ConditionalRequestConflict")
        if method == "put_object" and requests.count("put_object") < 3
        else None
    )

    assert files.create_exclusively("record", b"record")
    assert requests.count("put_object") == 3


def test_a_conflict_that_does_not_end_is_a_failure(
    files: StateFileSystem, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("flowstate.storage._object_store.time.sleep", pauses.append)
    files.create_exclusively("other", b"the condition is tried with the first create")
    requests.answer = lambda method, kwargs: _refusal("ConditionalRequestConflict")

    with pytest.raises(StoreUnavailableError, match="ConditionalRequestConflict"):
        files.create_exclusively("record", b"record")
    assert pauses == sorted(pauses)
    assert 1 < sum(pauses) < 10


@pytest.mark.parametrize("code", ["AccessDenied", "InternalError", "SlowDown", "NoSuchBucket"])
def test_a_refused_create_is_a_failure_and_not_a_lost_race(
    files: StateFileSystem, requests: Requests, code: str
) -> None:
    requests.answer = lambda method, kwargs: _refusal(code) if method == "put_object" else None

    with pytest.raises(StoreUnavailableError):
        files.create_exclusively("record", b"record")


# Outputs


def test_a_long_output_goes_up_in_parts(s3_location: S3Location, requests: Requests) -> None:
    options = {**s3_location.options, "default_block_size": PART_BYTES}
    files = open_file_system(s3_location.url, options)
    piece = bytes(range(256)) * (MIB // 256)
    with files.open_output("folder/file") as output:
        for _ in range(12):
            output.write(piece)

    assert requests.count("upload_part") > 1
    assert files.read("folder/file") == piece * 12
    assert files.list("") == [FileEntry("folder/file", 12 * MIB)]


def test_a_long_output_that_failed_leaves_neither_a_file_nor_parts(
    s3_location: S3Location,
) -> None:
    options = {**s3_location.options, "default_block_size": PART_BYTES}
    files = open_file_system(s3_location.url, options)

    with pytest.raises(LookupError):
        _write(files, 12, LookupError())

    assert files.list("") == []
    assert _uploads(s3_location) == []


@pytest.mark.parametrize("failing", ["upload_part", "complete_multipart_upload"])
def test_an_upload_that_fails_leaves_neither_a_file_nor_parts(
    s3_location: S3Location, requests: Requests, failing: str
) -> None:
    options = {**s3_location.options, "default_block_size": PART_BYTES}
    files = open_file_system(s3_location.url, options)
    requests.answer = lambda method, kwargs: (
        _refusal("InternalError") if method == failing else None
    )

    with pytest.raises(StoreUnavailableError):
        _write(files, 12)

    assert files.list("") == []
    assert _uploads(s3_location) == []


# Reading and listing


def test_adjacent_and_overlapping_ranges_cost_one_request(
    files: StateFileSystem, requests: Requests
) -> None:
    files.write("file", bytes(100))
    requests.sent.clear()
    files.read_ranges("file", [(50, 10), (0, 10), (10, 10), (15, 10), (55, 10)])

    assert sorted(kwargs["Range"] for _, kwargs in requests.sent) == ["bytes=0-24", "bytes=50-64"]


def test_a_listing_of_several_pages_has_all_files(s3_location: S3Location) -> None:
    # A page of S3 has a thousand files; here it has two.
    options = {**s3_location.options, "skip_instance_cache": True}
    files = open_file_system(s3_location.url, options)
    pages: list[str] = []

    def ask_for_two(params: dict[str, Any], **_: object) -> None:
        params["MaxKeys"] = 2
        pages.append(params["Bucket"])

    paths = [f"folder/{number}" for number in range(5)]
    for path in paths:
        files.write(path, b"")
    client: Any = files._fs.s3  # type: ignore[attr-defined]
    client.meta.events.register("before-parameter-build.s3.ListObjectsV2", ask_for_two)

    assert [entry.path for entry in files.list("folder")] == paths
    assert len(pages) == 3


def test_a_missing_bucket_is_not_an_empty_folder(s3_location: S3Location) -> None:
    files = open_file_system("s3://no-such-bucket/state", s3_location.options)

    with pytest.raises(StoreUnavailableError, match="no-such-bucket"):
        files.list("")
    with pytest.raises(StoreUnavailableError, match="no-such-bucket"):
        files.write("file", b"")
    with pytest.raises(StoreUnavailableError, match="no-such-bucket"):
        files.create_exclusively("file", b"")


@pytest.mark.parametrize("root", ["", "/", "/state", "/state/", "/a/b/c"])
def test_a_root_may_be_a_bucket_or_any_folder_of_it(s3_location: S3Location, root: str) -> None:
    bucket = s3_location.url.rpartition("/")[0]
    files = open_file_system(f"{bucket}{root}", s3_location.options)
    files.write("folder/file", b"data")
    created = files.create_exclusively("folder/record", b"record")

    assert created
    assert files.url == f"{bucket}{root}".rstrip("/")
    assert files.read("folder/file") == b"data"
    assert files.list("") == [FileEntry("folder/file", 4), FileEntry("folder/record", 6)]
    assert files.list("folder") == files.list("")
    files.delete(["folder/file", "folder/record"])
    assert files.list("") == []


def test_spark_writes_s3_with_an_a(s3_location: S3Location) -> None:
    hadoops = open_file_system(s3_location.url.replace("s3://", "s3a://"), s3_location.options)
    ours = open_file_system(s3_location.url, s3_location.options)
    hadoops.write("folder/file", b"data")

    assert ours.read("folder/file") == b"data"
    assert hadoops.list("") == [FileEntry("folder/file", 4)]


# Failures


@pytest.mark.parametrize("code", ["AccessDenied", "InternalError", "SlowDown", "ExpiredToken"])
def test_a_refused_request_is_not_a_missing_file(
    files: StateFileSystem, requests: Requests, code: str
) -> None:
    files.write("file", b"data")
    requests.answer = lambda method, kwargs: _refusal(code)
    uses: list[Callable[[], object]] = [
        lambda: files.read("file"),
        lambda: files.read_ranges("file", [(0, 1)]),
        lambda: files.list(""),
        lambda: files.write("file", b""),
        lambda: files.delete(["file"]),
        lambda: _write(files, 1),
    ]

    for use in uses:
        with pytest.raises(StoreUnavailableError):
            use()


def test_a_file_that_vanishes_while_it_is_read_is_missing(
    files: StateFileSystem, requests: Requests
) -> None:
    files.write("file", b"data")
    requests.answer = lambda method, kwargs: _refusal("NoSuchKey")

    with pytest.raises(SnapshotMissingError):
        files.read_ranges("file", [(0, 1)])


def test_a_store_that_cannot_be_reached_is_unavailable_and_its_options_stay_secret(
    s3_location: S3Location,
) -> None:
    options = {
        **s3_location.options,
        # Nothing listens at port 1, and the client is not to try for long.
        "endpoint_url": "http://user:password-in-the-endpoint@127.0.0.1:1",
        "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1},
    }
    files = open_file_system(s3_location.url, options)

    with pytest.raises(StoreUnavailableError) as caught:
        files.read("file")

    shown = "".join(traceback.format_exception(caught.value))
    assert f"cannot read {files.url}/file" in shown
    assert "password-in-the-endpoint" not in shown
    assert s3_location.options["secret"] not in shown
