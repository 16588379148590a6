"""Breaks pipelines for as long as asked: ``python -m integration.faults.soak MINUTES [SEED]``.

Ends with a summary, and with 1 if anything was lost or there twice; what failed is kept.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from integration.faults.feeds import KafkaFeed, SocketFeed
from integration.faults.harness import Scenario, Summary, run_scenario

_PLANS = (
    (SocketFeed, "local[2,3]"),
    (KafkaFeed, "local[2,3]"),
    (SocketFeed, "local-cluster[2,1,1024]"),
    (KafkaFeed, "standalone"),
    (SocketFeed, "standalone"),
)


def soak(minutes: float, seed: int) -> Summary:
    """Run scenarios, one after the other, until the time is over."""
    end = time.monotonic() + 60 * minutes
    summary = Summary()
    place = Path(tempfile.mkdtemp(prefix="flow-soak-"))
    number = 0
    while time.monotonic() < end:
        feed, master = _PLANS[number % len(_PLANS)]
        scenario = Scenario(seed=seed + number, feed=feed, master=master, faults=8)
        folder = place / str(number)
        print(f"{time.strftime('%H:%M:%S')}  {scenario}", flush=True)
        try:
            found = run_scenario(scenario, folder)
        except Exception as error:  # The next scenario may tell more.
            found = Summary(scenarios=1, failures=[f"{scenario}: {error}; {folder}"])
        summary.add(found)
        print("          " + found.lines()[0], flush=True)
        print("".join(f"FAILED {failure}\n" for failure in found.failures), end="", flush=True)
        if not found.failures:
            shutil.rmtree(folder, ignore_errors=True)
        number += 1
    if not summary.failures:
        shutil.rmtree(place, ignore_errors=True)
    return summary


def main(arguments: list[str]) -> int:
    minutes = float(arguments[0]) if arguments else 10.0
    seed = int(arguments[1]) if len(arguments) > 1 else random.randrange(1 << 30)
    print(f"seed {seed}, {minutes:g} minutes", flush=True)
    summary = soak(minutes, seed)
    print("\n".join(summary.lines()))
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
