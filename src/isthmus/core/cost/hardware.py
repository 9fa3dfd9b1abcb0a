"""What one accelerator can do at best: data-sheet peaks, never measured efficiencies.

Peaks are dense (no sparsity); bandwidths are bytes per second in one direction and for one accelerator.
Sources: vendor data sheets as collected by AIConfigurator, InferSim and LLM-Viewer; memory as nvidia-smi
reports it.
"""

from __future__ import annotations

import difflib

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
    Hardware(
        "b200",
        "blackwell",
        2_250e12,
        4_500e12,
        183_359 * _MIB,
        7.7e12,
        900e9,
        64e9,
        50e9,
        **_NVME_GEN5,
        fp4_flops=9_000e12,
    ),
    Hardware("l20", "ada", 119.5e12, 239e12, 46_068 * _MIB, 0.864e12, 32e9, 32e9, 25e9, **_NVME_GEN4),
    Hardware("l40s", "ada", 362e12, 733e12, 46_068 * _MIB, 0.864e12, 32e9, 32e9, 25e9, **_NVME_GEN4),
    Hardware("rtx4090", "ada", 165.2e12, 330.3e12, 24_564 * _MIB, 1.008e12, 32e9, 32e9, 3.125e9, **_NVME_GEN4),
)
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
        near = difflib.get_close_matches(name, HARDWARE, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"hardware {name!r} is not known; {hint}known: {', '.join(HARDWARE)}")
    return found
