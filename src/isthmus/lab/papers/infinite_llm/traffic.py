"""Ship the query, or ship the KV (DistAttention, second version)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost import Queries, compile_cost
from isthmus.lab.papers.infinite_llm.setup import A100, instance
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.table import Cell, Table

_MODEL, _DEVICES = "13B", 4
MEASURED_MS = {8_192: (0.075, 0.581), 32_768: (0.12, 1.98), 131_072: (0.36, 7.48)}
"""Of one layer: ship queries, ship KV."""
_SENT_BYTES = 2


def layer_queries() -> Queries:
    whole = compile_cost(instance(_MODEL)).queries
    return Queries(whole.elements // whole.layers, whole.heads // whole.layers, 1)


def query_bytes() -> float:
    """For one token in one layer, there and back: of each head's two numbers one is here, so the paper's 4 bytes more
    come to 20.8 KB in place of 20.6."""
    queries = layer_queries()
    return queries.num_bytes(1, _SENT_BYTES) + 4 * queries.heads


def kv_bytes(tokens: int) -> float:
    whole = instance(_MODEL)
    return whole.kv_token_bytes * tokens / whole.model.num_layers


def times_ms(tokens: int) -> tuple[float, float]:
    """Of one token's attention in one layer over KV that lies evenly on four GPUs, without any latency: each attends to
    its own part and sums come together; or what three have goes to the fourth, which attends meanwhile."""
    attend_s = compile_cost(instance(_MODEL)).attend_ps(1, tokens) / 1e12 / instance(_MODEL).model.num_layers
    queries = attend_s / _DEVICES + (_DEVICES - 1) * query_bytes() / A100.link_bw
    kv = max(attend_s, (_DEVICES - 1) / _DEVICES * kv_bytes(tokens) / A100.link_bw)
    return 1000 * queries, 1000 * kv


def _measure(lab: Lab) -> Iterator[Cell]:
    yield Cell("a query and its sums, a layer", "KB", 20.8, query_bytes() / 1000)
    yield Cell("KV of 8,192 tokens, a layer", "MB", 168, kv_bytes(8192) / 1e6)
    for tokens, printed in MEASURED_MS.items():
        row, ours = f"{tokens:,} tokens", times_ms(tokens)
        yield Cell(row, "queries travel (ms)", printed[0], ours[0], inferred=True)
        yield Cell(row, "KV travels (ms)", printed[1], ours[1], inferred=True)
        yield Cell(row, "times", printed[1] / printed[0], ours[1] / ours[0], inferred=True)


TABLE = Table(
    name="infinite-llm-traffic",
    title="What travels: queries, or KV",
    source="Infinite-LLM v2 (arXiv 2401.02669v2), DistAttention",
    setup=(
        "One token of LLaMA2-13B, one layer, 16 bits. Times: KV spread over four A100 (inferred: one could not read "
        "the KV of 131,072 tokens in 0.36 ms), NVLink of 300 GB/s each way, 80 % of the memory's bandwidth, no "
        "latency: that is what is missing at 8,192 tokens. RingAttention, which the paper finds 7.7 to 19.8 times "
        "slower, is KV that travels. Tensor parallelism (1 to 25 % slower) is a question of kernels, and is not "
        "computed."
    ),
    measure=_measure,
)
