"""Bytes into lines, in bulk: nothing here runs once per line, unless the line is a bad one.

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

from pyspark_flowsocket.errors import LineTooLongError, SocketSourceError, UndecodableLineError
from pyspark_flowsocket.options import LineRules, OnBadLine, OnLongLine

__all__ = ["CutLines", "LineCounts", "Utf8Decoder", "cut_lines"]

Positions: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

_REPLACEMENT = "\ufffd"
# A lone surrogate: no text has it, and written out it is not valid UTF-8.
_MARK = "\udcff"
_MARK_BYTES = _MARK.encode("utf-8", "surrogatepass")
_SHOWN_BYTES = 40

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
        self._decoder = codecs.getincrementaldecoder(charset)("flowsocket-mark")

    def feed(self, data: bytes) -> bytes:
        """Turn the next bytes of the stream into UTF-8; an unfinished character waits."""
        return self._decoder.decode(data).encode("utf-8", "surrogatepass")

    def finish(self) -> bytes:
        """Return what is left when the stream ends."""
        return self._decoder.decode(b"", True).encode("utf-8", "surrogatepass")


def cut_lines(block: bytes, rules: LineRules) -> CutLines:
    """Cut a block into lines; it ends with a delimiter."""
    positions = _find(block, rules.delimiter)
    lengths, data = _without_delimiters(block, positions, rules)
    offsets = np.zeros(len(positions) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    values = _column(offsets, data)
    ends = positions + len(rules.delimiter)
    longest = int(lengths.max()) if len(lengths) else 0
    if longest <= rules.max_line_bytes and _is_utf8(data):
        return CutLines(values, ends, LineCounts(received=len(positions)))
    return _Mender(rules, offsets, data).mended(ends)


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


def _column(offsets: Positions, data: bytes) -> pa.StringArray:
    return pa.StringArray.from_buffers(
        len(offsets) - 1, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)
    )


def _is_utf8(data: bytes | memoryview) -> bool:
    """Tell whether all of it is valid; cut at delimiters, valid text stays valid."""
    whole = pa.StringArray.from_buffers(
        1, pa.py_buffer(np.array([0, len(data)], np.int32)), pa.py_buffer(data)
    )
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


class _Mender:
    """Lines of which some are too long or no text; only those are looked at one by one."""

    def __init__(self, rules: LineRules, offsets: Positions, data: bytes) -> None:
        self._rules = rules
        self._offsets = offsets
        self._data = memoryview(data)
        self._skipped = self._truncated = self._undecodable = 0

    def mended(self, ends: Positions) -> CutLines:
        lengths = np.diff(self._offsets)
        long = set(np.flatnonzero(lengths > self._rules.max_line_bytes).tolist())
        bad = long | self._undecodable_lines()
        pieces: list[pa.StringArray] = []
        kept = np.ones(len(ends), bool)
        fault: SocketSourceError | None = None
        done = 0
        for index in sorted(bad):
            pieces.append(self._lines(done, index))
            try:
                line = self._mend(index, is_long=index in long)
            except SocketSourceError as error:
                fault, done = error, index
                kept[index:] = False
                break
            if line is None:
                kept[index] = False
            else:
                pieces.append(pa.array([line], pa.string()))
            done = index + 1
        if fault is None:
            pieces.append(self._lines(done, len(ends)))
            done = len(ends)
        counts = LineCounts(done, self._skipped, self._truncated, self._undecodable)
        return CutLines(pa.concat_arrays(pieces), ends[kept], counts, fault)

    def _lines(self, begin: int, end: int) -> pa.StringArray:
        offsets = self._offsets[begin : end + 1]
        data = self._data[int(offsets[0]) : int(offsets[-1])]
        return _column(offsets - offsets[0], bytes(data))

    def _undecodable_lines(self) -> set[int]:
        """Find bad lines by halving what holds some, so that good ones are checked in bulk."""
        found: set[int] = set()
        open_ranges = [(0, len(self._offsets) - 1)]
        while open_ranges:
            begin, end = open_ranges.pop()
            if _is_utf8(self._data[int(self._offsets[begin]) : int(self._offsets[end])]):
                continue
            if end - begin == 1:
                found.add(begin)
            else:
                middle = (begin + end) // 2
                open_ranges += [(begin, middle), (middle, end)]
        return found

    def _mend(self, index: int, *, is_long: bool) -> str | None:
        """Return the line as it may be taken, or None where it is skipped."""
        raw = bytes(self._data[int(self._offsets[index]) : int(self._offsets[index + 1])])
        if is_long:
            if self._rules.on_long_line is OnLongLine.SKIP:
                self._skipped += 1
                return None
            if self._rules.on_long_line is OnLongLine.FAIL:
                raise line_too_long(self._rules)
            self._truncated += 1
            raw = _cut_at_character(raw, self._rules.max_line_bytes)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            return self._mend_text(raw, error)

    def _mend_text(self, raw: bytes, error: UnicodeDecodeError) -> str | None:
        if self._rules.on_decode_error is OnBadLine.FAIL:
            shown = raw[max(0, error.start - 8) :][:_SHOWN_BYTES]
            raise UndecodableLineError(
                f"a line is no text in the charset {self._rules.charset!r}, at byte {error.start} "
                f"of it; the bytes around: {shown!r}. Set option 'charset' to what the peer sends, "
                f"or 'onDecodeError' to replace or skip"
            )
        self._undecodable += 1
        if self._rules.on_decode_error is OnBadLine.SKIP:
            self._skipped += 1
            return None
        return raw.replace(_MARK_BYTES, _REPLACEMENT.encode()).decode("utf-8", "replace")


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
