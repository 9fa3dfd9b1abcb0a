"""The answer as sheets, for the terminal and the page alike."""

from __future__ import annotations

from isthmus.lab.planner.answer import AttentionOffload, DeploymentPlan, Needs, PlanAnswer, Simulated
from isthmus.lab.sim.spread import Percentiles
from isthmus.sheet import NOTHING, Cell, Sheet, numbers, texts

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


def threshold(tokens: int | None) -> str:
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
            *(name, threshold(plan.threshold), _nodes(plan), plan.exact.rate, plan.representative.rate),
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
            *(threshold(each.threshold), each.rate, each.representative),
        )
        for each in answer.what_if.split
    ]
    columns = (
        *(*texts("prefill / decode"), *numbers(f"rate at {threshold(answer.plans[0].threshold)}", **_RATE)),
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
            *(each.gbps, each.rate, each.representative, each.int8, threshold(each.threshold)),
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
    return name, threshold(needs.threshold), _nodes(needs), needs.rate


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
