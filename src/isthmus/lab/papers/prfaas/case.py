"""What Prefill-as-a-Service (arXiv 2604.15039v2) prints. Its K is read as 1,024 tokens unless `case` says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec

from isthmus.core.cost import (
    Analytic,
    Curve,
    LogNormal,
    compile_cost,
    engine_coefficients,
    facts_of,
    hardware_named,
)
from isthmus.core.cost.offload import (
    Classes,
    PrefillFleet,
    RequestWork,
    Solution,
    Split,
    bear,
    best,
    decode_rate,
    expected,
    kv_throughput,
    representative,
    solve,
)
from isthmus.core.types import NS_PER_S
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.prfaas.configs import CONFIGS
from isthmus.lab.papers.prfaas.interpolation import Points, Times, evaluated, polynomial, quadratic
from isthmus.lab.papers.table import Figures, PaperCell, Table, compare

KIBI = 1024
MEBI = 1 << 20
GBPS = 1e9 / 8
"""Bytes per second."""

LENGTHS_PUBLISHED = {"1K": KIBI, "8K": 8 * KIBI, "32K": 32 * KIBI, "128K": 128 * KIBI}

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


# KV of hybrid models: bytes of a prompt, and what a prefill gives off (section 2, Tables 3 and 5).


# Bytes of a token, MiB of state, and MiB of a prompt at each of LENGTHS.
PUBLISHED_SIZES: dict[str, tuple[float, ...]] = {
    "Kimi Linear": (8_064, 41.41, 49.3, 104.4, 293.4, 1_049),
    "Qwen3-Next-80B": (24_576, 73.69, 97.7, 265.7, 841.7, 3_146),
    "Qwen3.5-35B": (20_480, 61.41, 81.4, 221.4, 701.4, 2_621),
    "Qwen3.5-397B": (30_720, 183.16, 213.2, 423.2, 1_143, 4_023),
    "MiMo-V2-Flash": (23_040, 24.38, 46.9, 204.4, 744.4, 2_904),
    "Ring-2.5-1T": (11_520, 280.0, 291.2, 370.0, 640.0, 1_720),
    "Kimi K3": (27_648, 428.55, 455.5, 644.5, 1_293, 3_885),
    "DeepSeek-V3": (70_272, 0, 68.6, 549, 2_196, 8_784),
    "Kimi K2": (70_272, 0, 68.6, 549, 2_196, 8_784),
    "Qwen3-235B": (192_512, 0, 188, 1_504, 6_016, 24_064),
    "MiniMax-M2.5": (253_952, 0, 248, 1_984, 7_936, 31_744),
    "Llama-3-70B": (327_680, 0, 320, 2_560, 10_240, 40_960),
}
_SIZE_COLUMNS = ("KV (B/token)", "fixed (MiB)", *(f"{length} (MiB)" for length in LENGTHS_PUBLISHED))


def _measure_sizes(lab: Lab) -> Iterator[PaperCell]:
    for name, figures in PUBLISHED_SIZES.items():
        facts = facts_of(CONFIGS[name])
        prompts = [facts.prompt_bytes(length) for length in LENGTHS_PUBLISHED.values()]
        ours = [
            facts.prompt_bytes(1) - facts.prompt_bytes(0),
            *(size / MEBI for size in (facts.prompt_bytes(0), *prompts)),
        ]
        yield from compare(
            name, dict(zip(_SIZE_COLUMNS, figures, strict=True)), dict(zip(_SIZE_COLUMNS, ours, strict=True))
        )


SIZES = Table(
    name="prfaas-kv-size",
    title="Bytes a prompt leaves to be sent, by model",
    source="not in the paper: worked out by hand from the layers of each config.json, before this program",
    setup=(
        "KV and convolution windows in bf16, recurrent states in fp32, as SGLang and vLLM keep them; the window of "
        "MiMo-V2-Flash's sliding layers is counted with what is fixed. The hand figures are rounded to four digits."
    ),
    measure=_measure_sizes,
)


def implied_points(name: str) -> Points:
    """(length, seconds) of a model of Table 3: KV by its config.json, over the published KV throughput."""
    facts = facts_of(CONFIGS[name])
    rates = zip(LENGTHS_PUBLISHED.values(), THROUGHPUT[name], strict=True)
    return [(length, facts.prompt_bytes(length) / (gbps * GBPS)) for length, gbps in rates]


def _data_sheet(name: str) -> Times:
    """Prefill on 8 H200 by the analytic model: no figure of the paper is in it."""
    facts, h200 = facts_of(CONFIGS[name]), hardware_named("h200")
    dtype = "fp8" if facts.num_params * 2 > 8 * h200.memory_bytes else facts.weight_dtype
    coefficients = engine_coefficients("sglang", h200, weight_dtype=dtype)
    cost = compile_cost(Analytic(facts, h200, coefficients, num_gpus=8, weight_dtype=dtype))
    return lambda length: cost.prefill_ns(round(length), 0) / NS_PER_S


def _measure_throughput(lab: Lab) -> Iterator[PaperCell]:
    for name, figures in THROUGHPUT.items():
        points, facts = implied_points(name), facts_of(CONFIGS[name])
        for how, times in (("fit (inferred)", quadratic(points)), ("data sheet", _data_sheet(name))):
            rates = (
                kv_throughput(facts.prompt_bytes(length), times(length)) / GBPS
                for length in LENGTHS_PUBLISHED.values()
            )
            yield from compare(f"{name}, {how}", _gbps(figures), _gbps(tuple(rates)))


def _gbps(figures: tuple[float, ...]) -> Figures:
    return {f"{length} (Gbps)": figure for length, figure in zip(LENGTHS_PUBLISHED, figures, strict=True)}


THROUGHPUT_TABLE = Table(
    name="prfaas-kv-throughput",
    title="KV that a prefill on 8 H200 gives off, equation (1)",
    source="Table 3",
    setup=(
        "KV bytes from config.json, which the paper does not print. Data sheet: prefill time from the analytic model "
        "with SGLang's coefficients, nothing of the paper; Ring-2.5-1T in fp8, since it does not fit otherwise. Fit "
        "(inferred): the time is a + b l + c l^2 through what the row itself implies, so it shows how far that form "
        "carries: three coefficients, four points."
    ),
    measure=_measure_throughput,
)


def _measure_implied(lab: Lab) -> Iterator[PaperCell]:
    reason = "not published: inferred from Table 3"
    for name in THROUGHPUT:
        points, sheet = dict(zip(LENGTHS_PUBLISHED, implied_points(name), strict=True)), _data_sheet(name)
        for label, (_, seconds) in points.items():
            yield PaperCell(f"{name}, inferred", f"{label} (s)", None, seconds, reason)
        for label, (length, _) in points.items():
            yield PaperCell(f"{name}, data sheet", f"{label} (s)", None, sheet(length), "not published")


IMPLIED = Table(
    name="prfaas-implied-prefill",
    title="Prefill times behind Table 3",
    source="not in the paper",
    setup=(
        "KV bytes from config.json over the published throughput. All six models share a floor of 0.34 to 0.48 s at "
        "1K, whatever their size; the data sheet explains long prompts within a factor of 2, not that floor."
    ),
    measure=_measure_implied,
)


def _measure_profile(lab: Lab) -> Iterator[PaperCell]:
    times = quadratic(h200_points())
    for (label, row), length in zip(PROFILE.items(), MEASURED_LENGTHS, strict=True):
        size, seconds = kv_bytes(length), times(length)
        ours = {
            "KV (MiB)": size / MEBI,
            "prefill (s)": seconds,
            "throughput (Gbps)": kv_throughput(size, seconds) / GBPS,
        }
        yield from compare(f"{label}, taken as {length:,} (inferred)", dict(zip(ours, row, strict=True)), ours)


PROFILE_TABLE = Table(
    name="prfaas-profile",
    title="The paper's own model on 8 H200",
    source="Table 5",
    setup=(
        "KV from the structure inferred from the table (15 MLA layers, 42 KDA layers of 64 heads). The times are the "
        "fit that everything else here is computed with, three coefficients through four points."
    ),
    measure=_measure_profile,
)


# Which inputs were inferred from the figures that they are compared with, and which of our figures hang on them.
#
# What is inferred is said once, in `INFERRED`. Which figures hang on it nobody says: a table is measured again with
# each of those inputs twice as slow, and what moves is marked.


class Factors(msgspec.Struct, frozen=True):
    """On times: of a prefill on H200 and on H20, and of a decode step. 2: twice as slow."""

    h200: float = 1.0
    h20: float = 1.0
    decode: float = 1.0

    def __mul__(self, other: Factors) -> Factors:
        return Factors(self.h200 * other.h200, self.h20 * other.h20, self.decode * other.decode)

    def work(self, what: RequestWork) -> RequestWork:
        return RequestWork(
            remote_s=lambda length: self.h200 * what.remote_s(length),
            local_s=lambda length: self.h20 * what.local_s(length),
            kv_bytes=what.kv_bytes,
        )

    def fleet(self, fleet: PrefillFleet) -> PrefillFleet:
        return msgspec.structs.replace(fleet, decode_rate=fleet.decode_rate / self.decode)


AS_IS = Factors()
INFERRED = ("h20", "decode")
"""Those of Factors that come from Table 6, the result. Times on H200 are printed, in Table 5."""
# Enough to move whatever halving them moves: a minimum of rates follows what slows, not always what quickens.
_SLOWER = tuple(Factors(**{name: 2.0}) for name in INFERRED)


def marked(measure: Callable[[Factors], Iterable[PaperCell]]) -> Callable[[Lab], Iterator[PaperCell]]:
    """`measure` for a Table: each cell whose figure of ours is another when an inferred input is, is marked.

    `measure` must yield as many cells, in the same order, for any factors.
    """

    def cells(lab: Lab) -> Iterator[PaperCell]:
        slower = [measure(factors) for factors in _SLOWER]
        for cell, *others in zip(measure(AS_IS), *slower, strict=True):
            moves = any(other.ours != cell.ours for other in others)
            yield msgspec.structs.replace(cell, inferred=moves)

    return cells


# The case study: 32 H200 that only prefill, 64 H20 that do both, 100 Gbps between them, and its two baselines.
#
# Published inputs are in `published`. Inferred, because the paper does not print them:
#
# - **Lengths of Table 5.** Its KV sizes are 17,280 bytes a token (15 MLA layers of 576 values) and 182,353,920 bytes
# of state (42 KDA layers of 64 heads of 128 x 128, with their convolutions) at 1,024, 8,192, 32,000 and 130,000
# tokens, within 0.1 MiB of what is printed. So the times beside them are taken to be of those lengths. - **Time
# between those lengths.** The cost model's own form, a + b l + c l^2 (work for each token, work for each pair of
# tokens), by least squares in seconds, since all times are printed to 0.01 s. On held-out points of it and of the six
# of Table 3 it errs by 6 %, straight lines by 16 % (`prfaas-held-out`); all rules are in `prfaas-interpolation`. Both
# choices were made with Table 6 in view, but their reasons do without it, and one rule holds for every row. -
# **Prefill on H20**: the same form through the three times that Table 6 implies. - **Decode**: 800 tokens/s of an
# instance, from Table 6; as 20 sequences at the limit of 40 tokens/s.
#
# The last two come from the table of results itself: what hangs on them is no independent test, and marked
# (`inferred`).


TOKEN_BYTES = 15 * 576 * 2
STATE_BYTES = 42 * (64 * 128 * 128 * 4 + 3 * 3 * 64 * 128 * 2)
NUM_LAYERS = 15 + 42
MEASURED_LENGTHS = (1024, 8192, 32_000, 130_000)
DECODE_BATCH = 20

LENGTHS_CASE = LogNormal(MU, SIGMA, SHORTEST, LONGEST)
GRID = range(1000, LONGEST, 100)
"""Thresholds that are tried."""
DECODE_RATE = decode_rate(1, DECODE_BATCH, 1 / TOKENS_PER_S, OUTPUT_TOKENS)


def kv_bytes(length: float) -> float:
    return STATE_BYTES + TOKEN_BYTES * length


def h200_points(lengths: Sequence[int] = MEASURED_LENGTHS) -> Points:
    return [(length, row.prefill_s) for length, row in zip(lengths, PROFILE.values(), strict=True)]


def h20_points() -> Points:
    """Equation (4) and Table 6, turned round: two stages and the TTFT that no remote instance and no queue is in."""
    mean = LENGTHS_CASE.mean_below(LONGEST)
    return [
        (LENGTHS_CASE.mean_below(THRESHOLD), PRFAAS.prefill / PRFAAS.local_rate),
        (mean, HOMOGENEOUS.prefill / HOMOGENEOUS.local_rate),
        (LENGTHS_CASE.quantile(0.9), HOMOGENEOUS.ttft_p90_s),
    ]


@cache
def h20() -> Times:
    return evaluated(polynomial(h20_points(), 2))


@cache
def work(h200: Times | None = None) -> RequestWork:
    return RequestWork(h200 or quadratic(h200_points()), h20(), kv_bytes)


def curve(points: Points, origin: str, **decode: Any) -> Curve:
    """A profile by the rule of this study. `decode`: coefficients of its decode, none for prefill instances."""
    fixed_s, token_s, pair_s = polynomial(points, 2)
    fitted = quadratic(points)
    return Curve(
        kv_token_bytes=TOKEN_BYTES,
        state_bytes=STATE_BYTES,
        num_layers=NUM_LAYERS,
        prefill_fixed_s=fixed_s,
        prefill_token_s=token_s,
        prefill_pair_s=pair_s,
        origin=origin,
        error=sum(abs(fitted(length) / seconds - 1) for length, seconds in points) / len(points),
        measured_tokens=round(points[-1][0]),
        **decode,
    )


class CaseDeployment(msgspec.Struct, frozen=True):
    """One of the three: its instances, and the thresholds it may choose from."""

    fleet: PrefillFleet
    thresholds: Sequence[float]

    def classes(self, by: Split, what: RequestWork) -> list[Classes]:
        return by(LENGTHS_CASE, what, self.thresholds)

    def solved(
        self, by: Split = representative, what: RequestWork | None = None, factors: Factors = AS_IS
    ) -> Solution:
        """The best split, and the best threshold where there is a choice."""
        return _solved(self, by, what or work(), factors)

    def held(
        self,
        plan: Solution,
        by: Split = representative,
        what: RequestWork | None = None,
        factors: Factors = AS_IS,
    ) -> Solution:
        """What the threshold and the split of `plan` bear with these inputs."""
        (classes,) = by(LENGTHS_CASE, factors.work(what or work()), [plan.classes.threshold])
        return bear(classes, factors.fleet(self.fleet), plan.num_prefill)


@cache
def _solved(deployment: CaseDeployment, by: Split, what: RequestWork, factors: Factors) -> Solution:
    return best(solve(deployment.classes(by, factors.work(what)), factors.fleet(deployment.fleet)))


def fleet(
    *, remote: int = REMOTE_INSTANCES, local: int = LOCAL_INSTANCES, gbps: float = LINK_GBPS
) -> PrefillFleet:
    return PrefillFleet(remote, local, gbps * GBPS, DECODE_RATE)


OFFLOADING = CaseDeployment(fleet(), GRID)
HOMOGENEOUS_PD = CaseDeployment(fleet(remote=0, local=REMOTE_INSTANCES + LOCAL_INSTANCES, gbps=0), (LONGEST,))
"""As many instances, all H20 and in one cluster."""
NAIVE_PD = CaseDeployment(fleet(), (0,))
"""As OFFLOADING, but every request is prefilled remotely, so all H20 decode."""
DEPLOYMENTS = {"PrfaaS-PD": OFFLOADING, "homogeneous PD": HOMOGENEOUS_PD, "naive heterogeneous": NAIVE_PD}


def ttft_s(
    threshold: float, what: RequestWork, transfer_s: Callable[[float], float] = lambda length: 0.0
) -> tuple[float, float]:
    """Mean and 90th percentile of the prefill's own time, no queue; `transfer_s`: added to what is offloaded."""
    remote = RequestWork(lambda length: what.remote_s(length) + transfer_s(length), what.local_s, what.kv_bytes)
    (classes,) = expected(LENGTHS_CASE, remote, [threshold])
    mean = classes.share * classes.remote_s + (1 - classes.share) * classes.local_s
    times = sorted(
        remote.remote_s(length) if length > threshold else remote.local_s(length) for length in _sample()
    )
    rank = 9 * len(times) // 10
    return mean, (times[rank - 1] + times[rank]) / 2


@cache
def _sample() -> tuple[float, ...]:
    """Lengths of equal likelihood."""
    return tuple(LENGTHS_CASE.quantile((at + 0.5) / 1000) for at in range(1000))
