from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Iterator

import pytest

from flowstate import errors
from flowstate.errors import FlowError

CLASSES: list[type[FlowError]] = [
    member
    for member in vars(errors).values()
    if inspect.isclass(member) and issubclass(member, FlowError)
]
every_error = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)


def _example(kind: type[FlowError]) -> FlowError:
    """Make an error, each of its arguments being a text that tells which one it is."""
    positional: list[str] = []
    named: dict[str, str] = {}
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = f"<{parameter.name}>"
        else:
            positional.append(f"<{parameter.name}>")
    return kind(*positional, **named)


# What an error carries


@every_error
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_keeps_its_message_and_its_fields_through_pickle(
    kind: type[FlowError], protocol: int
) -> None:
    error = _example(kind)
    again = pickle.loads(pickle.dumps(error, protocol))

    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@every_error
def test_an_error_can_be_copied(kind: type[FlowError]) -> None:
    error = _example(kind)

    for again in (copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert str(again) == str(error)


@every_error
def test_a_message_begins_with_the_code_and_tells_every_argument(kind: type[FlowError]) -> None:
    error = _example(kind)

    assert str(error) == f"[{kind.code}] {error.message}"
    for name in inspect.signature(kind).parameters:
        assert f"<{name}>" in str(error)


@every_error
def test_every_argument_is_a_field(kind: type[FlowError]) -> None:
    error = _example(kind)

    for name in inspect.signature(kind).parameters:
        assert getattr(error, name) == f"<{name}>"


# What it is called


def test_no_two_errors_have_one_code() -> None:
    codes = [vars(kind)["code"] for kind in CLASSES]

    assert len(set(codes)) == len(codes)


@every_error
def test_a_code_is_a_word_of_this_library(kind: type[FlowError]) -> None:
    assert re.fullmatch(r"FLOWSTATE(_[A-Z]+)*", kind.code)


@every_error
def test_an_error_is_called_one_and_says_what_it_means(kind: type[FlowError]) -> None:
    assert kind.__name__.endswith("Error")
    assert kind.__doc__


def test_the_public_names_are_the_errors_in_order() -> None:
    assert errors.__all__ == sorted(kind.__name__ for kind in CLASSES)


# The tree in the docstring


def _drawn() -> Iterator[tuple[str, str | None, set[str]]]:
    """Yield each error of the drawing with the one above it and what else it is said to be."""
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([│├└─ ]*)([A-Z]\w*Error)\b(.*)$", line)
        if match is None:
            continue
        branch, name, meaning = match.groups()
        depth = len(branch) // 4
        del above[depth:]
        yield name, (above[-1] if above else None), set(re.findall(r"also an? (\w+)", meaning))
        above.append(name)


def _real() -> Iterator[tuple[str, str | None, set[str]]]:
    for kind in CLASSES:
        ours = [base.__name__ for base in kind.__bases__ if issubclass(base, FlowError)]
        others = {base.__name__ for base in kind.__bases__ if not issubclass(base, FlowError)}
        yield kind.__name__, (ours[0] if ours else None), others - {"Exception"}


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    # In the same order, too, so that a reader finds an error's class where the drawing has it.
    assert [node[:2] for node in _drawn()] == [node[:2] for node in _real()]


def test_what_the_docstring_calls_an_error_besides_it_is() -> None:
    real = {name: others for name, _, others in _real()}

    for name, _, others in _drawn():
        assert others <= real[name]
