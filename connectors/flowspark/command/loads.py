"""What state weighs: bytes and rows by state, by key group and by subtask.

It is read from the index of the state files, not from the rows. An index knows the bytes of a
segment, which may hold several key groups; these get equal parts of it. Where the state is in the
record itself its rows are at hand, and each key group gets what its rows are of the segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowstate.checkpoint import (
    CheckpointRecord,
    CheckpointStorage,
    FileHandle,
    KeyedHandle,
    Section,
    SectionType,
    Segment,
    StateFileReader,
)
from flowstate.checkpoint.reading import segments_within
from flowstate.key_groups import KeyGroupRange
from flowstate.restoring import ElementRange, keyed_share, operator_ranges
from flowstate.rows import StateKind

__all__ = ["ListLoad", "Loads", "Readers", "Share", "loads_of", "share_of", "skew_of", "spread_of"]

Weights = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ListLoad:
    """What one subtask has of one operator state."""

    elements: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Loads:
    """What a checkpoint weighs."""

    kinds: Mapping[str, StateKind]
    """The keyed states by name, those of timers too, which no descriptor describes."""
    keyed_bytes: Mapping[str, Weights]
    """By state and key group; changes that later ones replace count too, until they are merged."""
    keyed_rows: Mapping[str, Weights]
    lists: Mapping[str, tuple[ListLoad, ...]]
    """By operator state and subtask."""
    max_parallelism: int

    @property
    def key_groups(self) -> Weights:
        """The bytes of each key group over all states."""
        total = np.zeros(self.max_parallelism)
        for weights in self.keyed_bytes.values():
            total += weights
        return total

    def bytes_of(self, name: str) -> int:
        """Return what a state weighs."""
        if name in self.keyed_bytes:
            return round(float(self.keyed_bytes[name].sum()))
        return sum(load.bytes for load in self.lists.get(name, ()))

    def count_of(self, name: str) -> int:
        """Return how many rows or elements a state has."""
        if name in self.keyed_rows:
            return round(float(self.keyed_rows[name].sum()))
        return sum(load.elements for load in self.lists.get(name, ()))


@dataclass(frozen=True, slots=True)
class Share:
    """What one subtask would start from at some parallelism."""

    subtask_index: int
    key_groups: KeyGroupRange | None
    keyed_bytes: int
    list_bytes: int
    elements: int
    bytes_read: int
    """What is fetched from the store; more than the state where segments are cut."""
    sources: tuple[int, ...]
    """The old subtasks whose files it reads."""

    @property
    def bytes(self) -> int:
        """The state that the subtask has."""
        return self.keyed_bytes + self.list_bytes


class Readers:
    """The readers of a checkpoint's files, each with its footer read once."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage
        self._readers: dict[FileHandle, StateFileReader] = {}

    def __call__(self, handle: FileHandle) -> StateFileReader:
        if handle not in self._readers:
            self._readers[handle] = self._storage.reader(handle)
        return self._readers[handle]


def loads_of(storage: CheckpointStorage, record: CheckpointRecord) -> Loads:
    """Weigh a checkpoint; it costs one read for each of its files."""
    readers = Readers(storage)
    kinds = {name: StateKind(meta["kind"]) for name, meta in record.keyed_states.items()}
    bytes_of: dict[str, Weights] = {}
    rows_of: dict[str, Weights] = {}
    for name in record.keyed_states:
        bytes_of[name] = np.zeros(record.max_parallelism)
        rows_of[name] = np.zeros(record.max_parallelism)
    for subtask in record.subtasks:
        for handle in subtask.keyed:
            for section, segments in _keyed_segments(readers(handle.file), handle):
                if section.kind is not None:
                    kinds.setdefault(section.name, section.kind)
                if section.name not in bytes_of:
                    bytes_of[section.name] = np.zeros(record.max_parallelism)
                    rows_of[section.name] = np.zeros(record.max_parallelism)
                for segment in segments:
                    parts = _parts(readers(handle.file), section, segment)
                    # Of a file that several subtasks share, each has its own key groups only.
                    start = max(segment.first, handle.key_groups.start)
                    stop = min(segment.last, handle.key_groups.end) + 1
                    parts = parts[start - segment.first : stop - segment.first]
                    bytes_of[section.name][start:stop] += parts * segment.length
                    rows_of[section.name][start:stop] += parts * segment.rows
    return Loads(kinds, bytes_of, rows_of, _lists(readers, record), record.max_parallelism)


def _keyed_segments(
    reader: StateFileReader, handle: KeyedHandle
) -> Iterator[tuple[Section, Sequence[Segment]]]:
    for section in reader.footer.sections:
        if section.type is SectionType.KEYED:
            yield section, segments_within(section, handle.key_groups)


def _parts(reader: StateFileReader, section: Section, segment: Segment) -> Weights:
    """Return which part of a segment belongs to each of its key groups, from the first on."""
    count = segment.last - segment.first + 1
    if count > 1 and reader.handle.inline is not None:
        ((batch,),) = reader.read_segments({section.name: [segment]}).values()
        groups = batch.column("group").to_numpy()
        return np.bincount(groups - segment.first, minlength=count) / len(groups)
    return np.full(count, 1 / count)


def _lists(readers: Readers, record: CheckpointRecord) -> dict[str, tuple[ListLoad, ...]]:
    found: dict[str, list[ListLoad]] = defaultdict(list)
    for name in record.operator_states:
        for subtask in record.subtasks:
            elements = weight = 0
            for handle in subtask.operator:
                if (meta := handle.states.get(name)) is not None:
                    elements += meta.count
                    part = ElementRange(handle, meta.start, meta.start + meta.count)
                    weight += _element_bytes(readers, name, part)
            found[name].append(ListLoad(elements, weight))
    return {name: tuple(loads) for name, loads in found.items()}


def _element_bytes(readers: Readers, name: str, part: ElementRange) -> int:
    """Return what some elements weigh: of a segment as much as they are of it."""
    weight = 0.0
    for segment in readers(part.handle.file).sections[name].segments:
        overlap = min(part.stop, segment.last + 1) - max(part.start, segment.first)
        if overlap > 0:
            weight += segment.length * overlap / segment.rows
    return round(weight)


def share_of(
    readers: Readers,
    record: CheckpointRecord,
    weights: Weights,
    *,
    key_groups: KeyGroupRange | None,
    subtask_index: int,
    parallelism: int | None,
) -> Share:
    """Say what a subtask starts from at a parallelism (None: has now), and from whose files.

    The weights are those of all key groups, ``Loads.key_groups``.
    """
    sources: set[int] = set()
    keyed_bytes = bytes_read = 0
    if key_groups is not None:
        window = weights[key_groups.start : key_groups.end + 1]
        keyed_bytes = round(float(window.sum()))
        for handle in keyed_share(record, key_groups).handles:
            for _, segments in _keyed_segments(readers(handle.file), handle):
                bytes_read += sum(segment.length for segment in segments)
        sources |= {
            subtask.subtask_index
            for subtask in record.subtasks
            if subtask.keyed
            and subtask.key_groups is not None
            and subtask.key_groups.intersect(key_groups) is not None
        }
    elements = list_bytes = 0
    ranges = (
        _own_ranges(record, subtask_index)
        if parallelism is None
        else operator_ranges(record, subtask_index=subtask_index, parallelism=parallelism)
    )
    owners = {
        id(handle): subtask.subtask_index
        for subtask in record.subtasks
        for handle in subtask.operator
    }
    for name, parts in ranges.items():
        for part in parts:
            elements += len(part)
            list_bytes += _element_bytes(readers, name, part)
            sources.add(owners[id(part.handle)])
    return Share(
        subtask_index=subtask_index,
        key_groups=key_groups,
        keyed_bytes=keyed_bytes,
        list_bytes=list_bytes,
        elements=elements,
        bytes_read=bytes_read + list_bytes,
        sources=tuple(sorted(sources)),
    )


def _own_ranges(record: CheckpointRecord, subtask_index: int) -> dict[str, list[ElementRange]]:
    """Return where a subtask's own operator state is; nobody else's is handed to it."""
    found: dict[str, list[ElementRange]] = defaultdict(list)
    for handle in record.subtasks[subtask_index].operator:
        for name, meta in handle.states.items():
            if meta.count:
                found[name].append(ElementRange(handle, meta.start, meta.start + meta.count))
    return found


def skew_of(values: Sequence[float]) -> float:
    """Return how much more the heaviest has than the mean; 1 is even, and so is nothing."""
    total = sum(values)
    return max(values) * len(values) / total if total > 0 else 1.0


def spread_of(weights: Weights, columns: int) -> list[float]:
    """Return the heaviest of each column, where there are more weights than columns."""
    return [float(part.max()) for part in np.array_split(weights, min(columns, len(weights)))]
