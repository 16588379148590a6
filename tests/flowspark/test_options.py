"""Options that a user types, right and wrong."""

from __future__ import annotations

import pickle
from enum import StrEnum
from typing import Any

import pytest

from flowspark.errors import OptionError
from flowspark.options import Options


class Colour(StrEnum):
    RED = "red"
    DARK_BLUE = "dark-blue"


KNOWN = ("host", "port", "connectTimeout", "maxBytes", "colour", "verify", "partitionBy")


def options(**given: str) -> Options:
    return Options("flowtest", {name.lower(): value for name, value in given.items()}, known=KNOWN)


def test_an_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(OptionError) as caught:
        options(conectTimeout="1s")

    assert str(caught.value).startswith("[FLOWTEST_OPTION] there is no option 'conecttimeout': did")
    assert "'connectTimeout'" in str(caught.value)


def test_what_spark_adds_is_no_unknown_option() -> None:
    given = {"checkpointLocation": "c", "queryName": "q", "path": "p", "storage.key": "k"}

    assert "path" in Options("flowtest", given, known=())


def test_an_option_is_found_in_any_case() -> None:
    given = Options("flowtest", {"CONNECTTIMEOUT": "2 s"}, known=KNOWN)

    assert given.duration_ms("connectTimeout") == 2000


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("500ms", 500),
        ("10 seconds", 10_000),
        ("1 second", 1000),
        ("1.5 minutes", 90_000),
        ("2h", 7_200_000),
        ("3 days", 259_200_000),
        ("7 s", 7000),
        ("1 millisecond", 1),
    ],
)
def test_a_time_span_is_read(text: str, expected_ms: int) -> None:
    assert options(connectTimeout=text).duration_ms("connectTimeout") == expected_ms


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("17", 17), ("64k", 65_536), ("1.5 GB", 3 << 29), ("2MiB", 2 << 20), ("9b", 9)],
)
def test_a_size_is_read(text: str, expected: int) -> None:
    assert options(maxBytes=text).size_bytes("maxBytes") == expected


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (lambda o: o.integer("port", minimum=1, maximum=9), "0", "'port' must be 1..9, not '0'"),
        (lambda o: o.integer("port", minimum=1), "0", "'port' must be at least 1, not '0'"),
        (lambda o: o.integer("port"), "x", "'port' must be a whole number, not 'x'"),
        (lambda o: o.boolean("port", True), "maybe", "'port' must be true or false, not 'maybe'"),
        (lambda o: o.choice("port", Colour.RED), "green", "must be one of red, dark-blue, not"),
        (lambda o: o.duration_ms("port"), "10", "must be a time span such as"),
        (lambda o: o.duration_ms("port"), "10 fortnights", "must be a time span such as"),
        (lambda o: o.duration_ms("port", minimum_ms=1), "0s", "must be at least 1 ms, not '0s'"),
        (lambda o: o.size_bytes("port"), "-1", "must be a size such as"),
        (lambda o: o.size_bytes("port", minimum=2), "1", "must be at least 2 bytes"),
        (lambda o: o.duration_ms("port"), "9" * 400 + "s", "must be a shorter number"),
        (lambda o: o.size_bytes("port"), "9" * 400, "must be a shorter number"),
        (lambda o: o.required("port", "it is needed"), "  ", "'port' is missing: it is needed"),
    ],
)
def test_a_wrong_value_is_refused_by_name(read: Any, value: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(options(port=value))

    assert message in str(caught.value)


def test_what_is_not_given_has_its_default() -> None:
    empty = options()

    assert empty.text("host") is None
    assert empty.integer("port", 7) == 7
    assert empty.boolean("verify", True)
    assert empty.choice("colour", Colour.DARK_BLUE) is Colour.DARK_BLUE
    assert empty.duration_ms("connectTimeout", "3 s") == 3000
    assert empty.size_bytes("maxBytes", "1k") == 1024
    assert empty.names("partitionBy") == ()


def test_a_choice_and_a_list_are_read() -> None:
    given = options(colour="Dark-Blue", partitionBy=" a, b ,", verify="FALSE")

    assert given.choice("colour", Colour.RED) is Colour.DARK_BLUE
    assert given.names("partitionBy") == ("a", "b")
    assert not given.boolean("verify", True)


def test_storage_options_are_texts_switches_and_json() -> None:
    given = {
        "storage.key": "123",
        "storage.anon": "true",
        "storage.client_kwargs": '{"endpoint_url": "http://127.0.0.1:1"}',
    }

    assert Options("flowtest", given, known=()).storage_options() == {
        "key": "123",
        "anon": True,
        "client_kwargs": {"endpoint_url": "http://127.0.0.1:1"},
    }


def test_a_storage_option_that_is_no_json_is_not_repeated() -> None:
    given = Options("flowtest", {"storage.secret": "{hidden"}, known=())

    with pytest.raises(OptionError) as caught:
        given.storage_options()
    assert "storage.secret" in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_an_error_survives_pickle() -> None:
    error = pickle.loads(pickle.dumps(OptionError("flowtest", "no")))

    assert str(error) == "[FLOWTEST_OPTION] no"
    assert error.format_name == "flowtest"
