"""Which operator it is, and which task of which batch of which run."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowspark.errors import OptionError
from flowstate.checkpoint import CheckpointStorage, encode_name

__all__ = ["NAME", "OperatorSpec", "TaskIdentity"]

NAME = "flowkeyed"
"""How the operator calls itself in the codes of its errors."""

_QUERY_ID, _BATCH_ID, _RUN, _ACTION = (
    "sql.streaming.queryId",
    "streaming.sql.batchId",
    "spark.jobGroup.id",
    "spark.sql.execution.id",
)
# No query of Spark's has such an id: they are UUIDs.
_BATCH_JOB = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpec:
    """What a call of ``process`` fixed; it travels to the tasks."""

    uid: str
    state_location: str
    parallelism: int
    max_parallelism: int
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    restore_from: str | None = None
    start_empty: bool = False
    allow_non_restored_state: bool = False
    checkpoints_retained: int = 2
    working_folder: str | None = None
    is_streaming: bool = False
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Tells this operator from another one with the same uid."""

    def open_storage(self, query_id: str | None) -> CheckpointStorage:
        """Open the root of this operator in a query, or in a batch job."""
        query = encode_name(query_id or _BATCH_JOB)
        root = f"{self.state_location.rstrip('/')}/{query}/{encode_name(self.uid)}"
        return CheckpointStorage(root, self.storage_options)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskIdentity:
    """Where Spark runs this call; the subtask is not known before the first row."""

    query_id: str | None
    """None in a batch job."""
    batch_id: int | None
    run: str
    stage_id: int
    partition_id: int
    task_id: int
    action_id: int | None = None
    """Which execution of a plan it is: take() and the like run theirs in several stages."""

    @classmethod
    def current(cls, spec: OperatorSpec) -> TaskIdentity:
        """Ask Spark."""
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            raise RuntimeError("a keyed operator runs in a task of Spark's, and nowhere else")
        batch_id = context.getLocalProperty(_BATCH_ID)
        query_id = context.getLocalProperty(_QUERY_ID) if batch_id is not None else None
        if spec.is_streaming and query_id is None:
            raise _hidden_batch(spec)
        run = context.getLocalProperty(_RUN) if query_id is not None else None
        if run is not None and not _is_uuid(run):
            # A function under foreachBatch has set a job group of its own, which may be the same
            # in every run: what a dead run has left must not be taken for this one's.
            run = None
        action_id = context.getLocalProperty(_ACTION)
        return cls(
            query_id=query_id,
            batch_id=None if query_id is None or batch_id is None else int(batch_id),
            run=f"{run or spec.token}-{spec.parallelism}",
            stage_id=context.stageId(),
            partition_id=context.partitionId(),
            task_id=context.taskAttemptId(),
            action_id=int(action_id) if action_id else None,
        )

    @property
    def file_batch_id(self) -> int:
        """The batch that stands in the names of files."""
        return self.batch_id or 0


def _hidden_batch(spec: OperatorSpec) -> OptionError:
    """Refuse what would otherwise be taken for a batch job, which starts from nothing."""
    return OptionError(
        NAME,
        f"operator {spec.uid!r}: Spark does not say which micro-batch this is, so its state cannot "
        f"be found. If a function under foreachBatch runs it in a thread of its own, wrap what the "
        f"thread runs: inheritable_thread_target(spark)(...) of pyspark. Under foreachBatch of "
        f"Spark Connect it is always so: write to a sink instead",
    )


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False
