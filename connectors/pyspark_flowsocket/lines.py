"""Bytes into lines, in bulk: nothing here runs once per line, unless the line is truncated.

``cut_lines`` gets a block of whole lines as UTF-8, each with its delimiter, and returns one Arrow
column. Streams in another charset are turned into UTF-8 before (``Utf8Decoder``), where bytes that
are no text become a mark that is not valid UTF-8; so bad lines are found in one place.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_flowsocket.errors import LineTooLongError, SocketSourceError, UndecodableLineError
from pyspark_flowsocket.options import LineRules, OnBadLine, OnLongLine

__all__ = ["CutLines", "LineCounts", "Utf8Decoder", "cut_lines"]

Positions: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
Mask: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"

_REPLACEMENT = "\ufffd".encode()
# A lone surrogate: no text has it, and written out it is not valid UTF-8.
_MARK = "\udcff"
_MARK_BYTES = _MARK.encode("utf-8", "surrogatepass")
_SHOWN_BYTES = 40
_UNFINISHED_BYTES_MAX = 256 << 10

codecs.register_error("flowsocket-mark", lambda error: (_MARK, getattr(error, "end", 0)))


@dataclass(frozen=True, slots=True)
class LineCounts:
    """What became of lines; ``received`` counts all of them."""

    received: int = 0
    skipped: int = 0
    truncated: int = 0
    undecodable: int = 0

    def __add__(self, other: LineCounts) -> LineCounts:
        return LineCounts(
            self.received + other.received,
            self.skipped + other.skipped,
            self.truncated + other.truncated,
            self.undecodable + other.undecodable,
        )


@dataclass(frozen=True, slots=True)
class CutLines:
    """The lines of one block."""

    values: pa.StringArray
    """The lines that are kept."""
    ends: Positions
    """For each line that is kept, where it ends in the block, its delimiter included."""
    counts: LineCounts
    fault: SocketSourceError | None = None
    """Why the block was cut no further: the line behind those counted must not be taken."""


class Utf8Decoder:
    """One stream of another charset, as UTF-8. UTF-8 itself needs none."""

    def __init__(self, charset: str) -> None:
        self._charset = charset
        self._decoder = codecs.getincrementaldecoder(charset)("flowsocket-mark")

    def feed(self, data: bytes) -> bytes:
        """Turn the next bytes of the stream into UTF-8; an unfinished character waits."""
        try:
            text = self._decoder.decode(data).encode("utf-8", "surrogatepass")
        except UnicodeError as error:
            # Not about some bytes, which become a mark, but about the stream as a whole.
            raise self._unusable(f"{error}") from None
        # In UTF-7 what is between two signs waits as a whole, however long it is.
        if len(getattr(self._decoder, "buffer", b"")) > _UNFINISHED_BYTES_MAX:
            raise self._unusable(f"a character has no end after {_UNFINISHED_BYTES_MAX} bytes")
        return text

    def finish(self) -> bytes:
        """Return what is left when the stream ends."""
        try:
            return self._decoder.decode(b"", True).encode("utf-8", "surrogatepass")
        except UnicodeError:
            return _MARK_BYTES

    def _unusable(self, why: str) -> UndecodableLineError:
        return UndecodableLineError(
            f"the stream is no text in the charset {self._charset!r}: {why}. Set option 'charset' "
            f"to what the peer sends; utf-16-le and utf-16-be expect no byte order mark"
        )


def cut_lines(block: bytes, rules: LineRules) -> CutLines:
    """Cut a block into lines; it ends with a delimiter."""
    positions = _find(block, rules.delimiter)
    lengths, data = _without_delimiters(block, positions, rules)
    ends = positions + len(rules.delimiter)
    longest = int(lengths.max()) if len(lengths) else 0
    # The block and not the lines one behind the other: there, half a character at the end of one
    # line and the other half at the beginning of the next would be a whole one.
    is_text = _is_utf8(block)
    if longest <= rules.max_line_bytes and is_text:
        values = _column(lengths, data, pa.string())
        return CutLines(values, ends, LineCounts(received=len(positions)))
    given = _column(lengths, data, pa.binary())
    return _mended(given, given if is_text else _replaced(block, rules), lengths, ends, rules)


def _find(block: bytes, delimiter: bytes) -> Positions:
    """Return where the delimiters begin."""
    data = np.frombuffer(block, np.uint8)
    found = np.flatnonzero(data == delimiter[0])
    if len(delimiter) == 1:
        return found
    found = found[found <= len(block) - len(delimiter)]
    for place, byte in enumerate(delimiter[1:], start=1):
        found = found[data[found + place] == byte]
    if len(found) > 1 and int(np.diff(found).min()) < len(delimiter):
        return _first_of_overlapping(found, len(delimiter))
    return found


def _first_of_overlapping(found: Positions, width: int) -> Positions:
    # Only a delimiter such as "||" can overlap itself. From left to right, as bytes.replace does.
    kept, free = [], 0
    for position in found.tolist():
        if position >= free:
            kept.append(position)
            free = position + width
    return np.array(kept, np.int64)


def _without_delimiters(
    block: bytes, positions: Positions, rules: LineRules
) -> tuple[Positions, bytes]:
    """Return the lengths of the lines, and the lines one behind the other."""
    width = len(rules.delimiter)
    lengths = np.diff(positions, prepend=-width) - width
    if rules.strips_cr and b"\r" in block:
        data = np.frombuffer(block, np.uint8)
        # The line in front of a delimiter may be empty; then its neighbour is no carriage return.
        returns = (lengths > 0) & (data[positions - 1] == 0x0D)
        count = int(np.count_nonzero(returns))
        if count == len(positions):
            return lengths - 1, block.replace(b"\r\n", b"")
        if count:
            return lengths - returns, block.replace(b"\r\n", b"\n").replace(b"\n", b"")
    return lengths, block.replace(rules.delimiter, b"")


def _column(lengths: Positions, data: bytes, kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(lengths), buffers)


def _is_utf8(data: bytes) -> bool:
    """Tell whether all of it is valid; cut at delimiters, valid text stays valid."""
    whole = pa.StringArray.from_buffers(
        1, pa.py_buffer(np.array([0, len(data)], np.int32)), pa.py_buffer(data)
    )
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _replaced(block: bytes, rules: LineRules) -> pa.BinaryArray:
    """Return the lines of a block with U+FFFD for what is no text; there are as many of them.

    All bytes of a delimiter are text, and it has no U+FFFD, so none vanishes or comes to be.
    """
    text = block.replace(_MARK_BYTES, _REPLACEMENT).decode("utf-8", "replace").encode()
    lengths, data = _without_delimiters(text, _find(text, rules.delimiter), rules)
    return _column(lengths, data, pa.binary())


def _mended(
    given: pa.BinaryArray,
    text: pa.BinaryArray,
    lengths: Positions,
    ends: Positions,
    rules: LineRules,
) -> CutLines:
    """Apply the rules to a block in which some lines are too long or no text, perhaps all."""
    is_long = lengths > rules.max_line_bytes
    # Whatever is no text was replaced, and nothing else was.
    is_bad = pc.not_equal(given, text).to_numpy(zero_copy_only=False) & ~is_long
    kept, is_fault = np.ones(len(ends), bool), np.zeros(len(ends), bool)
    if rules.on_long_line is OnLongLine.SKIP:
        kept &= ~is_long
    elif rules.on_long_line is OnLongLine.FAIL:
        is_fault |= is_long
    else:
        text = _truncated(given, text, is_long, is_bad, rules)
    if rules.on_decode_error is OnBadLine.SKIP:
        kept &= ~is_bad
    elif rules.on_decode_error is OnBadLine.FAIL:
        is_fault |= is_bad
    done = int(is_fault.argmax()) if is_fault.any() else len(ends)
    fault = _fault_of(given[done].as_py(), rules) if done < len(ends) else None
    kept[done:] = False
    counts = LineCounts(
        received=done,
        skipped=done - int(np.count_nonzero(kept)),
        truncated=_count(is_long[:done]) if rules.on_long_line is OnLongLine.TRUNCATE else 0,
        undecodable=_count(is_bad[:done]),
    )
    values = text.filter(pa.array(kept)).cast(pa.string())
    return CutLines(values, ends[kept], counts, fault)


def _count(mask: Mask) -> int:
    return int(np.count_nonzero(mask))


def _truncated(
    given: pa.BinaryArray, text: pa.BinaryArray, is_long: Mask, is_bad: Mask, rules: LineRules
) -> pa.BinaryArray:
    """Cut the long lines, and note which of them are no text even so."""
    cut = []
    for index in np.flatnonzero(is_long).tolist():
        raw = _cut_at_character(given[index].as_py(), rules.max_line_bytes)
        mended = raw.replace(_MARK_BYTES, _REPLACEMENT).decode("utf-8", "replace").encode()
        is_bad[index] = mended != raw
        cut.append(mended)
    return pc.replace_with_mask(text, pa.array(is_long), pa.array(cut, pa.binary()))


def _fault_of(line: bytes, rules: LineRules) -> SocketSourceError:
    """Say what is wrong with a line that must not be taken."""
    if len(line) > rules.max_line_bytes:
        if rules.on_long_line is OnLongLine.FAIL:
            return line_too_long(rules)
        line = _cut_at_character(line, rules.max_line_bytes)
    try:
        line.decode()
        place = 0
    except UnicodeDecodeError as error:
        place = error.start
    shown = line[max(0, place - 8) :][:_SHOWN_BYTES]
    return UndecodableLineError(
        f"a line is no text in the charset {rules.charset!r}, at byte {place} of it; the bytes "
        f"around: {shown!r}. Set option 'charset' to what the peer sends, or 'onDecodeError' to "
        f"replace or skip"
    )


def line_too_long(rules: LineRules) -> LineTooLongError:
    """Say that a line is too long, and what to do."""
    return LineTooLongError(
        f"a line is longer than option 'maxLineBytes', which is {rules.max_line_bytes}. Raise it, "
        f"check that 'delimiter' is what the peer sends ({rules.delimiter!r} is expected), or set "
        f"'onLongLine' to truncate or skip"
    )


def _cut_at_character(raw: bytes, limit: int) -> bytes:
    """Cut without leaving half a character, which would not be text."""
    end = limit
    # A character has at most four bytes, the later ones of which begin with the bits 10.
    while end > max(0, limit - 4) and raw[end] & 0xC0 == 0x80:
        end -= 1
    return raw[: end if raw[end] & 0xC0 != 0x80 else limit]
