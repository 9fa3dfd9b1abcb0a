"""The four systems that the FAST'25 paper compares on its traces."""

from __future__ import annotations

from isthmus.lab.papers.lab import Lab, Outcome, Trace, Variant
from isthmus.lab.papers.mooncake.cluster import CHUNKS, WHOLE_PROMPTS, mooncake, vllm

SYSTEMS = ("Mooncake", "vLLM", "vLLM prefix caching", "vLLM chunked prefill")

VLLM_SETUP = (
    "The vLLM v0.5.1 baselines are 16 mixed nodes of this simulator with the same cost curve, round robin: "
    "whole prompts in one iteration, or chunks of 512 tokens; prefix caching in GPU memory only, never "
    "together with chunks."
)


def replay(lab: Lab, trace: Trace, system: str) -> Outcome:
    """One of `SYSTEMS` on a trace at its own speed."""
    if system == "Mooncake":
        return lab.run(Variant(trace), mooncake(), system)
    budget = CHUNKS if system == "vLLM chunked prefill" else WHOLE_PROMPTS
    return lab.run(Variant(trace, shared=system == "vLLM prefix caching"), vllm(budget), system)
