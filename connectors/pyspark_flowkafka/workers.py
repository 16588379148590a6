"""What Spark does in a Python worker behind each task, made cheap."""

from __future__ import annotations

import gc

_is_settled = False


def settle() -> None:
    """Keep the worker's modules out of garbage collections; once per process, after a first task.

    Spark collects all garbage behind every task, and the next task waits for it: 10 to 20 ms for
    the objects of some hundred modules, which is more than what reading 20,000 records takes. What
    is frozen here is there to stay anyhow; what comes later is collected as ever.
    """
    global _is_settled
    if not _is_settled:
        _is_settled = True
        gc.collect()
        gc.freeze()
