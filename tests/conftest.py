"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes is no property of the code: the machine may be busy.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
