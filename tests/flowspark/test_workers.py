"""What a Python worker of Spark keeps out of its garbage collections."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def printed_by(code: str) -> Any:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


def test_a_worker_freezes_what_it_has_once() -> None:
    outside, first, second = printed_by("""
import gc, json
from flowspark import workers
from pyspark import TaskContext
workers.settle()
outside = gc.get_freeze_count()
TaskContext._getOrCreate()
workers.settle()
first = gc.get_freeze_count()
kept = [[] for _ in range(1000)]
workers.settle()
print(json.dumps([outside, first, gc.get_freeze_count()]))
""")

    assert outside == 0
    assert 0 < second <= first
