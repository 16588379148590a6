"""A short run of the fault suite; ``make soak`` is the long one."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from integration.faults.feeds import Feed, KafkaFeed, SocketFeed
from integration.faults.harness import Scenario, run_scenario

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("feed", "faults"), [(SocketFeed, 4), (KafkaFeed, 3)], ids=["socket", "kafka"]
)
def test_a_pipeline_that_is_broken_at_random_loses_and_doubles_nothing(
    tmp_path: Path, feed: type[Feed], faults: int
) -> None:
    seed = int(os.environ.get("FLOW_SEED", random.randrange(1 << 30)))
    scenario = Scenario(seed=seed, feed=feed, faults=faults, lines=10_000)
    summary = run_scenario(scenario, tmp_path / "run")
    print("\n".join([f"FLOW_SEED={seed}", *summary.lines()]))

    assert not summary.failures
    assert sum(summary.faults.values()) == faults
