"""Kernel tables against a roofline with three coefficients: is the shape of the model's terms right?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.cost_tables import Finding, Kernel, read, roofline_finding
from isthmus.core.cost import Hardware, hardware_named

_CACHE_BYTES = 100e6  # what is smaller may be read from the L2 cache over and over by a microbenchmark
_MIN_ROWS = 12
_DELTA_CHUNK = 64

Tagged = Iterator[tuple[str, Kernel]]


def kernel_findings(profiles: Path) -> Iterator[Finding]:
    """One finding for each group of each kernel table."""
    tables: list[tuple[str, Callable[[Path], Tagged], str]] = [
        ("aiconfigurator gemm", _gemm, "aiconfigurator/gemm.csv"),
        ("aiconfigurator prefill attention", _prefill_attention, "aiconfigurator/context_attention.csv"),
        ("aiconfigurator decode attention", _decode_attention, "aiconfigurator/generation_attention.csv"),
        ("aiconfigurator MLA module", _latent_attention, "aiconfigurator/mla_module.csv"),
        ("aiconfigurator linear attention", _linear_attention, "aiconfigurator/linear_attention_kda_gdn.csv"),
        ("vidur mlp", _vidur, "vidur/mlp_median_ms.csv"),
        ("frontier attention", _frontier, "frontier/a800_llama2_7b_attention_median_ms.csv"),
        ("infersim gemm", _infersim_gemm, "infersim/gemm.csv"),
        ("infersim attention", _infersim_attention, "infersim/mha.csv"),
        ("infersim MLA", _infersim_latent, "infersim/mla.csv"),
        ("aiconfigurator all-reduce", _all_reduce, "aiconfigurator/collectives.csv"),
        (
            "llmservingsim attention",
            _rtx4090_attention,
            "llmservingsim/RTX4090_Llama-3.1-8B_bf16_tp1/attention.csv",
        ),
        ("llmservingsim dense", _rtx4090_dense, "llmservingsim/RTX4090_Llama-3.1-8B_bf16_tp1/dense.csv"),
    ]
    for table, parse, path in tables:
        groups: dict[str, list[Kernel]] = defaultdict(list)
        for case, kernel in parse(profiles / path):
            groups[case].append(kernel)
        for case in sorted(groups):
            if len(groups[case]) >= _MIN_ROWS:
                yield roofline_finding(table, case, groups[case])


def _hardware(system: str) -> Hardware:
    return hardware_named(system.removesuffix("_sxm"))


def _peak(gpu: Hardware, dtype: str) -> float:
    peaks = {"fp8": gpu.fp8_flops, "fp8_block": gpu.fp8_flops, "nvfp4": gpu.fp4_flops}
    return peaks.get(dtype, 0.0) or gpu.bf16_flops


def _kernel(gpu: Hardware, num_bytes: float, flops: float, seconds: float, *, peak: float = 0.0) -> Kernel:
    return Kernel(num_bytes / gpu.memory_bw, flops / (peak or gpu.bf16_flops), seconds)


def _gemm(path: Path) -> Tagged:
    sizes = {"bfloat16": 2.0, "nvfp4": 0.5625}
    for row in read(path):
        gpu, dtype = _hardware(row["system"]), row["gemm_dtype"]
        m, n, k, size = int(row["m"]), int(row["n"]), int(row["k"]), sizes.get(dtype, 1.0)
        if n * k * size < _CACHE_BYTES:
            continue
        num_bytes = (n * k + m * k) * size + 2 * m * n
        seconds = float(row["latency_ms"]) / 1e3
        yield f"{gpu.name} {dtype}", _kernel(gpu, num_bytes, 2 * m * n * k, seconds, peak=_peak(gpu, dtype))


def _prefill_attention(path: Path) -> Tagged:
    for row in read(path):
        if int(row["window_size"]):
            continue
        gpu, batch, length = _hardware(row["system"]), int(row["batch_size"]), int(row["isl"])
        heads, kv_heads, size = int(row["num_heads"]), int(row["num_key_value_heads"]), int(row["head_dim"])
        flops = 4 * heads * size * batch * length * length / 2
        num_bytes = 2 * batch * length * size * (2 * heads + 2 * kv_heads)
        seconds = float(row["latency_ms"]) / 1e3
        yield f"{gpu.name} {row['kv_cache_dtype']} KV", _kernel(gpu, num_bytes, flops, seconds)


def _decode_attention(path: Path) -> Tagged:
    for row in read(path):
        gpu, batch, context = _hardware(row["system"]), int(row["batch_size"]), int(row["past_kv_tokens"])
        heads, kv_heads, size = int(row["num_heads"]), int(row["num_key_value_heads"]), int(row["head_dim"])
        num_bytes = 2 * kv_heads * size * batch * context * (1 if "fp8" in row["kv_cache_dtype"] else 2)
        if int(row["window_size"]) or num_bytes < _CACHE_BYTES:
            continue
        flops = 4 * heads * size * batch * context
        seconds = float(row["latency_ms"]) / 1e3
        yield f"{gpu.name} {row['kv_cache_dtype']} KV", _kernel(gpu, num_bytes, flops, seconds)


def _latent_attention(path: Path) -> Tagged:
    """Whole MLA modules of DeepSeek-V3 shape: projections, and attention over the compressed KV."""
    for row in read(path):
        gpu, heads, batch = _hardware(row["system"]), int(row["num_heads"]), int(row["batch_size"])
        new, past = int(row["isl"]), int(row["step"])
        dtype = row["gemm_type"]
        size = {"bfloat16": 2.0, "nvfp4": 0.5625}.get(dtype, 1.0)
        params = 7168 * (1536 + 576) + heads * (1536 * 192 + 512 * 256 + 128 * 7168)
        decode = row["op_name"].startswith("mla_generation")
        context = past + new
        per_pair = 2 * heads * ((576 + 512) if decode else (192 + 128))
        pairs = batch * context if decode else batch * new * (past + new / 2)
        kv_bytes = 576 * batch * context * (1 if row["kv_cache_dtype"] == "fp8" else 2)
        # Attention runs at the bf16 peak whatever the projections' precision is: express both in one unit.
        share = gpu.bf16_flops / _peak(gpu, dtype)
        flops = per_pair * pairs + 2 * params * batch * new * share
        phase = "decode" if decode else "prefill"
        kernel = _kernel(gpu, params * size + kv_bytes, flops, float(row["latency_ms"]) / 1e3)
        yield f"{gpu.name} {phase} {dtype}, {row['kv_cache_dtype']} KV", kernel


def _linear_attention(path: Path) -> Tagged:
    """The recurrent kernels proper; short convolutions and multi-token verification are left out."""
    for row in read(path):
        if row["phase"] == "verify" or "conv" in row["kernel_source"]:
            continue
        gpu, tokens, batch = _hardware(row["system"]), int(row["num_tokens"]), int(row["batch_size"])
        heads, size, keys = int(row["num_v_heads"]), int(row["head_v_dim"]), int(row["num_k_heads"])
        flops = heads * tokens * (6 * size * size + 3 * _DELTA_CHUNK * size + _DELTA_CHUNK**2)
        states = 2 * 4 * batch * heads * size * size
        inputs = 2 * tokens * size * (2 * keys + 2 * heads)
        case = f"{gpu.name} {row['framework']} {row['op_name']} {row['phase']}"
        yield case, _kernel(gpu, states + inputs, flops, float(row["latency_ms"]) / 1e3)


def _vidur(path: Path) -> Tagged:
    """The four projections of a layer on A100 and H100, fp16."""
    for row in read(path):
        if row["device"] not in ("a100", "h100"):
            continue
        gpu, workers, tokens = (
            _hardware(row["device"]),
            int(row["num_tensor_parallel_workers"]),
            int(row["num_tokens"]),
        )
        hidden, ffn = int(row["n_embd"]), int(row["n_expanded_embd"])
        kv_heads, heads = int(row["n_kv_head"]), int(row["n_head"])
        params = hidden * hidden * (2 + 2 * kv_heads / heads) + 3 * hidden * ffn
        names = ("attn_pre_proj_ms", "attn_post_proj_ms", "mlp_up_proj_ms", "mlp_down_proj_ms")
        seconds = sum(float(row[name]) for name in names) / 1e3
        kernel = _kernel(gpu, 2 * params / workers, 2 * params * tokens / workers, seconds)
        yield f"{gpu.name} {row['model'].split('/')[1]}", kernel


def _frontier(path: Path) -> Tagged:
    gpu = hardware_named("a800")
    for row in read(path):
        batch, new, past = int(row["batch_size"]), int(row["prefill_chunk_size"]), int(row["kv_cache_size"])
        prefill = row["is_prefill"] == "True"
        new = new if prefill else 1
        num_bytes = 2 * 2 * 4096 * batch * (past + new)
        flops = 4 * 4096 * batch * new * (past + new / 2)
        seconds = float(row["attn_prefill_ms" if prefill else "attn_decode_ms"]) / 1e3
        if seconds > 0:
            yield "a800 " + ("prefill" if prefill else "decode"), _kernel(gpu, num_bytes, flops, seconds)


def _infersim_gemm(path: Path) -> Tagged:
    for row in read(path):
        gpu, m, n, k = hardware_named(row["gpu"]), int(row["m"]), int(row["n"]), int(row["k"])
        # `mfu` tells the precision of the row: which peak it is a share of.
        flops, seconds = 2 * m * n * k, float(row["latency_us"]) / 1e6
        peak = flops / (seconds * float(row["mfu"])) if float(row["mfu"]) > 0 else gpu.bf16_flops
        eight_bit = peak > 1.5 * gpu.bf16_flops
        peak, size = (gpu.fp8_flops, 1) if eight_bit else (gpu.bf16_flops, 2)
        yield (
            f"{gpu.name} {'fp8' if eight_bit else 'bf16'}",
            _kernel(gpu, size * (n * k + m * k) + 2 * m * n, flops, seconds, peak=peak),
        )


def _infersim_attention(path: Path) -> Tagged:
    for row in read(path):
        gpu = hardware_named(row["gpu"])
        heads, kv_heads, size = map(int, row["shape"].split("-"))
        seconds = float(row["latency_us"]) / 1e6
        if row["phase"] == "decode":
            tokens = float(row["batch_size"]) * float(row["kv_len"])
            num_bytes = 2 * kv_heads * size * tokens * (1 if row["kv_dtype"] == "fp8" else 2)
            yield f"{gpu.name} decode", _kernel(gpu, num_bytes, 4 * heads * size * tokens, seconds)


def _infersim_latent(path: Path) -> Tagged:
    for row in read(path):
        if row["phase"] == "decode":
            gpu, tokens = hardware_named(row["gpu"]), float(row["batch_size"]) * float(row["kv_len"])
            kernel = _kernel(
                gpu, 2 * 576 * tokens, 2 * 128 * (576 + 512) * tokens, float(row["latency_us"]) / 1e6
            )
            yield f"{gpu.name} decode", kernel


def _rtx4090_dense(path: Path) -> Tagged:
    """The four projections of Llama-3.1-8B, each on its own."""
    params = {
        "qkv_proj": 4096 * 6144,
        "o_proj": 4096 * 4096,
        "gate_up_proj": 4096 * 28672,
        "down_proj": 4096 * 14336,
    }
    gpu = hardware_named("rtx4090")
    for row in read(path):
        if (size := params.get(row["layer"])) is not None:
            tokens = int(row["tokens"])
            yield "rtx4090 bf16", _kernel(gpu, 2 * size, 2 * size * tokens, float(row["time_us"]) / 1e6)


def _all_reduce(path: Path) -> Tagged:
    """Ring bytes over one link direction; `message_size` taken as 2-byte elements (docs/cost-model.md)."""
    for row in read(path):
        if row["op_name"] == "all_reduce":
            gpu, workers = _hardware(row["system"]), int(row["num_gpus"])
            ring_bytes = 2 * float(row["message_size"]) * 2 * (workers - 1) / workers
            kernel = Kernel(ring_bytes / gpu.link_bw, 0.0, float(row["latency_ms"]) / 1e3)
            yield f"{gpu.name} {row['lib']} {workers} GPUs", kernel


def _rtx4090_attention(path: Path) -> Tagged:
    """Attention of one layer of Llama-3.1-8B: prefill chunks after cached tokens, and decodes."""
    gpu = hardware_named("rtx4090")
    for row in read(path):
        new, past = int(row["prefill_chunk"]), int(row["kv_prefill"])
        decodes, context = int(row["n_decode"]), int(row["kv_decode"])
        if new and decodes:
            continue
        tokens = past + new + decodes * context
        pairs = new * (past + new / 2) + decodes * context
        kernel = _kernel(gpu, 2 * 2 * 8 * 128 * tokens, 4 * 32 * 128 * pairs, float(row["time_us"]) / 1e6)
        yield f"rtx4090 {'prefill' if new else 'decode'}", kernel
