"""State files on a local or mounted POSIX file system."""

from __future__ import annotations

import builtins
import errno
import io
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import BinaryIO, cast

from flowstate.errors import SnapshotMissingError, StoreUnsupportedError
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

_WRITE_BUFFER_BYTES = 1 << 20
# Another process may remove a folder that is empty for the moment between our making it and our
# putting a file in it. That a folder is lost so often in a row does not happen by chance.
_FOLDER_ATTEMPTS = 16
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


class LocalStateFileSystem:
    """Files that are durable once written: contents and folder entries are synced to the disk."""

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        self.url = self._root

    @contextmanager
    def open_output(self, path: str) -> Iterator[BinaryIO]:
        full = self._full(path)
        with self._errors("write", full):
            descriptor = self._open_new(full, os.O_TRUNC)
            file = io.BufferedWriter(io.FileIO(descriptor, "wb"), _WRITE_BUFFER_BYTES)
        output = OutputFile(file, lambda: self._errors("write", full))
        try:
            yield cast(BinaryIO, output)
            with self._errors("write", full):
                file.flush()
                os.fsync(descriptor)
                file.close()
                _sync_folder(os.path.dirname(full))
        except BaseException:
            # The raw file is closed first, so that the buffer cannot try to flush once more.
            file.raw.close()
            with suppress(OSError):
                os.unlink(full)
            raise

    def write(self, path: str, data: bytes) -> None:
        with self.open_output(path) as output:
            output.write(data)

    def create_exclusively(self, path: str, data: bytes) -> bool:
        full = self._full(path)
        folder = os.path.dirname(full)
        temporary = os.path.join(folder, f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        with self._errors("create", full):
            try:
                descriptor = self._open_new(temporary, os.O_EXCL)
                with open(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(descriptor)
                created = _link(temporary, full)
                # Also when the race is lost: the winner's name may not be on the disk yet, and
                # the caller will go on as if it were.
                _sync_folder(folder)
                return created
            finally:
                with suppress(OSError):
                    os.unlink(temporary)

    def read(self, path: str) -> bytes:
        full = self._full(path)
        with self._errors("read", full):
            try:
                with open(full, "rb") as file:
                    return file.read()
            except ABSENT:
                raise SnapshotMissingError(full) from None

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        full = self._full(path)
        spans = merge_ranges(ranges)
        blocks = []
        with self._errors("read", full):
            try:
                with open(full, "rb", buffering=0) as file:
                    for start, end in spans:
                        block = _read_span(file.fileno(), start=start, end=end)
                        check_span(full, start=start, end=end, length_read=len(block))
                        blocks.append(block)
            except ABSENT:
                raise SnapshotMissingError(full) from None
        return cut_ranges(ranges, spans, blocks)

    def list(self, folder: str) -> builtins.list[FileEntry]:
        check_folder(folder)
        top = os.path.join(self._root, folder)
        with self._errors("list", top):
            return sorted(_files_below(top, f"{folder}/" if folder else ""))

    def move(self, names: Mapping[str, str]) -> None:
        moves = [(self._full(old), self._full(new)) for old, new in names.items()]
        folders = set()
        for old, new in moves:
            with self._errors("move", old):
                _make_folder(os.path.dirname(new))
                try:
                    os.replace(old, new)
                except FileNotFoundError:
                    if os.path.lexists(old):
                        # It is the new name's folder that went away, so nothing was moved.
                        raise
                    continue
                folders |= {os.path.dirname(old), os.path.dirname(new)}
        for folder in sorted(folders):
            # Others may remove an old folder that is empty now; then there is nothing to sync.
            with self._errors("move", folder), suppress(FileNotFoundError):
                _sync_folder(folder)

    def delete(self, paths: Iterable[str]) -> None:
        full_paths = [self._full(path) for path in paths]
        for full in full_paths:
            with self._errors("delete", full):
                try:
                    os.unlink(full)
                except ABSENT:
                    continue
                except PermissionError:
                    # This is what some systems say of a folder; it is left alone, as elsewhere.
                    if not os.path.isdir(full):
                        raise
        # Deletions are not synced: a file that comes back after a crash is swept again.
        for folder in {os.path.dirname(full) for full in full_paths}:
            self._remove_empty(folder)

    def _full(self, path: str) -> str:
        return os.path.join(self._root, check_path(path))

    def _errors(self, operation: str, where: str) -> AbstractContextManager[None]:
        return store_errors(operation, where)

    def _open_new(self, full: str, flag: int) -> int:
        for attempt in range(_FOLDER_ATTEMPTS):
            try:
                _make_folder(os.path.dirname(full))
                return os.open(full, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flag, 0o666)
            except FileNotFoundError:
                if attempt == _FOLDER_ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt either returns or raises")

    def _remove_empty(self, folder: str) -> None:
        while folder.startswith(self._root + os.sep):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                return  # Not empty, or not ours to remove; either way it may stay.
            folder = os.path.dirname(folder)


def _make_folder(folder: str) -> None:
    """Make a folder and those above it, each durable before anything is put into it."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    if parent != folder:
        _make_folder(parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
    _sync_folder(parent)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(temporary: str, full: str) -> bool:
    """Give the file its final name unless the name is taken; the kernel decides who is first."""
    try:
        os.link(temporary, full)
    except FileExistsError:
        # A network file system may have made the link and lost the reply, so that its client
        # tried again. Then the name leads to our own file.
        with suppress(OSError):
            return os.path.samestat(os.lstat(temporary), os.lstat(full))
        return False
    except OSError as error:
        if error.errno in _NO_HARD_LINKS:
            raise StoreUnsupportedError(
                f"the file system of {full} has no hard links, so nothing can be created "
                f"exclusively on it. Choose a state location on a POSIX file system (ext4, xfs, "
                f"NFS) or in an object store"
            ) from error
        raise
    return True


def _read_span(descriptor: int, *, start: int, end: int) -> bytes:
    pieces = []
    while start < end:
        piece = os.pread(descriptor, end - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _files_below(folder: str, prefix: str) -> Iterator[FileEntry]:
    # Others add and remove files meanwhile; what vanishes during the walk is just not there.
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except ABSENT:
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(entry.path, f"{prefix}{entry.name}/")
        elif entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):
                yield FileEntry(f"{prefix}{entry.name}", entry.stat(follow_symlinks=False).st_size)
