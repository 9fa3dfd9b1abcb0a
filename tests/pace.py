"""How quick emulated engines of live clusters are: the pace that a test sets, or a multiple of it (`make steady`)."""

from __future__ import annotations

import os
from typing import Any

PACE = "ISTHMUS_TESTS_PACE"


def paced(engine: dict[str, Any]) -> dict[str, Any]:
    """A section `engine`, each time of its curve so many times as long."""
    factor, cost = float(os.environ.get(PACE, "1")), engine.get("cost")
    if engine.get("kind") != "emulated" or not isinstance(cost, dict):
        return engine
    times = {name: factor * value for name, value in cost.items() if name.endswith("_s")}
    return engine | {"cost": cost | times}
