"""Scripts of keyed state: operations with a clock, snapshots, and restores as something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowstate.descriptors import StateVisibility
from flowstate.errors import (
    FlowError,
    RestoreError,
    StateError,
    StateRegistrationError,
    StateTypeError,
)
from flowstate.keyed.backend import KeyedStateBackend
from flowstate.operators import LocalOperator
from flowstate.testing.clock import ManualClock
from flowstate.testing.conformance.keyed_descriptors import (
    described,
    registered,
    visibility_of,
)
from flowstate.testing.conformance.keyed_operations import perform, reading
from flowstate.testing.conformance.literals import Literals, key_type_of, split_op
from flowstate.testing.conformance.trial import (
    VOID,
    Json,
    Mismatch,
    Trial,
    VectorError,
    attempt,
    expect,
    expect_outcome,
    field_of,
    is_refusal,
    steps_of,
    unordered,
)

__all__ = ["is_case", "replay"]

_Step = Mapping[str, Json]

_NAME = "s"
_REDUCTIONS = ("reducing", "aggregating")

_ADD_NULL = (
    "add(null) of a reducing or aggregating state is refused and changes nothing: Flink's heap "
    "backend clears the state without a word, RocksDB hands the null to the user's function"
)
_OTHER_TYPE = (
    "a name registered again with another type is refused: Flink returns the first state and "
    "never compares the types"
)
_SEEN_ONCE = (
    "an expired value that may be returned is returned once: Flink's RocksDB backend does so, its "
    "heap backend cleans up in the background before each access and may hide it"
)


def is_case(case: Mapping[str, Json]) -> bool:
    """Say whether a case is such a script."""
    return "descriptor" in case and "steps" in case


def replay(case: Mapping[str, Json], trial: Trial) -> None:
    """Replay a script."""
    for steps in _asserted_steps(case, trial):
        script = _Script(case, trial)
        for number, step in enumerate(steps, start=1):
            script.step(f"step {number}, {step.get('op')}", step)


def _asserted_steps(case: Mapping[str, Json], trial: Trial) -> list[list[_Step]]:
    """Return the steps of the heap backend, except where those of RocksDB are the rule here."""
    steps = steps_of(case)
    rocksdb: list[_Step] | None = case.get("steps_rocksdb")
    if rocksdb is None:
        return [steps]
    if _has_visible_cleanup(case, steps):
        _check_hidden(steps, rocksdb)
        trial.differs(_SEEN_ONCE)
        return [rocksdb]
    if any(_is_null_reduced(case["descriptor"], step) for step in steps):
        return [steps, rocksdb]
    return [steps]


def _check_hidden(steps: list[_Step], rocksdb: list[_Step]) -> None:
    """Check that the heap backend says the same as RocksDB, or has cleaned it up already."""
    expect("number of steps", len(rocksdb), len(steps))
    for number, (heap, other) in enumerate(zip(steps, rocksdb, strict=True), start=1):
        result = heap.get("result")
        if result not in (None, [], False):
            where = f"step {number}, {heap.get('op')}, of heap and RocksDB"
            expect(where, other.get("result"), result)


def _has_visible_cleanup(case: Mapping[str, Json], steps: list[_Step]) -> bool:
    """Say whether background clean-up may show: expired values may be returned while it is on.

    A restore that changes the visibility counts in any case.
    """
    first = case["descriptor"]
    restored = [step["descriptor"] for step in steps if "descriptor" in step]
    expiring = [one for one in (first, *restored) if "ttl_ms" in one]
    if "ttl_ms" in first and len({visibility_of(one) for one in expiring}) > 1:
        return True
    return any(
        visibility_of(one) is StateVisibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP
        and one.get("cleanup", "default") not in {"none", "full_snapshot"}
        for one in expiring
    )


def _is_null_reduced(descriptor: Mapping[str, Json], step: _Step) -> bool:
    """Say whether a null is added to a reduction, and Flink lets it."""
    added = descriptor.get("type") in _REDUCTIONS and step.get("op") == "add null"
    return added and not is_refusal(step.get("result"))


class _Script:
    """One run of a script: an operator with one subtask, and the state that the script is about."""

    def __init__(self, case: Mapping[str, Json], trial: Trial) -> None:
        self._trial = trial
        self._clock = ManualClock()
        steps = [*field_of(case, "steps"), *case.get("steps_rocksdb", [])]
        self._key_type = key_type_of(step["key"] for step in steps if "key" in step)
        self._descriptor: Mapping[str, Json] = case["descriptor"]
        self._root = trial.new_root()
        self._snapshot: str | None = None
        self._operator = self._open(self._root)

    def step(self, where: str, step: _Step) -> None:
        self._clock.set(step.get("t", self._clock.now_ms()))
        verb, rest = split_op(step.get("op"))
        if verb == "snapshot":
            self._check(where, step, self._take_snapshot, FlowError)
        elif verb == "restore":
            self._descriptor = step.get("descriptor", self._descriptor)
            self._check(where, step, self._restore, RestoreError)
        elif verb == "entries_in_backend":
            self._check(where, step, self._entry_count, StateError)
        elif verb == "register":
            self._register(where, step, rest)
        elif _is_null_reduced(self._descriptor, step):
            self._add_null(where, step)
        else:
            self._check(where, step, lambda: self._perform(step, verb, rest), StateError)

    def _check(
        self,
        where: str,
        step: _Step,
        call: Callable[[], Any],
        refused_with: type[FlowError],
    ) -> None:
        if "result" not in step and step["op"] != "snapshot":
            raise VectorError(f"{where}: a step without a result")
        expected, actual = step.get("result", "void"), attempt(call)
        verb, _ = split_op(step["op"])
        if verb in {"entries", "keys", "values"} and isinstance(actual, list):
            # A map has no order, in Flink as here.
            expect(where, unordered(expected), unordered(actual))
        else:
            expect_outcome(where, expected, actual, refused_with=refused_with)

    # The state.

    def _backend(self, step: _Step) -> KeyedStateBackend:
        return self._operator.subtask_of(field_of(step, "key")).keyed

    def _state(self, backend: KeyedStateBackend) -> Any:
        # Asking again gives the state that is there; a descriptor that is refused is so each time.
        return registered(backend, described(_NAME, self._descriptor))

    def _perform(self, step: _Step, verb: str, rest: str) -> Any:
        state = self._state(self._backend(step))
        literals = Literals(self._descriptor.get("element_type", "long"))
        return perform(self._descriptor["type"], state, verb, rest, literals)

    def _entry_count(self) -> int:
        for subtask in self._operator.subtasks:
            self._state(subtask.keyed)
        return sum(subtask.keyed.entry_count(_NAME) for subtask in self._operator.subtasks)

    def _add_null(self, where: str, step: _Step) -> None:
        """Check that the null is refused and that nothing changes, and go on as Flink does."""
        state = self._state(self._backend(step))
        before = state.get()
        refused = attempt(lambda: state.add(None))
        if not isinstance(refused, StateTypeError):
            raise Mismatch(where, "a StateTypeError", refused)
        expect(f"{where}, state after it", before, state.get())
        # The steps to come were seen in Flink, where the state is empty by now.
        state.clear()
        self._trial.differs(_ADD_NULL)

    def _register(self, where: str, step: _Step, rest: str) -> None:
        kind, _, name = rest.partition(" ")
        kind, _, element_type = kind.partition(":")
        fields = {"type": kind, **({"element_type": element_type} if element_type else {})}
        other = described(name.strip() or _NAME, fields)
        known = described(_NAME, self._descriptor)
        backend, expected = self._backend(step), field_of(step, "result")
        main = self._state(backend)
        actual = attempt(lambda: registered(backend, other))
        if other.name != known.name or other.kind is not known.kind:
            _check_registered(where, expected, actual, kind)
        elif other.is_same(known):
            if actual is not main:
                raise Mismatch(where, "the state that is registered already", actual)
            _check_registered(where, expected, actual, kind)
        else:
            if not isinstance(actual, StateRegistrationError):
                raise Mismatch(where, "a StateRegistrationError", actual)
            if not is_refusal(expected):
                # What Flink goes on with is the first state, which is untouched.
                _check_registered(where, expected, main, kind)
                self._trial.differs(_OTHER_TYPE)

    # Snapshots.

    def _open(self, root: str, restore_from: str | None = None) -> LocalOperator:
        return self._trial.operator(
            root,
            parallelism=1,
            key_type=self._key_type,
            restore_from=restore_from,
            clock=self._clock,
        )

    def _take_snapshot(self) -> Any:
        self._operator.checkpoint()
        self._snapshot = self._root
        if self._descriptor.get("cleanup") == "full_snapshot":
            # Each snapshot of Flink's heap backend is a full one. Ours adds to those before it,
            # and is made a full one where it is copied to a root of its own.
            self._snapshot = self._trial.new_root()
            self._open(self._snapshot, self._root).checkpoint()
        return VOID

    def _restore(self) -> Any:
        if self._snapshot is None:
            raise VectorError("a restore before any snapshot")
        self._operator.close()
        self._root = self._snapshot
        self._operator = self._open(self._root)
        for subtask in self._operator.subtasks:
            self._state(subtask.keyed)
        return VOID


def _check_registered(where: str, expected: Json, actual: Any, kind: str) -> None:
    """Compare with a refusal, with ``ok``, or with ``ok:<what the state holds>``."""
    if is_refusal(expected) or isinstance(actual, FlowError):
        expect_outcome(where, expected, actual, refused_with=StateRegistrationError)
        return
    contents = reading(kind, actual)
    said, colon, held = str(expected).partition(":")
    if said != "ok" or (colon and held.replace(" ", "") != contents):
        raise Mismatch(where, expected, f"ok:{contents}")
