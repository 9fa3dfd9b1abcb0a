"""Every test run draws the same examples, and none is judged by the clock."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # before torch comes: cores are shared

settings.register_profile("isthmus", derandomize=True, deadline=None)
settings.load_profile("isthmus")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases", action="store_true", help="serve every model case, not a covering selection"
    )
