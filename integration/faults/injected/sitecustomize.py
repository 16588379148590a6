"""Python imports this by itself at its start, where the folder is on PYTHONPATH.

It lets a test break what the processes of a pipeline stand on. Files in the folder that
``FLOW_FAULT_CONTROL`` names say what is broken at the moment: ``unavailable`` and ``full`` hold the
probability with which an operation of a store fails, ``clock`` the seconds by which the clock is
wrong.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_STORES = "flowstate.storage.filesystems"
_CONTROL_READ_S = 0.1


class _Control:
    """One file of the control folder, looked at now and then."""

    def __init__(self, path: str) -> None:
        self._path, self._read_at, self._value = path, 0.0, 0.0

    def value(self) -> float:
        now = time.monotonic()
        if now - self._read_at > _CONTROL_READ_S:
            self._read_at = now
            try:
                with open(self._path) as file:
                    self._value = float(file.read() or 0)
            except (OSError, ValueError):
                self._value = 0.0
        return self._value


def _break_clock(control: _Control) -> None:
    for name, unit in (("time", 1.0), ("time_ns", 1_000_000_000)):
        setattr(time, name, _wrong(getattr(time, name), control, unit))


def _wrong(clock: Callable[[], Any], control: _Control, unit: float) -> Callable[[], Any]:
    kind = type(clock())
    return lambda: clock() + kind(control.value() * unit)


def _break_stores(module: ModuleType, folder: str) -> None:
    from flowstate.testing.faults import Fault, FaultAction, FaultyFileSystem

    chance = random.Random()

    def at(control: _Control) -> Callable[[object], bool]:
        return lambda _: chance.random() < control.value()

    actions = {"unavailable": FaultAction.FAIL, "lost": FaultAction.FAIL_AFTER}
    actions["full"] = FaultAction.FULL
    faults = [
        Fault(action, at=at(_Control(os.path.join(folder, name))), times=None)
        for name, action in actions.items()
    ]
    sound = module.open_file_system
    setattr(  # noqa: B010 (the module's own type has no such name)
        module, "open_file_system", lambda *given: FaultyFileSystem(sound(*given), faults)
    )


class _Finder(importlib.abc.MetaPathFinder):
    """Changes one module when it is loaded, and has no part in others."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _STORES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _break_stores(module, self._folder)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if folder := os.environ.get("FLOW_FAULT_CONTROL"):
    _break_clock(_Control(os.path.join(folder, "clock")))
    sys.meta_path.insert(0, _Finder(folder))
