"""Which nodes a configuration means, and which make no sense."""

from __future__ import annotations

import re
from typing import Any

import pytest

from isthmus.config import Config
from isthmus.core.errors import ConfigError
from isthmus.facts import clusters_of, places_of

PAIR, PREFILL, DECODE, MIXED = (
    {"roles": roles} for roles in ({"prefill": 1, "decode": 2}, {"prefill": 1}, {"decode": 1}, {"mixed": 1})
)
LINK = [{"between": ["west", "east"], "gbps": 1}]
GROUP = {"count": 2, "pipeline": 2}


def config_of(clusters: dict[str, Any], links: list[Any] | None = None) -> Config:
    return Config.model_validate({"clusters": clusters, "links": LINK if links is None else links})


def roles_of(prefill: Any = 0, decode: Any = 0, **sections: Any) -> Config:
    roles = {"prefill": prefill, "decode": decode} | sections.pop("beside", {})
    return Config.model_validate({"roles": roles} | sections)


def test_nodes_are_named_by_their_cluster_and_have_its_configuration() -> None:
    config = config_of(
        {"east": PAIR | {"hardware": "h20"}, "west": {"roles": {"prefill": {"count": 2, "pipeline": 2}}}}
    )
    nodes = places_of(config)
    names = ["east-prefill-0", "east-decode-0", "east-decode-1", "west-prefill-0"]
    assert [str(node.node) for node in nodes] == names
    assert [node.cluster.name for node in nodes] == ["east", "east", "east", "west"]
    assert [node.cluster.config.engine.hardware for node in nodes] == ["h20", "h20", "h20", None]
    assert [node.stages for node in nodes] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("roles", "nodes"),
    [
        ({"mixed": 2}, ["mixed-0", "mixed-1"]),
        ({"prefill": {"gpus": 2}, "decode": {"gpus": 8, "count": 2}}, ["prefill-0", "decode-0", "decode-1"]),
    ],
)
def test_of_a_role_that_is_not_named_there_is_no_node(roles: dict[str, Any], nodes: list[str]) -> None:
    """And one that is named without a number has one node; the same in a cluster of several."""
    assert [str(place.node) for place in places_of(Config.model_validate({"roles": roles}))] == nodes
    several = places_of(config_of({"east": {"roles": roles}}, []))
    assert [str(place.node) for place in several] == [f"east-{node}" for node in nodes]
    assert [str(node.node) for node in places_of(Config())] == ["prefill-0", "decode-0"]


def test_a_cluster_may_leave_a_part_to_those_it_is_linked_to() -> None:
    for east, west in ((PAIR, PREFILL), (DECODE, PREFILL), (MIXED, PREFILL), (PAIR, {})):
        assert places_of(config_of({"east": east, "west": west}))


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (config_of({"east": PAIR, "west": PREFILL}, []), "clusters.west: its prefill nodes need decode nodes"),
        (config_of({"east": PAIR, "west": DECODE}, []), "clusters.west: its decode nodes need prefill nodes"),
        (config_of({"east": PREFILL, "west": PREFILL}), "clusters: no request could be served"),
        (config_of({"east": DECODE, "west": {}}), "clusters: no request could be served"),
        (config_of({"east": DECODE, "west": MIXED}), "clusters.east: its decode nodes need prefill nodes there or in"),
        (config_of({"east": {"roles": {"prefill": {"count": 3, "pipeline": 2}}}}, []),
         "clusters.east.roles.prefill: 3 nodes make no groups of 2"),
        (config_of({"east": {"roles": {"mixed": 1, "attention": {"count": 2, "max_sequences": 8}}}}, []),
         "clusters.east.roles.attention.max_sequences: attention nodes compute no requests"),
        (roles_of(beside={"attention": 2}), "roles: no request could be served"),
        (roles_of(2), "roles: no request could be served"),
        (roles_of(2, beside={"mixed": 1}), "roles: prefill nodes need at least one node of the other kind"),
        (roles_of(beside={"attention": GROUP}), "roles.attention.pipeline: only prefill nodes form pipeline groups"),
        (roles_of(GROUP, offload={"convert": "auto"}), "roles.prefill.pipeline: offload.convert turns no pipeline"),
    ],
)  # fmt: skip
def test_what_can_serve_nothing_is_refused(config: Config, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(complaint)}"):
        places_of(config)


def test_a_cluster_without_nodes_has_none_for_who_reads_a_dump_of_it() -> None:
    config = config_of({"east": PAIR, "west": {}})
    west = clusters_of(config)[1].config
    assert Config.model_validate_json(west.model_dump_json(exclude_unset=True)).roles == west.roles
