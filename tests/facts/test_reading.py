"""What a configuration says of one node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.config import Config, load_config
from isthmus.core.conductor import Paths
from isthmus.core.cost import Analytic
from isthmus.core.errors import ConfigError
from isthmus.core.types import Role
from isthmus.facts import UNLIMITED, NodeFacts, Sequences, nodes_of

CURVE = {"kv_token_bytes": 1000, "num_layers": 4, "prefill_token_s": 1e-4, "decode_fixed_s": 0.01}
STATES = CURVE | {"state_bytes": 40_000}
BLOCK = 16_000
NETWORK = {"node_gbps": 8}
RATE = 10**9


def facts(block_size: int = 16, **sections: Any) -> tuple[NodeFacts, ...]:
    values = {"engine": {"cost": CURVE, "kv_memory": 1000 * BLOCK}} | sections
    return nodes_of(Config.model_validate(values), block_size)


def groups(count: int) -> dict[str, Any]:
    return {"prefill": {"count": count, "pipeline": count}, "decode": 1}


def test_an_eighth_of_a_caches_slots_is_for_transit() -> None:
    node, _ = facts(cache={"dram": 80 * BLOCK + 5, "ssd": 30 * BLOCK})
    assert (node.dram_blocks, node.transit_blocks, node.num_slots, node.ssd_blocks) == (70, 10, 80, 30)
    tiers = node.tiers()
    assert tiers is not None and (tiers.dram.capacity_blocks, tiers.ssd.capacity_blocks) == (70, 30)
    assert node.joined().cache_blocks == node.cache_blocks == 100
    least, _ = facts(cache={"dram": 8 * BLOCK})
    assert (least.dram_blocks, least.transit_blocks) == (7, 1)
    assert facts()[0].tiers() is None


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"cache": {"dram": 8 * BLOCK - 1}}, f"cache.dram: .* fewer than 8 .* at least {8 * BLOCK}"),
        ({"cache": {"ssd": 100 * BLOCK}}, r"cache\.dram: 0 bytes hold fewer than 8"),
        ({"cache": {"dram": 8 * BLOCK, "ssd": BLOCK - 1}}, r"cache\.ssd: 15999 bytes hold no block"),
        ({"engine": {"cost": CURVE, "kv_memory": 2 * BLOCK - 1}}, f"give at least {2 * BLOCK}"),
        (
            {"engine": {"cost": CURVE}, "roles": {"prefill": 1, "decode": 1, "attention": {"kv_memory": 1024}}},
            r"roles\.attention\.kv_memory 1024 bytes holds fewer than 2 blocks",
        ),
        (
            {"engine": {"cost": STATES, "kv_memory": 14 * BLOCK + 64 * 40_000 - 1}},
            rf"fewer than 14 blocks .* states of 64 .* at least {14 * BLOCK + 64 * 40_000}",
        ),
        ({"engine": {"cost": CURVE, "hardware": "h200"}}, r"engine\.kv_memory: give it"),
    ],
)
def test_memory_that_holds_too_little_is_refused(sections: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        facts(**sections)


def test_kv_moves_as_a_nodes_cache_and_links_allow() -> None:
    """A limited link is shared by hand-overs and fetches; without a cache, and in a group, nothing is fetched."""
    cache = {"dram": "1GB", "ssd": "1GB"}
    node = facts(network=NETWORK, cache=cache)[0]
    memory, disk, rtt = node.rates.memory, node.rates.disk_read, node.rates.rtt_ns
    assert node.paths == Paths(RATE, memory, disk, 0, rtt)
    assert facts(network=NETWORK, cache={"dram": "1GB"})[1].paths == Paths(RATE, memory, 0, 0, rtt)
    railed = NETWORK | {"handover_gbps": 16}
    assert facts(network=railed, cache=cache)[0].paths == Paths(RATE, memory, disk, 2 * RATE, rtt)
    assert [node.paths for node in facts(network=NETWORK)] == 2 * [Paths(handover=RATE, rtt_ns=rtt)]
    group, alone = facts(network=NETWORK, cache=cache, roles=groups(2))
    assert group.paths == Paths(0, 2 * memory, 2 * disk, 2 * RATE, rtt)
    assert alone.paths == node.paths
    assert NodeFacts(node.node, Role.DECODE, node.cost, 9, 16, 9).paths.handover == UNLIMITED


def test_states_of_all_requests_lie_beside_the_blocks() -> None:
    engine = {"cost": STATES, "kv_memory": 1000 * BLOCK, "max_sequences": 8}
    roles = {"prefill": {"count": 1, "max_sequences": 4}, "decode": {"count": 1, "max_sequences": 32}}
    prefill, decode = facts(engine=engine, roles=roles)
    assert prefill.sequences == Sequences(prefill=4, decode=32, mixed=8)
    assert (prefill.live_states, decode.live_states) == (4, 32)
    assert (prefill.kv_blocks, decode.kv_blocks) == (990, 920)
    assert prefill.state_blocks == 3
    turned, _ = facts(engine=engine, roles=roles, offload={"convert": "auto"})
    assert (turned.live_states, turned.kv_blocks) == (32, 920)
    computing = [role for role in Role if role is not Role.ATTENTION]
    assert [turned.limits(role).max_sequences for role in computing] == [4, 32, 8]


def test_a_group_holds_what_its_machine_with_the_most_layers_does() -> None:
    """Of four layers, two on each of two machines, but two on the first of three."""
    assert facts(roles=groups(2))[0].kv_blocks == 2000
    assert facts(roles=groups(3))[0].kv_blocks == 2000
    assert facts(roles=groups(4))[0].kv_blocks == 4000


def test_attention_nodes_have_the_room_that_weights_take_elsewhere() -> None:
    """LLaMA-33B, 65 GB: one H100 has little beside them, an H20 that only attends all but working memory."""
    example = Path(__file__).parents[2] / "examples" / "plan"
    config = load_config(example / "attention.yaml", {"model": str(example / "models" / "llama-33b.json")})
    by_role = {node.role: node for node in nodes_of(config, 16, model=Path(str(config.model)))}
    decode, attention = by_role[Role.DECODE], by_role[Role.ATTENTION]
    assert isinstance(attention.cost, Analytic) and attention.cost.hardware.name == "h20"
    assert attention.kv_blocks == attention.cost.lent_capacity_tokens // 16
    assert decode.kv_blocks * 5 < attention.kv_blocks
    assert attention.live_states == 0 and attention.rates.rtt_ns == 33_000
