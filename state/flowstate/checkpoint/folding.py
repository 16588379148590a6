"""Carrying out a merge plan: several state files become one, a stretch of key groups at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from flowstate.checkpoint.expiry import drop_expired
from flowstate.checkpoint.files import SectionType
from flowstate.checkpoint.merge import Convert, convert_rows, merge_rows
from flowstate.checkpoint.reading import SectionCursor, StateFileReader, segments_within
from flowstate.checkpoint.record import KeyedHandle, StateMeta
from flowstate.checkpoint.storage import CheckpointStorage
from flowstate.checkpoint.tiers import MergePlan
from flowstate.checkpoint.writing import KeyedSection
from flowstate.key_groups import KeyGroupRange
from flowstate.rows import StateKind, StateRows

__all__ = ["STRETCH_BYTES", "MergeTimes", "merge_handles"]

STRETCH_BYTES = 8 << 20
"""How much is merged at once, before compression; a larger key group is merged by itself."""

_READ_BYTES = 256 << 10

_Source = tuple[StateFileReader, KeyGroupRange]


@dataclass(frozen=True, slots=True)
class MergeTimes:
    """What time it is for the states that expire; a None lets nothing expire."""

    processing_ms: int | None = None
    event_ms: int | None = None
    """The watermark."""

    def now_ms(self, meta: StateMeta) -> int | None:
        """Return the time that counts for a state."""
        return self.event_ms if meta.get("ttl_time") == "event" else self.processing_ms


def merge_handles(
    storage: CheckpointStorage,
    plan: MergePlan,
    *,
    source: CheckpointStorage | None = None,
    batch_id: int,
    run: str,
    states: Mapping[str, StateMeta],
    times: MergeTimes,
    converts: Mapping[str, Convert] | None = None,
    inline_limit: int = 0,
) -> KeyedHandle:
    """Merge the plan's handles into a new file, and return its handle.

    A full result has no deletions and, of states with a TTL, nothing that has expired. A state
    that ``states`` does not name is kept as it is. ``converts`` has the conversions of states
    whose type has changed, where a cast does not do. ``source`` has the handles' files if they are
    below another root than the one that the result is written to.

    It needs memory for ``STRETCH_BYTES`` (or the largest key group) a few times over, and for
    up to ``_READ_BYTES`` of each handle, whatever the size of the state.
    """
    reader = (source or storage).reader
    sources = [(reader(handle.file), handle.key_groups) for handle in plan.handles]
    sections = (
        _merged_section(
            name,
            [source for source in sources if name in source[0].sections],
            plan=plan,
            meta=states.get(name, {}),
            times=times,
            convert=(converts or {}).get(name, convert_rows),
        )
        for name in _names(sources)
    )
    return KeyedHandle(
        file=storage.write_file(sections, batch_id=batch_id, run=run, inline_limit=inline_limit),
        key_groups=plan.key_groups,
        first_checkpoint=min(handle.first_checkpoint for handle in plan.handles),
        last_checkpoint=plan.handles[-1].last_checkpoint,
        level=plan.level,
        full=plan.full,
    )


def _names(sources: Sequence[_Source]) -> list[str]:
    names = [
        name
        for reader, _ in sources
        for name, section in reader.sections.items()
        if section.type is SectionType.KEYED
    ]
    return list(dict.fromkeys(names))


def _merged_section(
    name: str,
    sources: Sequence[_Source],
    *,
    plan: MergePlan,
    meta: StateMeta,
    times: MergeTimes,
    convert: Convert,
) -> KeyedSection:
    newest = sources[-1][0]
    schema, kind = newest.schema(name), newest.sections[name].kind or StateKind.VALUE
    ttl_ms, now_ms = meta.get("ttl_ms"), times.now_ms(meta)

    def tables() -> Iterator[pa.Table]:
        for parts in _stretches(name, sources, plan.key_groups):
            # The newest file may have no rows in this stretch, but its schema counts.
            sets = [StateRows(name, kind, part) for part in (*parts, schema.empty_table())]
            rows = merge_rows(sets, drop_tombstones=plan.full, convert=convert)
            if plan.full and ttl_ms is not None and now_ms is not None:
                since = meta.get("ttl_since_ms")
                rows = drop_expired(rows, ttl_ms=ttl_ms, now_ms=now_ms, unstamped_ms=since)
            yield rows.table

    return KeyedSection(name, kind, schema, tables())


def _stretches(
    name: str, sources: Sequence[_Source], key_groups: KeyGroupRange
) -> Iterator[list[pa.Table]]:
    """Yield the rows of all sources, oldest first, one stretch of key groups after the other."""
    raw_bytes: dict[int, int] = defaultdict(int)
    cursors = []
    for reader, clip in sources:
        segments = segments_within(reader.sections[name], clip)
        for segment in segments:
            raw_bytes[max(segment.first, clip.start)] += segment.raw_bytes
        if segments:
            cursors.append(SectionCursor(reader, name, clip, read_bytes=_READ_BYTES))
    for last_group in _stretch_ends(raw_bytes, key_groups.end):
        yield [cursor.take(last_group) for cursor in cursors]


def _stretch_ends(raw_bytes: Mapping[int, int], last_group: int) -> Iterator[int]:
    gathered = 0
    for group in sorted(raw_bytes):
        if gathered and gathered + raw_bytes[group] > STRETCH_BYTES:
            yield group - 1
            gathered = 0
        gathered += raw_bytes[group]
    yield last_group
