"""All tables: their names, their cells, and which figures agree with the published ones."""

from __future__ import annotations

import math
from pathlib import Path
from re import fullmatch

import pytest

from isthmus.core.errors import ConfigError
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.registry import PAPERS, TABLES, named
from tests.lab.papers.traces import untraced, write_traces

PUBLISHED_ONLY = {"semsharekv-quality"}
"""Tables that say why nothing of ours stands beside what is published."""

AGREE = [
    ("sarathi-throughput", r"(13B on A6000, .*|33B on A100, 2K): throughput .*", 0.05),
    ("sarathi-balance", r"(chunks of 256, .* tokens|peak of chunks of .*|Orca at best): throughput .*", 0.05),
    ("sarathi-balance", r"peak of chunks of .*: P:D", 0.15),
    ("lamina-setup", r".*", 0.03),
    ("lamina-batch", r"mean: times", 0.1),
    ("infinite-llm-traffic", r"(32,768|131,072) tokens: queries travel .*", 0.2),
    ("infinite-llm-traffic", r".* tokens: KV travels .*", 0.3),
    ("prfaas-deployments", r".*: (all|remote prefill) \(req/s\)|PrfaaS-PD: (offloaded|decode).*", 0.02),
    ("prfaas-deployments", r".* instances.*", 0),
    ("prfaas-deployments", r".*: (TTFT .*|threshold .*)", 0.04),
    ("prfaas-deployments", r"PrfaaS-PD: egress \(Gbps\)", 0.06),
    ("prfaas-profile", r".*: KV \(MiB\)", 1e-3),
    ("prfaas-kv-size", r".*", 1e-3),
    ("prfaas-sizing", r"(?!.*bound).*", 0.03),
    ("prfaas-interpolation", r".*: (all|threshold) .*", 0.03),
    ("prfaas-interpolation", r".*: prefill instances here", 0),
    ("semsharekv-ttft", r"most, .*: donor on the GPU .*", 0.2),
]
"""Table, the cells meant (`row: column`), and the largest difference as a share of the published figure."""


@pytest.mark.parametrize(("table", "cells", "most"), AGREE)
def test_figures_agree_with_the_published_ones(table: str, cells: str, most: float) -> None:
    found = [row for row in untraced(table) if fullmatch(cells, f"{row['row']}: {row['column']}")]
    assert found
    for row in found:
        assert row["ours"] == pytest.approx(row["published"], rel=most), row


def test_names_lead_to_tables() -> None:
    assert named("mooncake") == PAPERS["mooncake"]
    assert named("mooncake-ratio") == (TABLES["mooncake-ratio"],)
    assert all(table.name.startswith(f"{paper}-") for paper, tables in PAPERS.items() for table in tables)
    with pytest.raises(ConfigError, match="did you mean 'mooncake-network'"):
        named("mooncake-netwrok")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder: Path = tmp_path_factory.mktemp("traces")
    write_traces(
        folder, "poisson:rate=6,num=40,input=lognormal(p50=6000,p99=40000),output=40,turns=3,think_s=9"
    )
    return Lab(folder)


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_has_a_figure_or_a_reason(lab: Lab, name: str) -> None:
    needs_traces = bool(TABLES[name].traces)
    rows = untraced(name)
    assert len({(row["row"], row["column"]) for row in rows}) == len(rows) > 0
    for row in rows:
        assert (row["ours"] is None) == (needs_traces or name in PUBLISHED_ONLY)
    for row in [*rows, *(TABLES[name].rows(lab) if needs_traces else ())]:
        assert row["table"] == name
        assert ("reason" in row) == (row["published"] is None or row["ours"] is None)
        assert row["ours"] is None or math.isfinite(row["ours"])
