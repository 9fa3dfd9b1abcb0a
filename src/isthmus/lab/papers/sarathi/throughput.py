"""Peak gains of chunked prefills with piggybacked decodes (SARATHI, Table 4)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.sarathi import anchors
from isthmus.lab.papers.sarathi.gain import Shape, decode_speed_up, gain
from isthmus.lab.papers.sarathi.models import coefficients, on_a100
from isthmus.lab.papers.sarathi.one_node import StepTime
from isthmus.lab.papers.table import Cell, Table, compare

_CHUNK = 256

MATMUL, WEIGHT_READ = 0.46, 0.79
"""Shares of an A100's peaks: what fits both figures of `CALIBRATED` best, to a hundredth; no other row was used."""
CALIBRATED = Shape(1024, 10, 28)


class _Row(msgspec.Struct, frozen=True):
    name: str
    shape: Shape
    speed_up: float
    gain: float


_13B = (
    _Row("13B on A6000, 1K", Shape(1024, 6, 50), 5.45, 1.33),
    _Row("13B on A6000, 2K", Shape(2048, 6, 50), 3.26, 1.26),
    _Row("13B on A6000, 3K", Shape(3072, 6, 50), 2.51, 1.22),
)
_33B = (
    _Row("33B on A100, 1K", CALIBRATED, 3.83, 1.25),
    _Row("33B on A100, 2K", Shape(2048, 5, 63), 4.25, 1.22),
    _Row("33B on A100, 3K", Shape(3072, 3, 127), 3.51, 1.14),
)


def step_33b(matmul: float = MATMUL, weight_read: float = WEIGHT_READ) -> StepTime:
    _, cost = on_a100("33B", 1, coefficients().but(matmul=matmul, weight_read=weight_read))
    return cost.step_ps


def _measure(lab: Lab) -> Iterator[Cell]:
    for rows, step in ((_13B, anchors.step_ps), (_33B, step_33b())):
        for row in rows:
            yield from compare(
                row.name,
                {"decode speed-up (times)": row.speed_up, "throughput (times)": row.gain},
                {
                    "decode speed-up (times)": decode_speed_up(row.shape, step, _CHUNK),
                    "throughput (times)": gain(row.shape, step, _CHUNK),
                },
            )


TABLE = Table(
    name="sarathi-throughput",
    title="Peak gain over batches of prompts only and of decodes only, chunks of 256",
    source="SARATHI, Table 4",
    setup=(
        "One node, batches formed by our scheduler, in steady state. 13B: times from the printed anchors (Table 2 and "
        "tile quantisation), none of them of these rows; linear operators of piggybacked decodes are then free, so "
        "their speed-up is an upper bound. 33B: no time is printed; analytic cost model, two of its efficiencies "
        f"(matmul {MATMUL}, weight reads {WEIGHT_READ}) fitted to the 1K row, the others follow."
    ),
    measure=_measure,
)
