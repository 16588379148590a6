"""What becomes of output on the driver: it is shown once a record names it, or dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowspark.errors import OutputError
from flowspark.sinks import TwoPhaseSink
from flowstate.checkpoint import CheckpointRecord, SubtaskSnapshot
from flowstate.functions import CheckpointListener
from flowstate.storage.filesystems import open_file_system
from pyspark_flowbuffer.emitting import committables
from pyspark_flowbuffer.options import FORMAT, FileOutput, FunctionOutput
from pyspark_flowbuffer.staging import StagingArea, staged_files
from pyspark_flowbuffer.user_sinks import open_sink

__all__ = ["SETTINGS", "Publisher"]

SETTINGS = "flowbuffer"
"""The attribute of a record that says where its output goes: a later run may go elsewhere."""

_FUNCTION, _QUERY, _UID = "sinkFunction", "queryId", "uid"


@dataclass(frozen=True, slots=True)
class Publisher:
    """Shows and drops the output of one sink in one query. Everything may be repeated."""

    output: FileOutput | FunctionOutput
    query_id: str
    uid: str
    storage_options: Mapping[str, Any]

    def settings(self) -> dict[str, Any]:
        """Return what a record keeps of the output; no secrets."""
        output = self.output
        kind = output.to_json() if isinstance(output, FileOutput) else {_FUNCTION: output.function}
        return {_QUERY: self.query_id, _UID: self.uid, **kind}

    def prove(self, batch_id: int) -> None:
        """Refuse a path that cannot be written to, before rows wait that have to go there."""
        if isinstance(self.output, FileOutput):
            self._area(self.settings()).prove(batch_id)

    def check_staged(self, snapshots: Sequence[SubtaskSnapshot]) -> None:
        """Refuse output that the driver cannot show, before a record says that it counts.

        Afterwards a staged file that is absent would be taken for one that was published.
        """
        files = staged_files(snapshots)
        if not files or not isinstance(self.output, FileOutput):
            return
        if missing := self._area(self.settings()).missing(files):
            raise OutputError(
                FORMAT,
                f"{len(missing)} of {len(files)} files that tasks have staged are not there for "
                f"the driver: {self.output.path}/{missing[0]}. The 'path' must be one place for "
                f"the driver and all executors. Nothing of the batch was kept",
            )

    def publish(self, record: CheckpointRecord) -> None:
        """Show what a record names, where the run that wrote it wanted it."""
        settings = record.attributes[SETTINGS]
        if _FUNCTION not in settings:
            if files := staged_files(record.subtasks):
                self._area(settings).publish(files)
        elif (
            isinstance(self.output, FunctionOutput) and self.output.function == settings[_FUNCTION]
        ):
            self._commit(self.output, record)
        elif committables(record.subtasks):
            raise OutputError(
                FORMAT,
                f"checkpoint {record.checkpoint_id} has output of {settings[_FUNCTION]!r} that may "
                f"not be committed yet. Flush the query, with the options of that sink, before you "
                f"change it",
            )

    def drop(self, snapshots: Sequence[SubtaskSnapshot], winner: CheckpointRecord | None) -> None:
        """Remove the output of an attempt that does not count, except what the winner has too."""
        kept = () if winner is None else winner.subtasks
        output = self.output
        if isinstance(output, FileOutput):
            named = {file.staged for file in staged_files(kept)}
            files = [file for file in staged_files(snapshots) if file.staged not in named]
            if files:
                self._area(self.settings()).discard(files)
            return
        standing = [committable.value for committable in committables(kept)]
        prepared = [one for one in committables(snapshots) if one.value not in standing]
        if prepared:
            sink = open_sink(output)
            try:
                if isinstance(sink, TwoPhaseSink):
                    sink.abort(prepared)
            finally:
                sink.close()

    def aborted(self, checkpoint_id: int) -> None:
        """Tell a listener that a batch failed."""
        if isinstance(self.output, FileOutput):
            return
        sink = open_sink(self.output)
        try:
            if isinstance(sink, CheckpointListener):
                sink.notify_checkpoint_aborted(checkpoint_id)
        finally:
            sink.close()

    def sweep(self, batch_id: int) -> None:
        """Remove staged files that attempts of batches before this one have left behind.

        Files of the batch itself stay: a flush of it may be about to name them.
        """
        if isinstance(self.output, FileOutput):
            self._area(self.settings()).sweep(batch_id - 1)

    def _commit(self, output: FunctionOutput, record: CheckpointRecord) -> None:
        sink = open_sink(output)
        try:
            if isinstance(sink, TwoPhaseSink) and (prepared := committables(record.subtasks)):
                sink.commit(prepared)
            if isinstance(sink, CheckpointListener):
                sink.notify_checkpoint_complete(record.checkpoint_id)
        finally:
            sink.close()

    def _area(self, settings: Mapping[str, Any]) -> StagingArea:
        output = FileOutput.from_json(settings)
        file_system = open_file_system(output.path, self.storage_options)
        return StagingArea.of(file_system, output, query_id=settings[_QUERY], uid=settings[_UID])
