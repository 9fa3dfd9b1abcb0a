"""What Prefill-as-a-Service (arXiv 2604.15039v2) prints. Its K is read as 1,024 tokens unless `case` says otherwise."""

from __future__ import annotations

from typing import NamedTuple

KIBI = 1024
MEBI = 1 << 20
GBPS = 1e9 / 8
"""Bytes per second."""

LENGTHS = {"1K": KIBI, "8K": 8 * KIBI, "32K": 32 * KIBI, "128K": 128 * KIBI}

THROUGHPUT = {
    "Kimi Linear": (1.19, 2.29, 3.87, 4.88),
    "MiMo-V2-Flash": (0.82, 2.85, 4.66, 4.71),
    "Qwen3.5-397B": (4.13, 6.28, 8.25, 7.47),
    "Ring-2.5-1T": (7.27, 4.47, 2.59, 1.46),
    "MiniMax-M2.5": (4.94, 32.87, 59.93, 47.82),
    "Qwen3-235B": (4.12, 22.42, 33.35, 21.50),
}
"""Table 3: Gbps of KV that a prefill on 8 H200 gives off, at each of LENGTHS; SGLang 0.5.9."""


class Measured(NamedTuple):
    """A row of Table 5: the paper's own model of 10^12 parameters, KDA and MLA layers 3:1, on 8 H200."""

    kv_mib: float
    prefill_s: float
    gbps: float


PROFILE = {
    "1K": Measured(190.8, 0.44, 3.61),
    "8K": Measured(308.9, 0.72, 3.59),
    "32K": Measured(701.3, 1.84, 3.19),
    "128K": Measured(2316.3, 7.40, 2.62),
}

# The case study (section 4, Table 6).
MU, SIGMA, SHORTEST, LONGEST = 9.90, 1.00, 128, 128 * KIBI
OUTPUT_TOKENS = 1024
TOKENS_PER_S = 40  # the limit on decode
LINK_GBPS = 100
REMOTE_INSTANCES, LOCAL_INSTANCES = 4, 8  # 32 H200 and 64 H20, 8 GPUs an instance
THRESHOLD = 19_400


class PublishedColumn(NamedTuple):
    """A column of Table 6. Rates in requests per second, 0 where the paper prints a dash."""

    remote: int
    prefill: int
    decode: int
    ttft_mean_s: float
    ttft_p90_s: float
    remote_rate: float
    local_rate: float
    decode_rate: float
    rate: float
    ratio: float


PRFAAS = PublishedColumn(4, 3, 5, 2.22, 3.51, 1.61, 1.64, 3.91, 3.24, 1.54)
HOMOGENEOUS = PublishedColumn(0, 9, 3, 4.44, 9.73, 0.0, 2.11, 2.35, 2.11, 1.00)
NAIVE = PublishedColumn(4, 0, 8, 1.74, 3.51, 2.45, 0.0, 6.25, 2.45, 1.16)
SHARE, EGRESS_GBPS, MEAN_ABOVE = 0.496, 13, 44 * KIBI
"""Of PRFAAS: requests offloaded, what crosses the link, mean uncached length of what is offloaded."""
OVER_NAIVE = 1.32
EQUAL_COST_GAIN = 0.15
