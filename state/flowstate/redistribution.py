"""Who gets which operator state when a checkpoint is restored, at any parallelism.

Operator state is a list per subtask and state name. A restore hands the lists that the old
subtasks wrote to the new subtasks, in one of three ways: see :class:`Redistribution`. Everything
here works on the lengths of the lists and answers in slices of them, so that a subtask reads only
what it is going to have, and so that nothing depends on what an element is.

The outcome is that of Flink, with two choices where Flink leaves the order to chance: elements of
several old subtasks come in the order of these subtasks, and states are split in the order of
their names. Every restore of one checkpoint at one parallelism therefore gives the same lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, TypeVar

from flowstate.errors import StateError
from flowstate.key_groups import MAX_PARALLELISM_LIMIT, check_parallelism

__all__ = [
    "Counts",
    "ElementSlice",
    "Redistribution",
    "Slices",
    "StateCounts",
    "broadcast",
    "even_split",
    "gather",
    "redistribute",
    "union",
]

T = TypeVar("T")


class Redistribution(StrEnum):
    """How the elements of an operator state find their new subtasks.

    ``EVEN_SPLIT``: each element goes to one subtask. The lists are concatenated and cut into
    contiguous blocks whose lengths differ by at most one. At an unchanged parallelism each subtask
    keeps its own list, however uneven the lists are.

    ``UNION``: each subtask gets all elements, also at an unchanged parallelism, and has to keep
    only what is its own. One that keeps everything multiplies the state with each restore.

    ``BROADCAST``: all subtasks hold the same map, and each new one gets one old subtask's copy.
    """

    EVEN_SPLIT = "even-split"
    UNION = "union"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True, order=True)
class ElementSlice:
    """Some neighbouring elements of the list that one old subtask wrote; never empty."""

    old_subtask: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.old_subtask < 0 or not 0 <= self.start < self.stop:
            raise StateError(
                f"a slice must hold elements of a subtask's list, not {self.start}..{self.stop} "
                f"of subtask {self.old_subtask}"
            )

    def __len__(self) -> int:
        return self.stop - self.start


Counts: TypeAlias = Sequence[int | None]
"""How many elements each old subtask wrote; None where it reported no state of that name."""

Slices: TypeAlias = tuple[ElementSlice, ...]
"""What one new subtask gets of one state, in the order of the old subtasks."""


@dataclass(frozen=True, slots=True)
class StateCounts:
    """What is known of a state without reading it.

    A broadcast state's elements are the entries of its map. An empty map or list is not the same
    as None: the subtask had the state, and nothing was in it.
    """

    mode: Redistribution
    per_subtask: tuple[int | None, ...]

    def __post_init__(self) -> None:
        # A bare string from a record would match no mode below, and the state would be gone.
        if not isinstance(self.mode, Redistribution):
            raise StateError(
                f"a redistribution must be of {list(Redistribution)}, not {self.mode!r}"
            )
        _check_counts(self.per_subtask)


def redistribute(
    states: Mapping[str, StateCounts],
    *,
    old_parallelism: int,
    new_parallelism: int,
    order: Sequence[str] | None = None,
) -> list[dict[str, Slices]]:
    """Return what each new subtask gets of each state, whatever the states' modes are.

    Every new subtask has every name, if need be with nothing. ``order`` is the order in which the
    even-split states are dealt out; it must name them all, and no others.
    """
    _check_parallelism(old_parallelism)
    for name, state in states.items():
        _check_length(name, state.per_subtask, old_parallelism)
    split = even_split(
        _counts_of(states, Redistribution.EVEN_SPLIT), new_parallelism=new_parallelism, order=order
    )
    united = union(_counts_of(states, Redistribution.UNION), new_parallelism=new_parallelism)
    copied = _broadcast_slices(
        _counts_of(states, Redistribution.BROADCAST),
        old_parallelism=old_parallelism,
        new_parallelism=new_parallelism,
    )
    return [{**a, **b, **c} for a, b, c in zip(split, united, copied, strict=True)]


def even_split(
    counts: Mapping[str, Counts], *, new_parallelism: int, order: Sequence[str] | None = None
) -> list[dict[str, Slices]]:
    """Return each new subtask's share of the states: every element goes to exactly one of them.

    Where a state cannot be cut into equal blocks, the first subtasks get one element more. The
    next state starts at the subtask after these, so that over all states together no subtask has
    two elements more than another. The order of the states therefore matters: it is that of their
    names unless ``order`` says otherwise.

    Within a new subtask the elements stay in order. Across subtasks they need not: the blocks of
    a state that starts at a later subtask go on at subtask 0.
    """
    _check_parallelism(new_parallelism)
    old_parallelism = _check_lengths(counts)
    names = _processing_order(counts, order)
    if old_parallelism == new_parallelism:
        return _untouched(counts, names, new_parallelism)
    shares: list[dict[str, Slices]] = [{} for _ in range(new_parallelism)]
    first = 0
    for name in names:
        total = _total(counts[name])
        for index, block in enumerate(_blocks(counts[name], _block_sizes(total, new_parallelism))):
            shares[(first + index) % new_parallelism][name] = block
        first = (first + total) % new_parallelism
    return shares


def union(counts: Mapping[str, Counts], *, new_parallelism: int) -> list[dict[str, Slices]]:
    """Return, for each new subtask, all elements of all old subtasks."""
    _check_parallelism(new_parallelism)
    _check_lengths(counts)
    everything = {name: _whole_lists(counts[name]) for name in counts}
    return [dict(everything) for _ in range(new_parallelism)]


def broadcast(
    reporters: Iterable[int], *, old_parallelism: int, new_parallelism: int
) -> list[tuple[int, ...]]:
    """Return, for each new subtask, the old subtasks whose copies it gets, in ascending order.

    ``reporters`` are the old subtasks that had the state when the checkpoint was taken. The copies
    go around: new subtask i gets that of reporter number i modulo their number. If all subtasks
    reported, an unchanged parallelism thus leaves each its own copy. If some did not, because they
    had finished, a subtask at the unchanged parallelism keeps its own copy **and** gets the one
    that goes around, as in Flink. Both are put into one map, the later subtask's entries last;
    this matters only where the copies differ, which a correct function does not let happen.
    """
    _check_parallelism(old_parallelism)
    _check_parallelism(new_parallelism)
    known = sorted(set(reporters))
    if known and not 0 <= known[0] <= known[-1] < old_parallelism:
        raise StateError(f"reporters must be subtasks 0..{old_parallelism - 1}, not {known}")
    if not known:
        return [()] * new_parallelism
    going_around = [known[index % len(known)] for index in range(new_parallelism)]
    if old_parallelism != new_parallelism:
        return [(old,) for old in going_around]
    own = set(known)
    return [
        tuple(sorted({old, index} if index in own else {old}))
        for index, old in enumerate(going_around)
    ]


def gather(slices: Iterable[ElementSlice], lists: Sequence[Sequence[T] | None]) -> list[T]:
    """Return the elements of the slices, where the lists of all old subtasks are in memory."""
    elements: list[T] = []
    for part in slices:
        source = lists[part.old_subtask] if part.old_subtask < len(lists) else None
        # A Python slice beyond the end is short without a word, and elements would be lost.
        if source is None or len(source) < part.stop:
            raise StateError(
                f"subtask {part.old_subtask} has {0 if source is None else len(source)} elements, "
                f"but {part.start}..{part.stop} of them are asked for: the lists are not those "
                f"that were counted"
            )
        elements.extend(source[part.start : part.stop])
    return elements


def _untouched(
    counts: Mapping[str, Counts], names: Sequence[str], parallelism: int
) -> list[dict[str, Slices]]:
    return [
        {name: _whole_list(index, counts[name][index]) for name in names}
        for index in range(parallelism)
    ]


def _block_sizes(total: int, parallelism: int) -> Iterator[int]:
    size, longer = divmod(total, parallelism)
    return (size + 1 if index < longer else size for index in range(parallelism))


def _blocks(counts: Counts, sizes: Iterable[int]) -> Iterator[Slices]:
    """Cut the concatenated lists into blocks of these sizes, which must add up to all of them."""
    rest = iter(_whole_lists(counts))
    current: ElementSlice | None = None
    for size in sizes:
        block: list[ElementSlice] = []
        while size:
            head, current = _cut(current or next(rest), size)
            block.append(head)
            size -= len(head)
        yield tuple(block)


def _cut(whole: ElementSlice, size: int) -> tuple[ElementSlice, ElementSlice | None]:
    """Return the slice's first elements, at most ``size``, and the others if there are any."""
    if len(whole) <= size:
        return whole, None
    middle = whole.start + size
    return (
        ElementSlice(whole.old_subtask, whole.start, middle),
        ElementSlice(whole.old_subtask, middle, whole.stop),
    )


def _broadcast_slices(
    counts: Mapping[str, Counts], *, old_parallelism: int, new_parallelism: int
) -> list[dict[str, Slices]]:
    copies: list[dict[str, Slices]] = [{} for _ in range(new_parallelism)]
    for name, per_subtask in counts.items():
        sources = broadcast(
            [index for index, count in enumerate(per_subtask) if count is not None],
            old_parallelism=old_parallelism,
            new_parallelism=new_parallelism,
        )
        for copy, olds in zip(copies, sources, strict=True):
            copy[name] = tuple(part for old in olds for part in _whole_list(old, per_subtask[old]))
    return copies


def _counts_of(states: Mapping[str, StateCounts], mode: Redistribution) -> dict[str, Counts]:
    return {name: state.per_subtask for name, state in states.items() if state.mode is mode}


def _whole_list(old_subtask: int, count: int | None) -> Slices:
    return (ElementSlice(old_subtask, 0, count),) if count else ()


def _whole_lists(counts: Counts) -> Slices:
    return tuple(ElementSlice(index, 0, count) for index, count in enumerate(counts) if count)


def _total(counts: Counts) -> int:
    return sum(count or 0 for count in counts)


def _processing_order(names: Iterable[str], order: Sequence[str] | None) -> list[str]:
    known = sorted(names)
    if order is not None and sorted(order) != known:
        raise StateError(f"the order must name each split state once: {known}, not {list(order)}")
    return known if order is None else list(order)


def _check_parallelism(parallelism: int) -> None:
    check_parallelism(parallelism=parallelism, max_parallelism=MAX_PARALLELISM_LIMIT)


def _check_lengths(counts: Mapping[str, Counts]) -> int | None:
    """Refuse states of different old parallelisms; return the common one, None without states."""
    old_parallelism: int | None = None
    for name, per_subtask in counts.items():
        _check_counts(per_subtask)
        old_parallelism = len(per_subtask) if old_parallelism is None else old_parallelism
        _check_length(name, per_subtask, old_parallelism)
    return old_parallelism


def _check_length(name: str, counts: Counts, old_parallelism: int) -> None:
    if len(counts) != old_parallelism:
        raise StateError(
            f"state {name!r} has counts of {len(counts)} subtasks, but the checkpoint was taken "
            f"at parallelism {old_parallelism}: give one per old subtask, None where it had none"
        )


def _check_counts(counts: Counts) -> None:
    for count in counts:
        if count is not None and (not isinstance(count, int) or count < 0):
            raise StateError(f"a number of elements must be an int from 0 on, not {count!r}")
