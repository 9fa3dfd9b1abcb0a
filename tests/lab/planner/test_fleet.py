"""Fleets of configurations, those that cannot be planned, and plans as configurations."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.config import Config
from isthmus.core.errors import ConfigError
from isthmus.core.types import Role
from isthmus.lab.planner.fleet import NEVER, deployed, fleet_of
from isthmus.lab.planner.search import answer
from isthmus.lab.sim.deployment import deployment_of
from tests.lab.planner.fleets import FAST, SLOW, config, demand, fleet


def test_nodes_links_and_prices() -> None:
    found = fleet(remote=3, prefill=1, decode=4, gbps=8.0)
    assert (found.home.name, found.home.nodes, found.home.configured, found.num_nodes) == ("home", 5, 1, 8)
    [remote] = found.remotes
    assert (remote.name, remote.nodes, remote.egress) == ("remote", 3, 1e9)
    assert not found.priced and not found.home.fixed and found.notes == ()
    assert found.home.decode.max_sequences == 64 and found.home.prefill.token_budget == 65_536
    values = {"roles": {"prefill": 3, "decode": 2}, "engine": {"cost": SLOW}}
    found = fleet_of(Config.model_validate(values))
    assert (found.home.name, found.home.nodes, found.remotes) == ("", 5, ())
    clusters = {
        "home": {"cost": SLOW, "roles": {"prefill": 1, "decode": 1}, "price": 1.5},
        "remote": {"cost": FAST, "roles": {"prefill": 2}, "price": 4},
    }
    found = fleet(clusters=clusters)
    assert found.priced and found.cost == 11.0


def test_what_is_planned_otherwise_than_configured_is_noted() -> None:
    roles = {"prefill": {"count": 2, "hardware": "h200"}, "decode": {"count": 1, "hardware": "h20"}}
    found = fleet(remote=0, clusters={"home": {"cost": SLOW, "roles": roles}})
    assert found.home.fixed and any("hardware" in note for note in found.notes)
    found = fleet(remote=0, clusters={"home": {"cost": SLOW, "roles": {"mixed": 4}}})
    assert found.home.nodes == 4 and found.home.mixed and any("mixed" in note for note in found.notes)
    assert any("encoded" in note for note in fleet(network={"compression": "int8"}).notes)
    assert fleet(remote=0, network={"compression": "int8"}).notes == ()


PREFILLS = {"cost": FAST, "roles": {"prefill": 1}}
BOTH = {"cost": SLOW, "roles": {"prefill": 1, "decode": 1}}
OTHER = BOTH | {"cost": SLOW | {"kv_token_bytes": 1000}}
GROUPS = {"prefill": {"count": 4, "pipeline": 2}, "decode": 1}
LINK = {"between": ["a", "b"], "gbps": 1}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"clusters": {"a": PREFILLS, "b": PREFILLS}, "links": [LINK]}, "no cluster decodes"),
        ({"clusters": {"a": BOTH, "b": BOTH}, "links": [LINK]}, "a, b all decode"),
        ({"clusters": {"a": PREFILLS, "b": BOTH}, "links": []}, "no link joins a and b"),
        ({"clusters": {"a": {"cost": FAST}, "b": BOTH}, "links": [LINK]}, "clusters.a.roles: no node"),
        ({"clusters": {"a": BOTH | {"roles": GROUPS}}, "links": []}, "pipeline"),
        ({"clusters": {"a": {"roles": {"prefill": 1, "decode": 1}}}, "links": []}, "engine.cost or model"),
        ({"clusters": {"a": {"cost": SLOW, "roles": {"decode": 1}}}, "links": []}, "prefill"),
        ({"clusters": {"a": PREFILLS, "b": OTHER}, "links": [LINK]}, "all clusters serve one model"),
    ],
)
def test_a_mistake_is_one_line(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fleet_of(config(**changed))
    assert says in str(caught.value) and "\n" not in str(caught.value)


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
