"""KV of hybrid models: bytes of a prompt, and what a prefill gives off (section 2, Tables 3 and 5)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost import Analytic, compile_cost, engine_coefficients, facts_of, hardware_named
from isthmus.core.cost.offload import kv_throughput
from isthmus.core.types import NS_PER_S
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.prfaas.case import MEASURED_LENGTHS, h200_points, kv_bytes
from isthmus.lab.papers.prfaas.configs import CONFIGS
from isthmus.lab.papers.prfaas.interpolation import Points, Times, quadratic
from isthmus.lab.papers.prfaas.published import GBPS, LENGTHS, MEBI, PROFILE, THROUGHPUT
from isthmus.lab.papers.table import Figures, PaperCell, Table, compare

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
_SIZE_COLUMNS = ("KV (B/token)", "fixed (MiB)", *(f"{length} (MiB)" for length in LENGTHS))


def _measure_sizes(lab: Lab) -> Iterator[PaperCell]:
    for name, figures in PUBLISHED_SIZES.items():
        facts = facts_of(CONFIGS[name])
        prompts = [facts.prompt_bytes(length) for length in LENGTHS.values()]
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
    rates = zip(LENGTHS.values(), THROUGHPUT[name], strict=True)
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
                kv_throughput(facts.prompt_bytes(length), times(length)) / GBPS for length in LENGTHS.values()
            )
            yield from compare(f"{name}, {how}", _gbps(figures), _gbps(tuple(rates)))


def _gbps(figures: tuple[float, ...]) -> Figures:
    return {f"{length} (Gbps)": figure for length, figure in zip(LENGTHS, figures, strict=True)}


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
        points, sheet = dict(zip(LENGTHS, implied_points(name), strict=True)), _data_sheet(name)
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
