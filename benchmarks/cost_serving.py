"""End-to-end serving tables against the model: who was fitted on what is part of every line."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.cost_fit import (
    Finding,
    ServingRow,
    finding,
    fit_engine,
    fit_engines,
    halves,
    predicted_tpot_s,
    read,
)
from benchmarks.cost_models import facts
from isthmus.bench.profile import least_squares
from isthmus.core.cost import ENGINES, Analytic, Coefficients, compile_cost, engine_coefficients, hardware_named
from isthmus.core.cost.analytic import AnalyticCost
from isthmus.core.cost.hardware import carry_over

_SILICON = "aiconfigurator/silicon_e2e_ttft_tpot.csv"
_LENGTH_SHARE = 0.9  # the clients draw lengths between 0.8 and 1.0 of the nominal ones
_MAX_TTFT_MS = 5_000.0  # slower rows are saturated: they measure the queue
_SPLITS = 10
_EXPERTS = ("expert_read", "expert_matmul", "moe_layer_s")
_WEIGHTS = {"fp8": "fp8", "fp4": "nvfp4", "int4": "int4", "bf16": "bf16"}
Engines = Mapping[str, Coefficients]


def serving_rows(path: Path, model: str, system: str, precision: str) -> list[ServingRow]:
    """Aggregated runs of one model, GPU and precision, without saturated ones.

    Attention data parallelism is not modelled; rows whose weights cannot fit the GPUs they name ran with more.
    """
    return [found for row in read(path) for found in _rows_of(row, model, system, precision)]


def _rows_of(row: Mapping[str, str], model: str, system: str, precision: str) -> Iterator[ServingRow]:
    """The row of the table as a ServingRow, or nothing when it is of something else."""
    if model not in row["model_path"] or (row["system"], row["precision"]) != (system, precision):
        return
    if row["mode"] != "agg" or float(row["silicon_ttft_ms"]) >= _MAX_TTFT_MS:
        return
    if float(row["pp_size"] or 1) != 1 or float(row["attention_dp_size"] or 1) != 1:
        return
    weights = _WEIGHTS[precision]
    if "gpt-oss" in model:
        weights = "mxfp4" if system.startswith("h") else "nvfp4"
    instance = Analytic(
        model=facts(model),
        hardware=hardware_named(system.split("_")[0]),
        coefficients=ENGINES[row["backend"]],
        num_gpus=int(float(row["tp_size"])),
        weight_dtype=weights,
        kv_dtype="bf16" if precision in ("bf16", "int4") else "fp8",
    )
    if instance.fits:
        yield ServingRow(
            engine=row["backend"],
            instance=instance,
            prompt_tokens=_LENGTH_SHARE * float(row["isl"]),
            output_tokens=_LENGTH_SHARE * float(row["osl"]),
            concurrency=int(float(row["concurrency"] or row["batch_size"])),
            tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
        )


def errors_of(rows: Sequence[ServingRow], engines: Engines) -> list[float]:
    return [predicted_tpot_s(row, engines[row.engine]) / row.tpot_s - 1 for row in rows]


def _moved(
    engines: Engines, system: str, *, kernel_scaled: bool, weights: str = "fp8"
) -> dict[str, Coefficients]:
    """Coefficients of H200 for another GPU: with the KV rule only, or with the kernel tables' ratios too."""
    moved = {}
    for engine, coefficients in engines.items():
        there = carry_over(coefficients, hardware_named(system), weight_dtype=weights)
        moved[engine] = there if kernel_scaled else coefficients.but(kv_read=there.kv_read)
    return moved


def dense_findings(profiles: Path) -> Iterator[Finding]:
    """Llama-3.1-70B fp8: fitted on random halves of the H200 rows, judged on the other half and on B200."""
    path, model = profiles / _SILICON, "Llama-3.1-70B"
    h200, b200 = serving_rows(path, model, "h200_sxm", "fp8"), serving_rows(path, model, "b200_sxm", "fp8")
    errors: dict[str, list[list[float]]] = defaultdict(list)
    for seed in range(_SPLITS):
        first, second = halves(h200, seed)
        fitted = fit_engines(first, ENGINES)
        errors["H200 fit half"].append(errors_of(first, fitted))
        errors["H200 other half"].append(errors_of(second, fitted))
        errors["B200, unchanged"].append(errors_of(b200, _moved(fitted, "b200", kernel_scaled=False)))
        errors["B200, kernel-scaled"].append(errors_of(b200, _moved(fitted, "b200", kernel_scaled=True)))
    for case, runs in errors.items():
        means = [100 * statistics.fmean(map(abs, run)) for run in runs]
        note = f"mean of {_SPLITS} splits, sd {statistics.pstdev(means):.2f}"
        kind = "fitted" if case == "H200 fit half" else "held out" if "H200" in case else "no refit"
        pooled = finding("silicon TPOT, Llama-3.1-70B fp8", case, kind, [e for run in runs for e in run], note)
        yield replace(pooled, rows=len(runs[0]))
    fp4 = serving_rows(path, model, "b200_sxm", "fp4")
    moved = _moved(ENGINES, "b200", kernel_scaled=True, weights="nvfp4")
    yield finding("silicon TPOT, Llama-3.1-70B nvfp4", "B200, kernel-scaled", "no refit", errors_of(fp4, moved))
    small = serving_rows(path, "Llama-3.1-8B", "h200_sxm", "fp8")
    for engine in sorted({row.engine for row in small}):
        rows = [row for row in small if row.engine == engine]
        yield finding("silicon TPOT, Llama-3.1-8B fp8", f"H200 {engine}", "no refit", errors_of(rows, ENGINES))


def first_token_findings(profiles: Path) -> Iterator[Finding]:
    """TTFT of Llama-3.1-70B fp8 at concurrency 4, the least queueing in the table; only request_s is fitted."""
    path, model = profiles / _SILICON, "Llama-3.1-70B"
    rows = {
        system: [
            (found, float(row["silicon_ttft_ms"]) / 1e3)
            for row in read(path)
            if (row["concurrency"] or row["batch_size"]) in ("4", "4.0")
            for found in _rows_of(row, model, system, "fp8")
        ]
        for system in ("h200_sxm", "b200_sxm")
    }

    # TensorRT-LLM below TP8 takes two to three times as long for the short prompt with short outputs as for the
    # very same prompt with long ones: a scheduling effect, in neither prompt nor model.
    def is_slowed(row: ServingRow) -> bool:
        is_short = row.output_tokens < 2000 > row.prompt_tokens
        return row.engine == "trtllm" and is_short and row.instance.num_gpus < 8

    kept = {system: [pair for pair in found if not is_slowed(pair[0])] for system, found in rows.items()}
    first, second = halves(kept["h200_sxm"], 0)

    def residuals(values: Sequence[float]) -> list[float]:
        return [
            math.log((values[0] + _work_before_first_token_s(row, ENGINES)) / ttft_s) for row, ttft_s in first
        ]

    (request_s,) = least_squares(residuals, (0.03,), ((1e-4, 0.5),))
    moved = _moved(ENGINES, "b200", kernel_scaled=True)
    note = f"request_s {1e3 * request_s:.0f} ms fitted on half of H200"
    for case, pairs, engines, kind in (
        ("H200 other half, concurrency 4", second, ENGINES, "held out"),
        ("B200, kernel-scaled, concurrency 4", kept["b200_sxm"], moved, "no refit"),
    ):
        errors = [(request_s + _work_before_first_token_s(row, engines)) / ttft_s - 1 for row, ttft_s in pairs]
        yield finding("silicon TTFT, Llama-3.1-70B fp8", case, kind, errors, note)


def _work_before_first_token_s(row: ServingRow, engines: Engines) -> float:
    """Half a running iteration, the first wave's share, the prompt, and the chance to meet another prompt."""
    cost = AnalyticCost(msgspec.structs.replace(row.instance, coefficients=engines[row.engine]))
    prompt, output, clients = row.prompt_tokens, row.output_tokens, row.concurrency
    step_s = cost.decode_ps(clients, clients * (prompt + output / 2)) / 1e12
    work_s = cost.prompt_work_ps(prompt) / 1e12
    prefill_s = cost.prefill_ns(round(prompt), 0) / 1e9
    wave = clients if clients * prompt <= 8192 else (clients + 1) / 2
    cycle_s = output * predicted_tpot_s(row, engines[row.engine]) + prefill_s
    return step_s / 2 + prefill_s + 0.1 * (wave - 1) * work_s + 0.9 * (clients - 1) * work_s**2 / cycle_s


def expert_findings(profiles: Path) -> Iterator[Finding]:
    """Mixture-of-experts models: default coefficients, and three fitted on a random half for the other."""
    path = profiles / _SILICON
    cases = (
        ("gpt-oss-120b", "fp4"),
        ("MiniMax-M2.5", "fp8"),
        ("Kimi-K2.5", "int4"),
        ("Qwen3-235B-A22B", "fp8"),
        ("Qwen3.5-397B-A17B", "fp8"),
        ("Qwen3.5-397B-A17B", "bf16"),
        ("DeepSeek-R1", "fp8"),
    )
    for model, precision in cases:
        for system in ("h200_sxm", "b200_sxm"):
            rows = serving_rows(path, model, system, precision)
            for engine in sorted({row.engine for row in rows}):
                yield from _expert_case(model, precision, [row for row in rows if row.engine == engine])


def _expert_case(model: str, precision: str, rows: Sequence[ServingRow]) -> Iterator[Finding]:
    first = rows[0]
    table, case = "silicon TPOT, experts", f"{model} {precision} {first.instance.hardware.name} {first.engine}"
    start = engine_coefficients(
        first.engine,
        first.instance.hardware,
        weight_dtype=first.instance.weight_dtype,
        kv_dtype=first.instance.kv_dtype,
    )
    yield finding(
        table, case, "no refit", errors_of(rows, {first.engine: start}), "default expert coefficients"
    )
    if len(rows) < 8:
        return
    errors: list[float] = []
    for seed in range(_SPLITS):
        one, other = halves(rows, seed)
        errors += errors_of(other, {first.engine: fit_engine(one, start, free=_EXPERTS)})
    fitted = fit_engine(rows, start, free=_EXPERTS)
    note = (
        f"3 fitted on half; on all rows read {fitted.expert_read:.2f}, matmul {fitted.expert_matmul:.2f}, "
        f"layer {1e6 * fitted.moe_layer_s:.0f} us"
    )
    yield replace(finding(table, case, "held out", errors, note), rows=len(rows))


# Seconds of one prompt on 8 x A800 with LLaMA3-70B bf16: Mooncake, FAST'25, figure 14, as read from the plot.
_MOONCAKE_PREFILL_S = {8_192: 1.00, 16_384: 2.05, 32_768: 4.48, 65_536: 10.58, 131_072: 27.5}


def mooncake_findings(profiles: Path) -> Iterator[Finding]:
    """The prefill that Mooncake's policies were measured with, from the presets."""
    del profiles  # five published numbers, given above
    gpu = hardware_named("a800")
    by = engine_coefficients("vllm", gpu, weight_dtype="bf16", kv_dtype="bf16")
    cost = compile_cost(Analytic(facts("Llama-2-70B"), gpu, by, 8, "bf16", "bf16"))
    errors = [cost.prefill_ns(n, 0) / 1e9 / seconds - 1 for n, seconds in _MOONCAKE_PREFILL_S.items()]
    note = "from +-5 % up to 32k tokens to too slow at 128k"
    yield finding("mooncake, LLaMA3-70B bf16 8 x A800", "prefill 8k to 128k tokens", "no refit", errors, note)
