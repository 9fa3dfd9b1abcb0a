"""Published serving tables and requests against the cost model; what was fitted on which rows is part of every line."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from isthmus.bench.profile import least_squares
from isthmus.core.conductor import Rules
from isthmus.core.cost import (
    ENGINES,
    Analytic,
    Coefficients,
    ModelFacts,
    compile_cost,
    engine_coefficients,
    facts_of,
    hardware_named,
)
from isthmus.core.cost.analytic import AnalyticCost
from isthmus.core.cost.hardware import carry_over
from isthmus.core.types import NS_PER_S, NodeId, Role
from isthmus.facts import NodeFacts, Sequences
from isthmus.lab.papers.prfaas import configs as published
from isthmus.lab.sim.deployment import FAR, Deployment
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import Request, Workload


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "head_dim": hidden // heads,
    }


def _latent(layers: int, heads: int, experts: int, dense: int, vocab: int) -> dict[str, Any]:
    """DeepSeek-V3 and its relatives."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": 7168,
        "num_attention_heads": heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": dense,
        "vocab_size": vocab,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-70B": _llama(80, 8192, 64, 8, 28_672, 128_256),
    "Llama-3.1-8B": _llama(32, 4096, 32, 8, 14_336, 128_256),
    "Llama-2-70B": _llama(80, 8192, 64, 8, 28_672, 32_000),
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 36,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "vocab_size": 201_088,
    },
    # The measured rows say in which precision each ran.
    "MiniMax-M2.5": published.CONFIGS["MiniMax-M2.5"] | {"quantization_config": None},
    "Qwen3-235B-A22B": published.CONFIGS["Qwen3-235B"],
    "Qwen3.5-397B-A17B": published.CONFIGS["Qwen3.5-397B"],
    "DeepSeek-R1": _latent(61, 128, 256, 3, 129_280),
    "Kimi-K2.5": _latent(61, 64, 384, 1, 163_840),
}


def facts(name: str) -> ModelFacts:
    return facts_of(CONFIGS[name])


_BLOCKS, _BLOCK = 2_588, 16  # what the engine reported for this run
_TOKEN_BUDGET, _MAX_RUNNING = 2_048, 256

Times = tuple[float, float, float]
"""When a request arrived, when its first token came and when its last, in seconds from the first arrival."""


def request_findings(profiles: Path) -> Iterator[Finding]:
    rows = list(read(profiles / "llmservingsim/vllm_requests_RTX4090_Llama-3.1-8B.csv"))
    # Engine times are on a monotonic clock: arrival is taken as `queued_ts`, from the same clock.
    rows.sort(key=lambda row: float(row["queued_ts"]))
    names = ("queued_ts", "first_token_ts", "last_token_ts")
    start = float(rows[0]["queued_ts"])
    seconds = [[float(row[name]) - start for name in names] for row in rows]
    measured: list[Times] = [(arrival_s, first_s, last_s) for arrival_s, first_s, last_s in seconds]
    requests = [
        Request(round(arrival_s * NS_PER_S), int(row["input_toks"]), int(row["output_toks"]))
        for row, (arrival_s, _, _) in zip(rows, measured, strict=True)
    ]
    kernel_scaled = engine_coefficients("vllm", hardware_named("rtx4090"), weight_dtype="bf16", kv_dtype="bf16")
    for case, coefficients in (
        ("kernel-scaled", kernel_scaled),
        ("H200 coefficients unchanged", ENGINES["vllm"]),
    ):
        yield from _compare(case, simulated(coefficients, requests), measured)


def simulated(coefficients: Coefficients, requests: Sequence[Request]) -> list[Times]:
    """On one node of the simulator, which prefills and decodes."""
    gpu = hardware_named("rtx4090")
    instance = Analytic(facts("Llama-3.1-8B"), gpu, coefficients, weight_dtype="bf16", kv_dtype="bf16")
    node = NodeFacts(
        NodeId("mixed-0"),
        Role.MIXED,
        instance,
        _BLOCKS,
        _BLOCK,
        token_budget=_TOKEN_BUDGET,
        sequences=Sequences(_MAX_RUNNING, _MAX_RUNNING, _MAX_RUNNING),
        max_steps=FAR,
        max_chunks=FAR,
    )
    workload = Workload("vLLM requests", _BLOCK, list(requests))
    records = Simulation(Deployment((node,), Rules(max_requests=1 << 40)), workload).run().records
    return [(r.arrival_ns / NS_PER_S, r.first_token_ns / NS_PER_S, r.end_ns / NS_PER_S) for r in records]


def _compare(case: str, ours: Sequence[Times], measured: Sequence[Times]) -> Iterator[Finding]:
    table = "llmservingsim, vLLM requests RTX 4090"
    pairs = list(zip(ours, measured, strict=True))
    tpots = [(a[2] - a[1]) / (b[2] - b[1]) - 1 for a, b in pairs]
    yield finding(table, f"TPOT, {case}", "no refit", tpots)
    yield finding(
        table, f"end to end, {case}", "no refit", [(a[2] - a[0]) / (b[2] - b[0]) - 1 for a, b in pairs]
    )
    means = [statistics.fmean(first - arrival for arrival, first, _ in side) for side in (ours, measured)]
    yield finding(table, f"mean TTFT, {case}", "no refit", [means[0] / means[1] - 1])
    spans = [max(last for _, _, last in side) for side in (ours, measured)]
    yield finding(table, f"makespan, {case}", "no refit", [spans[0] / spans[1] - 1])


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
