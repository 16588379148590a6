"""The conformance runner: replays what Flink's own classes did, and compares.

::

    python -m flowstate.testing.conformance DIR [--backend memory|lmdb] [--case ID]

``DIR`` holds JSON files in the formats of this project's own ``tests/vectors``. Each file is
recognised by its contents, so that anybody may bring cases of their own. Everything in them is
really done with the library: on its states and timers, with its checkpoints, at the parallelism
that the case asks for.

Not replayed, and counted as skipped, are cases that are marked as implementation details of
Flink's, windows, restart strategies, and process functions with a broadcast side.
"""

from flowstate.testing.conformance.runner import FileReport, NoVectorsError, Report, run_folder
from flowstate.testing.conformance.trial import Backend

__all__ = ["Backend", "FileReport", "NoVectorsError", "Report", "run_folder"]
