"""KV that moves to another instance while its request decodes (second version)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost import compile_cost
from isthmus.lab.papers.infinite_llm.setup import A100, ETHERNET, instance, least_gpus
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.table import Cell, Table

PUBLISHED = {16: 0.0, 32: 8.6}
"""Tokens that move in a step: percent of throughput that is lost."""
_BATCH, _CONTEXT = 32, 1024
_LINKS = {"NVLink": A100.link_bw, "Ethernet": ETHERNET}
_UNPUBLISHED = "no figure is printed"


def lost(model: str, tokens: int, link: float) -> float:
    """Percent: a step is as long as what moves beside it."""
    cost = compile_cost(instance(model, least_gpus(model)))
    step_s = cost.step_ps((), _BATCH, _BATCH * _CONTEXT) / 1e12
    return 100 * (1 - step_s / max(step_s, tokens * cost.kv_token_bytes / link))


def free_link(model: str, tokens: int) -> float:
    """GB/s on which so much moves for nothing."""
    cost = compile_cost(instance(model, least_gpus(model)))
    return tokens * cost.kv_token_bytes / (cost.step_ps((), _BATCH, _BATCH * _CONTEXT) / 1e12) / 1e9


def _measure(lab: Lab) -> Iterator[Cell]:
    for tokens, figure in PUBLISHED.items():
        for model in ("7B", "13B", "70B"):
            row = f"{tokens} tokens a step, {model}"
            for name, link in _LINKS.items():
                yield Cell(row, f"lost on {name} (%)", figure, lost(model, tokens, link))
            yield Cell(row, "free from (GB/s)", None, free_link(model, tokens), _UNPUBLISHED)


TABLE = Table(
    name="infinite-llm-moves",
    title="KV that moves beside decoding",
    source="Infinite-LLM v2, overlap",
    setup=(
        f"Steps of {_BATCH} sequences of {_CONTEXT:,} tokens by the roofline; what moves lies beside the step, or "
        "makes it longer. On NVLink both are free, on the 1 Gbit/s between nodes that the paper prints neither is; "
        "the published 0 and 8.6 % lie between, on a link, of a model and a batch that are not known here. Moves here "
        "take 16 tokens a step."
    ),
    measure=_measure,
)
