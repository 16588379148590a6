"""Keyed state as Flink's heap backend has it, in plain dicts, and random scripts of it.

A unit is (value, time of the last access). There is no background clean-up, whose outcome would
depend on its order.
"""

from __future__ import annotations

import copy
import random
from typing import Any

OPERATIONS = {
    "value": ["value", "value", "update N", "update null", "clear"],
    "list": ["get", "get", "add N", "addAll [N,N]", "addAll []", "update [N,N]", "update []"],
    "map": [
        *("get K", "contains K", "put K N", "put K null", "put null N", "putAll a=N,b=N"),
        *("remove K", "isEmpty", "entries", "keys", "values", "set_entries N", "clear"),
    ],
    "reducing": ["get", "get", "add N", "add N", "clear"],
    "aggregating": ["get", "get", "add N", "add N", "clear"],
}

Unit = tuple[Any, int]


class HeapModel:
    """One keyed state, by key."""

    def __init__(self, descriptor: dict[str, Any]) -> None:
        self.kind = descriptor["type"]
        self.now = 0
        self.contents: dict[str, Any] = {}
        self.take(descriptor)

    def take(self, descriptor: dict[str, Any]) -> None:
        """Go on with another TTL, as after a restore."""
        self._ttl = descriptor.get("ttl_ms")
        self._renews = descriptor.get("update_type") == "OnReadAndWrite"
        self._shows_expired = descriptor.get("visibility") == "ReturnExpiredIfNotCleanedUp"
        self._default = descriptor.get("default")

    def perform(self, key: str, op: str) -> Any:
        verb, _, rest = op.partition(" ")
        if verb == "clear":
            self.contents.pop(key, None)
            return "void"
        if self.kind == "list":
            return self._on_list(key, verb, rest)
        if self.kind == "map":
            return self._on_map(key, verb, rest)
        return self._on_single(key, verb, rest)

    def _is_expired(self, unit: Unit) -> bool:
        return self._ttl is not None and unit[1] + self._ttl <= self.now

    def _seen(self, units: dict[Any, Unit], at: Any) -> tuple[bool, Any]:
        """Return whether a unit that is read is there, and its value."""
        if at not in units:
            return False, None
        value = units[at][0]
        if self._is_expired(units[at]):
            del units[at]
            return self._shows_expired, value if self._shows_expired else None
        if self._renews:
            units[at] = (value, self.now)
        return True, value

    def _on_single(self, key: str, verb: str, rest: str) -> Any:
        if verb in {"value", "get"}:
            found, value = self._seen(self.contents, key)
            if self.kind == "value" and not found and self._ttl is None:
                return self._default
            return f"sum={value}" if self.kind == "aggregating" and found else value
        if rest == "null":
            self.contents.pop(key, None)
            return "void"
        added = int(rest)
        if verb == "add" and key in self.contents:
            old = self.contents[key]
            added += old[0] if self._shows_expired or not self._is_expired(old) else 0
        self.contents[key] = (added, self.now)
        return "void"

    def _on_list(self, key: str, verb: str, rest: str) -> Any:
        units: list[Unit] = self.contents.pop(key, [])
        result: Any = "void"
        if verb == "get":
            live = [unit for unit in units if not self._is_expired(unit)]
            result = [value for value, _ in (units if self._shows_expired else live)]
            if self._renews:
                live = [(value, self.now) for value, _ in live]
            units = live if self._renews or not live else units
        else:
            texts = rest.strip("[]").split(",")
            added = [(int(text), self.now) for text in texts if text]
            units = added if verb == "update" else units + added
        if units:
            self.contents[key] = units
        return result

    def _on_map(self, key: str, verb: str, rest: str) -> Any:
        units: dict[Any, Unit] = self.contents.pop(key, {})
        result = self._on_units(units, verb, rest)
        if units:
            self.contents[key] = units
        return result

    def _on_units(self, units: dict[Any, Unit], verb: str, rest: str) -> Any:
        if verb in {"get", "contains"}:
            found, value = self._seen(units, rest)
            return value if verb == "get" else found
        if verb == "isEmpty":
            return not units
        if verb in {"entries", "keys", "values"}:
            seen = [[at, *self._seen(units, at)] for at in list(units)]
            entries = [[at, value] for at, found, value in seen if found]
            return {
                "entries": entries,
                "keys": [at for at, _ in entries],
                "values": [value for _, value in entries],
            }[verb]
        if verb == "remove":
            units.pop(rest, None)
        elif verb == "set_entries":
            for at in [at for at in list(units) if self._seen(units, at)[0]]:
                units[at] = (int(rest), self.now)
        else:
            for entry in rest.split(",") if verb == "putAll" else [rest.replace(" ", "=")]:
                at, value = entry.split("=")
                put = None if value == "null" else int(value)
                units[None if at == "null" else at] = (put, self.now)
        return "void"


def random_descriptor(chance: random.Random, kind: str) -> dict[str, Any]:
    return {
        "type": kind,
        "ttl_ms": chance.choice([50, 100, 300]),
        "update_type": chance.choice(["OnCreateAndWrite", "OnReadAndWrite"]),
        "visibility": chance.choice(["NeverReturnExpired", "ReturnExpiredIfNotCleanedUp"]),
        "cleanup": "none",
    }


def random_script(seed: int) -> dict[str, Any]:
    """Return a case whose results are the model's."""
    chance = random.Random(seed)
    kind = list(OPERATIONS)[seed % len(OPERATIONS)]
    first: dict[str, Any] = {"type": kind}
    if chance.random() < 0.8:
        first = random_descriptor(chance, kind)
    elif kind == "value":
        first["default"] = 7
    model, snapshot, steps = HeapModel(first), None, []
    for _ in range(60):
        model.now += chance.choice([0, 0, 0, 10, 40, 50])
        step: dict[str, Any] = {"t": model.now}
        what = chance.random()
        if what < 0.1:
            step |= {"op": "snapshot"}
            snapshot = copy.deepcopy(model.contents)
        elif what < 0.2 and snapshot is not None:
            other = random_descriptor(chance, kind) if "ttl_ms" in first else first
            model.take(other)
            model.contents = copy.deepcopy(snapshot)
            step |= {"op": "restore", "descriptor": other, "result": "ok"}
        elif what < 0.3:
            step |= {"op": "entries_in_backend", "result": len(model.contents)}
        else:
            key, op = chance.choice("pqr"), _filled(chance, chance.choice(OPERATIONS[kind]))
            step |= {"key": key, "op": op, "result": model.perform(key, op)}
        steps.append(step)
    return {"id": f"random_{seed}", "descriptor": first, "steps": steps}


def _filled(chance: random.Random, op: str) -> str:
    op = op.replace("K", chance.choice("abc"))
    while "N" in op:
        op = op.replace("N", str(chance.randint(1, 9)), 1)
    return op
