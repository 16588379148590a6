from __future__ import annotations

from collections import Counter
from pathlib import Path

from flowstate.testing.clock import ManualClock
from flowstate.testing.keyed_checkpoints_suite import (
    AbortedCheckpointSuite,
    CheckpointSuite,
    RandomUseSuite,
)
from flowstate.testing.keyed_keys_suite import LongKeySuite
from flowstate.testing.keyed_migration_suite import SchemaEvolutionSuite
from flowstate.testing.keyed_rescale_suite import RescaleSuite
from flowstate.testing.keyed_suite import KeyedHarness, KeyedStateSuite
from flowstate.testing.keyed_ttl_suite import TtlAtRestoreSuite


class TestMemoryBackend(KeyedStateSuite):
    def open_backend(self, tmp_path: Path, clock: ManualClock) -> KeyedHarness:
        return KeyedHarness(f"memory:/{tmp_path}", clock=clock)


class TestLmdbBackend(KeyedStateSuite):
    def open_backend(self, tmp_path: Path, clock: ManualClock) -> KeyedHarness:
        return KeyedHarness(tmp_path / "state", clock=clock, working_folder=tmp_path / "working")


class TestLmdbBackendOnAnotherMachineEachTime(
    AbortedCheckpointSuite,
    CheckpointSuite,
    LongKeySuite,
    RandomUseSuite,
    RescaleSuite,
    SchemaEvolutionSuite,
    TtlAtRestoreSuite,
):
    def open_backend(self, tmp_path: Path, clock: ManualClock) -> KeyedHarness:
        folder = tmp_path / "working"
        url = f"memory:/{tmp_path}"
        return KeyedHarness(url, clock=clock, working_folder=folder, always_rebuild=True)


def test_no_test_of_a_suite_hides_one_of_another() -> None:
    names = Counter(
        name
        for suite in KeyedStateSuite.__bases__
        for name in vars(suite)
        if name.startswith("test_")
    )

    assert [name for name, count in names.items() if count > 1] == []
    assert len(names) > 100
