"""`python -m benchmarks cost`: the cost model against the measured tables of a profiles folder.

The folder is not part of the product: it holds public measurements in CSV (see docs/cost-model.md for their
origins). Where the model fails, the error is printed like any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks import cost_kernels, cost_requests, cost_serving
from benchmarks.cost_tables import Finding
from isthmus.core.errors import ConfigError

_PARTS: tuple[Callable[[Path], Iterator[Finding]], ...] = (
    cost_serving.dense_findings,
    cost_serving.first_token_findings,
    cost_serving.expert_findings,
    cost_requests.request_findings,
    cost_serving.splitwise_findings,
    cost_serving.distserve_findings,
    cost_serving.capacity_findings,
    cost_serving.mooncake_findings,
    cost_serving.transfer_findings,
    cost_kernels.kernel_findings,
)
TARGETS = {"H200 other half": 4.0, "B200, kernel-scaled": 7.0}
"""Greatest acceptable error in percent of the lines of Llama-3.1-70B fp8 that are judged."""


def validate(profiles: Path) -> list[Finding]:
    """Every table's findings. Raises ConfigError naming a file the folder lacks."""
    found = []
    for part in _PARTS:
        try:
            found += list(part(profiles))
        except FileNotFoundError as error:
            raise ConfigError(
                f"profiles folder {profiles}: no file {error.filename}; give the whole folder"
            ) from None
    return found


def missed(found: list[Finding]) -> list[str]:
    """Targets that were not met, one line each."""
    return [
        f"{row.case}: {row.mape_percent:.1f} % is above {TARGETS[row.case]:.0f} %"
        for row in found
        if row.table.endswith("70B fp8") and row.mape_percent > TARGETS.get(row.case, float("inf"))
    ]


def main(profiles: Path, json_path: Path | None = None, report: Callable[[str], None] = print) -> list[Finding]:
    """Prints the table, writes it as JSON where asked, and returns it."""
    found = validate(profiles)
    table = ""
    for row in found:
        if row.table != table:
            table = row.table
            report(f"\n{table}\n  {'case':44} {'':12} {'rows':>5} {'MAPE %':>7} {'bias %':>7}")
        line = f"  {row.case:44} {row.kind:12} {row.rows:5} {row.mape_percent:7.1f} {row.bias_percent:+7.1f}"
        report(f"{line}  {row.note}".rstrip())
    report("")
    for line in missed(found) or ["the targets of Llama-3.1-70B fp8 are met"]:
        report(line)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    return found
