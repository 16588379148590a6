"""``flow completion``: what a shell needs to complete a command line, made from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["NAME", "Shell", "add_parser", "script"]

NAME = "completion"


class Shell(StrEnum):
    """The shells that are served."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@dataclass(frozen=True, slots=True)
class _Option:
    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    help: str
    options: tuple[_Option, ...]
    choices: tuple[str, ...]
    """What the positional arguments may be; without any they are paths."""


_INSTALL = """To install it:

  bash  flow completion bash > ~/.local/share/bash-completion/completions/flow
  zsh   flow completion zsh > DIR/_flow, where DIR is a folder of $fpath
  fish  flow completion fish > ~/.config/fish/completions/flow.fish
"""


def add_parser(make: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command; it needs the parser of all others, so it is not one of them."""
    child = make(
        NAME,
        help="a script that lets a shell complete 'flow' with the tab key",
        description="Print a script that lets a shell complete 'flow' with the tab key.",
        epilog=_INSTALL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    child.add_argument("shell", choices=[shell.value for shell in Shell], help="which shell")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for a shell."""
    commands = list(_commands(parser))
    match Shell(shell):
        case Shell.BASH:
            return _bash(commands)
        case Shell.ZSH:
            return _zsh(commands)
        case Shell.FISH:
            return _fish(commands)


def _commands(parser: argparse.ArgumentParser) -> Iterator[_Command]:
    (parsers,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    summaries = {action.dest: action.help or "" for action in parsers._choices_actions}
    for name, child in parsers.choices.items():
        positional = [action for action in child._actions if not action.option_strings]
        choices = [str(choice) for action in positional for choice in action.choices or ()]
        options = tuple(
            _Option(
                tuple(action.option_strings),
                " ".join((action.help or "").split()) % vars(action),
                action.nargs != 0,
                tuple(map(str, action.choices or ())),
            )
            for action in child._actions
            if action.option_strings
        )
        yield _Command(name, summaries.get(name, ""), options, tuple(choices))


def _bash(commands: list[_Command]) -> str:
    names = " ".join(command.name for command in commands)
    lines = [
        "# bash completion of flow, printed by: flow completion bash",
        "_flow() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
        "    COMPREPLY=()",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        COMPREPLY=($(compgen -W "{names} --help --version" -- "$current"))',
        "        return",
        "    fi",
        '    local options="" choices="" valued=""',
        '    case "${COMP_WORDS[1]}" in',
    ]
    for command in commands:
        options = " ".join(name for option in command.options for name in option.names)
        valued = " ".join(
            name for option in command.options if option.takes_value for name in option.names
        )
        choices = " ".join(command.choices)
        lines.append(
            f'        {command.name}) options="{options}"; valued="{valued}"; '
            f'choices="{choices}" ;;'
        )
    lines += [
        "    esac",
        '    case " $valued " in *" $previous "*)',
        "        compopt -o default; return ;;",
        "    esac",
        '    if [[ "$current" == -* ]]; then',
        '        COMPREPLY=($(compgen -W "$options" -- "$current"))',
        '    elif [ -n "$choices" ]; then',
        '        COMPREPLY=($(compgen -W "$choices" -- "$current"))',
        "    else",
        "        # State locations are folders; URLs of object stores are not completed.",
        "        compopt -o filenames",
        '        COMPREPLY=($(compgen -d -- "$current"))',
        "    fi",
        "}",
        "complete -F _flow flow",
    ]
    return "\n".join(lines) + "\n"


def _zsh(commands: list[_Command]) -> str:
    lines = [
        "#compdef flow",
        "# zsh completion of flow, printed by: flow completion zsh",
        "_flow() {",
        "    local -a commands",
        "    commands=(",
        *(f"        {_zsh_quoted(f'{one.name}:{one.help}')}" for one in commands),
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe -t commands 'flow command' commands",
        "        _arguments '--version[the version]' '--help[all commands]'",
        "        return",
        "    fi",
        "    local command=$words[2]",
        "    shift words",
        "    (( CURRENT-- ))",
        '    case "$command" in',
    ]
    for command in commands:
        lines.append(f"        {command.name})")
        lines.append("            _arguments \\")
        for option in command.options:
            for name in option.names:
                value = ":value:_files" if option.takes_value else ""
                text = f"*{name}[{_zsh_help(option.help)}]{value}"
                lines.append(f"                {_zsh_quoted(text)} \\")
        rest = f"({' '.join(command.choices)})" if command.choices else "_files -/"
        lines.append(f"                {_zsh_quoted(f'*:argument:{rest}')}")
        lines.append("            ;;")
    # The file is a function of its own when $fpath finds it, and defines one when it is sourced.
    lines += [
        "    esac",
        "}",
        'if [ "$funcstack[1]" = "_flow" ]; then _flow "$@"; else compdef _flow flow; fi',
    ]
    return "\n".join(lines) + "\n"


def _zsh_help(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace(":", "\\:")


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish(commands: list[_Command]) -> str:
    names = " ".join(command.name for command in commands)
    unknown = f"not __fish_seen_subcommand_from {names}"
    lines = [
        "# fish completion of flow, printed by: flow completion fish",
        "complete -c flow -f",
        f"complete -c flow -n '{unknown}' -l version -d 'the version'",
        f"complete -c flow -n '{unknown}' -s h -l help -d 'all commands'",
    ]
    for command in commands:
        seen = f"__fish_seen_subcommand_from {command.name}"
        lines.append(
            f"complete -c flow -n '{unknown}' -a {command.name} -d {_fish_quoted(command.help)}"
        )
        rest = (
            f"-a '{' '.join(command.choices)}'"
            if command.choices
            else ("-a '(__fish_complete_directories)'")
        )
        lines.append(f"complete -c flow -n '{seen}' {rest}")
        for option in command.options:
            flags = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            value = " -r" if option.takes_value else ""
            lines.append(
                f"complete -c flow -n '{seen}' {flags}{value} -d {_fish_quoted(option.help)}"
            )
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
