"""What Spark does in a Python worker behind each task, made cheap."""

from __future__ import annotations

import gc

from pyspark import TaskContext

__all__ = ["settle"]

# Python could be asked how much is frozen, but it would count that one by one: milliseconds a task.
_is_settled = False


def settle() -> None:
    """Keep the worker's modules out of garbage collections; to be called at the end of a task.

    Spark collects all garbage behind every task, and the next task waits for it: 10 to 20 ms for
    the objects of some hundred modules, which is more than what reading 20,000 records takes. What
    is frozen here, once, is there to stay anyhow; what comes later is collected as ever. Outside of
    a task nothing happens: the process is somebody else's.
    """
    global _is_settled
    if not _is_settled and TaskContext.get() is not None:
        gc.collect()
        gc.freeze()
        _is_settled = True
