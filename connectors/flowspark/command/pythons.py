"""Which Pythons, Java and Spark there are, asked of the programs themselves."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Format",
    "Python",
    "ask_formats",
    "ask_python",
    "driver_python",
    "java_version",
    "session_settings",
    "spark_version",
    "worker_python",
]

_TIMEOUT_S = 60
_SPARK_CORE = re.compile(r"spark-core_[0-9.]+-(.+)\.jar")
_JAVA_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')

# In a process of its own: it may be another Python, and a package that breaks breaks there.
_ABOUT = """
import importlib.metadata as m, json, platform, sys
found = {}
for name in ("flowspark", "pyspark", "pyarrow", "pandas"):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps([sys.executable, platform.python_version(), found]))
"""
_FORMATS = """
import importlib, json, pkgutil
found = []
for module in pkgutil.iter_modules():
    if not module.name.startswith("pyspark_"):
        continue
    try:
        source = getattr(importlib.import_module(module.name), "DefaultSource", None)
        found.append([module.name, source and source.name(), ""])
    except BaseException as error:
        found.append([module.name, None, f"{type(error).__name__}: {error}"])
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Python:
    """A Python interpreter, as it describes itself."""

    command: str
    executable: str
    version: str
    packages: Mapping[str, str]

    @property
    def minor(self) -> str:
        """The version that driver and workers must have in common, as in ``3.11``."""
        return ".".join(self.version.split(".")[:2])


@dataclass(frozen=True, slots=True)
class Format:
    """A module that Spark imports when it looks for formats."""

    module: str
    name: str | None
    error: str


def worker_python(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the Python of the workers, and where that is said."""
    if command := environment.get("PYSPARK_PYTHON"):
        return command, "PYSPARK_PYTHON"
    return "python3", "python3 on the PATH"


def driver_python(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the Python with which Spark looks for formats, and where that is said."""
    if command := environment.get("PYSPARK_DRIVER_PYTHON"):
        return command, "PYSPARK_DRIVER_PYTHON"
    return worker_python(environment)


def _output(command: Sequence[str], *, errors: bool = False) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stderr + done.stdout if errors else done.stdout) if done.returncode == 0 else None


def ask_python(command: str) -> Python | None:
    """Ask a Python who it is; None if there is none of that name, or it does not run."""
    try:
        words = shlex.split(command)
        output = _output([*words, "-c", _ABOUT]) if words else None
        if not output:
            return None
        executable, version, packages = json.loads(output.splitlines()[-1])
        return Python(command, executable, version, packages)
    except (ValueError, TypeError):
        # Some other program has answered, or a quotation mark has no end.
        return None


def ask_formats(command: str) -> list[Format] | None:
    """Import what Spark will import when it looks for formats, and return what was found."""
    output = _output([*shlex.split(command), "-c", _FORMATS])
    if not output:
        return None
    return [Format(*found) for found in json.loads(output.splitlines()[-1])]


def java_version(environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the version of the Java that Spark starts (None: it does not run), and where it is."""
    home = environment.get("JAVA_HOME")
    command = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if command is None:
        return None, "java"
    match = _JAVA_VERSION.search(_output([command, "-version"], errors=True) or "")
    if match is None:
        return None, command
    # Java 8 calls itself 1.8.
    major = int(match.group(1))
    return int(match.group(2) or 0) if major == 1 else major, command


def spark_version(home: str) -> str | None:
    """Return the version of the Spark in a folder; None if there is none."""
    if not Path(home, "bin", "spark-submit").is_file():
        return None
    found = (_SPARK_CORE.fullmatch(path.name) for path in Path(home, "jars").glob("spark-core*"))
    return next((match.group(1) for match in found if match), None)


def session_settings(
    environment: Mapping[str, str], spark_home: Path | None
) -> tuple[dict[str, str], Path | None]:
    """Return what spark-defaults.conf sets for every session, and where it is."""
    folders = []
    if conf := environment.get("SPARK_CONF_DIR"):
        folders.append(Path(conf))
    elif home := environment.get("SPARK_HOME"):
        folders.append(Path(home) / "conf")
    elif spark_home is not None:
        folders.append(spark_home / "conf")
    for folder in folders:
        path = folder / "spark-defaults.conf"
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        return _properties(text), path
    return {}, folders[0] / "spark-defaults.conf" if folders else None


def _properties(text: str) -> dict[str, str]:
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            name, *value = re.split(r"\s*[=:\s]\s*", line.strip(), maxsplit=1)
            found[name] = value[0].strip() if value else ""
    return found


def spark_home_of(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of Spark: that of the variable, or of the installed pyspark."""
    from importlib.util import find_spec

    if home := environment.get("SPARK_HOME"):
        return Path(home)
    # The spec is found without importing the package.
    spec = find_spec("pyspark")
    return Path(os.path.dirname(spec.origin)) if spec is not None and spec.origin else None
