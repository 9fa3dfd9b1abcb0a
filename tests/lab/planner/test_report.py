"""The page: well-formed, nothing from outside, all charts there."""

from __future__ import annotations

import msgspec
import pytest

from isthmus.lab.planner.answer import PlanAnswer, Simulated, Sustained, Trial
from isthmus.lab.planner.fleet import fleet_of
from isthmus.lab.planner.report import report
from isthmus.lab.planner.search import answer
from isthmus.lab.sim.spread import Percentiles
from tests.lab.planner.fleets import config, demand
from tests.lab.sim.report.pages import Page

LENGTHS = [300, 900, 2500, 7000, 20_000]


def answered(lengths: list[int], **changed: int) -> PlanAnswer:
    settings = config(**changed)
    return answer(settings, fleet_of(settings), demand(lengths), bandwidths=(5.0,))


def simulated(found: PlanAnswer) -> PlanAnswer:
    part = Percentiles(1.0, 1.0, 2.0, 3.0)
    trials = [
        Trial(plan.name, arrivals, 0.8, 1.0, 100, 0.95, 0.5, part, part, part, part, 3.0)
        for plan in found.plans
        for arrivals in ("Poisson", "bursts")
    ]
    sustained = [
        Sustained("plan 1", "Poisson", 2.0, 2.5, 2.6, 1.25),
        Sustained("plan 2", "bursts", 0.0, 2, 2, None),
    ]
    return msgspec.structs.replace(
        found, simulated=Simulated(0.9, 100, trials, sustained, "plan 1"), notes=["a <note> & more"]
    )


SPLIT, THRESHOLD, BANDWIDTH = (
    "Rate over the split",
    "What each stage allows, over the threshold",
    "Rate over the bandwidth",
)


def page_of(found: PlanAnswer, config_text: str = "") -> Page:
    return Page(report(found, config_text))


def test_all_charts_of_a_plan_with_a_link_and_simulations() -> None:
    page = page_of(simulated(answered(LENGTHS)), "clusters: {a: <b> & c}")
    simulations = {"Formula and simulation", "TTFT in parts, at 0.8 of the formula"}
    assert set(page.charts) == {SPLIT, THRESHOLD, BANDWIDTH, *simulations}
    assert "a <note> & more" in page.text and "clusters: {a: <b> & c}" in page.text
    assert page.hashes() == page.allowed()
    found = page.charts["Formula and simulation"]
    assert [trace["x"] for trace in found["data"]] == [[2.0, 0.0], [0.5, 2.0]]
    assert found["data"][0]["hovertext"][0] == "plan 1, Poisson: simulated 2, formula 2.5"


def test_the_threshold_chart_has_the_three_stages_and_the_least() -> None:
    answer = answered(LENGTHS)
    chart = page_of(answer).charts[THRESHOLD]
    curves = {trace["name"]: trace["y"] for trace in chart["data"]}
    assert set(curves) == {"remote compute", "local compute", "decode", "link", "the least"}
    best = answer.plans[0]
    assert [shape["x0"] for shape in chart["layout"]["shapes"]] == [best.threshold]
    at_best = chart["data"][0]["x"].index(best.threshold)
    assert curves["the least"][at_best] == pytest.approx(best.exact.rate)
    assert chart["layout"]["yaxis"]["range"][1] == pytest.approx(1.8 * max(best.exact.rate, best.exact.decode))


@pytest.mark.parametrize(
    ("lengths", "changed"),
    [
        (LENGTHS, {"remote": 0}),
        (LENGTHS, {"prefill": 0, "decode": 1}),
        (LENGTHS, {"remote": 1, "prefill": 1, "decode": 1}),
        ([1], {}),
    ],
)
def test_a_small_fleet_has_a_page_too(lengths: list[int], changed: dict[str, int]) -> None:
    charts = page_of(answered(lengths, **changed)).charts
    assert SPLIT in charts and (BANDWIDTH in charts) == (changed.get("remote") != 0)
    assert THRESHOLD in charts or lengths == LENGTHS
