from __future__ import annotations

import html
import math
import re
from pathlib import Path

import pytest

from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S, NodeId, Role
from isthmus.lab.sim.records import (
    LinkRecord,
    LinkSample,
    NodeRecord,
    RequestStatus,
    Result,
    RoleConversion,
    ThresholdChange,
)
from isthmus.lab.sim.report import write_report
from isthmus.lab.sim.report.report import report
from isthmus.lab.sim.summary import summarize
from tests.lab.sim.report.pages import Page, texts_of
from tests.lab.sim.report.results import MS, record, replayed, result

NASTY = '"><script>alert(1)</script>&amp;\x00\x1b]]>'
NEVER = {"prefill_start": -1, "first_token": -1, "landed": -1, "joined": -1, "end": 1}


def two_clusters() -> Result:
    """A link that carries more and more, a threshold that moves, and a node that changes its role."""
    nodes = [
        NodeRecord(NodeId("far <p>"), Role.PREFILL, cluster="far"),
        NodeRecord(NodeId("near d"), Role.DECODE, cluster="near"),
    ]
    links = [
        LinkRecord(name, "cluster", 1e9, moved, NS_PER_S)
        for name, moved in (("far > near", 10**9), ("near > far", 0))
    ]
    samples = [LinkSample(at * NS_PER_S, (at * 10**8, 0), (at * 10**6, 0)) for at in range(1, 10)]
    thresholds = [
        ThresholdChange(at * NS_PER_S, threshold, "") for at, threshold in ((1, 100), (3, None), (5, 150))
    ]
    turned = [RoleConversion(4 * NS_PER_S, NodeId("far <p>"), Role.DECODE)]
    return result(
        [record(), record(1)],
        nodes=nodes,
        links=links,
        link_samples=samples,
        thresholds=thresholds,
        conversions=turned,
    )


RESULTS = {
    "two clusters": two_clusters(),
    "overload": replayed(2000, prefill_nodes=4),
    "many nodes": replayed(300, prefill_nodes=60, decode_nodes=60),
    "nothing": result([], nodes=[], end_ns=0),
    "one": result([record()]),
    "one token": result([record(output_tokens=1)]),
    "all refused": result([record(status=RequestStatus.REFUSED, stage="prefill", times_s=NEVER)]),
    "never started": result([record(status=RequestStatus.UNFINISHED, times_s=NEVER | {"end": -1})]),
    "no time": result([record(times_s=dict.fromkeys(("arrival", *NEVER), 0))], end_ns=0),
    "mixed nodes": result(
        [record(times_s={"landed": -1, "joined": 4})], nodes=[NodeRecord(NodeId("m"), Role.MIXED)] * 2
    ),
    "many limits": result([record(at, ttft_limit_ns=(at + 1) * NS_PER_S, tbt_ns=1.0 * MS) for at in range(9)]),
    "an odd stage": result([record(status=RequestStatus.REFUSED, stage=NASTY, times_s=NEVER)]),
    "beyond full": result([record()], links=[LinkRecord("n", "network", 1.0, 10**15)]),
}


def page_of(whole: Result, config_text: str = "roles: 1") -> Page:
    return Page(report(whole, summarize(whole), config_text))


@pytest.mark.parametrize("whole", RESULTS.values(), ids=RESULTS)
def test_the_page_is_well_formed_and_needs_nothing_from_outside(whole: Result) -> None:
    """Every chart says what it shows, and every table scrolls in its box."""
    page = page_of(whole)
    tags = {element.tag for element in page.root.iter()}
    assert not {"link", "img", "iframe", "object", "image", "use", "base", "form"} & tags
    assert not re.search(r"https?:|@import|url\(|src=|href=|\bon\w+=", page.markup)
    assert "prefers-color-scheme: dark" in page.markup and "@media print" in page.markup
    assert page.hashes() == page.allowed() and len(page.scripts) == 2, "no script runs but plotly and ours"
    assert (
        page.charts.keys() >= {"Requests waiting for prefill", "What became of the requests"}
        or not whole.records
    )
    assert all(label.startswith("Chart: ") and len(label) > 20 for label in page.labels)
    boxes = [box for box in page.root.iter("div") if box.get("class") == "scroll"]
    assert len(list(page.root.iter("table"))) == sum(box.find("table") is not None for box in boxes) >= 4
    for chart in page.charts.values():
        assert chart["data"] and chart["layout"]["xaxis"]
        for trace in chart["data"]:
            assert trace["type"] in ("scatter", "bar") and len(trace["x"]) == len(trace["y"]) > 0


def test_what_users_write_stays_text() -> None:
    nodes = [NodeRecord(NodeId(NASTY), Role.PREFILL), NodeRecord(NodeId(NASTY), Role.DECODE)]
    records = [
        record(tenant=NASTY),
        record(1, tenant="b"),
        record(2, status=RequestStatus.REFUSED, stage=NASTY, times_s=NEVER),
    ]
    whole = result(
        records, workload=NASTY, policy=NASTY, admission=NASTY, order=NASTY, nodes=nodes, notes=[NASTY, "{{plotly}}"],
        links=[LinkRecord(NASTY, NASTY, 1e9, 5)], bytes_moved={NASTY: 5},
    )  # fmt: skip
    page = page_of(whole, NASTY)
    shown = NASTY.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert page.text.count(shown) >= 8 and "{{plotly}}" in page.text
    assert not {"\x00", "\x1b"} & set(page.markup + page.data)
    assert "<" not in page.data, "no browser finds the end of an element in it"
    texts = [text for chart in page.charts.values() for text in texts_of(chart)]
    assert sum(html.escape(shown, quote=False) in text for text in texts) >= 4
    assert not [text for text in texts if "<" in text and not text.startswith("%{")], "plotly reads some tags"


def test_a_full_trace_stays_small_and_says_the_same_every_time() -> None:
    whole = replayed(12_031)
    page = page_of(whole)
    assert len((page.markup + page.data).encode()) <= 120_000
    again = page_of(whole)
    assert (page.markup, page.data) == (again.markup, again.data)


def test_every_request_is_counted_once() -> None:
    whole = RESULTS["overload"]
    charts = page_of(whole).charts
    (counted,) = (trace for trace in charts["Time to first token"]["data"] if trace["name"] == "requests")
    assert sum(counted["y"]) == sum(each.first_token_ns >= 0 for each in whole.records)
    traces = charts["What became of the requests"]["data"]
    assert sum(sum(trace["y"]) for trace in traces) == len(whole.records)
    assert [trace["name"].partition(":")[0] for trace in traces][:2] == ["inside limits", "missed a limit"]


def test_the_limit_and_what_is_inside_it_are_named() -> None:
    records = [
        record(index, ttft_limit_ns=3 * NS_PER_S, times_s={"first_token": 3.9 + index}) for index in range(4)
    ]
    (shape,) = page_of(result(records)).charts["Time to first token"]["layout"]["shapes"]
    assert (shape["x0"], shape["name"]) == (3.0, "limit 3 s: 25.0 % inside")
    assert "9 different limits, from 1 s to 9 s" in page_of(RESULTS["many limits"]).text


def test_links_say_how_full_they_are_or_that_they_have_no_limit() -> None:
    links = [LinkRecord("rail", "network", 1e9, 5 * 10**9), LinkRecord("spine", "spine", math.inf, 10**9)]
    (trace,) = page_of(result([record()], links=links)).charts["Links"]["data"]
    assert trace["hovertext"] == ["rail: 50.0 %, 5 GB, network", "spine: no limit, 1 GB, spine"]


def test_a_report_is_written_or_the_user_is_told_why(tmp_path: Path) -> None:
    whole = RESULTS["one"]
    write_report(whole, summarize(whole), "a: 1", tmp_path / "report.html", request=0)
    assert "As asked for" in (tmp_path / "report.html").read_text(encoding="utf8")
    with pytest.raises(ConfigError, match="the report cannot be written: No such file or directory"):
        write_report(whole, summarize(whole), "a: 1", tmp_path / "none" / "report.html")


def test_what_went_between_clusters_is_told() -> None:
    page = page_of(two_clusters())
    assert {"far > near, Gbps of 8", "far > near, MB computed and not sent"} < page.charts.keys()
    assert any(title.startswith("Threshold, tokens") for title in page.charts)
    cells = [["".join(cell.itertext()) for cell in row] for row in page.root.iter("tr")]
    assert ["4.0", "far <p>", "decode"] in cells
    assert any(row[:4] == ["100", "150", "100", "none"] for row in cells)
    assert "Between clusters" not in page_of(RESULTS["one"]).text
