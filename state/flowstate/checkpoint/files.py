"""State files: how they are laid out, and the handles by which they are found.

::

    section | section | ... | footer (JSON) | tail (length of the footer, magic)

A section is a complete Arrow IPC stream, so any Arrow reader can read it by itself. Its record
batches are the *segments*, the units that are read and checked. There are two types of section:

- keyed: the rows of one keyed state, sorted by key group. A segment holds whole key groups, or a
  piece of one big key group.
- list: the elements of one operator state, in the only column ``value``.

The footer has the place and the checksum of each segment. The handle has those of the footer, so
whoever holds a handle can tell whether a single byte of what it reads is not what was written.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import msgspec
import xxhash

from flowstate.errors import FormatVersionError, SnapshotCorruptError, UnsafeNameError
from flowstate.rows import StateKind
from flowstate.storage._port import check_path

__all__ = [
    "END_OF_STREAM",
    "FILE_FORMAT",
    "SHARED_FOLDER",
    "TAIL_BYTES",
    "FileHandle",
    "Footer",
    "Section",
    "SectionType",
    "Segment",
    "checksum_of",
    "decode_footer",
    "digest_of",
    "encode_footer",
    "handle_of",
    "unreadable_format",
]

FILE_FORMAT = 1
FIRST_READER = "0.1"
"""The first version of the library that reads the format; written so that older ones can say it."""
SHARED_FOLDER = "shared"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""The end of each section, as Arrow writes it."""

_MAGIC = b"FLOWSTA1"
_TAIL = struct.Struct("<Q8s")
TAIL_BYTES = _TAIL.size


class SectionType(StrEnum):
    """What a section holds."""

    KEYED = "keyed"
    LIST = "list"


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """One record batch of a section. An array in JSON, because there may be thousands."""

    first: int
    """The first key group, or the index of the first element."""
    last: int
    """The last key group, or the index of the last element; it belongs to the segment."""
    offset: int
    length: int
    rows: int
    raw_bytes: int
    """What the batch takes uncompressed: how much memory a reader will need."""
    checksum: str

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last or min(self.offset, self.length - 1, self.rows - 1) < 0:
            raise ValueError(f"{self} cannot be")


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One section of a file."""

    name: str
    type: SectionType
    kind: StateKind | None
    """The kind of a keyed state."""
    schema_offset: int
    schema_length: int
    schema_checksum: str
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        # Readers look segments up by bisection. A big key group may go on in the next segment.
        if any(after.first < before.last for before, after in pairwise(self.segments)):
            raise ValueError(f"the segments of {self.name!r} are not sorted")

    @property
    def rows(self) -> int:
        """How many rows or elements the section has."""
        return sum(segment.rows for segment in self.segments)


class Footer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file holds, and where."""

    format: int
    reader: str
    sections: tuple[Section, ...]


class FileHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a state file is, and how to know that it is the one that was written.

    The file is either in the store (``path``, relative to the operator's root) or in the handle
    itself (``inline``).
    """

    path: str | None = None
    inline: bytes | None = None
    size: int
    footer_length: int
    footer_checksum: str
    digest: str
    """Identifies the contents: it is over the footer, which has the checksums of all the rest.

    Equal rows written by one version of the library have equal digests. Another version of Arrow
    or of its compression may give the same rows other bytes.
    """
    rows: int

    def __post_init__(self) -> None:
        if (self.path is None) == (self.inline is None):
            raise ValueError("a state file is either at a path or inline, never both or neither")
        if self.path is not None and not check_path(self.path).startswith(f"{SHARED_FOLDER}/"):
            raise UnsafeNameError(
                f"a state file must be below {SHARED_FOLDER}/, not at {self.path!r}. If it came "
                f"from a checkpoint's record, the record was tampered with: do not restore it"
            )
        if self.inline is not None and len(self.inline) != self.size:
            raise ValueError(f"an inline file of {len(self.inline)} bytes has size {self.size}")
        if not 0 <= self.footer_length <= self.size - TAIL_BYTES or self.rows < 0:
            raise ValueError("a handle whose numbers no file can have")

    @property
    def footer_range(self) -> tuple[int, int]:
        """The offset and length of the footer together with the tail."""
        length = self.footer_length + TAIL_BYTES
        return self.size - length, length


class _AnyFormat(msgspec.Struct):
    format: int
    reader: str = ""


class _Tail(NamedTuple):
    footer_length: int
    magic: bytes


def checksum_of(data: bytes | memoryview) -> str:
    """Return the checksum of a piece of a file."""
    return xxhash.xxh3_64_hexdigest(data)


def digest_of(data: bytes | memoryview) -> str:
    """Return what identifies contents among all that were ever written."""
    return xxhash.xxh3_128_hexdigest(data)


def encode_footer(sections: tuple[Section, ...]) -> bytes:
    """Return the footer and the tail, which end a file."""
    footer = msgspec.json.encode(Footer(FILE_FORMAT, FIRST_READER, sections))
    return footer + _TAIL.pack(len(footer), _MAGIC)


def handle_of(
    ending: bytes, *, size: int, rows: int, path: str | None = None, inline: bytes | None = None
) -> FileHandle:
    """Return the handle of a file that ends with this footer and tail."""
    footer = ending[:-TAIL_BYTES]
    return FileHandle(
        path=path,
        inline=inline,
        size=size,
        footer_length=len(footer),
        footer_checksum=checksum_of(footer),
        digest=digest_of(footer),
        rows=rows,
    )


def decode_footer(ending: bytes, handle: FileHandle, where: str) -> Footer:
    """Check the footer and the tail against the handle, and return the footer."""
    footer = ending[:-TAIL_BYTES]
    tail = _Tail(*_TAIL.unpack(ending[-TAIL_BYTES:]))
    if tail != (handle.footer_length, _MAGIC):
        raise SnapshotCorruptError(
            where, what="the tail", expected=(handle.footer_length, _MAGIC), actual=tuple(tail)
        )
    for what, expected, actual in (
        ("the checksum of the footer", handle.footer_checksum, checksum_of(footer)),
        ("the digest of the footer", handle.digest, digest_of(footer)),
    ):
        if expected != actual:
            raise SnapshotCorruptError(where, what=what, expected=expected, actual=actual)
    try:
        found = msgspec.json.decode(footer, type=_AnyFormat)
        if found.format != FILE_FORMAT:
            raise unreadable_format(
                where, found=found.format, known=FILE_FORMAT, reader=found.reader
            )
        return msgspec.json.decode(footer, type=Footer)
    except msgspec.MsgspecError as error:
        raise SnapshotCorruptError(
            where, what="the footer", expected="a list of sections", actual=str(error)
        ) from error


def unreadable_format(where: str, *, found: int, known: int, reader: str) -> FormatVersionError:
    """Say which version of the library is needed for what was found."""
    newer = f"flowspark>={reader}" if reader else "the flowspark that wrote it, or a newer one"
    return FormatVersionError(
        f"{where} has format version {found}, and this flowspark reads version {known}. Install "
        f"{newer}, or start from a checkpoint or savepoint that this one has written"
    )
