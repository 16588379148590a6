"""Which stores can hold state, and how each of them creates a file exclusively.

Everything above works with a ``StateFileSystem``; nothing but this module and its neighbours
knows fsspec.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from flowstate.errors import StoreUnsupportedError
from flowstate.storage._local import LocalStateFileSystem
from flowstate.storage._memory import MemoryStateFileSystem
from flowstate.storage._object_store import ObjectStoreFileSystem
from flowstate.storage._port import TEMPORARY_PREFIX, FileEntry, StateFileSystem, store_error

__all__ = [
    "STORES",
    "TEMPORARY_PREFIX",
    "ExclusiveCreate",
    "FileEntry",
    "StateFileSystem",
    "Store",
    "open_file_system",
]


class ExclusiveCreate(StrEnum):
    """What decides which of two racing creators is first."""

    HARD_LINK = "link(2) of a synced temporary file"
    PROCESS_LOCK = "a lock in the only process that sees the files"
    IF_NONE_MATCH = "a PUT with If-None-Match: *"
    IF_GENERATION_MATCH = "an upload with ifGenerationMatch=0"


@dataclass(frozen=True, slots=True)
class Store:
    """One kind of store: how it creates exclusively, and which package reaches it."""

    exclusive_create: ExclusiveCreate
    package: str = "fsspec"
    package_min: tuple[int, int] = (2025, 3)
    extra: str | None = None


_LOCAL = Store(ExclusiveCreate.HARD_LINK)
_MEMORY = Store(ExclusiveCreate.PROCESS_LOCK)
# The package versions are those whose sources were read: each sends the condition from the given
# version on, and turns the refusal into a FileExistsError. (s3fs 2024.10 and adlfs 2024.7 do not
# yet.) What the sources cannot show is whether the store honours it, so the first exclusive
# create in a process tries it: see ObjectStoreFileSystem.
_S3 = Store(ExclusiveCreate.IF_NONE_MATCH, "s3fs", (2025, 3), "s3")
_GCS = Store(ExclusiveCreate.IF_GENERATION_MATCH, "gcsfs", (2025, 3), "gcs")
_AZURE = Store(ExclusiveCreate.IF_NONE_MATCH, "adlfs", (2024, 12), "azure")

STORES: Mapping[str, Store] = {
    "file": _LOCAL,
    "local": _LOCAL,
    "memory": _MEMORY,
    "s3": _S3,
    "s3a": _S3,
    "gs": _GCS,
    "gcs": _GCS,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "az": _AZURE,
}
"""Protocol -> how. A protocol that is not here is refused."""

# Java writes file:/folder with one slash, so a local URL need not have "//".
_PROTOCOL = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)(?:://|:(?=/))")


def open_file_system(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> StateFileSystem:
    """Open the store of a URL or a local path; nothing is created or contacted yet.

    The storage options go to the store's fsspec package as they are, and never into a message.
    """
    text = os.fspath(url)
    match = _PROTOCOL.match(text)
    protocol = match.group(1).lower() if match else "file"
    store = STORES.get(protocol)
    if store is None or "::" in text.split("://", 1)[0]:
        raise StoreUnsupportedError(
            f"state cannot be kept in {_without_secrets(text)}: no exclusive create is known for "
            f"{protocol}://. Use a local path or one of "
            f"{', '.join(f'{name}://' for name in STORES)}"
        )
    if store.exclusive_create is ExclusiveCreate.HARD_LINK:
        return _open_local(text[match.end() :] if match else text, text, match is not None)
    options = dict(storage_options or {})
    if store.exclusive_create is ExclusiveCreate.PROCESS_LOCK:
        file_system, root = _open_fsspec(text, store, options)
        return MemoryStateFileSystem(root, file_system)
    return _open_object_store(text, store, options)


def _open_local(path: str, text: str, is_url: bool) -> StateFileSystem:
    # "file:" was cut off with its slashes, as many as the pattern took.
    if is_url and not path.startswith("/"):
        raise StoreUnsupportedError(
            f"{text!r} does not name a local path: write file:///folder, or the path by itself"
        )
    if not path:
        raise StoreUnsupportedError("an empty path names no location for state: give a folder")
    return LocalStateFileSystem(path)


def _open_object_store(text: str, store: Store, options: dict[str, Any]) -> StateFileSystem:
    if "?" in text or "#" in text or _has_password(text):
        raise StoreUnsupportedError(
            f"the location {_without_secrets(text)} has a password, a query or a fragment in it. "
            f"Pass credentials as storage options, so that they appear in no message or record"
        )
    _check_package(text, store)
    # A cached listing could hide a newer checkpoint, so the client is to keep none.
    file_system, root = _open_fsspec(text, store, {**options, "use_listings_cache": False})
    if not root.strip("/"):
        raise StoreUnsupportedError(f"{text} names no bucket: give one, as in s3://bucket/folder")
    return ObjectStoreFileSystem(text, root, file_system, options)


def _open_fsspec(text: str, store: Store, options: dict[str, Any]) -> tuple[Any, str]:
    import fsspec

    try:
        file_system, root = fsspec.core.url_to_fs(text, **options)
    except ImportError as error:
        raise _package_missing(text, store) from error
    except Exception as error:
        # The client's own words may repeat an option's value, so only its kind is named.
        kind = type(error)
        shown = kind.__new__(kind) if issubclass(kind, OSError) else Exception()
        failure = store_error(shown, "open", _without_secrets(text))
        failure.add_note(f"the storage options given were: {', '.join(sorted(options))}")
        raise failure from error
    return file_system, str(root)


def _check_package(text: str, store: Store) -> None:
    try:
        package = importlib.import_module(store.package)
    except ImportError as error:
        raise _package_missing(text, store) from error
    found = tuple(int(number) for number in re.findall(r"\d+", package.__version__)[:2])
    if found < store.package_min:
        raise StoreUnsupportedError(
            f"{store.package} {package.__version__} does not create files exclusively. Install "
            f"{store.package}>={'.'.join(map(str, store.package_min))}: "
            f"pip install 'flowspark[{store.extra}]'"
        )


def _package_missing(text: str, store: Store) -> StoreUnsupportedError:
    wanted = f"'flowspark[{store.extra}]'" if store.extra else store.package
    return StoreUnsupportedError(
        f"{_without_secrets(text)} needs the package {store.package}: pip install {wanted}"
    )


def _has_password(text: str) -> bool:
    # Azure writes the container before an @, so a user name alone is no secret.
    return ":" in urlsplit(text).netloc.rpartition("@")[0]


def _without_secrets(text: str) -> str:
    """Return the location without a password, a query or a fragment, for messages."""
    plain = re.split(r"[?#]", text, maxsplit=1)[0]
    return re.sub(r"(?<=//)([^/@:]*):[^/@]*@", r"\1:***@", plain)
