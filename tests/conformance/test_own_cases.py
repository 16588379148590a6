"""Cases that the project's own files do not have: other names, numbers, keys, parallelisms."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from flowstate.testing.conformance import Backend, FileReport, run_folder

from .documents import FILES, TTL, VECTORS, keyed, load, step, write
from .heap_model import random_script

REFUSED = {"exception": "NullPointerException"}


def replayed(folder: Path, document: Any, backend: Backend = Backend.MEMORY) -> FileReport:
    write(folder, document)
    (file,) = run_folder(folder, backend=backend).files
    return file


@pytest.fixture(params=list(Backend))
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)


# Names.


def test_files_are_recognised_whatever_they_are_called(tmp_path: Path) -> None:
    for number, name in enumerate(FILES):
        shutil.copy(VECTORS / name, tmp_path / f"{len(FILES) - number:02}.JSON")
    report = run_folder(tmp_path)

    assert report.exit_code == 0
    assert sum(len(file.passed) for file in report.files) == 247
    assert sum(len(file.skipped) for file in report.files) == 32


def test_cases_of_several_formats_may_share_a_file(tmp_path: Path) -> None:
    names = ("state_ttl.json", "timers.json", "operator_state_redistribution.json", "windows.json")
    cases = [case for name in names for case in load(name)["cases"]]
    file = replayed(tmp_path, {"cases": cases})

    assert file.failed == {}
    assert (len(file.passed), len(file.skipped)) == (38 + 16 + 20, 3 + 17)


def test_cases_of_one_id_are_told_apart(tmp_path: Path) -> None:
    right = keyed("same", {"type": "value"}, step(0, "k", "value", None))
    wrong = keyed("same", {"type": "value"}, step(0, "k", "value", 1))
    file = replayed(tmp_path, {"cases": [wrong, right, wrong]})

    assert file.passed == ["same (2)"]
    assert list(file.failed) == ["same", "same (3)"]


# Keyed state.

VALUE, LIST, MAP = {"type": "value"}, {"type": "list"}, {"type": "map"}
TEXTS = {"type": "value", "element_type": "string"}
SNAPSHOT = {"t": 0, "op": "snapshot"}


def restore(t: int, descriptor: dict[str, Any], result: Any = "ok") -> dict[str, Any]:
    return {"t": t, "op": "restore", "descriptor": descriptor, "result": result}


KEYED = [
    keyed("texts", TEXTS, step(0, "größe", "update abc", "void"), step(0, "größe", "value", "abc")),
    keyed(
        "numbers_as_keys",
        VALUE,
        {**step(0, "", "update 1", "void"), "key": 5},
        {**step(0, "", "value", None), "key": -5},
        SNAPSHOT,
        restore(0, VALUE),
        {**step(0, "", "value", 1), "key": 5},
    ),
    keyed(
        "null_as_a_map_key",
        MAP,
        step(0, "u", "put null 4", "void"),
        SNAPSHOT,
        restore(0, MAP),
        step(0, "u", "entries", [[None, 4]]),
    ),
    keyed(
        "entries_in_another_order",
        MAP,
        step(0, "u", "putAll z=1,b=2,q=3", "void"),
        step(0, "u", "entries", [["b", 2], ["q", 3], ["z", 1]]),
    ),
    keyed(
        "removed_while_iterated",
        MAP,
        step(0, "u", "putAll a=1,b=2,c=3", "void"),
        step(0, "u", "remove_entries b", "void"),
        step(0, "u", "keys", ["a", "c"]),
        step(0, "u", "remove_entries", "void"),
        {"t": 0, "op": "entries_in_backend", "result": 0},
    ),
    keyed(
        "two_snapshots",
        LIST,
        step(0, "u", "add 1", "void"),
        SNAPSHOT,
        step(0, "u", "add 2", "void"),
        SNAPSHOT,
        step(0, "u", "add 3", "void"),
        restore(0, LIST),
        step(0, "u", "get", [1, 2]),
        restore(0, LIST),
        step(0, "u", "get", [1, 2]),
    ),
    keyed(
        "a_longer_ttl_revives",
        {**VALUE, **TTL},
        step(0, "u", "update 8", "void"),
        SNAPSHOT,
        restore(75, {**VALUE, **TTL, "ttl_ms": 100}),
        step(99, "u", "value", 8),
        step(100, "u", "value", None),
    ),
    keyed(
        "restored_as_another_kind",
        LIST,
        step(0, "u", "add 1", "void"),
        SNAPSHOT,
        restore(0, MAP, {"exception_chain": ["IllegalStateException: Incompatible"]}),
    ),
    keyed(
        "a_ttl_of_nothing",
        {**VALUE, **TTL, "ttl_ms": 0},
        step(0, "u", "update 1", {"exception": "IllegalArgumentException"}),
    ),
    keyed(
        "registered_beside_it",
        VALUE,
        step(0, "u", "update 1", "void"),
        step(0, "u", "register list other", "ok:[]"),
        step(0, "u", "register aggregating s", {"exception": "RuntimeException"}),
        step(0, "u", "register value s", "ok:1"),
    ),
]


@pytest.mark.parametrize("case", KEYED, ids=lambda case: case["id"])
def test_other_scripts_of_keyed_state_are_replayed(
    case: dict[str, Any], tmp_path: Path, backend: Backend
) -> None:
    file = replayed(tmp_path, {"cases": [case]}, backend)

    assert (file.passed, file.failed) == ([case["id"]], {})


def test_a_null_in_a_reduction_is_refused_also_where_only_the_heap_was_seen(
    tmp_path: Path, backend: Backend
) -> None:
    case = keyed(
        "sum",
        {"type": "reducing"},
        step(0, "u", "add 3", "void"),
        step(0, "u", "add null", "void"),
        step(0, "u", "get", None),
        step(0, "u", "add 4", "void"),
        step(0, "u", "get", 4),
    )
    file = replayed(tmp_path, {"cases": [case]}, backend)

    assert file.failed == {}
    assert list(file.differences) == ["sum"]


@pytest.mark.parametrize("seed", range(25))
def test_random_scripts_come_out_as_in_a_model_of_the_heap(
    seed: int, tmp_path: Path, backend: Backend
) -> None:
    file = replayed(tmp_path, {"cases": [random_script(seed)]}, backend)

    assert file.failed == {}


# Timers.


def test_other_scripts_of_timers_are_replayed(tmp_path: Path, backend: Backend) -> None:
    def fired(key: str, timestamp: int, watermark: int) -> dict[str, Any]:
        return {
            "domain": "event",
            "key": key,
            "timestamp": timestamp,
            "current_watermark": watermark,
            "current_processing_time": 0,
            "output_timestamp": timestamp,
        }

    counts = {"event_timers": 2, "processing_timers": 0}
    case = {
        "id": "deleted_in_on_timer",
        "on_timer_actions": {"E:u7@3": "del_e 4; reg_e 90"},
        "steps": [
            {"op": "reg_e 3", "key": "u7", "fired": []},
            {"op": "reg_e 4", "key": "u7", "fired": [], **counts},
            {"op": "snapshot", "fired": [], **counts},
            {"op": "restore 4", "fired": [], **counts},
            {"op": "wm 50", "fired": [fired("u7", 3, 50)], "event_timers": 1},
            {"op": "del_p 5", "key": "u7", "fired": [], "processing_timers": 0},
            {"op": "wm 90", "fired": [fired("u7", 90, 90)], "event_timers": 0},
        ],
    }
    file = replayed(tmp_path, {"cases": [case]}, backend)

    assert (file.passed, file.failed) == (["deleted_in_on_timer"], {})


# Operator state.


def test_other_cases_of_operator_state_are_replayed(tmp_path: Path) -> None:
    def case(name: str, *steps: tuple[str, Any]) -> dict[str, Any]:
        return {"id": name, "steps": [{"op": op, "result": result} for op, result in steps]}

    cases = [
        case(
            "mode",
            ("getListState(offsets).addAll [4,5]", "void"),
            ("getUnionListState(offsets)", {"exception": ["IllegalStateException"]}),
            ("snapshot; restore; getListState(offsets).get", [4, 5]),
        ),
        case(
            "mode_at_restore",
            ("getUnionListState(u).add 1; snapshot; restore", "void"),
            ("getListState(u)", {"exception": ["IllegalStateException"]}),
            ("getUnionListState(u).get", [1]),
        ),
        case("same", ("getBroadcastState(b) twice", True)),
        case("carried", ("get after three restores", [9, 8, 7])),
        case("none", ("handle", "null (no state reported)")),
        case("names", ("state names in handle", ["p", "q"]), ("offsets", 0)),
        case("map", ("putAll a=1,b=null", "void"), ("get b", None), ("keys", ["b", "a"])),
        case("nothing_to_put", ("putAll null", REFUSED), ("isEmpty", True)),
        case("key_like_an_element", ("put a|b 1", "void"), ("get a|b", 1), ("keys", ["a|b"])),
        case(
            "map_then_list",
            ("getBroadcastState(x).put k 1", "void"),
            ("getListState(x).add 1", "accepted"),
            ("snapshot then restore", {"list": [77], "broadcast": []}),
        ),
        case(
            "both",
            ("getListState(x).add 1", "void"),
            ("getBroadcastState(y).put k 2", "void"),
            ("snapshot then restore", {"list": [1], "broadcast": [["k", 2]]}),
        ),
    ]
    file = replayed(tmp_path, {"cases": cases})

    assert file.failed == {}
    assert len(file.passed) == len(cases)
    assert list(file.differences) == ["map_then_list"]


def test_functions_with_a_broadcast_side_are_skipped(tmp_path: Path) -> None:
    step = {"op": "element a|show", "result": ["a=null rules=[]"]}
    file = replayed(tmp_path, {"cases": [{"id": "anything", "steps": [step]}]})

    assert file.skipped == {"anything": "broadcast process function"}


def redistribution(
    lists: list[list[Any] | None], mode: str, shares: list[dict[str, list[Any]]]
) -> dict[str, Any]:
    """Return a case of one state; a share is what a new subtask gets, by old subtask."""
    return {
        "id": f"{mode} {len(lists)} to {len(shares)}",
        "old_parallelism": len(lists),
        "new_parallelism": len(shares),
        "states": [{"name": "offsets", "mode": mode, "per_subtask": lists}],
        "split_states_processing_order": ["offsets"] if mode == "SPLIT_DISTRIBUTE" else [],
        "expected": [
            {"offsets": {"elements": [*chain(*share.values())], "by_old_subtask": share}}
            for share in shares
        ],
    }


def test_elements_of_any_kind_are_redistributed_at_any_parallelism(tmp_path: Path) -> None:
    split, union, copies = "SPLIT_DISTRIBUTE", "UNION", "BROADCAST"
    lists = [[1, {"a": [2]}], None, ["x", 3.5, True]]
    everything = {"0": lists[0] or [], "2": lists[2] or []}
    single: list[dict[str, list[Any]]] = [
        {"0": [1]},
        {"0": [{"a": [2]}]},
        {"2": ["x"]},
        {"2": [3.5]},
        {"2": [True]},
    ]
    nothing: list[dict[str, list[Any]]] = [{}] * 145
    cases = [
        redistribution(lists, split, [{"0": [1, {"a": [2]}]}, {"2": ["x"]}, *single[3:]]),
        redistribution(lists, split, [*single, *nothing]),
        redistribution(lists, split, [{"0": [1, {"a": [2]}]}, {}, {"2": ["x", 3.5, True]}]),
        redistribution(lists, union, [everything] * 6),
        redistribution([["r"], ["r"], None], copies, [{"0": ["r"]}, {"1": ["r"]}, {"0": ["r"]}]),
    ]
    # The third subtask had no copy; the second keeps its own and gets the one that goes around.
    file = replayed(tmp_path, {"cases": cases})

    assert file.failed == {}
    assert len(file.passed) == len(cases)


# Key groups.


def test_some_of_the_tables_of_key_groups_will_do(tmp_path: Path) -> None:
    ranges = [[0, 2], [3, 4], [5, 7], [8, 9]]
    document = {
        "ranges": [{"max_parallelism": 10, "parallelism": 4, "ranges_inclusive": ranges}],
        "keys": [
            {"type": "tuple2<string,int>", "key": ["a", 1], "key_group": {}, "hashCode": 3008},
            {"type": "tuple2<string,tuple1<int>>", "key": [None, [7]], "key_group": {"1": 0}},
            {"type": "Double", "key": "NaN", "hashCode": 2146959360, "key_group": {"1": 0}},
            {"type": "double", "key": -0.0, "hashCode": -2147483648, "key_group": {"1": 0}},
        ],
        "errors": [
            {"call": "assignKeyToParallelOperator(a, 4, 5)", "exception": "x"},
            {"call": "computeKeyGroupRangeForOperatorIndex(0, 1, 0)", "exception": "x"},
            {"call": "assignToKeyGroup(a, 4)", "exception": "x"},
        ],
    }
    file = replayed(tmp_path, document)

    assert list(file.failed) == ["error assignToKeyGroup(a, 4)"]
    assert len(file.passed) == 7


# Restores.


def test_outcomes_follow_the_savepoint_that_the_file_tells_of(tmp_path: Path) -> None:
    def case(text: str, outcome: str, *ids: str, cause: str = "") -> dict[str, Any]:
        return {
            "case": text,
            "outcome": outcome,
            "root_cause": cause,
            "restored_checkpoint_ids": list(ids),
        }

    mismatch = "Cannot map operator with max parallelism {} to new program with max parallelism 20."
    refused = "rejected at submission"
    document = {
        "source": "savepoint taken with parallelism 3, max parallelism 20",
        "cases": [
            case("restore p=20 max=20", "running", "123456"),
            case("restore p=7, max unset", "running", "4"),
            case("restore p=21 max unset", refused),
            case("restore p=3 max=21", refused, cause=mismatch.format(20)),
            case("restore p=2 max=20", refused, cause=mismatch.format(64)),
            case("p=21 max=20", refused),
            case("p=2 max=20", "running"),
            case("restore under another operator id", refused),
            case("restore under another operator id, ignoring unclaimed state", "running"),
        ],
    }
    file = replayed(tmp_path, document)

    assert file.failed == {}
    assert list(file.differences) == ["restore p=2 max=20"]


def test_a_file_of_outcomes_must_tell_of_its_savepoint(tmp_path: Path) -> None:
    case = {"case": "restore p=1 max=8", "outcome": "running", "restored_checkpoint_ids": ["1"]}
    file = replayed(tmp_path, {"cases": [case]})

    assert "parallelism N, max parallelism M" in file.failed["restore p=1 max=8"]


# The trace.


def test_another_trace_is_replayed(tmp_path: Path) -> None:
    def taken(element: int, subtask: int, size: int, *emitted: int) -> dict[str, Any]:
        return {
            "input": element,
            "subtask": subtask,
            "size_after_add": size,
            "emitted": list(emitted),
        }

    document = {
        "threshold": 2,
        "parallelism": 3,
        "events": [
            taken(10, 2, 1),
            taken(11, 0, 1),
            taken(12, 1, 1),
            {"checkpoint": 7, "after_input": 12, "contents": {"0": [11], "1": [12], "2": [10]}},
            taken(13, 0, 2, 11, 13),
            {"checkpoint": 9, "timestamp": 5, "contents": {"0": [], "1": [12], "2": [10]}},
        ],
        "emission_order": [["0", [11, 13]]],
        "restore_examples": {
            "chk7_to_1": {"0": [11, 12, 10], "then x on subtask 0": "emits nothing (4 > 2)"},
            "chk9_to_2": {"0": [12], "1": [10], "then x on subtask 1": "emits 10,x"},
            "chk9_to_4": {"0": [12], "1": [10], "2": [], "3": [], "note": "more than elements"},
            "note": "",
        },
    }
    file = replayed(tmp_path, document)

    assert file.failed == {}
    assert file.passed == ["events", "emission_order", "chk7_to_1", "chk9_to_2", "chk9_to_4"]
    assert list(file.differences) == ["chk7_to_1"]
