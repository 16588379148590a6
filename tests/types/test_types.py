"""What a type of state may be, and what it takes."""

from __future__ import annotations

import datetime as dt
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given

from flowstate.errors import (
    SerializerError,
    StateDescriptorError,
    StateTypeError,
)
from flowstate.keys import physical_column
from flowstate.types import (
    StateSerializer,
    arrow_type,
    value_type,
)
from tests.keyed.strategies import SCALARS, is_same, typed_values

Wrap = Callable[[pa.DataType], pa.DataType]


def required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


# Which types there are.


@pytest.mark.parametrize(
    ("spec", "arrow"),
    [
        (bool, pa.bool_()),
        (int, pa.int64()),
        (float, pa.float64()),
        (str, pa.string()),
        (bytes, pa.binary()),
        (dt.datetime, pa.timestamp("us", "UTC")),
        (dt.date, pa.date32()),
        (dt.time, pa.time64("us")),
        (dt.timedelta, pa.duration("us")),
        (list[str], pa.list_(pa.string())),
        (dict[str, float], pa.map_(pa.string(), pa.float64())),
        (tuple[int, str], pa.struct([("f0", pa.int64()), ("f1", pa.string())])),
        (
            dict[str, list[tuple[bytes]]],
            pa.map_(pa.string(), pa.list_(pa.struct([("f0", pa.binary())]))),
        ),
        (list[pa.int8()], pa.list_(pa.int8())),  # type: ignore[misc]
    ],
    ids=str,
)
def test_builtins_are_short_for_arrow_types(spec: Any, arrow: pa.DataType) -> None:
    assert arrow_type(spec) == arrow
    assert value_type(spec) == value_type(arrow)


@pytest.mark.parametrize("kind", SCALARS, ids=str)
def test_every_supported_arrow_type_stands_for_itself(kind: pa.DataType) -> None:
    for arrow in (kind, pa.list_(kind), pa.large_list(kind), pa.map_(kind, kind)):
        assert value_type(arrow).arrow is arrow
        assert str(value_type(arrow)) == str(arrow)


def test_a_type_may_be_given_where_a_type_is_asked_for() -> None:
    kind = value_type(int)

    assert value_type(kind) is kind


@pytest.mark.parametrize(
    "spec",
    [
        object,
        complex,
        Decimal,
        np.int64,
        list,
        dict,
        tuple,
        set[int],
        tuple[int, ...],
        tuple[()],
        int | None,
        "int",
        None,
        pa.field("a", pa.int64()),
    ],
    ids=str,
)
def test_what_is_no_type_is_refused_with_a_list_of_those_that_are(spec: Any) -> None:
    message = f"^\\[FLOWSTATE_DESCRIPTOR\\] {re.escape(repr(spec))} is not a type of state. Give an"

    with pytest.raises(StateDescriptorError, match=message):
        value_type(spec)


def test_a_type_is_refused_for_any_of_its_parts() -> None:
    for spec in (list[object], dict[str, object], dict[object, str], tuple[int, list[object]]):
        with pytest.raises(StateDescriptorError, match=r"\] <class 'object'> is not a type"):
            value_type(spec)


@pytest.mark.parametrize(
    "arrow",
    [
        pa.uint8(),
        pa.uint64(),
        pa.float16(),
        pa.null(),
        pa.timestamp("ns"),
        pa.timestamp("ms", "UTC"),
        pa.date64(),
        pa.time32("ms"),
        pa.time64("ns"),
        pa.duration("s"),
        pa.decimal256(40, 2),
        pa.binary(4),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.list_(pa.int64(), 3),
        pa.list_view(pa.int64()),
    ],
    ids=str,
)
def test_an_unsupported_arrow_type_is_refused_wherever_it_stands(arrow: pa.DataType) -> None:
    for whole in (
        arrow,
        pa.list_(arrow),
        pa.map_(pa.string(), arrow),
        pa.struct([("a", pa.list_(pa.struct([("b", arrow)])))]),
    ):
        message = re.escape(f"{whole}: {arrow} is not supported in state. Use signed integers")
        with pytest.raises(StateDescriptorError, match=message):
            value_type(whole)


def test_a_struct_that_names_a_field_twice_is_refused() -> None:
    twice = pa.struct([("a", pa.int64()), ("a", pa.string())])

    for whole in (twice, pa.list_(twice)):
        with pytest.raises(StateDescriptorError, match="names a field twice"):
            value_type(whole)


# Values.


class Colour(enum.StrEnum):
    RED = "rouge"

    def __str__(self) -> str:
        return self.name


class Level(enum.IntEnum):
    HIGH = 3


BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("spec", "given", "kept"),
    [
        (int, np.int8(5), 5),
        (int, Level.HIGH, 3),
        (float, 5, 5.0),
        (float, np.float32(0.5), 0.5),
        (float, np.int64(5), 5.0),
        (pa.float32(), 0.1, float(np.float32(0.1))),
        (pa.float32(), 1e300, float("inf")),
        (bool, np.True_, True),
        (str, np.str_("é"), "é"),
        (str, Colour.RED, "rouge"),
        (bytes, bytearray(b"a"), b"a"),
        pytest.param(bytes, memoryview(b"a"), b"a", id="memoryview"),
        (dt.datetime, pd.Timestamp("2020-01-01", tz="UTC"), dt.datetime(2020, 1, 1, tzinfo=dt.UTC)),
        (
            dt.datetime,
            dt.datetime(2023, 7, 1, 2, tzinfo=BERLIN),
            dt.datetime(2023, 7, 1, tzinfo=dt.UTC),
        ),
        (dt.timedelta, pd.Timedelta("5s"), dt.timedelta(seconds=5)),
        (pa.decimal128(5, 2), Decimal("1.2"), Decimal("1.20")),
        (list[int], (1, 2), [1, 2]),
        (list[list[int]], np.array([[1], [2]]), [[1], [2]]),
        (list[int], [1, None], [1, None]),
        (dict[str, int], {"a": None}, [("a", None)]),
        (tuple[int, str], (1, "a"), {"f0": 1, "f1": "a"}),
        (tuple[int, str], [1, None], {"f0": 1, "f1": None}),
        (tuple[int, str], {"f1": "a"}, {"f0": None, "f1": "a"}),
    ],
    ids=str,
)
def test_a_value_is_kept_as_a_plain_one(spec: Any, given: Any, kept: Any) -> None:
    found = value_type(spec).to_physical(given)

    assert found == kept
    assert type(found) is type(kept)
    assert str(found) == str(kept)


@pytest.mark.parametrize(
    ("spec", "value", "message"),
    [
        (int, None, "class NoneType is not of type int64"),
        (int, True, "class bool is not of type int64"),
        (int, 1.0, "class float is not of type int64"),
        (int, pd.NA, "class NAType is not of type int64"),
        (int, 1 << 63, "9223372036854775808 is out of the range of type int64"),
        (int, np.uint64(1 << 63), "9223372036854775808 is out of the range of type int64"),
        (pa.int8(), -129, "-129 is out of the range of type int8"),
        (float, True, "class bool is not of type double"),
        (float, Decimal(1), "class Decimal is not of type double"),
        (float, 10**400, "an int is out of the range of type double"),
        (bool, 1, "class int is not of type bool"),
        (str, b"a", "class bytes is not of type string"),
        (str, "a\ud800", "a text is not valid Unicode: surrogates not allowed"),
        (bytes, "a", "class str is not of type binary"),
        (dt.date, dt.datetime(2020, 1, 1), "class datetime is not of type date32"),
        (dt.time, dt.time(1, tzinfo=dt.UTC), "a time of day in state has no time zone"),
        (dt.datetime, dt.datetime(2020, 1, 1), "tz=UTC] needs a datetime with a time zone"),
        (
            pa.timestamp("us"),
            dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
            "[us] needs a datetime without a time zone",
        ),
        (
            dt.datetime,
            dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-1))),
            "a datetime is out of the range of timestamp[us, tz=UTC]",
        ),
        (pa.timestamp("us"), pd.NaT, "class NaTType is not of type timestamp[us]"),
        (pa.timestamp("us"), pd.Timestamp(5), "nanoseconds do not fit timestamp[us]: round"),
        (dt.timedelta, pd.Timedelta(5), "nanoseconds do not fit duration[us]: round"),
        (dt.timedelta, dt.timedelta.max, "is out of the range of type duration[us]"),
        (pa.decimal128(5, 2), 1.5, "class float is not of type decimal128(5, 2)"),
        (pa.decimal128(5, 2), Decimal("0.001"), "a decimal does not fit decimal128(5, 2)"),
        (pa.decimal128(5, 2), Decimal(1000), "a decimal does not fit decimal128(5, 2)"),
        (pa.decimal128(5, 2), Decimal("NaN"), "a decimal does not fit decimal128(5, 2)"),
        (list[str], "abc", "class str is not of type list<item: string>"),
        (list[int], {1}, "class set is not of type list<item: int64>"),
        (list[int], np.array(1), "class ndarray is not of type list<item: int64>"),
        (list[int], [1, "x"], "class str is not of type int64"),
        (dict[str, int], [("a", 1)], "class list is not of type map<string, int64>"),
        (dict[str, int], {None: 1}, "a key of map<string, int64> must not be null"),
        (tuple[int], 1, "class int is not of type struct<f0: int64>"),
        (tuple[int], (1, 2), "2 values given for the 1 of struct<f0: int64>"),
        (tuple[int], {"f0": 1, "g": 2, 3: 3}, "struct<f0: int64> has no field '3', 'g'"),
        (
            pa.struct([required("a", pa.int64())]),
            {},
            "field 'a' of struct<a: int64 not null> must not be null",
        ),
        (pa.list_(required("item", pa.int64())), [None], "an element of list<"),
        (pa.map_(pa.string(), required("value", pa.int64())), {"a": None}, "a value of map<"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_of_another_type_is_refused(spec: Any, value: Any, message: str) -> None:
    with pytest.raises(StateTypeError, match=re.escape(message)):
        value_type(spec).to_physical(value)


def test_an_error_does_not_tell_the_value() -> None:
    kind = value_type(dict[str, list[int]])

    with pytest.raises(StateTypeError) as caught:
        kind.to_physical({"a": ["secret"]})
    assert "secret" not in str(caught.value)


@given(typed_values(nested=True))
def test_values_are_the_same_after_a_way_through_arrow(value: tuple[pa.DataType, Any]) -> None:
    kind = value_type(value[0])
    physical = kind.to_physical(value[1])
    found = physical_column(pa.array([None, physical], kind.arrow))[1]

    assert is_same(found, physical)
    user = kind.to_user or (lambda same: same)
    assert is_same(kind.to_physical(user(found)), physical)


@pytest.mark.parametrize("fold", [0, 1], ids=["first", "again"])
@pytest.mark.parametrize(
    ("wrap", "nest"),
    [
        pytest.param(lambda kind: kind, lambda value: value, id="alone"),
        pytest.param(pa.list_, lambda value: [value], id="list"),
        pytest.param(pa.large_list, lambda value: [value], id="large-list"),
        pytest.param(
            lambda kind: pa.struct([("a", kind)]), lambda value: {"a": value}, id="struct"
        ),
        pytest.param(lambda kind: pa.map_(kind, kind), lambda value: {value: value}, id="map"),
        pytest.param(
            lambda kind: pa.list_(pa.struct([required("a", pa.map_(pa.string(), kind))])),
            lambda value: [{"a": {"x": value}}],
            id="deep",
        ),
    ],
)
def test_a_time_that_a_zone_has_twice_comes_back_as_the_same(
    wrap: Wrap, nest: Callable[[Any], Any], fold: int
) -> None:
    kind = value_type(wrap(pa.timestamp("us", "Europe/Berlin")))
    physical = kind.to_physical(nest(dt.datetime(2023, 10, 29, 2, 30, tzinfo=BERLIN, fold=fold)))

    assert physical_column(pa.array([physical], kind.arrow)) == [physical]


# Serializers.


@dataclass(frozen=True)
class Spy:
    """Writes a text, and tells what it was asked to read."""

    name: Any = "spy"
    version: Any = 2
    written: Any = b"data"

    def serialize(self, value: Any) -> bytes:
        if isinstance(self.written, Exception):
            raise self.written
        return self.written  # type: ignore[no-any-return]

    def deserialize(self, data: bytes, version: int) -> Any:
        return data, version


class Unpicklable:
    def __reduce__(self) -> str:
        raise AssertionError("nothing is pickled")


def test_what_is_kept_is_the_version_and_the_serializers_own_bytes() -> None:
    kind = value_type(Spy(version=258))

    assert isinstance(Spy(), StateSerializer)
    assert kind.arrow == pa.binary()
    assert kind.to_physical(Unpicklable()) == b"\x01\x02data"
    assert str(kind) == "serializer 'spy'"
    assert kind.to_json() == {"serializer": "spy", "version": 258}


def test_a_serializer_is_told_which_version_wrote() -> None:
    old = value_type(Spy(version=1)).to_physical(None)
    to_user = value_type(Spy(version=3)).to_user
    assert to_user is not None

    assert to_user(old) == (b"data", 1)
    newer = value_type(Spy(version=4)).to_physical(None)
    with pytest.raises(SerializerError, match=r"version 4 of serializer 'spy'.*has version 3"):
        to_user(newer)


def test_serializers_of_one_name_and_version_are_one_type() -> None:
    kind = value_type(Spy())

    assert kind == value_type(Spy(written=b"other"))
    assert hash(kind) == hash(value_type(Spy(written=b"other")))
    assert kind != value_type(Spy(version=3))
    assert kind != value_type(Spy(name="other"))
    assert kind != value_type(bytes)


@pytest.mark.parametrize("name", ["", None, 5], ids=repr)
def test_a_serializer_without_a_name_is_refused(name: Any) -> None:
    with pytest.raises(StateDescriptorError, match="a serializer needs a name"):
        value_type(Spy(name=name))


@pytest.mark.parametrize("version", [0, -1, 65536, "1", 1.0, True, None], ids=repr)
def test_a_version_that_has_no_two_bytes_is_refused(version: Any) -> None:
    with pytest.raises(StateDescriptorError, match=r"serializer 'spy' must be 1\.\.65535, not"):
        value_type(Spy(version=version))


def test_a_serializers_class_is_no_serializer_and_neither_is_a_part_of_one() -> None:
    class WithoutVersion:
        name = "x"

        def serialize(self, value: Any) -> bytes:
            raise NotImplementedError

        def deserialize(self, data: bytes, version: int) -> Any:
            raise NotImplementedError

    for spec in (Spy, WithoutVersion(), list[Spy]):
        with pytest.raises(
            StateDescriptorError, match=r"is not a type of state.*a serializer with"
        ):
            value_type(spec)


@pytest.mark.parametrize("written", [None, "text", bytearray(b"a")], ids=repr)
def test_a_serializer_must_return_bytes(written: Any) -> None:
    name = type(written).__name__

    with pytest.raises(SerializerError, match=f"'spy' returned {name} instead of bytes"):
        value_type(Spy(written=written)).to_physical(1)


def test_an_error_of_the_library_passes_through_a_serializer() -> None:
    error = StateTypeError("the point has no x")

    with pytest.raises(StateTypeError) as caught:
        value_type(Spy(written=error)).to_physical(1)
    assert caught.value is error


def test_another_error_of_a_serializer_is_the_cause_of_ours() -> None:
    error = KeyError("x")

    with pytest.raises(SerializerError, match="'spy' failed to serialize a value: KeyError: 'x'"):
        value_type(Spy(written=error)).to_physical(1)
    with pytest.raises(SerializerError) as caught:
        value_type(Spy(written=error)).to_physical(1)
    assert caught.value.__cause__ is error
