"""`isthmus compare`: the table, the page, and one line for each file that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.lab.sim.records import Result
from isthmus.lab.sim.report.curves import curves_of, to_json
from isthmus.lab.sim.summary import summarize
from tests.cli.conftest import Command
from tests.lab.sim.report.pages import Page, texts_of
from tests.lab.sim.report.results import record, replayed, result


def written(path: Path, whole: Result) -> Path:
    path.write_bytes(to_json(summarize(whole), curves_of(whole)))
    return path


def given(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_every_figure_of_two_simulations(isthmus: Command, tmp_path: Path) -> None:
    one, two = result([record(), record(1)]), result([record(times_s={"first_token": 4.5})], policy="mooncake")
    files = written(tmp_path / "one.json", one), written(tmp_path / "two.json", two)
    status, out, err = isthmus("compare", *files, "--json", tmp_path / "sheet.json")
    assert (status, err) == (0, "") and "| figure " in out and "policy: isthmus / mooncake" in out
    sheet = json.loads((tmp_path / "sheet.json").read_bytes())
    names = [column["name"] for column in sheet["columns"]]
    assert names == ["figure", "A: one.json", "B: two.json", "difference"]
    rows = {row[0]: row[1:] for row in sheet["rows"]}
    assert rows["requests"] == [2, 1, -50.0]
    assert rows["ttft_s.p90"] == [3.0, 3.5, pytest.approx(100 / 6)]
    assert rows["rejected.prefill"] == [0, 0, 0.0]
    assert not any(name.startswith("curves") for name in rows)
    assert sheet["notes"] == ["policy: isthmus / mooncake"]


def test_what_only_one_has_and_what_was_nothing_has_no_difference(isthmus: Command, tmp_path: Path) -> None:
    one = given(tmp_path / "a", {"x": 0, "old": 1, "same": True})
    _, out, _ = isthmus("compare", one, given(tmp_path / "b", {"x": 2, "new": 1e-3}))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if "|" in line]
    assert cells[2:] == [["x", "0", "2", "–"], ["old", "1", "–", "–"], ["new", "–", "0.001", "–"]]


def test_results_of_other_verbs_too_and_nothing_of_a_list_is_lost(isthmus: Command, tmp_path: Path) -> None:
    plans = [{"name": "plan 1", "codec": "none", "rate": 2.0}, {"name": "plan 2", "codec": "none", "rate": 1.0}]
    trials = [{"plan": "plan 1", "rate": 1.0}, {"plan": "plan 1", "rate": 3.0}]
    one = given(tmp_path / "a.json", {"plans": plans, "trials": trials})
    two = given(tmp_path / "b.json", {"plans": plans[::-1], "trials": trials[:1]})
    isthmus("compare", one, two, "--json", tmp_path / "sheet.json")
    rows = {row[0]: row[1:3] for row in json.loads((tmp_path / "sheet.json").read_bytes())["rows"]}
    assert rows["plans.plan 1.rate"] == [2.0, 2.0] and rows["plans.plan 2.rate"] == [1.0, 1.0]
    assert rows["trials.plan 1.rate"] == [1.0, 1.0] and rows["trials.plan 1 (2).rate"] == [3.0, None]


def test_both_runs_are_in_each_chart(isthmus: Command, tmp_path: Path) -> None:
    nasty = "<script>&.json"
    files = (written(tmp_path / nasty, replayed(400)), written(tmp_path / "two.json", replayed(300, seed=1)))
    status, _, err = isthmus("compare", *files, "--html", tmp_path / "page.html")
    assert (status, err) == (0, "")
    page = Page((tmp_path / "page.html").read_text())
    assert page.hashes() == page.allowed() and f"A: {nasty}" in page.text
    runs = ["A: &lt;script&gt;&amp;.json", "B: two.json"]
    load = ["Requests waiting for prefill", "Prefill nodes at work", "Requests in decode batches"]
    for title in (*load, "Time to first token", "Time between tokens", "Hit rate"):
        assert [trace["name"] for trace in page.charts[title]["data"]] == runs, title
    for trace in page.charts["What became of the requests"]["data"]:
        assert len(trace["x"]) == 2
    assert not [text for text in texts_of(list(page.charts.values())) if "<" in text]


def test_a_page_without_curves_has_the_table_and_says_so(isthmus: Command, tmp_path: Path) -> None:
    one = given(tmp_path / "one.json", {"rate": 1})
    isthmus("compare", one, one, "--html", tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert not page.charts and "Charts need what `isthmus simulate --json` writes." in page.text
    assert [cell.text for cell in page.root.iter("td")] == ["1", "1", "+0.0"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is no JSON"),
        (b'{"requests": 1,', "is no JSON"),
        (b'{"requests": NaN}', "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"3", "is 3, which holds no figures"),
        (b'{"words": "none"}', "have no figure in common; compare two results of the same verb"),
        (b'{"requests": 2, "curves": 7}', "its curves cannot be read"),
        (b'{"requests": 2, "curves": {"bin_s": 1}}', "missing required field `load`"),
        *[
            (changed, "B: bad.json: its curves cannot be read")
            for changed in (
                {"bin_s": 0},
                {"prompt_tokens": []},
                {"cached_tokens": {}},
                {"outcomes": {"failed": [1]}},
                {"ttft": {"edges_s": [1.0], "counts": [], "limits": [], "num_limits": 0}},
                {"ttft": {"edges_s": [0.0, 1.0], "counts": [1], "limits": [], "num_limits": 0}},
            )
        ],
    ],
)
def test_a_file_that_is_none_is_one_line(
    isthmus: Command, tmp_path: Path, content: bytes | dict[str, Any] | None, says: str
) -> None:
    """A mapping: what is changed of the curves of a good one."""
    good, bad = written(tmp_path / "good.json", result([record()])), tmp_path / "bad.json"
    if isinstance(content, bytes):
        bad.write_bytes(content)
    elif content is not None:
        value = json.loads(good.read_bytes())
        given(bad, value | {"curves": value["curves"] | content})
    status, out, err = isthmus("compare", good, bad, "--html", tmp_path / "page.html")
    assert (status, out) == (2, "") and not (tmp_path / "page.html").exists()
    assert err.startswith("isthmus: error: ") and err.count("\n") == 1 and "bad.json" in err and says in err
