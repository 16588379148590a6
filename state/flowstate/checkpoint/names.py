"""Names of folders and files: any text in a fixed alphabet, and the names this library gives."""

from __future__ import annotations

import re

import xxhash

from flowstate.errors import UnsafeNameError

__all__ = [
    "NAME_LENGTH_MAX",
    "RECORD_NAME",
    "batch_id_of",
    "checkpoint_id_of",
    "checkpoint_of_url",
    "decode_name",
    "encode_name",
    "folder_id_of",
    "record_path",
    "state_file_path",
]

NAME_LENGTH_MAX = 100
"""File systems allow 255 bytes, of which a state file's name needs some for itself."""
RECORD_NAME = "_metadata"

# An underscore stays itself unless it looks like an escape, because names are full of them. A dot
# in front would hide a file, and make "." and ".." possible.
_ESCAPED = re.compile(rb"[^A-Za-z0-9._-]|^\.|_(?=[0-9A-F]{2})")
_ESCAPE = re.compile(rb"_([0-9A-F]{2})")
# No UTF-8 text has this byte, so no escape of one looks the same.
_SHORTENED = "_FF"

_RECORD = re.compile(rf"chk-([1-9][0-9]*)/{RECORD_NAME}")
_FOLDER = re.compile(r"chk-([1-9][0-9]*)/.")
_BATCH = re.compile(r"(0|[1-9][0-9]*)-.")
_CHECKPOINT_URL = re.compile(rf"(?:(.*)/)?chk-([1-9][0-9]*)(?:/{RECORD_NAME})?")


def encode_name(name: str) -> str:
    """Return a name of letters, digits, ``.``, ``_`` and ``-`` that stands for this one alone.

    A name too long for a file system is cut and ends with a hash instead; that one cannot be
    decoded.
    """
    if not name:
        raise UnsafeNameError("an empty name cannot be the name of a file or folder")
    try:
        raw = name.encode()
    except UnicodeEncodeError as error:
        raise UnsafeNameError(f"the name {name!r} is not valid text: {error}") from error
    encoded = _ESCAPED.sub(lambda match: b"_%02X" % match.group()[0], raw).decode("ascii")
    if len(encoded) <= NAME_LENGTH_MAX:
        return encoded
    ending = f"{_SHORTENED}{xxhash.xxh3_128_hexdigest(raw)}"
    return encoded[: NAME_LENGTH_MAX - len(ending)] + ending


def decode_name(encoded: str) -> str:
    """Return the name that was encoded."""
    raw = _ESCAPE.sub(lambda match: bytes([int(match.group(1), 16)]), encoded.encode())
    try:
        name = raw.decode()
        if encode_name(name) == encoded:
            return name
    except UnicodeDecodeError:
        pass
    raise UnsafeNameError(f"{encoded!r} is not an encoded name, or was shortened when encoded")


def record_path(checkpoint_id: int) -> str:
    """Return where the record of a checkpoint is."""
    return f"chk-{checkpoint_id}/{RECORD_NAME}"


def state_file_path(folder: str, *, batch_id: int, run: str, unique: str) -> str:
    """Return where a state file is; the sweep reads the batch id out of the name."""
    if batch_id < 0:
        raise ValueError(f"there is no batch {batch_id}")
    return f"{folder}/{batch_id}-{encode_name(run)}-{unique}.arrow"


def checkpoint_id_of(path: str) -> int | None:
    """Return the checkpoint whose record is at this path; None if the path is no record's."""
    match = _RECORD.fullmatch(path)
    return int(match.group(1)) if match else None


def folder_id_of(path: str) -> int | None:
    """Return the checkpoint in whose folder a file is; None if it is in none."""
    match = _FOLDER.match(path)
    return int(match.group(1)) if match else None


def batch_id_of(path: str) -> int | None:
    """Return the batch that a file was written for; None if its name does not say."""
    match = _BATCH.match(path.rsplit("/", 1)[-1])
    return int(match.group(1)) if match else None


def checkpoint_of_url(url: str) -> tuple[str, int | None]:
    """Split the URL of a checkpoint into that of the root and the id; a root has no id."""
    plain = url.rstrip("/")
    match = _CHECKPOINT_URL.fullmatch(plain)
    if match is None:
        return url, None
    return match.group(1) or ("." if match.group(1) is None else "/"), int(match.group(2))
