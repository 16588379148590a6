"""From the shell to a command, and back as an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, NoReturn

from flowspark import __version__
from flowspark.command import (
    completion,
    diffing,
    doctor,
    inspecting,
    reporting,
    rescaling,
    sealing,
    showing,
    sweeping,
    verifying,
)
from flowspark.command.arguments import add_common, storage_options_of
from flowspark.command.contract import (
    ENTRY_POINTS,
    Command,
    CommandError,
    ExitCode,
    Invocation,
)
from flowspark.command.terminal import OutputError, Style, Terminal
from flowspark.command.words import hint_for
from flowstate.errors import FlowError

__all__ = ["build_parser", "main", "run"]

_DESCRIPTION = "Look at the state of flowspark's queries, check it, and keep it tidy."
_EXIT_CODES = """exit codes:
  0    done, and nothing is wrong
  1    what was looked for is there: damage, a failed check, a difference
  2    the command line cannot be meant so
  3    it could not be done: no such place, no checkpoint, a store that fails
  130  interrupted (Ctrl-C)
  141  whoever read the output has gone, as in a pipe to head
"""
_SECRET_LENGTH_MIN = 4
_REPORT = (
    "This is a mistake of flow itself: please report it, with what 'flow inspect' and 'flow "
    "verify' say of the location"
)


class _Parser(argparse.ArgumentParser):
    """Says the nearest name where a command is not known."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: {message}\n")


def commands() -> list[Command]:
    """Return the commands that this package has."""
    return [
        inspecting.COMMAND,
        showing.COMMAND,
        verifying.COMMAND,
        rescaling.COMMAND,
        diffing.COMMAND,
        sealing.COMMAND,
        sweeping.COMMAND,
        reporting.COMMAND,
        doctor.COMMAND,
    ]


def added_commands() -> list[Command]:
    """Return the commands that other packages add; one that cannot be loaded says why."""
    found = []
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda one: one.name):
        try:
            found.append(entry.load())
        except Exception as error:
            found.append(_broken(entry.name, f"{type(error).__name__}: {error}"))
    return found


def _broken(name: str, reason: str) -> Command:
    def run(invocation: Invocation) -> ExitCode:
        raise CommandError(f"'flow {name}' could not be loaded: {reason}")

    def take_anything(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    return Command(name, "could not be loaded", run, take_anything)


def build_parser(found: Sequence[Command]) -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="flow",
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flow (flowspark) {__version__}")
    parsers = parser.add_subparsers(metavar="COMMAND", dest="command", title="commands")
    for command in found:
        child = parsers.add_parser(
            command.name,
            help=command.summary,
            description=command.description or f"{command.summary.capitalize()}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(child)
        add_common(child, touches_state=command.touches_state)
        child.set_defaults(run_command=command, parser=child)
    completion.add_parser(parsers.add_parser)
    return parser


def run(arguments: Sequence[str], terminal: Terminal) -> int:
    """Run a command line in this process."""
    known = commands()
    # The others cost the import of their packages, so they are loaded only when they are wanted.
    if not arguments or arguments[0] not in {command.name for command in known}:
        known += added_commands()
    parser = build_parser(known)
    if not arguments:
        parser.print_help(terminal.out)
        return ExitCode.USAGE
    names = [*(command.name for command in known), completion.NAME]
    if not arguments[0].startswith("-") and arguments[0] not in names:
        parser.error(f"there is no command {arguments[0]!r}. {hint_for(arguments[0], names)}")
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(unknown[0], given, getattr(given, "parser", parser))
    if given.command == completion.NAME:
        terminal.write(completion.script(parser, given.shell))
        return ExitCode.OK
    command: Command = given.run_command
    options: dict[str, Any] = {}
    if command.touches_state:
        options = storage_options_of(given.storage_option, given.parser)
    secrets = [options, *(_values(getattr(given, name)) for name in command.secret_arguments)]
    try:
        return command.run(Invocation(given, options, terminal))
    except FlowError as error:
        return _failed(error, terminal, as_json=given.json, secrets=secrets)
    except (BrokenPipeError, OutputError, KeyboardInterrupt):
        raise
    except Exception as error:
        # A client's own words, or a traceback, could show a secret.
        unexpected = CommandError(f"unexpected {type(error).__name__}: {error}. {_REPORT}")
        return _failed(unexpected, terminal, as_json=given.json, secrets=secrets)


def _values(given: Sequence[str]) -> list[str]:
    return [text.partition("=")[2] for text in given]


def _refuse(unknown: str, given: argparse.Namespace, parser: argparse.ArgumentParser) -> NoReturn:
    if not unknown.startswith("-"):
        # With a blank behind the "=" of a storage option, it is that option's value.
        told = "" if getattr(given, "storage_option", None) else f": {unknown!r}"
        parser.error(f"there is an argument too many{told}")
    # What follows a "=" may be a secret.
    name = unknown.partition("=")[0]
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    if name in options:
        parser.error(f"{name} stands behind the command: flow {given.command} ... {name}")
    parser.error(f"there is no option {name!r}. {hint_for(name, options)}")


def _failed(error: FlowError, terminal: Terminal, *, as_json: bool, secrets: Sequence[Any]) -> int:
    notes = getattr(error, "__notes__", [])
    text = _without("\n".join([str(error), *notes]), secrets)
    exit_code = error.exit_code if isinstance(error, CommandError) else ExitCode.FAILED
    if as_json:
        kind = type(error).__name__
        code = str(error).partition("]")[0].removeprefix("[")
        terminal.json({"error": {"code": code, "type": kind, "message": text}})
    else:
        label, _, message = text.partition("] ")
        terminal.note(terminal.styled(f"{label}]", Style.RED) + f" {message}")
    return exit_code


def _without(text: str, secrets: Sequence[Any]) -> str:
    """Return the text without the values of storage options and the like, whoever put them in."""
    for value in sorted(_texts(secrets), key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for part in value.values() for text in _texts(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _texts(part)]
    if isinstance(value, str) and len(value) >= _SECRET_LENGTH_MIN:
        return [value]
    return []


def _open_closed() -> None:
    """Let output that a shell has closed, as ``>&-`` does, go to nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _discard_output() -> None:
    # Python flushes once more at its end, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``flow``; this is what the console script calls."""
    _open_closed()
    try:
        code = run(sys.argv[1:] if arguments is None else arguments, Terminal.of_process())
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_output()
        return ExitCode.BROKEN_PIPE
    except OSError as error:
        # An OutputError, or the same from the last flush.
        _discard_output()
        sys.stderr.write(f"flow: cannot write the output: {error.strerror or error}\n")
        return ExitCode.FAILED
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return ExitCode.INTERRUPTED
