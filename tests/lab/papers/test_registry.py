from __future__ import annotations

import pytest

from isthmus.core.errors import ConfigError
from isthmus.lab.papers.registry import PAPERS, TABLES, named
from tests.lab.papers.traces import untraced

PUBLISHED_ONLY = {"semsharekv-quality"}
"""Tables that say why nothing of ours stands beside what is published."""


def test_names_lead_to_tables() -> None:
    assert named("mooncake") == PAPERS["mooncake"]
    assert named("mooncake-ratio") == (TABLES["mooncake-ratio"],)
    assert len(TABLES) == sum(map(len, PAPERS.values()))
    assert all(table.name.startswith(f"{paper}-") for paper, tables in PAPERS.items() for table in tables)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mooncake-network'"):
        named("mooncake-netwrok")


def test_without_traces_every_cell_is_there_with_the_reason() -> None:
    for table in TABLES.values():
        rows = untraced(table.name)
        assert len({(row["row"], row["column"]) for row in rows}) == len(rows)
        for row in rows:
            assert row["table"] == table.name
            assert (row["ours"] is None) == (bool(table.traces) or table.name in PUBLISHED_ONLY)
            assert ("reason" in row) == (row["published"] is None or row["ours"] is None)
