"""What one accelerator can do at best: data-sheet peaks, never measured efficiencies.

Peaks are dense (no sparsity); bandwidths are bytes per second in one direction and for one accelerator.
Sources: vendor data sheets as collected by AIConfigurator, InferSim and LLM-Viewer; memory as nvidia-smi
reports it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

from isthmus.core.errors import ConfigError

_NVME_GEN4 = {"ssd_read_bw": 6.8e9, "ssd_write_bw": 4.0e9}  # one data-centre PCIe 4.0 x4 drive for each GPU
_NVME_GEN5 = {"ssd_read_bw": 13.0e9, "ssd_write_bw": 6.6e9}  # the same, PCIe 5.0
_MIB = 1 << 20


class Hardware(msgspec.Struct, frozen=True):
    """One accelerator. `memory_bytes`: as the driver reports it. A peak of 0: the format is not supported.

    `link_bw`: to the others of a tensor-parallel group (NVLink, else PCIe). `nic_bw`: to other nodes.
    """

    name: str
    generation: str
    bf16_flops: float
    fp8_flops: float
    memory_bytes: int
    memory_bw: float
    link_bw: float
    pcie_bw: float
    nic_bw: float
    ssd_read_bw: float
    ssd_write_bw: float
    fp4_flops: float = 0.0

    def __post_init__(self) -> None:
        for field in ("bf16_flops", "memory_bytes", "memory_bw", "link_bw", "pcie_bw", "nic_bw", "ssd_read_bw"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"hardware {self.name}: {field} must be above 0")


_ALL = (
    Hardware("a100", "ampere", 312e12, 0.0, 81_920 * _MIB, 2.039e12, 300e9, 32e9, 25e9, **_NVME_GEN4),
    Hardware("a800", "ampere", 312e12, 0.0, 81_920 * _MIB, 2.039e12, 200e9, 32e9, 25e9, **_NVME_GEN4),
    Hardware("h100", "hopper", 989e12, 1_979e12, 81_559 * _MIB, 3.35e12, 450e9, 64e9, 50e9, **_NVME_GEN5),
    Hardware("h800", "hopper", 989e12, 1_979e12, 81_559 * _MIB, 3.35e12, 200e9, 64e9, 50e9, **_NVME_GEN5),
    Hardware("h200", "hopper", 989e12, 1_979e12, 143_771 * _MIB, 4.8e12, 450e9, 64e9, 50e9, **_NVME_GEN5),
    Hardware("h20", "hopper", 148e12, 296e12, 97_871 * _MIB, 4.0e12, 450e9, 64e9, 25e9, **_NVME_GEN5),
    Hardware("b200", "blackwell", 2_250e12, 4_500e12, 183_359 * _MIB, 7.7e12, 900e9, 64e9, 50e9, **_NVME_GEN5,
             fp4_flops=9_000e12),
    Hardware("l20", "ada", 119.5e12, 239e12, 46_068 * _MIB, 0.864e12, 32e9, 32e9, 25e9, **_NVME_GEN4),
    Hardware("l40s", "ada", 362e12, 733e12, 46_068 * _MIB, 0.864e12, 32e9, 32e9, 25e9, **_NVME_GEN4),
    Hardware("rtx4090", "ada", 165.2e12, 330.3e12, 24_564 * _MIB, 1.008e12, 32e9, 32e9, 3.125e9, **_NVME_GEN4),
)  # fmt: skip
# Two virtual cores of a 2024 Xeon (AVX-512, no AMX) in the cloud, the machine `isthmus profile` was written on.
# Best of 7: a 2048^3 float32 matrix product of torch, the sum of 1 GiB; dd with direct I/O for the disk. The
# network is assumed.
_CPU = Hardware(
    name="cpu",
    generation="cpu",
    bf16_flops=2.6e11,
    fp8_flops=0.0,
    memory_bytes=25_276_510_208,
    memory_bw=22e9,
    link_bw=22e9,
    pcie_bw=22e9,
    nic_bw=1.25e9,
    ssd_read_bw=0.97e9,
    ssd_write_bw=1.1e9,
)
HARDWARE: dict[str, Hardware] = {hardware.name: hardware for hardware in (*_ALL, _CPU)}


def hardware_named(name: str) -> Hardware:
    """The table's entry. Raises ConfigError naming the nearest entry."""
    found = HARDWARE.get(name)
    if found is None:
        raise ConfigError(f"hardware {name!r} is not known; {_hint(name, HARDWARE)}")
    return found


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, [*known], n=1, cutoff=0.3)
    return (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(known)}"


# Coefficients of engines. Every efficiency is in (0, 1], so no estimate is faster than the data sheet.


EFFICIENCIES = ("weight_read", "matmul", "kv_read", "link", "attention", "expert_read", "expert_matmul")
OVERHEADS = ("layer_s", "sequence_s", "allreduce_s", "step_s", "moe_layer_s", "request_s")


class Coefficients(msgspec.Struct, frozen=True):
    """Efficiencies are shares of the data-sheet peak, overheads are seconds; symbols of the docs in brackets.

    weight_read [e_w]  memory bandwidth reached while weights are streamed
    matmul [e_f]       matrix multiplication, share of the peak at the weights' precision
    kv_read [e_kv]     memory bandwidth reached by decode attention
    layer_s [t_l]      fixed cost of a layer: launches, norms, tails
    sequence_s [t_seq] per sequence and step: sampling, scheduling, detokenising
    allreduce_s [a_ar] latency of an all-reduce, times log2 of the group
    step_s [t_step]    host cost of an iteration
    link [e_nv]        share of the one-way link bandwidth
    one_shot [x1]      share of decode all-reduces that send everything to everybody at once
    attention [e_at]   prefill attention, share of the bf16 peak
    expert_read, expert_matmul, moe_layer_s [e_x, e_fx, t_lm]  the same for mixture-of-experts layers
    request_s [t_api]  per request before its first token, outside the engine's iterations; in no step
    """

    weight_read: float
    matmul: float
    kv_read: float
    layer_s: float
    sequence_s: float
    allreduce_s: float
    step_s: float = 1.0e-3
    link: float = 0.70
    one_shot: float = 1.0
    attention: float = 0.50
    expert_read: float = 0.8
    expert_matmul: float = 0.12
    moe_layer_s: float = 45e-6
    request_s: float = 38e-3
    origin: str = ""

    def __post_init__(self) -> None:
        for name in (*EFFICIENCIES, *OVERHEADS, "one_shot"):
            value = getattr(self, name)
            fits, must = 0 <= value <= 1, "0 to 1"
            if name in EFFICIENCIES:
                fits, must = 0 < value <= 1, "above 0, at most 1"
            elif name in OVERHEADS:
                fits, must = 0 <= value < 10, "0 to 10 seconds"
            if not fits:
                raise ConfigError(f"cost coefficient {name} is {value}; it must be {must}")

    def but(self, **changes: Any) -> Coefficients:
        """A copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)


_H200 = (
    "least squares on all 126 H200 rows of Llama-3.1-70B fp8 with TTFT below 5 s (AIConfigurator silicon table)"
)
_SHARED = {"weight_read": 0.870, "matmul": 0.695, "sequence_s": 21.1e-6, "allreduce_s": 2.18e-6}
ENGINES: dict[str, Coefficients] = {
    "trtllm": Coefficients(**_SHARED, kv_read=0.820, layer_s=21.9e-6, one_shot=1.0, origin=_H200),
    "vllm": Coefficients(**_SHARED, kv_read=0.368, layer_s=43.5e-6, one_shot=0.3, origin=_H200),
    "sglang": Coefficients(**_SHARED, kv_read=0.368, layer_s=43.5e-6, one_shot=0.3, origin="as vllm, " + _H200),
}
"""Fitted on Hopper with fp8 weights and fp8 KV. `engine_coefficients` carries them over to other hardware."""

# Ratios of kernel tables to those of Hopper with fp8 weights: (weight_read, matmul). Roofline fits of the GEMM
# tables of AIConfigurator (H200, B200, and L40S for ada), of LLMServingSim (RTX 4090) and of Vidur (A100; its
# H100 table and AIConfigurator's are averaged for bf16 on Hopper). `python -m benchmarks cost` prints the fits.
_KERNELS: dict[tuple[str, str], tuple[float, float]] = {
    ("hopper", "fp8"): (1.0, 1.0),
    ("hopper", "bf16"): (1.0, 1.09),
    ("blackwell", "fp8"): (0.92, 0.76),
    ("blackwell", "bf16"): (1.02, 1.0),
    ("blackwell", "nvfp4"): (0.88, 0.65),
    ("ampere", "bf16"): (0.95, 1.07),
    ("ada", "fp8"): (0.86, 0.76),
    ("ada", "bf16"): (0.93, 0.91),
    ("rtx4090", "bf16"): (1.12, 1.3),
}
_MAX_MATMUL = 0.9
# Attention kernels read KV at about this share, all but one: FlashAttention 3 with fp8 KV.
_KV_READ = 0.82


def engine_coefficients(
    engine: str, hardware: Hardware, *, weight_dtype: str = "fp8", kv_dtype: str = "fp8"
) -> Coefficients:
    """A preset carried over to other hardware and precisions. Raises ConfigError for an unknown engine.

    Overheads and link shares are kept; weight_read and matmul move with the ratio of kernel tables of the
    generation (nothing moves within Hopper); kv_read leaves the FlashAttention 3 value when that kernel is not
    the one in use.
    """
    preset = ENGINES.get(engine)
    if preset is None:
        raise ConfigError(f"engine {engine!r} has no cost coefficients; {_hint(engine, ENGINES)}")
    return carry_over(preset, hardware, weight_dtype=weight_dtype, kv_dtype=kv_dtype)


def carry_over(
    coefficients: Coefficients, hardware: Hardware, *, weight_dtype: str = "fp8", kv_dtype: str = "fp8"
) -> Coefficients:
    """Coefficients fitted on Hopper with fp8 weights and KV, for other hardware and precisions."""
    changes: dict[str, float] = {}
    # What the hardware cannot multiply as stored is widened to bf16: then that kernel's share counts.
    native = {"fp8": hardware.fp8_flops, "nvfp4": hardware.fp4_flops}.get(weight_dtype, 0.0)
    dtype = weight_dtype if native else "bf16"
    ratios = _KERNELS.get((hardware.name, dtype)) or _KERNELS.get((hardware.generation, dtype))
    if ratios is not None and ratios != (1.0, 1.0):
        changes["weight_read"] = min(coefficients.weight_read * ratios[0], 1.0)
        changes["matmul"] = min(coefficients.matmul * ratios[1], _MAX_MATMUL)
    if hardware.generation != "hopper" or kv_dtype != "fp8":
        changes["kv_read"] = max(coefficients.kv_read, _KV_READ)
    return coefficients.but(**changes) if changes else coefficients
