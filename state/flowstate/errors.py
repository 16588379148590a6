"""Every error of the state library.

::

    FlowError
    ├── KeyGroupError                bad parallelism, max parallelism or key (also a ValueError)
    ├── StateError                   using state
    │   ├── StateDescriptorError     a descriptor that cannot be (also a ValueError)
    │   ├── StateTypeError           a value that is not of the declared type (also a TypeError)
    │   ├── StateRegistrationError   one name registered as two different things
    │   ├── NoCurrentKeyError        keyed state outside of a keyed context
    │   └── SerializerError          an unknown or failing custom serializer
    ├── RestoreError                 a checkpoint that does not fit the program
    │   ├── MaxParallelismError      max parallelism differs, or parallelism is above it
    │   ├── StateMigrationError      state restored as another kind or an incompatible type
    │   ├── UnclaimedStateError      state in the checkpoint that nothing of the program claims
    │   └── CheckpointNotFoundError  no checkpoint where one was asked for
    ├── SnapshotError                what was stored is not what must be there
    │   ├── SnapshotCorruptError     checksum, size or contents are wrong
    │   ├── SnapshotMissingError     a file that a record refers to is gone
    │   ├── FormatVersionError       written by a newer version
    │   └── UnsafeNameError          a name or handle that would leave its root (also a ValueError)
    └── StorageError                 the store itself
        ├── StoreUnsupportedError    a store without an exclusive create
        ├── StoreFullError           no space left
        ├── StoreUnavailableError    the store failed; the operation may be repeated
        └── CheckpointSupersededError  a checkpoint came too late: others have gone on without it

A message starts with a code in brackets, names what is at fault, and says what to do. Errors keep
their arguments through pickle, because Spark moves them between processes.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "CheckpointNotFoundError",
    "CheckpointSupersededError",
    "FlowError",
    "FormatVersionError",
    "KeyGroupError",
    "MaxParallelismError",
    "NoCurrentKeyError",
    "RestoreError",
    "SerializerError",
    "SnapshotCorruptError",
    "SnapshotError",
    "SnapshotMissingError",
    "StateDescriptorError",
    "StateError",
    "StateMigrationError",
    "StateRegistrationError",
    "StateTypeError",
    "StorageError",
    "StoreFullError",
    "StoreUnavailableError",
    "StoreUnsupportedError",
    "UnclaimedStateError",
    "UnsafeNameError",
]


class FlowError(Exception):
    """The root of all errors that this project raises by itself."""

    code: ClassVar[str] = "FLOWSTATE"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"


class KeyGroupError(FlowError, ValueError):
    """A parallelism, a max parallelism or a key that has no key group."""

    code = "FLOWSTATE_KEY_GROUP"


class StateError(FlowError):
    """State was used in a way it does not allow."""

    code = "FLOWSTATE_STATE"


class StateDescriptorError(StateError, ValueError):
    """A descriptor that contradicts itself or names an unsupported type."""

    code = "FLOWSTATE_DESCRIPTOR"


class StateTypeError(StateError, TypeError):
    """A value that is not of the type its state was declared with."""

    code = "FLOWSTATE_TYPE"


class StateRegistrationError(StateError):
    """One name was registered as two kinds, two types or two redistribution modes."""

    code = "FLOWSTATE_REGISTRATION"


class NoCurrentKeyError(StateError):
    """Keyed state was used while no key was set, as outside of ``process_element``."""

    code = "FLOWSTATE_NO_KEY"


class SerializerError(StateError):
    """A custom serializer is not registered, is of another version, or failed."""

    code = "FLOWSTATE_SERIALIZER"


class RestoreError(FlowError):
    """A checkpoint is sound, but it does not fit the program that wants it."""

    code = "FLOWSTATE_RESTORE"


class MaxParallelismError(RestoreError):
    """Key groups cannot be mapped: the max parallelism or the key-group assigner differs."""

    code = "FLOWSTATE_MAX_PARALLELISM"


class StateMigrationError(RestoreError):
    """State was restored as another kind, or with a type it cannot be turned into."""

    code = "FLOWSTATE_MIGRATION"


class UnclaimedStateError(RestoreError):
    """The checkpoint holds state that the program no longer registers."""

    code = "FLOWSTATE_UNCLAIMED"


class CheckpointNotFoundError(RestoreError):
    """A checkpoint was asked for that is not there; nothing was started from empty instead."""

    code = "FLOWSTATE_NO_CHECKPOINT"


class SnapshotError(FlowError):
    """What is stored is not what must be there. Restore an older checkpoint or a savepoint."""

    code = "FLOWSTATE_SNAPSHOT"


class SnapshotCorruptError(SnapshotError):
    """A file's checksum, size or contents are wrong.

    The file was damaged after it was written; nothing of it was used. Restore the file from a
    replica, or start from an older checkpoint.
    """

    code = "FLOWSTATE_CORRUPT"

    def __init__(self, path: str, *, what: str, expected: Any, actual: Any) -> None:
        super().__init__(
            f"{path}: {what} is {actual!r}, expected {expected!r}. The file was damaged after it "
            f"was written: restore it from a replica, or start from an older checkpoint"
        )
        self.path, self.what, self.expected, self.actual = path, what, expected, actual

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.path, self.what, self.expected, self.actual)
        return _rebuild_corrupt, fields, self.__dict__


def _rebuild_corrupt(path: str, what: str, expected: Any, actual: Any) -> SnapshotCorruptError:
    return SnapshotCorruptError(path, what=what, expected=expected, actual=actual)


class SnapshotMissingError(SnapshotError):
    """A file that a commit record or a caller refers to is not there."""

    code = "FLOWSTATE_MISSING"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path
        self.message = (
            f"{path}: no such file, but a checkpoint refers to it. It was removed by something "
            f"other than the sweep: restore it from a replica, or start from an older checkpoint"
        )


class FormatVersionError(SnapshotError):
    """The file was written in a format version that this version does not read."""

    code = "FLOWSTATE_FORMAT_VERSION"


class UnsafeNameError(SnapshotError, ValueError):
    """A name or a handle that would lead outside of its root."""

    code = "FLOWSTATE_UNSAFE_NAME"


class StorageError(FlowError):
    """The store did not do what it was asked to."""

    code = "FLOWSTATE_STORAGE"


class StoreUnsupportedError(StorageError):
    """The store has no exclusive create, so two committers could not be told apart."""

    code = "FLOWSTATE_STORE_UNSUPPORTED"


class StoreFullError(StorageError):
    """No space or quota is left. Nothing was committed: free space and run the batch again."""

    code = "FLOWSTATE_STORE_FULL"


class StoreUnavailableError(StorageError):
    """The store failed. Nothing was committed: the operation may be repeated as it is."""

    code = "FLOWSTATE_STORE_UNAVAILABLE"


class CheckpointSupersededError(StorageError):
    """A checkpoint came too late: its chain has gone on without it.

    The committer is left over from an earlier run or attempt. Nothing of it is kept; let it end,
    and do not repeat the commit.
    """

    code = "FLOWSTATE_SUPERSEDED"
