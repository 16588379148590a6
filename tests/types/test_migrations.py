"""What a type may become. What then happens to stored state is in the suites of keyed state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstate.errors import StateMigrationError
from flowstate.keys import physical_column
from flowstate.types import (
    arrow_type,
    check_migration,
    type_from_text,
    type_to_text,
    value_type,
)
from tests.keyed.strategies import SCALARS, is_same, typed_values, values_of

Wrap = Callable[[pa.DataType], pa.DataType]


def required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def migrates(old: pa.DataType, new: pa.DataType) -> bool:
    try:
        check_migration(value_type(old).to_json(), value_type(new), "state 's' value")
    except StateMigrationError:
        return False
    return True


def refusal(old: Any, new: Any) -> str:
    with pytest.raises(StateMigrationError) as caught:
        check_migration(value_type(old).to_json(), value_type(new), "state 's' value")
    return caught.value.message


WIDENINGS = {
    (pa.int8(), pa.int16()),
    (pa.int8(), pa.int32()),
    (pa.int8(), pa.int64()),
    (pa.int16(), pa.int32()),
    (pa.int16(), pa.int64()),
    (pa.int32(), pa.int64()),
    (pa.int8(), pa.float64()),
    (pa.int16(), pa.float64()),
    (pa.int32(), pa.float64()),
    (pa.float32(), pa.float64()),
    (pa.string(), pa.large_string()),
    (pa.binary(), pa.large_binary()),
}

WRAPPERS: dict[str, Wrap] = {
    "[]": pa.list_,
    "{}": lambda kind: pa.map_(pa.string(), kind),
    ".a": lambda kind: pa.struct([("a", kind), ("b", pa.int64())]),
    ".a[]{}.a": lambda kind: pa.struct(
        [("a", pa.list_(pa.map_(pa.int64(), pa.struct([("a", kind)]))))]
    ),
    "[][]": lambda kind: pa.large_list(pa.list_(kind)),
}


@pytest.mark.parametrize("old", SCALARS, ids=str)
def test_a_scalar_becomes_a_wider_one_and_nothing_else(old: pa.DataType) -> None:
    found = {new for new in SCALARS if new != old and migrates(old, new)}

    assert found == {new for before, new in WIDENINGS if before == old}


@pytest.mark.parametrize("where", WRAPPERS)
@pytest.mark.parametrize("old", SCALARS, ids=str)
def test_a_nested_type_changes_as_its_parts_may_and_the_part_is_named(
    old: pa.DataType, where: str
) -> None:
    wrap = WRAPPERS[where]

    for new in SCALARS:
        if migrates(old, new):
            assert migrates(wrap(old), wrap(new))
        else:
            message = f"state 's' value{where} was written as {old} and cannot become {new}. Fields"
            assert refusal(wrap(old), wrap(new)).startswith(message)


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        ((5, 2), (5, 2), True),
        ((5, 2), (6, 2), True),
        ((5, 2), (6, 3), True),
        ((5, 2), (5, 3), False),
        ((5, 2), (9, 1), False),
        ((5, 2), (4, 2), False),
    ],
    ids=str,
)
def test_a_decimal_may_lose_digits_on_neither_side(
    old: tuple[int, int], new: tuple[int, int], allowed: bool
) -> None:
    assert migrates(pa.decimal128(*old), pa.decimal128(*new)) is allowed


@pytest.mark.parametrize(
    ("old", "new"), sorted(WIDENINGS, key=str), ids=lambda kind: str(kind).replace(" ", "-")
)
@given(st.data())
def test_no_value_is_changed_by_a_wider_type(
    old: pa.DataType, new: pa.DataType, data: st.DataObject
) -> None:
    value = value_type(old).to_physical(data.draw(values_of(old)))
    column = pa.array([value], old).cast(new)

    assert is_same(physical_column(column), [value])
    assert is_same(value_type(new).to_physical(column[0].as_py()), column[0].as_py())


@given(typed_values(nested=True))
def test_every_type_stays_what_it_is_and_is_read_as_it_was_written(
    value: tuple[pa.DataType, Any],
) -> None:
    kind = value[0]

    assert type_from_text(type_to_text(kind)).equals(kind, check_metadata=True)
    assert migrates(kind, kind)
    assert value_type(kind) == value_type(type_from_text(type_to_text(kind)))


@pytest.mark.parametrize("where", WRAPPERS)
def test_a_new_field_must_be_nullable_and_an_old_one_must_stay(where: str) -> None:
    wrap = WRAPPERS[where]
    one = pa.struct([("x", pa.int64())])
    two = pa.struct([("y", pa.int64()), ("x", pa.int64())])
    strict = pa.struct([("x", pa.int64()), required("y", pa.int64())])

    assert migrates(wrap(one), wrap(two))
    assert refusal(wrap(two), wrap(one)) == (
        f"state 's' value{where}.y was written and is not in the program any more. Keep the field, "
        f"or use a new state name"
    )
    assert refusal(wrap(one), wrap(strict)) == (
        f"state 's' value{where}.y is new and not nullable, so what is stored cannot have it. Make "
        f"the field nullable"
    )


@pytest.mark.parametrize("where", WRAPPERS)
@pytest.mark.parametrize(
    ("part", "make"),
    [
        (".x", lambda nullable: pa.struct([pa.field("x", pa.int64(), nullable)])),
        ("[]", lambda nullable: pa.list_(pa.field("item", pa.int64(), nullable))),
        ("{}", lambda nullable: pa.map_(pa.int64(), pa.field("value", pa.int64(), nullable))),
    ],
    ids=["field", "element", "map-value"],
)
def test_what_may_be_null_stays_so(
    where: str, part: str, make: Callable[[bool], pa.DataType]
) -> None:
    wrap = WRAPPERS[where]

    assert migrates(wrap(make(False)), wrap(make(True)))
    assert refusal(wrap(make(True)), wrap(make(False))).startswith(
        f"state 's' value{where}{part} was nullable and no longer is"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (list[int], int),
        (list[int], dict[int, int]),
        (list[int], tuple[int]),
        (tuple[int], dict[str, int]),
        (dict[int, int], dict[str, int]),
        (dict[int, int], list[tuple[int, int]]),
        (pa.map_(pa.int32(), pa.int64()), dict[int, int]),
        (pa.large_list(pa.int64()), list[int]),
    ],
    ids=str,
)
def test_a_type_does_not_change_its_shape(old: Any, new: Any) -> None:
    expected = f"was written as {arrow_type(old)} and cannot become {arrow_type(new)}. Fields may"

    assert refusal(old, new).startswith(f"state 's' value {expected}")
