"""Physics is a floor, and more work never takes less time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.cost import Analytic, compile_cost
from isthmus.core.cost.analytic import KV_BYTES, WEIGHT_BYTES
from isthmus.core.errors import ConfigError
from tests.core.cost.models import CONFIGS, DEEPSEEK_V3, LLAMA_70B, instance

instances = st.builds(
    lambda name, gpu, gpus, engine: instance(CONFIGS[name], gpu, gpus, engine=engine),
    st.sampled_from(sorted(CONFIGS)),
    st.sampled_from(["a100", "h100", "h200", "b200", "rtx4090"]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(["vllm", "trtllm"]),
)
batches = st.integers(1, 600)
contexts = st.integers(0, 3_000_000)
tokens = st.integers(1, 60_000)
cached = st.integers(0, 120_000)


def weights_read_ps(cost: Analytic, num_tokens: int) -> float:
    """Reading what `num_tokens` tokens need at the full bandwidth, with uniform routing of experts."""
    model = cost.model
    touched = 0.0
    if model.moe_layers:
        touched = model.num_experts * (1 - (1 - model.experts_per_token / model.num_experts) ** num_tokens)
    params = model.dense_params + model.moe_layers * touched * model.expert_params
    read = params * WEIGHT_BYTES[cost.weight_dtype] + cost.head_bytes
    return 1e12 * read / (cost.num_gpus * cost.hardware.memory_bw)


@given(instances, batches, contexts)
def test_decode_is_never_faster_than_reading_weights_and_kv(cost: Analytic, batch: int, context: int) -> None:
    shards = min(cost.num_gpus, cost.model.kv_shards)
    kv = 1e12 * context * cost.kv_token_bytes / (shards * cost.hardware.memory_bw)
    assert compile_cost(cost).step_ps((), batch, context) >= weights_read_ps(cost, batch) + kv


@given(instances, tokens, cached)
def test_prefill_is_never_faster_than_weights_or_arithmetic(cost: Analytic, n: int, p: int) -> None:
    model = cost.model
    prefill_ps = compile_cost(cost).step_ps([(n, p)], 0, 0)
    linear = 2 * n * model.active_params / (cost.num_gpus * cost.matmul_flops)
    pairs = model.attention_flops * n * (p + n / 2) / (cost.num_gpus * cost.hardware.bf16_flops)
    assert prefill_ps >= weights_read_ps(cost, n)
    # Dense and expert arithmetic overlap nothing, so they add up.
    assert prefill_ps >= 1e12 * (linear + pairs)


@given(instances, batches, batches, contexts, contexts)
def test_decode_is_monotone(cost: Analytic, b: int, more: int, c: int, longer: int) -> None:
    node = compile_cost(cost)
    assert node.step_ps((), b, c) <= node.step_ps((), b + more, c)
    assert node.step_ps((), b, c) <= node.step_ps((), b, c + longer)


@given(instances, tokens, tokens, cached, cached)
def test_prefill_is_monotone(cost: Analytic, n: int, more: int, p: int, further: int) -> None:
    node = compile_cost(cost)
    assert node.prefill_ns(n, p) <= node.prefill_ns(n + more, p)
    assert node.prefill_ns(n, p) <= node.prefill_ns(n, p + further)


@given(instances, tokens, tokens, cached)
def test_cached_tokens_save_and_chunks_cost(cost: Analytic, n: int, m: int, p: int) -> None:
    node = compile_cost(cost)
    assert node.prefill_ns(n, p) <= node.prefill_ns(n + p, 0)
    assert node.prefill_ns(n + m, p) <= node.prefill_ns(n, p) + node.prefill_ns(m, p + n) + 1


@given(instances, st.lists(st.tuples(tokens, cached), min_size=1, max_size=4), batches, contexts)
def test_a_mixed_step_costs_at_least_its_parts_and_at_most_their_sum(
    cost: Analytic, chunks: list[tuple[int, int]], batch: int, context: int
) -> None:
    node = compile_cost(cost)
    mixed = node.step_ps(chunks, batch, context)
    apart = [node.step_ps([chunk], 0, 0) for chunk in chunks] + [node.step_ps((), batch, context)]
    assert max(apart) <= mixed <= sum(apart) + len(apart)


@given(instances, batches, contexts)
def test_the_decode_step_is_exactly_linear_in_context(cost: Analytic, batch: int, context: int) -> None:
    node = compile_cost(cost)
    fixed, per = node.decode_step_ps(batch)
    assert node.step_ps((), batch, context) == fixed + per * context
    assert isinstance(fixed, int) and isinstance(per, int)


@given(instances, tokens, cached)
def test_a_prompt_alone_is_a_step_of_one_chunk(cost: Analytic, n: int, p: int) -> None:
    node = compile_cost(cost)
    assert node.prefill_ns(n, p) == node.step_ps([(n, p)], 0, 0) // 1000


@pytest.mark.parametrize("field", ["memory_bw", "bf16_flops", "fp8_flops", "link_bw"])
@given(cost=instances, batch=batches, context=contexts)
def test_better_hardware_is_never_slower(field: str, cost: Analytic, batch: int, context: int) -> None:
    better = msgspec.structs.replace(cost.hardware, **{field: 1.5 * getattr(cost.hardware, field)})
    there = compile_cost(msgspec.structs.replace(cost, hardware=better))
    here = compile_cost(cost)
    assert there.step_ps((), batch, context) <= here.step_ps((), batch, context)
    assert there.prefill_ns(batch, context) <= here.prefill_ns(batch, context)


def test_nothing_costs_nothing() -> None:
    node = compile_cost(instance())
    assert (node.prefill_ns(0, 100), node.decode_step_ps(0)[0], node.step_ps((), 0, 0)) == (0, 0, 0)


def test_70b_bf16_on_four_h100_reads_its_weights_in_ten_milliseconds() -> None:
    cost = instance(LLAMA_70B, "h100", 4, weight_dtype="bf16")
    assert weights_read_ps(cost, 1) / 1e9 == pytest.approx(10.4, abs=0.2)
    assert compile_cost(cost).decode_step_ps(1)[0] / 1e9 > 10.2


def test_kv_follows_the_dtype() -> None:
    cost = instance(LLAMA_70B)
    assert cost.kv_token_bytes == 163_840
    assert {
        dtype: msgspec.structs.replace(cost, kv_dtype=dtype).kv_token_bytes // 163_840 for dtype in KV_BYTES
    } == {"fp8": 1, "bf16": 2, "fp32": 4}


def test_capacity_is_what_memory_leaves() -> None:
    one, four = instance(num_gpus=1), instance(num_gpus=4)
    assert 250_000 < one.kv_capacity_tokens < 400_000
    assert four.kv_capacity_tokens > 4 * one.kv_capacity_tokens


def test_the_kv_of_mla_is_held_on_every_gpu() -> None:
    cost = instance(DEEPSEEK_V3, num_gpus=8)
    assert cost.kv_capacity_tokens == int(cost.free_bytes / (8 * cost.kv_token_bytes))


def test_a_model_that_does_not_fit_is_refused() -> None:
    cost = instance(LLAMA_70B, "a100", 1, weight_dtype="bf16")
    assert not cost.fits
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


def test_without_weights_all_but_working_memory_is_for_kv() -> None:
    cost = instance(LLAMA_70B, "h20", 2, weight_dtype="bf16")
    room = 0.9 * 2 * cost.hardware.memory_bytes - 2 * 3e9
    assert cost.lent_capacity_tokens == int(room / cost.kv_token_bytes) > cost.kv_capacity_tokens
    assert not instance(LLAMA_70B, "h20", 1, weight_dtype="bf16").fits
    assert instance(LLAMA_70B, "h20", 1, weight_dtype="bf16").lent_capacity_tokens > 0
