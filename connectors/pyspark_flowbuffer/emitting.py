"""What a task does with a full buffer: stage a file, or hand it to a sink of the user's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from flowspark.errors import OutputError
from flowspark.sinks import Committable, SinkContext, SinkFunction, TwoPhaseSink
from flowstate.checkpoint import SubtaskSnapshot
from pyspark_flowbuffer.options import FORMAT
from pyspark_flowbuffer.partitions import file_schema
from pyspark_flowbuffer.staging import OUTPUTS, StagedFile, StagingArea

__all__ = [
    "COMMITTABLES",
    "Emitter",
    "FileEmitter",
    "FunctionEmitter",
    "TwoPhaseEmitter",
    "committables",
]

COMMITTABLES = "committables"
"""The attribute of a subtask's snapshot that lists what its sink has prepared."""


class Emitter(Protocol):
    """Takes the full buffers of one subtask in one batch."""

    def emit(self, folder: str, rows: pa.Table) -> None:
        """Take a buffer; the folder is that of its partition values."""
        ...

    @property
    def emitted(self) -> int:
        """How many buffers there were."""
        ...

    def attributes(self) -> dict[str, Any]:
        """Return what the record has to keep of them."""
        ...

    def close(self) -> None:
        """Let go of what the sink holds."""
        ...


@dataclass(slots=True)
class FileEmitter:
    """Stages a file for each buffer."""

    area: StagingArea
    context: SinkContext
    run: str
    prefix: str = "part"
    _files: list[StagedFile] = field(default_factory=list)

    @property
    def emitted(self) -> int:
        return len(self._files)

    def emit(self, folder: str, rows: pa.Table) -> None:
        context = self.context
        kept = file_schema(rows.schema, self.area.output.partition_by).names
        place = f"{context.batch_id:05d}-{context.subtask_index:05d}-{self.emitted:05d}"
        self._files.append(
            self.area.stage(
                rows.select(kept),
                folder=folder,
                name=f"{self.prefix}-{place}",
                batch_id=context.batch_id,
                run=self.run,
            )
        )

    def attributes(self) -> dict[str, Any]:
        return {OUTPUTS: [msgspec.to_builtins(file) for file in self._files]}

    def close(self) -> None:
        pass


@dataclass(slots=True)
class FunctionEmitter:
    """Hands each buffer to a sink function."""

    sink: SinkFunction
    context: SinkContext
    emitted: int = 0

    def emit(self, folder: str, rows: pa.Table) -> None:
        self.sink.write(_one_batch(rows), _advanced(self.context, self.emitted))
        self.emitted += 1

    def attributes(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.sink.close()


@dataclass(slots=True)
class TwoPhaseEmitter:
    """Lets a two-phase sink prepare each buffer, and keeps what it returns."""

    sink: TwoPhaseSink
    context: SinkContext
    _prepared: list[Any] = field(default_factory=list)

    @property
    def emitted(self) -> int:
        return len(self._prepared)

    def emit(self, folder: str, rows: pa.Table) -> None:
        context = _advanced(self.context, self.emitted)
        value = self.sink.prepare(_one_batch(rows), context)
        try:
            # What the record cannot keep as it is must not get into it as something else.
            same = msgspec.json.decode(msgspec.json.encode(value))
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise self._refused(value, str(error)) from error
        if same != value:
            raise self._refused(value, f"it would come back as {same!r}")
        self._prepared.append({"context": msgspec.to_builtins(context), "value": value})

    def attributes(self) -> dict[str, Any]:
        return {COMMITTABLES: self._prepared}

    def close(self) -> None:
        self.sink.close()

    def _refused(self, value: Any, why: str) -> OutputError:
        return OutputError(
            FORMAT,
            f"{type(self.sink).__name__}.prepare must return something of JSON (None, true and "
            f"false, numbers, texts, lists, objects), not {value!r}: {why}",
        )


def committables(subtasks: Iterable[SubtaskSnapshot]) -> list[Committable]:
    """Return what the sinks of subtasks have prepared, as a record keeps it."""
    return [
        Committable(msgspec.convert(entry["context"], SinkContext), entry["value"])
        for subtask in subtasks
        for entry in subtask.attributes.get(COMMITTABLES, ())
    ]


def _advanced(context: SinkContext, count: int) -> SinkContext:
    return replace(context, sequence_number=context.sequence_number + count)


def _one_batch(rows: pa.Table) -> pa.RecordBatch:
    batches = rows.combine_chunks().to_batches()
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
