"""What the guide of the keyed operator says of arguments and errors, compared with the code."""

from __future__ import annotations

import inspect

import flowspark.errors
from flowspark import KeyedStream, key_by
from flowspark.errors import ConnectorError

from .markdown import ROOT, table_rows
from .test_documents import CODE

GUIDE = ROOT / "docs" / "guide" / "keyed.md"


def test_the_table_of_arguments_has_all_with_their_defaults() -> None:
    rows = table_rows(GUIDE, "Arguments")
    shown = {CODE.findall(row[0])[0]: row[1] for row in rows}
    parameters = dict(inspect.signature(KeyedStream.process).parameters)
    del parameters["self"]

    assert list(shown) == list(parameters)
    for name, parameter in parameters.items():
        if parameter.default is not inspect.Parameter.empty and parameter.default is not None:
            assert shown[name].strip("`") == repr(parameter.default), name
    maximum = inspect.signature(key_by).parameters["max_parallelism"].default
    assert f"max_parallelism={maximum})" in GUIDE.read_text(encoding="utf-8")


def test_the_table_of_errors_has_all_with_their_codes() -> None:
    rows = table_rows(GUIDE, "Errors")
    shown = {CODE.findall(row[1])[0]: CODE.findall(row[0])[0] for row in rows}
    kinds = [getattr(flowspark.errors, name) for name in flowspark.errors.__all__]

    assert shown == {
        kind.__name__: f"FLOWKEYED_{kind.kind}" for kind in kinds if kind is not ConnectorError
    }
