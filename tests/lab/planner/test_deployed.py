"""A plan as a configuration."""

from __future__ import annotations

from isthmus.core.types import Role
from isthmus.lab.planner.fleet import NEVER, deployed, fleet_of
from isthmus.lab.planner.search import answer
from isthmus.lab.sim.deployment import deployment_of
from tests.lab.planner.fleets import config, demand


def test_nodes_and_threshold_of_each_plan() -> None:
    settings = config()
    found = answer(settings, fleet_of(settings), demand([300, 900, 2500, 7000]))
    for plan in [*found.plans, *found.baselines]:
        changed = deployed(settings, plan, "home")
        nodes = deployment_of(changed, 512).nodes
        roles = [spec.role for spec in nodes]
        assert roles.count(Role.DECODE) == plan.decode
        assert roles.count(Role.PREFILL) == plan.prefill + sum(plan.remote.values())
        if plan.remote:
            assert changed.offload.threshold == (NEVER if plan.threshold is None else plan.threshold)
        else:
            assert not changed.clusters and not changed.links
        assert changed.slo == settings.slo and changed.offload.control == "none"
