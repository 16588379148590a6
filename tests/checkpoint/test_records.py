from __future__ import annotations

import json
import pickle
import string
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstate.checkpoint import (
    LINEAGE_MAX,
    CheckpointRecord,
    OperatorHandle,
    OperatorStateMeta,
    SubtaskSnapshot,
    decode_name,
    decode_record,
    decode_snapshot,
    encode_name,
    encode_record,
    encode_snapshot,
)
from flowstate.checkpoint.files import digest_of
from flowstate.checkpoint.names import NAME_LENGTH_MAX, checkpoint_of_url
from flowstate.errors import (
    FormatVersionError,
    SnapshotCorruptError,
    SnapshotError,
    UnsafeNameError,
)
from flowstate.key_groups import KeyGroupRange

from .cases import ALL, inline_handle, int_rows, keyed_handle, record_of

FILE = inline_handle(int_rows([1, 2]))
STORED = msgspec.structs.replace(FILE, inline=None, path="shared/1-run-0.arrow")


def full_record() -> CheckpointRecord:
    record = record_of(
        7,
        FILE,
        STORED,
        parent=record_of(6),
        parallelism=2,
        key_type="base64",
        operator_states={"offsets": {"kind": "list"}},
        attributes={"watermark": None, "nested": [1, {"é": 1.5}]},
    )
    first = msgspec.structs.replace(
        record.subtasks[0],
        operator=(OperatorHandle(file=STORED, states={"offsets": OperatorStateMeta("union", 3)}),),
        lineage=((5, "a"), (6, "b")),
        attributes={"timer": 12},
    )
    return msgspec.structs.replace(record, subtasks=(first, record.subtasks[1]))


def sealed(payload: dict[str, Any]) -> bytes:
    """Store a document as if this library had made it."""
    encoded = msgspec.json.encode(payload)
    envelope = {
        "format": 1,
        "reader": "0.1",
        "checksum": digest_of(encoded),
        "record": msgspec.Raw(encoded),
    }
    return msgspec.json.encode(envelope)


def test_a_record_comes_back_as_it_was() -> None:
    record = full_record()

    found = decode_record(encode_record(record), "chk-7/_metadata")

    assert found == record
    assert found.digest == record.digest
    assert json.loads(encode_record(record))["checksum"] == record.digest
    assert list(found.files) == ["shared/1-run-0.arrow"]
    assert pickle.loads(pickle.dumps(found)).digest == record.digest


def test_a_snapshot_comes_back_as_it_was() -> None:
    snapshot = full_record().subtasks[0]

    assert decode_snapshot(encode_snapshot(snapshot), "part-0") == snapshot


def test_a_changed_record_has_another_digest() -> None:
    record = full_record()
    assert record.digest

    assert msgspec.structs.replace(record, run="other").digest != record.digest


def test_every_flipped_byte_of_a_record_is_found() -> None:
    data = encode_record(full_record())

    for index in range(len(data)):
        for bit in (1, 0x20):
            broken = bytearray(data)
            broken[index] ^= bit
            with pytest.raises((SnapshotCorruptError, FormatVersionError)):
                decode_record(bytes(broken), "chk-7/_metadata")


def test_every_truncation_of_a_record_is_found() -> None:
    data = encode_record(full_record())

    for length in range(len(data)):
        with pytest.raises(SnapshotCorruptError):
            decode_record(data[:length], "chk-7/_metadata")
    with pytest.raises(SnapshotCorruptError):
        decode_record(data + b" ", "chk-7/_metadata")


@pytest.mark.parametrize(
    "data",
    [b'{"format":2}', b'{"format":2,"reader":"3.1","entirely":["different"]}'],
    ids=["bare", "with a reader"],
)
def test_a_newer_format_is_refused_with_what_to_install(data: bytes) -> None:
    with pytest.raises(FormatVersionError, match=r"version 2.* Install (flowspark>=3\.1|the flow)"):
        decode_record(data, "chk-7/_metadata")


def test_a_record_is_not_a_snapshot() -> None:
    with pytest.raises(SnapshotCorruptError):
        decode_snapshot(encode_record(full_record()), "part-0")


@pytest.mark.parametrize("path", ["../../secret", "/etc/passwd", "chk-1/_metadata", "shared/../x"])
def test_a_record_that_leads_out_of_its_root_is_refused(path: str) -> None:
    payload = json.loads(encode_record(full_record()))["record"]
    payload["subtasks"][0]["operator"][0]["file"]["path"] = path

    with pytest.raises(UnsafeNameError):
        decode_record(sealed(payload), "chk-7/_metadata")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint_id": 0}, "begin with 1"),
        ({"parent_id": 7, "parent_digest": "d"}, "cannot have the parent"),
        ({"parent_digest": None}, "or not at all"),
        ({"batch_id": -1}, "no batch -1"),
        ({"parallelism": 3}, "needs the subtasks 0 to 2"),
        ({"max_parallelism": 64}, "the last one is 63"),
        ({"max_parallelism": 129}, "the last one is 128"),
        ({"max_parallelism": 1}, "must not be smaller"),
        ({"unknown": 1}, "unknown"),
        ({"assigner": "md5"}, "assigner"),
    ],
    ids=str,
)
def test_a_record_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    payload = {**json.loads(encode_record(full_record()))["record"], **change}

    with pytest.raises(SnapshotError, match=message):
        decode_record(sealed(payload), "chk-7/_metadata")


def test_key_groups_are_owned_once_and_in_order() -> None:
    first, second = full_record().subtasks

    for subtasks in (
        (first, msgspec.structs.replace(second, key_groups=KeyGroupRange(63, 127))),
        (first, msgspec.structs.replace(second, key_groups=KeyGroupRange(65, 127))),
        (first, msgspec.structs.replace(second, key_groups=None)),
    ):
        with pytest.raises(ValueError, match="own each key group once"):
            record_of(1, parallelism=2, subtasks=subtasks)


def test_an_operator_without_keyed_state_needs_no_key_groups() -> None:
    subtask = SubtaskSnapshot(subtask_index=0, digest="d")

    assert record_of(1, keyed_states={}, subtasks=(subtask,)).files == {}
    with pytest.raises(ValueError, match="own each key group once"):
        record_of(1, subtasks=(subtask,))


def snapshot(**fields: Any) -> SubtaskSnapshot:
    return SubtaskSnapshot(**{"subtask_index": 0, "digest": "d", "key_groups": ALL, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"subtask_index": -1}, "no subtask -1"),
        ({"lineage": ((1, "d"),) * 2}, "from older"),
        ({"lineage": tuple((n, "d") for n in range(LINEAGE_MAX + 1))}, "at most 16"),
        ({"keyed": (keyed_handle(FILE, last=2), keyed_handle(FILE))}, "oldest to the newest"),
        ({"keyed": (keyed_handle(FILE),), "key_groups": None}, "owns None"),
        ({"keyed": (keyed_handle(FILE),), "key_groups": KeyGroupRange(0, 9)}, r"owns 0\.\.9"),
    ],
    ids=["index", "order", "length", "handles", "none", "range"],
)
def test_a_snapshot_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        snapshot(**fields)


def test_a_handle_from_the_future_is_refused() -> None:
    subtask = snapshot(keyed=(keyed_handle(FILE, last=9),))

    with pytest.raises(ValueError, match="newer than the checkpoint"):
        record_of(8, subtasks=(subtask,))
    with pytest.raises(ValueError, match="cannot be"):
        keyed_handle(FILE, first=3, last=2)


# Names

ALPHABET = set(string.ascii_letters + string.digits + "._-")


@given(st.text(min_size=1, max_size=60))
def test_names_keep_to_the_alphabet_and_can_be_decoded(name: str) -> None:
    encoded = encode_name(name)

    assert set(encoded) <= ALPHABET
    assert encoded not in {".", ".."}
    assert not encoded.startswith(".")
    assert len(encoded) <= NAME_LENGTH_MAX
    if "_FF" not in encoded:
        assert decode_name(encoded) == name


@given(st.text("_.F0aA-é", min_size=1, max_size=8), st.text("_.F0aA-é", min_size=1, max_size=8))
def test_different_names_are_encoded_differently(one: str, other: str) -> None:
    assert (encode_name(one) == encode_name(other)) == (one == other)


def test_usual_names_stay_readable() -> None:
    assert encode_name("word_count-1.sum") == "word_count-1.sum"
    assert encode_name("a/b") == "a_2Fb"
    assert encode_name("..") == "_2E."
    assert encode_name(".tmp-x") == "_2Etmp-x"
    assert encode_name("x_5F") == "x_5F5F"


def test_long_names_are_cut_but_stay_different() -> None:
    one, other = (encode_name("x" * 500 + end) for end in "ab")

    assert len(one) == len(other) == NAME_LENGTH_MAX
    assert one != other
    with pytest.raises(UnsafeNameError, match="shortened"):
        decode_name(one)


@pytest.mark.parametrize("name", ["", "\ud800"], ids=["empty", "lone surrogate"])
def test_names_that_are_no_text_are_refused(name: str) -> None:
    with pytest.raises(UnsafeNameError):
        encode_name(name)


@pytest.mark.parametrize(
    ("url", "root", "checkpoint_id"),
    [
        ("s3://bucket/op/chk-12", "s3://bucket/op", 12),
        ("/state/op/chk-3/", "/state/op", 3),
        ("/state/op/chk-3/_metadata", "/state/op", 3),
        ("chk-3", ".", 3),
        ("/chk-3", "/", 3),
        ("/state/op", "/state/op", None),
        ("/state/chk-x", "/state/chk-x", None),
        ("/state/chk-03", "/state/chk-03", None),
    ],
)
def test_the_url_of_a_checkpoint_is_split(url: str, root: str, checkpoint_id: int | None) -> None:
    assert checkpoint_of_url(url) == (root, checkpoint_id)
