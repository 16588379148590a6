"""The durable spool: a row of numbered segments, each created exclusively, owned by one epoch.

Nothing but the segments is written, so there is nothing that could contradict them:

- A segment is there as a whole or not at all, and its number is given once. Whoever wants a number
  that is taken reads what is there, and goes by it.
- An owner begins by creating the next segment, without lines, with the next epoch: its *claim*.
  That is the very number that the owner before would use next. So the old one, should it still
  live, fails there, and what it has received but not sealed was never offered to Spark.
- Claims are therefore kept when everything around them is trimmed; only very old ones go.
- Lines are trimmed from the front. The newest segment stays, since it has all totals in it.
"""

from __future__ import annotations

import logging
import re
import threading
import uuid
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from flowstate.errors import SnapshotMissingError, StorageError
from flowstate.storage.filesystems import TEMPORARY_PREFIX, StateFileSystem
from pyspark_flowsocket.errors import LinesGoneError, SpoolError, TakenOverError
from pyspark_flowsocket.lines import LineCounts
from pyspark_flowsocket.retrying import Patience
from pyspark_flowsocket.segments import (
    HEADER_GUESS_BYTES,
    SegmentHeader,
    decode_header,
    decode_segment,
    encode_segment,
)

__all__ = ["SegmentSlice", "Spool", "read_slice"]

_log = logging.getLogger(__name__)

FOLDER = "segments"
CLAIMS_KEPT = 16
"""An owner that slept through so many restarts is not expected to wake up."""
_CLAIM_ATTEMPTS = 1000
_NAME = re.compile(rf"{FOLDER}/(\d{{19}})\.arrow")


def segment_path(number: int) -> str:
    """Return where a segment is, relative to the spool's root; names sort as numbers do."""
    return f"{FOLDER}/{number:019d}.arrow"


@dataclass(frozen=True, slots=True)
class SegmentSlice:
    """Some lines of one segment, by their places in it. Sent to executors."""

    number: int
    first_line: int
    """Of the segment."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """A retained segment, as the index knows it."""

    number: int
    first_line: int
    end_line: int
    size: int
    is_claim: bool


class Spool:
    """The spool as its owner sees it. One thread appends and trims; any thread may ask."""

    def __init__(self, files: StateFileSystem, uid: str, patience: Patience) -> None:
        self._files = files
        self._uid = uid
        self._patience = patience
        self._lock = threading.Lock()
        self._headers: dict[int, SegmentHeader] = {}
        self._index: list[_Entry] = []
        self._old_claims: list[int] = []
        self._garbage: list[int] = []
        self._newest = SegmentHeader(0, uid, 0, uuid.uuid4().hex, 0, 0)
        self._owner = self._newest.owner

    @classmethod
    def open(cls, files: StateFileSystem, uid: str, patience: Patience) -> Spool:
        """Take the spool over, whoever had it before; or begin one."""
        spool = cls(files, uid, patience)
        for _ in range(_CLAIM_ATTEMPTS):
            try:
                patience.call(spool._find_newest)
            except SnapshotMissingError:
                continue  # The owner before trims meanwhile; what is gone is gone.
            if spool._claim():
                patience.call(spool._load)
                spool._headers.clear()  # Only taking over needs them.
                spool._sweep()
                return spool
        raise TakenOverError(
            f"the spool {files.url} could not be taken over: others wrote to it each time. Stop "
            f"the other queries with uid {uid!r}"
        )

    # What anybody may ask.

    @property
    def epoch(self) -> int:
        """Which owner this is, counted from 1."""
        return self._newest.epoch

    @property
    def first_line(self) -> int:
        """The first line that is retained."""
        with self._lock:
            return self._index[0].first_line

    @property
    def end_line(self) -> int:
        """The line behind the last durable one."""
        return self._newest.end_line

    @property
    def counts(self) -> LineCounts:
        """What became of all lines since the spool began."""
        return self._newest.counts

    @property
    def partial_lines(self) -> int:
        """How many unfinished lines were dropped since the spool began."""
        return self._newest.partial_lines

    @property
    def senders(self) -> Mapping[str, int]:
        """For each sender that follows the protocol, the lines of it that are durable."""
        return self._newest.senders

    @property
    def segments(self) -> int:
        """How many segments are retained."""
        with self._lock:
            return len(self._index)

    def size_bytes(self, line: int = 0) -> int:
        """Return the size of the segments that have lines from this one on."""
        with self._lock:
            return sum(entry.size for entry in self._index[self._position(line) :])

    def slices(self, start: int, end: int) -> list[SegmentSlice]:
        """Return where the lines from start to end (exclusive) are."""
        self.check_retained(start, end)
        found = []
        with self._lock:
            for entry in self._index[self._position(start) :]:
                begin = max(start, entry.first_line) - entry.first_line
                stop = min(end, entry.end_line) - entry.first_line
                if begin < stop:
                    found.append(SegmentSlice(entry.number, entry.first_line, begin, stop))
        return found

    def size_of(self, slices: Sequence[SegmentSlice]) -> int:
        """Return about how many bytes of files the slices are."""
        with self._lock:
            sizes = {entry.number: entry for entry in self._index}
        return sum(
            sizes[piece.number].size
            * (piece.end - piece.begin)
            // (sizes[piece.number].end_line - piece.first_line)
            for piece in slices
        )

    def line_after_bytes(self, start: int, size_bytes: int) -> int:
        """Return the line before which about so many bytes lie, at least one line on."""
        with self._lock:
            left = float(size_bytes)
            for entry in self._index[self._position(start) :]:
                rows = entry.end_line - entry.first_line
                begin = max(start, entry.first_line)
                share = entry.size * (entry.end_line - begin) / rows if rows else 0
                if share > left:
                    return max(start + 1, begin + int(left * rows / entry.size))
                left -= share
        return self.end_line

    def check_retained(self, start: int, end: int) -> None:
        """Refuse a range that is not in the spool as a whole."""
        first_line, end_line = self.first_line, self.end_line
        if start < first_line:
            raise LinesGoneError(
                f"lines {start} to {first_line} are no longer in the spool {self._files.url}: "
                f"another query on it let them be trimmed, or files were deleted. Restore them, "
                f"or start the query with a new checkpoint location, from line {first_line}"
            )
        if end > end_line:
            raise LinesGoneError(
                f"the query's checkpoint has come to line {end}, but the spool {self._files.url} "
                f"ends at line {end_line}: it was deleted or replaced, or 'stateLocation' or 'uid' "
                f"is not that of the earlier runs. Put it back, or start the query with a new "
                f"checkpoint location"
            )

    # What the owner's thread does.

    def append(
        self,
        batches: Sequence[pa.RecordBatch],
        *,
        counts: LineCounts,
        partial_lines: int,
        senders: Mapping[str, int],
    ) -> int:
        """Make lines durable, with the totals behind them; return the size. May be slow."""
        newest = self._newest
        header = replace(
            newest,
            number=newest.number + 1,
            first_line=newest.end_line,
            rows=sum(batch.num_rows for batch in batches),
            is_claim=False,
            counts=counts,
            partial_lines=partial_lines,
            senders=dict(senders),
        )
        data = encode_segment(header, batches)
        if not self._patience.call(lambda: self._create(header, data)):
            raise self._taken_over(header.number)
        self._add(header, len(data))
        return len(data)

    def check_owner(self) -> None:
        """Raise ``TakenOverError`` if there is a newer owner already."""
        number = self._newest.number + 1
        try:
            self._files.read(segment_path(number))
        except SnapshotMissingError:
            return
        raise self._taken_over(number)

    def trim(self, line: int) -> None:
        """Let go of segments that have no line from this one on. A failure is made up for later."""
        with self._lock:
            gone = [
                entry.number
                for entry in self._index[:-1]
                if entry.end_line <= line and not entry.is_claim
            ]
        if not gone and not self._garbage:
            return
        try:
            # An owner that was replaced must not trim what the new query still reads.
            self.check_owner()
            self._files.delete(segment_path(number) for number in (*self._garbage, *gone))
        except StorageError as error:
            _log.warning("trimming the spool is put off: %s", error)
            return
        self._forget(line)

    def _forget(self, line: int) -> None:
        """Take what was trimmed out of the index; claims stay in the store, not in the index."""
        with self._lock:
            last = len(self._index) - 1
            kept = next(
                (i for i, entry in enumerate(self._index) if entry.end_line > line or i == last)
            )
            self._old_claims += [entry.number for entry in self._index[:kept] if entry.is_claim]
            del self._index[:kept]
            self._garbage = self._old_claims[:-CLAIMS_KEPT]
            self._old_claims = self._old_claims[-CLAIMS_KEPT:]

    def _sweep(self) -> None:
        """Remove what killed processes were writing; one that still lives fails in any case."""
        try:
            found = [file.path for file in self._files.list(FOLDER)]
            temporary = [path for path in found if f"/{TEMPORARY_PREFIX}" in path]
            self._files.delete(temporary)
        except StorageError as error:
            _log.warning("unfinished files are left in the spool for now: %s", error)

    # Taking the spool over.

    def _find_newest(self) -> None:
        """Learn what everything that follows is counted on from."""
        if sizes := self._sizes():
            self._newest = replace(self._verified(max(sizes)), owner=self._owner)

    def _load(self) -> None:
        """Learn what is there before the claim, as far back as there is no gap.

        Only now: nobody creates a segment there any more, so the listing misses none. One made
        while the owner before still writes may show a segment and not the one in front of it.
        """
        claim, following = self._index[-1], self._newest
        entries, old_claims, garbage = [claim], [], []
        is_whole = True
        sizes = self._sizes()
        for number in sorted((one for one in sizes if one < claim.number), reverse=True):
            try:
                header = self._header(number, sizes[number])
            except SnapshotMissingError:
                continue  # Of a trim that began before the claim, as all is that lies before it.
            # Behind a gap there is only what an interrupted trim has left over.
            is_whole &= number == following.number - 1 and header.end_line == following.first_line
            if is_whole:
                entries.append(_entry(header, sizes[number]))
                following = header
            elif header.is_claim:
                old_claims.append(number)
            else:
                garbage.append(number)
        self._index, self._old_claims, self._garbage = entries[::-1], old_claims[::-1], garbage

    def _sizes(self) -> dict[int, int]:
        """Return the sizes of the segments that are listed, by number."""
        sizes = {}
        for file in self._files.list(FOLDER):
            if match := _NAME.fullmatch(file.path):
                sizes[int(match.group(1))] = file.size
        return sizes

    def _verified(self, number: int) -> SegmentHeader:
        """Read all of the newest segment: everything that follows is counted on from it."""
        path = segment_path(number)
        where = f"{self._files.url}/{path}"
        header, _ = decode_segment(where, self._files.read(path))
        self._headers[number] = self._checked(header, number, where)
        return header

    def _header(self, number: int, size: int) -> SegmentHeader:
        if number not in self._headers:
            path = segment_path(number)
            where = f"{self._files.url}/{path}"
            (data,) = self._files.read_ranges(path, [(0, min(size, HEADER_GUESS_BYTES))])
            header = decode_header(where, data)
            if header is None:
                header, _ = decode_segment(where, self._files.read(path))
            self._headers[number] = self._checked(header, number, where)
        return self._headers[number]

    def _checked(self, header: SegmentHeader, number: int, where: str) -> SegmentHeader:
        if header.uid != self._uid:
            raise SpoolError(
                f"{where} is of the source with uid {header.uid!r}, not {self._uid!r}: the folder "
                f"was copied or renamed. Give that uid, or another 'stateLocation'"
            )
        if header.number != number:
            raise SpoolError(f"{where} is segment {header.number} under the name of another one")
        return header

    def _claim(self) -> bool:
        newest = self._newest
        header = replace(
            newest,
            number=newest.number + 1,
            epoch=newest.epoch + 1,
            owner=self._owner,
            first_line=newest.end_line,
            rows=0,
            is_claim=True,
        )
        data = encode_segment(header, [])
        if not self._patience.call(lambda: self._create(header, data)):
            return False
        self._add(header, len(data))
        return True

    def _create(self, header: SegmentHeader, data: bytes) -> bool:
        """Create a segment; False if its number is somebody else's. May be repeated."""
        path = segment_path(header.number)
        if self._files.create_exclusively(path, data):
            return True
        try:
            found, _ = decode_segment(f"{self._files.url}/{path}", self._files.read(path))
        except SnapshotMissingError:
            return False  # It was taken, and is trimmed already.
        # A reply may have been lost: then the file is our own.
        return (found.owner, found.epoch) == (header.owner, header.epoch)

    def _add(self, header: SegmentHeader, size: int) -> None:
        with self._lock:
            self._index.append(_entry(header, size))
            self._newest = header

    def _position(self, line: int) -> int:
        """Return the first entry with a line from this one on."""
        return bisect_right(self._index, line, key=lambda entry: entry.end_line)

    def _taken_over(self, number: int) -> TakenOverError:
        return TakenOverError(
            f"another query has taken the spool {self._files.url} over: segment {number} is not "
            f"this one's (epoch {self.epoch}). If both are meant to run, give each its own 'uid'; "
            f"if this one is left over from an earlier run, let it end"
        )


def _entry(header: SegmentHeader, size: int) -> _Entry:
    return _Entry(header.number, header.first_line, header.end_line, size, header.is_claim)


def read_slice(files: StateFileSystem, uid: str, wanted: SegmentSlice) -> list[pa.RecordBatch]:
    """Read some lines of a segment, checked against what the owner said of it."""
    path = segment_path(wanted.number)
    where = f"{files.url}/{path}"
    try:
        header, batches = decode_segment(where, files.read(path))
    except SnapshotMissingError:
        raise LinesGoneError(
            f"{where} is gone although Spark still needs lines of it: another query on the same "
            f"spool let it be trimmed, or it was deleted; or this executor does not reach "
            f"'stateLocation', which must be shared by all of them"
        ) from None
    if header.uid != uid or header.first_line != wanted.first_line or header.rows < wanted.end:
        raise SpoolError(
            f"{where} has the lines from {header.first_line} of uid {header.uid!r}, and those from "
            f"{wanted.first_line} of {uid!r} are expected: it was replaced while it was in use"
        )
    found, done = [], 0
    for batch in batches:
        begin, end = max(wanted.begin - done, 0), min(wanted.end - done, batch.num_rows)
        if begin < end:
            found.append(batch.slice(begin, end - begin))
        done += batch.num_rows
    return found
