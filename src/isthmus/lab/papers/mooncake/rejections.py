"""Overload: how many requests are refused, and how early rejection makes the pools swing (arXiv, section 7)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import correlation, fmean, pstdev

from isthmus.lab.papers.lab import LOAD_BIN_S, Lab, Loads, Outcome, Trace, Variant
from isthmus.lab.papers.mooncake.cluster import mooncake
from isthmus.lab.papers.table import Cell, Figures, Table, on_trace
from isthmus.lab.sim.spread import nearest_rank

_BASELINE, _PREDICTIVE = "baseline", "early rejection by prediction"
_ADMISSIONS = {
    _BASELINE: "baseline",
    "early rejection": "early",
    _PREDICTIVE: "predictive",
    "survival curve (ours)": "survival",
}
_PUBLISHED = {_BASELINE: 4183, "early rejection": 3771, _PREDICTIVE: 3589}

_SPEED = 2.0
_TBT_LIMIT_S = 0.1
_UNPUBLISHED = "not published"


def _replay(lab: Lab, trace: Trace, admission: str) -> Outcome:
    """`decode_s`, t_d of the paper: after that a request is taken to be over, so nine of ten should be by then."""
    variant = Variant(trace, speed=_SPEED)
    outputs = sorted(each.output_tokens for each in lab.workload(variant).requests)
    decode_s = nearest_rank(outputs, 90) * _TBT_LIMIT_S
    rule: dict[str, str | float] = {"name": _ADMISSIONS[admission]}
    if admission == _PREDICTIVE:
        rule["decode_s"] = decode_s
    cluster = mooncake(scheduling={"admission": rule})
    return lab.run(variant, cluster, admission)


# Table 3.


def _published(name: str, *, of_this_trace: bool) -> Figures:
    refused = _PUBLISHED.get(name) if of_this_trace else None
    less = None if refused is None else 100 * (refused / _PUBLISHED[_BASELINE] - 1)
    return _figures(name, refused, less, None, None)


def _figures(
    name: str, refused: float | None, less: float | None, wasted: float | None, effective: float | None
) -> Figures:
    figures = {"refused": refused, "prefill work wasted (%)": wasted, "within both limits (%)": effective}
    return figures if name == _BASELINE else {"refused": refused, "refused, to baseline (%)": less, **figures}


def _measure(lab: Lab) -> Iterator[Cell]:
    def row(trace: Trace, admission: str) -> Figures:
        ours = _replay(lab, trace, admission).summary
        refused = sum(ours.rejected.values())
        baseline = sum(_replay(lab, trace, _BASELINE).summary.rejected.values())
        less = 100 * (refused / baseline - 1) if baseline else None
        return _figures(admission, refused, less, 100 * ours.waste.refused.share, 100 * ours.goodput_share)

    for trace in (Trace.ARXIV, Trace.CONVERSATION):
        rows = {name: _published(name, of_this_trace=trace is Trace.ARXIV) for name in _ADMISSIONS}
        yield from on_trace(lab, trace, rows, row, unpublished=_UNPUBLISHED)


TABLE = Table(
    name="mooncake-rejections",
    title="Refused requests in overload",
    source="arXiv 2407.00079, Table 3",
    setup=(
        "8P8D, twice the trace's speed, Algorithm 1, TTFT <= 30 s and TBT <= 100 ms. Neither the limits of "
        "the test nor the decode time t_d nor the load threshold is published: t_d is the time that nine of "
        "ten answers of the trace take at the TBT limit, the threshold 1. The conversation trace, not in that "
        "paper, is shown beside the paper's own."
    ),
    measure=_measure,
    traces=(Trace.ARXIV, Trace.CONVERSATION),
)


# Figures 9 and 10: the load of both pools over time.

_COLUMNS = (
    "prefill load: deviation / mean (%)",
    "prefill load: change in 5 s / mean (%)",
    "prefill load: swings an hour",
    "correlation with the decode load",
)


def _measure_fluctuation(lab: Lab) -> Iterator[Cell]:
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
