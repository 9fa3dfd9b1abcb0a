"""Models and machines of the papers that have no printed iteration times: the analytic cost model.

Shapes are from the models' public configurations; GPT-3's (SARATHI, section 5) is written with gated matrices of the
same total size.
"""

from __future__ import annotations

from functools import cache

from isthmus.core.cost import (
    Analytic,
    Coefficients,
    NodeCost,
    compile_cost,
    engine_coefficients,
    facts_of,
    hardware_named,
)


def llama(
    layers: int, heads: int, hidden: int, intermediate: int, vocab: int, kv_heads: int
) -> dict[str, object]:
    """What the `config.json` of a Llama says."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": 32_768,
    }


LLAMA_33B = llama(60, 52, 6_656, 17_920, 32_000, 52)
YI_34B = llama(60, 56, 7_168, 20_480, 64_000, 8)
GPT_3 = llama(96, 96, 12_288, 32_768, 50_257, 96)

_A100 = hardware_named("a100")


def coefficients() -> Coefficients:
    """Of vLLM on an A100 with weights and KV of 16 bits."""
    return engine_coefficients("vllm", _A100, weight_dtype="bf16", kv_dtype="bf16")


@cache
def on_a100(model: str, num_gpus: int, by: Coefficients | None = None) -> tuple[Analytic, NodeCost]:
    """One of the models above on so many A100, and its evaluator."""
    facts = facts_of({"33B": LLAMA_33B, "Yi-34B": YI_34B, "GPT-3": GPT_3}[model])
    cost = Analytic(facts, _A100, by or coefficients(), num_gpus=num_gpus)
    return cost, compile_cost(cost)
