"""Finding the operators at and below a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowspark.command.contract import CommandError
from flowspark.command.words import one_line
from flowstate.checkpoint import CheckpointStorage, decode_name
from flowstate.checkpoint.names import RECORD_NAME, checkpoint_of_url
from flowstate.errors import UnsafeNameError
from flowstate.storage.filesystems import StateFileSystem, open_file_system

__all__ = ["DEPTH_MAX", "Location", "UnsealedCheckpoint", "find_operators", "only_operator"]

DEPTH_MAX = 5
"""``<name>/<checkpointLocation>/flow/<queryId>/<uid>`` are five folders below that of all names."""

FOLDERS_MAX = 20_000
"""So many folders are looked at; a URL with more below it was not meant."""

_CHECKPOINT = re.compile(r"chk-([1-9][0-9]*)")
_QUERY_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# In these are files of a sink, or nothing of ours.
_CLOSED = frozenset({"_flow", "__pycache__"})
# These are an operator's, or an operator of that uid; below them there is none.
_FLAT = frozenset({"shared", "taskowned"})


@dataclass(frozen=True, slots=True)
class Location:
    """The folder of one operator."""

    url: str
    """Without secrets: for messages, and to open it again."""
    title: str
    """The folder, decoded, from the URL on that was given; on one line, to be shown."""
    query: str | None
    """Spark's id of the query, where the folder above is one; sources have none."""
    uid: str
    checkpoint_id: int | None
    """The checkpoint that the URL named; None stands for all there are."""
    storage: CheckpointStorage


@dataclass(frozen=True, slots=True)
class UnsealedCheckpoint:
    """A folder of a checkpoint without a record: being written, or left behind."""

    checkpoint_id: int
    files: int
    bytes: int
    is_left_over: bool
    """There is a newer record: what is here was retired or given up, and a sweep removes it."""


def find_operators(
    url: str, storage_options: Mapping[str, Any], *, depth_max: int = DEPTH_MAX
) -> list[Location]:
    """Return the operators at and below a URL; none is an error that says what to give.

    On a local disk so many folders deep are looked at. In an object store everything below the
    URL is listed, since there are no folders.
    """
    root, checkpoint_id = checkpoint_of_url(url)
    files = open_file_system(root, storage_options)
    folders = sorted(_operator_folders(files, 0 if checkpoint_id else depth_max))
    if not folders:
        raise _nothing_there(files, depth_max)
    return [_location(files, folder, checkpoint_id, storage_options) for folder in folders]


def only_operator(url: str, storage_options: Mapping[str, Any]) -> Location:
    """Return the operator at or below a URL, if it is a single one."""
    found = find_operators(url, storage_options)
    if len(found) > 1:
        listed = "\n".join(f"  {location.url}" for location in found)
        raise CommandError(
            f"there are {len(found)} operators there, and this takes one. Give one of\n{listed}"
        )
    return found[0]


def unsealed_checkpoints(storage: CheckpointStorage) -> list[UnsealedCheckpoint]:
    """Return the checkpoints below a root that have files and no record."""
    sizes: dict[int, list[int]] = {}
    sealed = set()
    for entry in storage.file_system.list(""):
        folder, _, name = entry.path.partition("/")
        if (match := _CHECKPOINT.fullmatch(folder)) is None:
            continue
        sizes.setdefault(int(match.group(1)), []).append(entry.size)
        if name == RECORD_NAME:
            sealed.add(int(match.group(1)))
    newest = max(sealed, default=0)
    return [
        UnsealedCheckpoint(checkpoint_id, len(found), sum(found), checkpoint_id < newest)
        for checkpoint_id, found in sorted(sizes.items())
        if checkpoint_id not in sealed
    ]


def _location(
    files: StateFileSystem,
    folder: str,
    checkpoint_id: int | None,
    storage_options: Mapping[str, Any],
) -> Location:
    url = f"{files.url}/{folder}".rstrip("/")
    if not _is_text(url):
        raise CommandError(
            f"the path {url!a} is not valid text, so it could not be shown: rename the folder"
        )
    parts = [_readable(part) for part in url.split("/")]
    return Location(
        url=url,
        title=one_line("/".join(parts[-folder.count("/") - 1 :])),
        query=parts[-2] if len(parts) > 1 and _QUERY_ID.fullmatch(parts[-2]) else None,
        uid=parts[-1],
        checkpoint_id=checkpoint_id,
        storage=CheckpointStorage(url, storage_options),
    )


def _is_text(path: str) -> bool:
    """Say whether a local path, which may have any bytes in it, is text."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _readable(encoded: str) -> str:
    try:
        return decode_name(encoded)
    except UnsafeNameError:
        return encoded


def _operator_folders(files: StateFileSystem, depth_max: int) -> Iterator[str]:
    """Yield the folders below a root, relative to it, that have a ``chk-<id>`` folder."""
    if os.path.isabs(files.url):
        yield from _local_folders(files.url, depth_max)
        return
    found = set()
    for entry in files.list(""):
        parts = entry.path.split("/")
        for depth, part in enumerate(parts[:-1]):
            if depth <= depth_max and _CHECKPOINT.fullmatch(part):
                found.add("/".join(parts[:depth]))
                break
    yield from found


def _local_folders(root: str, depth_max: int) -> Iterator[str]:
    pending = [("", 0)]
    seen = 0
    while pending:
        folder, depth = pending.pop()
        inside = _subfolders(os.path.join(root, folder))
        if any(_CHECKPOINT.fullmatch(name) for name in inside):
            yield folder
            continue
        seen += len(inside)
        if seen > FOLDERS_MAX:
            raise CommandError(
                f"there are more than {FOLDERS_MAX:,} folders below {root}: give the state "
                f"location, a query's folder or an operator's"
            )
        if depth < depth_max:
            names = [name for name in inside if name not in _CLOSED and not name.startswith(".")]
            pending += [
                (f"{folder}/{name}".lstrip("/"), depth_max if name in _FLAT else depth + 1)
                for name in names
            ]


def _subfolders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    except OSError as error:
        raise CommandError(f"cannot list {folder}: {error.strerror or error}") from error


def _nothing_there(files: StateFileSystem, depth_max: int) -> CommandError:
    wanted = (
        "Give a state location, a query's folder in it, an operator's folder or one of its "
        "chk-<id> folders"
    )
    if os.path.isabs(files.url):
        if not os.path.exists(files.url):
            return CommandError(f"there is no {files.url}. {wanted}")
        if not os.path.isdir(files.url):
            return CommandError(f"{files.url} is a file, not a folder. {wanted}")
        return CommandError(
            f"there are no checkpoints in {files.url}, nor {depth_max} folders below it. {wanted}"
        )
    return CommandError(f"there are no checkpoints below {files.url}. {wanted}")
