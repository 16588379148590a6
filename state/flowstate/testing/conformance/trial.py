"""What one case is replayed in: checkpoints of its own, and a list of what it found."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Any

from flowstate.clock import Clock
from flowstate.errors import FlowError
from flowstate.operators import LocalOperator
from flowstate.storage.filesystems import open_file_system

__all__ = [
    "VOID",
    "Backend",
    "Json",
    "Mismatch",
    "Trial",
    "VectorError",
    "attempt",
    "expect",
    "expect_outcome",
    "field_of",
    "is_refusal",
    "shown",
    "steps_of",
    "unordered",
]

Json = Any
"""Whatever ``json`` reads: what a field holds is checked where the field is used."""


class Backend(StrEnum):
    """Where keyed state is held while it is worked with."""

    MEMORY = "memory"
    LMDB = "lmdb"


class Mismatch(Exception):  # noqa: N818 - what it says is a finding, not a fault of the runner
    """The library did something else than the vectors say."""

    def __init__(self, where: str, expected: Any, actual: Any) -> None:
        super().__init__(where, expected, actual)
        self.where, self.expected, self.actual = where, expected, actual

    def __str__(self) -> str:
        return f"{self.where}: expected {shown(self.expected)}, got {shown(self.actual)}"


class VectorError(Exception):
    """A case that cannot be replayed, because it says something that no format provides for."""


class _Void:
    """What an operation without a result returns; the files write "void"."""

    def __repr__(self) -> str:
        return "void"


VOID = _Void()
# "ok" and "accepted" are what the files write where registering or restoring went through.
_WENT_THROUGH = ("void", "ok", "accepted")


class Trial:
    """A case's own checkpoints, on a store in memory, which are gone when it is over."""

    def __init__(self, backend: Backend = Backend.MEMORY) -> None:
        self.backend = backend
        self.differences: list[str] = []
        self._base = f"memory://conformance-{uuid.uuid4().hex}"
        self._roots = 0
        self._open = ExitStack()

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        files = open_file_system(self._base)
        files.delete([entry.path for entry in files.list("")])

    def differs(self, reason: str) -> None:
        """Note that the library deliberately does something else here, and did exactly that."""
        if reason not in self.differences:
            self.differences.append(reason)

    def new_root(self) -> str:
        """Return where the checkpoints of one more operator may lie."""
        self._roots += 1
        return f"{self._base}/{self._roots}"

    def operator(
        self,
        root: str,
        *,
        parallelism: int,
        key_type: Any = None,
        max_parallelism: int | None = None,
        restore_from: str | None = None,
        clock: Clock | None = None,
    ) -> LocalOperator:
        """Open an operator on the backend under test; it is closed when the trial is over.

        On LMDB each operator starts with an empty folder, as on a machine that it has never run
        on. One that is there already may still hold what a full snapshot has left out.
        """
        # No checkpoint is retired while the case may still come back to it.
        operator = LocalOperator(
            root,
            parallelism=parallelism,
            key_type=key_type,
            max_parallelism=max_parallelism,
            restore_from=restore_from,
            working_folder=self._folder() if key_type is not None else None,
            checkpoints_retained=1 << 31,
            clock=clock,
        )
        return self._open.enter_context(operator)

    def _folder(self) -> Path | None:
        if self.backend is Backend.MEMORY:
            return None
        folder = tempfile.TemporaryDirectory(prefix="conformance-", ignore_cleanup_errors=True)
        return Path(self._open.enter_context(folder))


def attempt(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the library's own error that it raises."""
    try:
        return call()
    except FlowError as error:
        return error


def is_refusal(expected: Json) -> bool:
    """Say whether a result is an exception."""
    return isinstance(expected, Mapping) and bool({"exception", "exception_chain"} & set(expected))


def expect(where: str, expected: Any, actual: Any) -> None:
    """Refuse anything but the expected value."""
    if not _same(expected, actual):
        raise Mismatch(where, expected, actual)


def expect_outcome(
    where: str, expected: Json, actual: Any, *, refused_with: type[FlowError]
) -> None:
    """Compare what came of a step; where Flink has an exception, ours is of a given class."""
    if is_refusal(expected):
        if not isinstance(actual, refused_with):
            raise Mismatch(where, f"a {refused_with.__name__} ({shown(expected)})", actual)
    elif actual is VOID:
        if expected not in _WENT_THROUGH:
            raise Mismatch(where, expected, actual)
    else:
        expect(where, expected, actual)


def _same(expected: Any, actual: Any) -> bool:
    # To Python True is 1, and a NaN is not itself.
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, float) and isinstance(actual, float) and expected != expected:
        return actual != actual
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        return len(expected) == len(actual) and all(map(_same, expected, actual))
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        return expected.keys() == actual.keys() and all(
            _same(value, actual[key]) for key, value in expected.items()
        )
    return bool(type(expected) is type(actual) or _are_numbers(expected, actual)) and bool(
        expected == actual
    )


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def unordered(values: Iterable[Any]) -> list[Any]:
    """Return values in one order, whatever order they came in."""
    return sorted(values, key=lambda value: (value is None, repr(value)))


def field_of(case: Mapping[str, Json], name: str) -> Json:
    """Return a field that the format requires."""
    if name not in case:
        raise VectorError(f"{name!r} is missing in {shown(case)}")
    return case[name]


def steps_of(case: Mapping[str, Json], name: str = "steps") -> list[Mapping[str, Json]]:
    """Return the steps of a script, of which there must be one: none would pass as anything."""
    steps = field_of(case, name)
    if not isinstance(steps, list) or not steps:
        raise VectorError(f"{name!r} has no step to replay: {shown(steps)}")
    return steps


def shown(value: Any) -> str:
    """Return a value for a message, shortened where it is long."""
    if isinstance(value, FlowError):
        text = f"{type(value).__name__}: {value.message}"
    elif value is None:
        text = "null"
    else:
        text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else f"{text[:297]}..."
