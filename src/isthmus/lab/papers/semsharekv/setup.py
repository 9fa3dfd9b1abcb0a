"""Models, machine and schedules: chosen once for all tables, none by a row."""

from __future__ import annotations

from functools import cache

from isthmus.core.cost import Analytic, NodeCost, compile_cost, facts_of, hardware_named
from isthmus.core.reuse import SEMANTIC, Selection
from isthmus.lab.papers.sarathi.setup import coefficients, llama

A100 = hardware_named("a100")
MODELS = {
    "Mistral-7B": llama(32, 32, 4_096, 14_336, 32_000, 8),
    "LLaMA-3.1-8B": llama(32, 32, 4_096, 14_336, 128_256, 8),
}
MODEL = "Mistral-7B"
HIDDEN = 4_096
LENGTHS = (500, 700, 1_000, 2_000, 5_000, 10_000)

SEMBLEND = Selection("semblend", recompute=0.8 * 0.85, decay=0.85, floor=0.01)
"""Of the re-implementation WorldFlowAI/semblend: layer 1 in full, then 0.8 * 0.85^i of the tokens, at least 0.01."""
SCHEDULES = {"ours": SEMANTIC, "semblend's": SEMBLEND}
"""The paper's own factors are not known."""

UNPUBLISHED = "no figure is printed"


@cache
def node(model: str = MODEL) -> NodeCost:
    """One A100, weights and KV of 16 bits, an engine's shares and overheads as fitted elsewhere."""
    return compile_cost(Analytic(facts_of(MODELS[model]), A100, coefficients()))


def kv_bytes(num_tokens: int) -> int:
    return num_tokens * node().kv_token_bytes


def load_s(num_tokens: int, bytes_per_s: float) -> float:
    """Until a donor's KV is here."""
    return kv_bytes(num_tokens) / bytes_per_s
