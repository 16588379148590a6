"""The contract between checkpoint storage and a file system, and what its implementers share."""

from __future__ import annotations

import builtins
import errno
import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

from flowstate.errors import (
    FlowError,
    SnapshotCorruptError,
    StorageError,
    StoreFullError,
    StoreUnavailableError,
    UnsafeNameError,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

TEMPORARY_PREFIX = ".tmp-"
"""How the last part of a temporary file's name begins; a sweep may remove such files."""

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What a file system says when there is no file of that name (a folder is not a file)."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class FileEntry(NamedTuple):
    """One file of a listing."""

    path: str
    """Relative to the root."""
    size: int
    """In bytes."""


class StateFileSystem(Protocol):
    """A tree of files below one root, with an exclusive create.

    Paths are relative to the root and separated by ``/``. A path that is empty or absolute, or
    has an empty part, ``.``, ``..``, a backslash or a NUL, raises ``UnsafeNameError``. Folders
    have no life of their own: they are there while a file is in them.

    A full store raises ``StoreFullError``, any other failure ``StoreUnavailableError``. After
    either, a write may or may not have had its effect: repeat it under another name, or, for
    ``create_exclusively``, repeat it and read what is there.
    """

    url: str
    """The root, without secrets: for messages."""

    def open_output(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Write a file in pieces.

        The name must belong to this attempt alone. The file is durable when the block ends
        without an error; after an error it is removed as far as that is possible.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write a whole file; as ``open_output``, in one go."""
        ...

    def create_exclusively(self, path: str, data: bytes) -> bool:
        """Create a file that is not there yet, and say whether it was this call that did it.

        True: created and durable. False: a complete file is there already, and the data of this
        call is not in it. The one exception to expect: when a reply was lost and the client
        library repeated the request, False may be about one's own file. So after False read the
        file, and go by its contents. Of any number of racing calls at most one gets True.
        """
        ...

    def read(self, path: str) -> bytes:
        """Read a whole file; ``SnapshotMissingError`` if there is none."""
        ...

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        """Read parts, each given as (offset, length), and return them in the order asked for.

        Adjacent and overlapping ranges cost one request together. A range that reaches beyond
        the end of the file raises ``SnapshotCorruptError``.
        """
        ...

    def list(self, folder: str) -> builtins.list[FileEntry]:
        """List all files below a folder, sorted by path; ``""`` is the root.

        No listing cache is used. An absent folder has no files. Temporary files that a crash
        left behind are listed too, so that a sweep can remove them.
        """
        ...

    def move(self, names: Mapping[str, str]) -> None:
        """Give files (the keys) other names (the values), and make that durable.

        Whoever reads a new name finds nothing or the whole file. A file that is absent was moved
        before and is no error, so that a move that failed may be repeated; what stood under a new
        name is replaced. An object store copies, and until it is done both names are there.
        """
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Remove files. Absent ones are no error, nor is a folder's name, which is left alone."""
        ...


def check_path(path: str) -> str:
    """Return the path if it stays below its root."""
    if "\\" in path or "\0" in path or any(part in {"", ".", ".."} for part in path.split("/")):
        raise UnsafeNameError(
            f"the path {path!r} is not a plain relative path below its root. If it came from a "
            f"checkpoint's record, the record was tampered with or damaged: do not restore it"
        )
    return path


def check_folder(folder: str) -> str:
    """Return the folder if it stays below the root; the root itself is a folder too."""
    return check_path(folder) if folder else folder


@contextmanager
def store_errors(
    operation: str,
    where: str,
    *,
    catching: type[Exception] = OSError,
    redact: Callable[[str], str] = str,
) -> Iterator[None]:
    """Turn what a store raises into this library's errors; those pass as they are."""
    try:
        yield
    except FlowError:
        raise
    except catching as error:
        # A traceback shows the causes in their own words, so those that tell a secret are cut off.
        words = "".join(_words(error))
        cause = error if redact(words) == words else None
        raise store_error(error, operation, where, redact=redact) from cause


def _words(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


def store_error(
    error: Exception, operation: str, where: str, *, redact: Callable[[str], str] = str
) -> StorageError:
    """Say which operation failed where, why, and what to do."""
    number = error.errno if isinstance(error, OSError) else None
    # An OSError's str() repeats the file name, which the message has already.
    cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    what = f"cannot {operation} {where}: {redact(f'{type(error).__name__}: {cause}')}."
    if number in _FULL:
        return StoreFullError(f"{what} Free space or raise the quota, then run the batch again")
    return StoreUnavailableError(
        f"{what} Check that the location exists, can be reached and may be written to by this "
        f"user; then run the batch again"
    )


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent and overlapping (offset, length) ranges into sorted (start, end) spans."""
    spans: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if offset < 0 or length < 0:
            raise ValueError(f"a range is (offset, length), both at least 0, not {offset, length}")
        if length == 0:
            continue
        if spans and offset <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], offset + length))
        else:
            spans.append((offset, offset + length))
    return spans


def cut_ranges(
    ranges: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], blocks: Sequence[bytes]
) -> list[bytes]:
    """Cut the ranges that were asked for out of the spans that were read."""
    starts = [start for start, _ in spans]
    pieces = []
    for offset, length in ranges:
        if length == 0:
            pieces.append(b"")
            continue
        index = bisect_right(starts, offset) - 1
        begin = offset - starts[index]
        pieces.append(blocks[index][begin : begin + length])
    return pieces


def check_span(where: str, *, start: int, end: int, length_read: int) -> None:
    """Refuse a short read: a file that ends early is not the file that was written."""
    if length_read != end - start:
        raise SnapshotCorruptError(
            where,
            what=f"the length of the bytes {start} to {end}",
            expected=end - start,
            actual=length_read,
        )


class Sink(Protocol):
    """The part of a file object that an ``OutputFile`` writes to."""

    def write(self, data: memoryview, /) -> object: ...


class OutputFile(io.BufferedIOBase):
    """What ``open_output`` hands out: it only writes, and it raises this library's errors.

    Closing it does nothing durable; that is for the end of the ``with`` block, which alone knows
    whether the block succeeded.
    """

    def __init__(self, sink: Sink, errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._sink = sink
        self._errors = errors
        self._length = 0

    def writable(self) -> bool:
        return True

    def write(self, buffer: ReadableBuffer, /) -> int:
        if self.closed:
            raise ValueError("write to a closed file")
        view = memoryview(buffer).cast("B")
        with self._errors():
            self._sink.write(view)
        self._length += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._length
