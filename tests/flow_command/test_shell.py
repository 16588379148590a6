from __future__ import annotations

import functools
import json
import os
import pty
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from flowspark import __version__
from flowspark.command import main
from flowspark.command.contract import Invocation
from flowspark.command.main import added_commands, commands
from flowspark.command.terminal import Terminal
from flowstate import LocalOperator, ValueStateDescriptor
from flowstate.checkpoint import encode_name

from .shell import TIMEOUT_S, environment, flow, flow_process
from .states import one_value

# Without Spark


NO_PYSPARK = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("pyspark"):
            raise ImportError("this computer has no Spark")
sys.meta_path.insert(0, Refuse())
from flowspark.command.main import main
code = main(sys.argv[1:])
sys.exit(code if not any(name.startswith("pyspark") for name in sys.modules) else 99)
"""


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (0, ["inspect", "URL"]),
        (0, ["show", "URL", "--state", "count"]),
        (0, ["verify", "URL"]),
        (0, ["rescale", "--dry-run", "URL", "--parallelism", "4"]),
        (1, ["diff", "URL/chk-1", "URL/chk-2"]),
        (0, ["sweep", "URL", "--dry-run"]),
        (0, ["report", "URL", "--out", "OUT"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_state_is_looked_at_without_spark(
    words: Path, tmp_path: Path, code: int, arguments: list[str]
) -> None:
    given = [
        text.replace("URL", str(words)).replace("OUT", str(tmp_path / "r.html"))
        for text in arguments
    ]
    done = subprocess.run(
        [sys.executable, "-c", NO_PYSPARK, *given],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert (done.returncode, done.stderr) == (code, "")


def test_what_cannot_be_loaded_does_not_break_the_others() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_PYSPARK, "flush", "x"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 3
    assert "'flow flush' could not be loaded: ImportError" in done.stderr


# The command line


def test_the_script_and_the_added_command_are_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="flow")

    assert script.load() is main.main
    assert [command.name for command in added_commands()] == ["flush"]


def test_the_version_is_that_of_the_package() -> None:
    assert flow("--version").out == f"flow (flowspark) {__version__}\n"


def test_without_a_command_all_are_listed() -> None:
    shown = flow()

    assert shown.code == 2
    for command in (*commands(), *added_commands()):
        assert f"  {command.name} " in shown.out
    for code in ("0", "1", "2", "3", "130", "141"):
        assert f"\n  {code} " in shown.out


@pytest.mark.parametrize("name", [one.name for one in (*commands(), *added_commands())])
def test_every_command_explains_itself_and_prints_json(name: str) -> None:
    shown = flow(name, "--help")

    assert shown.code == 0
    assert "--json" in shown.out
    if name != "doctor":
        assert "URL" in shown.out
    assert "--storage-option KEY=VALUE" in " ".join(shown.out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["insect"], "there is no command 'insect'. Did you mean 'inspect'?"),
        (["inspect", "x", "--jsno"], "there is no option '--jsno'. Did you mean '--json'?"),
        (["inspect", "x", "y"], "there is an argument too many: 'y'"),
        (["inspect"], "the following arguments are required: URL"),
        (["show", "x"], "the following arguments are required: --state"),
        (["show", "x", "--state", "s", "--limit", "-1"], "must be a whole number from 0 on"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_slip_is_answered_with_what_was_meant(arguments: list[str], said: str) -> None:
    shown = flow(*arguments)

    assert shown.code == 2
    assert said in shown.err
    assert shown.out == ""


def test_a_place_that_is_not_there_or_has_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for url, said in (
        (tmp_path / "nowhere", f"there is no {tmp_path}/nowhere."),
        (tmp_path / "file", f"{tmp_path}/file is a file, not a folder."),
        (tmp_path, f"there are no checkpoints in {tmp_path}, nor 5 folders below it."),
        ("memory://nothing/here", "there are no checkpoints below memory://nothing/here."),
        ("ftp://host/x", "[FLOWSTATE_STORE_UNSUPPORTED]"),
    ):
        shown = flow("inspect", url)
        assert shown.code == 3
        assert said in shown.err


def test_an_error_is_json_where_a_program_reads(tmp_path: Path) -> None:
    error = flow("inspect", tmp_path / "nowhere", "--json").json["error"]

    assert error["code"] == "FLOW_COMMAND"
    assert "there is no" in error["message"]


# Secrets

SECRET = "hunter22-not-for-print"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--storage-option", SECRET],
        ["--storage-option", f"={SECRET}"],
        ["--storage-option", f"client_kwargs={{{SECRET}"],
        [f"--storage-opt={SECRET}"],
        ["--storage-option", "secret=", SECRET],
    ],
    ids=["no-equals", "no-name", "no-json", "misspelt", "a-blank-too-many"],
)
def test_a_secret_in_a_slip_is_not_repeated(arguments: list[str]) -> None:
    shown = flow("inspect", "s3://bucket/state", *arguments)

    assert shown.code == 2
    assert SECRET not in shown.out + shown.err


def test_a_secret_is_taken_out_of_whatever_fails(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(f"login with {SECRET} failed")

    monkeypatch.setattr("flowspark.command.inspecting.find_operators", fail)
    for options in ([], ["--json"]):
        shown = flow("inspect", words, "--storage-option", f"secret={SECRET}", *options)

        assert shown.code == 3
        assert "unexpected RuntimeError: login with *** failed" in shown.err + shown.out
        assert SECRET not in shown.out + shown.err


def test_a_store_that_cannot_be_reached_tells_no_secret() -> None:
    shown = flow(
        "inspect",
        "s3://bucket/state",
        *("--storage-option", "key=some-access-key"),
        *("--storage-option", f"secret={SECRET}"),
        *("--storage-option", "endpoint_url=http://127.0.0.1:1"),
        *("--storage-option", 'config_kwargs={"retries": {"max_attempts": 0}}'),
    )

    assert shown.code == 3
    assert "[FLOWSTATE_STORE_UNAVAILABLE]" in shown.err
    assert SECRET not in shown.out + shown.err


# Pipes, signals, terminals


def test_a_reader_that_goes_away_is_no_error(words: Path) -> None:
    command = [sys.executable, "-m", "flowspark.command", "show", str(words), "--state", "count"]
    with subprocess.Popen(
        [*command, "--limit", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        code = process.wait(TIMEOUT_S)
        said = process.stderr.read()

    assert (code, said) == (141, b"")


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["words", "json"])
def test_output_that_cannot_be_written_is_said(words: Path, options: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "flowspark.command", "inspect", str(words), *options],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            check=False,
        )

    assert done.returncode == 3
    assert done.stderr == b"flow: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_what_a_shell_has_closed_is_done_without(words: Path, closed: str) -> None:
    command = f'"{sys.executable}" -m flowspark.command inspect "{words}" {closed}'
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, timeout=TIMEOUT_S, check=False
    )

    assert (done.returncode, done.stderr) == (0, b"")


def test_a_name_cannot_control_the_terminal(tmp_path: Path) -> None:
    name = "\x1b[31mred\r\x1b]0;title\x07\n"
    for state in ("a", "b"):
        with LocalOperator(tmp_path / state / encode_name(name), parallelism=1, key_type=str) as op:
            described = ValueStateDescriptor(f"{name}{state}", int)
            op.subtask_of("k").keyed.get_state(described).update(1)
            op.checkpoint()

    for arguments in (
        ["inspect", tmp_path],
        ["show", tmp_path / "a", "--state", f"{name}a"],
        ["verify", tmp_path],
        ["rescale", "--dry-run", tmp_path, "--parallelism", 2],
        ["diff", tmp_path / "a", tmp_path / "b"],
        ["sweep", tmp_path, "--dry-run"],
    ):
        for colour in (False, True):
            shown = flow(*arguments, colour=colour)
            text = shown.out + shown.err
            assert shown.code in {0, 1}
            assert r"\x1b[31mred\r" in text
            assert not {"\r", "\x07"} & set(text)
            assert "\x1b[31mred" not in text


def test_json_is_ascii_where_the_output_is(tmp_path: Path) -> None:
    one_value(tmp_path / "words", str, {"Zürich \U0001f600": 1})
    done = flow_process("show", tmp_path, "--state", "value", "--json", PYTHONIOENCODING="ascii")

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["entries"][0]["key"] == "Zürich \U0001f600"


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    started = tmp_path / "started"
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\ntouch {started}\nexec sleep 60\n", "utf-8")
    slow.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-m", "flowspark.command", "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(PYSPARK_PYTHON=str(slow)),
        # A group of its own, so that the signal reaches what was started too, as Ctrl-C does.
        process_group=0,
        # Whoever runs the tests may ignore it, as a shell does for what is in the background.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == 130
    assert said.strip() == b""


def on_a_terminal(*arguments: object, **changes: str) -> str:
    """Run a command whose output is a terminal, and return what is written there."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "flowspark.command", *map(str, arguments)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(**{"TERM": "xterm", **changes}),
    ) as process:
        os.close(slave)
        output = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # So a terminal ends when nobody has it open.
                break
            if not piece:
                break
            output += piece
        process.wait(TIMEOUT_S)
    os.close(master)
    return output.decode()


def test_colours_are_for_terminals_that_want_them(words: Path) -> None:
    bold = "\x1b[1m"

    assert bold in on_a_terminal("inspect", words)
    assert bold not in on_a_terminal("inspect", words, NO_COLOR="1")
    assert bold not in on_a_terminal("inspect", words, TERM="dumb")
    assert bold in on_a_terminal("inspect", words, NO_COLOR="")
    assert "\x1b" not in flow_process("inspect", words).stdout


def test_a_terminal_that_cannot_move_its_cursor_sees_no_progress(words: Path) -> None:
    assert "100%" in on_a_terminal("verify", words)
    assert "\r\x1b[K" not in on_a_terminal("verify", words, TERM="dumb")


def test_a_command_of_another_package_gets_what_ours_get(words: Path) -> None:
    from flowspark.command.contract import Command, ExitCode

    seen: list[Invocation] = []

    def run(invocation: Invocation) -> ExitCode:
        seen.append(invocation)
        return ExitCode.OK

    parser = main.build_parser([Command("other", "something else", run)])
    given = parser.parse_args(["other", "--json", "--storage-option", "a=b"])
    given.run_command.run(Invocation(given, {"a": "b"}, Terminal(sys.stdout, sys.stderr)))
    assert seen[0].as_json
    assert seen[0].arguments.storage_option == ["a=b"]


def test_an_option_in_front_of_the_command_is_told_its_place() -> None:
    shown = flow("--json", "inspect", "x")

    assert shown.code == 2
    assert "--json stands behind the command: flow inspect ... --json" in shown.err
