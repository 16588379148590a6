"""State files in an object store, through the fsspec package of that store."""

from __future__ import annotations

import builtins
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, BinaryIO, cast

from flowstate.errors import (
    SnapshotMissingError,
    StoreUnsupportedError,
)
from flowstate.storage._port import (
    ABSENT,
    TEMPORARY_PREFIX,
    FileEntry,
    OutputFile,
    check_folder,
    check_path,
    check_span,
    cut_ranges,
    merge_ranges,
    store_errors,
)

_THREADS = 16
_CONFLICT_ATTEMPTS = 6
_CONFLICT_PAUSE_S = 0.05
# Shorter values ("", "1", "us") are no secrets, and replacing them would garble every message.
_REDACTED_LENGTH_MIN = 4

# The buckets, by client, whose exclusive create this process has seen at work.
_PROVEN: set[tuple[int, str]] = set()


class ObjectStoreFileSystem:
    """Objects whose exclusive create is a conditional request that the store itself decides."""

    def __init__(
        self, url: str, root: str, file_system: Any, storage_options: Mapping[str, Any]
    ) -> None:
        self.url = url.rstrip("/")
        self._root = root.strip("/")
        self._bucket = self._root.split("/", 1)[0]
        self._fs = file_system
        self._secrets = sorted(set(_texts(storage_options)), key=len, reverse=True)

    @contextmanager
    def open_output(self, path: str) -> Iterator[BinaryIO]:
        full = self._full(path)
        with self._errors("write", path):
            file = self._fs.open(full, "wb")
        output = OutputFile(file, lambda: self._errors("write", path))
        try:
            yield cast(BinaryIO, output)
            with self._errors("write", path):
                file.close()
        except BaseException:
            self._abandon(file, full)
            raise

    def write(self, path: str, data: bytes) -> None:
        full = self._full(path)
        with self._errors("write", path):
            self._fs.pipe_file(full, data)

    def create_exclusively(self, path: str, data: bytes) -> bool:
        full = self._full(path)
        self._prove_exclusive_create()
        with self._errors("create", path):
            return self._create(full, data)

    def read(self, path: str) -> bytes:
        full = self._full(path)
        with self._errors("read", path):
            try:
                return bytes(self._fs.cat_file(full))
            except ABSENT:
                raise SnapshotMissingError(self._where(path)) from None

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        full = self._full(path)
        spans = merge_ranges(ranges)
        if not spans:
            return [b""] * len(ranges)
        with self._errors("read", path):
            blocks = self._fs.cat_ranges(
                [full] * len(spans),
                [start for start, _ in spans],
                [end for _, end in spans],
                on_error="return",
            )
            for (start, end), block in zip(spans, blocks, strict=True):
                if isinstance(block, Exception):
                    self._raise_for_span(block, path, start=start, end=end)
                check_span(self._where(path), start=start, end=end, length_read=len(block))
        return cut_ranges(ranges, spans, blocks)

    def list(self, folder: str) -> builtins.list[FileEntry]:
        check_folder(folder)
        top = f"{self._root}/{folder}".rstrip("/") + "/"
        with self._errors("list", folder):
            # Belt and braces: the client was opened without a listing cache, but not every
            # client's every version has heard of that option.
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(top.rstrip("/"), detail=True)
            except FileNotFoundError:
                # A folder may be absent, a bucket may not: a mistyped one is not an empty one.
                if not self._fs.exists(self._bucket):
                    raise
                return []
        skip = len(self._root) + 1
        return sorted(
            FileEntry(name[skip:], int(info["size"]))
            for name, info in found.items()
            if name.startswith(top) and info["type"] == "file"
        )

    def move(self, names: Mapping[str, str]) -> None:
        moves = [(old, self._full(old), self._full(new)) for old, new in names.items()]
        _in_threads(self._move, moves)

    def _move(self, old: str, full_old: str, full_new: str) -> None:
        with self._errors("move", old), suppress(*ABSENT):
            self._fs.cp_file(full_old, full_new)
            self._fs.rm_file(full_old)

    def delete(self, paths: Iterable[str]) -> None:
        # One request each, because the bulk request of s3fs does not report what it could not
        # delete (s3fs 2026.9, _bulk_delete).
        _in_threads(self._delete, [(path, self._full(path)) for path in paths])

    def _delete(self, path: str, full: str) -> None:
        with self._errors("delete", path), suppress(*ABSENT):
            self._fs.rm_file(full)

    def _create(self, full: str, data: bytes) -> bool:
        for attempt in range(_CONFLICT_ATTEMPTS):
            try:
                self._fs.pipe_file(full, data, mode="create")
                return True
            except FileExistsError:
                return False
            except Exception as error:
                code = _error_code(error)
                # s3fs makes a FileExistsError only of an answer that also names the failed
                # condition, which not every store with an S3 interface does.
                if code in {"PreconditionFailed", "412"}:
                    return False
                # S3 says this while another create of the same name is under way, and decides
                # nothing: the request is to be sent again.
                if code != "ConditionalRequestConflict" or attempt == _CONFLICT_ATTEMPTS - 1:
                    raise
            time.sleep(_CONFLICT_PAUSE_S * 2**attempt)
        raise AssertionError("the last attempt either returns or raises")

    def _prove_exclusive_create(self) -> None:
        """Refuse a store that takes a conditional create for an ordinary write.

        Some stores with an S3 interface ignore the condition, and so does gcsfs on a zonal
        bucket; either way the loser of a race would destroy the winner's record. The client
        cannot be asked, so the first create in a process tries it on a file of its own.
        """
        key = (hash(self._fs), self._bucket)
        if key in _PROVEN:
            return
        name = f"{TEMPORARY_PREFIX}probe-{uuid.uuid4().hex}"
        full = self._full(name)
        with self._errors("create", name):
            try:
                self._create(full, b"first")
                overwritten = self._create(full, b"second")
            finally:
                with suppress(Exception):
                    self._fs.rm_file(full)
        if overwritten:
            raise StoreUnsupportedError(
                f"{self.url} overwrote an object that was to be created only if absent, so two "
                f"committers could not be told apart. Choose a store with conditional writes: "
                f"AWS S3 or one that honours If-None-Match, Google Cloud Storage except zonal "
                f"buckets, or Azure Blob Storage"
            )
        _PROVEN.add(key)

    def _abandon(self, file: Any, full: str) -> None:
        """Give up an upload, so that neither the parts nor the object stay."""
        # fsspec's file would upload the rest when it is closed, also by the garbage collector.
        with suppress(Exception):
            file.discard()
        with suppress(Exception):
            file.closed = True
        with suppress(Exception):
            self._fs.rm_file(full)

    def _raise_for_span(self, error: Exception, path: str, *, start: int, end: int) -> None:
        if isinstance(error, ABSENT):
            raise SnapshotMissingError(self._where(path)) from None
        # Each store has its own words for a range beyond the end; the size tells them all.
        try:
            size = int(self._fs.info(self._full(path))["size"])
        except ABSENT:
            raise SnapshotMissingError(self._where(path)) from None
        if size < end:
            length = max(0, size - start)
            check_span(self._where(path), start=start, end=end, length_read=length)
        raise error

    def _full(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def _where(self, path: str) -> str:
        return f"{self.url}/{path}"

    def _errors(self, operation: str, path: str) -> AbstractContextManager[None]:
        return store_errors(operation, self._where(path), catching=Exception, redact=self._redact)

    def _redact(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _in_threads(work: Callable[..., None], arguments: Sequence[tuple[str, ...]]) -> None:
    """Do the same for several files at once, and raise the first error when all are done."""
    if not arguments:
        return
    with ThreadPoolExecutor(min(_THREADS, len(arguments))) as threads:
        futures = [threads.submit(work, *of_file) for of_file in arguments]
    for future in futures:
        future.result()


def _error_code(error: BaseException | None) -> str | None:
    """Find the code that an S3 store answered with, in the error or in what caused it."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, Mapping):
            return str(response.get("Error", {}).get("Code"))
        error = error.__cause__ or error.__context__
    return None


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in the options, however deep, since any of them may be a secret."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str) and len(value) >= _REDACTED_LENGTH_MIN:
        yield value
