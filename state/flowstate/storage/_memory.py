"""State files in this process's memory, for tests and for trying things out."""

from __future__ import annotations

import builtins
import io
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

from flowstate.errors import SnapshotMissingError
from flowstate.storage._port import (
    ABSENT,
    FileEntry,
    OutputFile,
    check_folder,
    check_path,
    check_span,
    cut_ranges,
    merge_ranges,
    store_errors,
)

# fsspec keeps one store per process, whatever the number of instances, so one lock per process
# guards it. It also covers reads: fsspec's memory files share one position between readers.
_STORE_LOCK = threading.RLock()


class MemoryStateFileSystem:
    """Files that live and die with the process; nothing here is shared with another one."""

    def __init__(self, root: str, file_system: Any) -> None:
        # Without a slash at its end, so the root of everything is the empty text.
        self._root = f"/{root.strip('/')}".rstrip("/")
        self._fs = file_system
        self.url = f"memory:/{self._root or '/'}"

    @contextmanager
    def open_output(self, path: str) -> Iterator[BinaryIO]:
        check_path(path)
        buffer = io.BytesIO()
        output = OutputFile(buffer, lambda: store_errors("write", self._where(path)))
        yield cast(BinaryIO, output)
        self.write(path, buffer.getvalue())

    def write(self, path: str, data: bytes) -> None:
        full = self._full(path)
        with _STORE_LOCK, store_errors("write", self._where(path)):
            self._fs.pipe_file(full, data)

    def create_exclusively(self, path: str, data: bytes) -> bool:
        full = self._full(path)
        with _STORE_LOCK, store_errors("create", self._where(path)):
            if self._fs.exists(full):
                return False
            self._fs.pipe_file(full, data)
            return True

    def read(self, path: str) -> bytes:
        full = self._full(path)
        with _STORE_LOCK, store_errors("read", self._where(path)):
            try:
                return bytes(self._fs.cat_file(full))
            except ABSENT:
                raise SnapshotMissingError(self._where(path)) from None

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        spans = merge_ranges(ranges)
        data = self.read(path)
        blocks = [data[start:end] for start, end in spans]
        for (start, end), block in zip(spans, blocks, strict=True):
            check_span(self._where(path), start=start, end=end, length_read=len(block))
        return cut_ranges(ranges, spans, blocks)

    def list(self, folder: str) -> builtins.list[FileEntry]:
        check_folder(folder)
        top = f"{self._root}/{folder}".rstrip("/") + "/"
        with _STORE_LOCK, store_errors("list", self._where(folder)):
            found = self._fs.find(top.rstrip("/"), detail=True)
        skip = len(self._root) + 1
        return sorted(
            FileEntry(name[skip:], int(info["size"]))
            for name, info in found.items()
            if name.startswith(top)
        )

    def move(self, names: Mapping[str, str]) -> None:
        moves = [(self._full(old), self._full(new)) for old, new in names.items()]
        for old, new in moves:
            with _STORE_LOCK, store_errors("move", f"memory:/{old}"), suppress(*ABSENT):
                self._fs.pipe_file(new, self._fs.cat_file(old))
                self._fs.rm_file(old)

    def delete(self, paths: Iterable[str]) -> None:
        for path in [check_path(path) for path in paths]:
            with _STORE_LOCK, store_errors("delete", self._where(path)), suppress(*ABSENT):
                full = self._full(path)
                if self._fs.isfile(full):
                    self._fs.rm_file(full)

    def _full(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def _where(self, path: str) -> str:
        return f"memory:/{self._root}/{path}"
