"""Unpacking: what Java and Python producers write, and what nobody should."""

from __future__ import annotations

import contextlib
import gzip
import random
import struct

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_flowkafka import codecs
from pyspark_flowkafka.codecs import Codec, CodecError, decompress

TEXT = b"to be or not to be, that is the question; " * 5000


def xerial(*blocks: bytes) -> bytes:
    packed = [pa.Codec("snappy").compress(block, asbytes=True) for block in blocks]
    header = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
    return header + b"".join(struct.pack(">i", len(one)) + one for one in packed)


def packed(codec: Codec, data: bytes) -> bytes:
    match codec:
        case Codec.NONE:
            return data
        case Codec.GZIP:
            return gzip.compress(data)
        case Codec.SNAPPY:
            return xerial(data[:32768], data[32768:]) if len(data) > 32768 else xerial(data)
    stream: bytes = pa.Codec(codec.name.lower()).compress(data, asbytes=True)
    return stream


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("size", [0, 1, 100, 100_000])
def test_what_was_packed_is_unpacked(codec: Codec, size: int) -> None:
    assert decompress(codec, packed(codec, TEXT[:size])) == TEXT[:size]


def test_a_bare_snappy_block_is_understood() -> None:
    assert decompress(2, pa.Codec("snappy").compress(TEXT, asbytes=True)) == TEXT


def test_several_gzip_members_are_one_text() -> None:
    assert decompress(1, gzip.compress(b"a") + gzip.compress(b"b")) == b"ab"


def test_a_stream_without_its_size_is_unpacked() -> None:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(TEXT)

    assert decompress(4, sink.getvalue().to_pybytes()) == TEXT


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_what_unpacks_to_too_much_is_refused(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "DECOMPRESSED_BYTES_MAX", 100_000)

    with pytest.raises(CodecError, match="more than 100000"):
        decompress(codec, packed(codec, bytes(200_001)))


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_what_is_cut_off_is_an_error_or_shorter(codec: Codec) -> None:
    data = packed(codec, random.Random(1).randbytes(2000))
    for size in range(0, len(data) - 1, 37):
        try:
            found = decompress(codec, data[:size])
        except CodecError:
            continue
        assert len(found) < 2000


@pytest.mark.parametrize("codec", [5, 6, 7])
def test_an_unknown_codec_is_named(codec: int) -> None:
    with pytest.raises(CodecError, match=f"no codec {codec}"):
        decompress(codec, b"x")


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.binary(max_size=200))
def test_noise_ends_in_an_answer(codec: int, noise: bytes) -> None:
    with contextlib.suppress(CodecError):
        assert isinstance(decompress(codec, noise), bytes)
