from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flowspark.command.completion import Shell
from flowspark.command.main import added_commands, commands

from .shell import TIMEOUT_S, environment, flow


def names() -> list[str]:
    return [command.name for command in (*commands(), *added_commands())]


@pytest.mark.parametrize("shell", list(Shell))
def test_a_script_knows_every_command_and_its_options(shell: Shell) -> None:
    shown = flow("completion", shell)

    assert shown.code == 0
    assert "flush" in names()
    for word in (*names(), "parallelism", "storage-option", "dry-run", "zsh"):
        assert word in shown.out


def test_an_unknown_shell_is_refused() -> None:
    shown = flow("completion", "tcsh")

    assert shown.code == 2
    assert "'bash', 'zsh', 'fish'" in shown.err


def ran(shell: str, script: str, folder: Path) -> str:
    """Run a script with the completions at hand, if the shell is there."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (folder / "completion").write_text(flow("completion", shell).out, encoding="utf-8")
    done = subprocess.run(
        [shell, "-c", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment(HOME=str(folder)),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flow re", "rescale report"),
        ("flow rescale x --par", "--parallelism"),
        ("flow sweep x --", "--help --dry-run --yes --json --storage-option"),
        ("flow completion f", "fish"),
        ("flow inspect st", "state"),
    ],
)
def test_bash_completes(tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "stuff").touch()
    script = (
        f"source ./completion; COMP_WORDS=({line}); COMP_CWORD=$(({len(line.split())} - 1)); "
        f'_flow 2>/dev/null; echo "${{COMPREPLY[*]}}"'
    )

    assert ran("bash", script, tmp_path).strip() == expected


def test_fish_completes(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    script = (
        "source ./completion; complete -C 'flow resc'; complete -C 'flow rescale --par'; "
        "complete -C 'flow inspect sta'"
    )

    found = [line.split("\t")[0] for line in ran("fish", script, tmp_path).splitlines()]
    assert found == ["rescale", "--parallelism", "state/"]


def test_zsh_takes_the_script(tmp_path: Path) -> None:
    script = (
        "autoload -U compinit; compinit -u -D; source ./completion; print -r -- ${_comps[flow]}"
    )

    assert ran("zsh", script, tmp_path).strip() == "_flow"
