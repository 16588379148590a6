"""State that is restored by a program with other kinds, types or serializers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from flowstate.aggregates import Reducer
from flowstate.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from flowstate.errors import SerializerError, StateDescriptorError, StateMigrationError
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.testing.keyed_base_suite import KeyedHarness, KeyedSuiteBase

__all__ = ["RestoredKindSuite", "SchemaEvolutionSuite", "SerializerSuite"]


def _struct(**fields: pa.DataType) -> pa.DataType:
    return pa.struct(list(fields.items()))


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_KINDS: list[tuple[str, StateDescriptor, Callable[[KeyedStateBackend, Any], Any]]] = [
    ("VALUE", ValueStateDescriptor("name", int), KeyedStateBackend.get_state),
    ("LIST", ListStateDescriptor("name", int), KeyedStateBackend.get_list_state),
    ("MAP", MapStateDescriptor("name", str, int), KeyedStateBackend.get_map_state),
    (
        "REDUCING",
        ReducingStateDescriptor("name", Reducer.SUM, int),
        KeyedStateBackend.get_reducing_state,
    ),
    (
        "AGGREGATING",
        AggregatingStateDescriptor("name", Reducer.SUM, int),
        KeyedStateBackend.get_aggregating_state,
    ),
]


class RestoredKindSuite(KeyedSuiteBase):
    """What cannot be restored is refused when it is asked for, and stays as it was."""

    @pytest.mark.parametrize(("new", "descriptor", "get"), _KINDS, ids=[kind[0] for kind in _KINDS])
    def test_state_cannot_be_restored_as_another_kind(
        self,
        harness: KeyedHarness,
        new: str,
        descriptor: StateDescriptor,
        get: Callable[[KeyedStateBackend, Any], Any],
    ) -> None:
        old_kinds = [kind for kind in _KINDS if kind[0] != new]
        for old, described, register in old_kinds:
            register(harness.at("a"), _renamed(described, f"{old}-{new}"))
        harness.restart()

        for old, *_ in old_kinds:
            with pytest.raises(
                StateMigrationError, match=rf"Was \[{old}\], registered with \[{new}\]"
            ):
                get(harness.at("a"), _renamed(descriptor, f"{old}-{new}"))

    def test_what_was_refused_can_be_restored_as_before(self, harness: KeyedHarness) -> None:
        harness.at("a").get_state(ValueStateDescriptor("name", int)).update(1)
        harness.restart()
        with pytest.raises(StateMigrationError):
            harness.at("a").get_list_state(ListStateDescriptor("name", int))
        with pytest.raises(StateMigrationError):
            harness.at("a").get_state(ValueStateDescriptor("name", str))
        harness.restart()

        assert harness.at("a").get_state(ValueStateDescriptor("name", int)).value() == 1

    @pytest.mark.parametrize(
        ("old", "new"), [(int, None), (None, int), (int, str)], ids=["gone", "new", "another-type"]
    )
    def test_namespaces_cannot_change(self, harness: KeyedHarness, old: Any, new: Any) -> None:
        descriptor = ValueStateDescriptor("name", int)
        harness.at("a").get_state(descriptor, old)
        harness.restart()

        with pytest.raises(StateMigrationError, match=r"'name'.*amespaces"):
            harness.at("a").get_state(descriptor, new)

    def test_keys_cannot_change_their_type(self, harness: KeyedHarness) -> None:
        harness.at("a").get_state(ValueStateDescriptor("name", int)).update(1)
        harness.checkpoint()

        with pytest.raises(StateMigrationError, match=r"string.*int64"):
            harness.start(int)

    @pytest.mark.parametrize("new", [pa.int64(), pa.string()], ids=["wider", "another"])
    def test_keys_of_a_map_cannot_change_their_type(
        self, harness: KeyedHarness, new: pa.DataType
    ) -> None:
        harness.at("a").get_map_state(MapStateDescriptor("name", pa.int32(), int)).put(1, 1)
        harness.restart()

        with pytest.raises(StateMigrationError, match="'name'"):
            harness.at("a").get_map_state(MapStateDescriptor("name", new, int))


def _renamed(descriptor: StateDescriptor, name: str) -> Any:
    match descriptor:
        case ValueStateDescriptor():
            return ValueStateDescriptor(name, int)
        case ListStateDescriptor():
            return ListStateDescriptor(name, int)
        case MapStateDescriptor():
            return MapStateDescriptor(name, str, int)
        case ReducingStateDescriptor():
            return ReducingStateDescriptor(name, Reducer.SUM, int)
    return AggregatingStateDescriptor(name, Reducer.SUM, int)


_INNER = _struct(x=pa.int32())
_EVOLUTIONS = [
    pytest.param(pa.int8(), 5, pa.int64(), 5, 1 << 40, id="int8-to-int64"),
    pytest.param(pa.int32(), 5, pa.float64(), 5.0, 0.5, id="int32-to-double"),
    pytest.param(pa.float32(), 0.5, pa.float64(), 0.5, 1e300, id="float-to-double"),
    pytest.param(pa.string(), "a", pa.large_string(), "a", "b", id="large-string"),
    pytest.param(pa.binary(), b"a", pa.large_binary(), b"a", b"b", id="large-binary"),
    pytest.param(
        pa.decimal128(5, 2),
        Decimal("1.25"),
        pa.decimal128(10, 4),
        Decimal("1.25"),
        Decimal("123456.7891"),
        id="decimal",
    ),
    pytest.param(
        _struct(a=pa.int32()),
        {"a": 1},
        _struct(a=pa.int32(), b=pa.string()),
        {"a": 1, "b": None},
        {"a": 2, "b": "x"},
        id="added-field",
    ),
    pytest.param(
        _struct(a=pa.int32(), b=pa.string()),
        {"a": 1, "b": None},
        _struct(c=pa.list_(pa.int64()), b=pa.string(), a=pa.float64()),
        {"c": None, "b": None, "a": 1.0},
        {"c": [1], "b": "x", "a": 0.5},
        id="added-first-and-in-another-order",
    ),
    pytest.param(
        _struct(inner=_INNER),
        {"inner": {"x": 1}},
        _struct(inner=_struct(x=pa.int64(), y=pa.string())),
        {"inner": {"x": 1, "y": None}},
        {"inner": {"x": 1 << 40, "y": "z"}},
        id="nested",
    ),
    pytest.param(
        pa.list_(_INNER),
        [{"x": 1}, None],
        pa.list_(_struct(x=pa.int64(), y=pa.string())),
        [{"x": 1, "y": None}, None],
        [{"x": 2, "y": "z"}],
        id="in-a-list",
    ),
    pytest.param(
        pa.map_(pa.string(), _INNER),
        {"k": {"x": 1}, "n": None},
        pa.map_(pa.string(), _struct(x=pa.int64(), y=pa.string())),
        {"k": {"x": 1, "y": None}, "n": None},
        {"k": {"x": 2, "y": "z"}},
        id="in-a-map",
    ),
    pytest.param(
        pa.struct([_required("a", pa.int32())]),
        {"a": 1},
        _struct(a=pa.int32()),
        {"a": 1},
        {"a": None},
        id="made-nullable",
    ),
]

_REFUSED = [
    pytest.param(pa.int64(), pa.int32(), "value was written as int64", id="narrower"),
    pytest.param(pa.int64(), pa.float64(), "value was written as int64", id="int64-to-double"),
    pytest.param(pa.float64(), pa.float32(), "value was written as double", id="to-float"),
    pytest.param(pa.string(), pa.int64(), "value was written as string", id="another-type"),
    pytest.param(pa.string(), pa.binary(), "value was written as string", id="text-to-bytes"),
    pytest.param(pa.decimal128(10, 2), pa.decimal128(10, 4), "value was written", id="decimal"),
    pytest.param(
        _struct(a=pa.int64(), b=pa.int64()), _struct(a=pa.int64()), r"value\.b was", id="removed"
    ),
    pytest.param(
        _struct(a=pa.int64()), _struct(b=pa.int64()), r"value\.a was written", id="renamed"
    ),
    pytest.param(
        _struct(a=pa.int64()),
        pa.struct([("a", pa.int64()), _required("b", pa.int64())]),
        r"value\.b is new and not nullable",
        id="added-not-nullable",
    ),
    pytest.param(
        _struct(a=pa.int64()),
        pa.struct([_required("a", pa.int64())]),
        r"value\.a was nullable",
        id="no-longer-nullable",
    ),
    pytest.param(
        _struct(a=_struct(b=pa.int64())),
        _struct(a=_struct(b=pa.string())),
        r"value\.a\.b was written as int64",
        id="nested-type",
    ),
    pytest.param(
        pa.list_(_struct(b=pa.int64())),
        pa.list_(_struct(b=pa.string())),
        r"value\[\]\.b was written as int64",
        id="in-a-list",
    ),
    pytest.param(
        pa.map_(pa.string(), _struct(b=pa.int64())),
        pa.map_(pa.string(), _struct(c=pa.int64())),
        r"value\{\}\.b was written",
        id="in-a-map",
    ),
    pytest.param(
        pa.list_(pa.int64()),
        pa.list_(_required("item", pa.int64())),
        r"value\[\] was nullable",
        id="elements-not-nullable",
    ),
    pytest.param(
        pa.map_(pa.int32(), pa.int64()),
        pa.map_(pa.int64(), pa.int64()),
        "value was written as map",
        id="keys-of-a-map-value",
    ),
    pytest.param(pa.int64(), pa.list_(pa.int64()), "value was written as int64", id="to-a-list"),
]


class SchemaEvolutionSuite(KeyedSuiteBase):
    """Types that may change, and such as may not."""

    @pytest.mark.parametrize(("old", "stored", "new", "expected", "added"), _EVOLUTIONS)
    def test_state_is_read_as_its_new_type(
        self,
        harness: KeyedHarness,
        old: pa.DataType,
        stored: Any,
        new: pa.DataType,
        expected: Any,
        added: Any,
    ) -> None:
        for key in ("a", "b"):
            _write_all_kinds(harness.at(key), old, stored)
        harness.restart()
        assert _read_all_kinds(harness.at("a"), new) == ([expected], {"x": expected}, expected)
        _write_all_kinds(harness.at("a"), new, added)
        _write_all_kinds(harness.at("c"), new, added)

        # Now some files hold the old type, and some the new one.
        for parallelism in (1, 3):
            harness.restart(parallelism=parallelism)
            found = _read_all_kinds(harness.at("a"), new)
            assert found == ([expected, added], {"x": added}, added)
            found = _read_all_kinds(harness.at("b"), new)
            assert found == ([expected], {"x": expected}, expected)
            assert type(found[2]) is type(expected)
            assert _read_all_kinds(harness.at("c"), new) == ([added], {"x": added}, added)

    def test_state_of_two_types_is_merged_in_compactions(self, harness: KeyedHarness) -> None:
        old, new = _struct(a=pa.int32()), _struct(a=pa.int64(), b=pa.string())
        harness.at("a").get_state(ValueStateDescriptor("name", old)).update({"a": 1})
        harness.restart()
        for number in range(20):
            state = harness.at("b").get_state(ValueStateDescriptor("name", new))
            state.update({"a": number, "b": "x"})
            harness.checkpoint()
        harness.reopen()
        state = harness.at("a").get_state(ValueStateDescriptor("name", new))

        assert state.value() == {"a": 1, "b": None}

    @pytest.mark.parametrize(("old", "new", "message"), _REFUSED)
    def test_a_type_that_does_not_fit_is_refused_by_the_name_of_its_field(
        self, harness: KeyedHarness, old: pa.DataType, new: pa.DataType, message: str
    ) -> None:
        harness.at("a").get_state(ValueStateDescriptor("one", old))
        harness.at("a").get_list_state(ListStateDescriptor("many", old))
        harness.restart()

        with pytest.raises(StateMigrationError, match=rf"state 'one' {message}"):
            harness.at("a").get_state(ValueStateDescriptor("one", new))
        with pytest.raises(StateMigrationError, match=rf"state 'many' {message}"):
            harness.at("a").get_list_state(ListStateDescriptor("many", new))

    def test_a_sum_goes_on_in_a_wider_type(self, harness: KeyedHarness) -> None:
        narrow = ReducingStateDescriptor("sum", Reducer.SUM, pa.int8())
        wide = ReducingStateDescriptor("sum", Reducer.SUM, pa.int64())
        harness.at("a").get_reducing_state(narrow).add(100)
        harness.restart()
        harness.at("a").get_reducing_state(wide).add(100)
        harness.restart()

        assert harness.at("a").get_reducing_state(wide).get() == 200


def _write_all_kinds(backend: KeyedStateBackend, kind: pa.DataType, value: Any) -> None:
    backend.get_list_state(ListStateDescriptor("list", kind)).add(value)
    backend.get_map_state(MapStateDescriptor("map", str, kind)).put("x", value)
    backend.get_state(ValueStateDescriptor("value", kind)).update(value)


def _read_all_kinds(
    backend: KeyedStateBackend, kind: pa.DataType
) -> tuple[list[Any], dict[str, Any], Any]:
    return (
        backend.get_list_state(ListStateDescriptor("list", kind)).get(),
        dict(backend.get_map_state(MapStateDescriptor("map", str, kind)).items()),
        backend.get_state(ValueStateDescriptor("value", kind)).value(),
    )


@dataclass(frozen=True, slots=True)
class _Point:
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class _PointSerializer:
    """Version 1 wrote only x, version 2 writes both."""

    name: str = "point"
    version: int = 2
    fails: bool = False

    def serialize(self, value: _Point) -> bytes:
        if self.fails:
            raise RuntimeError("no ink")
        fields = [value.x] if self.version == 1 else [value.x, value.y]
        return json.dumps(fields).encode()

    def deserialize(self, data: bytes, version: int) -> _Point:
        if self.fails:
            raise RuntimeError("no glasses")
        fields = json.loads(data)
        return _Point(fields[0], 0 if version == 1 else fields[1])


class SerializerSuite(KeyedSuiteBase):
    """Values of the user's own classes."""

    def test_objects_survive_in_every_kind_of_state(self, harness: KeyedHarness) -> None:
        points = [_Point(1, 2), _Point(3, 4)]
        for point in points:
            _write_all_kinds(harness.at("a"), _serializer(), point)
        harness.restart(parallelism=2)

        found = _read_all_kinds(harness.at("a"), _serializer())
        assert found == (points, {"x": points[1]}, points[1])

    def test_a_newer_version_reads_what_an_older_one_wrote(self, harness: KeyedHarness) -> None:
        _write_all_kinds(harness.at("a"), _serializer(version=1), _Point(1, 2))
        harness.restart()
        assert _read_all_kinds(harness.at("a"), _serializer())[2] == _Point(1, 0)
        _write_all_kinds(harness.at("a"), _serializer(), _Point(3, 4))
        harness.restart()

        found = _read_all_kinds(harness.at("a"), _serializer(version=3))
        assert found == ([_Point(1, 0), _Point(3, 4)], {"x": _Point(3, 4)}, _Point(3, 4))

    @pytest.mark.parametrize(
        ("new", "message"),
        [
            pytest.param(_PointSerializer(name="dot"), "'point'.*'dot'", id="another-name"),
            pytest.param(_PointSerializer(version=1), "version 2.*version 1", id="older-version"),
            pytest.param(pa.binary(), "'point'.*binary", id="a-type-instead"),
        ],
    )
    def test_a_serializer_that_does_not_fit_is_refused(
        self, harness: KeyedHarness, new: Any, message: str
    ) -> None:
        harness.at("a").get_state(ValueStateDescriptor("name", _PointSerializer()))
        harness.restart()

        with pytest.raises(StateMigrationError, match=f"state 'name' value was .*{message}"):
            harness.at("a").get_state(ValueStateDescriptor("name", new))

    def test_a_type_cannot_become_a_serializer(self, harness: KeyedHarness) -> None:
        harness.at("a").get_state(ValueStateDescriptor("name", bytes))
        harness.restart()

        with pytest.raises(StateMigrationError, match=r"binary.*serializer 'point'"):
            harness.at("a").get_state(ValueStateDescriptor("name", _PointSerializer()))

    def test_a_serializer_that_fails_is_named_and_changes_nothing(
        self, harness: KeyedHarness
    ) -> None:
        harness.at("a").get_state(ValueStateDescriptor("name", _PointSerializer())).update(
            _Point(1, 2)
        )
        harness.restart()
        state = harness.at("a").get_state(ValueStateDescriptor("name", _serializer(fails=True)))

        with pytest.raises(SerializerError, match=r"'point' failed to serialize.*no ink"):
            state.update(_Point(3, 4))
        with pytest.raises(SerializerError, match=r"'point' failed to deserialize.*no glasses"):
            state.value()
        harness.restart()
        state = harness.at("a").get_state(ValueStateDescriptor("name", _PointSerializer()))
        assert state.value() == _Point(1, 2)

    def test_keys_of_a_map_cannot_have_a_serializer(self) -> None:
        with pytest.raises(StateDescriptorError, match="serializer"):
            MapStateDescriptor("name", _PointSerializer(), int)


def _serializer(**options: Any) -> Any:
    return _PointSerializer(**options)
