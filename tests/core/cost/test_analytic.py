"""Computed costs: physics is a floor, coefficients stay physical, and memory is what weights leave."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given

from isthmus.core.cost import (
    ENGINES,
    HARDWARE,
    Analytic,
    compile_cost,
    engine_coefficients,
    hardware_named,
)
from isthmus.core.cost.analytic import KV_BYTES, WEIGHT_BYTES
from isthmus.core.errors import ConfigError
from tests.core.cost.models import DEEPSEEK_V3, LLAMA_70B, QWEN3_NEXT, instance
from tests.core.cost.test_node_cost import batches, cached, contexts, instances, tokens


def weights_read_ps(cost: Analytic, num_tokens: int) -> float:
    """Reading what `num_tokens` tokens need at the full bandwidth, with uniform routing of experts."""
    model = cost.model
    touched = 0.0
    if model.moe_layers:
        touched = model.num_experts * (1 - (1 - model.experts_per_token / model.num_experts) ** num_tokens)
    params = model.dense_params + model.moe_layers * touched * model.expert_params
    read = params * WEIGHT_BYTES[cost.weight_dtype] + cost.head_bytes
    return 1e12 * read / (cost.num_gpus * cost.hardware.memory_bw)


@given(instances, batches, contexts, tokens, cached)
def test_nothing_is_faster_than_reading_or_arithmetic(
    cost: Analytic, batch: int, context: int, n: int, p: int
) -> None:
    model = cost.model
    kv = 1e12 * context * cost.kv_token_bytes / (min(cost.num_gpus, model.kv_shards) * cost.hardware.memory_bw)
    assert compile_cost(cost).step_ps((), batch, context) >= weights_read_ps(cost, batch) + kv
    prefill_ps = compile_cost(cost).step_ps([(n, p)], 0, 0)
    linear = 2 * n * model.active_params / (cost.num_gpus * cost.matmul_flops)
    pairs = model.attention_flops * n * (p + n / 2) / (cost.num_gpus * cost.hardware.bf16_flops)
    assert prefill_ps >= weights_read_ps(cost, n)
    # Dense and expert arithmetic overlap nothing, so they add up.
    assert prefill_ps >= 1e12 * (linear + pairs)


@pytest.mark.parametrize("field", ["memory_bw", "bf16_flops", "fp8_flops", "link_bw"])
@given(cost=instances, batch=batches, context=contexts)
def test_better_hardware_is_never_slower(field: str, cost: Analytic, batch: int, context: int) -> None:
    better = msgspec.structs.replace(cost.hardware, **{field: 1.5 * getattr(cost.hardware, field)})
    there = compile_cost(msgspec.structs.replace(cost, hardware=better))
    here = compile_cost(cost)
    assert there.step_ps((), batch, context) <= here.step_ps((), batch, context)
    assert there.prefill_ns(batch, context) <= here.prefill_ns(batch, context)


def test_70b_bf16_on_four_h100_reads_its_weights_in_ten_milliseconds() -> None:
    cost = instance(LLAMA_70B, "h100", 4, weight_dtype="bf16")
    assert weights_read_ps(cost, 1) / 1e9 == pytest.approx(10.4, abs=0.2)
    assert compile_cost(cost).decode_step_ps(1)[0] / 1e9 > 10.2


def test_kv_follows_the_dtype_and_the_layers() -> None:
    cost = instance(LLAMA_70B)
    sizes = {dtype: msgspec.structs.replace(cost, kv_dtype=dtype).kv_token_bytes for dtype in KV_BYTES}
    assert sizes == {"fp8": 163_840, "bf16": 2 * 163_840, "fp32": 4 * 163_840}
    hybrid = compile_cost(instance(QWEN3_NEXT))
    assert (hybrid.kv_token_bytes, hybrid.num_layers) == (12_288, 48) and hybrid.state_bytes > 0


def test_capacity_is_what_memory_leaves() -> None:
    one, four = instance(num_gpus=1), instance(num_gpus=4)
    assert 250_000 < one.kv_capacity_tokens < 400_000
    assert four.kv_capacity_tokens > 4 * one.kv_capacity_tokens
    latent = instance(DEEPSEEK_V3, num_gpus=8)  # held on every GPU
    assert latent.kv_capacity_tokens == int(latent.free_bytes / (8 * latent.kv_token_bytes))
    lends = instance(LLAMA_70B, "h20", 2, weight_dtype="bf16")
    room = 0.9 * 2 * lends.hardware.memory_bytes - 2 * 3e9
    assert lends.lent_capacity_tokens == int(room / lends.kv_token_bytes) > lends.kv_capacity_tokens


def test_a_model_that_does_not_fit_is_refused_unless_its_node_only_lends() -> None:
    cost = instance(LLAMA_70B, "a100", 1, weight_dtype="bf16")
    assert not cost.fits and cost.lent_capacity_tokens > 0
    with pytest.raises(ConfigError, match=r"141\.1 GB of bf16 weights does not fit 1 x a100"):
        _ = cost.kv_capacity_tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_gpus": 0}, "num_gpus is 0"),
        ({"weight_dtype": "fp7"}, "weight_dtype 'fp7' is not known"),
        ({"kv_dtype": "int2"}, "kv_dtype 'int2' is not known"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        msgspec.structs.replace(instance(), **changes)


# Hardware and coefficients.


def test_the_table_has_what_deployments_name_and_no_sparse_peaks() -> None:
    wanted = {"a100", "a800", "h100", "h800", "h200", "h20", "b200", "l20", "l40s", "rtx4090", "cpu"}
    assert wanted == set(HARDWARE)
    assert all(HARDWARE[name].name == name for name in HARDWARE)
    assert HARDWARE["h100"].bf16_flops < 1e15
    assert all(hardware.fp8_flops < 2.1 * hardware.bf16_flops for hardware in HARDWARE.values())


def test_coefficients_move_across_generations_for_kernels_alone() -> None:
    assert engine_coefficients("vllm", hardware_named("h100")) == ENGINES["vllm"]
    assert engine_coefficients("trtllm", hardware_named("h20")) == ENGINES["trtllm"]
    here, there = ENGINES["trtllm"], engine_coefficients("trtllm", hardware_named("b200"))
    assert there.weight_read < here.weight_read and there.matmul < here.matmul
    assert (there.layer_s, there.sequence_s, there.link) == (here.layer_s, here.sequence_s, here.link)


def test_only_one_kernel_reads_kv_slowly() -> None:
    h200, b200 = hardware_named("h200"), hardware_named("b200")
    assert engine_coefficients("vllm", h200).kv_read < 0.4
    assert engine_coefficients("vllm", h200, kv_dtype="bf16").kv_read > 0.8
    assert engine_coefficients("vllm", b200).kv_read > 0.8


@pytest.mark.parametrize("name", sorted(HARDWARE))
@pytest.mark.parametrize("weights", ["fp8", "bf16", "nvfp4", "int4", "fp32"])
def test_every_combination_stays_physical(name: str, weights: str) -> None:
    """Building checks the bounds."""
    for engine in ENGINES:
        assert engine_coefficients(engine, hardware_named(name), weight_dtype=weights, kv_dtype="bf16")


@pytest.mark.parametrize(
    ("field", "value"), [("weight_read", 1.01), ("matmul", 0.0), ("layer_s", -1e-6), ("one_shot", 1.5)]
)
def test_what_breaks_physics_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"cost coefficient {field} is {value}"):
        ENGINES["vllm"].but(**{field: value})


def test_what_is_not_known_or_zero_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="engine 'vlm' has no cost coefficients; did you mean 'vllm'"):
        engine_coefficients("vlm", hardware_named("h100"))
    with pytest.raises(ConfigError, match="hardware 'h20o' is not known; did you mean 'h20'"):
        hardware_named("h20o")
    with pytest.raises(ConfigError, match="hardware h100: memory_bw must be above 0"):
        msgspec.structs.replace(HARDWARE["h100"], memory_bw=0.0)
