"""What a configuration means to the conductor and the cost model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.conductor import Rules
from isthmus.config import Config, load_config
from isthmus.cost import Analytic
from isthmus.deploy import at_home, cost_of, gpus_of, hardware_of, read_mapping, rules_of
from isthmus.errors import ConfigError

CURVE = {"kv_token_bytes": 1024, "num_layers": 4, "prefill_token_s": "1e-5", "decode_points": [[1, "5e-3"]]}


def test_every_rule_comes_from_the_configuration() -> None:
    """None of them keeps its default: a rule that is not passed on would be ignored in silence."""
    config = load_config(
        None,
        {
            "policy": "mooncake",
            "limits.max_requests": 7,
            "limits.max_attempts": 2,
            "scheduling.admission": "early",
            "scheduling.reserve": 0.2,
            "scheduling.sticky_blocks": 3,
            "scheduling.balancing_threshold": 4.0,
            "scheduling.decode_s": 5.0,
            "scheduling.load_limit": 0.9,
            "scheduling.seed": 6,
            "scheduling.replication": "priced",
            "network.compression": "int8",
            "slo.ttft_ms": 100,
            "slo.tbt_ms": 10,
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
        ({"engine.cost": {"kv_token_bytes": 1}}, "num_layers"),
        ({"engine.cost": "nowhere.yaml"}, "nowhere.yaml: cannot be read"),
    ],
)
def test_without_a_cost_there_is_one_clear_line(overrides: dict, complaint: str) -> None:
    config = load_config(None, overrides)
    with pytest.raises(ConfigError, match=complaint) as caught:
        cost_of(config, config.roles.prefill, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\ttab: 1"])
def test_a_file_without_keys_and_values_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "curve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"curve\.yaml"):
        read_mapping(file)
