"""`python -m benchmarks reuse-simulated`: what KV of other prompts is worth to a deployment, in virtual time.

The same prompts, at the same times, four times: as they come, and each way in which they may be assembled
(docs/reuse.md). Nothing here says whether answers stay good: that is `isthmus bench reuse`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from isthmus.config import load_config
from isthmus.lab.sim.deployment import deployment_of
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.summary import Summary, summarize
from isthmus.lab.sim.workloads import generate

WAYS = (("exact", "cacheblend"), ("chunks", "cacheblend"), ("chunks", "epic"), ("semantic", "cacheblend"))
"""What prompts ask for, and the selector for chunks."""
PARTS = ("exact", "moved", "similar")


class Plan(msgspec.Struct, frozen=True):
    """`workload`: a specification without `rate` and `reuse`."""

    config: Path
    rates: tuple[float, ...]
    workload: str


class Turn(msgspec.Struct, frozen=True):
    """One simulation."""

    rate: float
    reuse: str
    selector: str
    summary: Summary

    @property
    def name(self) -> str:
        return f"{self.reuse}, {self.selector}" if self.reuse == "chunks" else self.reuse


def run(plan: Plan, say: Callable[[str], None]) -> list[Turn]:
    return [_turn(plan, rate, *way, say) for rate in plan.rates for way in WAYS]


def _turn(plan: Plan, rate: float, reuse: str, selector: str, say: Callable[[str], None]) -> Turn:
    workload = generate(f"{plan.workload},rate={rate:g},reuse={reuse}")
    config = load_config(plan.config, {"reuse.selector": selector})
    deployment = deployment_of(config, workload.block_size, plan.config.parent)
    turn = Turn(rate, reuse, selector, summarize(Simulation(deployment, workload).run()))
    say(f"{rate:g} requests/s, {turn.name}: done")
    return turn


def table(turns: Sequence[Turn]) -> Table:
    columns = (
        "requests/s",
        "reuse",
        "TTFT mean (s)",
        "P90 (s)",
        "in time (%)",
        "assembled (%)",
        "exact, moved, similar (%)",
    )
    made = Table(*columns, title="Simulated")
    for turn in turns:
        summary, use = turn.summary, turn.summary.reuse
        ttft = summary.ttft_s
        assembled, parts = "", f"{100 * summary.hit_rate_tokens:.0f}, 0, 0"
        if use is not None:
            tokens = [getattr(use, f"{part}_tokens") for part in PARTS]
            whole = sum(tokens) + use.recomputed_tokens
            assembled = f"{100 * use.assembled / max(1, use.requests):.0f}"
            parts = ", ".join(f"{100 * count / max(1, whole):.0f}" for count in tokens)
        made.add_row(
            f"{turn.rate:g}",
            turn.name,
            f"{ttft.mean:.3f}" if ttft else "",
            f"{ttft.p90:.3f}" if ttft else "",
            f"{100 * summary.goodput_share:.1f}",
            assembled,
            parts,
        )
    return made
