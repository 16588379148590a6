from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowstate import LocalOperator, MapStateDescriptor, ValueStateDescriptor

from .shell import flow
from .states import COUNT, PENDING, RULES, run_once


def diff(a: Path, b: Path, *options: object) -> Any:
    shown = flow("diff", a, b, "--json", "--limit", 0, *options)
    assert shown.code in {0, 1}, shown.out
    found = shown.json
    assert found["differ"] is (shown.code == 1)
    return found["difference"]


def states_of(found: Any) -> dict[str, Any]:
    return {state["state"]: state for state in found["states"]}


def counts(state: Any) -> tuple[int, int, int]:
    return state["added"], state["removed"], state["changed"]


def test_added_removed_and_changed_keys_are_told_apart(tmp_path: Path) -> None:
    with LocalOperator(tmp_path, parallelism=2, key_type=str, checkpoints_retained=3) as operator:
        for key in ("gone", "same", "changed"):
            operator.subtask_of(key).keyed.get_reducing_state(COUNT).add(1)
        operator.checkpoint()
        operator.subtask_of("gone").keyed.get_reducing_state(COUNT).clear()
        operator.subtask_of("changed").keyed.get_reducing_state(COUNT).add(1)
        operator.subtask_of("new").keyed.get_reducing_state(COUNT).add(5)
        operator.checkpoint()

    found = states_of(diff(tmp_path / "chk-1", tmp_path / "chk-2"))["count"]
    assert counts(found) == (1, 1, 1)
    changes = {change["what"]: change for change in found["examples"]}
    assert (changes["added"]["key"], changes["added"]["new"]) == ("new", 5)
    assert (changes["removed"]["key"], changes["removed"]["old"]) == ("gone", 1)
    assert [changes["changed"][name] for name in ("key", "old", "new")] == ["changed", 1, 2]
    shown = flow("diff", tmp_path / "chk-1", tmp_path / "chk-2")
    assert shown.code == 1
    assert {"+ 'new': 5", "- 'gone': 1", "~ 'changed': 1 -> 2"} <= {
        line.strip() for line in shown.out.splitlines()
    }


def test_another_parallelism_alone_changes_no_state(tmp_path: Path) -> None:
    for parallelism in (2, 5):
        with LocalOperator(tmp_path, parallelism=parallelism, key_type=str) as operator:
            if parallelism == 2:
                for key in "abcdefgh":
                    operator.subtask_of(key).keyed.get_reducing_state(COUNT).add(1)
                operator.subtasks[0].operator.get_list_state(PENDING).add_all(["x", "x", "y"])
            operator.checkpoint()

    found = diff(tmp_path / "chk-1", tmp_path / "chk-2")
    assert found["settings"] == {"parallelism": [2, 5]}
    assert {counts(state) for state in found["states"]} == {(0, 0, 0)}


@pytest.mark.parametrize("other", [{"max_parallelism": 64}, {"assigner": "xxhash64"}], ids=str)
def test_the_same_keys_in_other_key_groups_are_the_same(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    from flowstate import KeyGroupAssigner

    if "assigner" in other:
        other = {"assigner": KeyGroupAssigner(other["assigner"])}
    run_once(tmp_path / "a")
    run_once(tmp_path / "b", **other)

    found = diff(tmp_path / "a", tmp_path / "b")
    assert len(found["settings"]) == 1
    assert {counts(state) for state in found["states"]} == {(0, 0, 0)}


def test_what_is_not_equal_to_itself_has_not_changed(tmp_path: Path) -> None:
    nothing = float("nan")
    values = ValueStateDescriptor("values", float)
    with LocalOperator(tmp_path, parallelism=1, key_type=float) as operator:
        for _ in range(2):
            operator.subtask_of(nothing).keyed.get_state(values).update(nothing)
            operator.subtasks[0].operator.get_broadcast_state(RULES).put("a", nothing)
            operator.checkpoint()

    found = states_of(diff(tmp_path / "chk-1", tmp_path / "chk-2"))
    assert {name: counts(state) for name, state in found.items()} == dict.fromkeys(
        ("values", "rules", *found), (0, 0, 0)
    )


def test_elements_are_counted_with_their_repetitions(tmp_path: Path) -> None:
    with LocalOperator(tmp_path, parallelism=1) as operator:
        state = operator.subtasks[0].operator
        state.get_list_state(PENDING).add_all(["x", "x", "y"])
        state.get_broadcast_state(RULES).put_all({"a": 1.0, "b": 2.0})
        operator.checkpoint()
        state.get_list_state(PENDING).update(["x", "z"])
        state.get_broadcast_state(RULES).remove("a")
        state.get_broadcast_state(RULES).put("b", 7.0)
        operator.checkpoint()

    found = states_of(diff(tmp_path / "chk-1", tmp_path / "chk-2"))
    assert counts(found["pending"]) == (1, 2, 0)
    assert counts(found["rules"]) == (0, 1, 1)


def test_states_that_came_or_changed_their_type_are_said(tmp_path: Path) -> None:
    import pyarrow as pa

    for number, kind in ((1, pa.int32()), (2, pa.int64())):
        with LocalOperator(tmp_path, parallelism=1, key_type=str) as operator:
            keyed = operator.subtask_of("k").keyed
            keyed.get_state(ValueStateDescriptor("v", kind)).update(5)
            if number == 2:
                keyed.get_map_state(MapStateDescriptor("m", str, int)).put("x", 1)
            operator.checkpoint()

    found = states_of(diff(tmp_path / "chk-1", tmp_path / "chk-2"))
    assert found["v"]["type_change"] == ["int32", "int64"]
    assert (found["m"]["presence"], counts(found["m"])) == ("added", (1, 0, 0))
    shown = flow("diff", tmp_path / "chk-1", tmp_path / "chk-2").out
    assert "type int32 -> int64" in shown
    assert "m (added): 1 added" in shown


def test_what_a_list_has_grown_by_is_shown_alone(words: Path) -> None:
    shown = flow("diff", words / "chk-1", words / "chk-2", "--limit", 0)

    assert "'user-2': 2 elements, then [2, 3]" in shown.out
    assert "'user-0' at 2023-11-14 22:13:20Z" not in shown.out  # The timer is the same.


def test_a_checkpoint_is_equal_to_itself(words: Path) -> None:
    newest = flow("diff", words, words / "chk-3")
    assert newest.code == 0
    assert "no difference" in newest.out

    same = flow("diff", words / "chk-3", words / "chk-3")
    assert same.code == 2
    assert "both are the same" in same.err


def test_the_limit_says_how_many_more_there_are(words: Path) -> None:
    shown = flow("diff", words / "chk-1", words / "chk-2", "--limit", 3)

    assert "count: 39 changed" in shown.out  # Adding 0 to the first one changes nothing.
    assert "... and 36 more (--limit 0 for all)" in shown.out
