"""What reducing and aggregating states do for one key."""

from __future__ import annotations

from typing import Any

import pytest

from flowstate.aggregates import Reducer
from flowstate.descriptors import AggregatingStateDescriptor, ReducingStateDescriptor
from flowstate.errors import StateTypeError
from flowstate.functions import AggregateFunction, ReduceFunction
from flowstate.testing.keyed_base_suite import KeyedHarness, KeyedSuiteBase

__all__ = ["AggregatingStateSuite", "ReducingStateSuite"]


class _LongestText(ReduceFunction[str]):
    def reduce(self, a: str, b: str) -> str:
        return max(a, b, key=len)


class _Distinct(AggregateFunction[str, list[str], int]):
    def create_accumulator(self) -> list[str]:
        return []

    def add(self, value: str, accumulator: list[str]) -> list[str]:
        if value not in accumulator:
            accumulator.append(value)
        return accumulator

    def get_result(self, accumulator: list[str]) -> int:
        return len(accumulator)

    def merge(self, a: list[str], b: list[str]) -> list[str]:
        return list(dict.fromkeys([*a, *b]))


class _Failing(AggregateFunction[int, int, int]):
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: int, accumulator: int) -> Any:
        return None if value < 0 else accumulator + value

    def get_result(self, accumulator: int) -> int:
        return accumulator

    def merge(self, a: int, b: int) -> int:
        return a + b


def _sum_of(name: str) -> ReducingStateDescriptor:
    return ReducingStateDescriptor(name, lambda a, b: a + b, int)


class ReducingStateSuite(KeyedSuiteBase):
    """A value per key, into which others are reduced."""

    def test_nothing_was_reduced_before_the_first_add(self, harness: KeyedHarness) -> None:
        state = harness.at("a").get_reducing_state(_sum_of("sum"))

        assert state.get() is None
        state.add(1)
        state.clear()
        assert state.get() is None

    def test_the_first_value_is_stored_without_reducing(self, harness: KeyedHarness) -> None:
        calls: list[tuple[int, int]] = []

        def minus(a: int, b: int) -> int:
            calls.append((a, b))
            return a - b

        descriptor = ReducingStateDescriptor("r", minus, int)
        state = harness.at("a").get_reducing_state(descriptor)
        state.add(10)
        assert calls == []
        state.add(1)
        harness.restart()
        state = harness.at("a").get_reducing_state(descriptor)
        state.add(2)

        assert state.get() == 7
        assert calls == [(10, 1), (9, 2)], "what is stored comes first, then what is added"

    def test_a_reduce_function_may_be_a_class(self, harness: KeyedHarness) -> None:
        descriptor = ReducingStateDescriptor("longest", _LongestText(), str)
        state = harness.at("a").get_reducing_state(descriptor)
        for text in ("bb", "a", "ccc", "dd"):
            state.add(text)

        assert state.get() == "ccc"

    @pytest.mark.parametrize(
        ("reducer", "expected"),
        [(Reducer.SUM, 5), (Reducer.MIN, -2), (Reducer.MAX, 4)],
        ids=lambda value: str(value),
    )
    def test_built_in_reducers_reduce(
        self, harness: KeyedHarness, reducer: Reducer, expected: int
    ) -> None:
        descriptor = ReducingStateDescriptor("r", reducer, int)
        for number in (3, -2, 4):
            harness.at("a").get_reducing_state(descriptor).add(number)
            harness.restart()

        assert harness.at("a").get_reducing_state(descriptor).get() == expected

    def test_what_a_reducing_state_refuses_changes_nothing(self, harness: KeyedHarness) -> None:
        descriptor = ReducingStateDescriptor("r", lambda a, b: None if b == 0 else a + b, int)
        state = harness.at("a").get_reducing_state(descriptor)
        state.add(1)

        with pytest.raises(StateTypeError, match="cannot add None"):
            state.add(None)
        with pytest.raises(StateTypeError, match="returned None"):
            state.add(0)
        with pytest.raises(StateTypeError, match="int64"):
            state.add("x")
        with pytest.raises(StateTypeError, match="out of the range"):
            state.add((1 << 63) - 1)
        assert state.get() == 1

    def test_reducing_may_change_neither_state_nor_argument_behind_their_backs(
        self, harness: KeyedHarness
    ) -> None:
        def extend(a: list[int], b: list[int]) -> list[int]:
            a.extend(b)
            return a

        state = harness.at("a").get_reducing_state(ReducingStateDescriptor("r", extend, list[int]))
        added = [1]
        state.add(added)
        state.add([2])
        result = state.get()
        assert result is not None
        result.append(99)

        assert state.get() == [1, 2]
        assert added == [1]


class AggregatingStateSuite(KeyedSuiteBase):
    """An accumulator per key."""

    @pytest.fixture
    def distinct(self) -> AggregatingStateDescriptor:
        """Return a state that counts distinct texts."""
        return AggregatingStateDescriptor("distinct", _Distinct(), list[str])

    def test_there_is_no_result_before_the_first_add(
        self, harness: KeyedHarness, distinct: AggregatingStateDescriptor
    ) -> None:
        state = harness.at("a").get_aggregating_state(distinct)

        assert state.get() is None
        state.add("x")
        state.clear()
        assert state.get() is None

    def test_the_result_is_that_of_all_added_values(
        self, harness: KeyedHarness, distinct: AggregatingStateDescriptor
    ) -> None:
        for text in ("x", "y", "x", "z"):
            harness.at("a").get_aggregating_state(distinct).add(text)
            harness.restart()

        assert harness.at("a").get_aggregating_state(distinct).get() == 3
        harness.at("b")
        assert harness.backends[0].get_aggregating_state(distinct).get() is None

    @pytest.mark.parametrize(
        ("reducer", "expected"),
        [
            (Reducer.SUM, 6),
            (Reducer.COUNT, 4),
            (Reducer.MIN, -2),
            (Reducer.MAX, 4),
            (Reducer.MEAN, 1.5),
        ],
        ids=lambda value: str(value),
    )
    def test_built_in_reducers_aggregate(
        self, harness: KeyedHarness, reducer: Reducer, expected: float
    ) -> None:
        descriptor = AggregatingStateDescriptor("built-in", reducer, int)
        for number in (3, -2, 4, 1):
            harness.at("a").get_aggregating_state(descriptor).add(number)
            harness.restart()

        assert harness.at("a").get_aggregating_state(descriptor).get() == expected

    def test_what_an_aggregating_state_refuses_changes_nothing(self, harness: KeyedHarness) -> None:
        descriptor = AggregatingStateDescriptor("failing", _Failing(), int)
        state = harness.at("a").get_aggregating_state(descriptor)
        state.add(1)

        with pytest.raises(StateTypeError, match="cannot add None"):
            state.add(None)
        with pytest.raises(StateTypeError, match="returned None"):
            state.add(-1)
        with pytest.raises(StateTypeError, match="out of the range"):
            state.add(1 << 63)
        assert state.get() == 1

    def test_a_built_in_reducer_refuses_values_of_another_type(self, harness: KeyedHarness) -> None:
        descriptor = AggregatingStateDescriptor("mean", Reducer.MEAN, int)
        state = harness.at("a").get_aggregating_state(descriptor)

        with pytest.raises(StateTypeError, match="int64"):
            state.add("x")
        assert state.get() is None
