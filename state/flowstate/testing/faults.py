"""A store that fails, stalls or takes the process down exactly when a test wants it to.

Run the code once to learn its operations, then once more for each of them::

    recorded = FaultyFileSystem(new_file_system())
    take_checkpoint(recorded)
    for number in range(len(recorded.operations)):
        files = new_file_system()
        with pytest.raises(SimulatedCrashError):
            take_checkpoint(FaultyFileSystem(files, [Fault(FaultAction.CRASH_AFTER, at=number)]))
        check_that_a_new_process_recovers(files)
"""

from __future__ import annotations

import builtins
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, BinaryIO, TypeAlias, cast

from flowstate.errors import StoreFullError, StoreUnavailableError
from flowstate.storage._port import FileEntry, StateFileSystem, check_path

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "Fault",
    "FaultAction",
    "FaultyFileSystem",
    "Operation",
    "OperationName",
    "SimulatedCrashError",
]


class OperationName(StrEnum):
    """What is counted. An output is three kinds of operations, so that a crash can come between."""

    WRITE = "write"
    CREATE_EXCLUSIVELY = "create_exclusively"
    READ = "read"
    READ_RANGES = "read_ranges"
    LIST = "list"
    MOVE = "move"
    """Each file of a ``move`` is an operation of its own."""
    DELETE = "delete"
    """Each file of a ``delete`` is an operation of its own."""
    OPEN_OUTPUT = "open_output"
    WRITE_OUTPUT = "write_output"
    CLOSE_OUTPUT = "close_output"
    """The end of the ``open_output`` block, which makes the file durable."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that the code under test began."""

    number: int
    """Its index in ``FaultyFileSystem.operations``."""
    name: OperationName
    path: str


class FaultAction(StrEnum):
    """What happens at an operation."""

    FAIL = "fail"
    """``StoreUnavailableError``, and the operation had no effect."""
    FAIL_AFTER = "fail after"
    """``StoreUnavailableError``, although the operation had its effect: the reply was lost."""
    FULL = "full"
    """``StoreFullError``, and the operation had no effect."""
    CRASH_BEFORE = "crash before"
    """The process dies, and the operation had no effect."""
    CRASH_AFTER = "crash after"
    """The process dies before it learns of the operation's effect."""
    TRUNCATE = "truncate"
    """Only the first half of the data is written, and success is reported.

    With ``CRASH_AFTER`` at the same operation this is a process that dies in mid-``write``.
    """
    DELAY = "delay"
    """The operation begins ``delay_s`` seconds later."""
    KILL = "kill"
    """The process that runs this kills itself with SIGKILL, before the operation. For children."""


_WRITES_DATA = frozenset(
    {OperationName.WRITE, OperationName.CREATE_EXCLUSIVELY, OperationName.WRITE_OUTPUT}
)

Occasion: TypeAlias = int | Callable[[Operation], bool]


@dataclass(frozen=True, slots=True)
class Fault:
    """One action, and when it happens."""

    action: FaultAction
    at: Occasion
    """The number of an operation, or a predicate that chooses operations."""
    times: int | None = 1
    """How many of the operations that a predicate chooses are hit; None is all of them."""
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.at, int) and self.at < 0:
            raise ValueError(f"operations are numbered from 0, so none has the number {self.at}")
        if self.times is not None and self.times < 1:
            raise ValueError(f"a fault that happens {self.times} times is none: leave it out")
        if (self.action is FaultAction.DELAY) != (self.delay_s > 0):
            raise ValueError(f"delay_s={self.delay_s} does not go with {self.action!r}")

    def chooses(self, operation: Operation) -> bool:
        """Tell whether this fault is for the operation."""
        if callable(self.at):
            return self.at(operation)
        return self.at == operation.number


class SimulatedCrashError(BaseException):
    """The process is dead, as far as its files are concerned.

    Not an ``Exception``: a dead process handles no errors, so no ``except Exception`` of the code
    under test may go on from here.
    """

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation)
        self.operation = operation

    def __str__(self) -> str:
        number, name, path = self.operation.number, self.operation.name, self.operation.path
        return f"crashed at operation {number}: {name} of {path!r}"


class FaultyFileSystem:
    """Any file system, with faults at chosen operations. Without faults it only counts.

    Operations are numbered from 0 in the order in which they begin. Every fault that is for an
    operation happens, in the order in which the faults were given.

    After a crash every operation raises ``SimulatedCrashError``: the next process is whoever
    uses the wrapped file system. An output that was open when the process died leaves what was
    written to it under its path, even where the wrapped store would show nothing of an
    unfinished upload: that is the worst that any store does.
    """

    def __init__(
        self,
        inner: StateFileSystem,
        faults: Iterable[Fault] = (),
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = inner.url
        self.operations: builtins.list[Operation] = []
        self._inner = inner
        self._faults: builtins.list[Fault] = []
        self._hits_left: builtins.list[int | None] = []
        self._sleep = sleep
        self._lock = threading.Lock()
        self._crashed_at: Operation | None = None
        self.inject(*faults)

    @property
    def crashed(self) -> bool:
        """Whether the process is dead."""
        return self._crashed_at is not None

    def inject(self, *faults: Fault) -> None:
        """Add faults. A number counts from the beginning: see ``len(operations)``."""
        with self._lock:
            self._faults += faults
            self._hits_left += [fault.times for fault in faults]

    def heal(self) -> None:
        """Forget all faults; a process that crashed stays dead."""
        with self._lock:
            self._faults.clear()
            self._hits_left.clear()

    @contextmanager
    def open_output(self, path: str) -> Iterator[BinaryIO]:
        output: _FaultyOutput | None = None
        try:
            with ExitStack() as inner:
                with self._operation(OperationName.OPEN_OUTPUT, path):
                    sink = inner.enter_context(self._inner.open_output(path))
                    output = _FaultyOutput(self, path, sink)
                yield cast(BinaryIO, output)
                with self._operation(OperationName.CLOSE_OUTPUT, path):
                    inner.close()
                    output.durable = True
        except BaseException:
            # The wrapped file system has cleaned up by now, which a dead process cannot do.
            if self.crashed and output is not None and not output.durable:
                self._inner.write(path, bytes(output.written))
            raise

    def write(self, path: str, data: bytes) -> None:
        with self._operation(OperationName.WRITE, path) as cut:
            self._inner.write(path, cut(data))

    def create_exclusively(self, path: str, data: bytes) -> bool:
        with self._operation(OperationName.CREATE_EXCLUSIVELY, path) as cut:
            return self._inner.create_exclusively(path, cut(data))

    def read(self, path: str) -> bytes:
        with self._operation(OperationName.READ, path):
            return self._inner.read(path)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        with self._operation(OperationName.READ_RANGES, path):
            return self._inner.read_ranges(path, ranges)

    def list(self, folder: str) -> builtins.list[FileEntry]:
        with self._operation(OperationName.LIST, folder):
            return self._inner.list(folder)

    def move(self, names: Mapping[str, str]) -> None:
        for path in (*names, *names.values()):
            check_path(path)
        for old, new in names.items():
            with self._operation(OperationName.MOVE, old):
                self._inner.move({old: new})

    def delete(self, paths: Iterable[str]) -> None:
        # All are checked before the first goes, as in one call of the wrapped file system.
        for path in [check_path(path) for path in paths]:
            with self._operation(OperationName.DELETE, path):
                self._inner.delete([path])

    @contextmanager
    def _operation(self, name: OperationName, path: str) -> Iterator[Callable[[bytes], bytes]]:
        """Count an operation and let its faults happen around the block that performs it."""
        operation, actions = self._begin(name, path)
        yield _first_half if FaultAction.TRUNCATE in actions else bytes
        if FaultAction.CRASH_AFTER in actions:
            self._crash(operation)
        # Another thread's crash takes this one along: whatever was done, nobody learns of it.
        self._check_alive()
        if FaultAction.FAIL_AFTER in actions:
            raise _unavailable(operation)

    def _begin(self, name: OperationName, path: str) -> tuple[Operation, set[FaultAction]]:
        with self._lock:
            self._check_alive()
            operation = Operation(len(self.operations), name, path)
            self.operations.append(operation)
            faults = self._due(operation)
        # Outside of the lock, so that others go on while this operation is delayed.
        for fault in faults:
            self._happen_before(fault, operation)
        self._check_alive()
        return operation, {fault.action for fault in faults}

    def _due(self, operation: Operation) -> builtins.list[Fault]:
        due = []
        for index, fault in enumerate(self._faults):
            hits_left = self._hits_left[index]
            if hits_left == 0 or not fault.chooses(operation):
                continue
            if hits_left is not None:
                self._hits_left[index] = hits_left - 1
            due.append(fault)
        return due

    def _happen_before(self, fault: Fault, operation: Operation) -> None:
        match fault.action:
            case FaultAction.FAIL:
                raise _unavailable(operation)
            case FaultAction.FULL:
                raise StoreFullError(
                    f"cannot {operation.name} {operation.path}: a test let the store be full"
                )
            case FaultAction.CRASH_BEFORE:
                self._crash(operation)
            case FaultAction.TRUNCATE if operation.name not in _WRITES_DATA:
                raise ValueError(f"{operation} writes no data that could be truncated")
            case FaultAction.DELAY:
                self._sleep(fault.delay_s)
            case FaultAction.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                pass  # What is left happens while or after the operation does its work.

    def _crash(self, operation: Operation) -> None:
        # Of two crashes at once, either may be the one that is told of.
        self._crashed_at = self._crashed_at or operation
        self._check_alive()

    def _check_alive(self) -> None:
        if self._crashed_at is not None:
            raise SimulatedCrashError(self._crashed_at)


class _FaultyOutput(io.BufferedIOBase):
    """An output that remembers what was written to it, in case the process dies."""

    def __init__(self, files: FaultyFileSystem, path: str, sink: BinaryIO) -> None:
        self.written = bytearray()
        self.durable = False
        self._files = files
        self._path = path
        self._sink = sink
        self._length = 0

    def writable(self) -> bool:
        return True

    def write(self, buffer: ReadableBuffer, /) -> int:
        if self.closed:
            raise ValueError("write to a closed file")
        data = memoryview(buffer).cast("B")
        with self._files._operation(OperationName.WRITE_OUTPUT, self._path) as cut:
            piece = cut(bytes(data))
            self._sink.write(piece)
            self.written += piece
        self._length += data.nbytes
        return data.nbytes

    def tell(self) -> int:
        return self._length


def _first_half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _unavailable(operation: Operation) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"cannot {operation.name} {operation.path}: a test let the store fail"
    )
