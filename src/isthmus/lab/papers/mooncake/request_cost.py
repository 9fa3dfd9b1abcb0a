"""What one request costs by its length (FAST'25, Figure 14)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost import NodeCost, compile_cost
from isthmus.core.types import NS_PER_S
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.mooncake.cluster import NIC_GBPS, curve
from isthmus.lab.papers.table import Cell, Figures, Table, compare

_LENGTHS = {"8k": 8_192, "16k": 16_384, "32k": 32_768, "64k": 65_536, "128k": 131_072}
_OUTPUT = 128

_PUBLISHED: dict[str, tuple[float, ...]] = {
    "prefill, 0 % cached": (1.00, 2.05, 4.48, 10.58, 27.5),
    "prefill, 95 % cached": (0.134, 0.227, 0.406, 0.882, 2.33),
    "decode of 128 tokens": (3.39, 3.43, 3.52, 3.66, 3.94),
    "total, 0 % cached": (4.50, 5.65, 8.29, 14.74, 32.4),
    "total, 95 % cached": (3.65, 3.86, 4.25, 5.03, 7.25),
}

# What a cached prefix costs beside the computing of the rest: a fit of the figure's second row. The simulator loads
# layer by layer while it computes (section 3 of the paper), so there most of it is hidden.
_PREFIX_FIXED_S, _PREFIX_BYTES_PER_S = 0.055, 135e9


def _measure(lab: Lab) -> Iterator[Cell]:
    cost = compile_cost(curve())
    for row, figures in _PUBLISHED.items():
        yield from compare(
            row, _columns(figures), _columns(tuple(_seconds(cost, row, n) for n in _LENGTHS.values()))
        )


def _columns(figures: tuple[float, ...]) -> Figures:
    return {f"{length} (s)": figure for length, figure in zip(_LENGTHS, figures, strict=True)}


def _seconds(cost: NodeCost, row: str, num_tokens: int) -> float:
    cached = round(0.95 * num_tokens) if "95 %" in row else 0
    if row.startswith("prefill"):
        return _prefill_s(cost, num_tokens, cached)
    if row.startswith("decode"):
        return _decode_s(cost, num_tokens)
    handover_s = num_tokens * cost.kv_token_bytes / (NIC_GBPS * 1e9 / 8)
    return _prefill_s(cost, num_tokens, cached) + handover_s + _decode_s(cost, num_tokens)


def _prefill_s(cost: NodeCost, num_tokens: int, cached: int) -> float:
    compute_s = cost.prefill_ns(num_tokens - cached, cached) / NS_PER_S
    return compute_s + (_PREFIX_FIXED_S + cached * cost.kv_token_bytes / _PREFIX_BYTES_PER_S if cached else 0.0)


def _decode_s(cost: NodeCost, num_tokens: int) -> float:
    fixed, per_token = cost.decode_step_ps(1)
    contexts = _OUTPUT * num_tokens + _OUTPUT * (_OUTPUT + 1) // 2
    return (_OUTPUT * fixed + per_token * contexts) / 1e12


TABLE = Table(
    name="mooncake-request-cost",
    title="Time of one request by prompt length",
    source="FAST'25, Figure 14",
    setup=(
        "The cost curve alone, nothing simulated. A cached prefix also takes 0.055 s and its bytes at 135 "
        "GB/s, a fit of the second row; the total has the hand-over at 800 Gbps in it. The decode row is "
        "where the decode constants come from, so it agrees by construction."
    ),
    measure=_measure,
)
