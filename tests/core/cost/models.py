"""config.json parts for the tests, and the instances most of them use."""

from __future__ import annotations

from typing import Any

from benchmarks.cost_tables import CONFIGS as MEASURED
from isthmus.core.cost import Analytic, NodeCost, engine_coefficients, facts_of, hardware_named
from isthmus.core.cost.offload import RequestWork
from isthmus.lab.papers.prfaas.configs import (
    DEEPSEEK_V3,
    KIMI_K3,
    KIMI_LINEAR,
    MIMO_V2_FLASH,
    MINIMAX_M25,
    QWEN3_NEXT,
    RING_25_1T,
)
from isthmus.lab.papers.prfaas.configs import LLAMA_3_70B as LLAMA_70B

__all__ = [
    "CONFIGS",
    "DEEPSEEK_V3",
    "GPT_OSS",
    "KIMI_K3",
    "KIMI_LINEAR",
    "LLAMA_70B",
    "MIMO_V2_FLASH",
    "MINIMAX_M25",
    "QWEN3_NEXT",
    "RING_25_1T",
    "instance",
    "work_of",
]

GPT_OSS = MEASURED["gpt-oss-120b"] | {"quantization_config": {"quant_method": "mxfp4"}}
CONFIGS = {
    "llama": LLAMA_70B,
    "deepseek": DEEPSEEK_V3,
    "qwen-next": QWEN3_NEXT,
    "kimi": KIMI_LINEAR,
    "gpt-oss": GPT_OSS,
    "mimo": MIMO_V2_FLASH,
    "ring": RING_25_1T,
    "kimi-k3": KIMI_K3,
    "minimax": MINIMAX_M25,
}


def instance(
    config: dict[str, Any] = LLAMA_70B,
    gpu: str = "h200",
    num_gpus: int = 4,
    *,
    engine: str = "vllm",
    weight_dtype: str = "fp8",
) -> Analytic:
    hardware = hardware_named(gpu)
    coefficients = engine_coefficients(engine, hardware, weight_dtype=weight_dtype)
    return Analytic(facts_of(config), hardware, coefficients, num_gpus, weight_dtype, "fp8")


def work_of(remote: NodeCost, local: NodeCost) -> RequestWork:
    """Of a request with nothing cached, by the costs of one instance in each cluster."""
    return RequestWork(
        remote_s=lambda length: remote.prefill_ns(round(length), 0) / 1e9,
        local_s=lambda length: local.prefill_ns(round(length), 0) / 1e9,
        kv_bytes=lambda length: remote.state_bytes + remote.kv_token_bytes * length,
    )
