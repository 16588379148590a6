"""The programs in the description of the format read what the library has written."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowspark.keyed.parts import _FORMAT as PART_FORMAT
from flowspark.keyed.parts import Part
from flowstate import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    LocalOperator,
    MapStateDescriptor,
    Reducer,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from flowstate.checkpoint.files import FILE_FORMAT, FileHandle, Footer, Section
from flowstate.checkpoint.record import (
    RECORD_FORMAT,
    CheckpointRecord,
    KeyedHandle,
    OperatorHandle,
    OperatorStateMeta,
    SubtaskSnapshot,
)
from flowstate.storage.filesystems import open_file_system
from flowstate.subtask import OperatorDescription
from pyspark_flowsocket.lines import LineCounts
from pyspark_flowsocket.segments import SEGMENT_FORMAT, SegmentHeader, batch_of, encode_segment
from pyspark_flowsocket.spool import segment_path
from tests.flowbuffer.harness import Query

from .markdown import ROOT, blocks_of, prose_of
from .test_documents import CODE

DOCUMENT = ROOT / "docs" / "on-disk-format.md"
STATE_READER, SEGMENT_READER = (
    block.text for block in blocks_of(DOCUMENT) if block.language == "python"
)

VALUE = ValueStateDescriptor("value", str)
LIST = ListStateDescriptor("list", int)
MAP = MapStateDescriptor("map", str, int)
SUM = ReducingStateDescriptor("sum", Reducer.SUM, int)
MEAN = AggregatingStateDescriptor("mean", Reducer.MEAN, float)
ELEMENTS = ListStateDescriptor("elements", str)
RULES = MapStateDescriptor("rules", str, int)


def run_program(program: str, folder: Path, tmp_path: Path) -> list[Any]:
    """Run a program of the document where nothing of this project can be imported."""
    script = tmp_path / "program.py"
    check = "import sys\nsys.modules['flowstate'] = sys.modules['pyspark'] = None\n"
    script.write_text(check + program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_state(root: Path, *, keys: int, length: int) -> dict[str, dict[str, Any]]:
    """Write, change and rescale state; return what each key has at the end."""
    expected: dict[str, dict[str, Any]] = {}
    for step, parallelism in enumerate((2, 3, 3)):
        with LocalOperator(root, parallelism=parallelism, key_type=str) as operator:
            for number in range(keys):
                key = f"key {number}"
                keyed = operator.subtask_of(key).keyed
                text = random.Random(f"{key} {step}").randbytes(length).hex()
                keyed.get_state(VALUE).update(text)
                keyed.get_list_state(LIST).add(step)
                keyed.get_map_state(MAP).put(f"step {step}", step)
                keyed.get_reducing_state(SUM).add(number)
                keyed.get_aggregating_state(MEAN).add(float(number))
                keyed.timer_service.register_event_time_timer(1000 * step)
                found = expected.setdefault(key, {"list": [], "map": {}, "sum": 0, "timers": []})
                found["value"] = text
                found["list"].append(step)
                found["map"][f"step {step}"] = step
                found["sum"] += number
                found["timers"].append(1000 * step)
            if step:
                key = f"key {step}"
                keyed = operator.subtask_of(key).keyed
                keyed.get_state(VALUE).clear()
                keyed.get_list_state(LIST).update([100, step])
                keyed.get_map_state(MAP).clear()
                keyed.get_map_state(MAP).put("new", None)
                expected[key].update(value=None, list=[100, step], map={"new": None})
            for subtask in operator.subtasks:
                subtask.operator.get_broadcast_state(RULES).put("limit", step)
                if not step:
                    elements = [f"{subtask.subtask_index}a", f"{subtask.subtask_index}b"]
                    subtask.operator.get_list_state(ELEMENTS).add_all(elements)
            operator.checkpoint()
    return expected


def collected(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: json.dumps(row.get("sub")).rjust(20)):
        if "key" not in row:
            continue
        entry = found.setdefault(
            row["key"], {"value": None, "list": [], "map": {}, "sum": 0, "timers": []}
        )
        if row["state"] == "list":
            entry["list"] += row["value"]
        elif row["state"] == "map":
            entry["map"][row["sub"]] = row["value"]
        elif row["kind"] == "timer":
            entry["timers"].append(row["sub"])
        elif row["state"] in {"value", "sum"}:
            entry[row["state"]] = row["value"]
    return found


@pytest.mark.parametrize(
    ("keys", "length"), [(3, 4), (20, 4000)], ids=["few-keys", "files-in-shared"]
)
def test_a_program_without_the_library_finds_the_values(
    tmp_path: Path, keys: int, length: int
) -> None:
    root = tmp_path / "state"
    expected = write_state(root, keys=keys, length=length)
    assert any(path.stat().st_size > 15_000 for path in root.glob("shared/*")) == (keys == 20)
    rows = run_program(STATE_READER, root, tmp_path)

    assert collected(rows) == expected
    means = {row["key"]: row["value"] for row in rows if row["state"] == "mean"}
    assert all(mean["sum"] / mean["count"] == int(key[4:]) for key, mean in means.items())
    assert len(means) == len(expected)
    elements = [row["value"] for row in rows if row["state"] == "elements"]
    assert elements == ["0a", "0b", "1a", "1b"]
    rules = [row["value"] for row in rows if row["kind"] == "broadcast"]
    assert [list(rule.values()) for rule in rules] == [["limit", 2]] * 3


def test_a_program_without_the_library_finds_the_rows_that_wait_in_a_sink(tmp_path: Path) -> None:
    query = Query(tmp_path / "query", threshold=5)
    for batch_id in range(3):
        query.batch(batch_id, [f"{batch_id}-{row}" for row in range(4)], [f"{batch_id}-x"])
    waiting = [row for rows in query.buffers() for row in rows]
    root = Path(query.storage.url.removeprefix("file://"))
    found = run_program(STATE_READER, root, tmp_path)

    assert len(waiting) == 5
    assert [row["value"]["value"] for row in found] == waiting


@pytest.mark.parametrize(
    "kind",
    [
        CheckpointRecord,
        SubtaskSnapshot,
        KeyedHandle,
        OperatorHandle,
        OperatorStateMeta,
        FileHandle,
        Part,
        OperatorDescription,
        Footer,
        Section,
        SegmentHeader,
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_field_is_described(kind: Any) -> None:
    fields = getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__
    codes = [code for _, line in prose_of(DOCUMENT) for code in CODE.findall(line)]
    described = {word for code in codes for word in re.findall(r"\w+", code)}

    assert set(fields) - described == set()


def test_the_formats_are_those_of_the_code() -> None:
    assert {RECORD_FORMAT, FILE_FORMAT, SEGMENT_FORMAT, PART_FORMAT} == {1}


def test_a_program_without_the_library_finds_the_lines(tmp_path: Path) -> None:
    files = open_file_system(str(tmp_path / "spool"), {})
    first = 0
    for number, lines in enumerate((["to be", "ü"], [], ["or not"])):
        header = SegmentHeader(
            number, "socket", 1, "owner", first, len(lines), counts=LineCounts(received=first)
        )
        batches = [batch_of(pa.array(lines), [len(lines)], [1], ["peer"])] if lines else []
        assert files.create_exclusively(segment_path(number), encode_segment(header, batches))
        first += len(lines)

    found = run_program(SEGMENT_READER, tmp_path / "spool", tmp_path)
    assert found == [[0, ["to be", "ü"]], [2, []], [2, ["or not"]]]
