from __future__ import annotations

import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S, NodeId, Role
from isthmus.lab.sim.records import (
    Conversion,
    LinkRecord,
    LinkSample,
    NodeRecord,
    Result,
    Status,
    ThresholdChange,
)
from isthmus.lab.sim.report import write_report
from isthmus.lab.sim.report.html import page
from isthmus.lab.sim.summary import summarize
from tests.lab.sim.report.results import MS, record, replayed, result

NASTY = '"><script>alert(1)</script>&amp;\x00\x1b]]>'
NEVER = {"prefill_start": -1, "first_token": -1, "landed": -1, "joined": -1, "end": 1}


def many_limits() -> Result:
    return result([record(index, ttft_limit_ns=(index + 1) * NS_PER_S, tbt_ns=float(MS)) for index in range(9)])


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
    turned = [Conversion(4 * NS_PER_S, NodeId("far <p>"), Role.DECODE)]
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
    "all refused": result([record(status=Status.REFUSED, stage="prefill", times_s=NEVER)]),
    "never started": result([record(status=Status.UNFINISHED, times_s=NEVER | {"end": -1})]),
    "no time": result([record(times_s=dict.fromkeys(("arrival", *NEVER), 0))], end_ns=0),
    "mixed nodes": result(
        [record(times_s={"landed": -1, "joined": 4})], nodes=[NodeRecord(NodeId("m"), Role.MIXED)] * 2
    ),
    "many limits": many_limits(),
    "an odd stage": result([record(status=Status.REFUSED, stage=NASTY, times_s=NEVER)]),
    "beyond full": result([record()], links=[LinkRecord("n", "network", 1.0, 10**15)]),
}


def page_of(whole: Result, config_text: str = "roles: 1") -> str:
    return page(whole, summarize(whole), config_text)


def parsed(text: str) -> ElementTree.Element:
    """Strictly, as XML: every tag closed, every attribute quoted, every `&` and `<` of a text escaped."""
    assert text.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


@pytest.fixture(params=RESULTS, scope="module")
def whole(request: pytest.FixtureRequest) -> Result:
    return RESULTS[request.param]


def test_the_page_is_well_formed_and_needs_nothing_from_outside(whole: Result) -> None:
    text = page_of(whole)
    tags = [element.tag for element in parsed(text).iter()]
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(tags)
    assert not re.search(r"https?:|@import|url\(|src=|href=|\bon\w+=", text)
    assert not re.search(r"\b(nan|inf)\b", text)


def test_every_picture_says_what_it_shows_and_ids_are_unique(whole: Result) -> None:
    root = parsed(page_of(whole))
    pictures = list(root.iter("svg"))
    assert len(pictures) >= 5
    for picture in pictures:
        title, description = picture.find("title"), picture.find("desc")
        assert title is not None and title.text and description is not None and description.text
        assert picture.get("role") == "img"
        assert picture.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))


def test_everything_drawn_lies_inside_its_picture(whole: Result) -> None:
    for picture in parsed(page_of(whole)).iter("svg"):
        left, top, width, height = map(float, picture.attrib["viewBox"].split())
        for x, y in places(picture):
            assert math.isfinite(x) and left - 0.5 <= x <= left + width + 0.5, picture[0].text
            assert math.isfinite(y) and top - 0.5 <= y <= top + height + 0.5, picture[0].text


def places(picture: ElementTree.Element) -> Iterator[tuple[float, float]]:
    """All corners of what a picture draws; of a text, both ends of it, as wide as its letters may be."""
    for element in picture.iter():
        values = element.attrib
        if element.tag == "rect":
            x, y = float(values["x"]), float(values["y"])
            yield x, y
            yield x + float(values["width"]), y + float(values["height"])
        elif element.tag == "circle":
            yield float(values["cx"]), float(values["cy"])
        elif element.tag == "text":
            width = 5.5 * len(element.text or "")
            first = float(values["x"]) - {"start": 0, "middle": width / 2, "end": width}[values["text-anchor"]]
            yield first, float(values["y"])
            yield first + width, float(values["y"])
        elif element.tag == "path":
            yield from corners(values["d"])


def corners(path: str) -> Iterator[tuple[float, float]]:
    assert re.fullmatch(r"([MLHVZ]|-?\d+(\.\d+)?| )+", path), path
    x = y = 0.0
    for command, arguments in re.findall(r"([MLHVZ])([^MLHVZ]*)", path):
        numbers = [float(number) for number in arguments.split()]
        if command in "ML":
            x, y = numbers
        elif command == "H":
            (x,) = numbers
        elif command == "V":
            (y,) = numbers
        yield x, y


class Texts(HTMLParser):
    """All texts, and how the tags nest as a browser reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_what_users_write_stays_text() -> None:
    nodes = [NodeRecord(NodeId(NASTY), Role.PREFILL), NodeRecord(NodeId(NASTY), Role.DECODE)]
    records = [
        record(tenant=NASTY),
        record(1, tenant="b"),
        record(2, status=Status.REFUSED, stage=NASTY, times_s=NEVER),
    ]
    whole = result(
        records, workload=NASTY, policy=NASTY, admission=NASTY, order=NASTY, nodes=nodes, notes=[NASTY],
        links=[LinkRecord(NASTY, NASTY, 1e9, 5)], bytes_moved={NASTY: 5},
    )  # fmt: skip
    text = page_of(whole, NASTY)
    parsed(text)
    reader = Texts()
    reader.feed(text)
    reader.close()
    assert reader.open == [] and "script" not in reader.tags
    shown = NASTY.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert sum(shown in piece for piece in reader.texts) >= 8
    assert "\x00" not in text and "\x1b" not in text


def test_a_full_trace_stays_small_and_says_the_same_every_time() -> None:
    whole = replayed(12_031)
    text = page_of(whole)
    assert len(text.encode()) <= 400_000
    assert text == page_of(whole)


def test_the_histogram_counts_every_request_once() -> None:
    whole = RESULTS["overload"]
    (picture,) = (each for each in parsed(page_of(whole)).iter("svg") if (each[0].get("id") or "") == "ttft-t")
    counts = [
        int((title.text or "").split()[-2]) for rect in picture.iter("rect") for title in rect.iter("title")
    ]
    assert sum(counts) == sum(each.first_token_ns >= 0 for each in whole.records)


def test_the_limit_and_what_is_inside_it_are_written_beside_it() -> None:
    records = [
        record(index, ttft_limit_ns=3 * NS_PER_S, times_s={"first_token": 3.9 + index}) for index in range(4)
    ]
    text = page_of(result(records))
    assert ">limit 3 s: 25.0 % inside<" in text


def test_links_say_how_full_they_are_or_that_they_have_no_limit() -> None:
    links = [LinkRecord("rail", "network", 1e9, 5 * 10**9), LinkRecord("spine", "spine", math.inf, 10**9)]
    text = page_of(result([record()], links=links))
    assert ">50.0 %, 5 GB, network<" in text and ">no limit, 1 GB, spine<" in text


def test_groups_beyond_the_table_are_counted() -> None:
    text = page_of(result([record(index, tenant=f"tenant {index:02}") for index in range(23)]))
    assert "3 more are not shown" in text and "tenant 19" in text and "tenant 20" not in text


def test_a_report_is_written_or_the_user_is_told_why(tmp_path: Path) -> None:
    whole = RESULTS["one"]
    write_report(whole, summarize(whole), "a: 1", tmp_path / "report.html", request=0)
    assert "As asked for" in (tmp_path / "report.html").read_text(encoding="utf8")
    with pytest.raises(ConfigError, match="the report cannot be written: No such file or directory"):
        write_report(whole, summarize(whole), "a: 1", tmp_path / "none" / "report.html")


def test_what_went_between_clusters_is_told() -> None:
    text = page_of(two_clusters())
    assert '<th scope="row">far &gt; near</th>' in text and "Gbps of 8" in text
    assert "between 100 and infinite; it changed 2 times" in text
    assert "far &lt;p&gt; becomes a decode node" in text
    assert "Between clusters" not in page_of(RESULTS["one"])
