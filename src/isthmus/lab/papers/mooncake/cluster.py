"""The cluster of Mooncake's tests, in one place: every table uses these constants, none has its own.

16 nodes of 8 x A800-80GB, 4 x 200 Gbps RDMA, LLaMA3-70B with dummy weights, of which 8 prefill
and 8 decode unless a figure says otherwise; 3 million tokens of cache in a node's DRAM.
`examples/mooncake-fast25.yaml` is the same for `isthmus simulate`.

What the papers leave open is chosen once: replay at the trace's own speed with its 3-second arrival steps,
blocks of 512 tokens (the traces'), one prompt at a time on a prefill node, no pipeline groups, balancing threshold
1, no refusal where the table is not about refusals.

The cost curve. Prefill: seconds per token and per pair of tokens, fitted to Figure 14 (no prefix cached); 15 ms for
each iteration with prompts in it, which is what chunked prefill takes longer in the paper (GPU time of 2.021 against
1.661 s on the conversation trace, 1.415 against 1.117 and 2.436 against 2.022 s on the two others), by chunk of 512
tokens. Decode: a straight line through Figure 14's "decode 128 tokens" over prompts of 8k to 128k tokens has
26.26 ms at no context and 34.75 ns per token of context. That slope is one sequence's: reading 320 KiB at the
16.3 TB/s of eight A800 takes 20 ns, so with a batch of two it would be above 40 ns. What a further sequence adds is
not published; 2.5 ms, the only free constant, is the least-squares fit, to half a millisecond, of Figure 15's seven
TBT (5 to 11 decode nodes) on a generated workload with the rate and lengths of the synthetic trace, and the rest of
the 26.26 ms is the iteration's own.
"""

from __future__ import annotations

from typing import Any

from isthmus.config import Config
from isthmus.core.cost import Curve
from isthmus.lab.papers.lab import Lab, PaperOutcome, Trace, Variant
from isthmus.lab.sim.deployment import Deployment, deployment_of

BLOCK_SIZE = 512
TTFT_LIMIT_S = 30.0
NIC_GBPS = 800.0

CURVE: dict[str, Any] = {
    "kv_token_bytes": 327_680,
    "num_layers": 80,
    "prefill_fixed_s": 0.015,
    "prefill_token_s": 1.144e-4,
    "prefill_pair_s": 7.21e-10,
    "decode_fixed_s": 0.02376,
    "decode_sequence_s": 0.0025,
    "decode_context_s": 3.475e-8,
    "origin": "Mooncake, FAST'25, Figures 14 and 15: LLaMA3-70B on 8 x A800",
}
"""Fields of `isthmus.core.cost.Curve`."""


def curve() -> Curve:
    return Curve(**CURVE)


_SETTINGS: dict[str, Any] = {
    "roles": {"prefill": 8, "decode": 8},
    "engine": {
        "hardware": "a800",
        "gpus": 8,
        "cost": CURVE,
        "kv_memory": "477GB",
        "token_budget": 8192,
        "prompt_batch": 1,
        "max_sequences": 256,
    },
    # What keeps 3 million tokens: an eighth is for blocks on their way.
    "cache": {"dram": -(-8 * 3_000_000 * 327_680 // 7)},
    "network": {"node_gbps": NIC_GBPS},
    "slo": {"ttft_ms": 30_000, "tbt_ms": 100},
    "policy": "mooncake",
    "limits": {"max_requests": 1_000_000},
}


def settings(**changed: Any) -> Config:
    """The cluster; a keyword replaces a section's keys, or a key of the top."""
    values = dict(_SETTINGS)
    for key, value in changed.items():
        values[key] = {**values[key], **value} if isinstance(values.get(key), dict) else value
    return Config.model_validate(values)


def mooncake(prefill: int = 8, decode: int = 8, **changed: Any) -> Deployment:
    """Separate prefill and decode nodes."""
    return deployment_of(settings(roles={"prefill": prefill, "decode": decode}, **changed), BLOCK_SIZE)


def vllm(token_budget: int) -> Deployment:
    """16 nodes that do both, as vLLM v0.5.1 did, with the same cost curve.

    A node keeps prefixes in its own GPU memory only, for prompts that have block ids. All its decodes advance in
    each iteration, which takes as many prompt tokens as the budget leaves: a budget of whole prompts stalls the
    decodes for as long as a prompt takes, one of 512 (v0.5.1's default) is chunked prefill. Requests are dealt out
    in turn.
    """
    return deployment_of(
        settings(
            roles={"prefill": 0, "decode": 0, "mixed": 16},
            engine={"token_budget": token_budget, "prompt_batch": None},
            cache={"dram": 0},
            policy="round_robin",
        ),
        BLOCK_SIZE,
    )


WHOLE_PROMPTS, CHUNKS = 65_536, 512
"""Token budgets of vLLM without and with chunked prefill."""


# The four systems that the FAST'25 paper compares on its traces.


SYSTEMS = ("Mooncake", "vLLM", "vLLM prefix caching", "vLLM chunked prefill")

VLLM_SETUP = (
    "The vLLM v0.5.1 baselines are 16 mixed nodes of this simulator with the same cost curve, round robin: "
    "whole prompts in one iteration, or chunks of 512 tokens; prefix caching in GPU memory only, never "
    "together with chunks."
)


def replay(lab: Lab, trace: Trace, system: str) -> PaperOutcome:
    """One of `SYSTEMS` on a trace at its own speed."""
    if system == "Mooncake":
        return lab.run(Variant(trace), mooncake(), system)
    budget = CHUNKS if system == "vLLM chunked prefill" else WHOLE_PROMPTS
    return lab.run(Variant(trace, shared=system == "vLLM prefix caching"), vllm(budget), system)
