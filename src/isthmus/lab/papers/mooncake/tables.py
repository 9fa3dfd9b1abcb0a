"""Mooncake's tables of simulated clusters and of its cost curve (FAST'25 and arXiv 2407.00079)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from isthmus.lab.papers.table import Figure, PaperCell, cells, on_traces, table
from isthmus.lab.sim.spread import nearest_rank

_CONVERSATION, _TOOLAGENT, _SYNTHETIC, _ARXIV = (
    Trace.CONVERSATION,
    Trace.TOOLAGENT,
    Trace.SYNTHETIC,
    Trace.ARXIV,
)
_UNPUBLISHED = "not published"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_SCHEDULING_POLICIES = {
    "random": "random",
    "load balancing": "least_loaded",
    "local cache aware": "local_aware",
    "global cache aware": "mooncake",
}
_SCHEDULING = {
    "random": (19.65, 13.7, 29.3),
    "load balancing": (5.27, 3.56, 7.4),
    "local cache aware": (3.58, 2.16, 5.1),
    "global cache aware": (3.07, 1.72, 4.1),
}


@table(
    "mooncake-scheduling",
    title="TTFT by scheduling policy",
    source="FAST'25, Figure 5",
    setup=(
        "8P8D, the conversation trace at its own speed. Neither the split of the paper's 16 nodes nor its "
        "arrival rate nor the balancing threshold (here 1) is published, so the order is what can be "
        "compared."
    ),
    traces=(_CONVERSATION,),
)
def scheduling_table(lab: Lab) -> Iterator[PaperCell]:
    def measure(trace: Trace, name: str) -> Sequence[float]:
        outcome = lab.run(Variant(trace), mooncake(policy=_SCHEDULING_POLICIES[name]), name)
        ordered = sorted(outcome.ttft_s)
        return _mean(ordered), nearest_rank(ordered, 50), nearest_rank(ordered, 75)

    return on_traces(lab, ("mean (s)", "median (s)", "P75 (s)"), {_CONVERSATION: _SCHEDULING}, measure)


_GLOBAL_CACHE = {
    _CONVERSATION: {"local": (16.9, 1.379), "global": (37.5, 1.050)},
    _TOOLAGENT: {"local": (42.0, 0.703), "global": (58.1, 0.521)},
    _SYNTHETIC: {"local": (26.4, 1.497), "global": (62.2, 0.783)},
}


@table(
    "mooncake-global-cache",
    title="Global against local cache",
    source="FAST'25, Figure 10",
    setup=(
        "10 prefill nodes with 3 million tokens of cache each, one output token, each trace at its own speed. "
        "Local: lowest TTFT with what each node has; how the paper chose nodes there is not said, and a "
        "choice that looks at caches hits more. Global: Algorithm 1."
    ),
    traces=_GLOBAL_CACHE,
)
def global_cache_table(lab: Lab) -> Iterator[PaperCell]:
    """Prefill nodes alone count: with one output token the decode node has nothing to do."""

    def measure(trace: Trace, name: str) -> Sequence[float]:
        policy = {"local": "local_aware", "global": "mooncake"}[name]
        deployment = mooncake(prefill=10, decode=1, policy=policy)
        outcome = lab.run(Variant(trace, one_token=True), deployment, f"{name} cache")
        return 100 * outcome.summary.hit_rate_tokens, _mean(outcome.prefill_s)

    return on_traces(lab, ("hit rate (%)", "GPU time (s)"), _GLOBAL_CACHE, measure)


_RECOMPUTE = "recompute"
_NETWORK: dict[str, Sequence[float]] = {
    "24 Gbps": (5.09, 3.65),
    "40 Gbps": (2.40, 1.13),
    "80 Gbps": (1.73, 0.51),
    "100 Gbps": (1.60, 0.40),
    "160 Gbps": (1.41, 0.25),
    "320 Gbps": (1.25,),
    "400 Gbps": (1.25,),
    _RECOMPUTE: (2.62,),
}


@table(
    "mooncake-network",
    title="TTFT and transfer time by network bandwidth",
    source="FAST'25, Figure 13",
    setup=(
        "8P8D with Algorithm 1, the synthetic trace at its own speed; so many Gbps each way at each node, "
        "shared by fetches and hand-overs. Recompute: local cache aware, nothing is fetched."
    ),
    traces=(_SYNTHETIC,),
)
def network_table(lab: Lab) -> Iterator[PaperCell]:
    def measure(trace: Trace, name: str) -> Sequence[float]:
        if name == _RECOMPUTE:
            deployment = mooncake(policy="local_aware")
        else:
            deployment = mooncake(network={"node_gbps": float(name.split()[0])})
        outcome = lab.run(Variant(trace), deployment, name)
        return _mean(outcome.ttft_s), _mean(outcome.fetch_s) if outcome.fetch_s else 0.0

    return on_traces(lab, ("mean TTFT (s)", "mean transfer (s)"), {_SYNTHETIC: _NETWORK}, measure)


_LENGTHS = {"8k": 8_192, "16k": 16_384, "32k": 32_768, "64k": 65_536, "128k": 131_072}
_OUTPUT = 128
_REQUEST_COST = {
    "prefill, 0 % cached": (1.00, 2.05, 4.48, 10.58, 27.5),
    "prefill, 95 % cached": (0.134, 0.227, 0.406, 0.882, 2.33),
    "decode of 128 tokens": (3.39, 3.43, 3.52, 3.66, 3.94),
    "total, 0 % cached": (4.50, 5.65, 8.29, 14.74, 32.4),
    "total, 95 % cached": (3.65, 3.86, 4.25, 5.03, 7.25),
}

# The cost of a cached prefix beside computing the rest: a fit of the figure's second row. The simulator loads layer by
# layer while it computes (section 3 of the paper), so there most of it is hidden.
_PREFIX_FIXED_S, _PREFIX_BYTES_PER_S = 0.055, 135e9


@table(
    "mooncake-request-cost",
    title="Time of one request by prompt length",
    source="FAST'25, Figure 14",
    setup=(
        "The cost curve alone, nothing simulated. A cached prefix also takes 0.055 s and its bytes at 135 "
        "GB/s, a fit of the second row; the total has the hand-over at 800 Gbps in it. The decode row is "
        "where the decode constants come from, so it agrees by construction."
    ),
)
def request_cost_table(lab: Lab) -> Iterator[PaperCell]:
    cost = compile_cost(curve())
    for row, figures in _REQUEST_COST.items():
        ours = {f"{label} (s)": _seconds(cost, row, length) for label, length in _LENGTHS.items()}
        yield from cells(row, ours, *figures)


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


_RATIO = {
    "5P11D": (77.7, 5.74, 31.5),
    "6P10D": (97.2, 1.71, 31.8),
    "7P9D": (99.1, 1.30, 32.9),
    "8P8D": (99.0, 1.19, 35.0),
    "9P7D": (99.2, 1.12, 38.2),
    "10P6D": (98.4, 1.11, 44.2),
    "11P5D": (86.1, 1.14, 58.3),
}


@table(
    "mooncake-ratio",
    title="Effective requests, TTFT and TBT by the split of 16 nodes",
    source="FAST'25, Figure 15",
    setup=(
        "Algorithm 1, the synthetic trace at its own speed, TTFT <= 10 s and TBT <= 100 ms. One constant of "
        "the cost curve, what a further sequence adds to an iteration, was fitted to the TBT column on a "
        "generated workload."
    ),
    traces=(_SYNTHETIC,),
)
def ratio_table(lab: Lab) -> Iterator[PaperCell]:
    def measure(trace: Trace, name: str) -> Sequence[float]:
        prefill, decode = map(int, name.removesuffix("D").split("P"))
        outcome = lab.run(Variant(trace), mooncake(prefill, decode), name)
        several = [tbt_s for tbt_s in outcome.tbt_s if tbt_s]  # with one token there is no gap
        effective = outcome.within(ttft_s=10.0, tbt_s=0.1)
        return 100 * effective, _mean(outcome.ttft_s), 1000 * sum(several) / max(1, len(several))

    return on_traces(lab, ("effective (%)", "TTFT (s)", "TBT (ms)"), {_SYNTHETIC: _RATIO}, measure)


_LIMITS_MS = (100, 200, 300)
_GAIN = "gain over the best baseline"
_CAPACITY = {
    _CONVERSATION: {
        "Mooncake": (96.6, 100.0, 100.0),
        "vLLM": (16.1, 38.8, 62.8),
        "vLLM prefix caching": (15.1, 34.3, 56.0),
        "vLLM chunked prefill": (9.4, 28.8, 55.4),
        _GAIN: (498.0, 157.0, 59.0),
    },
    _TOOLAGENT: {
        "Mooncake": (93.2, 99.8, 100.0),
        "vLLM": (43.1, 45.3, 49.8),
        "vLLM prefix caching": (56.5, 70.0, 81.3),
        "vLLM chunked prefill": (18.6, 21.3, 40.4),
        _GAIN: (64.0, 42.0, 22.0),
    },
    _SYNTHETIC: {
        "Mooncake": (99.6, 100.0, 100.0),
        "vLLM": (61.3, 71.0, 78.1),
        "vLLM prefix caching": (61.0, 70.8, 77.2),
        "vLLM chunked prefill": (46.6, 57.3, 69.5),
        _GAIN: (62.0, 40.0, 28.0),
    },
}


@table(
    "mooncake-capacity",
    title="Requests with TTFT <= 30 s and TBT below a limit",
    source="FAST'25, end-to-end results",
    setup=(
        "8P8D against 16 vLLM nodes, each trace at its own speed: the paper's arrival rate is not published. "
        f"{VLLM_SETUP}"
    ),
    traces=_CAPACITY,
)
def capacity_table(lab: Lab) -> Iterator[PaperCell]:
    def shares(trace: Trace, system: str) -> list[float]:
        outcome = replay(lab, trace, system)
        return [100 * outcome.within(TTFT_LIMIT_S, limit_ms / 1000) for limit_ms in _LIMITS_MS]

    def measure(trace: Trace, name: str) -> Sequence[Figure]:
        if name != _GAIN:
            return shares(trace, name)
        ours, *baselines = (shares(trace, system) for system in SYSTEMS)
        best = map(max, *baselines)
        return [100 * (share / other - 1) if other else None for share, other in zip(ours, best, strict=True)]

    columns = [f"TBT <= {limit_ms} ms (%)" for limit_ms in _LIMITS_MS]
    return on_traces(lab, columns, _CAPACITY, measure)


_PREFILL_TIME = {
    trace: {system: (figure,) for system, figure in zip(SYSTEMS, figures, strict=True)}
    for trace, figures in {
        _CONVERSATION: (1.062, 1.661, 1.523, 2.021),
        _TOOLAGENT: (0.527, 1.117, 0.740, 1.415),
        _SYNTHETIC: (0.733, 2.022, 1.896, 2.436),
    }.items()
}


@table(
    "mooncake-prefill-time",
    title="GPU time of a request's prefill",
    source="FAST'25, prefill GPU time",
    setup=(
        "The runs of mooncake-capacity; the cost curve's time for the tokens that were not cached. Its 15 ms for an "
        f"iteration with prompts come from this table's last row. {VLLM_SETUP}"
    ),
    traces=_PREFILL_TIME,
)
def prefill_time_table(lab: Lab) -> Iterator[PaperCell]:
    def measure(trace: Trace, system: str) -> Sequence[float]:
        return (_mean(replay(lab, trace, system).prefill_s),)

    return on_traces(lab, ("mean (s)",), _PREFILL_TIME, measure)


# Overload: refused requests, and the swings of the pools' load under early rejection (arXiv, section 7).

_BASELINE, _PREDICTIVE = "baseline", "early rejection by prediction"
_ADMISSIONS = {
    _BASELINE: "baseline",
    "early rejection": "early",
    _PREDICTIVE: "predictive",
    "survival curve (ours)": "survival",
}
_REFUSED = {_BASELINE: 4183, "early rejection": 3771, _PREDICTIVE: 3589}
_OVERLOADED = (_ARXIV, _CONVERSATION)


def _overloaded(lab: Lab, trace: Trace, admission: str) -> PaperOutcome:
    """A trace at twice its speed. The paper's t_d, after which a request counts as over, is not published: here the
    time that nine of ten answers take at the TBT limit of 0.1 s."""
    variant = Variant(trace, speed=2.0)
    outputs = sorted(each.output_tokens for each in lab.workload(variant).requests)
    rule: dict[str, str | float] = {"name": _ADMISSIONS[admission]}
    if admission == _PREDICTIVE:
        rule["decode_s"] = nearest_rank(outputs, 90) * 0.1
    return lab.run(variant, mooncake(scheduling={"admission": rule}), admission)


@table(
    "mooncake-rejections",
    title="Refused requests in overload",
    source="arXiv 2407.00079, Table 3",
    setup=(
        "8P8D, twice the trace's speed, Algorithm 1, TTFT <= 30 s and TBT <= 100 ms. Neither the limits of "
        "the test nor the decode time t_d nor the load threshold is published: t_d is the time that nine of "
        "ten answers of the trace take at the TBT limit, the threshold 1. The conversation trace, not in that "
        "paper, is shown beside the paper's own."
    ),
    traces=_OVERLOADED,
    unpublished=_UNPUBLISHED,
)
def rejections_table(lab: Lab) -> Iterator[PaperCell]:
    def measure(trace: Trace, admission: str) -> Sequence[Figure]:
        summary = _overloaded(lab, trace, admission).summary
        refused = sum(summary.rejected.values())
        baseline = sum(_overloaded(lab, trace, _BASELINE).summary.rejected.values())
        less = 100 * (refused / baseline - 1) if baseline else None
        return refused, less, 100 * summary.waste.refused.share, 100 * summary.goodput_share

    columns = ("refused", "refused, to baseline (%)", "prefill work wasted (%)", "within both limits (%)")
    published: dict[Trace, dict[str, Sequence[Figure]]] = {trace: {} for trace in _OVERLOADED}
    for name in _ADMISSIONS:
        refused = _REFUSED.get(name)
        less = None if refused is None else 100 * (refused / _REFUSED[_BASELINE] - 1)
        published[_ARXIV][name] = refused, less, None, None
        published[_CONVERSATION][name] = [None] * 4
    for cell in on_traces(lab, columns, published, measure):
        if not (cell.row.endswith(f", {_BASELINE}") and "to baseline" in cell.column):
            yield cell


@table(
    "mooncake-fluctuation",
    title="How the load of the pools swings under early rejection",
    source="arXiv 2407.00079, Figures 9 and 10",
    setup=(
        "The runs of mooncake-rejections. The paper shows curves of 20 machines without numbers; here are, of "
        "the prefill nodes at work in bins of 5 s, deviation, mean change from bin to bin and falls from 1.1 "
        "to 0.8 of the mean, and their correlation with the requests in decode batches, which swings in "
        "opposite phase make negative."
    ),
    traces=_OVERLOADED,
    unpublished=_UNPUBLISHED,
)
def fluctuation_table(lab: Lab) -> Iterator[PaperCell]:
    def measure(trace: Trace, admission: str) -> Sequence[Figure]:
        return swings(_overloaded(lab, trace, admission).loads)

    columns = (
        "prefill load: deviation / mean (%)",
        "prefill load: change in 5 s / mean (%)",
        "prefill load: swings an hour",
        "correlation with the decode load",
    )
    published = {trace: {name: [None] * 4 for name in _ADMISSIONS} for trace in _OVERLOADED}
    return on_traces(lab, columns, published, measure)


def swings(loads: Loads) -> tuple[float, float, float, float | None]:
    """Fluctuation of the pools' loads, without the first tenth of the time.

    Of the prefill load: deviation and mean change from bin to bin, in percent of the mean, and falls an hour from 1.1
    to 0.8 of it. Last, its correlation with the decode load: rejecting by a decode load that is seen too early makes
    the pools swing in opposite phase.
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
    """Number of falls from a tenth above the mean to a fifth below it."""
    high, count = False, 0
    for value in values:
        if value > 1.1 * mean:
            high = True
        elif high and value < 0.8 * mean:
            high = False
            count += 1
    return count
