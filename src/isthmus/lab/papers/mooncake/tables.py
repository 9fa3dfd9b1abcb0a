"""Four ways to choose the prefill node (FAST'25, Figure 5)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import correlation, fmean, pstdev

from isthmus.core.cost import NodeCost, compile_cost
from isthmus.core.types import NS_PER_S
from isthmus.lab.papers.lab import LOAD_BIN_S, Lab, Loads, PaperOutcome, Trace, Variant
from isthmus.lab.papers.mooncake.cluster import (
    NIC_GBPS,
    SYSTEMS,
    TTFT_LIMIT_S,
    VLLM_SETUP,
    curve,
    mooncake,
    replay,
)
from isthmus.lab.papers.table import Figures, PaperCell, Table, compare, on_trace
from isthmus.lab.sim.spread import nearest_rank

_POLICIES_SCHEDULING = {
    "random": "random",
    "load balancing": "least_loaded",
    "local cache aware": "local_aware",
    "global cache aware": "mooncake",
}

_PUBLISHED_SCHEDULING: dict[str, Figures] = {
    "random": {"mean (s)": 19.65, "median (s)": 13.7, "P75 (s)": 29.3},
    "load balancing": {"mean (s)": 5.27, "median (s)": 3.56, "P75 (s)": 7.4},
    "local cache aware": {"mean (s)": 3.58, "median (s)": 2.16, "P75 (s)": 5.1},
    "global cache aware": {"mean (s)": 3.07, "median (s)": 1.72, "P75 (s)": 4.1},
}


def _measure_scheduling(lab: Lab) -> Iterator[PaperCell]:
    def row(trace: Trace, name: str) -> Figures:
        outcome = lab.run(Variant(trace), mooncake(policy=_POLICIES_SCHEDULING[name]), name)
        ordered = sorted(outcome.ttft_s)
        return {
            "mean (s)": sum(ordered) / len(ordered),
            "median (s)": nearest_rank(ordered, 50),
            "P75 (s)": nearest_rank(ordered, 75),
        }

    yield from on_trace(lab, Trace.CONVERSATION, _PUBLISHED_SCHEDULING, row)


SCHEDULING = Table(
    name="mooncake-scheduling",
    title="TTFT by scheduling policy",
    source="FAST'25, Figure 5",
    setup=(
        "8P8D, the conversation trace at its own speed. Neither the split of the paper's 16 nodes nor its "
        "arrival rate nor the balancing threshold (here 1) is published, so the order is what can be "
        "compared."
    ),
    measure=_measure_scheduling,
    traces=(Trace.CONVERSATION,),
)


# One cache for all prefill nodes against one for each (FAST'25, Figure 10).


_POLICIES_GLOBAL_CACHE = {"local": "local_aware", "global": "mooncake"}


def _figures_global_cache(hit_rate: float, gpu_s: float) -> Figures:
    return {"hit rate (%)": hit_rate, "GPU time (s)": gpu_s}


_PUBLISHED_GLOBAL_CACHE = {
    Trace.CONVERSATION: {
        "local": _figures_global_cache(16.9, 1.379),
        "global": _figures_global_cache(37.5, 1.050),
    },
    Trace.TOOLAGENT: {
        "local": _figures_global_cache(42.0, 0.703),
        "global": _figures_global_cache(58.1, 0.521),
    },
    Trace.SYNTHETIC: {
        "local": _figures_global_cache(26.4, 1.497),
        "global": _figures_global_cache(62.2, 0.783),
    },
}


def _measure_global_cache(lab: Lab) -> Iterator[PaperCell]:
    def row(trace: Trace, name: str) -> Figures:
        # With one output token the decode node has nothing to do.
        deployment = mooncake(prefill=10, decode=1, policy=_POLICIES_GLOBAL_CACHE[name])
        outcome = lab.run(Variant(trace, one_token=True), deployment, f"{name} cache")
        times_s = outcome.prefill_s
        return _figures_global_cache(100 * outcome.summary.hit_rate_tokens, sum(times_s) / len(times_s))

    for trace, published in _PUBLISHED_GLOBAL_CACHE.items():
        yield from on_trace(lab, trace, published, row)


GLOBAL_CACHE = Table(
    name="mooncake-global-cache",
    title="Global against local cache",
    source="FAST'25, Figure 10",
    setup=(
        "10 prefill nodes with 3 million tokens of cache each, one output token, each trace at its own speed. "
        "Local: lowest TTFT with what each node has; how the paper chose nodes there is not said, and a "
        "choice that looks at caches hits more. Global: Algorithm 1."
    ),
    measure=_measure_global_cache,
    traces=tuple(_PUBLISHED_GLOBAL_CACHE),
)


# How much network the global cache needs (FAST'25, Figure 13).


_RECOMPUTE = "recompute"
_TTFT_S = {24: 5.09, 40: 2.40, 80: 1.73, 100: 1.60, 160: 1.41, 320: 1.25, 400: 1.25}
_TRANSFER_S = {24: 3.65, 40: 1.13, 80: 0.51, 100: 0.40, 160: 0.25}

_PUBLISHED_NETWORK: dict[str, Figures] = {
    **{
        f"{gbps} Gbps": {"mean TTFT (s)": ttft_s}
        | ({"mean transfer (s)": _TRANSFER_S[gbps]} if gbps in _TRANSFER_S else {})
        for gbps, ttft_s in _TTFT_S.items()
    },
    _RECOMPUTE: {"mean TTFT (s)": 2.62},
}


def _measure_network(lab: Lab) -> Iterator[PaperCell]:
    def row(trace: Trace, name: str) -> Figures:
        if name == _RECOMPUTE:
            deployment = mooncake(policy="local_aware")
        else:
            deployment = mooncake(network={"node_gbps": float(name.split()[0])})
        outcome = lab.run(Variant(trace), deployment, name)
        fetches = outcome.fetch_s
        return {
            "mean TTFT (s)": sum(outcome.ttft_s) / len(outcome.ttft_s),
            "mean transfer (s)": sum(fetches) / len(fetches) if fetches else 0.0,
        }

    yield from on_trace(lab, Trace.SYNTHETIC, _PUBLISHED_NETWORK, row)


NETWORK = Table(
    name="mooncake-network",
    title="TTFT and transfer time by network bandwidth",
    source="FAST'25, Figure 13",
    setup=(
        "8P8D with Algorithm 1, the synthetic trace at its own speed; so many Gbps each way at each node, "
        "shared by fetches and hand-overs. Recompute: local cache aware, nothing is fetched."
    ),
    measure=_measure_network,
    traces=(Trace.SYNTHETIC,),
)


# What one request costs by its length (FAST'25, Figure 14).


_LENGTHS = {"8k": 8_192, "16k": 16_384, "32k": 32_768, "64k": 65_536, "128k": 131_072}
_OUTPUT = 128

_PUBLISHED_REQUEST_COST: dict[str, tuple[float, ...]] = {
    "prefill, 0 % cached": (1.00, 2.05, 4.48, 10.58, 27.5),
    "prefill, 95 % cached": (0.134, 0.227, 0.406, 0.882, 2.33),
    "decode of 128 tokens": (3.39, 3.43, 3.52, 3.66, 3.94),
    "total, 0 % cached": (4.50, 5.65, 8.29, 14.74, 32.4),
    "total, 95 % cached": (3.65, 3.86, 4.25, 5.03, 7.25),
}

# What a cached prefix costs beside the computing of the rest: a fit of the figure's second row. The simulator loads
# layer by layer while it computes (section 3 of the paper), so there most of it is hidden.
_PREFIX_FIXED_S, _PREFIX_BYTES_PER_S = 0.055, 135e9


def _measure_request_cost(lab: Lab) -> Iterator[PaperCell]:
    cost = compile_cost(curve())
    for row, figures in _PUBLISHED_REQUEST_COST.items():
        yield from compare(
            row,
            _columns_request_cost(figures),
            _columns_request_cost(tuple(_seconds(cost, row, n) for n in _LENGTHS.values())),
        )


def _columns_request_cost(figures: tuple[float, ...]) -> Figures:
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


REQUEST_COST = Table(
    name="mooncake-request-cost",
    title="Time of one request by prompt length",
    source="FAST'25, Figure 14",
    setup=(
        "The cost curve alone, nothing simulated. A cached prefix also takes 0.055 s and its bytes at 135 "
        "GB/s, a fit of the second row; the total has the hand-over at 800 Gbps in it. The decode row is "
        "where the decode constants come from, so it agrees by construction."
    ),
    measure=_measure_request_cost,
)


# How to split 16 nodes into prefill and decode (FAST'25, Figure 15).


def _figures_ratio(effective: float, ttft_s: float, tbt_ms: float) -> Figures:
    return {"effective (%)": effective, "TTFT (s)": ttft_s, "TBT (ms)": tbt_ms}


_PUBLISHED_RATIO = {
    "5P11D": _figures_ratio(77.7, 5.74, 31.5),
    "6P10D": _figures_ratio(97.2, 1.71, 31.8),
    "7P9D": _figures_ratio(99.1, 1.30, 32.9),
    "8P8D": _figures_ratio(99.0, 1.19, 35.0),
    "9P7D": _figures_ratio(99.2, 1.12, 38.2),
    "10P6D": _figures_ratio(98.4, 1.11, 44.2),
    "11P5D": _figures_ratio(86.1, 1.14, 58.3),
}

_TTFT_LIMIT_S, _TBT_LIMIT_S_RATIO = 10.0, 0.1


def _measure_ratio(lab: Lab) -> Iterator[PaperCell]:
    def row(trace: Trace, name: str) -> Figures:
        prefill, decode = map(int, name.removesuffix("D").split("P"))
        outcome = lab.run(Variant(trace), mooncake(prefill, decode), name)
        several = [tbt_s for tbt_s in outcome.tbt_s if tbt_s]  # with one token there is no gap
        return _figures_ratio(
            100 * outcome.within(_TTFT_LIMIT_S, _TBT_LIMIT_S_RATIO),
            sum(outcome.ttft_s) / len(outcome.ttft_s),
            1000 * sum(several) / max(1, len(several)),
        )

    yield from on_trace(lab, Trace.SYNTHETIC, _PUBLISHED_RATIO, row)


RATIO = Table(
    name="mooncake-ratio",
    title="Effective requests, TTFT and TBT by the split of 16 nodes",
    source="FAST'25, Figure 15",
    setup=(
        "Algorithm 1, the synthetic trace at its own speed, TTFT <= 10 s and TBT <= 100 ms. One constant of "
        "the cost curve, what a further sequence adds to an iteration, was fitted to the TBT column on a "
        "generated workload."
    ),
    measure=_measure_ratio,
    traces=(Trace.SYNTHETIC,),
)


# Effective request capacity (FAST'25): the share of requests inside both limits.


_LIMITS_MS = (100, 200, 300)
_GAIN = "gain over the best baseline"

_PUBLISHED_CAPACITY: dict[Trace, dict[str, tuple[float, float, float]]] = {
    Trace.CONVERSATION: {
        "Mooncake": (96.6, 100.0, 100.0),
        "vLLM": (16.1, 38.8, 62.8),
        "vLLM prefix caching": (15.1, 34.3, 56.0),
        "vLLM chunked prefill": (9.4, 28.8, 55.4),
        _GAIN: (498.0, 157.0, 59.0),
    },
    Trace.TOOLAGENT: {
        "Mooncake": (93.2, 99.8, 100.0),
        "vLLM": (43.1, 45.3, 49.8),
        "vLLM prefix caching": (56.5, 70.0, 81.3),
        "vLLM chunked prefill": (18.6, 21.3, 40.4),
        _GAIN: (64.0, 42.0, 22.0),
    },
    Trace.SYNTHETIC: {
        "Mooncake": (99.6, 100.0, 100.0),
        "vLLM": (61.3, 71.0, 78.1),
        "vLLM prefix caching": (61.0, 70.8, 77.2),
        "vLLM chunked prefill": (46.6, 57.3, 69.5),
        _GAIN: (62.0, 40.0, 28.0),
    },
}


def _measure_capacity(lab: Lab) -> Iterator[PaperCell]:
    def row(trace: Trace, name: str) -> Figures:
        if name == _GAIN:
            return _gain(lab, trace)
        return _columns_capacity(*_shares(lab, trace, name))

    for trace, rows in _PUBLISHED_CAPACITY.items():
        published = {name: _columns_capacity(*figures) for name, figures in rows.items()}
        yield from on_trace(lab, trace, published, row)


def _gain(lab: Lab, trace: Trace) -> Figures:
    ours, *baselines = (_shares(lab, trace, system) for system in SYSTEMS)
    best = [max(shares) for shares in zip(*baselines, strict=True)]
    return _columns_capacity(
        *(100 * (share / other - 1) if other else None for share, other in zip(ours, best, strict=True))
    )


def _shares(lab: Lab, trace: Trace, system: str) -> list[float]:
    outcome = replay(lab, trace, system)
    return [100 * outcome.within(TTFT_LIMIT_S, limit_ms / 1000) for limit_ms in _LIMITS_MS]


def _columns_capacity(*figures: float | None) -> Figures:
    return {f"TBT <= {limit_ms} ms (%)": figure for limit_ms, figure in zip(_LIMITS_MS, figures, strict=True)}


CAPACITY = Table(
    name="mooncake-capacity",
    title="Requests with TTFT <= 30 s and TBT below a limit",
    source="FAST'25, end-to-end results",
    setup=(
        "8P8D against 16 vLLM nodes, each trace at its own speed: the paper's arrival rate is not published. "
        f"{VLLM_SETUP}"
    ),
    measure=_measure_capacity,
    traces=tuple(_PUBLISHED_CAPACITY),
)


# GPU time of a prefill (FAST'25): how much of it the cache saves.


_PUBLISHED_PREFILL_TIME = {
    Trace.CONVERSATION: (1.062, 1.661, 1.523, 2.021),
    Trace.TOOLAGENT: (0.527, 1.117, 0.740, 1.415),
    Trace.SYNTHETIC: (0.733, 2.022, 1.896, 2.436),
}
"""In the order of `SYSTEMS`."""

_COLUMN = "mean (s)"


def _measure_prefill_time(lab: Lab) -> Iterator[PaperCell]:
    def row(trace: Trace, system: str) -> Figures:
        times_s = replay(lab, trace, system).prefill_s
        return {_COLUMN: sum(times_s) / len(times_s)}

    for trace, figures in _PUBLISHED_PREFILL_TIME.items():
        published = {system: {_COLUMN: figure} for system, figure in zip(SYSTEMS, figures, strict=True)}
        yield from on_trace(lab, trace, published, row)


PREFILL_TIME = Table(
    name="mooncake-prefill-time",
    title="GPU time of a request's prefill",
    source="FAST'25, prefill GPU time",
    setup=(
        "The runs of mooncake-capacity; the cost curve's time for the tokens that were not cached. Its 15 ms for an "
        f"iteration with prompts come from this table's last row. {VLLM_SETUP}"
    ),
    measure=_measure_prefill_time,
    traces=tuple(_PUBLISHED_PREFILL_TIME),
)


# Overload: how many requests are refused, and how early rejection makes the pools swing (arXiv, section 7).


_BASELINE, _PREDICTIVE = "baseline", "early rejection by prediction"
_ADMISSIONS = {
    _BASELINE: "baseline",
    "early rejection": "early",
    _PREDICTIVE: "predictive",
    "survival curve (ours)": "survival",
}
_PUBLISHED_REJECTIONS = {_BASELINE: 4183, "early rejection": 3771, _PREDICTIVE: 3589}

_SPEED = 2.0
_TBT_LIMIT_S_REJECTIONS = 0.1
_UNPUBLISHED = "not published"


def _replay(lab: Lab, trace: Trace, admission: str) -> PaperOutcome:
    """`decode_s`, t_d of the paper: after that a request is taken to be over, so nine of ten should be by then."""
    variant = Variant(trace, speed=_SPEED)
    outputs = sorted(each.output_tokens for each in lab.workload(variant).requests)
    decode_s = nearest_rank(outputs, 90) * _TBT_LIMIT_S_REJECTIONS
    rule: dict[str, str | float] = {"name": _ADMISSIONS[admission]}
    if admission == _PREDICTIVE:
        rule["decode_s"] = decode_s
    cluster = mooncake(scheduling={"admission": rule})
    return lab.run(variant, cluster, admission)


# Table 3.


def _published(name: str, *, of_this_trace: bool) -> Figures:
    refused = _PUBLISHED_REJECTIONS.get(name) if of_this_trace else None
    less = None if refused is None else 100 * (refused / _PUBLISHED_REJECTIONS[_BASELINE] - 1)
    return _figures_rejections(name, refused, less, None, None)


def _figures_rejections(
    name: str, refused: float | None, less: float | None, wasted: float | None, effective: float | None
) -> Figures:
    figures = {"refused": refused, "prefill work wasted (%)": wasted, "within both limits (%)": effective}
    return figures if name == _BASELINE else {"refused": refused, "refused, to baseline (%)": less, **figures}


def _measure_rejections(lab: Lab) -> Iterator[PaperCell]:
    def row(trace: Trace, admission: str) -> Figures:
        ours = _replay(lab, trace, admission).summary
        refused = sum(ours.rejected.values())
        baseline = sum(_replay(lab, trace, _BASELINE).summary.rejected.values())
        less = 100 * (refused / baseline - 1) if baseline else None
        return _figures_rejections(
            admission, refused, less, 100 * ours.waste.refused.share, 100 * ours.goodput_share
        )

    for trace in (Trace.ARXIV, Trace.CONVERSATION):
        rows = {name: _published(name, of_this_trace=trace is Trace.ARXIV) for name in _ADMISSIONS}
        yield from on_trace(lab, trace, rows, row, unpublished=_UNPUBLISHED)


REJECTIONS = Table(
    name="mooncake-rejections",
    title="Refused requests in overload",
    source="arXiv 2407.00079, Table 3",
    setup=(
        "8P8D, twice the trace's speed, Algorithm 1, TTFT <= 30 s and TBT <= 100 ms. Neither the limits of "
        "the test nor the decode time t_d nor the load threshold is published: t_d is the time that nine of "
        "ten answers of the trace take at the TBT limit, the threshold 1. The conversation trace, not in that "
        "paper, is shown beside the paper's own."
    ),
    measure=_measure_rejections,
    traces=(Trace.ARXIV, Trace.CONVERSATION),
)


# Figures 9 and 10: the load of both pools over time.

_COLUMNS = (
    "prefill load: deviation / mean (%)",
    "prefill load: change in 5 s / mean (%)",
    "prefill load: swings an hour",
    "correlation with the decode load",
)


def _measure_fluctuation(lab: Lab) -> Iterator[PaperCell]:
    def row(trace: Trace, admission: str) -> Figures:
        return dict(zip(_COLUMNS, swings(_replay(lab, trace, admission).loads), strict=True))

    for trace in (Trace.ARXIV, Trace.CONVERSATION):
        rows: dict[str, Figures] = {name: dict.fromkeys(_COLUMNS) for name in _ADMISSIONS}
        yield from on_trace(lab, trace, rows, row, unpublished=_UNPUBLISHED)


def swings(loads: Loads) -> tuple[float, float, float, float | None]:
    """How the loads of the pools move, the first tenth of the time left out.

    Of the prefill load: deviation and mean change from bin to bin, in percent of the mean; and how often an hour it
    goes from 1.1 to 0.8 of it. Last, its correlation with the decode load: rejecting by a decode load that is seen
    too early makes the pools swing in opposite phase.
    """
    first = len(loads.prefill) // 10
    prefill, decode = loads.prefill[first:], loads.decode[first:]
    if len(prefill) < 2 or not (pstdev(decode) and pstdev(prefill)):
        return 0.0, 0.0, 0.0, None
    mean = fmean(prefill)
    change = fmean(abs(after - before) for before, after in pairwise(prefill))
    hours = len(prefill) * LOAD_BIN_S / 3600
    together = correlation(decode, prefill)
    return 100 * pstdev(prefill) / mean, 100 * change / mean, _num_falls(prefill, mean) / hours, together


def _num_falls(values: list[float], mean: float) -> int:
    """How often the values come from a tenth above the mean to a fifth below it."""
    high, count = False, 0
    for value in values:
        if value > 1.1 * mean:
            high = True
        elif high and value < 0.8 * mean:
            high = False
            count += 1
    return count


FLUCTUATION = Table(
    name="mooncake-fluctuation",
    title="How the load of the pools swings under early rejection",
    source="arXiv 2407.00079, Figures 9 and 10",
    setup=(
        "The runs of mooncake-rejections. The paper shows curves of 20 machines without numbers; here are, of "
        "the prefill nodes at work in bins of 5 s, deviation, mean change from bin to bin and falls from 1.1 "
        "to 0.8 of the mean, and their correlation with the requests in decode batches, which swings in "
        "opposite phase make negative."
    ),
    measure=_measure_fluctuation,
    traces=(Trace.ARXIV, Trace.CONVERSATION),
)
