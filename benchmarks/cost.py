"""`python -m benchmarks cost`: the cost model against the measured tables of a profiles folder.

The folder is not part of the product: it holds public measurements in CSV (see docs/cost-model.md for their
origins). Where the model fails, the error is printed like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks import cost_tables
from benchmarks.cost_fit import Finding
from isthmus.bench.study import Columns, Outcome, Report, plain, silent, table
from isthmus.core.errors import ConfigError

_PARTS: tuple[Callable[[Path], Iterator[Finding]], ...] = (
    cost_tables.dense_findings,
    cost_tables.first_token_findings,
    cost_tables.expert_findings,
    cost_tables.request_findings,
    cost_tables.mooncake_findings,
)
TARGETS = {"H200 other half": 4.0, "B200, kernel-scaled": 7.0}
"""Greatest acceptable error in percent of the lines of Llama-3.1-70B fp8 that are judged."""
COLUMNS: Columns = {
    "case": "case",
    "": "kind",
    "rows": "rows",
    "MAPE %": lambda row: f"{row.mape_percent:.1f}",
    "bias %": lambda row: f"{row.bias_percent:+.1f}",
    "note": "note",
}


@dataclass(frozen=True)
class Plan:
    profiles: Annotated[Path, Option(help="Folder with the published measurements (docs/cost-model.md).")]


def run(plan: Plan, report: Report = silent) -> Outcome:
    """The cost model against published measurements: errors of every table, whether it fits or not.

    Raises ConfigError naming a file the folder lacks.
    """
    found: list[Finding] = []
    for part in _PARTS:
        try:
            found += part(plan.profiles)
        except FileNotFoundError as error:
            raise ConfigError(
                f"profiles folder {plan.profiles}: no file {error.filename}; give the whole folder"
            ) from None
        report(found[-1].table)
    tables = [table(name, COLUMNS, rows) for name, rows in itertools.groupby(found, lambda row: row.table)]
    return Outcome(tables, plain(found), missed(found) or ["the targets of Llama-3.1-70B fp8 are met"])


def missed(found: list[Finding]) -> list[str]:
    """Targets that were not met, one line each."""
    return [
        f"{row.case}: {row.mape_percent:.1f} % is above {TARGETS[row.case]:.0f} %"
        for row in found
        if row.table.endswith("70B fp8") and row.mape_percent > TARGETS.get(row.case, float("inf"))
    ]
