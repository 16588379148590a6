from __future__ import annotations

import datetime as dt
import decimal
import itertools
import json
import math
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from flowstate import _java_hash, _spark_hash
from flowstate.errors import KeyGroupError
from flowstate.key_groups import (
    MAX_PARALLELISM_LIMIT,
    KeyGroupAssigner,
    KeyGroupRange,
    check_parallelism,
    default_max_parallelism,
    key_group_of,
    key_group_range_of,
    key_grouper,
    key_groups_of,
    subtask_index_of,
)

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "key_groups.json").read_text(encoding="utf-8")
)
FLINK, XXHASH64 = KeyGroupAssigner.FLINK, KeyGroupAssigner.XXHASH64

ARROW_TYPES = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "char": pa.string(),
    "double": pa.float64(),
    "float": pa.float32(),
    "int": pa.int32(),
    "long": pa.int64(),
    "short": pa.int16(),
    "string": pa.string(),
}


def arrow_type_of(name: str) -> pa.DataType:
    if not name.startswith("tuple"):
        return ARROW_TYPES[name]
    fields = name.partition("<")[2].rstrip(">").split(",")
    return pa.struct([(f"f{index}", ARROW_TYPES[field]) for index, field in enumerate(fields)])


def rows_of(values: list[Any], key_type: pa.DataType) -> pa.Array:
    """Build an array from tuples, which pyarrow takes for structs only as dicts."""
    if not pa.types.is_struct(key_type):
        return pa.array(values, type=key_type)
    names = [field.name for field in key_type]
    return pa.array([dict(zip(names, value, strict=True)) for value in values], type=key_type)


def vector_id(vector: dict[str, Any]) -> str:
    return ascii(f"{vector['type']}-{vector['key']}")


# What Flink's own classes computed.


@pytest.mark.parametrize("vector", VECTORS["keys"], ids=vector_id)
def test_a_key_gets_the_key_group_that_flink_gives_it(vector: dict[str, Any]) -> None:
    key_type = arrow_type_of(vector["type"])
    key = tuple(vector["key"]) if isinstance(vector["key"], list) else vector["key"]
    column = rows_of([key], key_type)

    code = _java_hash.hasher(key_type)(key)
    assert code == vector["hashCode"] % (1 << 32)
    assert _java_hash.hash_array(column).tolist() == [code]
    assert _java_hash.murmur(code) == vector["murmur"]
    for name, key_group in vector["key_group"].items():
        assert key_group_of(key, key_type, max_parallelism=int(name)) == key_group
        assert key_groups_of(column, max_parallelism=int(name)).tolist() == [key_group]
    for name, subtask_index in vector["operator_index"].items():
        max_parallelism, parallelism = map(int, name.split("/"))
        key_group = key_group_of(key, key_type, max_parallelism=max_parallelism)
        index = subtask_index_of(
            key_group, parallelism=parallelism, max_parallelism=max_parallelism
        )
        assert index == subtask_index


def test_hash_codes_are_scrambled_as_flink_does() -> None:
    codes = [code % (1 << 32) for code, _ in VECTORS["murmurHash"]]
    expected = [scrambled for _, scrambled in VECTORS["murmurHash"]]

    assert [_java_hash.murmur(code) for code in codes] == expected
    assert _java_hash.murmur_array(np.array(codes, dtype=np.uint32)).tolist() == expected


@given(st.lists(st.integers(0, (1 << 32) - 1)))
def test_a_column_of_hash_codes_is_scrambled_as_one_is(codes: list[int]) -> None:
    scrambled = _java_hash.murmur_array(np.array(codes, dtype=np.uint32))

    assert scrambled.tolist() == [_java_hash.murmur(code) for code in codes]


def test_a_hash_code_that_is_scrambled_to_the_smallest_int_becomes_zero() -> None:
    # Found by running the scrambling backwards from -2^31, which has no absolute value in Java.
    code = 0x836F0755

    assert _java_hash.murmur(code) == 0
    assert _java_hash.murmur_array(np.array([code], dtype=np.uint32)).tolist() == [0]


@pytest.mark.parametrize(
    "vector", VECTORS["ranges"], ids=lambda v: f"{v['parallelism']}-of-{v['max_parallelism']}"
)
def test_ranges_are_those_of_flink(vector: dict[str, Any]) -> None:
    parallelism, max_parallelism = vector["parallelism"], vector["max_parallelism"]
    ranges = [
        key_group_range_of(
            subtask_index=index, parallelism=parallelism, max_parallelism=max_parallelism
        )
        for index in range(len(vector["ranges_inclusive"]))
    ]

    assert [[r.start, r.end] for r in ranges] == vector["ranges_inclusive"]


@pytest.mark.parametrize(
    "vector", VECTORS["default_max_parallelism"], ids=lambda v: str(v["parallelism"])
)
def test_default_max_parallelism_is_that_of_flink(vector: dict[str, Any]) -> None:
    assert default_max_parallelism(vector["parallelism"]) == vector["default_max_parallelism"]


CALLS: dict[str, Any] = {
    "computeDefaultMaxParallelism(0)": lambda: default_max_parallelism(0),
    "computeDefaultMaxParallelism(-1)": lambda: default_max_parallelism(-1),
    "computeDefaultMaxParallelism(32769)": lambda: default_max_parallelism(32769),
    "computeKeyGroupRangeForOperatorIndex(4,5,0)": lambda: key_group_range_of(
        subtask_index=0, parallelism=5, max_parallelism=4
    ),
    "assignToKeyGroup(null,5)": lambda: key_group_of(None, pa.string(), max_parallelism=5),
}


@pytest.mark.parametrize("vector", VECTORS["errors"], ids=lambda v: v["call"])
def test_errors_keep_the_words_of_flink(vector: dict[str, Any]) -> None:
    with pytest.raises(KeyGroupError) as raised:
        CALLS[vector["call"]]()

    assert vector["message"] in str(raised.value)


# Ranges.


parallelisms = st.integers(1, MAX_PARALLELISM_LIMIT).flatmap(
    lambda maximum: st.tuples(st.integers(1, min(maximum, 300)), st.just(maximum))
)


@given(parallelisms)
def test_ranges_cover_every_key_group_once(case: tuple[int, int]) -> None:
    parallelism, max_parallelism = case
    ranges = [
        key_group_range_of(
            subtask_index=i, parallelism=parallelism, max_parallelism=max_parallelism
        )
        for i in range(parallelism)
    ]

    assert ranges[0].start == 0
    assert ranges[-1].end == max_parallelism - 1
    assert all(left.end + 1 == right.start for left, right in itertools.pairwise(ranges))
    assert sum(map(len, ranges)) == max_parallelism


@given(parallelisms, st.data())
def test_a_key_group_is_owned_by_the_subtask_whose_range_has_it(
    case: tuple[int, int], data: st.DataObject
) -> None:
    parallelism, max_parallelism = case
    key_group = data.draw(st.integers(0, max_parallelism - 1))
    index = subtask_index_of(key_group, parallelism=parallelism, max_parallelism=max_parallelism)

    owned = key_group_range_of(
        subtask_index=index, parallelism=parallelism, max_parallelism=max_parallelism
    )
    assert key_group in owned


def test_a_range_is_a_collection_of_key_groups() -> None:
    key_groups = KeyGroupRange(3, 5)

    assert list(key_groups) == [3, 4, 5]
    assert len(key_groups) == 3
    assert 5 in key_groups
    assert np.uint16(5) in key_groups
    assert 6 not in key_groups
    assert "5" not in key_groups
    assert str(key_groups) == "3..5"
    assert pickle.loads(pickle.dumps(key_groups)) == key_groups


bounds = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted)


@given(bounds, bounds)
def test_an_intersection_has_what_both_ranges_have(left: list[int], right: list[int]) -> None:
    one, other = KeyGroupRange(*left), KeyGroupRange(*right)
    common = one.intersect(other)

    assert set(common or ()) == set(one) & set(other)
    assert common == other.intersect(one)


@pytest.mark.parametrize(
    ("start", "end"), [(-1, 3), (4, 3), (0, MAX_PARALLELISM_LIMIT), (0.0, 1), (False, True)]
)
def test_a_range_that_cannot_be_is_refused_at_birth(start: Any, end: Any) -> None:
    with pytest.raises(KeyGroupError, match="key-group range"):
        KeyGroupRange(start, end)


def test_an_index_out_of_bounds_is_refused() -> None:
    with pytest.raises(KeyGroupError, match=r"subtask index must be 0\.\.1, not 2"):
        key_group_range_of(subtask_index=2, parallelism=2, max_parallelism=8)
    with pytest.raises(KeyGroupError, match=r"key group must be 0\.\.7, not 8"):
        subtask_index_of(8, parallelism=2, max_parallelism=8)


@pytest.mark.parametrize("max_parallelism", [0, 32769, True, 1.5, None])
def test_a_max_parallelism_out_of_bounds_is_refused(max_parallelism: Any) -> None:
    with pytest.raises(KeyGroupError, match="Max parallelism"):
        check_parallelism(parallelism=1, max_parallelism=max_parallelism)
    with pytest.raises(KeyGroupError, match="Max parallelism"):
        key_grouper(pa.string(), max_parallelism=max_parallelism)
    with pytest.raises(KeyGroupError, match="Max parallelism"):
        key_groups_of(pa.array(["a"]), max_parallelism=max_parallelism)


# Columns against single keys.


def floats(width: Any) -> st.SearchStrategy[float]:
    return st.floats(width=width) | st.sampled_from([0.0, -0.0, math.nan, -math.inf])


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    most = 10**precision - 1
    exact = decimal.Context(prec=60)
    return st.integers(-most, most).map(lambda n: Decimal(n).scaleb(-scale, exact))


texts = st.text(st.characters(codec="utf-8"), max_size=40) | st.text("ab", max_size=400)
BOTH_ASSIGN: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int8": (pa.int8(), st.integers(-(1 << 7), (1 << 7) - 1)),
    "int16": (pa.int16(), st.integers(-(1 << 15), (1 << 15) - 1)),
    "int32": (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    "int64": (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    "bool": (pa.bool_(), st.booleans()),
    "float": (pa.float32(), floats(32)),
    "double": (pa.float64(), floats(64)),
    "string": (pa.string(), texts),
    "large_string": (pa.large_string(), texts),
    "binary": (pa.binary(), st.binary(max_size=400)),
    "large_binary": (pa.large_binary(), st.binary(max_size=40)),
}
SPARK_ASSIGNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us"), st.datetimes()),
    "timestamp_utc": (pa.timestamp("us", tz="UTC"), st.datetimes(timezones=st.just(dt.UTC))),
    "duration": (
        pa.duration("us"),
        st.timedeltas(dt.timedelta(days=-99999), dt.timedelta(days=99999)),
    ),
    "small_decimal": (pa.decimal128(18, 4), decimals(18, 4)),
    "big_decimal": (pa.decimal128(38, 10), decimals(38, 10) | decimals(11, 10)),
    "list": (pa.list_(pa.string()), st.lists(st.none() | texts, max_size=5)),
    "large_list": (
        pa.large_list(pa.list_(pa.int32())),
        st.lists(st.none() | st.lists(st.none() | st.integers(-9, 9), max_size=3), max_size=3),
    ),
}


def composites(
    leaves: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]],
) -> st.SearchStrategy[tuple[pa.DataType, list[Any]]]:
    """Draw a struct type and rows of it, with null fields and a struct within the struct."""

    def rows_for(names: list[str]) -> st.SearchStrategy[tuple[pa.DataType, list[Any]]]:
        chosen = [leaves[name] for name in names]
        inner_type = pa.struct([(f"i{i}", leaf) for i, (leaf, _) in enumerate(chosen[:2])])
        outer_type = pa.struct(
            [*((f"f{i}", leaf) for i, (leaf, _) in enumerate(chosen)), ("inner", inner_type)]
        )
        inner = st.fixed_dictionaries(
            {f"i{i}": st.none() | values for i, (_, values) in enumerate(chosen[:2])}
        )
        row = st.tuples(*(st.none() | values for _, values in chosen), st.none() | inner)
        return st.tuples(st.just(outer_type), st.lists(row, max_size=8))

    return st.lists(st.sampled_from(sorted(leaves)), min_size=1, max_size=4).flatmap(rows_for)


def check_column_against_keys(
    keys: list[Any], key_type: pa.DataType, *, max_parallelism: int, assigner: KeyGroupAssigner
) -> None:
    group_of = key_grouper(key_type, max_parallelism=max_parallelism, assigner=assigner)
    expected = [group_of(key) for key in keys]
    column = rows_of(keys, key_type)
    groups = key_groups_of(column, max_parallelism=max_parallelism, assigner=assigner)

    assert groups.dtype == np.uint16
    assert groups.tolist() == expected
    assert [group_of(key) for key in keys] == expected
    # A slice shares the buffers of its parent and begins within them.
    for cut in (slice(1, None), slice(2, 5)):
        part = column[cut]
        groups = key_groups_of(part, max_parallelism=max_parallelism, assigner=assigner)
        assert groups.tolist() == expected[cut]
    chunks = pa.chunked_array([column[:2], column[2:2], column[2:]], type=key_type)
    groups = key_groups_of(chunks, max_parallelism=max_parallelism, assigner=assigner)
    assert groups.tolist() == expected


max_parallelisms = st.sampled_from([1, 3, 100, 128, 32767, 32768])


@pytest.mark.parametrize("name", BOTH_ASSIGN)
@settings(max_examples=40)
@given(data=st.data(), max_parallelism=max_parallelisms)
def test_flink_assigns_a_column_as_its_keys(
    name: str, data: st.DataObject, max_parallelism: int
) -> None:
    key_type, values = BOTH_ASSIGN[name]
    keys = data.draw(st.lists(values, max_size=12))

    check_column_against_keys(keys, key_type, max_parallelism=max_parallelism, assigner=FLINK)


@pytest.mark.parametrize("name", [*BOTH_ASSIGN, *SPARK_ASSIGNS])
@settings(max_examples=40)
@given(data=st.data(), max_parallelism=max_parallelisms)
def test_xxhash64_assigns_a_column_as_its_keys(
    name: str, data: st.DataObject, max_parallelism: int
) -> None:
    key_type, values = (BOTH_ASSIGN | SPARK_ASSIGNS)[name]
    keys = data.draw(st.lists(values, max_size=12))

    check_column_against_keys(keys, key_type, max_parallelism=max_parallelism, assigner=XXHASH64)


@settings(max_examples=60)
@given(composites(BOTH_ASSIGN), max_parallelisms)
def test_flink_assigns_composite_keys_as_a_column(
    case: tuple[pa.DataType, list[Any]], max_parallelism: int
) -> None:
    key_type, keys = case

    check_column_against_keys(keys, key_type, max_parallelism=max_parallelism, assigner=FLINK)


@settings(max_examples=60)
@given(composites(BOTH_ASSIGN | SPARK_ASSIGNS), max_parallelisms)
def test_xxhash64_assigns_composite_keys_as_a_column(
    case: tuple[pa.DataType, list[Any]], max_parallelism: int
) -> None:
    key_type, keys = case

    check_column_against_keys(keys, key_type, max_parallelism=max_parallelism, assigner=XXHASH64)


def java_hash_of(text: str) -> int:
    code = 0
    units = text.encode("utf-16-le")
    for low, high in zip(units[::2], units[1::2], strict=True):
        code = (31 * code + (high << 8 | low)) % (1 << 32)
    return code


def many_texts() -> list[str]:
    """Return enough rows for several blocks: empty, short, long, beyond a block, and not ASCII."""
    texts = [f"user_{index}" for index in range(20_000)]
    texts[5:10] = ["", "", "x" * 40_000, "", "é" * 70_000]
    texts[3000:3003] = ["中文", "a😀b", "z" * 32_768]
    texts[15_000:15_300] = [f"{'ab' * (index % 150)}" for index in range(300)]
    return [*texts, ""]


def test_texts_of_all_lengths_hash_as_in_java() -> None:
    keys = many_texts()
    codes = _java_hash.hash_array(pa.array(keys)).tolist()

    assert codes == [java_hash_of(key) for key in keys]
    assert codes[9] == _java_hash.hasher(pa.string())(keys[9])


def test_bytes_of_all_lengths_hash_as_in_java() -> None:
    keys = [key.encode() for key in many_texts()]
    codes = _java_hash.hash_array(pa.array(keys, pa.binary())).tolist()

    assert codes == [_java_hash.hasher(pa.binary())(key) for key in keys]
    # java.util.Arrays.hashCode(new byte[] {}) and of {-1, 2}.
    signed = _java_hash.hash_array(pa.array([b"", b"\xff\x02"])).tolist()
    assert signed == [1, 31 * (31 - 1) + 2]


def test_texts_of_all_lengths_hash_as_xxh64() -> None:
    keys = [*many_texts(), *("q" * size for size in range(300))]
    hashes = _spark_hash.hash_array(pa.array(keys)).tolist()

    assert hashes == [xxh64_intdigest(key.encode(), 42) for key in keys]


def test_many_decimals_hash_as_one_does() -> None:
    edges = [
        sign * (1 << bits) + step for bits in range(126) for sign in (1, -1) for step in (0, -1)
    ]
    unscaled = [number for number in edges if abs(number) < 10**38]
    key_type = pa.decimal128(38, 0)
    hash_one = _spark_hash.hasher(key_type)
    hashes = _spark_hash.hash_array(pa.array([Decimal(n) for n in unscaled], key_type)).tolist()

    assert hashes == [hash_one(number, 42) for number in unscaled]


# Nulls.


@pytest.mark.parametrize("assigner", KeyGroupAssigner)
def test_a_null_key_is_refused(assigner: KeyGroupAssigner) -> None:
    with pytest.raises(KeyGroupError, match="Assigned key must not be null!"):
        key_group_of(None, pa.int32(), max_parallelism=8, assigner=assigner)
    with pytest.raises(KeyGroupError, match=r"must not be null! 1 of 3 keys are null"):
        key_groups_of(pa.array([1, None, 3]), max_parallelism=8, assigner=assigner)
    with pytest.raises(KeyGroupError, match="Assigned key must not be null!"):
        key_groups_of(pa.nulls(2), max_parallelism=8, assigner=assigner)


def test_a_null_outside_of_a_slice_is_no_null_key() -> None:
    column = pa.array([None, "a", "b", None])[1:3]

    expected = [key_group_of(key, pa.string(), max_parallelism=128) for key in "ab"]
    assert key_groups_of(column, max_parallelism=128).tolist() == expected


def test_a_null_field_hashes_as_zero_to_flink_and_leaves_the_seed_to_spark() -> None:
    key_type = pa.struct([("a", pa.int32()), ("b", pa.binary())])
    column = rows_of([(7, None)], key_type)

    assert _java_hash.hash_array(column).tolist() == [7 * 31]
    assert _spark_hash.hash_array(column).tolist() == [_spark_hash.hasher(pa.int32())(7, 42)]


def test_bytes_behind_a_null_do_not_matter() -> None:
    offsets = pa.py_buffer(np.array([0, 1, 3, 4], dtype=np.int32))
    broken = pa.py_buffer(b"a\xff\xfeb")
    texts = pa.Array.from_buffers(
        pa.string(), 3, [pa.py_buffer(b"\x05"), offsets, broken], null_count=1
    )

    assert _java_hash.hash_array(texts).tolist() == [97, 0, 98]
    with pytest.raises(KeyGroupError, match="not UTF-8"):
        _java_hash.hash_array(pa.Array.from_buffers(pa.string(), 3, [None, offsets, broken]))


@pytest.mark.parametrize("assigner", KeyGroupAssigner)
def test_no_keys_have_no_key_groups(assigner: KeyGroupAssigner) -> None:
    for keys in (pa.array([], pa.string()), pa.chunked_array([], pa.int64())):
        groups = key_groups_of(keys, max_parallelism=8, assigner=assigner)

        assert groups.tolist() == []
        assert groups.dtype == np.uint16


# Types and values that do not fit.


def test_an_int_key_needs_its_declared_width() -> None:
    assert key_group_of(-1, pa.int32(), max_parallelism=128) == 80
    assert key_group_of(-1, pa.int64(), max_parallelism=128) == 94


@pytest.mark.parametrize(
    ("key", "key_type"),
    [
        (128, pa.int8()),
        (1 << 63, pa.int64()),
        (True, pa.int32()),
        ("1", pa.int32()),
        (1.0, pa.int64()),
        (1, pa.bool_()),
        (b"a", pa.string()),
        ("\ud800", pa.string()),
        ("a", pa.binary()),
        (True, pa.float64()),
        (1e300, pa.float32()),
        ((1 << 53) + 1, pa.float64()),
        (1 << 2000, pa.float64()),
        ((1,), pa.struct([("a", pa.int32()), ("b", pa.int32())])),
        ({"a": 1, "c": 2}, pa.struct([("a", pa.int32()), ("b", pa.int32())])),
        ("ab", pa.struct([("a", pa.string()), ("b", pa.string())])),
    ],
    ids=str,
)
@pytest.mark.parametrize("assigner", KeyGroupAssigner)
def test_a_key_that_is_not_of_its_type_is_refused(
    key: Any, key_type: pa.DataType, assigner: KeyGroupAssigner
) -> None:
    with pytest.raises(KeyGroupError):
        key_group_of(key, key_type, max_parallelism=8, assigner=assigner)


@pytest.mark.parametrize(
    ("key", "key_type"),
    [
        (dt.datetime(2024, 1, 1), pa.date32()),
        (dt.date(2024, 1, 1), pa.timestamp("us")),
        (5, pa.duration("us")),
        (1.5, pa.decimal128(10, 2)),
        (Decimal("1.005"), pa.decimal128(10, 2)),
        (Decimal("1e8"), pa.decimal128(10, 2)),
        (Decimal("NaN"), pa.decimal128(10, 2)),
        (Decimal("sNaN"), pa.decimal128(10, 2)),
        (Decimal("Infinity"), pa.decimal128(10, 2)),
        ("ab", pa.list_(pa.string())),
    ],
    ids=str,
)
def test_a_key_that_is_not_of_its_spark_type_is_refused(key: Any, key_type: pa.DataType) -> None:
    with pytest.raises(KeyGroupError):
        key_group_of(key, key_type, max_parallelism=8, assigner=XXHASH64)


@pytest.mark.parametrize(
    ("key", "key_type", "same"),
    [
        (np.int32(7), pa.int64(), 7),
        (np.float32(0.5), pa.float64(), 0.5),
        (3, pa.float32(), 3.0),
        (np.True_, pa.bool_(), True),
        (bytearray(b"ab"), pa.binary(), b"ab"),
        ({"b": 2, "a": 1}, pa.struct([("a", pa.int32()), ("b", pa.int32())]), (1, 2)),
        ([1, 2], pa.struct([("a", pa.int32()), ("b", pa.int32())]), (1, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("assigner", KeyGroupAssigner)
def test_equal_keys_of_other_classes_have_the_same_key_group(
    key: Any, key_type: pa.DataType, same: Any, assigner: KeyGroupAssigner
) -> None:
    group_of = key_grouper(key_type, max_parallelism=32768, assigner=assigner)

    assert group_of(key) == group_of(same)


def test_zero_and_minus_zero_differ_to_flink_and_agree_to_spark() -> None:
    group_of = key_grouper(pa.float64(), max_parallelism=32768)
    spark_group_of = key_grouper(pa.float64(), max_parallelism=32768, assigner=XXHASH64)

    assert group_of(0.0) != group_of(-0.0)
    assert spark_group_of(0.0) == spark_group_of(-0.0)


FLINK_REFUSES = [pa.date32(), pa.uint32(), pa.list_(pa.int32()), pa.decimal128(9, 2), pa.null()]
SPARK_REFUSES = [pa.uint8(), pa.float16(), pa.timestamp("ns"), pa.decimal256(40, 2), pa.null()]


@pytest.mark.parametrize(
    ("key_type", "assigner"),
    [*((t, FLINK) for t in FLINK_REFUSES), *((t, XXHASH64) for t in SPARK_REFUSES)],
    ids=str,
)
def test_a_type_without_a_key_group_is_refused_even_without_keys(
    key_type: pa.DataType, assigner: KeyGroupAssigner
) -> None:
    for refused in (key_type, pa.struct([("a", key_type)])):
        with pytest.raises(KeyGroupError, match=r"has no key group under the assigner"):
            key_grouper(refused, max_parallelism=8, assigner=assigner)
        with pytest.raises(KeyGroupError, match=r"has no key group under the assigner"):
            key_groups_of(pa.array([], refused), max_parallelism=8, assigner=assigner)


def test_maps_are_refused_because_spark_does_not_hash_them() -> None:
    for key_type in (pa.map_(pa.string(), pa.int32()), pa.list_(pa.map_(pa.string(), pa.int32()))):
        with pytest.raises(KeyGroupError, match="Spark does not hash maps"):
            key_grouper(key_type, max_parallelism=8, assigner=XXHASH64)
        with pytest.raises(KeyGroupError, match="Spark does not hash maps"):
            key_groups_of(pa.array([[]], key_type), max_parallelism=8, assigner=XXHASH64)
