"""Every test run draws the same examples, and none is judged by the clock."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("isthmus", derandomize=True, deadline=None)
settings.load_profile("isthmus")
