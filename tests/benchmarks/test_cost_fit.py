"""The fit finds the coefficients that made the rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.cost_fit import ServingRow, closed_loop_tpot_s, fit_engine, fit_engines, predicted_tpot_s
from isthmus.core.cost import ENGINES
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
    for engine in engines:
        for gpus in (1, 2, 4, 8):
            for prompt, output in SHAPES:
                for concurrency in (4, 16, 64):
                    row = ServingRow(engine, instance(num_gpus=gpus), prompt, output, concurrency, 1.0)
                    tpot_s = predicted_tpot_s(row, TRUTH[engine])
                    rows.append(ServingRow(engine, row.instance, prompt, output, concurrency, tpot_s))
    return rows


def test_two_engines_share_what_belongs_to_the_gpu() -> None:
    fitted = fit_engines(rows_of(["trtllm", "vllm"]), ENGINES)
    for engine, truth in TRUTH.items():
        for name in ("weight_read", "matmul", "sequence_s", "kv_read", "layer_s"):
            assert getattr(fitted[engine], name) == pytest.approx(getattr(truth, name), rel=0.01), (
                engine,
                name,
            )
    assert fitted["trtllm"].weight_read == fitted["vllm"].weight_read


def test_one_engine_alone_and_only_what_is_free() -> None:
    fitted = fit_engine(rows_of(["vllm"]), TRUTH["vllm"].but(weight_read=0.5), free=("weight_read",))
    assert fitted.weight_read == pytest.approx(0.80, rel=1e-3)
    assert fitted.but(weight_read=0.80) == TRUTH["vllm"]


def test_a_fit_stays_physical() -> None:
    """Rows twice as fast as the hardware allows: the efficiencies end at their bound."""
    rows = [
        ServingRow(r.engine, r.instance, r.prompt_tokens, r.output_tokens, r.concurrency, r.tpot_s / 3)
        for r in rows_of(["trtllm"])
    ]
    fitted = fit_engine(rows, ENGINES["trtllm"], free=("weight_read", "matmul", "kv_read"))
    assert fitted.weight_read == 1.0


def test_more_clients_never_make_a_token_quicker() -> None:
    times = [closed_loop_tpot_s(instance(), 1024, 1024, concurrency) for concurrency in (1, 4, 16, 64, 256)]
    assert times == sorted(times)


def test_kv_memory_limits_the_batch() -> None:
    one = instance(num_gpus=1)
    assert closed_loop_tpot_s(one, 8192, 1024, 512) == closed_loop_tpot_s(one, 8192, 1024, 4096)
