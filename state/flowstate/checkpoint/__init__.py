"""Checkpoints: state files, commit records, and the storage that keeps both.

- ``files``, ``writing``, ``reading``: state files, of which a restore reads only what it needs;
- ``record``: what a checkpoint consists of, as one JSON document;
- ``identity``, ``merge``, ``expiry``: several sets of rows become one;
- ``tiers``, ``folding``: which files are merged when, and how with little memory;
- ``names``, ``storage``, ``verification``: the checkpoints below one root.
"""

from flowstate.checkpoint.expiry import drop_expired
from flowstate.checkpoint.files import FileHandle, Section, SectionType, Segment
from flowstate.checkpoint.folding import MergeTimes, merge_handles
from flowstate.checkpoint.merge import Convert, convert_rows, merge_rows
from flowstate.checkpoint.names import decode_name, encode_name
from flowstate.checkpoint.reading import StateFileReader
from flowstate.checkpoint.record import (
    LINEAGE_MAX,
    RECORD_FORMAT,
    CheckpointRecord,
    KeyedHandle,
    OperatorHandle,
    OperatorStateMeta,
    StateMeta,
    SubtaskSnapshot,
    decode_record,
    decode_snapshot,
    encode_record,
    encode_snapshot,
)
from flowstate.checkpoint.storage import (
    CheckpointStorage,
    Committed,
    Swept,
)
from flowstate.checkpoint.tiers import FAN_IN, MergePlan, handles_max, plan_merge
from flowstate.checkpoint.verification import VerifyProblem, VerifyReport
from flowstate.checkpoint.writing import (
    KeyedSection,
    ListSection,
    encode_state_file,
    write_state_file,
)

__all__ = [
    "FAN_IN",
    "LINEAGE_MAX",
    "RECORD_FORMAT",
    "CheckpointRecord",
    "CheckpointStorage",
    "Committed",
    "Convert",
    "FileHandle",
    "KeyedHandle",
    "KeyedSection",
    "ListSection",
    "MergePlan",
    "MergeTimes",
    "OperatorHandle",
    "OperatorStateMeta",
    "Section",
    "SectionType",
    "Segment",
    "StateFileReader",
    "StateMeta",
    "SubtaskSnapshot",
    "Swept",
    "VerifyProblem",
    "VerifyReport",
    "convert_rows",
    "decode_name",
    "decode_record",
    "decode_snapshot",
    "drop_expired",
    "encode_name",
    "encode_record",
    "encode_snapshot",
    "encode_state_file",
    "handles_max",
    "merge_handles",
    "merge_rows",
    "plan_merge",
    "write_state_file",
]
