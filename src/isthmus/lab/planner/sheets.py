"""The answer as tables of text, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from isthmus.lab.planner.answer import Answer, Needs, Offload, Plan, Simulated
from isthmus.lab.sim.spread import Spread

NONE = "–"


class Sheet(NamedTuple):
    """The first `text_columns` cells of a row are text, the others numbers. `caption`: how to read it."""

    title: str
    caption: str
    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1


def analytic(answer: Answer) -> list[Sheet]:
    """All but the simulations."""
    what_if = answer.what_if
    sheets = [_question(answer), _plans(answer), _stages(answer), _splits(answer)]
    if answer.attention is not None:
        sheets.append(_attention(answer.attention))
    if what_if.bandwidth:
        sheets.append(_bandwidths(answer))
    return [*sheets, _others(answer)]


def simulated(found: Simulated) -> list[Sheet]:
    return [_sustained(found), _trials(found)]


def threshold(tokens: int | None) -> str:
    return "none" if tokens is None else f"{tokens:,}"


def _question(answer: Answer) -> Sheet:
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
    rows.append(
        (
            "a decode node",
            f"{batch.size} sequences in steps of {batch.step_ms:.1f} ms; {batch.binds} limits them",
        )
    )
    return Sheet(f"Question: {answer.demand.source}", "", ("", ""), rows, text_columns=2)


def _plans(answer: Answer) -> Sheet:
    best = answer.plans[0].exact.rate
    rows = []
    for plan, name in answer.distinct():
        found = plan.exact
        rows.append(
            (
                name,
                threshold(plan.threshold),
                _nodes(plan),
                f"{found.rate:.3f}",
                f"{plan.representative.rate:.3f}",
                f"{100 * found.rate / best:.1f}" if best else NONE,
                found.binds,
                _number(plan.cost, "g"),
            )
        )
    return Sheet(
        "Plans",
        "Highest rate by equation (6), with the exact distribution of lengths and with one representative length a "
        "class; queues grow without end as it is approached (--simulate). Prompts with more uncached tokens than the "
        "threshold are prefilled remotely.",
        (
            *("plan", "threshold", "remote / prefill / decode", "requests/s", "representative"),
            *("% of plan 1", "binds", "price"),
        ),
        rows,
    )


def _nodes(plan: Plan | Needs) -> str:
    remote = " + ".join(str(nodes) for nodes in plan.remote.values() if nodes) or NONE
    beside = f" + {plan.attention} attention" if isinstance(plan, Needs) and plan.attention else ""
    return f"{remote} / {plan.prefill} / {plan.decode}{beside}"


def _stages(answer: Answer) -> Sheet:
    rows = []
    for plan, name in answer.distinct():
        found, service = plan.exact, plan.service
        rows.append(
            (
                name,
                *(f"{rate:.3f}" if rate else NONE for rate in (found.remote, found.local, found.decode)),
                _signed(found.threshold_residual),
                _signed(found.split_residual),
                f"{100 * found.share:.1f}",
                f"{found.egress_gbps:.2f}",
                f"{service.mean_s:.2f}, {service.p90_s:.2f}",
            )
        )
    return Sheet(
        "Stages",
        "What each stage bears by equations (3) to (5), requests/s. (7): by how much the remote stage bears more of "
        "its class than the local one; (8): decode more than prefill; as a share of the lesser side. Unloaded TTFT "
        "is prefill alone.",
        (
            *("plan", "remote", "local", "decode", "(7)", "(8)"),
            *("offloaded (%)", "egress (Gbps)", "unloaded TTFT mean, P90 (s)"),
        ),
        rows,
    )


def _splits(answer: Answer) -> Sheet:
    rows = [
        (
            f"{each.prefill} / {each.decode}",
            f"{each.rate_at_best:.3f}",
            threshold(each.threshold),
            f"{each.rate:.3f}",
            f"{each.representative:.3f}",
        )
        for each in answer.what_if.split
    ]
    head = (
        *("prefill / decode", f"requests/s at {threshold(answer.plans[0].threshold)}"),
        *("best threshold", "requests/s", "by representative lengths"),
    )
    return Sheet("Every split of the home cluster", "", head, rows)


def _bandwidths(answer: Answer) -> Sheet:
    rows = [
        (
            f"{each.gbps:g}",
            f"{each.rate:.3f}",
            f"{each.representative:.3f}",
            f"{each.int8:.3f}",
            threshold(each.threshold),
            f"{each.prefill} / {each.decode}",
            f"{each.egress_gbps:.2f}",
            each.binds,
        )
        for each in answer.what_if.bandwidth
    ]
    head = (
        *("Gbps", "requests/s", "by representative lengths", "8-bit KV on the link"),
        *("threshold", "prefill / decode", "egress (Gbps)", "binds"),
    )
    return Sheet("Other bandwidths", "The best plan for each.", head, rows)


def _others(answer: Answer) -> Sheet:
    """Failure of the links, and more load."""
    what_if, rows = answer.what_if, []
    best = answer.plans[0].exact.rate
    if (failure := what_if.link_failure) is not None:
        rows += [
            ("no link, nodes as in plan 1", NONE, "", f"{failure.as_planned:.3f}"),
            (
                "no link, home split again",
                "none",
                f"{NONE} / {failure.prefill} / {failure.decode}",
                f"{failure.resplit:.3f}",
            ),
            _needed(f"no link, for all {best:.2f} requests/s", failure.needed),
        ]
    rows.append(_needed("twice the rate of plan 1", what_if.twice))
    return Sheet(
        "If",
        "What remains, and the least that would bear it.",
        ("", "threshold", "remote / prefill / decode", "requests/s"),
        rows,
    )


def _needed(name: str, needs: Needs) -> tuple[str, ...]:
    return name, threshold(needs.threshold), _nodes(needs), f"{needs.rate:.3f}"


def _attention(found: Offload) -> Sheet:
    rows = [
        (
            side.nodes,
            f"{side.price:g}",
            f"{side.batch:,}",
            f"{side.step_ms:.1f}",
            f"{side.rate:,.0f}",
            f"{side.per_price:,.0f}",
            "computing" if side.compute_bound else "memory",
            side.binds,
        )
        for side in (found.alone, found.elsewhere)
    ]
    head = (
        *("decode by", "price", "batch", "step (ms)", "tokens/s", "tokens for the price"),
        *("bound by", "batch limited by"),
    )
    verdict = "it pays" if found.ratio > 1 else "it does not pay"
    caption = (
        f"{found.ratio:.2f} times the tokens for the price with attention elsewhere: {verdict}. {found.reason} "
        "A x B: A groups of B."
    )
    return Sheet("Attention on nodes of its own", caption, head, rows)


def _sustained(found: Simulated) -> Sheet:
    rows = [
        (
            each.plan,
            each.arrivals,
            f"{each.rate:.3f}" if each.rate else NONE,
            f"{each.formula:.3f}",
            f"{each.representative:.3f}",
            f"{100 * (each.optimism - 1):+.0f}" if each.optimism is not None else NONE,
        )
        for each in found.sustained
    ]
    head = (
        "plan",
        "arrivals",
        "simulated",
        "formula",
        "by representative lengths",
        "formula above simulated (%)",
    )
    return Sheet(
        "Highest rate with queues",
        f"Requests/s at which {100 * found.goodput:g} % of {found.requests:,} requests were inside both limits. "
        f"Under the arrivals that suit it least, {found.best} sustains the most of the plans.",
        head,
        rows,
        text_columns=2,
    )


def _trials(found: Simulated) -> Sheet:
    rows = [
        (
            each.plan,
            each.arrivals,
            f"{each.fraction:.2f}",
            f"{each.rate:.3f}",
            f"{100 * each.goodput:.1f}",
            *map(_spread, (each.ttft, each.queue, each.prefill, each.transfer)),
            f"{each.egress_gbps:.2f}",
        )
        for each in found.trials
    ]
    head = (
        *("plan", "arrivals", "of formula", "requests/s", "goodput (%)", "TTFT mean, P90 (s)"),
        *("queue", "prefill", "then to decode", "egress (Gbps)"),
    )
    return Sheet("Simulated", "", head, rows, text_columns=2)


def _spread(spread: Spread | None) -> str:
    return NONE if spread is None else f"{spread.mean:.2f}, {spread.p90:.2f}"


def _signed(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:+.1f} %"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"
