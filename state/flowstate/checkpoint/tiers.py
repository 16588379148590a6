"""When to merge which handles of a subtask.

Each checkpoint adds a handle of level 0 with its changes. When ``fan_in`` handles of one level
are the newest, they become one of the next level. When the changes have grown to the size of the
full snapshot below them, everything becomes a new full snapshot. So a restore reads few files, at
most about twice the state, and each change is written again once per level and a time or two
more in full snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowstate.checkpoint.record import KeyedHandle
from flowstate.key_groups import KeyGroupRange

__all__ = ["FAN_IN", "LEVEL_MAX", "MergePlan", "handles_max", "plan_merge"]

FAN_IN = 8
LEVEL_MAX = 5
"""Where a higher level would be due, everything is folded into a full handle instead."""


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Which handles are to become one."""

    handles: tuple[KeyedHandle, ...]
    """A run of the subtask's handles, oldest first."""
    level: int
    full: bool
    """The handles are all there are, so that deletions need not be kept."""

    @property
    def key_groups(self) -> KeyGroupRange:
        """The key groups of the result."""
        return KeyGroupRange(
            min(handle.key_groups.start for handle in self.handles),
            max(handle.key_groups.end for handle in self.handles),
        )

    @property
    def size(self) -> int:
        """How many bytes are to be read, if all of each file is meant."""
        return sum(handle.file.size for handle in self.handles)

    def apply(self, handles: Sequence[KeyedHandle], merged: KeyedHandle) -> tuple[KeyedHandle, ...]:
        """Put the result in the place of the handles that it was made of.

        Newer handles may have come since the plan was made; they stay behind the result.
        """
        count = len(self.handles)
        for start in range(len(handles) - count + 1):
            if tuple(handles[start : start + count]) == self.handles:
                return (*handles[:start], merged, *handles[start + count :])
        raise ValueError("the handles that were merged are no longer there")


def handles_max(fan_in: int = FAN_IN) -> int:
    """Return how many handles a subtask has at most once its plans are carried out.

    That is ``fan_in - 1`` of each level, and one full handle below them.
    """
    return (fan_in - 1) * (LEVEL_MAX + 1) + 1


def plan_merge(handles: Sequence[KeyedHandle], *, fan_in: int = FAN_IN) -> MergePlan | None:
    """Say what is to be merged now, or None if nothing is.

    The handles are a subtask's, oldest first, the one of the last checkpoint included. The plan
    is all that is due: carried out, it leaves at most :func:`handles_max` handles, and asking
    again gives None. That holds for any list, also for that of a subtask that has just taken
    over the handles of many.
    """
    if fan_in < 2:
        raise ValueError(f"fewer than two handles cannot be merged: fan_in is {fan_in}")
    if len(handles) < 2:
        return None
    start, level = _due_run(handles, fan_in)
    full_bytes = sum(handle.file.size for handle in handles if handle.full)
    delta_bytes = sum(handle.file.size for handle in handles if not handle.full)
    outgrown = full_bytes > 0 and delta_bytes >= full_bytes
    # One handle takes the place of the run; what is before the run stays.
    left = start + min(1, len(handles) - start)
    if start == 0 or outgrown or level > LEVEL_MAX or left > handles_max(fan_in):
        return MergePlan(tuple(handles), level=0, full=True)
    if start == len(handles):
        return None
    return MergePlan(tuple(handles[start:]), level=level, full=False)


def _due_run(handles: Sequence[KeyedHandle], fan_in: int) -> tuple[int, int]:
    """Return where the run to be merged begins (at the end: there is none) and its new level."""
    start, target = len(handles), 0
    before = start
    for level in range(LEVEL_MAX + 1):
        # What the levels below are to become counts as one handle of the level they reach.
        count = 1 if target == level and start < len(handles) else 0
        while before > 0 and not handles[before - 1].full and handles[before - 1].level <= level:
            before -= 1
            count += 1
        if count >= fan_in:
            start, target = before, level + 1
    return start, target
