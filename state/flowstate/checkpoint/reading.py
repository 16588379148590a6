"""Reading state files: only the segments that are wanted, and each one checked before use."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from flowstate.checkpoint.files import (
    FileHandle,
    Footer,
    Section,
    SectionType,
    Segment,
    checksum_of,
    decode_footer,
)
from flowstate.errors import SnapshotCorruptError
from flowstate.key_groups import KeyGroupRange
from flowstate.rows import StateRows
from flowstate.storage._port import StateFileSystem

__all__ = ["SectionCursor", "StateFileReader", "segments_within"]

_WHOLE_BYTES = 32 << 10
"""Up to this size a second request costs more than the bytes that it would spare."""

_BROKEN = (pa.ArrowException, OSError, ValueError, KeyError)
"""What Arrow raises when bytes are not a message of the schema."""


class StateFileReader:
    """Reads one state file.

    The footer costs one read, and so does each call for data, whatever the number of states and
    segments; schemas are read once. A small file is read as a whole, once. Bytes that are not the
    ones that were written raise ``SnapshotCorruptError``; no rows are made of them.
    """

    def __init__(self, file_system: StateFileSystem, handle: FileHandle) -> None:
        self._file_system = file_system
        self._schemas: dict[str, pa.Schema] = {}
        self.handle = handle

    @property
    def where(self) -> str:
        """The file, for messages."""
        if self.handle.path is None:
            return f"the inline state {self.handle.digest} of {self._file_system.url}"
        return f"{self._file_system.url}/{self.handle.path}"

    @cached_property
    def footer(self) -> Footer:
        """What the file holds, checked against the handle."""
        (ending,) = self.read_ranges([self.handle.footer_range])
        footer = decode_footer(ending, self.handle, self.where)
        rows = sum(section.rows for section in footer.sections)
        self.check("the number of rows", expected=self.handle.rows, actual=rows)
        return footer

    @cached_property
    def sections(self) -> dict[str, Section]:
        """The sections by name, in the order of the file."""
        return {section.name: section for section in self.footer.sections}

    def schema(self, name: str) -> pa.Schema:
        """Return the schema of a section."""
        self.read_segments({name: ()})
        return self._schemas[name]

    def read_rows(self, name: str, key_groups: KeyGroupRange) -> StateRows:
        """Return the rows of one keyed state that are in these key groups."""
        if name not in self.sections:
            raise KeyError(f"{self.where} has no state {name!r}, only {list(self.sections)}")
        return self.read_rows_of(key_groups, [name])[name]

    def read_rows_of(
        self, key_groups: KeyGroupRange, names: Collection[str] | None = None
    ) -> dict[str, StateRows]:
        """Return the rows of several keyed states, or of all; a state that is not here is left out.

        A state without rows in these key groups is there, with an empty table of its schema.
        """
        wanted = {
            section.name: segments_within(section, key_groups)
            for section in self.footer.sections
            if section.type is SectionType.KEYED and (names is None or section.name in names)
        }
        found = {}
        for name, batches in self.read_segments(wanted).items():
            clipped = [_clip(batch, key_groups) for batch in batches]
            table = pa.Table.from_batches(clipped, self._schemas[name])
            kind = self.sections[name].kind
            if kind is None:
                raise self.corrupt("the kind of a keyed section", expected="a kind", actual=None)
            found[name] = StateRows(name, kind, table)
        return found

    def read_elements(self, name: str, start: int, stop: int) -> pa.ChunkedArray:
        """Return the elements of one operator state from ``start`` up to, without, ``stop``."""
        section = self.sections[name]
        if section.type is not SectionType.LIST:
            raise KeyError(f"{name!r} of {self.where} is keyed state, which has no elements")
        if not 0 <= start <= stop <= section.rows:
            raise IndexError(f"{name!r} has {section.rows} elements, none at {start}..{stop}")
        segments = [
            segment
            for segment in section.segments
            if segment.last >= start and segment.first < stop
        ]
        batches = self.read_segments({name: segments})[name]
        table = pa.Table.from_batches(batches, self._schemas[name])
        skipped = start - segments[0].first if segments else 0
        return table.column(0).slice(skipped, stop - start)

    def read_segments(
        self, wanted: dict[str, Sequence[Segment]]
    ) -> dict[str, list[pa.RecordBatch]]:
        """Return the batches of these segments by state, with one read for everything."""
        sections = self.sections
        unknown = [sections[name] for name in wanted if name not in self._schemas]
        segments = [segment for of_state in wanted.values() for segment in of_state]
        pieces = self.read_ranges(
            [(section.schema_offset, section.schema_length) for section in unknown]
            + [(segment.offset, segment.length) for segment in segments]
        )
        # Everything is checked before anything is decoded.
        checksums = [section.schema_checksum for section in unknown]
        checksums += [segment.checksum for segment in segments]
        for piece, checksum in zip(pieces, checksums, strict=True):
            self.check("the checksum of a segment", expected=checksum, actual=checksum_of(piece))
        for section, piece in zip(unknown, pieces, strict=False):
            self._schemas[section.name] = self._decode_schema(section, piece)
        messages = iter(pieces[len(unknown) :])
        return {
            name: [
                self._decode_batch(sections[name], segment, next(messages)) for segment in of_state
            ]
            for name, of_state in wanted.items()
        }

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return parts of the file, unchecked."""
        if not ranges:
            return []
        if self._whole is None:
            assert self.handle.path is not None
            return self._file_system.read_ranges(self.handle.path, ranges)
        pieces = [self._whole[offset : offset + length] for offset, length in ranges]
        for (_, length), piece in zip(ranges, pieces, strict=True):
            self.check("the length of a part", expected=length, actual=len(piece))
        return pieces

    @cached_property
    def _whole(self) -> bytes | None:
        handle = self.handle
        if handle.path is None or handle.size > _WHOLE_BYTES:
            return handle.inline
        return self._file_system.read_ranges(handle.path, [(0, handle.size)])[0]

    def check(self, what: str, *, expected: object, actual: object) -> None:
        """Refuse the file if the two differ."""
        if expected != actual:
            raise self.corrupt(what, expected=expected, actual=actual)

    def corrupt(self, what: str, *, expected: object, actual: object) -> SnapshotCorruptError:
        """Return the error that names this file."""
        return SnapshotCorruptError(self.where, what=what, expected=expected, actual=actual)

    def _decode_schema(self, section: Section, piece: bytes) -> pa.Schema:
        try:
            schema = pa.ipc.read_schema(pa.py_buffer(piece))
            if section.type is SectionType.KEYED:
                self.check(
                    "the type of the column 'group'",
                    expected=str(pa.uint16()),
                    actual=str(schema.field("group").type),
                )
            return schema
        except _BROKEN as error:
            raise self.corrupt(
                f"the schema of {section.name!r}", expected="an Arrow schema", actual=str(error)
            ) from error

    def _decode_batch(self, section: Section, segment: Segment, piece: bytes) -> pa.RecordBatch:
        what = f"the segment of {section.name!r} at {segment.offset}"
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(piece), self._schemas[section.name])
            batch.validate()
        except _BROKEN as error:
            raise self.corrupt(what, expected="an Arrow batch", actual=str(error)) from error
        self.check(f"rows in {what}", expected=segment.rows, actual=batch.num_rows)
        if section.type is SectionType.KEYED:
            groups = batch.column("group")
            actual = (groups[0].as_py(), groups[-1].as_py())
            self.check(
                f"key groups in {what}", expected=(segment.first, segment.last), actual=actual
            )
        return batch


class SectionCursor:
    """Reads a keyed section from front to back, a stretch of key groups at a time.

    Each byte is read once. Reads are of a fair size: what is read beyond the stretch is kept.
    """

    def __init__(
        self, reader: StateFileReader, name: str, key_groups: KeyGroupRange, *, read_bytes: int
    ) -> None:
        self._reader, self._name, self._key_groups = reader, name, key_groups
        self._read_bytes = read_bytes
        self._pending = segments_within(reader.sections[name], key_groups)
        self._kept: list[pa.RecordBatch] = []

    def take(self, last_group: int) -> pa.Table:
        """Return the rows up to and with this key group that were not taken yet."""
        count = bisect_right(self._pending, last_group, key=_first_of)
        if count:
            self._read(count)
        taken, kept = [], []
        for batch in self._kept:
            groups = batch.column("group").to_numpy()
            stop = int(np.searchsorted(groups, np.uint16(last_group), side="right"))
            if stop:
                taken.append(batch.slice(0, stop))
            if stop < batch.num_rows:
                kept.append(batch.slice(stop))
        self._kept = kept
        return pa.Table.from_batches(taken, self._reader.schema(self._name))

    def _read(self, count: int) -> None:
        length = sum(segment.length for segment in self._pending[:count])
        while count < len(self._pending) and length < self._read_bytes:
            length += self._pending[count].length
            count += 1
        now, self._pending = self._pending[:count], self._pending[count:]
        batches = self._reader.read_segments({self._name: now})[self._name]
        self._kept += [_clip(batch, self._key_groups) for batch in batches]


def segments_within(section: Section, key_groups: KeyGroupRange) -> Sequence[Segment]:
    """Return the segments that have rows of these key groups; segments are sorted by group."""
    begin = bisect_left(section.segments, key_groups.start, key=lambda segment: segment.last)
    end = bisect_right(section.segments, key_groups.end, key=_first_of)
    return section.segments[begin:end]


def _first_of(segment: Segment) -> int:
    return segment.first


def _clip(batch: pa.RecordBatch, key_groups: KeyGroupRange) -> pa.RecordBatch:
    groups = batch.column("group").to_numpy()
    if not len(groups) or (groups[0] in key_groups and groups[-1] in key_groups):
        return batch
    start = int(np.searchsorted(groups, np.uint16(key_groups.start), side="left"))
    stop = int(np.searchsorted(groups, np.uint16(key_groups.end), side="right"))
    return batch.slice(start, stop - start)
