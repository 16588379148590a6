"""What is registered under which name, and what a checkpoint keeps of it."""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstate import (
    ListStateDescriptor,
    LocalOperator,
    MapStateDescriptor,
    OperatorStateBackend,
    Redistribution,
    StateTtlConfig,
    ValueStateDescriptor,
)
from flowstate.errors import (
    StateMigrationError,
    StateRegistrationError,
    StateTypeError,
)
from flowstate.subtask import INLINE_BYTES_MAX

Register = Callable[[OperatorStateBackend, str], Any]
MODES: dict[str, Register] = {
    "SPLIT_DISTRIBUTE": lambda backend, name: backend.get_list_state(
        ListStateDescriptor(name, int)
    ),
    "UNION": lambda backend, name: backend.get_union_list_state(ListStateDescriptor(name, int)),
    "BROADCAST": lambda backend, name: backend.get_broadcast_state(
        MapStateDescriptor(name, int, int)
    ),
}
every_mode = pytest.mark.parametrize("mode", MODES)
other_modes = pytest.mark.parametrize(
    ("mode", "other"), [(mode, other) for mode in MODES for other in MODES if mode != other]
)


@pytest.fixture
def url() -> str:
    return new_url()


def new_url() -> str:
    return f"memory://operator-state/{uuid.uuid4().hex}"


def backends_of(operator: LocalOperator) -> list[OperatorStateBackend]:
    return [subtask.operator for subtask in operator.subtasks]


def start(url: str, parallelism: int) -> list[OperatorStateBackend]:
    return backends_of(LocalOperator(url, parallelism=parallelism))


def written(
    url: str,
    per_subtask: Sequence[Any],
    write: Callable[[OperatorStateBackend, Any], object],
) -> None:
    """Have as many subtasks as there are parts, each of which writes its part."""
    operator = LocalOperator(url, parallelism=len(per_subtask))
    for backend, part in zip(backends_of(operator), per_subtask, strict=True):
        write(backend, part)
    operator.checkpoint()


def lists(backends: Sequence[OperatorStateBackend], name: str = "list") -> list[list[Any]]:
    return [list(MODES["SPLIT_DISTRIBUTE"](backend, name).get()) for backend in backends]


def unions(backends: Sequence[OperatorStateBackend], name: str = "union") -> list[list[Any]]:
    return [list(MODES["UNION"](backend, name).get()) for backend in backends]


def maps(backends: Sequence[OperatorStateBackend], name: str = "map") -> list[dict[Any, Any]]:
    return [dict(MODES["BROADCAST"](backend, name).items()) for backend in backends]


def add_to_list(backend: OperatorStateBackend, elements: list[int]) -> None:
    MODES["SPLIT_DISTRIBUTE"](backend, "list").add_all(elements)


def add_to_union(backend: OperatorStateBackend, elements: list[int]) -> None:
    MODES["UNION"](backend, "union").add_all(elements)


def put_all(backend: OperatorStateBackend, entries: dict[int, int]) -> None:
    MODES["BROADCAST"](backend, "map").put_all(entries)


# A name is one state.


@every_mode
def test_asking_again_gives_the_same_state(mode: str) -> None:
    backend = OperatorStateBackend()

    assert MODES[mode](backend, "name") is MODES[mode](backend, "name")
    assert MODES[mode](backend, "name") is not MODES[mode](backend, "other")
    assert backend.registered_names == ["name", "other"]


def test_a_name_has_one_type() -> None:
    backend = OperatorStateBackend()
    backend.get_list_state(ListStateDescriptor("list", int)).add(1)
    backend.get_broadcast_state(MapStateDescriptor("map", str, int))

    message = "is registered with another type already. Give one of them another name"
    for kind in (str, pa.int32(), list[int]):
        with pytest.raises(StateRegistrationError, match=f"'list' {message}"):
            backend.get_list_state(ListStateDescriptor("list", kind))
    for types in ((int, int), (str, str)):
        with pytest.raises(StateRegistrationError, match=f"'map' {message}"):
            backend.get_broadcast_state(MapStateDescriptor("map", *types))
    assert backend.get_list_state(ListStateDescriptor("list", pa.int64())).get() == [1]


def mode_message(mode: str, other: str) -> str:
    return re.escape(
        f"operator state 'name': Incompatible state assignment modes. Was [{mode}], registered "
        f"with [{other}]."
    )


@other_modes
def test_a_name_has_one_mode(mode: str, other: str) -> None:
    backend = OperatorStateBackend()
    state = MODES[mode](backend, "name")

    with pytest.raises(StateRegistrationError, match=mode_message(mode, other)):
        MODES[other](backend, "name")
    assert MODES[mode](backend, "name") is state
    assert [snapshot.name for snapshot in backend.snapshot()] == ["name"]


@other_modes
def test_a_restored_name_keeps_its_mode(url: str, mode: str, other: str) -> None:
    written(url, [None], lambda backend, _: MODES[mode](backend, "name"))
    (backend,) = start(url, 1)

    with pytest.raises(StateMigrationError, match=mode_message(mode, other)):
        MODES[other](backend, "name")
    assert backend.registered_names == []
    MODES[mode](backend, "name")


@pytest.mark.parametrize(
    ("method", "descriptor", "message"),
    [
        ("get_list_state", MapStateDescriptor("m", int, int), "SPLIT_DISTRIBUTE needs a ListState"),
        ("get_list_state", ValueStateDescriptor("v", int), "not a ValueStateDescriptor"),
        ("get_union_list_state", MapStateDescriptor("m", int, int), "UNION needs a ListStateDes"),
        ("get_broadcast_state", ListStateDescriptor("l", int), "BROADCAST needs a MapStateDescri"),
        ("get_list_state", "name", "needs a ListStateDescriptor, not a str"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_descriptor_of_another_kind_is_refused(
    method: str, descriptor: Any, message: str
) -> None:
    backend = OperatorStateBackend()

    with pytest.raises(StateRegistrationError, match=message):
        getattr(backend, method)(descriptor)
    assert backend.snapshot() == []


def test_operator_state_does_not_expire() -> None:
    ttl = StateTtlConfig(ttl=dt.timedelta(days=1))
    backend = OperatorStateBackend()

    for register in (
        lambda: backend.get_list_state(ListStateDescriptor("name", int, ttl=ttl)),
        lambda: backend.get_union_list_state(ListStateDescriptor("name", int, ttl=ttl)),
        lambda: backend.get_broadcast_state(MapStateDescriptor("name", int, int, ttl=ttl)),
    ):
        with pytest.raises(StateRegistrationError, match="'name' cannot have a TTL"):
            register()
    assert backend.registered_names == []


# Snapshots.


def test_a_snapshot_has_every_registered_state_by_name_also_empty_ones() -> None:
    backend = OperatorStateBackend()
    assert backend.snapshot() == []
    put_all(backend, {1: 2})
    add_to_union(backend, [])
    add_to_list(backend, [1, 2])
    found = backend.snapshot()

    assert [(one.name, one.mode, one.elements.to_pylist()) for one in found] == [
        ("list", Redistribution.EVEN_SPLIT, [1, 2]),
        ("map", Redistribution.BROADCAST, [{"key": 1, "value": 2}]),
        ("union", Redistribution.UNION, []),
    ]
    assert list(backend.metas) == ["list", "map", "union"]


def test_a_snapshot_does_not_change_with_what_is_added_later() -> None:
    backend = OperatorStateBackend()
    add_to_list(backend, [1])
    (snapshot,) = backend.snapshot()
    add_to_list(backend, [2])

    assert snapshot.elements.to_pylist() == [1]


# At another parallelism. Which element goes where is in the tests of redistribution.

per_subtask = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4)
parallelisms = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@given(per_subtask, parallelisms)
def test_every_mode_keeps_its_promise_over_rescales(
    elements: list[list[int]], path: list[int]
) -> None:
    url, everything = new_url(), list(chain.from_iterable(elements))

    def write(backend: OperatorStateBackend, part: list[int]) -> None:
        add_to_list(backend, part)
        add_to_union(backend, part)
        put_all(backend, dict.fromkeys(everything, 1))

    written(url, elements, write)
    current, old = elements, len(elements)
    for parallelism in path:
        operator = LocalOperator(url, parallelism=parallelism)
        backends = backends_of(operator)
        found = lists(backends)
        assert list(chain.from_iterable(found)) == everything
        if parallelism == old:
            assert found == current, "at the same parallelism nothing moves"
        else:
            lengths = [len(part) for part in found]
            assert max(lengths) - min(lengths) <= 1
        assert unions(backends) == [everything] * parallelism
        assert maps(backends) == [dict.fromkeys(everything, 1)] * parallelism
        # Each subtask would write all of the union, so only one of them does.
        for backend in backends[1:]:
            MODES["UNION"](backend, "union").clear()
        operator.checkpoint()
        current, old = found, parallelism


def test_a_new_subtask_gets_the_copy_of_an_old_one(url: str) -> None:
    written(url, [{0: 0}, {1: 1}], put_all)

    assert maps(start(url, 2)) == [{0: 0}, {1: 1}]
    assert maps(start(url, 5)) == [{0: 0}, {1: 1}, {0: 0}, {1: 1}, {0: 0}]
    assert maps(start(url, 1)) == [{0: 0}]


def test_a_state_that_only_some_subtasks_have_is_restored(url: str) -> None:
    def write(backend: OperatorStateBackend, part: list[int] | None) -> None:
        if part is not None:
            add_to_list(backend, part)

    written(url, [[1], None, [3]], write)

    assert lists(start(url, 3)) == [[1], [], [3]]
    assert lists(start(url, 2)) == [[1], [3]]
    assert lists(start(url, 4)) == [[1], [3], [], []]


def test_large_lists_are_restored_from_files(url: str) -> None:
    texts = [f"{number:0100}" for number in range(INLINE_BYTES_MAX // 50)]
    descriptor = ListStateDescriptor("list", str)
    written(
        url,
        [texts, ["last"]],
        lambda backend, part: backend.get_list_state(descriptor).add_all(part),
    )
    found = [list(backend.get_list_state(descriptor).get()) for backend in start(url, 3)]

    assert list(chain.from_iterable(found)) == [*texts, "last"]
    assert len({len(part) for part in found}) <= 2


def test_what_was_not_checkpointed_is_gone(url: str) -> None:
    operator = LocalOperator(url, parallelism=1)
    (backend,) = backends_of(operator)
    add_to_list(backend, [1])
    put_all(backend, {1: 1})
    operator.checkpoint()
    add_to_list(backend, [2])
    put_all(backend, {2: 2})
    MODES["UNION"](backend, "union").add(1)

    (again,) = start(url, 1)
    assert (lists([again]), maps([again]), unions([again])) == ([[1]], [{1: 1}], [[]])


def test_what_was_cleared_stays_so(url: str) -> None:
    written(url, [[1], [2]], add_to_list)
    written(url, [[], []], lambda backend, _: MODES["SPLIT_DISTRIBUTE"](backend, "list").clear())

    assert lists(start(url, 3)) == [[], [], []]


# What the program does not ask for.


def test_states_that_nobody_asks_for_are_kept_over_rescales(url: str) -> None:
    def write(backend: OperatorStateBackend, part: list[int]) -> None:
        add_to_list(backend, part)
        put_all(backend, {7: 7})

    written(url, [[1, 2, 3], [4]], write)
    for parallelism in (3, 3, 1, 2):
        operator = LocalOperator(url, parallelism=parallelism)
        for backend in backends_of(operator):
            assert backend.registered_names == []
            assert list(backend.metas) == ["list", "map"]
        operator.checkpoint()

    backends = start(url, 2)
    assert lists(backends) == [[1, 2], [3, 4]]
    assert maps(backends) == [{7: 7}] * 2


def test_a_state_that_one_subtask_asks_for_is_kept_in_the_others(url: str) -> None:
    written(url, [[1], [2], [3]], add_to_list)
    operator = LocalOperator(url, parallelism=3)
    add_to_list(backends_of(operator)[1], [22])
    operator.checkpoint()

    assert lists(start(url, 3)) == [[1], [2, 22], [3]]
    assert lists(start(url, 1)) == [[1, 2, 22, 3]]


def test_an_empty_state_that_nobody_asks_for_keeps_its_mode(url: str) -> None:
    written(url, [[]], add_to_list)
    LocalOperator(url, parallelism=2).checkpoint()

    with pytest.raises(StateMigrationError, match=r"Was \[SPLIT_DISTRIBUTE\]"):
        MODES["UNION"](start(url, 1)[0], "list")


def test_what_was_refused_is_kept(url: str) -> None:
    written(url, [[1, 2]], add_to_list)
    operator = LocalOperator(url, parallelism=1)
    (backend,) = backends_of(operator)
    with pytest.raises(StateMigrationError, match="state 'list' value was written as int64"):
        backend.get_list_state(ListStateDescriptor("list", str))
    operator.checkpoint()

    assert lists(start(url, 1)) == [[1, 2]]


# Types that change.


def test_elements_are_read_as_their_new_type(url: str) -> None:
    old = pa.struct([("a", pa.int32())])
    new = pa.struct([("b", pa.string()), ("a", pa.int64())])

    def write(backend: OperatorStateBackend, number: int) -> None:
        backend.get_list_state(ListStateDescriptor("list", old)).add({"a": number})
        backend.get_broadcast_state(MapStateDescriptor("map", str, old)).put("x", {"a": 7})

    written(url, [1, 2], write)
    operator = LocalOperator(url, parallelism=1)
    (backend,) = backends_of(operator)
    elements = backend.get_list_state(ListStateDescriptor("list", new))
    elements.add({"a": 1 << 40, "b": "z"})
    backend.get_broadcast_state(MapStateDescriptor("map", str, new))
    operator.checkpoint()

    expected = [{"b": None, "a": 1}, {"b": None, "a": 2}, {"b": "z", "a": 1 << 40}]
    assert elements.get() == expected
    (again,) = start(url, 1)
    assert again.get_list_state(ListStateDescriptor("list", new)).get() == expected
    found = again.get_broadcast_state(MapStateDescriptor("map", str, new))
    assert found.items() == [("x", {"b": None, "a": 7})]


def test_a_type_that_does_not_fit_is_refused_by_the_name_of_its_field(url: str) -> None:
    kind = pa.struct([("a", pa.int64())])

    def write(backend: OperatorStateBackend, _: None) -> None:
        backend.get_union_list_state(ListStateDescriptor("union", kind))
        backend.get_broadcast_state(MapStateDescriptor("map", pa.int32(), kind))

    written(url, [None], write)
    (backend,) = start(url, 1)

    with pytest.raises(StateMigrationError, match=r"state 'union' value\.a was written and is not"):
        backend.get_union_list_state(ListStateDescriptor("union", pa.struct([("b", pa.int64())])))
    with pytest.raises(StateMigrationError, match=r"state 'map' value was written as struct"):
        backend.get_broadcast_state(MapStateDescriptor("map", pa.int32(), int))
    with pytest.raises(StateMigrationError, match="'map': a map's own keys cannot change"):
        backend.get_broadcast_state(MapStateDescriptor("map", pa.int64(), kind))


def test_elements_that_cannot_be_kept_fail_before_the_checkpoint(url: str) -> None:
    written(url, [[1]], add_to_list)
    operator = LocalOperator(url, parallelism=1)
    (backend,) = backends_of(operator)

    with pytest.raises(StateTypeError, match="'list': element 1: a value of class object is not"):
        MODES["SPLIT_DISTRIBUTE"](backend, "list").add_all([2, object()])
    assert lists(start(url, 1)) == [[1]]
