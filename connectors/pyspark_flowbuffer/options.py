"""What a user may set on the sink, read once on the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from flowspark.locations import shared_location
from flowspark.options import Options
from flowstate.key_groups import MAX_PARALLELISM_LIMIT
from flowstate.redistribution import Redistribution

__all__ = [
    "FORMAT",
    "OPTION_NAMES",
    "BufferOptions",
    "Compression",
    "FileFormat",
    "FileOutput",
    "FunctionOutput",
    "Triggers",
]

FORMAT = "flowbuffer"
SINK_PREFIX = "sink."

DEFAULT_THRESHOLD = 100_000
DEFAULT_UID = "flowbuffer"
STATE_FOLDER = "flow"


class FileFormat(StrEnum):
    """What the files in the path are."""

    PARQUET = "parquet"
    JSON = "json"
    CSV = "csv"
    ARROW = "arrow"


class Compression(StrEnum):
    """How they are compressed."""

    NONE = "none"
    SNAPPY = "snappy"
    GZIP = "gzip"
    LZ4 = "lz4"
    ZSTD = "zstd"


class _Lists(StrEnum):
    EVEN_SPLIT = Redistribution.EVEN_SPLIT.value
    UNION = Redistribution.UNION.value


_COMPRESSIONS: Mapping[FileFormat, tuple[Compression, ...]] = {
    # The first one is the default.
    FileFormat.PARQUET: (
        Compression.SNAPPY,
        Compression.ZSTD,
        Compression.GZIP,
        Compression.LZ4,
        Compression.NONE,
    ),
    FileFormat.JSON: (Compression.NONE, Compression.GZIP, Compression.ZSTD),
    FileFormat.CSV: (Compression.NONE, Compression.GZIP, Compression.ZSTD),
    FileFormat.ARROW: (Compression.ZSTD, Compression.LZ4, Compression.NONE),
}

OPTION_NAMES = (
    "path",
    "fileFormat",
    "compression",
    "header",
    "partitionBy",
    "sinkFunction",
    "threshold",
    "maxBytes",
    "maxAge",
    "redistribution",
    "bufferKey",
    "parallelism",
    "stateLocation",
    "uid",
    "restoreFrom",
    "startEmpty",
    "checkpointsRetained",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Triggers:
    """When a buffer is full; None switches a trigger off."""

    threshold: int | None
    """Rows of a full buffer."""
    max_bytes: int | None
    """Bytes in memory from which on a buffer is full."""
    max_age_ms: int | None
    """How long its oldest row may wait; looked at when a batch runs."""

    @classmethod
    def parse(cls, options: Options) -> Triggers:
        """Read the triggers; without any there is a default."""
        triggers = cls(
            threshold=options.integer("threshold", minimum=1),
            max_bytes=options.size_bytes("maxBytes", minimum=1),
            max_age_ms=options.duration_ms("maxAge", minimum_ms=1),
        )
        if triggers == cls(threshold=None, max_bytes=None, max_age_ms=None):
            return cls(threshold=DEFAULT_THRESHOLD, max_bytes=None, max_age_ms=None)
        return triggers


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOutput:
    """Buffers become files below a path."""

    path: str
    file_format: FileFormat
    compression: Compression
    header: bool = False
    partition_by: tuple[str, ...] = ()

    @classmethod
    def parse(cls, options: Options) -> FileOutput:
        """Read what describes the files."""
        file_format = options.choice("fileFormat", FileFormat.PARQUET)
        known = _COMPRESSIONS[file_format]
        compression = options.choice("compression", known[0])
        if compression not in known:
            raise options.error(
                f"option 'compression' is {compression.value!r}, which {file_format.value} files "
                f"cannot have: use one of {', '.join(known)}"
            )
        if "header" in options and file_format is not FileFormat.CSV:
            raise options.error("option 'header' is for csv files only: leave it out")
        return cls(
            path=_shared_location(
                options, "path", options.required("path", "it is where the files go")
            ),
            file_format=file_format,
            compression=compression,
            header=options.boolean("header", False),
            partition_by=options.names("partitionBy"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return what a record keeps, so that the buffers can be flushed without the query."""
        return {
            "path": self.path,
            "fileFormat": self.file_format.value,
            "compression": self.compression.value,
            "header": self.header,
            "partitionBy": list(self.partition_by),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileOutput:
        """Return what a record has kept."""
        return cls(
            path=value["path"],
            file_format=FileFormat(value["fileFormat"]),
            compression=Compression(value["compression"]),
            header=value["header"],
            partition_by=tuple(value["partitionBy"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionOutput:
    """Buffers go to a sink of the user's."""

    function: str
    """As in ``package.module:Class``."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """They may have secrets in them, so no record and no message has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferOptions:
    """All of it."""

    output: FileOutput | FunctionOutput
    triggers: Triggers
    redistribution: Redistribution
    buffer_key: tuple[str, ...]
    parallelism: int | None
    state_location: str
    uid: str
    restore_from: str | None
    start_empty: bool
    checkpoints_retained: int
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    checkpoint_location: str | None = None
    """Spark's own, if it was given."""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> BufferOptions:
        """Read and check the options; raises ``OptionError``."""
        options = Options(FORMAT, given, known=OPTION_NAMES, prefixes=("storage.", SINK_PREFIX))
        parallelism = options.integer("parallelism", minimum=1, maximum=MAX_PARALLELISM_LIMIT)
        redistribution, buffer_key = _parse_redistribution(options, parallelism)
        restore_from = (options.text("restoreFrom") or "").strip() or None
        start_empty = options.boolean("startEmpty", False)
        if restore_from is not None and start_empty:
            raise options.error("options 'restoreFrom' and 'startEmpty' contradict: give one")
        return cls(
            output=_parse_output(options),
            triggers=Triggers.parse(options),
            redistribution=redistribution,
            buffer_key=buffer_key,
            parallelism=parallelism,
            state_location=_parse_state_location(options),
            uid=options.text("uid") or DEFAULT_UID,
            restore_from=restore_from and _shared_location(options, "restoreFrom", restore_from),
            start_empty=start_empty,
            checkpoints_retained=options.integer("checkpointsRetained", minimum=1) or 2,
            storage_options=options.storage_options(),
            checkpoint_location=options.text("checkpointLocation"),
        )


def _shared_location(options: Options, name: str, location: str) -> str:
    return shared_location(options.format_name, f"option {name!r}", location)


def _parse_output(options: Options) -> FileOutput | FunctionOutput:
    function = options.text("sinkFunction")
    if function is None:
        if extra := options.below(SINK_PREFIX):
            raise options.error(
                f"option 'sink.{min(extra)}' is for a sink of yours: give 'sinkFunction' too"
            )
        if "path" not in options:
            raise options.error("give 'path' for files, or 'sinkFunction' for a sink of yours")
        return FileOutput.parse(options)
    for name in ("path", "fileFormat", "compression", "header", "partitionBy"):
        if name in options:
            raise options.error(
                f"options 'sinkFunction' and {name!r} contradict: a sink of yours writes no files "
                f"of ours. Give what it needs as 'sink.<name>'"
            )
    return FunctionOutput(function=function.strip(), options=options.below(SINK_PREFIX))


def _parse_redistribution(
    options: Options, parallelism: int | None
) -> tuple[Redistribution, tuple[str, ...]]:
    # Broadcast is no choice: every subtask would write every row.
    redistribution = Redistribution(options.choice("redistribution", _Lists.EVEN_SPLIT).value)
    buffer_key = options.names("bufferKey")
    if redistribution is Redistribution.UNION:
        if not buffer_key:
            raise options.error(
                "option 'bufferKey' is missing: with redistribution=union each subtask is given "
                "all buffered rows, and the columns of the key tell which are its own"
            )
        if parallelism is None:
            raise options.error(
                "option 'parallelism' is missing: with redistribution=union a subtask must know "
                "how many there are. Give the number of partitions, and .repartition(n) to it"
            )
    elif buffer_key:
        raise options.error("option 'bufferKey' is for redistribution=union: leave it out")
    return redistribution, buffer_key


def _parse_state_location(options: Options) -> str:
    location = options.text("stateLocation")
    if location is not None and location.strip():
        return _shared_location(options, "stateLocation", location)
    checkpoint = options.text("checkpointLocation")
    if checkpoint is None or not checkpoint.strip():
        raise options.error(
            "option 'stateLocation' is missing, and so is 'checkpointLocation', below which the "
            "state is kept otherwise. A checkpoint location set for the whole session is not "
            "handed to a sink: give one of them with .option(...)"
        )
    location = _shared_location(options, "checkpointLocation", checkpoint)
    return f"{location.rstrip('/')}/{STATE_FOLDER}"
