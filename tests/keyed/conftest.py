from __future__ import annotations

import pytest

for suite in (
    "base",
    "keys",
    "states",
    "checkpoints",
    "migration",
    "reducing",
    "rescale",
    "timers",
    "ttl",
):
    pytest.register_assert_rewrite(f"flowstate.testing.keyed_{suite}_suite")
