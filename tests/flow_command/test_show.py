from __future__ import annotations

import datetime as dt
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowstate import (
    KeyGroupAssigner,
    ListStateDescriptor,
    LocalOperator,
    StateTtlConfig,
    ValueStateDescriptor,
)
from flowstate.testing.clock import ManualClock

from .shell import flow
from .states import KEYS, one_value, run_once, unsealed


def show(url: Path, state: str, *options: object) -> Any:
    shown = flow("show", url, "--state", state, "--json", *options)
    assert shown.code == 0, shown.out
    return shown.json


def by_key(url: Path, state: str) -> dict[str, Any]:
    entries = show(url, state, "--limit", 0)["entries"]
    return {entry["key"]: entry["value"] for entry in entries}


def test_every_key_of_every_keyed_state_is_shown_once(words: Path) -> None:
    everything = {*KEYS, "new"}

    assert by_key(words, "count")["user-1"] == 1 + 1 + 0
    assert by_key(words, "last")["user-39"] == "text 39"
    assert by_key(words, "places")["user-2"] == [2, 3, 2, 3]
    assert by_key(words, "mean")["user-5"] == {"sum": 10.0, "count": 2}
    for state in ("count", "last", "places", "mean"):
        entries = show(words, state, "--limit", 0)["entries"]
        assert len(entries) == len(everything)
        assert {entry["key"] for entry in entries} == everything


def test_a_map_is_shown_entry_by_entry(words: Path) -> None:
    (entry,) = show(words, "scores", "--key", "user-7")["entries"]

    assert (entry["key"], entry["map_key"], entry["value"]) == ("user-7", "m1", 7)


def test_the_earliest_timers_come_first(words: Path) -> None:
    entries = show(words, "_flow.timers.event", "--limit", 3)["entries"]

    assert [entry["map_key"] - 1_700_000_000_000 for entry in entries] == [0, 0, 1000]
    shown = flow("show", words, "--state", "_flow.timers.event", "--limit", 1)
    assert "2023-11-14 22:13:20Z" in shown.out


def test_lists_of_operator_state_are_shown_by_subtask(words: Path) -> None:
    subtasks = show(words, "pending", "--limit", 0)["subtasks"]

    assert len(subtasks) == 3
    elements = [element for subtask in subtasks for element in subtask["elements"]]
    assert sorted(elements) == sorted(["0-0", "1-0", "1-1"] * 3 + ["2-0", "2-1", "2-2"])
    limited = show(words, "pending", "--limit", 2)
    assert [element for one in limited["subtasks"] for element in one["elements"]] == elements[:2]
    assert limited["more"] is True


def test_a_broadcast_map_is_shown_once(words: Path) -> None:
    shown = flow("show", words, "--state", "rules")

    assert "the copy of subtask 0; there are 3 copies" in shown.out
    assert shown.out.count("'limit'") == 1
    (subtask,) = show(words, "rules", "--key", "limit")["subtasks"]
    assert subtask["elements"] == [{"key": "limit", "value": 2.5}]
    (subtask,) = show(words, "rules", "--key", "other")["subtasks"]
    assert subtask["elements"] == []


def test_an_older_checkpoint_shows_what_was_then(words: Path) -> None:
    assert by_key(words / "chk-1", "count")["user-1"] == 1
    assert "new" not in by_key(words / "chk-2", "count")


def test_a_limit_says_that_there_is_more(words: Path) -> None:
    shown = flow("show", words, "--state", "count", "--limit", 2)

    assert shown.out.count("'") == 4
    assert "... and more: --limit 20, or --limit 0 for all" in shown.out
    assert show(words, "count", "--limit", 2)["more"] is True
    assert show(words, "count", "--limit", 0)["more"] is False


PAIR = pa.struct([("a", pa.string()), ("b", pa.int32())])
FLOATS = pa.struct([("a", pa.string()), ("b", pa.float64())])
DEEP = pa.list_(PAIR)


@pytest.mark.parametrize(
    ("key_type", "key", "text"),
    [
        (str, "a b", "a b"),
        (str, "12", "12"),
        (int, -7, "-7"),
        (float, 2.5, "2.5"),
        (float, float("nan"), "nan"),
        (bool, True, "true"),
        (bytes, b"ab", "ab"),
        (dt.date, dt.date(2026, 1, 2), "2026-01-02"),
        (
            pa.timestamp("us", "UTC"),
            dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC),
            "2026-01-02 03:04:00",
        ),
        (
            pa.timestamp("us", "UTC"),
            dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC),
            "2026-01-01T22:04:00-05:00",
        ),
        (pa.timestamp("us", "UTC"), dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "2026-01-02"),
        (dt.timedelta, dt.timedelta(seconds=90), "PT1M30S"),
        (bytes, b"\xff\x00'", 'b"\\xff\\x00\'"'),
        (bytes, b"\xff", os.fsdecode(b"\xff")),
        (FLOATS, ("x", float("nan")), '["x", NaN]'),
        (FLOATS, ("x", -0.0), '["x", 0]'),
        (pa.decimal128(9, 2), Decimal("1.50"), "1.50"),
        (PAIR, ("x", 3), '["x", 3]'),
        (DEEP, (("x", 3), ("y", None)), '[["x", 3], ["y", null]]'),
    ],
    ids=str,
)
def test_a_key_of_any_type_is_found_by_its_text(
    tmp_path: Path, key_type: Any, key: Any, text: str
) -> None:
    # Flink's own assignment is not defined for all types.
    one_value(tmp_path, key_type, {key: 5}, assigner=KeyGroupAssigner.XXHASH64)

    shown = flow("show", tmp_path, "--state", "value", "--key", text)
    assert shown.code == 0
    assert shown.out.splitlines()[-1].split()[-1] == "5"


@pytest.mark.parametrize(
    ("key_type", "text"), [(int, "x"), (PAIR, "x"), (PAIR, '["x"]'), (PAIR, '["x", "y"]')]
)
def test_what_is_no_key_of_the_type_is_refused(tmp_path: Path, key_type: Any, text: str) -> None:
    one_value(tmp_path, key_type, {1 if key_type is int else ("a", 1): 5})

    shown = flow("show", tmp_path, "--state", "value", "--key", text)
    assert shown.code == 2
    assert f"{text!r} is not a key of type" in shown.err


def test_a_key_without_a_value_is_said_to_have_none(words: Path) -> None:
    shown = flow("show", words, "--state", "count", "--key", "nobody")

    assert shown.code == 0
    assert "the key 'nobody' has nothing here" in shown.out


def test_namespaces_are_shown_where_there_are_any(tmp_path: Path) -> None:
    with LocalOperator(tmp_path, parallelism=1, key_type=str) as operator:
        state = operator.subtask_of("k").keyed.get_state(ValueStateDescriptor("v", int), str)
        for namespace in ("first", "second"):
            state.set_current_namespace(namespace)
            state.update(len(namespace))
        operator.checkpoint()

    shown = flow("show", tmp_path, "--state", "v")
    assert [line.split() for line in shown.out.splitlines()[2:]] == [
        ["'k'", "'first'", "5"],
        ["'k'", "'second'", "6"],
    ]


def test_what_has_expired_is_shown_as_expired(tmp_path: Path) -> None:
    ttl = StateTtlConfig(ttl=dt.timedelta(milliseconds=10))
    descriptor = ValueStateDescriptor("v", int, ttl=ttl)
    elements = ListStateDescriptor("l", int, ttl=ttl)
    clock = ManualClock(1_000_000)
    with LocalOperator(tmp_path, parallelism=1, key_type=str, clock=clock) as operator:
        operator.subtask_of("k").keyed.get_state(descriptor).update(1)
        operator.subtask_of("k").keyed.get_list_state(elements).add(1)
        operator.checkpoint()

    for state in ("v", "l"):
        assert "expired 1970-01-01 00:16:40.010Z" in flow("show", tmp_path, "--state", state).out


def test_a_value_cannot_move_the_cursor_or_break_the_table(tmp_path: Path) -> None:
    one_value(tmp_path, str, {"a\x1b[2J\nb": "c\r\x07"})

    shown = flow("show", tmp_path, "--state", "value")
    assert "\x1b" not in shown.out
    assert len(shown.out.splitlines()) == 3


def test_a_long_value_is_cut_unless_it_is_asked_for(tmp_path: Path) -> None:
    one_value(tmp_path, str, {"k": "x" * 5000})

    assert "(5,002 characters; --json has all)" in flow("show", tmp_path, "--state", "value").out
    assert "x" * 5000 in flow("show", tmp_path, "--state", "value", "--key", "k").out
    assert show(tmp_path, "value")["entries"][0]["value"] == "x" * 5000


def test_values_that_json_does_not_have_become_texts(tmp_path: Path) -> None:
    one_value(tmp_path, str, {"k": b"\xff\x00"})

    assert show(tmp_path, "value")["entries"][0]["value"] == "/wA="


def test_a_limit_beyond_all_there_can_be_is_all(words: Path) -> None:
    for state in ("count", "pending", "_flow.timers.event"):
        shown = flow("show", words, "--state", state, "--limit", 10**30)
        assert shown.code == 0, shown.err
        assert "more" not in shown.out


def test_an_unknown_state_is_answered_with_the_nearest(words: Path) -> None:
    shown = flow("show", words, "--state", "conut")

    assert shown.code == 3
    assert "has no state 'conut'. Did you mean 'count'? There are: '_flow.timers" in shown.err


def test_lists_have_no_keys(words: Path) -> None:
    shown = flow("show", words, "--state", "pending", "--key", "x")

    assert shown.code == 2
    assert "leave --key out" in shown.err


def test_several_operators_are_listed_and_no_record_is_said(tmp_path: Path) -> None:
    run_once(tmp_path / "a")
    unsealed(tmp_path / "b")

    several = flow("show", tmp_path, "--state", "count")
    assert several.code == 3
    assert [line.strip() for line in several.err.splitlines()[1:]] == [
        f"{tmp_path}/a",
        f"{tmp_path}/b",
    ]
    none = flow("show", tmp_path / "b", "--state", "count")
    assert none.code == 3
    assert "no complete checkpoint" in none.err
