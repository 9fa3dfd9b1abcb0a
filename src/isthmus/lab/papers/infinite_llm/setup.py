"""Instances of LLaMA2 on A100, as the paper serves them."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from isthmus.config import Config
from isthmus.core.cost import Analytic, Coefficients, engine_coefficients, facts_of, hardware_named
from isthmus.core.types import Role
from isthmus.facts import nodes_of, rules_of
from isthmus.lab.papers.roofline import ROOFLINE
from isthmus.lab.papers.sarathi.setup import llama
from isthmus.lab.sim.deployment import FAR, Deployment

A100 = hardware_named("a100")
NUM_GPUS = 32
BLOCK_SIZE = 16
ETHERNET = 125e6
"""Bytes per second between the nodes of eight, as printed."""
MODELS = {
    "7B": llama(32, 32, 4_096, 11_008, 32_000, 32),
    "13B": llama(40, 40, 5_120, 13_824, 32_000, 40),
    "70B": llama(80, 64, 8_192, 28_672, 32_000, 8),
}


def measured() -> Coefficients:
    """Of vLLM on an A100 with weights and KV of 16 bits, fitted elsewhere (docs/cost-model.md)."""
    return engine_coefficients("vllm", A100, weight_dtype="bf16", kv_dtype="bf16")


@cache
def instance(model: str, num_gpus: int = 1, by: Coefficients = ROOFLINE) -> Analytic:
    return Analytic(facts_of(MODELS[model]), A100, by, num_gpus=num_gpus)


def least_gpus(model: str) -> int:
    """Of an instance: the fewest, a power of two, that leave memory for KV."""
    num_gpus = 1
    while not instance(model, num_gpus).fits:
        num_gpus *= 2
    return num_gpus


def cluster(model: str, count: int, by: Coefficients = ROOFLINE, **changed: Any) -> Deployment:
    """So many instances as small as hold the model. `changed`: sections of the configuration."""
    return _mixed(instance(model, least_gpus(model), by), count, changed)


def single(model: str, num_gpus: int, by: Coefficients = ROOFLINE) -> Deployment:
    """One instance on all of them."""
    return _mixed(instance(model, num_gpus, by), 1, {})


def _mixed(cost: Analytic, count: int, changed: dict[str, Any]) -> Deployment:
    """Each computes and answers, as many requests at once as its memory holds."""
    config = Config.model_validate(
        {
            "roles": {"prefill": 0, "decode": 0, "mixed": count},
            "engine": {
                "hardware": "a100",
                "gpus": cost.num_gpus,
                "token_budget": 2048,
                "max_sequences": 4096,
            },
            "limits": {"max_requests": 1_000_000},
            **changed,
        }
    )
    made = nodes_of(config, BLOCK_SIZE, costs={Role.MIXED: cost})
    nodes = tuple(msgspec.structs.replace(facts, max_steps=FAR, max_chunks=FAR) for facts in made)
    return Deployment(nodes=nodes, rules=rules_of(config), has_names=False)
