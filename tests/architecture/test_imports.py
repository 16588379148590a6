"""Who may import whom. The rules below are the design's; a module that breaks one fails here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("state", "connectors")

# The checker: which modules there are, what each imports, and which rules that breaks.


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules of a package may not import some others; ``but`` names those that may.

    Names are dotted, stand for everything below them too, and may have wildcards.
    """

    why: str
    package: str
    forbidden: tuple[str, ...]
    but: tuple[str, ...] = ()

    def is_for(self, module: str) -> bool:
        return is_below(module, (self.package,)) and not is_below(module, self.but)


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    path: str
    line: int
    imported: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.imported}: {self.why}"


RULES = (
    Rule(
        "the state library does not know Spark",
        package="flowstate",
        forbidden=("pyspark", "pyspark_*", "flowspark"),
    ),
    Rule(
        "what the connectors share does not know them",
        package="flowspark",
        forbidden=("pyspark_flow*",),
    ),
    Rule(
        "only checkpoint storage touches a file system library",
        package="*",
        forbidden=("fsspec", "s3fs", "gcsfs", "adlfs"),
        but=("flowstate.storage",),
    ),
    Rule(
        "what runs in production does not need what tests need",
        package="flowstate",
        forbidden=("flowstate.testing",),
        but=("flowstate.testing",),
    ),
    Rule(
        "stored state is never Python's own serialization, which runs code when it is read",
        package="flowstate",
        forbidden=("pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"),
        but=("flowstate.testing",),
    ),
    Rule(
        "only keyed state knows the local store",
        package="*",
        forbidden=("lmdb",),
        but=("flowstate.keyed",),
    ),
    Rule(
        "one module knows the Kafka client, so that another could take its place",
        package="*",
        forbidden=("kafka",),
        but=("pyspark_flowkafka.client",),
    ),
)


def is_below(module: str, names: tuple[str, ...]) -> bool:
    parts = module.split(".")
    return any(
        len(parts) >= len(pattern) and all(map(fnmatchcase, parts, pattern))
        for pattern in (name.split(".") for name in names)
    )


def modules_of(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files below the source roots, with the dotted names they are imported by."""
    for source_root in SOURCE_ROOTS:
        for path in sorted((root / source_root).rglob("*.py")):
            parts = path.relative_to(root / source_root).with_suffix("").parts
            yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Yield what a file imports, anywhere in it: in functions and for type checkers as well."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, package)
            # Each name may be a module of that package, or something in it.
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and (name := dynamic_import(node)) is not None:
            yield node.lineno, name


def absolute_base(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parents = parts[: len(parts) - node.level + 1]
    return ".".join([*parents, node.module] if node.module else parents)


def dynamic_import(call: ast.Call) -> str | None:
    """Return what ``import_module("x")`` and ``__import__("x")`` import, if it is spelled out."""
    match call:
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return name
    return None


def violations_in(root: Path) -> list[Violation]:
    found = {
        Violation(path.relative_to(root).as_posix(), line, imported, rule.why)
        for path, module in modules_of(root)
        for line, imported in imports_of(path, module)
        for rule in RULES
        if rule.is_for(module) and is_below(imported, rule.forbidden)
    }
    return sorted(found)


# What the checker finds here.


def test_no_module_imports_what_it_must_not_know() -> None:
    found = violations_in(ROOT)

    assert not found, "\n" + "\n".join(map(str, found))


def test_the_checker_sees_the_modules_and_their_imports() -> None:
    modules = {module: path for path, module in modules_of(ROOT)}

    assert {"flowstate", "flowstate.storage", "flowstate.key_groups", "flowspark"} <= set(modules)
    name = "flowstate.key_groups"
    imported = {imported for _, imported in imports_of(modules[name], name)}
    assert {
        "numpy",
        "pyarrow",
        "flowstate._java_hash",
        "flowstate.errors.KeyGroupError",
    } <= imported


# What it would find elsewhere.


def write(root: Path, name: str, source: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "source", "imported"),
    [
        ("state/flowstate/a.py", "import pyspark", "pyspark"),
        ("state/flowstate/a.py", "import pyspark.sql as sql", "pyspark.sql"),
        ("state/flowstate/a.py", "from pyspark.sql import Row", "pyspark.sql.Row"),
        ("state/flowstate/a.py", "import os, flowspark", "flowspark"),
        ("state/flowstate/a.py", "def f():\n    import pyspark_flowbuffer", "pyspark_flowbuffer"),
        ("state/flowstate/a.py", "if TYPE_CHECKING:\n    import pyspark", "pyspark"),
        ("state/flowstate/a.py", "import_module('pyspark.sql')", "pyspark.sql"),
        ("state/flowstate/a.py", "importlib.import_module('flowspark')", "flowspark"),
        ("state/flowstate/a.py", "__import__('dill')", "dill"),
        ("state/flowstate/testing/a.py", "import pyspark", "pyspark"),
        ("state/flowstate/a.py", "import flowstate.testing.clock", "flowstate.testing.clock"),
        ("state/flowstate/a.py", "from flowstate import testing", "flowstate.testing"),
        ("state/flowstate/a.py", "from . import testing", "flowstate.testing"),
        ("state/flowstate/__init__.py", "from .testing import x", "flowstate.testing.x"),
        ("state/flowstate/keyed/a.py", "from .. import testing", "flowstate.testing"),
        ("state/flowstate/keyed/a.py", "from ..testing import x", "flowstate.testing.x"),
        ("state/flowstate/keyed/a.py", "import fsspec", "fsspec"),
        ("state/flowstate/testing/a.py", "from fsspec.spec import x", "fsspec.spec.x"),
        ("state/flowstate/storage_a.py", "import s3fs", "s3fs"),
        ("connectors/flowspark/a.py", "import gcsfs", "gcsfs"),
        ("connectors/pyspark_flowkafka/a.py", "import adlfs", "adlfs"),
        ("connectors/flowspark/a.py", "import pyspark_flowkafka.x", "pyspark_flowkafka.x"),
        ("state/flowstate/a.py", "import pickle", "pickle"),
        ("state/flowstate/storage/a.py", "from shelve import open", "shelve.open"),
        ("state/flowstate/keyed/a.py", "import marshal", "marshal"),
        ("state/flowstate/a.py", "import cloudpickle", "cloudpickle"),
        ("state/flowstate/storage/a.py", "import lmdb", "lmdb"),
        ("connectors/flowspark/a.py", "import lmdb", "lmdb"),
        ("connectors/pyspark_flowkafka/a.py", "from kafka import x", "kafka.x"),
    ],
    ids=lambda value: str(value).replace("\n", " "),
)
def test_a_forbidden_import_is_found(tmp_path: Path, name: str, source: str, imported: str) -> None:
    write(tmp_path, name, source)

    assert [(found.path, found.imported) for found in violations_in(tmp_path)] == [(name, imported)]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("state/flowstate/storage/deep/a.py", "import fsspec, s3fs"),
        ("state/flowstate/keyed/a.py", "import lmdb"),
        ("connectors/pyspark_flowkafka/client.py", "import kafka.net.manager"),
        ("state/flowstate/testing/a.py", "import pickle\nfrom flowstate.testing import clock"),
        ("state/flowstate/a.py", "from . import errors\nfrom .storage import x\nimport pyarrow"),
        ("state/flowstate/a.py", "import pickles\nimport flowsparkling\nimport_module(name)"),
        ("state/flowstate/a.py", "'import pyspark'  # import pyspark"),
        ("connectors/flowspark/a.py", "import pyspark.sql, flowstate, pickle"),
        ("connectors/pyspark_flowkafka/a.py", "import pyspark, flowspark, flowstate.errors"),
        ("tests/a.py", "import fsspec, pyspark, pickle, flowstate.testing"),
    ],
    ids=lambda value: str(value).replace("\n", " "),
)
def test_an_allowed_import_is_not(tmp_path: Path, name: str, source: str) -> None:
    write(tmp_path, name, source)

    assert violations_in(tmp_path) == []


def test_a_violation_says_where_it_is_and_why(tmp_path: Path) -> None:
    write(tmp_path, "state/flowstate/a.py", "import os\nimport lmdb\n")

    (found,) = violations_in(tmp_path)
    assert str(found) == (
        "state/flowstate/a.py:2 imports lmdb: only keyed state knows the local store"
    )
