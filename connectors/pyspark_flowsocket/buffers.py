"""The bytes of one connection on their way to lines: what is complete, and what is not yet."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark_flowsocket.lines import Utf8Decoder, line_too_long
from pyspark_flowsocket.options import LineRules, OnLongLine, OnPartialLine

__all__ = ["BLOCK_BYTES", "LineBuffer", "TakenBlock"]

BLOCK_BYTES = 1 << 20
"""Lines are cut in blocks of about this size, which fit into a processor's cache."""

_SMALL_BYTES = 4096
_MARK_BYTES = 128
"""What a mark takes; a client that sends its lines one by one makes one for each."""


@dataclass(frozen=True, slots=True)
class TakenBlock:
    """Whole lines, each with its delimiter, and when they were received."""

    data: bytes
    marks: list[tuple[int, int]]
    """Pairs: up to this place in the data, the lines were complete at this time (in us)."""


class LineBuffer:
    """Holds whole lines until they are taken, and at most one unfinished line of bounded length.

    An unfinished line that is too long is not kept: its beginning stays, with a filler that makes
    it too long by itself, so that whoever cuts lines finds it and does what the rules say.
    """

    def __init__(self, rules: LineRules) -> None:
        self._rules = rules
        self._delimiter = rules.delimiter
        self._overlaps = _overlaps_itself(rules.delimiter)
        self._decoder = None if rules.charset == "utf-8" else Utf8Decoder(rules.charset)
        self._partial_max = rules.max_line_bytes + max(1, len(rules.delimiter) - 1)
        self._filler = bytes([next(byte for byte in range(32) if byte not in rules.delimiter)])
        self._blocks: list[TakenBlock] = []
        self._complete: list[bytes | bytearray | memoryview] = []
        self._complete_bytes = 0
        self._marks: list[tuple[int, int]] = []
        self._partial = bytearray()
        self._tail = b""
        self._is_overlong = False
        self.complete_bytes = 0
        """How much memory what there is to take has, a bit more than its bytes."""

    def feed(self, data: bytes, now_us: int) -> None:
        """Add what was received; ``LineTooLongError`` as soon as the rules call for it."""
        chunk = data if self._decoder is None else self._decoder.feed(data)
        if self._is_overlong:
            chunk = self._skip_to_delimiter(chunk)
        cut = self._end_of_last_line(chunk)
        if cut:
            if self._partial:
                self._add(self._partial)
            self._add(memoryview(chunk)[:cut])
            self._partial = bytearray(memoryview(chunk)[cut:])
        else:
            self._partial += chunk
        self._mark(now_us)
        if len(self._partial) > self._partial_max:
            self._shorten()

    def finish(self, now_us: int, *, is_orderly: bool) -> bool:
        """End the stream, and say whether an unfinished line was dropped."""
        if self._decoder is not None:
            self._partial += self._decoder.finish()
        if not self._partial:
            return False
        if not is_orderly or self._rules.on_partial_line is OnPartialLine.DROP:
            self._partial = bytearray()
            return True
        # An unfinished delimiter that overlaps itself is no part of the line.
        end = (self._partial + self._delimiter).find(self._delimiter)
        self._add(self._partial[:end] + self._delimiter)
        self._partial = bytearray()
        self._mark(now_us)
        return False

    def take(self) -> list[TakenBlock]:
        """Take all whole lines, in blocks."""
        self._close_block()
        blocks, self._blocks, self.complete_bytes = self._blocks, [], 0
        return blocks

    def clear(self) -> None:
        """Forget everything."""
        self.take()
        self._partial, self._tail, self._is_overlong = bytearray(), b"", False

    def _add(self, piece: bytes | bytearray | memoryview) -> None:
        # Pieces of a few bytes, each an object of its own, would take many times their size.
        last = self._complete[-1] if self._complete else None
        if len(piece) >= _SMALL_BYTES:
            self._complete.append(piece)
        elif isinstance(last, bytearray):
            last += piece
        else:
            self._complete.append(bytearray(piece))
        self._complete_bytes += len(piece)
        self.complete_bytes += len(piece)

    def _mark(self, now_us: int) -> None:
        """Note when the lines up to here were complete."""
        if self._complete_bytes > (self._marks[-1][0] if self._marks else 0):
            self._marks.append((self._complete_bytes, now_us))
            self.complete_bytes += _MARK_BYTES
        if self._complete_bytes >= BLOCK_BYTES:
            self._close_block()

    def _close_block(self) -> None:
        if self._complete:
            self._blocks.append(TakenBlock(b"".join(self._complete), self._marks))
            self._complete, self._marks, self._complete_bytes = [], [], 0

    def _end_of_last_line(self, chunk: bytes) -> int:
        """Return where the last delimiter ends in the chunk; 0 if there is none."""
        width = len(self._delimiter)
        if width == 1:
            return chunk.rfind(self._delimiter) + 1
        # What waits has no delimiter in it, so only its end can be the beginning of one.
        before = bytes(self._partial[-(width - 1) :])
        if self._overlaps:
            # Which of two overlapping delimiters counts depends on those before them.
            rest = (before + chunk).split(self._delimiter)[-1]
            return max(0, len(chunk) - len(rest))
        found = (before + chunk).rfind(self._delimiter)
        return found + width - len(before) if found >= 0 else 0

    def _shorten(self) -> None:
        if self._rules.on_long_line is OnLongLine.FAIL:
            raise line_too_long(self._rules)
        self._tail = self._last(self._partial)
        del self._partial[self._rules.max_line_bytes + 1 :]
        self._partial += self._filler
        self._is_overlong = True

    def _skip_to_delimiter(self, chunk: bytes) -> bytes:
        """Drop the rest of a line that is too long; return what follows it."""
        before = self._tail
        found = (before + chunk).find(self._delimiter)
        if found < 0:
            self._tail = self._last(before + chunk)
            return b""
        self._add(self._partial + self._delimiter)
        self._partial, self._tail, self._is_overlong = bytearray(), b"", False
        return chunk[found + len(self._delimiter) - len(before) :]

    def _last(self, data: bytes | bytearray) -> bytes:
        """Return what may be the beginning of a delimiter."""
        width = len(self._delimiter) - 1
        return bytes(data[-width:]) if width else b""


def _overlaps_itself(delimiter: bytes) -> bool:
    return any(delimiter.startswith(delimiter[place:]) for place in range(1, len(delimiter)))
