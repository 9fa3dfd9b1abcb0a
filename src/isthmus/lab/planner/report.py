"""The report of a plan: what to build, and below each table the chart that shows it."""

from __future__ import annotations

from isthmus.lab.planner import charts
from isthmus.lab.planner.answer import PlanAnswer
from isthmus.lab.planner.sheets import BANDWIDTHS, SPLITS, STAGES, analytic, simulated, threshold
from isthmus.lab.sim.report.page import Chart, Html, configuration, heading, headline, page
from isthmus.lab.sim.report.words import percent
from isthmus.sheet import NOTHING, Sheet, texts


def report(answer: PlanAnswer, config_text: str) -> str:
    """The page's text."""
    what_if = answer.what_if
    drawn = {SPLITS: charts.split(answer)}
    if what_if.threshold:
        drawn[STAGES] = charts.threshold(answer)
    if what_if.bandwidth:
        drawn[BANDWIDTHS] = charts.bandwidth(answer)
    blocks: list[Sheet | Chart | Html] = [_headline(answer)]
    if answer.notes:
        blocks.append(Sheet("Notes", texts(""), [(note,) for note in answer.notes]))
    for sheet in analytic(answer):
        blocks += [sheet, *([drawn[sheet.title]] if sheet.title in drawn else [])]
    if (found := answer.simulated) is not None:
        sustained, trials = simulated(answer)
        blocks += [heading("Simulations"), sustained, charts.sustained(found), trials, charts.parts(found)]
    return page(f"Isthmus plan: {answer.demand.source}", [*blocks, configuration(config_text)])


def _headline(answer: PlanAnswer) -> Html:
    best = answer.plans[0]
    others = {plan.name: plan.exact.rate for plan in answer.baselines}
    tiles = [
        (f"{best.exact.rate:.2f}", f"requests/s; {best.exact.binds} binds"),
        (threshold(best.threshold), "threshold, uncached tokens"),
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
