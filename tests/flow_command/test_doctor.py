from __future__ import annotations

import argparse
import io
import json
import os
import socket
import struct
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from flowspark.command import probes
from flowspark.command.contract import Invocation
from flowspark.command.doctor import (
    ADVISED_SETTINGS,
    PACKAGES,
    PYTHON_MIN,
    Check,
    Verdict,
    examine,
)
from flowspark.command.terminal import Terminal
from flowstate.storage.filesystems import open_file_system

from .shell import flow, flow_process


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def python(folder: Path, name: str, version: str, **packages: str) -> str:
    about = json.dumps([f"<{name}>", version, packages])
    # Asked for its formats it has none.
    return program(folder, name, f"case \"$2\" in *pkgutil*) echo '[]';; *) echo '{about}';; esac")


def java(folder: Path, version: str) -> str:
    (folder / "bin").mkdir(exist_ok=True)
    program(folder / "bin", "java", f"echo 'openjdk version \"{version}\" 2026' >&2")
    return str(folder)


def examined(
    environment: dict[str, str], *, state: str | None = None, kafka: str | None = None
) -> dict[str, Check]:
    terminal = Terminal(io.StringIO(), io.StringIO())
    invocation = Invocation(argparse.Namespace(json=False), {}, terminal)
    environment = {"PATH": os.environ["PATH"], **environment}
    found = examine(environment, state=state, kafka=kafka, invocation=invocation)
    return {check.what: check for check in found}


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose programs answer at once."""
    return {
        "PYSPARK_PYTHON": python(tmp_path, "python-a", "3.11.7", flowspark="0.1.0"),
        "JAVA_HOME": java(tmp_path, "17.0.9"),
        "SPARK_CONF_DIR": str(tmp_path),
    }


def test_a_sound_computer_has_no_failures() -> None:
    done = flow_process("doctor", "--json", PYSPARK_PYTHON=sys.executable)

    found = {check["what"]: check for check in json.loads(done.stdout)["checks"]}
    java_there = found.pop("java")["verdict"] == "ok"
    assert done.returncode == (0 if java_there else 1)
    assert [check for check in found.values() if check["verdict"] == "fail"] == []
    for name in ("flowbuffer", "flowkafka", "flowsocket"):
        assert found[f"format {name}"]["found"] == f"by pyspark_{name}"


def test_the_versions_are_those_that_the_project_asks_for() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    project = tomllib.loads(text)["project"]

    for name, (minimum, below) in PACKAGES.items():
        wanted = f"{name}>={'.'.join(map(str, minimum))}"
        assert (
            wanted + (f",<{'.'.join(map(str, below))}" if below else "")
            in (project["dependencies"])
        )
    assert project["requires-python"] == f">={'.'.join(map(str, PYTHON_MIN))}"


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("17.0.9", "ok"), ("21", "ok"), ("11.0.2", "fail"), ("1.8.0_392", "fail")],
)
def test_java_is_17_or_newer(
    fake: dict[str, str], tmp_path: Path, version: str, verdict: str
) -> None:
    java(tmp_path, version)

    assert examined(fake)["java"].verdict == verdict


def test_a_java_that_does_not_run_is_a_failure(fake: dict[str, str], tmp_path: Path) -> None:
    program(tmp_path / "bin", "java", "exit 1")

    check = examined(fake)["java"]
    assert check.verdict is Verdict.FAIL
    assert "JAVA_HOME" in check.to_do


def test_python_without_flowspark_is_a_failure(fake: dict[str, str], tmp_path: Path) -> None:
    fake["PYSPARK_PYTHON"] = python(tmp_path, "bare", "3.12.0")

    check = examined(fake)["python of the workers"]
    assert check.verdict is Verdict.FAIL
    assert "has no flowspark" in check.found
    assert "(PYSPARK_PYTHON)" in check.found


def test_an_old_or_absent_python_is_a_failure(fake: dict[str, str], tmp_path: Path) -> None:
    fake["PYSPARK_DRIVER_PYTHON"] = python(tmp_path, "old", "3.10.1", flowspark="0.1.0")
    fake["PYSPARK_PYTHON"] = str(tmp_path / "absent")

    found = examined(fake)
    assert found["python of the driver"].to_do == "use Python 3.11 or newer"
    assert "does not run" in found["python of the workers"].found


@pytest.mark.parametrize("answer", ["echo hello", "echo '[1, 2]'", "echo 5", r"printf '\377'"])
def test_another_program_is_no_python(fake: dict[str, str], tmp_path: Path, answer: str) -> None:
    other = program(tmp_path, "other", answer)
    checks = examined({**fake, "PYSPARK_PYTHON": other})

    assert checks["python of the workers"].verdict is Verdict.FAIL
    assert "does not run" in checks["python of the workers"].found


def test_a_command_whose_quotation_has_no_end_does_not_run(fake: dict[str, str]) -> None:
    checks = examined({**fake, "PYSPARK_PYTHON": "'python"})

    assert checks["python of the workers"].verdict is Verdict.FAIL


def test_settings_in_another_encoding_are_read_as_far_as_they_go(
    fake: dict[str, str], tmp_path: Path
) -> None:
    name = "spark.python.unix.domain.socket.enabled"
    (tmp_path / "spark-defaults.conf").write_bytes(b"# M\xfcnchen\n%s true\n" % name.encode())

    assert examined(fake)[name].verdict is Verdict.OK


def test_a_spark_home_without_spark_or_with_another_is_a_failure(
    fake: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "spark"
    absent = examined({**fake, "SPARK_HOME": str(home)})["SPARK_HOME"]
    assert absent.verdict is Verdict.FAIL
    assert "unset SPARK_HOME" in absent.to_do

    (home / "bin").mkdir(parents=True)
    (home / "bin" / "spark-submit").touch()
    (home / "jars").mkdir()
    old = home / "jars" / "spark-core_2.13-3.5.1.jar"
    old.touch()
    other = examined({**fake, "SPARK_HOME": str(home)})["SPARK_HOME"]
    assert other.verdict is Verdict.FAIL
    assert "has Spark 3.5.1" in other.found
    old.rename(old.with_name(f"spark-core_2.13-{version('pyspark')}-vendor-1.jar"))
    assert examined({**fake, "SPARK_HOME": str(home)})["SPARK_HOME"].verdict is Verdict.OK
    assert "SPARK_HOME" not in examined(fake)


def test_driver_and_workers_have_one_version(fake: dict[str, str], tmp_path: Path) -> None:
    fake["PYSPARK_DRIVER_PYTHON"] = python(tmp_path, "newer", "3.12.1", flowspark="0.1.0")
    assert examined(fake)["driver and workers"].verdict is Verdict.FAIL

    fake["PYSPARK_DRIVER_PYTHON"] = python(tmp_path, "near", "3.11.9", flowspark="0.2.0")
    check = examined(fake)["driver and workers"]
    assert check.verdict is Verdict.WARN
    assert "flowspark 0.2.0 / 0.1.0" in check.found


def test_a_module_that_breaks_is_named(
    tmp_path: Path, fake: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyspark_broken.py").write_text("raise ValueError('not today')", "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fake["PYSPARK_PYTHON"] = sys.executable

    found = examined(fake)
    check = found["module pyspark_broken"]
    assert check.verdict is Verdict.FAIL
    assert "hides every Python format: ValueError: not today" in check.found
    assert found["format flowbuffer"].verdict is Verdict.OK


def test_settings_are_advice_until_they_are_set(fake: dict[str, str], tmp_path: Path) -> None:
    for name in ADVISED_SETTINGS:
        check = examined(fake)[name]
        assert check.verdict is Verdict.WARN
        assert "spark-defaults.conf" in check.found

    lines = ["# a comment", "", "spark.other = 1"]
    separators = iter([" ", "="])
    lines += [f"{name}{next(separators)}{wanted}" for name, (wanted, _) in ADVISED_SETTINGS.items()]
    (tmp_path / "spark-defaults.conf").write_text("\n".join(lines), "utf-8")
    for name in ADVISED_SETTINGS:
        assert examined(fake)[name].verdict is Verdict.OK


def test_settings_are_looked_up_below_spark_home_too(fake: dict[str, str], tmp_path: Path) -> None:
    del fake["SPARK_CONF_DIR"]
    fake["SPARK_HOME"] = str(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text(
        "spark.python.unix.domain.socket.enabled false\n", "utf-8"
    )

    check = examined(fake)["spark.python.unix.domain.socket.enabled"]
    assert check.found.startswith("set to false")


# The state location


def test_a_probe_leaves_nothing_behind(fake: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "not" / "there" / "yet"

    assert examined(fake, state=str(place))["state location"].verdict is Verdict.OK
    assert not (tmp_path / "not").exists()
    kept = tmp_path / "kept"
    kept.mkdir()
    examined(fake, state=str(kept))
    assert list(kept.iterdir()) == []
    assert examined(fake, state="memory://doctor/x")["state location"].verdict is Verdict.OK


def test_a_place_that_cannot_be_written_is_a_failure(fake: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for url in (str(tmp_path / "file"), "ftp://user:hunter22@host/x"):
        check = examined(fake, state=url)["state location"]
        assert check.verdict is Verdict.FAIL
        assert "hunter22" not in check.found


def test_a_store_that_takes_two_creators_is_a_failure(
    fake: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def opened(*given: Any) -> Any:
        files = open_file_system(*given)

        def create(path: str, data: bytes) -> bool:
            files.write(path, data)
            return True

        monkeypatch.setattr(files, "create_exclusively", create)
        return files

    monkeypatch.setattr("flowspark.command.probes.open_file_system", opened)
    check = examined(fake, state=str(tmp_path / "s"))["state location"]
    assert check.verdict is Verdict.FAIL
    assert "Do not keep state there" in check.found
    assert not (tmp_path / "s").exists()


# The broker


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        # Where nobody comes the test has failed, and nothing is to wait for it.
        listening.settimeout(10)

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)


def test_a_broker_answers_what_it_knows(fake: dict[str, str]) -> None:
    def answer(connection: socket.socket) -> None:
        (length,) = struct.unpack(">i", connection.recv(4))
        kind, _, number, _ = struct.unpack(">hhih", connection.recv(length))
        assert kind == 18
        body = struct.pack(">ihi", number, 0, 2) + struct.pack(">hhhhhh", 0, 0, 9, 1, 0, 9)
        connection.sendall(struct.pack(">i", len(body)) + body)

    with server(answer) as address:
        check = examined(fake, kafka=address)[f"broker {address}"]
    assert check == Check(f"broker {address}", Verdict.OK, "answers, and knows 2 kinds of requests")


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["closed", "another-protocol"]
)
def test_who_answers_something_else_is_a_warning(fake: dict[str, str], answer: bytes) -> None:
    def reply(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(answer)

    with server(reply) as address:
        check = examined(fake, kafka=address)[f"broker {address}"]
    assert check.verdict is Verdict.WARN


def test_nobody_there_is_a_failure(fake: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

    check = examined(fake, kafka=f"127.0.0.1:{port}")[f"broker 127.0.0.1:{port}"]
    assert check.verdict is Verdict.FAIL
    assert "Connection refused" in check.found


@pytest.mark.parametrize("text", ["host", "host:", ":9092", "host:0", "host:65536", "host:x"])
def test_an_address_has_a_host_and_a_port(text: str) -> None:
    shown = flow("doctor", "--kafka", text)

    assert shown.code == 2
    assert "HOST:PORT" in shown.err
    assert shown.out == ""


def test_an_address_may_be_of_ipv6() -> None:
    assert probes.address_of("[::1]:9092") == ("::1", 9092)
