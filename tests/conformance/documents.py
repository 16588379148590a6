"""Vector files for the tests: the project's own, and such as a test makes up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parents[1] / "vectors"
FILES = sorted(path.name for path in VECTORS.glob("*.json"))

TTL = {
    "ttl_ms": 70,
    "update_type": "OnCreateAndWrite",
    "visibility": "NeverReturnExpired",
    "cleanup": "none",
}


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((VECTORS / name).read_text(encoding="utf-8"))
    return document


def write(folder: Path, document: Any, name: str = "anything.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def step(t: int, key: str, op: str, result: Any) -> dict[str, Any]:
    return {"t": t, "key": key, "op": op, "result": result}


def keyed(case_id: str, descriptor: dict[str, Any], *steps: dict[str, Any]) -> dict[str, Any]:
    return {"id": case_id, "descriptor": descriptor, "steps": list(steps)}
