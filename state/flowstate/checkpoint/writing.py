"""Writing state files, piece by piece: what was written need not stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from flowstate.checkpoint.files import (
    END_OF_STREAM,
    FileHandle,
    Section,
    SectionType,
    Segment,
    checksum_of,
    encode_footer,
    handle_of,
)
from flowstate.errors import StateTypeError
from flowstate.rows import StateKind, StateRows
from flowstate.storage._port import StateFileSystem

__all__ = [
    "SEGMENT_BYTES",
    "SEGMENT_BYTES_MAX",
    "SEGMENT_BYTES_MIN",
    "KeyedSection",
    "ListSection",
    "encode_state_file",
    "group_numbers",
    "sort_by_group",
    "write_state_file",
]

SEGMENT_BYTES = 64 << 10
"""Small key groups share a segment until it has about this size, before compression."""
SEGMENT_BYTES_MIN = 8 << 10
"""Below this a segment's own metadata would outweigh what is saved by reading less."""
SEGMENT_BYTES_MAX = 1 << 20
"""A key group that is larger is cut, so that no reader needs much memory for one segment."""

_VALUE = "value"
_SEGMENTS_WANTED = 16
_LIST_SEGMENTS_WANTED = 64

Emit = Callable[[bytes | memoryview], object]


@dataclass(frozen=True, slots=True)
class KeyedSection:
    """Rows of one keyed state that are to be written."""

    name: str
    kind: StateKind
    schema: pa.Schema
    tables: Iterable[pa.Table]
    """All have the schema and are sorted by group; none begins below the end of the last."""

    @classmethod
    def of(cls, rows: StateRows) -> Self:
        """Return a section of rows that are all at hand, in any order."""
        return cls(rows.name, rows.kind, rows.table.schema, [sort_by_group(rows.table)])


@dataclass(frozen=True, slots=True)
class ListSection:
    """Elements of one operator state that are to be written."""

    name: str
    value_type: pa.DataType
    arrays: Iterable[pa.Array | pa.ChunkedArray]
    total_bytes: int = 0
    """About how much all elements take, if that is known: a long list has larger segments."""

    @classmethod
    def of(cls, name: str, values: pa.Array | pa.ChunkedArray) -> Self:
        """Return a section of elements that are all at hand."""
        return cls(name, values.type, [values], values.nbytes)


def write_state_file(
    file_system: StateFileSystem,
    path: str,
    sections: Iterable[KeyedSection | ListSection],
    *,
    inline_limit: int = 0,
) -> FileHandle:
    """Write a file and return its handle; what takes up to the limit goes into the handle."""
    with _Output(file_system, path, inline_limit) as output:
        size, rows, ending = _emit_file(sections, output.write)
        inline = output.inline
    if inline is not None:
        return handle_of(ending, size=size, rows=rows, inline=inline)
    return handle_of(ending, size=size, rows=rows, path=path)


def encode_state_file(sections: Iterable[KeyedSection | ListSection]) -> bytes:
    """Return the bytes of a state file."""
    encoded = bytearray()
    _emit_file(sections, encoded.extend)
    return bytes(encoded)


def sort_by_group(table: pa.Table) -> pa.Table:
    """Return the rows sorted by key group; rows of one group keep their order."""
    groups = group_numbers(table)
    if len(groups) < 2 or bool(np.all(groups[:-1] <= groups[1:])):
        return table
    return table.take(pa.array(np.argsort(groups, kind="stable")))


def group_numbers(table: pa.Table) -> npt.NDArray[np.uint16]:
    """Return the key group of each row."""
    numbers: npt.NDArray[np.uint16] = table.column("group").to_numpy()
    return numbers


class _Output:
    """Keeps what it is given until that is more than the limit, and then opens the file."""

    def __init__(self, file_system: StateFileSystem, path: str, limit: int) -> None:
        self._file_system, self._path, self._limit = file_system, path, limit
        self._kept = bytearray()
        self._file: BinaryIO | None = None
        self._open = ExitStack()

    @property
    def inline(self) -> bytes | None:
        return bytes(self._kept) if self._file is None else None

    def write(self, data: bytes | memoryview) -> None:
        if self._file is None:
            if len(self._kept) + len(data) <= self._limit:
                self._kept += data
                return
            self._file = self._open.enter_context(self._file_system.open_output(self._path))
            self._file.write(self._kept)
            self._kept.clear()
        self._file.write(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, traceback)


class _Position:
    """Passes pieces on, and knows where the next one begins."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.offset = 0

    def put(self, piece: bytes | memoryview) -> tuple[int, int, str]:
        place = self.offset, len(piece), checksum_of(piece)
        self._emit(piece)
        self.offset += len(piece)
        return place


def _emit_file(
    sections: Iterable[KeyedSection | ListSection], emit: Emit
) -> tuple[int, int, bytes]:
    position = _Position(emit)
    written = tuple(_emit_section(section, position) for section in sections)
    if len({section.name for section in written}) != len(written):
        raise ValueError(f"two sections have one name: {[section.name for section in written]}")
    ending = encode_footer(written)
    position.put(ending)
    return position.offset, sum(section.rows for section in written), ending


def _emit_section(section: KeyedSection | ListSection, position: _Position) -> Section:
    if isinstance(section, KeyedSection):
        schema, parts = section.schema, _keyed_parts(section)
    else:
        schema, parts = pa.schema([(_VALUE, section.value_type)]), _list_parts(section)
    for field in schema:
        _check_type(field.type, section.name)
    header = schema.serialize().to_pybytes()
    place = position.put(header)
    segments = tuple(_emit_segments(schema, len(header), parts, position))
    position.put(END_OF_STREAM)
    if isinstance(section, KeyedSection):
        return Section(section.name, SectionType.KEYED, section.kind, *place, segments)
    return Section(section.name, SectionType.LIST, None, *place, segments)


_Part = tuple[int, int, pa.Table]


def _emit_segments(
    schema: pa.Schema, header_length: int, parts: Iterable[_Part], position: _Position
) -> Iterator[Segment]:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    for first, last, part in parts:
        # A column of more than 2 GiB stays in chunks; a part has it only where a single row does.
        (batch,) = part.combine_chunks().to_batches()
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, schema, options=options) as writer:
            writer.write_batch(batch)
        # Each stream has the schema in front and the end behind; the section has them once.
        message = memoryview(stream.getvalue())[header_length : -len(END_OF_STREAM)]
        offset, length, checksum = position.put(message)
        raw_bytes = pa.ipc.get_record_batch_size(batch)
        yield Segment(first, last, offset, length, batch.num_rows, raw_bytes, checksum)


def _keyed_parts(section: KeyedSection) -> Iterator[_Part]:
    reached = 0
    for table in section.tables:
        if not table.schema.equals(section.schema):
            raise ValueError(f"rows of {section.name!r} have the schema {table.schema}")
        groups = group_numbers(table)
        if not len(groups):
            continue
        if groups[0] < reached or not np.all(groups[:-1] <= groups[1:]):
            raise ValueError(f"the rows of {section.name!r} are not sorted by key group")
        reached = int(groups[-1])
        starts = np.flatnonzero(groups[1:] != groups[:-1]) + 1
        for start, stop in _cut_groups(table, [0, *starts.tolist(), len(groups)]):
            part = table.slice(start, stop - start)
            yield int(groups[start]), int(groups[stop - 1]), part


def _cut_groups(table: pa.Table, starts: list[int]) -> Iterator[tuple[int, int]]:
    """Halve the key groups until each part is small enough or is a single key group.

    Measuring from the top costs two measurements a segment, however many key groups there are.
    """
    limit = _segment_bytes(table)
    pending = [(0, len(starts) - 1)]
    while pending:
        low, high = pending.pop()
        start, stop = starts[low], starts[high]
        if high - low == 1:
            yield from _cut_rows(table, start, stop, SEGMENT_BYTES_MAX)
        elif table.slice(start, stop - start).nbytes <= limit:
            yield start, stop
        else:
            middle = (low + high) // 2
            pending += [(middle, high), (low, middle)]


def _segment_bytes(table: pa.Table) -> int:
    """Return how large segments are to be: small ones in a small file.

    A subtask that owns a sixteenth of the key groups is to read about a sixteenth of a delta, too,
    and not half of it because it has only two segments.
    """
    share: int = table.nbytes // _SEGMENTS_WANTED
    return min(SEGMENT_BYTES, max(SEGMENT_BYTES_MIN, share))


def _cut_rows(table: pa.Table, start: int, stop: int, limit: int) -> Iterator[tuple[int, int]]:
    if stop - start <= 1 or table.slice(start, stop - start).nbytes <= limit:
        yield start, stop
    else:
        middle = (start + stop) // 2
        yield from _cut_rows(table, start, middle, limit)
        yield from _cut_rows(table, middle, stop, limit)


def _list_parts(section: ListSection) -> Iterator[_Part]:
    # To compress and to read a segment costs as much as some thousand bytes in it; but a reader
    # reads whole ones, so they are small beside the share of a subtask.
    share = section.total_bytes // _LIST_SEGMENTS_WANTED
    limit = min(SEGMENT_BYTES_MAX, max(SEGMENT_BYTES, share))
    index = 0
    for array in section.arrays:
        table = pa.table({_VALUE: array})
        if array.type != section.value_type:
            raise ValueError(f"elements of {section.name!r} have the type {array.type}")
        if not table.num_rows:
            continue
        for start, stop in _cut_rows(table, 0, table.num_rows, limit):
            yield index + start, index + stop - 1, table.slice(start, stop - start)
        index += table.num_rows


def _check_type(data_type: pa.DataType, name: str) -> None:
    """Refuse types whose batches depend on others, or whose slices carry all of their data."""
    if any(is_refused(data_type) for is_refused in _REFUSED):
        raise StateTypeError(
            f"state {name!r} has the type {data_type}, which cannot be cut into segments. Declare "
            f"it with the plain type of its values"
        )
    for index in range(data_type.num_fields):
        _check_type(data_type.field(index).type, name)


_REFUSED = (
    pat.is_dictionary,
    pat.is_run_end_encoded,
    pat.is_string_view,
    pat.is_binary_view,
    pat.is_list_view,
    pat.is_large_list_view,
)
