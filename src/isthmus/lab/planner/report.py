"""Charts of a plan: rate over split, over threshold and over bandwidth; TTFT in parts; formula beside simulation."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.lab.planner.answer import AttentionOffload, DeploymentPlan, Needs, PlanAnswer, Simulated
from isthmus.lab.sim.report.charts import Trace, bar_axes, bars, limit, line
from isthmus.lab.sim.report.page import Chart, Html, configuration, heading, headline, page, percent, seconds
from isthmus.lab.sim.spread import Percentiles
from isthmus.sheet import NOTHING, Cell, Sheet, numbers, texts, written

_HIGHEST = 1.8
"""Of the best rate: where curves that go to infinity are cut off."""
_REACH = 4
"""Of the best threshold: where the curves end, for beyond it they are flat."""
SHOWN = 0.8
"""The fraction of the formula whose TTFT is drawn."""
_RATE_AXIS = {"title": {"text": "requests/s"}, "rangemode": "tozero"}


def split(answer: PlanAnswer) -> Chart:
    """Rate over the number of prefill nodes (the paper's Figure 5a)."""
    points = answer.what_if.split
    x = [each.prefill for each in points]
    traces = [line("own threshold", (x, [each.rate for each in points]), "--green")]
    if answer.what_if.threshold:
        at_best = [each.rate_at_best for each in points]
        representative = [each.representative_at_best for each in points]
        traces.append(line("best threshold", (x, at_best), "--blue", "dash"))
        traces.append(line("representative", (x, representative), "--orange", "dot"))
    nodes = points[0].prefill + points[0].decode
    shown = x[:: max(1, -(-len(x) // 12))]
    axis = {
        "title": {"text": "prefill / decode nodes at home"},
        "tickvals": shown,
        "ticktext": [f"{prefill} / {nodes - prefill}" for prefill in shown],
    }
    return Chart("Rate over the split", "", _dotted(traces), {"xaxis": axis, "yaxis": _RATE_AXIS})


def threshold_chart(answer: PlanAnswer) -> Chart:
    """What each stage allows over the threshold, and the least of it (the paper's Figure 5b)."""
    best, all_points = answer.plans[0], answer.what_if.threshold
    reach = _REACH * (best.threshold or all_points[-1].threshold or 1)
    points = [each for each in all_points if each.threshold is not None and each.threshold <= reach]
    x = [each.threshold or 0 for each in points]
    least = line("the least", (x, [each.rate for each in points]), "--green")
    least["line"]["width"] = 5
    traces = [
        least,
        line("remote compute", (x, [each.remote for each in points]), "--blue", "dash"),
        line("link", (x, [each.link for each in points]), "--grey", "dot"),
        line("local compute", (x, [each.local for each in points]), "--purple", "dashdot"),
        line("decode", (x, [best.exact.decode] * len(x)), "--orange", "longdash"),
    ]
    layout = {
        "height": 380,
        "xaxis": {"title": {"text": "threshold, tokens"}, "rangemode": "tozero", "tickformat": ","},
        "yaxis": {**_RATE_AXIS, "range": [0, _HIGHEST * max(best.exact.rate, best.exact.decode)]},
        "shapes": [] if best.threshold is None else [limit(best.threshold, f"best: {best.threshold:,} tokens")],
    }
    return Chart("What each stage allows, over the threshold", "", traces, layout)


def bandwidth(answer: PlanAnswer) -> Chart:
    """The best rate over the links' bandwidth."""
    points = answer.what_if.bandwidth
    x = [each.gbps for each in points]
    traces = [
        line("KV as it is", (x, [each.rate for each in points]), "--green"),
        line("8-bit KV", (x, [each.int8 for each in points]), "--purple", "dash"),
        line("representative", (x, [each.representative for each in points]), "--orange", "dot"),
    ]
    axis = {"type": "log", "title": {"text": "Gbps"}}
    return Chart("Rate over the bandwidth", "", _dotted(traces), {"xaxis": axis, "yaxis": _RATE_AXIS})


def sustained_chart(found: Simulated) -> Chart:
    """What the formula promises, and what was simulated within the limits."""
    labels = [f"{each.plan}, {each.arrivals}" for each in found.sustained]
    rates = [each.rate for each in found.sustained]
    gaps = [max(0.0, each.formula - each.rate) for each in found.sustained]
    parts = {
        "simulated": (rates, {"color": "--green"}),
        "what the formula adds": (gaps, {"color": "--orange-pale"}),
    }
    marks = [
        f"{label}: simulated {written(each.rate)}, formula {written(each.formula)}"
        for label, each in zip(labels, found.sustained, strict=True)
    ]
    traces = [bars(name, marks, lengths, marker) for name, (lengths, marker) in parts.items()]
    axes = bar_axes(list(zip(labels, map(written, rates), strict=True)), title={"text": "requests/s"})
    return Chart("Formula and simulation", "", traces if labels else [], {**axes, "showlegend": True})


def parts_chart(found: Simulated) -> Chart:
    """Mean TTFT in parts: waiting, prefill; and the way to the decode batch after it."""
    trials = [trial for trial in found.trials if trial.ttft is not None and trial.fraction == SHOWN]
    of_parts = {
        "queue": ([trial.queue for trial in trials], {"color": "--blue-pale"}),
        "prefill": ([trial.prefill for trial in trials], {"color": "--blue"}),
        "then to decode": ([trial.transfer for trial in trials], {"color": "--orange"}),
    }
    means = {name: [each.mean if each else 0.0 for each in spreads] for name, (spreads, _) in of_parts.items()}
    labels = [f"{trial.plan}, {trial.arrivals}" for trial in trials]
    columns = list(zip(*means.values(), strict=True))
    marks = [f"{label}: {' + '.join(map(seconds, each))}" for label, each in zip(labels, columns, strict=True)]
    traces = [bars(name, marks, means[name], marker) for name, (_, marker) in of_parts.items()]
    totals = [seconds(sum(each)) for each in columns]
    axes = bar_axes(list(zip(labels, totals, strict=True)), title={"text": "seconds"})
    title = f"TTFT in parts, at {SHOWN:g} of the formula"
    if not labels:
        return Chart(title, "No plan got a first token there.", [])
    return Chart(title, "", traces, {**axes, "showlegend": True})


def _dotted(traces: Sequence[Trace]) -> list[Trace]:
    return [{**trace, "mode": "lines+markers"} for trace in traces]


# The answer as sheets, for the terminal and the page alike.


SPLITS = "Every split of the home cluster"
STAGES = "Stages"
BANDWIDTHS = "Other bandwidths"
"""Titles of the sheets that the page draws, too."""

_RATE = {"unit": "requests/s", "form": ".3f"}


def analytic(answer: PlanAnswer) -> list[Sheet]:
    """All but the simulations."""
    what_if = answer.what_if
    sheets = [_question(answer), _plans(answer), _stages(answer), _splits(answer)]
    if answer.attention is not None:
        sheets.append(_attention(answer.attention))
    if what_if.bandwidth:
        sheets.append(_bandwidths(answer))
    return [*sheets, _others(answer)]


def simulated(answer: PlanAnswer) -> list[Sheet]:
    """The rates that were sustained, and every simulation; none where nothing was simulated."""
    return [] if answer.simulated is None else [_sustained(answer.simulated), _trials(answer.simulated)]


def threshold_text(tokens: int | None) -> str:
    return "none" if tokens is None else f"{tokens:,}"


def _question(answer: PlanAnswer) -> Sheet:
    demand, batch = answer.demand, answer.batch
    rows = [
        ("prompts, uncached tokens", f"mean {demand.mean_uncached:,.0f}, P50 {demand.p50_uncached:,.0f}, "
                                     f"P90 {demand.p90_uncached:,.0f}"),
        ("answers, tokens", f"{demand.output_tokens:,.0f}"),
    ]  # fmt: skip
    if demand.mean_cached:
        rows.insert(1, ("prompts, cached tokens", f"mean {demand.mean_cached:,.0f}"))
    if demand.rate is not None:
        rows.append(("arrivals in the trace", f"{demand.rate:.3f} requests/s"))
    for each in answer.clusters:
        price = "" if each.price is None else f", {each.price:g} a node"
        link = "" if each.gbps is None else f", {each.gbps:g} Gbps to the home"
        name = f"cluster {each.name}" if each.name else "nodes"
        rows.append((name + (" (home)" if each.home and each.name else ""), f"{each.nodes} nodes{link}{price}"))
        if each.attention:
            rows.append(("attention nodes", f"{each.attention} nodes, which hold what decodes"))
    limit = f"{batch.size} sequences in steps of {batch.step_ms:.1f} ms; {batch.binds} limits them"
    rows.append(("a decode node", limit))
    return Sheet(f"Question: {answer.demand.source}", texts("", ""), rows)


def _plans(answer: PlanAnswer) -> Sheet:
    best = answer.plans[0].exact.rate
    rows = [
        (
            *(name, threshold_text(plan.threshold), _nodes(plan), plan.exact.rate, plan.representative.rate),
            *(100 * plan.exact.rate / best if best else None, plan.exact.binds, plan.cost),
        )
        for plan, name in answer.distinct()
    ]
    columns = (
        *(*texts("plan"), *numbers("threshold", "remote / prefill / decode"), *numbers("rate", **_RATE)),
        *(*numbers("representative", form=".3f"), *numbers("of plan 1", unit="%", form=".1f")),
        *(*texts("binds"), *numbers("price", form="g")),
    )
    note = (
        "Highest rate by equation (6), with the exact distribution of lengths and with one representative length a "
        "class; queues grow without end as it is approached (--simulate). Prompts with more uncached tokens than the "
        "threshold are prefilled remotely."
    )
    return Sheet("Plans", columns, rows, [note])


def _nodes(plan: DeploymentPlan | Needs) -> str:
    remote = " + ".join(str(nodes) for nodes in plan.remote.values() if nodes) or NOTHING
    beside = f" + {plan.attention} attention" if isinstance(plan, Needs) and plan.attention else ""
    return f"{remote} / {plan.prefill} / {plan.decode}{beside}"


def _stages(answer: PlanAnswer) -> Sheet:
    rows = []
    for plan, name in answer.distinct():
        found, service = plan.exact, plan.service
        residuals = (
            None if each is None else 100 * each for each in (found.threshold_residual, found.split_residual)
        )
        rows.append(
            (
                *(name, found.remote or None, found.local or None, found.decode or None, *residuals),
                *(100 * found.share, found.egress_gbps, service.mean_s, service.p90_s),
            )
        )
    columns = (
        *(*texts("plan"), *numbers("remote", "local", "decode", form=".3f")),
        *(*numbers("(7)", "(8)", unit="%", form="+.1f"), *numbers("offloaded", unit="%", form=".1f")),
        *(
            *numbers("egress", unit="Gbps", form=".2f"),
            *numbers("unloaded TTFT mean", "P90", unit="s", form=".2f"),
        ),
    )
    note = (
        "What each stage bears by equations (3) to (5), requests/s. (7): by how much the remote stage bears more of "
        "its class than the local one; (8): decode more than prefill; as a share of the lesser side. Unloaded TTFT "
        "is prefill alone."
    )
    return Sheet(STAGES, columns, rows, [note])


def _splits(answer: PlanAnswer) -> Sheet:
    rows = [
        (
            *(f"{each.prefill} / {each.decode}", each.rate_at_best),
            *(threshold_text(each.threshold), each.rate, each.representative),
        )
        for each in answer.what_if.split
    ]
    columns = (
        *(
            *texts("prefill / decode"),
            *numbers(f"rate at {threshold_text(answer.plans[0].threshold)}", **_RATE),
        ),
        *(
            *numbers("best threshold"),
            *numbers("rate", **_RATE),
            *numbers("by representative lengths", **_RATE),
        ),
    )
    return Sheet(SPLITS, columns, rows)


def _bandwidths(answer: PlanAnswer) -> Sheet:
    rows = [
        (
            *(each.gbps, each.rate, each.representative, each.int8, threshold_text(each.threshold)),
            *(f"{each.prefill} / {each.decode}", each.egress_gbps, each.binds),
        )
        for each in answer.what_if.bandwidth
    ]
    columns = (
        *(*numbers("Gbps", form="g"), *numbers("rate", **_RATE)),
        *numbers("by representative lengths", "8-bit KV on the link", form=".3f"),
        *(
            *numbers("threshold", "prefill / decode"),
            *numbers("egress", unit="Gbps", form=".2f"),
            *texts("binds"),
        ),
    )
    return Sheet(BANDWIDTHS, columns, rows, ["The best plan for each."])


def _others(answer: PlanAnswer) -> Sheet:
    """Failure of the links, and more load."""
    rows: list[tuple[Cell, ...]] = []
    best = answer.plans[0].exact.rate
    if (failure := answer.what_if.link_failure) is not None:
        split = f"{NOTHING} / {failure.prefill} / {failure.decode}"
        rows += [
            ("no link, nodes as in plan 1", None, "", failure.as_planned),
            ("no link, home split again", "none", split, failure.resplit),
            _needed(f"no link, for all {best:.2f} requests/s", failure.needed),
        ]
    rows.append(_needed("twice the rate of plan 1", answer.what_if.twice))
    columns = (*texts(""), *numbers("threshold", "remote / prefill / decode"), *numbers("rate", **_RATE))
    return Sheet("If", columns, rows, ["What remains, and the least that would bear it."])


def _needed(name: str, needs: Needs) -> tuple[Cell, ...]:
    return name, threshold_text(needs.threshold), _nodes(needs), needs.rate


def _attention(found: AttentionOffload) -> Sheet:
    rows = [
        (
            *(side.nodes, side.price, side.batch, side.step_ms, side.rate, side.per_price),
            *("computing" if side.compute_bound else "memory", side.binds),
        )
        for side in (found.alone, found.elsewhere)
    ]
    columns = (
        *(*texts("decode by"), *numbers("price", form="g"), *numbers("batch")),
        *(*numbers("step", unit="ms", form=".1f"), *numbers("tokens/s", "tokens for the price", form=",.0f")),
        *texts("bound by", "batch limited by"),
    )
    verdict = "it pays" if found.ratio > 1 else "it does not pay"
    note = (
        f"{found.ratio:.2f} times the tokens for the price with attention elsewhere: {verdict}. {found.reason} "
        "A x B: A groups of B."
    )
    return Sheet("Attention on nodes of its own", columns, rows, [note])


def _sustained(found: Simulated) -> Sheet:
    rows = [
        (
            *(each.plan, each.arrivals, each.rate or None, each.formula, each.representative),
            None if each.optimism is None else 100 * (each.optimism - 1),
        )
        for each in found.sustained
    ]
    columns = (
        *(
            *texts("plan", "arrivals"),
            *numbers("simulated", "formula", "by representative lengths", form=".3f"),
        ),
        *numbers("formula above simulated", unit="%", form="+.0f"),
    )
    note = (
        f"Requests/s at which {100 * found.goodput:g} % of {found.requests:,} requests were inside both limits. "
        f"Under the arrivals that suit it least, {found.best} sustains the most of the plans."
    )
    return Sheet("Highest rate with queues", columns, rows, [note])


def _trials(found: Simulated) -> Sheet:
    rows = [
        (
            *(each.plan, each.arrivals, each.fraction, each.rate, 100 * each.goodput),
            *map(_spread, (each.ttft, each.queue, each.prefill, each.transfer)),
            each.egress_gbps,
        )
        for each in found.trials
    ]
    columns = (
        *(*texts("plan", "arrivals"), *numbers("of formula", form=".2f"), *numbers("rate", **_RATE)),
        *numbers("goodput", unit="%", form=".1f"),
        *numbers("TTFT mean, P90 (s)", "queue", "prefill", "then to decode"),
        *numbers("egress", unit="Gbps", form=".2f"),
    )
    return Sheet("Simulated", columns, rows)


def _spread(spread: Percentiles | None) -> str | None:
    return None if spread is None else f"{spread.mean:.2f}, {spread.p90:.2f}"


# The report of a plan: what to build, and below each table the chart that shows it.


def report(answer: PlanAnswer, config_text: str) -> str:
    """The page's text."""
    what_if = answer.what_if
    drawn = {SPLITS: split(answer)}
    if what_if.threshold:
        drawn[STAGES] = threshold_chart(answer)
    if what_if.bandwidth:
        drawn[BANDWIDTHS] = bandwidth(answer)
    blocks: list[Sheet | Chart | Html] = [_headline(answer)]
    if answer.notes:
        blocks.append(Sheet("Notes", texts(""), [(note,) for note in answer.notes]))
    for sheet in analytic(answer):
        blocks += [sheet, *([drawn[sheet.title]] if sheet.title in drawn else [])]
    if (found := answer.simulated) is not None:
        sustained, trials = simulated(answer)
        blocks += [heading("Simulations"), sustained, sustained_chart(found), trials, parts_chart(found)]
    return page(f"Isthmus plan: {answer.demand.source}", [*blocks, configuration(config_text)])


def _headline(answer: PlanAnswer) -> Html:
    best = answer.plans[0]
    others = {plan.name: plan.exact.rate for plan in answer.baselines}
    tiles = [
        (f"{best.exact.rate:.2f}", f"requests/s; {best.exact.binds} binds"),
        (threshold_text(best.threshold), "threshold, uncached tokens"),
        (f"{best.prefill} / {best.decode}", "prefill / decode nodes at home"),
        (f"{best.exact.egress_gbps:.1f}" if best.remote else NOTHING, "Gbps on the link"),
        (percent(best.exact.share), "of requests offloaded"),
    ]
    tiles += [
        (f"{best.exact.rate / others[name]:.2f} ×", f"the rate of {name}")
        for name in ("homogeneous", "naive", "equal cost")
        if others.get(name)
    ]
    return headline("Isthmus plan", answer.demand.source, tiles)
