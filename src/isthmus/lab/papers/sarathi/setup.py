"""Iteration times of LLaMA-13B on one A6000 as SARATHI prints them, and nothing else.

Linear operators work on tiles of 128 rows. Between the printed sizes their time is linear in tiles, beyond 1,024 rows
proportional. The first three are whole iterations, so their small attention part is counted twice; 92.33 ms, printed
for 257 rows, holds to the end of that tile. Attention of a prompt grows with the square of what it has seen (10 ms at
1,024 tokens), that of decodes with their contexts (5.68 ms for four of 1,024).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from isthmus.core.cost import (
    Analytic,
    Coefficients,
    NodeCost,
    compile_cost,
    engine_coefficients,
    facts_of,
    hardware_named,
)

TILE = 128
_ROWS_MS = ((128, 55.0), (256, 69.8), (384, 92.33), (1024, 224.8))
_DECODES_MS = 44.28
_MAX_DECODES = 18  # the largest batch that fits: up to there an iteration takes as long as its weights are read
_PAIR_MS = 10 / 1024**2
_CONTEXT_MS = 5.68 / 4 / 1024
_PS_PER_MS = 1e9


def linear_ms(rows: int, *, decodes_only: bool = False) -> float:
    """All operators but attention, of so many tokens; 0 for none."""
    if not rows:
        return 0.0
    if decodes_only and rows <= _MAX_DECODES:
        return _DECODES_MS
    rows = -(-rows // TILE) * TILE
    if rows <= _ROWS_MS[0][0]:
        return _ROWS_MS[0][1]
    for (below, fewer), (above, more) in pairwise(_ROWS_MS):
        if rows <= above:
            return fewer + (more - fewer) * (rows - below) / (above - below)
    return _ROWS_MS[-1][1] * rows / _ROWS_MS[-1][0]


def attention_ms(chunks: Sequence[tuple[int, int]], context: int) -> float:
    pairs = sum([(start + count) ** 2 - start**2 for count, start in chunks])
    return _PAIR_MS * pairs + _CONTEXT_MS * context


def step_ps(chunks: Sequence[tuple[int, int]], num_decodes: int, context: int) -> int:
    """A `StepTime`."""
    rows = num_decodes + sum([count for count, _ in chunks])
    linear = linear_ms(rows, decodes_only=not chunks)
    return round(_PS_PER_MS * (linear + attention_ms(chunks, context)))


# Models and machines of the papers that have no printed iteration times: the analytic cost model.
#
# Shapes are from the models' public configurations; GPT-3's (SARATHI, section 5) is written with gated matrices of the
# same total size.


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
