"""Time spans as a program gives them: a text as in Spark, or a ``timedelta``."""

from __future__ import annotations

import datetime as dt
from typing import Any

from flowspark.errors import OptionError
from flowspark.keyed.identity import NAME
from flowspark.options import Options

__all__ = ["duration_ms"]


def duration_ms(name: str, value: Any, *, minimum_ms: int) -> int:
    """Return a time span in milliseconds, or raise ``OptionError``."""
    if isinstance(value, dt.timedelta):
        value = f"{value // dt.timedelta(milliseconds=1)}ms"
    if not isinstance(value, str):
        raise OptionError(
            NAME, f"{name} is a time span such as '10 seconds' or a timedelta, not {value!r}"
        )
    span_ms = Options(NAME, {name: value}, known=(name,)).duration_ms(name, minimum_ms=minimum_ms)
    assert span_ms is not None
    return span_ms
