from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from flowstate.checkpoint import (
    CheckpointStorage,
    FileHandle,
    KeyedSection,
    ListSection,
    StateFileReader,
    encode_state_file,
    write_state_file,
)
from flowstate.checkpoint.writing import SEGMENT_BYTES, SEGMENT_BYTES_MAX
from flowstate.errors import (
    FormatVersionError,
    SnapshotCorruptError,
    SnapshotMissingError,
    StateTypeError,
    UnsafeNameError,
)
from flowstate.key_groups import KeyGroupRange
from flowstate.rows import StateKind, StateRows, row_schema
from flowstate.storage.filesystems import open_file_system

from .cases import (
    ALL,
    DEEP,
    LAYOUTS,
    PAIR,
    SpyFileSystem,
    inline_handle,
    inline_handle_of,
    int_rows,
    rows_of,
    values_of,
)

PATH = "shared/1-run-0.arrow"


def reader_of(spy: SpyFileSystem, *states: StateRows, inline_limit: int = 0) -> StateFileReader:
    sections = [KeyedSection.of(rows) for rows in states]
    return StateFileReader(spy, write_state_file(spy, PATH, sections, inline_limit=inline_limit))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inline_limit", [0, 1 << 20], ids=["file", "inline"])
def test_every_layout_comes_back_as_it_was(
    spy: SpyFileSystem, layout: str, inline_limit: int
) -> None:
    rows = LAYOUTS[layout]

    found = reader_of(spy, rows, inline_limit=inline_limit).read_rows(rows.name, ALL)

    assert found.kind is rows.kind
    assert found.table.equals(rows.table, check_metadata=True)


def test_all_states_of_a_file_come_with_one_read_after_the_footer(spy: SpyFileSystem) -> None:
    big = int_rows(np.random.default_rng(1).permutation(100_000))
    handle = reader_of(spy, *LAYOUTS.values(), big).handle
    reader = StateFileReader(spy, handle)

    found = reader.read_rows_of(ALL)

    assert spy.reads == 2
    assert {*found} == {rows.name for rows in LAYOUTS.values()} | {"count"}
    assert found["map"].table.equals(LAYOUTS["map of nested values"].table)
    assert reader.read_rows_of(ALL, ["map", "gone"]).keys() == {"map"}


def test_a_small_file_is_read_at_once(spy: SpyFileSystem) -> None:
    reader = StateFileReader(spy, reader_of(spy, *LAYOUTS.values()).handle)

    reader.read_rows_of(ALL)

    assert spy.reads == 1


def test_rows_outside_of_the_range_are_left_out(spy: SpyFileSystem) -> None:
    reader = reader_of(spy, int_rows(range(1000)))

    for key_groups in (KeyGroupRange(0, 0), KeyGroupRange(17, 40), KeyGroupRange(127, 127)):
        expected = {key: key for key in range(1000) if key % 128 in key_groups}
        assert values_of(reader.read_rows("count", key_groups)) == expected


@pytest.mark.parametrize("start", [0, 48, 53, 120])
def test_a_sixteenth_of_the_key_groups_costs_a_sixteenth_of_the_bytes(
    spy: SpyFileSystem, start: int
) -> None:
    rng = np.random.default_rng(5)
    handle = reader_of(spy, int_rows(range(1_024_000), rng.integers(0, 1 << 30, 1_024_000))).handle
    reader = StateFileReader(spy, handle)

    rows = reader.read_rows("count", KeyGroupRange(start, start + 7))

    assert rows.table.num_rows == 64_000
    footer_bytes = handle.footer_range[1]
    assert spy.bytes_read - footer_bytes <= 1.1 / 16 * (handle.size - footer_bytes)
    assert spy.reads == 2


def test_segments_hold_whole_key_groups_or_pieces_of_a_big_one(spy: SpyFileSystem) -> None:
    wide = int_rows([*range(50_000), *(1 + 128 * n for n in range(200_000))])
    segments = reader_of(spy, wide).sections["count"].segments

    for before, after in pairwise(segments):
        assert before.last < after.first or before.first == before.last == after.first
    several = [segment for segment in segments if segment.first != segment.last]
    assert several
    assert all(segment.raw_bytes <= SEGMENT_BYTES * 1.1 for segment in several)
    assert all(segment.raw_bytes <= SEGMENT_BYTES_MAX * 1.1 for segment in segments)
    assert sum(segment.first == 1 for segment in segments) > 1


def test_elements_are_read_by_index(spy: SpyFileSystem) -> None:
    values = pa.chunked_array([pa.array([{"a": f"{n:>50}", "b": n}], PAIR) for n in range(10)])
    many = pa.array(range(200_000))
    sections = [
        ListSection.of("pairs", values),
        ListSection("many", pa.int64(), [many, many.slice(0, 5)]),
        ListSection.of("none", pa.array([], DEEP)),
    ]
    reader = StateFileReader(spy, write_state_file(spy, PATH, sections))

    assert reader.read_elements("pairs", 0, 10).equals(values)
    assert reader.read_elements("pairs", 3, 3).to_pylist() == []
    assert reader.read_elements("many", 99_999, 100_002).to_pylist() == [99_999, 100_000, 100_001]
    assert reader.read_elements("many", 199_999, 200_002).to_pylist() == [199_999, 0, 1]
    assert reader.read_elements("none", 0, 0).type == DEEP
    with pytest.raises(IndexError):
        reader.read_elements("pairs", 0, 11)


def test_few_elements_cost_few_bytes(spy: SpyFileSystem) -> None:
    rng = np.random.default_rng(2)
    section = ListSection.of("many", pa.array(rng.integers(0, 1 << 60, 1_000_000)))
    handle = write_state_file(spy, PATH, [section])

    StateFileReader(spy, handle).read_elements("many", 500_000, 500_010)

    assert spy.bytes_read <= handle.footer_range[1] + 2 * SEGMENT_BYTES


def test_any_arrow_reader_reads_a_section() -> None:
    rows = int_rows(range(100_000))
    data = encode_state_file([ListSection.of("first", pa.array([1])), KeyedSection.of(rows)])
    handle = inline_handle_of(data, rows=100_001)
    reader = StateFileReader(open_file_system("memory://unused"), handle)

    offset = reader.sections["count"].schema_offset

    assert pa.ipc.open_stream(data[offset:]).read_all().equals(reader.read_rows("count", ALL).table)


def test_equal_rows_have_equal_digests(spy: SpyFileSystem) -> None:
    # The same rows in other chunks and in another order of key groups.
    rows = int_rows(range(10_000))
    pieces = pa.concat_tables([rows.table.slice(0, 128), rows.table.slice(128)])

    first = reader_of(spy, rows).handle
    second = inline_handle(StateRows(rows.name, rows.kind, pieces))

    assert first.digest == second.digest
    assert first.digest != inline_handle(int_rows(range(10_000), [1] * 10_000)).digest


def test_unsorted_and_repeated_sections_are_refused() -> None:
    schema = int_rows([]).table.schema
    parts = [int_rows([5]).table, int_rows([4]).table]

    with pytest.raises(ValueError, match="not sorted"):
        encode_state_file([KeyedSection("count", StateKind.VALUE, schema, parts)])
    with pytest.raises(ValueError, match="one name"):
        encode_state_file([KeyedSection.of(int_rows([1])), KeyedSection.of(int_rows([2]))])


@pytest.mark.parametrize(
    "kind",
    [pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.list_(pa.list_view(pa.int8()))],
    ids=str,
)
def test_types_that_cannot_be_cut_are_refused(kind: pa.DataType) -> None:
    with pytest.raises(StateTypeError, match="plain type"):
        encode_state_file([ListSection.of("odd", pa.array([], kind))])


def test_a_field_may_be_named_like_a_refused_type() -> None:
    named = pa.struct([("list_view", pa.string())])

    assert encode_state_file([ListSection.of("odd", pa.array([], named))])


def test_a_failed_write_leaves_no_file(storage: CheckpointStorage) -> None:
    def failing() -> Iterator[pa.Table]:
        yield int_rows(range(100)).table
        raise RuntimeError("the source failed")

    schema = int_rows([]).table.schema
    section = KeyedSection("count", StateKind.VALUE, schema, failing())
    with pytest.raises(RuntimeError, match="the source failed"):
        storage.write_file([section], batch_id=0, run="run")

    assert storage.file_system.list("") == []


def test_what_is_small_goes_into_the_handle(storage: CheckpointStorage) -> None:
    sections = [KeyedSection.of(int_rows(range(10)))]
    size = len(encode_state_file(sections))

    inline = storage.write_file(sections, batch_id=0, run="run", inline_limit=size)
    stored = storage.write_file(sections, batch_id=0, run="run", inline_limit=size - 1)

    assert inline.path is None
    assert stored.path is not None
    assert [entry.path for entry in storage.file_system.list("")] == [stored.path]
    assert inline.digest == stored.digest
    assert storage.reader(inline).read_rows("count", ALL).table.num_rows == 10


# Damage

SMALL = (LAYOUTS["map of nested values"], int_rows(range(3)), LAYOUTS["empty"])


def read_everything(reader: StateFileReader) -> list[pa.Table]:
    return [rows.table for rows in reader.read_rows_of(ALL).values()]


def test_every_flipped_byte_is_found_or_is_not_used(tmp_path: Path) -> None:
    file_system = open_file_system(tmp_path)
    sections = [KeyedSection.of(rows) for rows in SMALL]
    handle = write_state_file(file_system, PATH, sections)
    data = (tmp_path / PATH).read_bytes()
    expected = [rows.table for rows in SMALL]

    unused = 0
    for index in range(len(data)):
        broken = bytearray(data)
        broken[index] ^= 1 << index % 8
        (tmp_path / PATH).write_bytes(broken)
        try:
            found = read_everything(StateFileReader(file_system, handle))
        except SnapshotCorruptError:
            continue
        unused += 1
        assert all(a.equals(b) for a, b in zip(found, expected, strict=True))
    # Only the end marks of the three sections are not needed to read rows.
    assert unused == 3 * 8


def test_every_truncation_is_found(tmp_path: Path) -> None:
    file_system = open_file_system(tmp_path)
    handle = write_state_file(file_system, PATH, [KeyedSection.of(rows) for rows in SMALL])
    data = (tmp_path / PATH).read_bytes()

    for length in range(len(data)):
        (tmp_path / PATH).write_bytes(data[:length])
        with pytest.raises(SnapshotCorruptError):
            read_everything(StateFileReader(file_system, handle))


@pytest.mark.parametrize("where", ["segment", "schema", "footer", "tail"])
def test_damage_of_a_big_file_is_found(tmp_path: Path, where: str) -> None:
    file_system = open_file_system(tmp_path)
    handle = write_state_file(file_system, PATH, [KeyedSection.of(int_rows(range(300_000)))])
    section = StateFileReader(file_system, handle).sections["count"]
    offset = {
        "segment": section.segments[2].offset + section.segments[2].length // 2,
        "schema": section.schema_offset + 20,
        "footer": handle.footer_range[0] + 100,
        "tail": handle.size - 1,
    }[where]
    data = bytearray((tmp_path / PATH).read_bytes())
    data[offset] ^= 1
    (tmp_path / PATH).write_bytes(data)

    with pytest.raises(SnapshotCorruptError):
        StateFileReader(file_system, handle).read_rows("count", ALL)


def test_a_missing_file_says_so(spy: SpyFileSystem) -> None:
    handle = reader_of(spy, int_rows([1])).handle
    spy.delete([PATH])

    with pytest.raises(SnapshotMissingError):
        StateFileReader(spy, handle).read_rows("count", ALL)


def test_a_damaged_inline_state_is_found() -> None:
    handle = inline_handle(*SMALL)
    assert handle.inline is not None
    file_system = open_file_system("memory://unused")
    expected = [rows.table for rows in SMALL]

    for index in range(handle.size):
        broken = bytearray(handle.inline)
        broken[index] ^= 0x10
        changed = msgspec.structs.replace(handle, inline=bytes(broken))
        try:
            found = read_everything(StateFileReader(file_system, changed))
        except SnapshotCorruptError:
            continue
        assert all(a.equals(b) for a, b in zip(found, expected, strict=True))


def test_a_newer_format_is_refused_with_the_version_that_reads_it() -> None:
    handle = inline_handle(int_rows([1]))
    assert handle.inline is not None
    data = handle.inline.replace(b'{"format":1,"reader":"0.1"', b'{"format":2,"reader":"9.7"')
    newer = inline_handle_of(data, rows=1)

    with pytest.raises(FormatVersionError, match=r"flowspark>=9\.7"):
        StateFileReader(open_file_system("memory://unused"), newer).read_rows("count", ALL)


# Handles


@pytest.mark.parametrize(
    "path",
    ["../x", "shared/../../x", "/shared/x", "shared//x", "other/x", "shared", "chk-1/_metadata"],
)
def test_a_handle_does_not_lead_out_of_the_shared_folder(path: str) -> None:
    handle = msgspec.structs.replace(inline_handle(int_rows([1])), inline=None, path=PATH)
    tampered = msgspec.json.encode(handle).replace(PATH.encode(), path.encode())

    with pytest.raises(UnsafeNameError):
        msgspec.structs.replace(handle, path=path)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(tampered, type=FileHandle)


def test_a_handle_is_at_a_path_or_inline() -> None:
    handle = inline_handle(int_rows([1]))

    with pytest.raises(ValueError, match="never both"):
        msgspec.structs.replace(handle, path=PATH)
    with pytest.raises(ValueError, match="neither"):
        msgspec.structs.replace(handle, inline=None)
    with pytest.raises(ValueError, match="has size"):
        msgspec.structs.replace(handle, inline=b"short")


def test_a_row_set_with_an_empty_first_part_is_written() -> None:
    rows = rows_of("s", StateKind.VALUE, row_schema(key=pa.int64()), [(1, 0, 5)])
    parts = [rows.table.slice(0, 0), rows.table]
    data = encode_state_file([KeyedSection("s", rows.kind, rows.table.schema, parts)])
    reader = StateFileReader(open_file_system("memory://x"), inline_handle_of(data, rows=1))

    assert reader.read_rows("s", ALL).table.equals(rows.table)


@pytest.mark.parametrize("known", [True, False], ids=["size-known", "size-unknown"])
def test_long_lists_have_larger_segments_that_are_small_beside_a_share(
    spy: SpyFileSystem, known: bool
) -> None:
    pieces = [pa.array(range(start, start + 50_000)) for start in range(0, 1_000_000, 50_000)]
    total = sum(piece.nbytes for piece in pieces)
    section = ListSection("list", pa.int64(), iter(pieces), total if known else 0)
    reader = StateFileReader(spy, write_state_file(spy, PATH, [section]))
    segments = reader.sections["list"].segments

    assert max(segment.raw_bytes for segment in segments) <= total / 32
    assert len(segments) <= (160 if known else 320)
    assert reader.read_elements("list", 49_990, 50_010).to_pylist() == [*range(49_990, 50_010)]
