"""What a process of Spark pays for this source: imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[2])


def printed_by(code: str) -> Any:
    command = [sys.executable, "-c", code, ROOT]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


def test_reading_imports_no_pandas() -> None:
    rows, modules = printed_by("""
import json, sys
sys.path.insert(0, sys.argv[1])
from pyspark_flowkafka.records import Decoder, Fetched, scan_fetch
from tests.flowkafka.record_sets import Record, built
data = built([Record(b"k", b"v", headers=(("h", b"x"),)), Record(None, None)])
decoder = Decoder("t", 3, 0, 9, True, print)
rows = sum(one.num_rows for one in decoder.decode(scan_fetch(Fetched(data, 0))))
print(json.dumps([rows, sorted(sys.modules)]))
""")

    assert rows == 2
    assert {"pandas", "fsspec", "flowstate.runner"}.isdisjoint(modules)
