"""Every test run draws the same examples, and none is judged by the clock; `make soak` draws others, and more."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # before torch comes: cores are shared

settings.register_profile("isthmus", derandomize=True, deadline=None)
settings.register_profile("soak", deadline=None, max_examples=1000)
settings.load_profile("isthmus")
