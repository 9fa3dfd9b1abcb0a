"""`isthmus reproduce`: the list, a table that needs no trace, and tables whose traces are absent."""

from __future__ import annotations

import json
from pathlib import Path

from isthmus.lab.papers.registry import PAPERS, TABLES
from tests.cli.conftest import Command


def test_without_a_name_all_tables_are_listed(isthmus: Command, tmp_path: Path) -> None:
    status, out, _ = isthmus("reproduce", "--json", tmp_path / "list.json")
    assert status == 0 and all(name in out for name in TABLES)
    listed = json.loads((tmp_path / "list.json").read_bytes())
    assert [entry["name"] for entry in listed] == list(TABLES)


def test_one_table_beside_the_published_one(isthmus: Command, tmp_path: Path) -> None:
    status, out, _ = isthmus("reproduce", "mooncake-request-cost", "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_bytes())
    assert status == 0 and "published" in out and "difference" in out and "Figure 14" in out
    assert all(set(row) == {"table", "row", "column", "published", "ours"} for row in rows)
    assert all(abs(row["ours"] / row["published"] - 1) < 0.1 for row in rows)


def test_what_hangs_on_an_inferred_input_has_a_star(isthmus: Command, tmp_path: Path) -> None:
    status, out, _ = isthmus("reproduce", "prfaas-deployments", "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_bytes())
    assert status == 0 and "*: hangs on inputs inferred" in " ".join(out.split())
    inferred = [row for row in rows if "inferred" in row]
    assert all(row["inferred"] is True for row in inferred) and 0 < len(inferred) < len(rows)
    assert out.count("* ") >= len(inferred) and "all (req/s)*" in out and "remote prefill (req/s)*" not in out


def test_a_paper_without_traces_says_so_in_each_row(isthmus: Command, tmp_path: Path) -> None:
    status, _, _ = isthmus("reproduce", "mooncake", "--json", tmp_path / "rows.json", "--traces", tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_bytes())
    assert status == 0 and {row["table"] for row in rows} == {table.name for table in PAPERS["mooncake"]}
    for row in rows:
        assert (row["ours"] is None) == (row["table"] != "mooncake-request-cost")
        assert row["ours"] is not None or (
            "_trace.jsonl in " in row["reason"] and str(tmp_path) in row["reason"]
        )


def test_a_mistake_is_one_line(isthmus: Command, tmp_path: Path) -> None:
    for arguments, says in (
        (("mooncake-capcity",), "did you mean 'mooncake-capacity'?"),
        (("mooncake", "--traces", tmp_path / "absent"), "is no folder"),
        (("mooncake", "--json", tmp_path / "absent" / "rows.json"), "no folder"),
    ):
        status, out, err = isthmus("reproduce", *arguments)
        assert status == 2 and out == "" and says in err and err.count("\n") == 1


def test_a_bad_line_of_a_trace_ends_it(isthmus: Command, tmp_path: Path) -> None:
    (tmp_path / "conversation_trace.jsonl").write_text("{}\n")
    status, _, err = isthmus("reproduce", "mooncake-scheduling", "--traces", tmp_path)
    assert status == 2 and "conversation_trace.jsonl:1: " in err
