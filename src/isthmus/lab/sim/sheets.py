"""A simulation's summary as sheets, the same on the terminal and in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isthmus.lab.sim.spread import Percentiles, spread
from isthmus.lab.sim.summary import Loss, RequestGroup, ReuseUse, Summary, ThresholdUse
from isthmus.lab.sim.workloads import Measured
from isthmus.sheet import Cell, Sheet, numbers, texts

_MOST_GROUPS = 20


def summary_sheets(summary: Summary) -> list[Sheet]:
    """One screen: totals, times, pools, links; with several clusters also what went between them."""
    sheets = [_totals(summary), _times(summary)]
    if summary.reuse is not None:
        sheets.append(_reuse(summary.reuse))
    if summary.by_route:
        sheets.append(_routes(summary))
    sheets.append(_pools(summary))
    if summary.between_clusters:
        sheets.append(_between(summary))
    if summary.threshold is not None:
        sheets.append(_control(summary.threshold, len(summary.conversions)))
    return [*sheets, _links(summary)] if summary.links else sheets


def group_sheets(summary: Summary) -> list[Sheet]:
    """Sheets beyond one screen: requests by priority and by tenant, if there are several, and changed roles."""
    sheets = [
        _groups(name, groups)
        for name, groups in (("priority", summary.by_priority), ("tenant", summary.by_tenant))
        if groups
    ]
    if summary.conversions:
        rows = [(change.at_s, change.node, change.role) for change in summary.conversions]
        columns = (*numbers("from", unit="s", form=",.1f"), *texts("node", "role"))
        sheets.append(Sheet("Nodes that were given another role", columns, *_first(rows)))
    return sheets


def _totals(summary: Summary) -> Sheet:
    waste = summary.waste
    moved = ", ".join(
        f"{purpose} {count / 1e9:,.1f}" for purpose, count in summary.bytes_moved.items() if count
    )
    hits = summary.hits_by_source
    rows = [
        ("requests", f"{summary.requests:,}", "makespan (s)", f"{summary.makespan_s:,.1f}"),
        ("completed", f"{summary.completed:,}", "output (tokens/s)", f"{summary.output_tokens_per_s:,.1f}"),
        (
            *("goodput (%)", _percent(summary.goodput_share)),
            *("goodput (requests/s)", f"{summary.goodput_per_s:,.3f}"),
        ),
        (
            *("refused", ", ".join(f"{stage} {count:,}" for stage, count in summary.rejected.items())),
            *("failed, unfinished", f"{summary.failed:,}, {summary.unfinished:,}"),
        ),
        (
            *("hit rate, tokens (%)", _percent(summary.hit_rate_tokens)),
            *("of which other nodes, SSD (%)", f"{_percent(hits.fetched)}, {_percent(hits.disk)}"),
        ),
        ("hit rate, blocks (%)", _percent(summary.hit_rate_blocks), "moved (GB)", moved or "0"),
        ("waste, refused (node s)", _loss(waste.refused), "waste, limit missed (node s)", _loss(waste.missed)),
        ("simulated in (s)", f"{summary.wall_s:,.2f}", "events", f"{summary.events:,}"),
    ]
    title = f"{summary.workload}: {summary.policy}, admission {summary.admission}, order {summary.order}"
    return Sheet(title, texts("", "", "", ""), rows)


def _times(summary: Summary) -> Sheet:
    rows: list[tuple[Cell, ...]] = [
        _spread("TTFT (s)", summary.ttft_s),
        _spread("TTFT with transfer (s)", summary.ready_s),
        _spread("TBT (ms)", summary.tbt_s, 1000),
        _spread("TPOT (ms)", summary.tpot_s, 1000),
        _spread("end to end (s)", summary.e2e_s),
        _spread("queue (s)", summary.queue_s),
    ]
    if (parts := summary.ttft_parts) is not None:
        rows.append(("waiting for KV (s)", parts.load, *[None] * 3))
        rows.append(("prefill (s)", parts.prefill, *[None] * 3))
    rows.append(_spread("first token to decode (ms)", summary.transfer_s, 1000))
    return Sheet("Times", (*texts(""), *numbers("mean", "P50", "P90", "P99", form=",.3f")), rows)


def measured_sheet(summary: Summary, measured: Measured) -> Sheet:
    """Times as they were recorded beside the simulated ones."""
    rows: list[tuple[Cell, ...]] = []
    for name, recorded, simulated in (
        ("TTFT", spread(measured.ttft_ns), summary.ttft_s),
        ("TBT", spread(measured.tbt_ns), summary.tbt_s),
    ):
        for figure in ("mean", "p90"):
            if recorded is not None and simulated is not None:
                was, found = getattr(recorded, figure), getattr(simulated, figure)
                label = f"{name} {figure.replace('p', 'P')}"
                rows.append((label, 1000 * was, 1000 * found, 100 * (found / was - 1)))
    columns = (
        *texts(""),
        *numbers("recorded", "simulated", unit="ms", form=",.1f"),
        *numbers("difference", unit="%", form="+.1f"),
    )
    return Sheet(f"As recorded, of {len(measured.ttft_ns):,} streamed answers, and simulated", columns, rows)


def _spread(name: str, spread: Percentiles | None, per_second: int = 1) -> tuple[Cell, ...]:
    if spread is None:
        return (name, *[None] * 4)
    return (name, *(per_second * value for value in (spread.mean, spread.p50, spread.p90, spread.p99)))


def _reuse(reuse: ReuseUse) -> Sheet:
    title = f"Prompts that may be assembled: {reuse.requests:,}, of which {reuse.assembled:,} were"
    kinds = ("exact", "moved", "similar", "recomputed")
    counts = [getattr(reuse, f"{kind}_tokens") for kind in kinds]
    rows = [(kind, count, 100 * count / max(1, sum(counts))) for kind, count in zip(kinds, counts, strict=True)]
    columns = (*texts("KV of their tokens"), *numbers("tokens"), *numbers("share", unit="%", form=".1f"))
    return Sheet(title, columns, rows)


def _routes(summary: Summary) -> Sheet:
    """A row for each pair of clusters that requests went through."""
    rows = []
    for name, use in summary.by_route.items():
        if use.ttft_s is None or (parts := use.ttft_parts) is None:
            continue
        times = (use.ttft_s.mean, parts.queue, parts.load, parts.prefill, parts.transfer, use.ttft_s.p90)
        ready = None if use.ready_s is None else use.ready_s.p90
        rows.append((name, use.requests, 100 * use.share, use.uncached_tokens, *times, ready))
    columns = (
        *(*texts(""), *numbers("requests"), *numbers("share", unit="%", form=".1f")),
        *numbers("uncached tokens", form=",.0f"),
        *numbers(
            *("TTFT", "queue", "waiting for KV", "prefill", "transfer", "TTFT P90", "with transfer P90"),
            form=",.3f",
        ),
    )
    return Sheet("Prefill cluster > home, means (s)", columns, rows)


def _pools(summary: Summary) -> Sheet:
    columns = (
        *(*texts(""), *numbers("nodes")),
        *numbers("busy", "of which waiting for KV", unit="%", form=".1f"),
        *numbers("tokens prefilled", "tokens decoded", "preemptions"),
    )
    rows = [
        (
            *(role, pool.nodes, 100 * pool.busy_share, 100 * pool.stalled_share),
            *(pool.tokens_prefilled, pool.tokens_decoded, pool.preemptions),
        )
        for role, pool in summary.utilisation.items()
    ]
    return Sheet("Pools", columns, rows)


def _between(summary: Summary) -> Sheet:
    """Links between clusters, each direction."""
    rows = [
        (name, use.bytes_moved / 1e9, use.gbps, 100 * use.utilisation, 100 * use.busy_share)
        for name, use in summary.between_clusters.items()
    ]
    columns = (
        *(*texts(""), *numbers("moved", unit="GB", form=",.1f"), *numbers("Gbps", form=",.2f")),
        *numbers("utilisation", "busy", unit="%", form=".1f"),
    )
    return Sheet("Between clusters", columns, rows)


def _control(use: ThresholdUse, num_conversions: int) -> Sheet:
    """The threshold over time, and nodes that were given another role."""
    tokens = ["none" if each is None else each for each in (use.first, use.last, use.least, use.most)]
    rows = [(*tokens, use.changes, use.changes_per_min, use.most_changes_in_a_min, num_conversions)]
    columns = (
        *numbers("at first", "at last", "least", "most", "changes"),
        *(*numbers("a minute", form=".2f"), *numbers("most in one", "roles changed")),
    )
    return Sheet("Threshold (tokens)", columns, rows)


def _links(summary: Summary) -> Sheet:
    rows = [
        (kind, use.links, use.bytes_moved / 1e9, 100 * use.utilisation_mean, 100 * use.utilisation_max)
        for kind, use in summary.links.items()
    ]
    columns = (
        *(*texts(""), *numbers("links"), *numbers("moved", unit="GB", form=",.1f")),
        *numbers("utilisation, mean", "highest", unit="%", form=".1f"),
    )
    return Sheet("Links", columns, rows)


def _groups(name: str, groups: Mapping[str, RequestGroup]) -> Sheet:
    rows = [
        (
            *(key or "(none)", group.requests, 100 * group.goodput_share, sum(group.rejected.values())),
            *((None, None) if group.ttft_s is None else (group.ttft_s.p50, group.ttft_s.p90)),
            *(None if group.tbt_s is None else 1000 * group.tbt_s.p90, 100 * group.hit_rate_tokens),
        )
        for key, group in groups.items()
    ]
    columns = (
        *(*texts(name), *numbers("requests"), *numbers("goodput", unit="%", form=".1f"), *numbers("refused")),
        *(*numbers("TTFT P50", "TTFT P90", unit="s", form=",.3f"), *numbers("TBT P90", unit="ms", form=",.1f")),
        *numbers("hit rate", unit="%", form=".1f"),
    )
    return Sheet(f"By {name}", columns, *_first(rows))


def _first(rows: Sequence[Sequence[Cell]]) -> tuple[Sequence[Sequence[Cell]], list[str]]:
    """The first rows, and a note on those left out."""
    left_out = len(rows) - _MOST_GROUPS
    return rows[:_MOST_GROUPS], [f"{left_out} more are not shown."] if left_out > 0 else []


def _loss(loss: Loss) -> str:
    return f"{loss.node_s:,.1f} ({_percent(loss.share)} %)"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
