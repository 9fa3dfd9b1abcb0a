"""Small traces under the names of the published ones, and the rows of tables."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from isthmus.lab.papers.lab import FILES, Lab
from isthmus.lab.papers.registry import TABLES
from isthmus.lab.sim.workloads import generate


@cache
def untraced(name: str) -> tuple[dict[str, Any], ...]:
    """Rows of a table without traces, computed once for all tests of a worker."""
    return tuple(TABLES[name].rows(Lab(None)))


def ours(name: str, lab: Lab | None = None) -> dict[tuple[str, str], Any]:
    """Our figures by row and column."""
    rows = untraced(name) if lab is None else TABLES[name].rows(lab)
    return {(row["row"], row["column"]): row["ours"] for row in rows}


def starred(name: str) -> set[tuple[str, str]]:
    """Row and column of each figure that depends on an inferred input."""
    return {(row["row"], row["column"]) for row in untraced(name) if row.get("inferred")}


def write_traces(folder: Path, spec: str) -> None:
    """The same generated workload for every trace."""
    lines = [
        {
            "timestamp": request.arrival_ns // 1_000_000,
            "input_length": request.num_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.blocks,
        }
        for request in generate(spec).requests
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for name in FILES.values():
        (folder / name).write_text(text)
