"""What a command is, and what it may say by its exit code.

A package that depends on this one adds a command by an entry point of the group
``flowspark.commands``: its name is the command's, and it leads to a :class:`Command`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

from flowspark.command.terminal import Terminal
from flowstate.errors import FlowError

__all__ = ["ENTRY_POINTS", "Command", "CommandError", "ExitCode", "Invocation"]

ENTRY_POINTS = "flowspark.commands"


class ExitCode(IntEnum):
    """What a shell is told."""

    OK = 0
    """It was done, and nothing is wrong."""
    FOUND = 1
    """What was looked for is there: damage, a failed check, a difference."""
    USAGE = 2
    """The command line cannot be meant so."""
    FAILED = 3
    """It could not be done: no such place, no checkpoint, a store that fails."""
    INTERRUPTED = 130
    """Ctrl-C."""
    BROKEN_PIPE = 141
    """Whoever read the output has gone, as ``head`` does."""


class CommandError(FlowError):
    """A command was given something that is not there, or that it does not take."""

    code: ClassVar[str] = "FLOW_COMMAND"

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of a command."""

    arguments: argparse.Namespace
    storage_options: Mapping[str, Any]
    """For the store's package. They may be secrets, and are printed nowhere."""
    terminal: Terminal

    @property
    def as_json(self) -> bool:
        """Whether a program reads the output."""
        return bool(self.arguments.json)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of ``flow``."""

    name: str
    summary: str
    """One line, in lower case, for the list of commands."""
    run: Callable[[Invocation], ExitCode]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    description: str = ""
    """What else its own help says."""
    touches_state: bool = True
    """Whether it takes ``--storage-option``."""
    secret_arguments: tuple[str, ...] = ()
    """Repeatable arguments of the form ``NAME=VALUE`` whose values no message may repeat."""
