"""What the Spark-facing packages share, and the keyed operator."""

from typing import TYPE_CHECKING, Any

from flowspark.sinks import Committable, SinkContext, SinkFunction, TwoPhaseSink

if TYPE_CHECKING:
    from flowspark.keyed.arrow_work import ArrowContext, ArrowKeyedFunction, BulkStates
    from flowspark.keyed.stream import KeyedStream, key_by, main_output, side_output
    from flowspark.keyed.watermarks import WatermarkStrategy, bounded_out_of_orderness

__version__ = "0.1.0"

__all__ = [
    "ArrowContext",
    "ArrowKeyedFunction",
    "BulkStates",
    "Committable",
    "KeyedStream",
    "SinkContext",
    "SinkFunction",
    "TwoPhaseSink",
    "WatermarkStrategy",
    "bounded_out_of_orderness",
    "key_by",
    "main_output",
    "side_output",
]

# Formats import this package at the first look-up of any format, and do not need the operator.
_LAZY = {
    "ArrowContext": "flowspark.keyed.arrow_work",
    "ArrowKeyedFunction": "flowspark.keyed.arrow_work",
    "BulkStates": "flowspark.keyed.arrow_work",
    "KeyedStream": "flowspark.keyed.stream",
    "WatermarkStrategy": "flowspark.keyed.watermarks",
    "bounded_out_of_orderness": "flowspark.keyed.watermarks",
    "key_by": "flowspark.keyed.stream",
    "main_output": "flowspark.keyed.stream",
    "side_output": "flowspark.keyed.stream",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(module), name)
