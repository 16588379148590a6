"""What the suites of keyed state share: a backend that can be stopped, started and rescaled."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from flowstate.checkpoint import CheckpointRecord
from flowstate.key_groups import KeyGroupAssigner
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.operators import LocalOperator
from flowstate.testing.clock import ManualClock

__all__ = ["KeyedHarness", "KeyedSuiteBase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """What an operator is started with."""

    key_type: Any = str
    parallelism: int = 1
    max_parallelism: int | None = None
    assigner: KeyGroupAssigner = KeyGroupAssigner.FLINK


class KeyedHarness:
    """The keyed state of one operator, from one life of its process to the next.

    ``working_folder`` is where a backend on local disk keeps its rows. With ``always_rebuild`` each
    life has a folder of its own, as if it began on another machine.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        clock: ManualClock,
        working_folder: Path | None = None,
        always_rebuild: bool = False,
    ) -> None:
        self.url, self.clock = url, clock
        self._working_folder, self._always_rebuild = working_folder, always_rebuild
        self._program = _Program()
        self._lives = 0
        self._operator: LocalOperator | None = None

    @property
    def operator(self) -> LocalOperator:
        """The operator, which is started now if it has not been."""
        if self._operator is None:
            self._operator = self._start()
        return self._operator

    @property
    def backends(self) -> list[KeyedStateBackend]:
        """The backends of all subtasks."""
        return [subtask.keyed for subtask in self.operator.subtasks]

    def start(self, key_type: Any = str, **program: Any) -> KeyedHarness:
        """Start with these settings, as they are to be kept by ``reopen``."""
        self.close()
        self._program = _Program(key_type=key_type, **program)
        self._operator = self._start()
        return self

    def at(self, key: Any, *, timestamp: int | None = None) -> KeyedStateBackend:
        """Return the backend that owns a key, with the key set."""
        backend = self.operator.subtask_of(key).keyed
        backend.context.timestamp = timestamp
        return backend

    def checkpoint(self) -> CheckpointRecord:
        """Take a checkpoint."""
        return self.operator.checkpoint()

    def reopen(self, *, parallelism: int | None = None) -> None:
        """Go on from the newest checkpoint, without what has happened since."""
        self.close()
        if parallelism is not None:
            self._program = replace(self._program, parallelism=parallelism)
        self._operator = self._start()

    def restart(self, *, parallelism: int | None = None) -> None:
        """Take a checkpoint and go on from it."""
        self.checkpoint()
        self.reopen(parallelism=parallelism)

    def close(self) -> None:
        """Stop, as a process does that is not asked."""
        if self._operator is not None:
            self._operator.close()
            self._operator = None

    def _start(self) -> LocalOperator:
        self._lives += 1
        folder = self._working_folder
        if folder is not None and self._always_rebuild:
            folder = folder / str(self._lives)
        program = self._program
        return LocalOperator(
            self.url,
            parallelism=program.parallelism,
            key_type=program.key_type,
            max_parallelism=program.max_parallelism,
            assigner=program.assigner,
            working_folder=folder,
            clock=self.clock,
        )


class KeyedSuiteBase(ABC):
    """The fixtures of the suites; ``harness`` begins with text keys and one subtask."""

    @abstractmethod
    def open_backend(self, tmp_path: Path, clock: ManualClock) -> KeyedHarness:
        """Return a harness whose location holds no checkpoint yet."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """Return the time, which begins at 0 and is the backend's."""
        return ManualClock()

    @pytest.fixture
    def harness(self, tmp_path: Path, clock: ManualClock) -> Iterator[KeyedHarness]:
        """Yield the backend under test."""
        harness = self.open_backend(tmp_path, clock)
        yield harness
        harness.close()
