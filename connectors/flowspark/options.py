"""Options of a format, as Spark hands them over: texts, with their names in lower case.

A format names its options once, and reads each with what it expects of it::

    options = Options("flowsocket", raw, known=("host", "port", "connectTimeout"))
    port = options.integer("port", minimum=1, maximum=65535)
    timeout_ms = options.duration_ms("connectTimeout", default="10 seconds")

Whatever does not fit raises ``OptionError``, which names the option, its value and the way out.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from flowspark.errors import OptionError

__all__ = ["STORAGE_PREFIX", "Options"]

STORAGE_PREFIX = "storage."
"""What follows it is handed to the file system's package."""

# Spark itself adds these to the options of any source or sink.
_OF_SPARK = frozenset({"checkpointlocation", "queryname", "path"})

_TRUE, _FALSE = frozenset({"true", "1", "yes"}), frozenset({"false", "0", "no"})

_UNITS_MS = {
    "ms": 1,
    "millisecond": 1,
    "s": 1000,
    "sec": 1000,
    "second": 1000,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
}
_UNITS_BYTES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)

_Choice = TypeVar("_Choice", bound=StrEnum)


class Options:
    """The options of one use of one format, checked for names nobody knows."""

    def __init__(
        self,
        format_name: str,
        given: Mapping[str, str],
        *,
        known: Sequence[str],
        prefixes: Sequence[str] = (STORAGE_PREFIX,),
    ) -> None:
        self.format_name = format_name
        self._given = {name.lower(): value for name, value in given.items()}
        self._known = {name.lower(): name for name in known}
        self._prefixes = tuple(prefix.lower() for prefix in prefixes)
        for name in self._given:
            if not (name in self._known or name in _OF_SPARK or name.startswith(self._prefixes)):
                raise self._unknown(name)

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._given

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return an option as it was given."""
        return self._given.get(name.lower(), default)

    def required(self, name: str, why: str) -> str:
        """Return an option that cannot be left out; ``why`` says what it is for."""
        value = self.text(name)
        if value is None or not value.strip():
            raise self.error(f"option {name!r} is missing: {why}")
        return value

    def integer(
        self,
        name: str,
        default: int | None = None,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> int | None:
        """Return an option that is a whole number within bounds."""
        value = self.text(name)
        if value is None:
            return default
        try:
            number = int(value.strip())
        except ValueError:
            raise self._refused(name, "must be a whole number") from None
        if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
            raise self._refused(name, f"must be {_bounds(minimum, maximum)}")
        return number

    def boolean(self, name: str, default: bool) -> bool:
        """Return an option that is true or false."""
        value = self.text(name)
        if value is None:
            return default
        word = value.strip().lower()
        if word not in _TRUE | _FALSE:
            raise self._refused(name, "must be true or false")
        return word in _TRUE

    def choice(self, name: str, default: _Choice) -> _Choice:
        """Return an option that is one of the default's kind, written in any case."""
        value = self.text(name)
        if value is None:
            return default
        kind = type(default)
        for member in kind:
            if member.value == value.strip().lower():
                return member
        raise self._refused(name, f"must be one of {', '.join(kind)}")

    def duration_ms(
        self, name: str, default: str | None = None, *, minimum_ms: int = 0
    ) -> int | None:
        """Return a time span, as in ``500ms``, ``10 seconds`` or ``1.5 minutes``."""
        value = self.text(name, default)
        if value is None:
            return None
        match = _DURATION.fullmatch(value.strip())
        unit = match and (_UNITS_MS.get(match[2].lower()) or _UNITS_MS.get(_singular(match[2])))
        if not match or not unit:
            raise self._refused(name, "must be a time span such as '500ms' or '10 seconds'")
        span = float(match[1]) * unit
        if span == math.inf:
            raise self._refused(name, "must be a shorter number")
        span_ms = round(span)
        if span_ms < minimum_ms:
            raise self._refused(name, f"must be at least {minimum_ms} ms")
        return span_ms

    def size_bytes(self, name: str, default: str | None = None, *, minimum: int = 0) -> int | None:
        """Return a size, as in ``1048576``, ``64k`` or ``1.5 GB``; k is 1024."""
        value = self.text(name, default)
        if value is None:
            return None
        match = _SIZE.fullmatch(value.strip())
        if not match:
            raise self._refused(name, "must be a size such as '1048576', '64k' or '1.5 GB'")
        number = float(match[1]) * _UNITS_BYTES[match[2].lower()]
        if number == math.inf:
            raise self._refused(name, "must be a shorter number")
        size = round(number)
        if size < minimum:
            raise self._refused(name, f"must be at least {minimum} bytes")
        return size

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of a list with commas; none where the option is not given."""
        listed = (self.text(name) or "").split(",")
        return tuple(one.strip() for one in listed if one.strip())

    def below(self, prefix: str) -> dict[str, str]:
        """Return the options whose names begin with the prefix, without it."""
        prefix = prefix.lower()
        return {
            name[len(prefix) :]: value
            for name, value in self._given.items()
            if name.startswith(prefix)
        }

    def storage_options(self) -> dict[str, Any]:
        """Return what goes to the file system's package: texts, true and false, and JSON."""
        return {
            name: self._storage_value(name, value)
            for name, value in self.below(STORAGE_PREFIX).items()
        }

    def error(self, message: str) -> OptionError:
        """Return an error of this format."""
        return OptionError(self.format_name, message)

    def _storage_value(self, name: str, value: str) -> Any:
        text = value.strip()
        if text.lower() in {"true", "false"}:
            return text.lower() == "true"
        if not text.startswith(("{", "[")):
            return value
        try:
            return json.loads(text)
        except ValueError:
            # The value may be a secret, so it is not repeated.
            raise self.error(f"option '{STORAGE_PREFIX}{name}' is not valid JSON") from None

    def _refused(self, name: str, expected: str) -> OptionError:
        return self.error(f"option {name!r} {expected}, not {self.text(name)!r}")

    def _unknown(self, name: str) -> OptionError:
        near = difflib.get_close_matches(name, self._known, n=1, cutoff=0.6)
        hint = f"did you mean {self._known[near[0]]!r}?" if near else "no option is like it."
        listed = ", ".join(sorted(self._known.values()))
        return self.error(f"there is no option {name!r}: {hint} The options are: {listed}")


def _bounds(minimum: int | None, maximum: int | None) -> str:
    if minimum is None:
        return f"at most {maximum}"
    return f"at least {minimum}" if maximum is None else f"{minimum}..{maximum}"


def _singular(word: str) -> str:
    return word.lower().removesuffix("s")
