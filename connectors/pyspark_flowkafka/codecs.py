"""The five codecs of Kafka's record batches, without any package beyond pyarrow.

Everything read here comes from the network, so the size of what comes out is bounded, and whatever
a decoder raises becomes ``CodecError``.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum

import pyarrow as pa

DECOMPRESSED_BYTES_MAX = 1 << 30
"""One record batch may not unpack to more: Arrow's columns are addressed with 31 bits."""

_CHUNK_BYTES = 1 << 20
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
# What Java's snappy library writes in front of its blocks; others send one block without it.
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
_LENGTH = struct.Struct(">i")


class Codec(IntEnum):
    """The codec in the lowest three bits of a batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


class CodecError(ValueError):
    """What was compressed cannot be unpacked."""


def decompress(codec: int, data: bytes) -> bytes:
    """Return what a batch's records were before they were compressed."""
    try:
        match codec:
            case Codec.NONE:
                return data
            case Codec.GZIP:
                return _gunzip(data)
            case Codec.SNAPPY:
                return _unsnappy(data)
            case Codec.LZ4 | Codec.ZSTD:
                return _unstream(data, Codec(codec).name.lower())
    except (OSError, zlib.error, struct.error, pa.ArrowException) as error:
        raise CodecError(f"{Codec(codec).name.lower()}: {error}") from None
    raise CodecError(f"there is no codec {codec}")


def _gunzip(data: bytes) -> bytes:
    unpacked = bytearray()
    while data:
        member = zlib.decompressobj(_GZIP_OR_ZLIB)
        unpacked += member.decompress(data, DECOMPRESSED_BYTES_MAX + 1 - len(unpacked))
        _check_size(len(unpacked))
        if not member.eof:
            raise CodecError("gzip: the data ends early")
        data = member.unused_data
    return bytes(unpacked)


def _unstream(data: bytes, name: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    with pa.CompressedInputStream(pa.BufferReader(data), name) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            _check_size(size)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _unsnappy(data: bytes) -> bytes:
    if not data.startswith(_XERIAL_MAGIC):
        return _unsnappy_block(data)
    blocks = []
    position, size = _XERIAL_HEADER_BYTES, 0
    while position < len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        block = data[position : position + length]
        if length <= 0 or len(block) != length:
            raise CodecError("snappy: a block ends early")
        blocks.append(_unsnappy_block(block))
        size += len(blocks[-1])
        _check_size(size)
        position += length
    return b"".join(blocks)


def _unsnappy_block(block: bytes) -> bytes:
    size = shift = 0
    for byte in block[:5]:
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    else:
        raise CodecError("snappy: the size of a block is not a number")
    _check_size(size)
    unpacked: bytes = pa.Codec("snappy").decompress(block, size, asbytes=True)
    return unpacked


def _check_size(size: int) -> None:
    if size > DECOMPRESSED_BYTES_MAX:
        raise CodecError(f"a batch unpacks to more than {DECOMPRESSED_BYTES_MAX} bytes")
