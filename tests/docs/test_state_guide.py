"""What the guide says of changed programs: each row of its table, allowed or refused."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowstate import (
    KeyGroupAssigner,
    ListStateDescriptor,
    LocalOperator,
    MapStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)
from flowstate.errors import MaxParallelismError, StateMigrationError, UnclaimedStateError

KEYS = ["a", "b", "c", "d"]


class Texts:
    """A serializer of texts."""

    def __init__(self, name: str = "texts", version: int = 1) -> None:
        self.name, self.version = name, version

    def serialize(self, value: str) -> bytes:
        return value.encode()

    def deserialize(self, data: bytes, version: int) -> str:
        return f"{data.decode()} of version {version}"


def struct(*fields: tuple[str, pa.DataType], required: str | None = None) -> pa.DataType:
    return pa.struct([pa.field(name, kind, nullable=name != required) for name, kind in fields])


A, B = ("a", pa.int32()), ("b", pa.string())

ALLOWED = {
    "wider-integer": (pa.int32(), 5, pa.int64(), 5),
    "integer-to-double": (pa.int32(), 5, pa.float64(), 5.0),
    "float-to-double": (pa.float32(), 1.5, pa.float64(), 1.5),
    "more-digits": (
        pa.decimal128(5, 2),
        Decimal("1.25"),
        pa.decimal128(9, 3),
        Decimal("1.250"),
    ),
    "large-string": (pa.string(), "x", pa.large_string(), "x"),
    "large-binary": (pa.binary(), b"x", pa.large_binary(), b"x"),
    "new-field": (struct(A), {"a": 1}, struct(A, B), {"a": 1, "b": None}),
    "new-field-in-front": (struct(A), {"a": 1}, struct(B, A), {"a": 1, "b": None}),
    "other-order": (struct(A, B), {"a": 1, "b": "x"}, struct(B, A), {"a": 1, "b": "x"}),
    "nullable": (struct(A, required="a"), {"a": 1}, struct(A), {"a": 1}),
    "in-a-list": (pa.list_(pa.int32()), [1], pa.list_(pa.int64()), [1]),
    "in-a-map": (
        pa.map_(pa.string(), pa.int32()),
        {"x": 1},
        pa.map_(pa.string(), pa.int64()),
        {"x": 1},
    ),
    "in-a-struct": (struct(A), {"a": 1}, struct(("a", pa.int64())), {"a": 1}),
    "newer-serializer": (Texts(), "x", Texts(version=2), "x of version 1"),
}
REFUSED = {
    "narrower-integer": (pa.int64(), 5, pa.int32()),
    "long-to-double": (pa.int64(), 5, pa.float64()),
    "narrower-float": (pa.float64(), 1.5, pa.float32()),
    "text-to-bytes": (pa.string(), "x", pa.binary()),
    "time-zone": (pa.timestamp("us"), dt.datetime(2026, 1, 1), pa.timestamp("us", tz="UTC")),
    "field-left-out": (struct(A, B), {"a": 1, "b": "x"}, struct(A)),
    "new-field-not-nullable": (struct(A), {"a": 1}, struct(A, B, required="b")),
    "not-nullable": (struct(A), {"a": 1}, struct(A, required="a")),
    "another-serializer": (Texts(), "x", Texts("others")),
    "older-serializer": (Texts(version=2), "x", Texts()),
    "from-a-serializer": (Texts(), "x", pa.binary()),
    "to-a-serializer": (pa.binary(), b"x", Texts()),
}


@pytest.fixture(params=[False, True], ids=["in-memory", "in-lmdb"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., LocalOperator]:
    """Return a function that opens one operator, at a parallelism and with options."""

    def opened(parallelism: int = 2, **options: Any) -> LocalOperator:
        working = tmp_path / "working" if request.param else None
        options = {"key_type": str, "working_folder": working, **options}
        return LocalOperator(tmp_path / "state", parallelism=parallelism, **options)

    return opened


Start = Callable[..., LocalOperator]


def write(start: Start, descriptor: ValueStateDescriptor, value: Any) -> None:
    with start() as operator:
        for key in KEYS:
            operator.subtask_of(key).keyed.get_state(descriptor).update(value)
        operator.checkpoint()


def read(operator: LocalOperator, descriptor: ValueStateDescriptor) -> list[Any]:
    return [operator.subtask_of(key).keyed.get_state(descriptor).value() for key in KEYS]


@pytest.mark.parametrize("case", ALLOWED)
def test_what_the_guide_allows_is_read_and_written_on(start: Start, case: str) -> None:
    old, value, new, expected = ALLOWED[case]
    write(start, ValueStateDescriptor("state", old), value)
    descriptor = ValueStateDescriptor("state", new)

    with start(3) as operator:
        for subtask in operator.subtasks:
            subtask.keyed.get_state(descriptor)
        assert read(operator, descriptor) == [expected] * len(KEYS)
        operator.checkpoint()
        assert operator.record is not None
        assert operator.storage.verify(operator.record.checkpoint_id).ok
    with start(1) as operator:
        assert read(operator, descriptor) == [expected] * len(KEYS)


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_guide_refuses_is_refused(start: Start, case: str) -> None:
    old, value, new = REFUSED[case]
    write(start, ValueStateDescriptor("state", old), value)

    with start() as operator, pytest.raises(StateMigrationError):
        read(operator, ValueStateDescriptor("state", new))


def test_another_kind_map_key_mode_or_namespace_is_refused(start: Start) -> None:
    with start(1) as operator:
        subtask = operator.subtask_of("a")
        subtask.keyed.get_map_state(MapStateDescriptor("map", str, int)).put("x", 1)
        windows = subtask.keyed.get_state(ValueStateDescriptor("windows", int), str)
        windows.set_current_namespace("w")
        windows.update(1)
        subtask.operator.get_list_state(ListStateDescriptor("list", int)).add(1)
        operator.checkpoint()

    with start(1) as operator:
        (subtask,) = operator.subtasks
        for register in (
            lambda: subtask.keyed.get_state(ValueStateDescriptor("map", int)),
            lambda: subtask.keyed.get_map_state(MapStateDescriptor("map", int, int)),
            lambda: subtask.keyed.get_state(ValueStateDescriptor("windows", int)),
            lambda: subtask.keyed.get_state(ValueStateDescriptor("windows", int), int),
            lambda: subtask.operator.get_union_list_state(ListStateDescriptor("list", int)),
        ):
            with pytest.raises(StateMigrationError):
                register()


def test_keys_max_parallelism_and_assigner_stay_what_they_were(start: Start) -> None:
    write(start, ValueStateDescriptor("state", int), 1)

    for options, error in (
        ({"max_parallelism": 256}, MaxParallelismError),
        ({"parallelism": 129}, MaxParallelismError),
        ({"assigner": KeyGroupAssigner.XXHASH64}, MaxParallelismError),
        ({"key_type": int}, StateMigrationError),
        ({"key_type": None, "working_folder": None}, UnclaimedStateError),
    ):
        with pytest.raises(error):
            start(**options)


def test_a_ttl_may_be_switched_on_and_off(start: Start) -> None:
    plain = ValueStateDescriptor("state", int)
    write(start, plain, 1)
    mortal = ValueStateDescriptor("state", int, ttl=StateTtlConfig(ttl=dt.timedelta(days=1)))

    for descriptor in (mortal, plain, mortal):
        with start(3) as operator:
            assert read(operator, descriptor) == [1] * len(KEYS)
            operator.checkpoint()


def test_a_state_that_is_not_used_is_kept(start: Start) -> None:
    write(start, ValueStateDescriptor("state", int), 1)
    for parallelism in (3, 1, 4):
        with start(parallelism) as operator:
            operator.subtask_of("a").keyed.get_state(ValueStateDescriptor("other", int)).update(2)
            operator.checkpoint()

    with start() as operator:
        assert read(operator, ValueStateDescriptor("state", int)) == [1] * len(KEYS)
