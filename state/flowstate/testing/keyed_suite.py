"""The contract of keyed state as tests; a backend's own test subclasses them.

::

    class TestLmdbBackend(KeyedStateSuite):
        def open_backend(self, tmp_path: Path, clock: ManualClock) -> KeyedHarness:
            return KeyedHarness(tmp_path / "state", clock=clock, working_folder=tmp_path / "local")
"""

from __future__ import annotations

from flowstate.testing.keyed_base_suite import KeyedHarness
from flowstate.testing.keyed_checkpoints_suite import (
    AbortedCheckpointSuite,
    CarriedStateSuite,
    CheckpointSuite,
    RandomUseSuite,
)
from flowstate.testing.keyed_keys_suite import (
    KeySuite,
    LongKeySuite,
    NamespaceSuite,
    RegistrationSuite,
)
from flowstate.testing.keyed_migration_suite import (
    RestoredKindSuite,
    SchemaEvolutionSuite,
    SerializerSuite,
)
from flowstate.testing.keyed_reducing_suite import (
    AggregatingStateSuite,
    ReducingStateSuite,
)
from flowstate.testing.keyed_rescale_suite import (
    RescaleSuite,
)
from flowstate.testing.keyed_states_suite import (
    ListStateSuite,
    MapStateSuite,
    ValueStateSuite,
)
from flowstate.testing.keyed_timers_suite import (
    TimerSuite,
)
from flowstate.testing.keyed_ttl_suite import (
    EventTimeTtlSuite,
    TtlAtRestoreSuite,
    TtlSuite,
)

__all__ = ["KeyedHarness", "KeyedStateSuite"]


class KeyedStateSuite(
    ValueStateSuite,
    ListStateSuite,
    MapStateSuite,
    ReducingStateSuite,
    AggregatingStateSuite,
    KeySuite,
    LongKeySuite,
    NamespaceSuite,
    RegistrationSuite,
    AbortedCheckpointSuite,
    CarriedStateSuite,
    CheckpointSuite,
    RandomUseSuite,
    TimerSuite,
    TtlSuite,
    TtlAtRestoreSuite,
    EventTimeTtlSuite,
    RestoredKindSuite,
    SchemaEvolutionSuite,
    SerializerSuite,
    RescaleSuite,
):
    """Every promise of keyed state, on the backend of the subclass."""
