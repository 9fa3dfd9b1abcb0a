"""What the decision benchmark feeds the conductor, on a small cluster."""

from __future__ import annotations

import pytest

from benchmarks.conductor import Cluster, Load
from isthmus.core.conductor.view import PREFILLING
from isthmus.core.types import Role

SMALL = Load(num_nodes=6, num_blocks=20_000, prompt_blocks=100, num_decisions=300)
ROLES = [Role.PREFILL] * 3 + [Role.DECODE] * 3


def test_all_that_follows_is_told() -> None:
    cluster = Cluster(SMALL, ROLES)
    found = cluster.play("small")
    assert found.decisions == 300
    assert found.decisions_per_s == pytest.approx(1e6 / found.mean_us)
    assert found.p50_us <= found.p99_us <= found.max_us
    assert found.queued > 0
    assert found.copying > 0
    assert found.fetches > 0
    assert 0.1 < found.matched_share < 0.9
    view = cluster.conductor.view
    assert found.events > 3 * (found.decisions - len(view.requests))
    assert all(not request.copies for request in view.requests.values() if request.state is not PREFILLING)
