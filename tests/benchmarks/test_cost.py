"""The fit finds the coefficients that made the rows, and what misses its target is named."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from msgspec.structs import replace

from benchmarks.cost_fit import (
    ServingRow,
    closed_loop_tpot_s,
    fit_engines,
    predicted_tpot_s,
)
from benchmarks.cost_tables import simulated
from isthmus.core.cost import ENGINES
from isthmus.lab.sim.workloads import Request
from tests.core.cost.models import instance

TRUTH = {
    "trtllm": ENGINES["trtllm"].but(
        weight_read=0.80, matmul=0.55, sequence_s=15e-6, kv_read=0.7, layer_s=15e-6
    ),
    "vllm": ENGINES["vllm"].but(weight_read=0.80, matmul=0.55, sequence_s=15e-6, kv_read=0.5, layer_s=55e-6),
}
SHAPES = [(1024, 1024), (1024, 8192), (8192, 1024)]


def rows_of(engines: Sequence[str]) -> list[ServingRow]:
    rows = []
    for engine, gpus, (prompt, output), concurrency in product(engines, (1, 2, 4, 8), SHAPES, (4, 16, 64)):
        row = ServingRow(engine, instance(num_gpus=gpus), prompt, output, concurrency, 1.0)
        rows.append(replace(row, tpot_s=predicted_tpot_s(row, TRUTH[engine])))
    return rows


def test_two_engines_share_what_belongs_to_the_gpu() -> None:
    fitted = fit_engines(rows_of(["trtllm", "vllm"]), ENGINES)
    for engine, truth in TRUTH.items():
        for name in ("weight_read", "matmul", "sequence_s", "kv_read", "layer_s"):
            assert getattr(fitted[engine], name) == pytest.approx(getattr(truth, name), rel=0.01)
    assert fitted["trtllm"].weight_read == fitted["vllm"].weight_read


def test_more_clients_never_make_a_token_quicker_and_kv_memory_limits_them() -> None:
    times = [closed_loop_tpot_s(instance(), 1024, 1024, concurrency) for concurrency in (1, 4, 16, 64, 256)]
    assert times == sorted(times)
    one = instance(num_gpus=1)
    assert closed_loop_tpot_s(one, 8192, 1024, 512) == closed_loop_tpot_s(one, 8192, 1024, 4096)


def test_requests_of_a_simulated_node_are_in_seconds_from_the_first() -> None:
    alone, beside = (
        simulated(ENGINES["vllm"], [Request(0, 500, 20), *more])
        for more in ([], [Request(5_000_000, 2000, 20)])
    )
    [(arrival_s, first_s, last_s)] = alone
    assert arrival_s == 0 < first_s < last_s < 2
    assert beside[0][2] > last_s and beside[1][0] == 0.005, "a prompt delays the decodes beside it"
