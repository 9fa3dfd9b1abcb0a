"""The page: well-formed, nothing from outside, all charts there."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec
import pytest

from isthmus.lab.planner.answer import Answer, Simulated, Sustained, Trial
from isthmus.lab.planner.fleet import fleet_of
from isthmus.lab.planner.report import page
from isthmus.lab.planner.search import answer
from isthmus.lab.sim.spread import Spread
from tests.lab.planner.fleets import config, demand

SVG = "{http://www.w3.org/2000/svg}svg"


LENGTHS = [300, 900, 2500, 7000, 20_000]


def answered(lengths: list[int], **changed: int) -> Answer:
    settings = config(**changed)
    return answer(settings, fleet_of(settings), demand(lengths), bandwidths=(5.0,))


def simulated(found: Answer) -> Answer:
    part = Spread(1.0, 1.0, 2.0, 3.0)
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


def figures(text: str) -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    return {str(each.get("aria-labelledby")).split("-")[0]: each for each in root.iter("svg")}


def test_all_charts_of_a_plan_with_a_link_and_simulations() -> None:
    text = page(simulated(answered(LENGTHS)), "clusters: {a: <b> & c}")
    found = figures(text)
    assert set(found) == {"split", "threshold", "bandwidth", "sustained", "parts"}
    for svg in found.values():
        title, description = svg.find("title"), svg.find("desc")
        assert title is not None and title.text and description is not None and description.text
        assert len(list(svg.iter("path"))) > 2
    assert "a &lt;note&gt; &amp; more" in text and "prefers-color-scheme: dark" in text
    assert not any(word in text for word in ("http", "src=", "@import", "<script", "url("))


def test_the_threshold_chart_has_the_three_stages_and_the_least() -> None:
    svg = figures(page(answered(LENGTHS), ""))["threshold"]
    words = {each.text for each in svg.iter("text")}
    assert {"remote compute", "local compute", "decode", "link", "the least"} <= words
    kinds = [str(each.get("class")) for each in svg.iter("path")]
    assert any("best thick" in kind for kind in kinds) and any("prefill dashed" in kind for kind in kinds)


@pytest.mark.parametrize(
    "changed", [{"remote": 0}, {"prefill": 0, "decode": 1}, {"remote": 1, "prefill": 1, "decode": 1}]
)
def test_a_small_fleet_has_a_page_too(changed: dict[str, int]) -> None:
    found = figures(page(answered(LENGTHS, **changed), ""))
    assert "split" in found and ("bandwidth" in found) == (changed.get("remote") != 0)


def test_prompts_of_one_token_have_a_page_too() -> None:
    assert "threshold" in figures(page(answered([1]), ""))
