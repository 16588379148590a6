"""An operator with every kind of state, driven to the point where a checkpoint does everything.

Also a script: ``python scenario.py FOLDER NUMBER`` prepares nothing, opens the operator in FOLDER,
and is killed at storage operation NUMBER of its next checkpoint.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from flowstate import (
    AggregatingStateDescriptor,
    CheckpointStorage,
    ListStateDescriptor,
    LocalOperator,
    MapStateDescriptor,
    Reducer,
    ReducingStateDescriptor,
    Subtask,
    TimeDomain,
    ValueStateDescriptor,
)
from flowstate.storage.filesystems import StateFileSystem, open_file_system
from flowstate.testing.faults import Fault, FaultAction, FaultyFileSystem

KEYS = [f"key-{number:04d}" for number in range(120)]
# So many that a tier is due, and the next checkpoint begins with a merge.
PREPARED_CHECKPOINTS = 9


def text_of(seed: str) -> str:
    """Return a text so long and random that the state does not fit into the record itself."""
    return hashlib.shake_256(seed.encode()).hexdigest(2000)


class States:
    """The states of one subtask."""

    def __init__(self, subtask: Subtask) -> None:
        keyed = subtask.keyed
        self.value = keyed.get_state(ValueStateDescriptor("value", str))
        self.list = keyed.get_list_state(ListStateDescriptor("list", int))
        self.map = keyed.get_map_state(MapStateDescriptor("map", str, int))
        self.sum = keyed.get_reducing_state(ReducingStateDescriptor("sum", Reducer.SUM, int))
        self.mean = keyed.get_aggregating_state(
            AggregatingStateDescriptor("mean", Reducer.MEAN, float)
        )
        self.buffer = subtask.operator.get_list_state(ListStateDescriptor("buffer", str))
        self.timers = keyed.timer_service


class Program:
    """What a job does between checkpoints: round n touches every key that n divides."""

    def __init__(self, file_system: StateFileSystem, *, parallelism: int, **options: Any) -> None:
        storage = CheckpointStorage("", file_system=file_system)
        self.operator = LocalOperator(
            "", storage=storage, parallelism=parallelism, key_type=str, **options
        )
        self._states = {id(subtask): States(subtask) for subtask in self.operator.subtasks}

    def work(self, round_number: int) -> None:
        for position, key in enumerate(KEYS):
            if position % 20 != round_number % 20 and round_number > 0:
                continue
            states = self._of(key)
            states.value.update(text_of(f"{round_number}:{key}"))
            states.list.add(round_number)
            states.map.put(f"round-{round_number % 3}", round_number)
            states.sum.add(round_number)
            states.mean.add(round_number)
            states.timers.register_event_time_timer(1000 + round_number)
        first = self.operator.subtasks[0]
        self._states[id(first)].buffer.add(text_of(f"round-{round_number}"))

    def contents(self) -> dict[str, Any]:
        """Return everything that the state holds."""
        found: dict[str, Any] = {}
        for key in KEYS:
            states = self._of(key)
            found[key] = (
                states.value.value(),
                states.list.get(),
                dict(states.map.items()),
                states.sum.get(),
                states.mean.get(),
            )
        buffers = [self._states[id(subtask)].buffer for subtask in self.operator.subtasks]
        found["buffers"] = sorted(element for buffer in buffers for element in buffer.get())
        found["timers"] = sum(
            subtask.keyed.timer_service.count(TimeDomain.EVENT_TIME)
            for subtask in self.operator.subtasks
        )
        return found

    def _of(self, key: str) -> States:
        return self._states[id(self.operator.subtask_of(key))]


def prepare(file_system: StateFileSystem) -> None:
    """Take the checkpoints before the one that is going to fail."""
    program = Program(file_system, parallelism=2)
    for round_number in range(PREPARED_CHECKPOINTS):
        program.work(round_number)
        program.operator.checkpoint()


def copy_files(source: StateFileSystem, target: StateFileSystem) -> None:
    for entry in source.list(""):
        target.write(entry.path, source.read(entry.path))


if __name__ == "__main__":
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    files = FaultyFileSystem(open_file_system(folder))
    killed = Program(files, parallelism=2)
    killed.work(PREPARED_CHECKPOINTS)
    before = len(files.operations)
    files.inject(Fault(FaultAction.KILL, at=before + number))
    killed.operator.checkpoint()
