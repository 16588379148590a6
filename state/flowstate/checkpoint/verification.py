"""Verifying checkpoints: everything is read, and all that is wrong is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flowstate.checkpoint.files import (
    END_OF_STREAM,
    SHARED_FOLDER,
    Section,
    SectionType,
    Segment,
    checksum_of,
)
from flowstate.checkpoint.reading import StateFileReader
from flowstate.checkpoint.record import CheckpointRecord, SubtaskSnapshot
from flowstate.checkpoint.writing import group_numbers
from flowstate.errors import SnapshotError
from flowstate.storage._port import StateFileSystem

__all__ = ["VerifyProblem", "VerifyReport", "verify_record"]

_READ_BYTES = 8 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class VerifyProblem:
    """One thing that is wrong."""

    path: str
    error: SnapshotError


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read of a checkpoint, and what is wrong with it."""

    checkpoint_id: int
    files: int
    """Files in the store and states inline."""
    bytes: int
    problems: tuple[VerifyProblem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def raise_if_broken(self) -> None:
        """Raise the first problem, with notes about the others."""
        if self.problems:
            first, *others = self.problems
            for problem in others:
                first.error.add_note(str(problem.error))
            raise first.error


def verify_record(
    file_system: StateFileSystem, record: CheckpointRecord, progress: Progress | None = None
) -> VerifyReport:
    """Check all files of a record: sizes, checksums, footers, contents, key groups, counts."""
    files = {file: None for subtask in record.subtasks for file in subtask.files}
    total = sum(file.size for file in files)
    sizes = {entry.path: entry.size for entry in file_system.list(SHARED_FOLDER)}
    problems: list[VerifyProblem] = []
    done = 0
    for file in files:
        reader = StateFileReader(file_system, file)
        found = _problems_of(reader, sizes, record.max_parallelism)
        problems += [VerifyProblem(reader.where, error) for error in found]
        done += file.size
        if progress is not None:
            progress(done, total)
    for subtask in record.subtasks:
        problems += _count_problems(file_system, subtask)
    return VerifyReport(record.checkpoint_id, len(files), total, tuple(problems))


def _problems_of(
    reader: StateFileReader, sizes: dict[str, int], max_parallelism: int
) -> Iterator[SnapshotError]:
    path, size = reader.handle.path, reader.handle.size
    # A missing file says so when it is read.
    if path is not None and sizes.get(path, size) != size:
        yield reader.corrupt("the size", expected=size, actual=sizes[path])
    try:
        sections = reader.footer.sections
    except SnapshotError as error:
        yield error
        return
    yield from _layout_problems(reader)
    for section in sections:
        try:
            reader.schema(section.name)
        except SnapshotError as error:
            yield error
            yield from _checksum_problems(reader, section)
            continue
        for segments in _windows(section.segments):
            yield from _segment_problems(reader, section, segments, max_parallelism)


def _layout_problems(reader: StateFileReader) -> Iterator[SnapshotError]:
    """Check that the file is what the footer lists, without a gap, and that sections end."""
    reached = 0
    for section in reader.footer.sections:
        pieces = [(section.schema_offset, section.schema_length)]
        pieces += [(segment.offset, segment.length) for segment in section.segments]
        for offset, length in pieces:
            if offset != reached:
                yield reader.corrupt("the place of a segment", expected=reached, actual=offset)
            reached = offset + length
        try:
            (end,) = reader.read_ranges([(reached, len(END_OF_STREAM))])
            reader.check(f"the end of {section.name!r}", expected=END_OF_STREAM, actual=end)
        except SnapshotError as error:
            yield error
        reached += len(END_OF_STREAM)
    if reached != reader.handle.footer_range[0]:
        yield reader.corrupt(
            "the place of the footer", expected=reached, actual=reader.handle.footer_range[0]
        )


def _windows(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    window: list[Segment] = []
    length = 0
    for segment in segments:
        if window and length + segment.length > _READ_BYTES:
            yield window
            window, length = [], 0
        window.append(segment)
        length += segment.length
    if window:
        yield window


def _checksum_problems(reader: StateFileReader, section: Section) -> Iterator[SnapshotError]:
    """Check what can be checked of segments without their schema."""
    for segment in section.segments:
        try:
            (piece,) = reader.read_ranges([(segment.offset, segment.length)])
            reader.check(
                f"the checksum of the segment of {section.name!r} at {segment.offset}",
                expected=segment.checksum,
                actual=checksum_of(piece),
            )
        except SnapshotError as error:
            yield error


def _segment_problems(
    reader: StateFileReader, section: Section, segments: Sequence[Segment], max_parallelism: int
) -> Iterator[SnapshotError]:
    try:
        batches = reader.read_segments({section.name: segments})[section.name]
    except SnapshotError as error:
        if len(segments) == 1:
            yield error
            return
        # One by one, so that each broken segment is reported, and not the first alone.
        for segment in segments:
            yield from _segment_problems(reader, section, [segment], max_parallelism)
        return
    for segment, batch in zip(segments, batches, strict=True):
        what = f"the segment of {section.name!r} at {segment.offset}"
        try:
            batch.validate(full=True)
        except ValueError as error:
            yield reader.corrupt(what, expected="valid Arrow data", actual=str(error))
            continue
        if section.type is SectionType.KEYED:
            groups = group_numbers(batch)
            if not np.all(groups[:-1] <= groups[1:]):
                yield reader.corrupt(what, expected="rows sorted by key group", actual="others")
            if int(groups[-1]) >= max_parallelism:
                yield reader.corrupt(
                    f"the last key group of {what}",
                    expected=f"below {max_parallelism}",
                    actual=int(groups[-1]),
                )


def _count_problems(
    file_system: StateFileSystem, subtask: SubtaskSnapshot
) -> Iterator[VerifyProblem]:
    """Check that the elements of operator state which the record means are in the files."""
    for handle in subtask.operator:
        reader = StateFileReader(file_system, handle.file)
        try:
            sections = reader.sections
        except SnapshotError:
            continue  # Reported with the file.
        wanted = {name: meta.start + meta.count for name, meta in handle.states.items()}
        actual = {name: section.rows for name, section in sections.items()}
        if any(actual.get(name, -1) < stop for name, stop in wanted.items()):
            error = reader.corrupt("the number of elements", expected=wanted, actual=actual)
            yield VerifyProblem(reader.where, error)
