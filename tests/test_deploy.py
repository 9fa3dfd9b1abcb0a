"""What a configuration means to the conductor and the cost model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from isthmus.config import Config, load_config
from isthmus.core.conductor import Rules
from isthmus.core.cost import Analytic, compile_cost
from isthmus.core.errors import ConfigError
from isthmus.core.scheduler import CPU_TILE, TILE, Chunking
from isthmus.core.types import Role
from isthmus.facts import (
    at_home,
    chunking_of,
    clusters_of,
    cost_of,
    for_role,
    gpus_of,
    hardware_of,
    links_of,
    nodes_of,
    rooted,
    rules_of,
)

CURVE = {"kv_token_bytes": 1024, "num_layers": 4, "prefill_token_s": "1e-5", "decode_points": [[1, "5e-3"]]}


def test_chunks_keep_the_limit_between_tokens_only_where_that_is_asked_for() -> None:
    options = {"slo.tbt_ms": 50, "engine.hardware": "h100", "scheduling.partial_prefills": 3}
    fixed = load_config(None, options)
    assert chunking_of(fixed, fixed.roles.mixed) == Chunking(3, None, TILE)
    timed = load_config(None, {**options, "scheduling.chunking": "tbt", "roles.mixed.hardware": "cpu"})
    assert chunking_of(timed, timed.roles.mixed) == Chunking(3, 50, CPU_TILE)
    curve = load_config(None, {"engine.cost": CURVE})
    target = Chunking(3, 50).target(compile_cost(cost_of(curve, curve.roles.mixed, None)).step_ps)
    assert target is not None and target.limit_ps == 50 * 10**9


def test_every_rule_comes_from_the_configuration() -> None:
    """None of them keeps its default: a rule that is not passed on would be ignored in silence."""
    config = load_config(
        None,
        {
            "policy": {"name": "mooncake", "balancing_threshold": 4.0},
            "limits.max_requests": 7,
            "limits.max_attempts": 2,
            "scheduling.admission": {"name": "predictive", "decode_s": 5.0},
            "scheduling.reserve": 0.2,
            "scheduling.load_limit": 0.9,
            "network.compression": "int8",
            "slo.ttft_ms": 100,
            "slo.tbt_ms": 10,
            "clusters": {"east": {"roles": {"prefill": 1}}, "west": {"roles": {"prefill": 1, "decode": 1}}},
            "links": [{"between": ["east", "west"], "gbps": 8, "rtt_ms": 30}],
            "offload.threshold": 100,
            "offload.routing": "priced",
            "offload.cache": "abundant",
            "offload.control": "link",
            "offload.convert": "auto",
            "offload.cool_down_s": 5.0,
            "offload.period_s": 2.0,
            "lending.policy": "isthmus",
            "lending.reserve": 0.2,
            "reuse.selector": "epic",
            "reuse.kept": "whole",
            "reuse.max_prompts": 10,
            "reuse.min_tokens": 20,
        },
    )
    rules, default = rules_of(config), Rules()
    same = [name for name in rules.__struct_fields__ if getattr(rules, name) == getattr(default, name)]
    assert same == ["retry_after_ms"]


def test_a_role_may_have_hardware_of_its_own() -> None:
    config = load_config(None, {"engine.hardware": "h200", "engine.gpus": 2, "roles.decode.hardware": "h20"})
    prefill, decode = config.roles.prefill, config.roles.decode
    found = [hardware_of(config, prefill), hardware_of(config, decode)]
    assert [hardware.name for hardware in found if hardware] == ["h200", "h20"]
    assert gpus_of(config, decode) == 2
    assert hardware_of(Config(), prefill) is None


@pytest.mark.parametrize(("dtype", "bytes_per_value"), [("float32", 4), ("bfloat16", 2)])
def test_the_analytic_model_has_the_engines_precision(tmp_path: Path, dtype: str, bytes_per_value: int) -> None:
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(facts))
    config = load_config(None, {"engine.dtype": dtype, "engine.hardware": "a100"})
    for model in (tmp_path, tmp_path / "config.json"):
        cost = cost_of(config, config.roles.prefill, model)
        assert isinstance(cost, Analytic)
        assert cost.kv_token_bytes == 2 * 2 * 2 * 16 * bytes_per_value


def test_a_curve_comes_from_a_file_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "curve.json").write_text(json.dumps(CURVE))
    from_file = at_home(load_config(None, {"engine.cost": "curve.json"}), tmp_path)
    inline = load_config(None, {"engine.cost": CURVE})
    assert cost_of(from_file, from_file.roles.prefill, None) == cost_of(inline, inline.roles.prefill, None)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({}, "engine.cost or model"),
        ({"engine.cost": {"kv_token_bytes": 1, "prefill_token_s": 1}}, "num_layers"),
        ({"engine.cost": "nowhere.yaml"}, "nowhere.yaml: cannot be read"),
        ({"engine.cost": "prfaas-1t-h20x9"}, "did you mean 'prfaas-1t-h20x8'"),
    ],
)
def test_without_a_cost_there_is_one_clear_line(overrides: dict, complaint: str) -> None:
    config = load_config(None, overrides)
    with pytest.raises(ConfigError, match=complaint) as caught:
        cost_of(config, config.roles.prefill, None)
    assert "\n" not in str(caught.value)


def test_each_cluster_reads_the_configuration_as_its_own() -> None:
    config = load_config(
        None,
        {
            "engine.hardware": "h20",
            "clusters": {
                "east": {"roles": {"prefill": 4}, "hardware": "h200", "gpus": 8, "price": 2},
                "west": {"roles": {"prefill": {"count": 3, "gpus": 4}, "decode": 5}},
            },
            "links": [{"between": ["east", "west"], "gbps": 8, "rtt_ms": 30}],
        },
    )
    east, west = clusters_of(config)
    found = [hardware_of(cluster.config, cluster.config.roles.prefill) for cluster in (east, west)]
    assert [hardware.name for hardware in found if hardware] == ["h200", "h20"]
    assert gpus_of(east.config, east.config.roles.prefill) == 8
    assert gpus_of(west.config, west.config.roles.prefill) == 4
    assert (east.price, east.node(Role.PREFILL, 2)) == (2, "east-prefill-2")
    assert Config.model_validate_json(east.config.model_dump_json(exclude_unset=True)) == east.config
    both = [(link.source, link.target, link.bytes_per_s, link.rtt_ns) for link in links_of(config)]
    assert both == [("east", "west", 10**9, 30_000_000), ("west", "east", 10**9, 30_000_000)]


def test_processes_in_other_folders_find_the_files() -> None:
    given = {
        "engine.cost": "curve.json",
        "clusters": {"east": {"cost": "/there/east.json"}, "west": {"cost": "prfaas-1t-h200x8"}},
        "cache.folder": "~/kv",
        "tls.folder": "kept",
        "record": "flight.jsonl",
    }
    config = rooted(load_config(None, given), Path("/here"))
    assert (config.engine.cost, config.record) == ("/here/curve.json", "/here/flight.jsonl")
    assert [cluster.cost for cluster in config.clusters.values()] == ["/there/east.json", "prfaas-1t-h200x8"]
    assert (config.tls.folder, config.tls.certificate) == ("/here/kept", None)
    assert config.cache.folder == str(Path("~/kv").expanduser())
    assert "vllm" not in config.engine.model_fields_set


@pytest.mark.parametrize(
    ("given", "python"),
    [("venv/bin/python", "/here/venv/bin/python"), ("~/v/python", "~/v/python"), ("py", "py")],
)
def test_processes_in_other_folders_find_the_python_of_vllm(given: str, python: str) -> None:
    values = {
        "engine.kind": "vllm",
        "engine.vllm.python": given,
        "engine.vllm.logs": "logs",
        "cache.dram": "1GiB",
    }
    vllm = rooted(load_config(None, values), Path("/here")).engine.vllm
    assert (vllm.python, vllm.logs) == (os.path.expanduser(python), "/here/logs")


def test_what_a_role_has_of_its_own_is_its_engine_s() -> None:
    given = {"engine.max_sequences": 9, "roles": {"decode": {"count": 1, "gpus": 2, "kv_memory": "2GiB"}}}
    config = load_config(None, given)
    engine = for_role(config, Role.DECODE).engine
    assert (engine.gpus, engine.kv_memory, engine.max_sequences) == (2, 2 << 30, 9)
    assert "kv_memory" in engine.model_fields_set
    assert for_role(config, Role.PREFILL).engine == config.engine


HANDLING = {
    "load_byte_s": 1e-9,
    "save_byte_s": 2e-9,
    "send_layer_s": 1e-3,
    "send_byte_s": 4e-9,
    "receive_byte_s": 8e-9,
}
ROLES = {"roles.prefill": 1, "roles.decode": 1, "roles.mixed": 1, "engine.kv_memory": "64MiB"}


@pytest.mark.parametrize(("cache", "saved_s"), [({}, 0.0), ({"cache.dram": "1MiB"}, 2e-9)])
def test_where_cores_are_shared_prefill_takes_what_handing_over_and_saving_do(
    cache: dict, saved_s: float
) -> None:
    def prefill_s(shares_core: bool) -> dict[Role, float]:
        handling = {"handling": HANDLING | {"shares_core": shares_core}}
        config = load_config(None, {"engine.cost": CURVE | handling, **ROLES, **cache})
        costs = {node.role: compile_cost(node.cost) for node in nodes_of(config, 16)}
        return {role: cost.prefill_ns(100, 0) / 1e9 for role, cost in costs.items()}

    alone, shared = prefill_s(False), prefill_s(True)
    assert set(alone.values()) == {1e-3}
    saves = 100 * 1024 * saved_s
    assert shared[Role.PREFILL] == pytest.approx(1e-3 + 4 * 1e-3 + 100 * 1024 * 4e-9 + saves)
    assert shared[Role.MIXED] == shared[Role.DECODE] == pytest.approx(1e-3 + saves)


def test_links_are_as_fast_as_the_core_that_kv_passes_through() -> None:
    config = load_config(
        None, {"engine.cost": CURVE | {"handling": HANDLING}, "network.node_gbps": 100, **ROLES}
    )
    rates = nodes_of(config, 16)[0].rates
    assert (rates.network, rates.handover) == (125_000_000, 0)
    assert rates.memory == 1_000_000_000
