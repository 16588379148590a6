"""Between the sockets and the spool: what was received, and the thread that makes it durable."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from flowstate.errors import StorageError
from pyspark_flowsocket.buffers import BLOCK_BYTES, LineBuffer, TakenBlock
from pyspark_flowsocket.errors import SocketSourceError
from pyspark_flowsocket.lines import CutLines, LineCounts, cut_lines
from pyspark_flowsocket.options import Mode, SocketOptions
from pyspark_flowsocket.segments import batch_of
from pyspark_flowsocket.spool import Spool

__all__ = ["Inflow", "Intake"]

_log = logging.getLogger(__name__)

_OWNER_CHECK_S = 2.0
_COUNTS_LOGGED_S = 10.0
_EMPTY_SEGMENTS_MAX = 64


@dataclass(eq=False, slots=True)
class Inflow:
    """The lines of one connection. Its fields are guarded by the intake's lock."""

    peer: str
    buffer: LineBuffer
    sender: str | None = None
    is_closed: bool = False
    """Nothing will be added any more."""
    fault: SocketSourceError | None = None
    """Why nothing of it is taken any more."""
    durable: int = 0
    """With ``protocol=ack``: how many of the sender's lines are durable."""


@dataclass(slots=True)
class _Sealing:
    """What goes into one segment."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    values: list[pa.StringArray] = field(default_factory=list)
    size: int = 0
    run_ends: list[int] = field(default_factory=list)
    times_us: list[int] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    rows: int = 0
    counts: LineCounts = field(default_factory=LineCounts)
    senders: dict[str, int] = field(default_factory=dict)

    def add(self, peer: str, cut: CutLines, block: TakenBlock) -> None:
        places = np.array([place for place, _ in block.marks], np.int64)
        ends = np.searchsorted(cut.ends, places, side="right") + self.rows
        last = self.rows
        for end, (_, time_us) in zip(ends.tolist(), block.marks, strict=True):
            if end > last:
                self.run_ends.append(end)
                self.times_us.append(time_us)
                self.peers.append(peer)
                last = end
        self.values.append(cut.values)
        self.rows += len(cut.values)
        self.counts += cut.counts
        self.size += len(block.data)
        if self.size >= BLOCK_BYTES // 2:
            self.close_batch()

    def close_batch(self) -> None:
        """Make a record batch of the lines since the last one; small blocks share one."""
        if self.rows:
            values = pa.concat_arrays(self.values) if len(self.values) > 1 else self.values[0]
            self.batches.append(batch_of(values, self.run_ends, self.times_us, self.peers))
        self.values, self.run_ends, self.times_us, self.peers = [], [], [], []
        self.rows = self.size = 0


class Intake:
    """Collects the lines of all connections and seals them into segments, in a thread of its own.

    Memory is bounded: ``is_paused`` says when nothing more may be read from the sockets, which is
    when a segment's worth is waiting, or the spool is full of lines that no batch has got yet.
    """

    def __init__(self, spool: Spool, options: SocketOptions, processed_line: int = 0) -> None:
        self._spool = spool
        self._options = options
        self._changed = threading.Condition()
        self._inflows: list[Inflow] = []
        self._sealing_senders: frozenset[str] = frozenset()
        self._is_sealing = False
        self._is_stopping = False
        self._is_hurried = False
        self._pending_bytes = 0
        self._partial_lines = spool.partial_lines
        self._processed_line = processed_line
        self._unprocessed_bytes = spool.size_bytes(processed_line)
        self._trim_line: int | None = None
        self._trimmed_line = spool.first_line
        self._empty_segments = 0
        self._failure: BaseException | None = None
        # Long ago: the clock may have begun to count only when the machine was started.
        self._last_seal = self._last_check = self._last_logged = -math.inf
        self._logged = (spool.counts, spool.partial_lines)
        self.on_durable: Callable[[], None] = lambda: None
        """Called by the thread when lines became durable, or when it failed."""
        self._thread = threading.Thread(target=self._run, name="flowsocket-spool", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Seal what is there, and end the thread if it does not take too long."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # For the thread of the sockets.

    @property
    def is_paused(self) -> bool:
        """Whether nothing more may be received for now."""
        return self._pending_bytes >= self._options.segment_bytes or self.is_full

    @property
    def is_full(self) -> bool:
        """Whether the spool has as many lines as it may that no batch has got yet."""
        unprocessed = self._unprocessed_bytes + self._pending_bytes
        return unprocessed >= self._options.max_spool_bytes

    @property
    def failure(self) -> BaseException | None:
        """Why the intake has ended, if it has."""
        return self._failure

    def add(self, inflow: Inflow) -> None:
        """Take lines of a connection from now on, behind those of earlier ones."""
        with self._changed:
            self._inflows.append(inflow)

    def feed(self, inflow: Inflow, data: bytes) -> None:
        """Add what was received; ``LineTooLongError`` as soon as the rules call for it."""
        now_us = time.time_ns() // 1000
        with self._changed:
            if inflow.is_closed:
                return
            before = inflow.buffer.complete_bytes
            try:
                inflow.buffer.feed(data, now_us)
            finally:
                self._count_pending(inflow.buffer.complete_bytes - before)

    def finish(self, inflow: Inflow, *, is_orderly: bool) -> None:
        """End a connection; its whole lines are still taken."""
        with self._changed:
            if inflow.is_closed:
                return
            inflow.is_closed = True
            before = inflow.buffer.complete_bytes
            now_us = time.time_ns() // 1000
            self._partial_lines += inflow.buffer.finish(now_us, is_orderly=is_orderly)
            self._count_pending(inflow.buffer.complete_bytes - before)
            self._forget_empty(inflow)

    def discard(self, inflow: Inflow) -> None:
        """End a connection whose sender will send again what is not durable."""
        with self._changed:
            self._drop(inflow)

    @property
    def senders(self) -> frozenset[str]:
        """The senders of which the spool has lines."""
        return frozenset(self._spool.senders)

    def durable_count(self, sender: str) -> int | None:
        """Return the durable lines of a sender; None while that is being decided."""
        with self._changed:
            # Lines of a connection that has ended may still be on their way to the spool. A sender
            # that came back and sent them again would have them there twice.
            waits = any(
                inflow.sender == sender and inflow.buffer.complete_bytes for inflow in self._inflows
            )
            if waits or sender in self._sealing_senders:
                return None
            return self._spool.senders.get(sender, 0)

    def fail(self, error: BaseException) -> None:
        """End everything because of an error; the first one counts."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _count_pending(self, added: int) -> None:
        if added:
            self._pending_bytes += added
            self._changed.notify_all()

    def _drop(self, inflow: Inflow) -> None:
        inflow.is_closed = True
        self._pending_bytes -= inflow.buffer.complete_bytes
        inflow.buffer.clear()
        self._forget_empty(inflow)

    def _forget_empty(self, inflow: Inflow) -> None:
        # Not left to the next segment: while nobody sends a line there is none, and whoever looks
        # whether the port is open would be remembered until then.
        if not inflow.buffer.complete_bytes:
            with suppress(ValueError):
                self._inflows.remove(inflow)

    # For the reader.

    def processed(self, line: int) -> None:
        """Say that lines before this one are in batches that have ended."""
        size = self._spool.size_bytes(line)
        with self._changed:
            was_full = self.is_full
            self._processed_line = line
            self._unprocessed_bytes = size
            is_freed = was_full and not self.is_full
        if is_freed:
            self.on_durable()

    def trim(self, line: int) -> None:
        """Let lines before this one go, soon."""
        with self._changed:
            self._trim_line = line
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything received is durable, and say whether it is."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_idle() or self._failure, timeout_s)
            self._is_hurried = False
            return self._is_idle()

    def _is_idle(self) -> bool:
        return not self._pending_bytes and not self._is_sealing

    # The thread.

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:
            self.fail(error)
        finally:
            self.on_durable()

    def _step(self) -> bool:
        """Do what is due, or wait; say whether to go on."""
        with self._changed:
            wait_s = self._due_in_s()
            if wait_s and not self._is_stopping and self._trim_line is None:
                self._changed.wait(min(wait_s, _OWNER_CHECK_S))
                wait_s = self._due_in_s()
            if self._failure is not None:
                return False
            inflows = [] if wait_s and not self._is_stopping else self._begin_sealing()
            trim_line, self._trim_line = self._trim_line, None
            is_last = self._is_stopping
        if inflows:
            self._seal(inflows)
        if trim_line is None and self._empty_segments >= _EMPTY_SEGMENTS_MAX:
            # Where every line is skipped there is no batch, and so nobody who asks for it.
            trim_line = self._trimmed_line
        if trim_line is not None:
            self._trimmed_line, self._empty_segments = trim_line, 0
            self._spool.trim(trim_line)
        self._check_owner()
        return not is_last

    def _due_in_s(self) -> float:
        """Return how long the next segment may wait for more lines."""
        if not self._pending_bytes:
            return _OWNER_CHECK_S
        if self._pending_bytes >= self._options.segment_bytes or self._is_hurried:
            return 0.0
        due = self._last_seal + self._options.segment_interval_ms / 1000
        return max(0.0, due - time.monotonic())

    def _begin_sealing(self) -> list[tuple[Inflow, TakenBlock]]:
        taken = [
            (inflow, block)
            for inflow in self._inflows
            if inflow.buffer.complete_bytes
            for block in inflow.buffer.take()
        ]
        self._inflows = [inflow for inflow in self._inflows if not inflow.is_closed]
        self._pending_bytes = 0
        self._is_sealing = bool(taken)
        self._sealing_senders = frozenset(inflow.sender for inflow, _ in taken if inflow.sender)
        self._last_seal = time.monotonic()
        return taken

    def _seal(self, inflows: Iterable[tuple[Inflow, TakenBlock]]) -> None:
        sealing = _Sealing(counts=self._spool.counts, senders=dict(self._spool.senders))
        sealed = []
        fault: SocketSourceError | None = None
        for inflow, block in inflows:
            if inflow.fault is not None:
                continue
            cut = cut_lines(block.data, self._options.rules)
            sealing.add(inflow.peer, cut, block)
            if inflow.sender is not None:
                received = sealing.senders.get(inflow.sender, 0) + cut.counts.received
                sealing.senders[inflow.sender] = received
            sealed.append(inflow)
            if cut.fault is not None:
                fault = self._refuse(inflow, cut.fault)
                if fault is not None:
                    break  # What others sent behind it was not acknowledged to anybody.
        sealing.close_batch()
        self._append(sealing)
        self._settle(sealed)
        self._log_counts()
        if fault is not None:
            raise fault

    def _append(self, sealing: _Sealing) -> None:
        if sealing.counts == self._spool.counts:
            return
        with self._changed:
            partial_lines = self._partial_lines
        size = self._spool.append(
            sealing.batches,
            counts=sealing.counts,
            partial_lines=partial_lines,
            senders=sealing.senders,
        )
        self._empty_segments += not sealing.batches
        with self._changed:
            self._unprocessed_bytes += size

    def _settle(self, sealed: Iterable[Inflow]) -> None:
        with self._changed:
            for inflow in sealed:
                if inflow.sender is not None:
                    inflow.durable = self._spool.senders.get(inflow.sender, 0)
            self._is_sealing = False
            self._sealing_senders = frozenset()
            self._changed.notify_all()
        self.on_durable()

    def _refuse(self, inflow: Inflow, fault: SocketSourceError) -> SocketSourceError | None:
        """End the connection of a bad line; where there is only one peer, the query with it."""
        named = type(fault)(f"from {inflow.peer}: {fault.message}")
        with self._changed:
            inflow.fault = named
            self._drop(inflow)
        return named if self._options.mode is Mode.CONNECT else None

    def _check_owner(self) -> None:
        """Notice a new owner also while nothing is received, so that the port becomes free."""
        now = time.monotonic()
        if now - max(self._last_check, self._last_seal) < _OWNER_CHECK_S:
            return
        self._last_check = now
        try:
            self._spool.check_owner()
        except StorageError as error:
            _log.warning("who owns the spool could not be checked: %s", error)

    def _log_counts(self) -> None:
        counts, partial_lines = self._spool.counts, self._spool.partial_lines
        before, partial_before = self._logged
        now = time.monotonic()
        bad = counts.skipped, counts.truncated, counts.undecodable, partial_lines
        bad_before = before.skipped, before.truncated, before.undecodable, partial_before
        if bad == bad_before or now - self._last_logged < _COUNTS_LOGGED_S:
            return
        self._logged, self._last_logged = (counts, partial_lines), now
        _log.warning(
            "since the spool began: %d lines received, %d skipped, %d truncated, %d undecodable, "
            "%d unfinished dropped; the spool has %d bytes",
            counts.received,
            *bad,
            self._spool.size_bytes(),
        )
