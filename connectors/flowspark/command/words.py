"""How sizes, times and values are written for a person."""

from __future__ import annotations

import datetime as dt
import difflib
from collections.abc import Iterable
from typing import Any

__all__ = ["count_of", "duration", "hint_for", "moment", "one_line", "shown", "size"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))
_NEAR = 0.5
_MS_MIN, _MS_MAX = -62_135_596_800_000, 253_402_300_799_999
_VALUE_LENGTH_MAX = 200


def size(count: float) -> str:
    """Return a number of bytes, as in ``1.5 MiB``."""
    value = float(count)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes any size")


def count_of(number: int, one: str, many: str | None = None) -> str:
    """Return a number with what is counted, as in ``1 file`` and ``2,000 files``."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def duration(span_ms: int) -> str:
    """Return a time span by its largest unit, as in ``2.5 min``."""
    for unit_ms, unit in _SPANS:
        if abs(span_ms) >= unit_ms:
            return f"{span_ms / unit_ms:.1f}".removesuffix(".0") + f" {unit}"
    return f"{span_ms} ms"


def moment(at_ms: int) -> str:
    """Return a time in UTC; what no calendar has is given as it is."""
    if not _MS_MIN <= at_ms <= _MS_MAX:
        return f"{at_ms} ms"
    stamp = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=at_ms)
    text = stamp.strftime("%Y-%m-%d %H:%M:%S")
    return f"{text}.{at_ms % 1000:03d}Z" if at_ms % 1000 else f"{text}Z"


def shown(value: Any, length_max: int = _VALUE_LENGTH_MAX) -> str:
    """Return a value as a person reads it, on one line and not without end."""
    text = repr(value) if not isinstance(value, dt.datetime) else value.isoformat()
    if len(text) <= length_max:
        return text
    return f"{text[:length_max]}... ({len(text):,} characters; --json has all)"


def one_line(text: str) -> str:
    """Return a text as it may stand in a line: what moves a terminal's cursor is shown."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def hint_for(name: str, known: Iterable[str]) -> str:
    """Return which of the known names may have been meant, and which there are."""
    there = sorted(known)
    if not there:
        return "There is none."
    near = difflib.get_close_matches(name, there, n=1, cutoff=_NEAR)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    return f"{meant}There are: {', '.join(map(repr, there))}"
