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
# Azure writes the container before an @, so a user name alone is no secret. A password may have
# any characters in it, and S3's secret keys do have slashes, so it lasts until the last @.
_PASSWORD = re.compile(r"(?<=//)([^/@:?#]*):.*@", re.DOTALL)


def open_file_system(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> StateFileSystem:
    """Open the store of a URL or a local path; nothing is created or contacted yet.

    The storage options go to the store's fsspec package as they are, and never into a message.
    """
    text = os.fspath(url)
    match = _PROTOCOL.match(text)
    protocol = _protocol_of(text)
    store = STORES.get(protocol)
    if store is None:
        raise StoreUnsupportedError(
            f"state cannot be kept in {_without_secrets(text)}: no exclusive create is known for "
            f"{protocol}://. Use a local path or one of "
            f"{', '.join(f'{name}://' for name in STORES)}"
        )
    if store.exclusive_create is ExclusiveCreate.HARD_LINK:
        return _open_local(text[match.end() :] if match else text, text, match is not None)
    # A protocol may be written in any case, but fsspec knows only this one.
    text = protocol + text[len(protocol) :]
    options = dict(storage_options or {})
    if store.exclusive_create is ExclusiveCreate.PROCESS_LOCK:
        file_system, root = _open_fsspec(text, store, options)
        return MemoryStateFileSystem(root, file_system)
    return _open_object_store(text, store, options)


def _protocol_of(text: str) -> str:
    before, is_url, _ = text.partition("://")
    if is_url and "::" in before:
        return before.lower()  # One protocol through another, as in simplecache::s3://bucket.
    match = _PROTOCOL.match(text)
    if match:
        return match.group(1).lower()
    # State of a whole cluster must not end in a local folder because of two missing slashes.
    begin, colon, _ = text.partition(":")
    if colon and begin.lower() in STORES:
        raise StoreUnsupportedError(
            f"a location with {begin}: but no slash behind it is neither a URL nor clearly a local "
            f"path: write {begin}://, or ./ before a path with a colon in its name"
        )
    return "file"


def _open_local(path: str, text: str, is_url: bool) -> StateFileSystem:
    # "file:" was cut off with its slashes, as many as the pattern took.
    if is_url and not path.startswith("/"):
        raise StoreUnsupportedError(
            f"{_without_secrets(text)!r} does not name a local path: write file:///folder, or the "
            f"path by itself"
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

    if "::" in text:
        raise StoreUnsupportedError(
            f"{_without_secrets(text)} has :: in it, with which fsspec chains locations. Choose a "
            f"name without it"
        )
    try:
        file_system, root = fsspec.core.url_to_fs(text, **options)
    except ImportError as error:
        raise _package_missing(text, store) from error
    except Exception as error:
        # The client's own words may repeat an option's value, so only the error's kind is named,
        # and it is not chained: a traceback would show the words after all.
        failure = store_error(error, "open", _without_secrets(text), redact=_kind_only)
        failure.add_note(f"the storage options given were: {', '.join(sorted(options))}")
        raise failure from None
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


def _kind_only(error: str) -> str:
    return error.partition(":")[0]


def _has_password(text: str) -> bool:
    return _PASSWORD.search(text) is not None


def _without_secrets(text: str) -> str:
    """Return the location without a password, a query or a fragment, for messages."""
    # The password goes first: it may have a ? or a # in it.
    return re.split(r"[?#]", _PASSWORD.sub(r"\1:***@", text), maxsplit=1)[0]
