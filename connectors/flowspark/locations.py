"""Places that mean the same to the driver and to all executors, which run in other folders."""

from __future__ import annotations

import os
import re

from flowspark.errors import OptionError

__all__ = ["absolute_location", "shared_location"]

# Java writes file:/folder with one slash.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_MEMORY = "memory:"


def absolute_location(location: str) -> str:
    """Return a location that means the same in every process: a local path made absolute."""
    if _URL.match(location):
        return location
    begin, colon, _ = location.partition(":")
    if colon:
        # Imported late: it brings fsspec, and hardly any location comes here.
        from flowstate.storage.filesystems import STORES

        if begin.lower() in STORES:
            # s3:bucket is no path, but a mistake that is named where the store is opened.
            return location
    return os.path.abspath(location)


def shared_location(format_name: str, what: str, location: str) -> str:
    """Return a location that all processes see, absolute; ``what`` names it in the error."""
    location = location.strip()
    if location.lower().startswith(_MEMORY):
        raise OptionError(
            format_name,
            f"{what} must be seen by the driver and the executors, which are other processes, and "
            f"{location!r} is the memory of one process. Give a folder or the URL of an object "
            f"store",
        )
    return absolute_location(location)
