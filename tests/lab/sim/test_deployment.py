from __future__ import annotations

from typing import Any

import pytest

from isthmus.config import Config
from isthmus.core.errors import ConfigError
from isthmus.core.types import Role
from isthmus.facts import Sequences
from isthmus.lab.sim.deployment import Deployment, deployment_of

CURVE = {"kv_token_bytes": 1000, "num_layers": 4, "prefill_token_s": 1e-4, "state_bytes": 40_000}
SLOW = CURVE | {"prefill_token_s": 3e-4}


def two(far: dict[str, Any] | None = None, **others: Any) -> Deployment:
    """A cluster that only prefills, joined to one that does both."""
    values: dict[str, Any] = {
        "engine": {"kv_memory": "1GB", "max_sequences": 40},
        "clusters": {
            "far": {"cost": CURVE, "roles": {"prefill": 2}, "hardware": "h200", **(far or {})},
            "near": {
                "cost": SLOW,
                "roles": {"prefill": 1, "decode": {"count": 2, "max_sequences": 20}},
                "hardware": "h20",
            },
        },
        "links": [{"between": ["far", "near"], "gbps": 8, "rtt_ms": 4}],
    }
    return deployment_of(Config.model_validate(values | others), 16)


def test_nodes_are_those_of_the_clusters_in_order() -> None:
    made = two()
    assert [spec.node for spec in made.nodes] == [
        "far-prefill-0",
        "far-prefill-1",
        "near-prefill-0",
        "near-decode-0",
        "near-decode-1",
    ]
    assert [spec.cluster for spec in made.nodes] == ["far"] * 2 + ["near"] * 3
    far, near = made.nodes[0], made.nodes[2]
    assert (far.cost.prefill_token_s, near.cost.prefill_token_s) == (1e-4, 3e-4)  # type: ignore[union-attr]
    assert far.rates.network != near.rates.network  # each by its own hardware
    assert [link.bytes_per_s for link in made.rules.links] == [10**9] * 2


def test_the_conductor_hears_of_cluster_and_state_and_how_many_decode_at_once() -> None:
    made = two()
    prefill, decode = made.nodes[0].joined(), made.nodes[3].joined()
    assert (prefill.cluster, prefill.max_sequences) == ("far", 40)
    assert (decode.cluster, decode.max_sequences) == ("near", 20)
    assert prefill.state_blocks == decode.state_blocks == 3  # 40,000 bytes in blocks of 16,000
    # Snapshots take room too.
    assert decode.capacity_tokens < 10**9 // 1000


def test_without_clusters_names_are_plain_and_nothing_is_joined() -> None:
    made = deployment_of(Config.model_validate({"engine": {"cost": CURVE, "kv_memory": "1GB"}}), 16)
    assert [spec.node for spec in made.nodes] == ["prefill-0", "decode-0"]
    assert {spec.cluster for spec in made.nodes} == {""} and made.rules.links == ()


def test_a_limit_of_a_role_goes_with_the_role() -> None:
    made = two(offload={"convert": "auto"})
    assert {node.sequences for node in made.nodes[2:]} == {Sequences(40, 20, 40)}
    assert made.nodes[3].max_sequences == 20
    assert made.nodes[2].max_sequences == 40 and made.nodes[2].limits(Role.DECODE).max_sequences == 20


@pytest.mark.parametrize(
    ("far", "others", "message"),
    [
        ({"cost": CURVE | {"kv_token_bytes": 900}}, {}, "kv_token_bytes is 900 in far and 1000 in near"),
        ({"cost": CURVE | {"state_bytes": 0}}, {}, "state_bytes is 0 in far and 40000 in near"),
        (
            {"roles": {"prefill": {"count": 2, "pipeline": 2}}},
            {"offload": {"convert": "auto"}},
            r"clusters.far.roles.prefill.pipeline: offload.convert turns no pipeline groups",
        ),
        ({}, {"clusters": {"far": {}}, "links": []}, "clusters: no request could be served"),
        ({}, {"links": []}, r"clusters\.far: its prefill nodes need decode nodes"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    far: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        two(far, **others)
