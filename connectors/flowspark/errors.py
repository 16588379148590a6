"""Errors of the Spark side, on top of those of the state library.

::

    FlowError                        flowstate.errors
    └── ConnectorError               one format or operator; its code begins with the format's name
        ├── OptionError              an option is missing, unknown or out of range (a ValueError)
        ├── InputError               rows that the operator cannot take
        ├── OutputError              what was to be written could not be, or is not what it was
        ├── FunctionError            a function of the user's raised; its error is the cause
        └── IncompleteBatchError     a batch that Spark has committed did not run as a whole

A message starts with a code in brackets, as in ``[FLOWSOCKET_OPTION]``, names the option or the
record at fault, and says what to do. Errors keep their fields through pickle, because Spark moves
them between processes.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flowstate.errors import FlowError

__all__ = [
    "ConnectorError",
    "FunctionError",
    "IncompleteBatchError",
    "InputError",
    "OptionError",
    "OutputError",
]


class ConnectorError(FlowError):
    """Something is wrong with the use of one format; ``kind`` completes the code."""

    code = "FLOWSPARK"
    kind: ClassVar[str] = "ERROR"

    def __init__(self, format_name: str, message: str) -> None:
        super().__init__(message)
        self.format_name = format_name

    def __str__(self) -> str:
        return f"[{self.format_name.upper()}_{self.kind}] {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.format_name, self.message), self.__dict__


class OptionError(ConnectorError, ValueError):
    """An option is missing, unknown, out of range, or contradicts another."""

    kind = "OPTION"


class InputError(ConnectorError):
    """Rows came that the operator cannot take, such as one without a key."""

    kind = "INPUT"


class OutputError(ConnectorError):
    """Output could not be written, or what is there is not what was written."""

    kind = "OUTPUT"


class FunctionError(ConnectorError):
    """A function of the user's raised. Nothing of the batch was kept; Spark runs it again."""

    kind = "FUNCTION"


class IncompleteBatchError(ConnectorError):
    """Of a batch that Spark has committed, some subtasks never ran, so their rows are not in state.

    Something downstream stopped reading. Spark must run that batch again; the message says how.
    """

    kind = "INCOMPLETE"
