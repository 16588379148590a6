"""``flow doctor``: whether this computer can run flowspark's queries, and what to do if not."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version

from flowspark import __version__
from flowspark.command import pythons
from flowspark.command.contract import Command, ExitCode, Invocation
from flowspark.command.probes import BrokerAnswer, address_of, probe_broker, probe_state
from flowspark.command.terminal import Style, Terminal
from flowspark.command.words import count_of
from flowstate.errors import FlowError

__all__ = ["ADVISED_SETTINGS", "COMMAND", "Check", "Verdict", "examine"]

JAVA_MIN = 17
PYTHON_MIN = (3, 11)
# What pyproject.toml asks for; here to say it of an environment that pip did not make.
PACKAGES = {
    "pyspark": ((4, 2), (5,)),
    "pyarrow": ((18,), None),
    "pandas": ((2, 2), (3,)),
}
FORMATS = ("flowbuffer", "flowkafka", "flowsocket")

ADVISED_SETTINGS = {
    "spark.python.unix.domain.socket.enabled": (
        "true",
        "takes about 45 ms off each micro-batch that uses Python",
    ),
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager",
        "halves Spark's own log writes, with a checkpointLocation on a local disk",
    ),
}
"""Settings of a session that halve a micro-batch: what they should be, and why."""


class Verdict(StrEnum):
    """How it is with one thing."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    what: str
    verdict: Verdict
    found: str
    to_do: str = ""


def examine(
    environment: Mapping[str, str], *, state: str | None, kafka: str | None, invocation: Invocation
) -> Iterator[Check]:
    """Look at everything, one thing after the other."""
    address = None if kafka is None else address_of(kafka)
    yield Check("flowspark", Verdict.OK, __version__)
    yield from _packages()
    driver, from_driver = pythons.driver_python(environment)
    worker, from_worker = pythons.worker_python(environment)
    asked_driver = pythons.ask_python(driver)
    asked_worker = asked_driver if worker == driver else pythons.ask_python(worker)
    yield _python("python of the driver", driver, from_driver, asked_driver)
    yield _python("python of the workers", worker, from_worker, asked_worker)
    yield from _same_python(asked_driver, asked_worker)
    yield from _spark_home(environment)
    yield _java(environment)
    yield from _formats(driver, asked_driver)
    yield from _settings(environment)
    if state is not None:
        yield _state(state, invocation)
    if address is not None:
        yield _broker(*address)


def _packages() -> Iterator[Check]:
    for name, (minimum, below) in PACKAGES.items():
        wanted = f"{name}>={_dotted(minimum)}" + (f",<{_dotted(below)}" if below else "")
        install = f"pip install '{wanted}'"
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Check(name, Verdict.FAIL, "is not installed", install)
            continue
        numbers = _numbers(found)
        if numbers < minimum or (below and numbers >= below):
            yield Check(name, Verdict.FAIL, f"{found} does not do", install)
        else:
            yield Check(name, Verdict.OK, found)


def _numbers(found: str) -> tuple[int, ...]:
    """Return the three numbers of a version, whatever a vendor has written behind them."""
    return tuple(int(part) for part in re.findall(r"\d+", found)[:3])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _python(what: str, command: str, source: str, found: pythons.Python | None) -> Check:
    if found is None:
        return Check(
            what,
            Verdict.FAIL,
            f"{command} ({source}) does not run",
            "set PYSPARK_PYTHON to the Python in which flowspark is installed",
        )
    place = f"{found.version}, {found.executable} ({source})"
    numbers = tuple(int(part) for part in re.findall(r"\d+", found.version)[:2])
    if numbers < PYTHON_MIN:
        return Check(what, Verdict.FAIL, place, f"use Python {_dotted(PYTHON_MIN)} or newer")
    if "flowspark" not in found.packages:
        return Check(
            what,
            Verdict.FAIL,
            f"{place} has no flowspark, so Spark would not find its formats",
            "set PYSPARK_PYTHON to the Python in which flowspark is installed, or install it there",
        )
    return Check(what, Verdict.OK, place)


def _same_python(driver: pythons.Python | None, worker: pythons.Python | None) -> Iterator[Check]:
    if driver is None or worker is None:
        return
    if driver.minor != worker.minor:
        yield Check(
            "driver and workers",
            Verdict.FAIL,
            f"have Python {driver.minor} and {worker.minor}, and Spark wants one",
            "set PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON to the same version",
        )
        return
    differing = [
        f"{name} {driver.packages.get(name, 'missing')} / {worker.packages.get(name, 'missing')}"
        for name in sorted({*driver.packages, *worker.packages})
        if driver.packages.get(name) != worker.packages.get(name)
    ]
    if differing:
        yield Check(
            "driver and workers",
            Verdict.WARN,
            f"have different packages: {', '.join(differing)}",
            "install the same versions in both",
        )


def _spark_home(environment: Mapping[str, str]) -> Iterator[Check]:
    """Look at a Spark beside that of pyspark, which is started instead of it."""
    home = environment.get("SPARK_HOME")
    if not home:
        return
    try:
        wanted = version("pyspark")
    except PackageNotFoundError:
        return
    to_do = f"unset SPARK_HOME, or let it name a Spark {wanted}"
    found = pythons.spark_version(home)
    if found is None:
        yield Check("SPARK_HOME", Verdict.FAIL, f"{home} has no Spark", to_do)
    elif _numbers(found) != _numbers(wanted):
        yield Check("SPARK_HOME", Verdict.FAIL, f"{home} has Spark {found}, not {wanted}", to_do)
    else:
        yield Check("SPARK_HOME", Verdict.OK, f"{found}, {home}")


def _java(environment: Mapping[str, str]) -> Check:
    found, command = pythons.java_version(environment)
    to_do = (
        f"install Java {JAVA_MIN} or newer, and let JAVA_HOME or the PATH lead to it; or take that "
        f"of the extra 'jre': export JAVA_HOME=$(python -m flowspark.jre)"
    )
    if found is None:
        return Check("java", Verdict.FAIL, f"{command} does not run", to_do)
    if found < JAVA_MIN:
        return Check("java", Verdict.FAIL, f"{found}, {command}", to_do)
    return Check("java", Verdict.OK, f"{found}, {command}")


def _formats(driver: str, asked: pythons.Python | None) -> Iterator[Check]:
    if asked is None:
        return
    formats = pythons.ask_formats(driver)
    if formats is None:
        yield Check("formats", Verdict.FAIL, "the driver's Python could not list its modules")
        return
    names = {found.name: found.module for found in formats if found.name}
    for found in formats:
        if found.error:
            yield Check(
                f"module {found.module}",
                Verdict.FAIL,
                f"cannot be imported, which hides every Python format: {found.error}",
                f"repair or uninstall what {found.module} belongs to",
            )
    for name in FORMATS:
        if name in names:
            yield Check(f"format {name}", Verdict.OK, f"by {names[name]}")
        elif not any(found.module == f"pyspark_{name}" and found.error for found in formats):
            yield Check(
                f"format {name}",
                Verdict.FAIL,
                f"there is no module pyspark_{name} on the driver's path",
                f"install flowspark into {asked.executable}",
            )


def _settings(environment: Mapping[str, str]) -> Iterator[Check]:
    settings, path = pythons.session_settings(environment, pythons.spark_home_of(environment))
    for name, (wanted, why) in ADVISED_SETTINGS.items():
        found = settings.get(name)
        if found is not None and found.lower() == wanted.lower():
            yield Check(name, Verdict.OK, f"{_short(wanted)}, in {path}")
            continue
        said = "not set" if found is None else f"set to {_short(found)}"
        where = f"{said} in {path}" if path is not None else said
        yield Check(
            name,
            Verdict.WARN,
            f"{where}; a session may set it by itself",
            f"add '{name} {wanted}' there, or .config(...) of the session: it {why}",
        )


def _short(value: str) -> str:
    return value.rpartition(".")[2]


def _state(url: str, invocation: Invocation) -> Check:
    try:
        where = probe_state(url, invocation.storage_options)
    except FlowError as error:
        return Check("state location", Verdict.FAIL, str(error), "give another --state")
    return Check("state location", Verdict.OK, f"{where} creates files exclusively")


def _broker(host: str, port: int) -> Check:
    what = f"broker {host}:{port}"
    try:
        count = probe_broker(host, port)
    except BrokerAnswer as answer:
        return Check(
            what, Verdict.WARN, str(answer), "give the kafka.security.* options to the query"
        )
    except OSError as error:
        return Check(
            what,
            Verdict.FAIL,
            f"cannot be reached: {error.strerror or error}",
            "check the address, the firewall, and that the broker runs",
        )
    return Check(what, Verdict.OK, f"answers, and knows {count_of(count, 'kind')} of requests")


_STYLES = {
    Verdict.OK: Style.GREEN,
    Verdict.WARN: Style.YELLOW,
    Verdict.FAIL: Style.RED,
}


def _run(invocation: Invocation) -> ExitCode:
    given, terminal = invocation.arguments, invocation.terminal
    checks = []
    for check in examine(os.environ, state=given.state, kafka=given.kafka, invocation=invocation):
        checks.append(check)
        if not invocation.as_json:
            _show(check, terminal)
    failed = sum(check.verdict is Verdict.FAIL for check in checks)
    warned = sum(check.verdict is Verdict.WARN for check in checks)
    if invocation.as_json:
        terminal.json({"ok": not failed, "checks": checks})
    else:
        terminal.line()
        terminal.line(
            f"{count_of(len(checks), 'check')}: {failed} failed, {count_of(warned, 'warning')}"
        )
    return ExitCode.FOUND if failed else ExitCode.OK


def _show(check: Check, terminal: Terminal) -> None:
    verdict = terminal.styled(f"{check.verdict.value:4}", _STYLES[check.verdict])
    terminal.line(f"{verdict}  {check.what}: {check.found}")
    if check.to_do:
        terminal.line(f"      -> {check.to_do}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state",
        metavar="URL",
        help="try whether state can be kept there; what is created for that is deleted again",
    )
    parser.add_argument("--kafka", metavar="HOST:PORT", help="ask a broker whether it is there")


COMMAND = Command(
    "doctor",
    "whether this computer can run flowspark's queries, and what to do if not",
    _run,
    _arguments,
    description="Look at Python, Java, Spark and their packages, at the formats that Spark will "
    "find, and on request at a state location and a broker. Exit code 1 if anything fails; a "
    "warning is advice.",
)
