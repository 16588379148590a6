"""Finding a sink of the user's, and saying what is wrong with it."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

from flowspark.errors import OptionError
from flowspark.sinks import SinkFunction, TwoPhaseSink
from pyspark_flowbuffer.options import FORMAT, FunctionOutput

__all__ = ["load_sink", "open_sink"]


def load_sink(function: str) -> type[SinkFunction] | type[TwoPhaseSink]:
    """Return the class that ``package.module:Class`` names."""
    module_name, colon, class_name = function.partition(":")
    if not colon or not module_name or not class_name:
        _refuse(function, "must be written as package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        _refuse(
            function,
            f"cannot be imported ({type(error).__name__}: {error}). Install the module on the "
            f"driver and on every worker, as with spark.sparkContext.addPyFile",
        )
    found: Any = module
    for name in class_name.split("."):
        found = getattr(found, name, None)
    if found is None:
        _refuse(function, f"is not there: the module {module_name!r} has no {class_name!r}")
    if not isinstance(found, type) or not issubclass(found, SinkFunction | TwoPhaseSink):
        _refuse(
            function,
            "is neither a flowspark.SinkFunction nor a flowspark.TwoPhaseSink: let the class "
            "inherit from one of them",
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        _refuse(function, f"does not implement {', '.join(missing)}")
    return found


def open_sink(output: FunctionOutput) -> SinkFunction | TwoPhaseSink:
    """Make a sink from its options."""
    return load_sink(output.function)(output.options)


def _refuse(function: str, why: str) -> NoReturn:
    raise OptionError(FORMAT, f"option 'sinkFunction' {function!r} {why}")
