from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flowstate.errors import KeyGroupError, StateError
from flowstate.redistribution import (
    ElementSlice,
    Redistribution,
    Slices,
    StateCounts,
    broadcast,
    even_split,
    gather,
    redistribute,
    union,
)

VECTORS = Path(__file__).parents[1] / "vectors"
CASES: list[dict[str, Any]] = json.loads(
    (VECTORS / "operator_state_redistribution.json").read_text(encoding="utf-8")
)["cases"]
MODES = {
    "SPLIT_DISTRIBUTE": Redistribution.EVEN_SPLIT,
    "UNION": Redistribution.UNION,
    "BROADCAST": Redistribution.BROADCAST,
}

Lists = Sequence[Sequence[Any] | None]


def counts_of(lists: Lists) -> tuple[int | None, ...]:
    return tuple(None if elements is None else len(elements) for elements in lists)


def numbered(counts: Sequence[int | None]) -> list[list[tuple[int, int]] | None]:
    """Return lists of these lengths whose elements say where they were."""
    return [
        None if count is None else [(old, index) for index in range(count)]
        for old, count in enumerate(counts)
    ]


def in_order(counts: Sequence[int | None]) -> list[tuple[int, int]]:
    return list(chain.from_iterable(elements or [] for elements in numbered(counts)))


def split_one(counts: Sequence[int | None], *, new_parallelism: int) -> list[Slices]:
    shares = even_split({"s": counts}, new_parallelism=new_parallelism)
    return [share["s"] for share in shares]


def rescale(lists: Lists, *, new_parallelism: int) -> list[list[Any]]:
    """Split lists evenly, as a restore does with the elements in memory."""
    shares = split_one(counts_of(lists), new_parallelism=new_parallelism)
    return [gather(share, lists) for share in shares]


def element_count(slices: Slices) -> int:
    return sum(map(len, slices))


# What Flink's own class did.


def restored(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Redistribute a case and write the outcome as the vectors do."""
    lists: dict[str, Lists] = {state["name"]: state["per_subtask"] for state in case["states"]}
    states = {
        state["name"]: StateCounts(MODES[state["mode"]], counts_of(state["per_subtask"]))
        for state in case["states"]
    }
    shares = redistribute(
        states,
        old_parallelism=case["old_parallelism"],
        new_parallelism=case["new_parallelism"],
        order=case["split_states_processing_order"],
    )
    return [
        {name: as_vector(slices, lists[name]) for name, slices in share.items()} for share in shares
    ]


def as_vector(slices: Slices, lists: Lists) -> dict[str, Any]:
    by_old_subtask: dict[str, list[Any]] = {}
    for part in slices:
        by_old_subtask.setdefault(str(part.old_subtask), []).extend(gather([part], lists))
    return {"elements": gather(slices, lists), "by_old_subtask": by_old_subtask}


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_subtasks_get_what_flink_gives_them(case: dict[str, Any]) -> None:
    assert restored(case) == case["expected"]


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case["split_states_processing_order"] == sorted(case["split_states_processing_order"])
    ],
    ids=lambda case: str(case["id"]),
)
def test_names_are_in_order_unless_an_order_is_given(case: dict[str, Any]) -> None:
    assert restored(case | {"split_states_processing_order": None}) == case["expected"]


def buffered_at_checkpoint_3() -> list[list[str]]:
    trace = json.loads((VECTORS / "seed003_buffering_sink_trace.json").read_text(encoding="utf-8"))
    contents = next(event for event in trace["events"] if event.get("checkpoint") == 3)["contents"]
    return [contents["0"], contents["1"]]


@pytest.mark.parametrize(
    ("new_parallelism", "expected"),
    [
        (1, ["a2 a4 a6 a8 a1 a3 a5 a7"]),
        (2, ["a2 a4 a6 a8", "a1 a3 a5 a7"]),
        (3, ["a2 a4 a6", "a8 a1 a3", "a5 a7"]),
        (4, ["a2 a4", "a6 a8", "a1 a3", "a5 a7"]),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_a_buffering_sink_resumes_at_any_parallelism(
    new_parallelism: int, expected: list[str]
) -> None:
    buffers = rescale(buffered_at_checkpoint_3(), new_parallelism=new_parallelism)

    assert [" ".join(buffer) for buffer in buffers] == expected


# The rescale check-list.


@pytest.mark.parametrize(
    ("counts", "new_parallelism", "expected"),
    [
        pytest.param((4, 4), 4, [2, 2, 2, 2], id="up"),
        pytest.param((2, 2, 2, 2), 2, [4, 4], id="down"),
        pytest.param((7, 0, 1), 3, [7, 0, 1], id="none"),
        pytest.param((5, 3), 3, [3, 3, 2], id="uneven-up"),
        pytest.param((5, 0, 3, 2, 1), 3, [4, 4, 3], id="uneven-down"),
        pytest.param((1,), 4, [1, 0, 0, 0], id="fewer-elements-than-subtasks"),
        pytest.param((0, None), 3, [0, 0, 0], id="nothing"),
    ],
)
def test_blocks_have_the_lengths_of_an_even_split(
    counts: tuple[int | None, ...], new_parallelism: int, expected: list[int]
) -> None:
    shares = split_one(counts, new_parallelism=new_parallelism)

    assert [element_count(share) for share in shares] == expected


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 1000])
def test_one_to_128_and_back_gives_the_same_list(count: int) -> None:
    elements = list(range(count))
    spread = rescale([elements], new_parallelism=128)

    assert max(map(len, spread)) - min(map(len, spread)) <= 1
    assert rescale(spread, new_parallelism=1) == [elements]


def test_the_same_parallelism_leaves_split_lists_alone_however_uneven() -> None:
    shares = even_split({"a": (1000, 0, None), "b": (None, 1, 2)}, new_parallelism=3)

    assert shares == [
        {"a": (ElementSlice(0, 0, 1000),), "b": ()},
        {"a": (), "b": (ElementSlice(1, 0, 1),)},
        {"a": (), "b": (ElementSlice(2, 0, 2),)},
    ]


def test_the_next_state_starts_where_the_longer_blocks_of_the_last_end() -> None:
    counts = {"a": (4,), "b": (0,), "c": (1,), "d": (3,)}
    shares = even_split(counts, new_parallelism=3)

    lengths = {name: [element_count(share[name]) for share in shares] for name in counts}
    assert lengths == {"a": [2, 1, 1], "b": [0, 0, 0], "c": [0, 1, 0], "d": [1, 1, 1]}
    # d starts at subtask 2 and goes on at 0.
    assert [share["d"][0].start for share in shares] == [1, 2, 0]


def test_every_subtask_has_every_name() -> None:
    states = {
        "s": StateCounts(Redistribution.EVEN_SPLIT, (None,)),
        "u": StateCounts(Redistribution.UNION, (0,)),
        "b": StateCounts(Redistribution.BROADCAST, (None,)),
    }
    shares = redistribute(states, old_parallelism=1, new_parallelism=2)

    assert shares == [{"s": (), "u": (), "b": ()}] * 2
    assert redistribute({}, old_parallelism=1, new_parallelism=2) == [{}, {}]


# Properties.

parallelisms = st.integers(1, 9)
old_counts = st.lists(st.none() | st.integers(0, 12), min_size=1, max_size=9)


@st.composite
def named_counts(draw: st.DrawFn) -> dict[str, tuple[int | None, ...]]:
    old_parallelism = draw(parallelisms)
    one_state = st.tuples(*[st.none() | st.integers(0, 12)] * old_parallelism)
    return draw(st.dictionaries(st.sampled_from("abcdef"), one_state, max_size=4))


def is_rotated(found: list[Any], original: list[Any]) -> bool:
    """Say whether the list is the original, cut once with the two parts swapped."""
    cuts = range(max(len(original), 1))
    return any(found == original[cut:] + original[:cut] for cut in cuts)


@given(named_counts(), parallelisms)
def test_an_even_split_neither_loses_nor_doubles_an_element(
    counts: dict[str, tuple[int | None, ...]], new_parallelism: int
) -> None:
    shares = even_split(counts, new_parallelism=new_parallelism)

    for name in counts:
        lists = numbered(counts[name])
        given_out = [gather(share[name], lists) for share in shares]
        assert sorted(chain.from_iterable(given_out)) == in_order(counts[name])
        assert all(elements == sorted(elements) for elements in given_out)


@given(old_counts, parallelisms)
def test_blocks_of_one_state_are_contiguous_and_in_order(
    counts: list[int | None], new_parallelism: int
) -> None:
    blocks = rescale(numbered(counts), new_parallelism=new_parallelism)

    assert list(chain.from_iterable(blocks)) == in_order(counts)


@given(named_counts(), parallelisms)
def test_blocks_of_several_states_are_contiguous_and_wrap_around_once(
    counts: dict[str, tuple[int | None, ...]], new_parallelism: int
) -> None:
    shares = even_split(counts, new_parallelism=new_parallelism)

    for name in counts:
        lists = numbered(counts[name])
        elements = list(chain.from_iterable(gather(share[name], lists) for share in shares))
        assert is_rotated(elements, in_order(counts[name]))


@given(named_counts(), parallelisms)
def test_shares_differ_by_one_at_most_in_each_state_and_in_all_together(
    counts: dict[str, tuple[int | None, ...]], new_parallelism: int
) -> None:
    assume(all(len(per_subtask) != new_parallelism for per_subtask in counts.values()))
    shares = even_split(counts, new_parallelism=new_parallelism)

    for name in counts:
        lengths = [element_count(share[name]) for share in shares]
        assert max(lengths) - min(lengths) <= 1
    totals = [sum(map(element_count, share.values())) for share in shares]
    assert max(totals) - min(totals) <= 1


@given(named_counts(), parallelisms, st.randoms())
def test_the_order_of_the_mapping_does_not_matter(
    counts: dict[str, tuple[int | None, ...]], new_parallelism: int, random: Any
) -> None:
    names = list(counts)
    random.shuffle(names)
    shuffled = {name: counts[name] for name in names}

    expected = even_split(counts, new_parallelism=new_parallelism)
    assert even_split(shuffled, new_parallelism=new_parallelism) == expected


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.lists(parallelisms, max_size=4))
def test_any_chain_of_rescales_keeps_one_state_in_order(
    counts: list[int], chain_of_parallelisms: list[int]
) -> None:
    lists: Lists = numbered(counts)
    for new_parallelism in chain_of_parallelisms:
        lists = rescale(lists, new_parallelism=new_parallelism)

    assert list(chain.from_iterable(elements or [] for elements in lists)) == in_order(counts)


@given(named_counts(), parallelisms)
def test_a_union_gives_everything_to_everybody(
    counts: dict[str, tuple[int | None, ...]], new_parallelism: int
) -> None:
    shares = union(counts, new_parallelism=new_parallelism)

    assert len(shares) == new_parallelism
    for share in shares:
        assert share.keys() == counts.keys()
        for name, slices in share.items():
            assert gather(slices, numbered(counts[name])) == in_order(counts[name])


def test_the_shares_of_a_union_are_not_one_object() -> None:
    first, second = union({"u": (1,)}, new_parallelism=2)
    first.clear()

    assert second == {"u": (ElementSlice(0, 0, 1),)}


@given(old_counts, parallelisms)
def test_every_subtask_gets_a_broadcast_copy_if_there_is_one(
    counts: list[int | None], new_parallelism: int
) -> None:
    reporters = [old for old, count in enumerate(counts) if count is not None]
    sources = broadcast(reporters, old_parallelism=len(counts), new_parallelism=new_parallelism)

    assert len(sources) == new_parallelism
    for index, olds in enumerate(sources):
        assert set(olds) <= set(reporters)
        assert list(olds) == sorted(set(olds))
        assert bool(olds) == bool(reporters)
        assert len(olds) <= (2 if new_parallelism == len(counts) else 1)
        if new_parallelism == len(counts) and index in reporters:
            assert index in olds


@given(parallelisms, parallelisms)
def test_broadcast_copies_are_read_as_evenly_as_can_be(
    old_parallelism: int, new_parallelism: int
) -> None:
    sources = broadcast(
        range(old_parallelism), old_parallelism=old_parallelism, new_parallelism=new_parallelism
    )

    assert sources == [(index % old_parallelism,) for index in range(new_parallelism)]


def test_neither_the_order_of_the_reporters_nor_a_repetition_matters() -> None:
    sources = broadcast([4, 1, 4, 0], old_parallelism=5, new_parallelism=4)

    assert sources == [(0,), (1,), (4,), (0,)]


def test_an_empty_broadcast_map_is_a_copy_too() -> None:
    states = {"b": StateCounts(Redistribution.BROADCAST, (0, 2, None))}
    shares = redistribute(states, old_parallelism=3, new_parallelism=4)

    copy = (ElementSlice(1, 0, 2),)
    assert shares == [{"b": ()}, {"b": copy}, {"b": ()}, {"b": copy}]


# What is refused.


@pytest.mark.parametrize("parallelism", [0, -1, 32769, True, 2.0])
def test_a_parallelism_out_of_bounds_is_refused(parallelism: Any) -> None:
    for refused in (
        lambda: even_split({}, new_parallelism=parallelism),
        lambda: union({}, new_parallelism=parallelism),
        lambda: broadcast([], old_parallelism=1, new_parallelism=parallelism),
        lambda: broadcast([], old_parallelism=parallelism, new_parallelism=1),
        lambda: redistribute({}, old_parallelism=parallelism, new_parallelism=1),
    ):
        with pytest.raises(KeyGroupError):
            refused()


def test_states_of_another_old_parallelism_are_refused() -> None:
    with pytest.raises(StateError, match="'b' has counts of 3 subtasks"):
        even_split({"a": (1, 2), "b": (1, 2, 3)}, new_parallelism=2)
    with pytest.raises(StateError, match="'b' has counts of 1 subtasks"):
        union({"a": (1, 2), "b": (1,)}, new_parallelism=2)
    states = {"a": StateCounts(Redistribution.BROADCAST, (1,))}
    with pytest.raises(StateError, match="taken at parallelism 2"):
        redistribute(states, old_parallelism=2, new_parallelism=2)
    with pytest.raises(StateError, match=r"reporters must be subtasks 0\.\.1"):
        broadcast([0, 2], old_parallelism=2, new_parallelism=2)


@pytest.mark.parametrize("count", [-1, 1.0, "1"])
def test_a_count_that_counts_nothing_is_refused(count: Any) -> None:
    with pytest.raises(StateError, match="number of elements"):
        StateCounts(Redistribution.UNION, (count,))
    with pytest.raises(StateError, match="number of elements"):
        even_split({"a": (count,)}, new_parallelism=2)


def test_a_mode_that_is_only_a_string_is_refused() -> None:
    mode: Any = "union"

    with pytest.raises(StateError, match="redistribution must be of"):
        StateCounts(mode, (1,))


@pytest.mark.parametrize("order", [[], ["a"], ["a", "a"], ["a", "b", "c"]], ids=str)
def test_an_order_that_does_not_name_each_state_once_is_refused(order: list[str]) -> None:
    with pytest.raises(StateError, match="the order must name each split state once"):
        even_split({"a": (1,), "b": (1,)}, new_parallelism=2, order=order)


@pytest.mark.parametrize("bounds", [(0, 1, 1), (0, 2, 1), (0, -1, 1), (-1, 0, 1)], ids=str)
def test_a_slice_without_elements_is_refused(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(StateError, match="a slice must hold elements"):
        ElementSlice(*bounds)


@pytest.mark.parametrize("lists", [[], [None], [["a"]]], ids=str)
def test_lists_that_are_shorter_than_counted_are_refused(lists: Lists) -> None:
    with pytest.raises(StateError, match="not those that were counted"):
        gather([ElementSlice(0, 0, 2)], lists)


def test_what_comes_out_can_be_sent_to_another_process() -> None:
    states: Mapping[str, StateCounts] = {"a": StateCounts(Redistribution.EVEN_SPLIT, (3, None))}
    shares = redistribute(states, old_parallelism=2, new_parallelism=3)

    assert pickle.loads(pickle.dumps((states, shares))) == (states, shares)
