"""Writes a model folder again with quantised matrices, in the formats that people publish, and once more with the
numbers that these say. The formats by their definition, entry by entry: slow, and nothing of the engine's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Format = Callable[[str, Tensor, torch.Generator], tuple[Tensors, Tensor]]
"""Name and matrix to tensors by name, and the matrix that they say, in float32."""
GROUP, NARROW, BLOCK = 32, 16, (24, 40)  # blocks that end within no matrix of the tests' models evenly
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E4M3 = 448.0


def pack(values: Tensor, bits: int) -> Tensor:
    """Along the last dimension, the first in the lowest bits; the last word is filled with zeros."""
    each = 32 // bits
    words = torch.zeros(*values.shape[:-1], -(-values.shape[-1] // each), dtype=torch.int64)
    for at in range(values.shape[-1]):
        words[..., at // each] += values[..., at].long() << bits * (at % each)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)


def spread(grid: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """For each number of a matrix that of its block."""
    rows, columns = (torch.arange(size) // part for size, part in zip(shape, block, strict=True))
    return grid[rows][:, columns]


def largest(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude in each block."""
    rows = [part.abs() for part in matrix.split(block[0], 0)]
    return torch.stack([torch.stack([each.amax() for each in row.split(block[1], 1)]) for row in rows])


def floats(
    suffix: str, block: tuple[int, int] | None, shape: Callable[[Tensor], Tensor] = lambda grid: grid
) -> Format:
    """8 bits, a scale for each block; `shape`: as the scales are stored."""

    def written(name: str, matrix: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        size = (matrix.shape[0], matrix.shape[1])
        at = block or size
        at = (at[0] or size[0], at[1] or size[1])
        scales = largest(matrix, at) / E4M3
        each = spread(scales, at, size)
        stored = (matrix / each).to(torch.float8_e4m3fn)
        unused = {name.replace("weight", "input_scale"): torch.ones(1)}
        return {name: stored, f"{name}_{suffix}": shape(scales)} | unused, stored.float() * each

    return written


def wholes(
    matrix: Tensor, size: int, bits: int, zeros: bool, groups: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Unsigned numbers, scales and zero points `[N, G]` by groups of columns, and the matrix that they say."""
    top = (1 << bits) - 1
    columns = torch.arange(matrix.shape[1]) // size if groups is None else groups
    parts = [matrix[:, columns == at] for at in range(int(columns.max()) + 1)]
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    if zeros:
        scales = ((high - low) / top).bfloat16().float()
        points = (-low / scales).round().clamp(0, top)
    else:
        scales = (2 * torch.maximum(high, -low) / top).bfloat16().float()
        points = torch.full_like(scales, 1 << bits - 1)
    numbers = (matrix / scales[:, columns] + points[:, columns]).round().clamp(0, top)
    return numbers, scales, points, (numbers - points[:, columns]) * scales[:, columns]


def int8(size: int | None, zeros: bool) -> Format:
    """compressed-tensors without packing: both less 128."""

    def written(name: str, matrix: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        numbers, scales, points, said = wholes(matrix, size or matrix.shape[1], 8, zeros)
        found = {name: (numbers - 128).to(torch.int8), f"{name}_scale": scales.bfloat16()}
        return found | ({f"{name}_zero_point": (points - 128).to(torch.int8)} if zeros else {}), said

    return written


def compressed(bits: int, size: int | None, *, zeros: bool = False, ordered: bool = False) -> Format:
    def written(name: str, matrix: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        width = matrix.shape[1]
        groups = (torch.arange(width) // (size or width))[torch.randperm(width, generator=generator)]
        numbers, scales, points, said = wholes(matrix, size or width, bits, zeros, groups if ordered else None)
        found = {
            f"{name}_packed": pack(numbers, bits),
            f"{name}_scale": scales.bfloat16(),
            f"{name}_shape": torch.tensor(matrix.shape),
        }
        if zeros:
            found[f"{name}_zero_point"] = pack(points.t(), bits).t().contiguous()
        if ordered:
            found[f"{name}_g_idx"] = groups.int()
        return found, said

    return written


def gptq(bits: int, size: int | None, *, ordered: bool = False, lowered: bool = True) -> Format:
    """`lowered`: zero points less one, which must be above 0 then to be stored one by one."""

    def written(name: str, matrix: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        module, width = name.removesuffix(".weight"), matrix.shape[1]
        groups = torch.arange(width) // (size or width)
        if ordered:
            groups = groups[torch.randperm(width, generator=generator)]
        numbers, scales, points, said = wholes(matrix, size or width, bits, True, groups)
        found = {
            f"{module}.qweight": pack(numbers, bits).t().contiguous(),
            f"{module}.qzeros": pack(points.t() - int(lowered), bits),
            f"{module}.scales": scales.t().contiguous(),
            f"{module}.g_idx": groups.int(),
        }
        return found, said

    return written


def awq(name: str, matrix: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
    module, order = name.removesuffix(".weight"), torch.tensor(AWQ_ORDER)
    numbers, scales, points, said = wholes(matrix, GROUP, 4, True)
    ordered = [each.t().unflatten(1, (-1, 8))[:, :, order].flatten(1) for each in (numbers, points)]
    found = {
        f"{module}.qweight": pack(ordered[0], 4),
        f"{module}.qzeros": pack(ordered[1], 4),
        f"{module}.scales": scales.t().contiguous(),
    }
    return found, said


def _group(bits: int, kind: str, **weights: Any) -> dict[str, Any]:
    args = {"num_bits": bits, "type": kind, "symmetric": True, **weights}
    return {"targets": ["Linear"], "weights": args, "input_activations": None}


def _compressed_config(form: str, bits: int, kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": _group(bits, kind, **weights)}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def _fp8(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **fields}


def _gptq(bits: int, size: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False, "sym": False, **fields}


FORMATS: dict[str, tuple[Format, dict[str, Any]]] = {
    "fp8": (floats("scale_inv", BLOCK), _fp8(weight_block_size=list(BLOCK))),
    "fp8-one": (floats("scale", None, lambda grid: grid.view(())), _fp8(activation_scheme="static")),
    "fp8-rows": (
        floats("scale", (1, 0)),
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
    ),
    "float-one": (
        floats("scale", None, lambda grid: grid.view(1)),
        _compressed_config("float-quantized", 8, "float", strategy="tensor"),
    ),
    "float-rows": (
        floats("scale", (1, 0)),
        _compressed_config("float-quantized", 8, "float", strategy="channel"),
    ),
    "float-blocks": (
        floats("scale", BLOCK),
        _compressed_config("float-quantized", 8, "float", strategy="block", block_structure=list(BLOCK)),
    ),
    "int8": (int8(None, False), _compressed_config("int-quantized", 8, "int", strategy="channel")),
    "int8-zeros": (
        int8(GROUP, True),
        _compressed_config("int-quantized", 8, "int", strategy="group", group_size=GROUP, symmetric=False),
    ),
    "packed-4": (
        compressed(4, GROUP),
        _compressed_config("pack-quantized", 4, "int", strategy="group", group_size=GROUP),
    ),
    "packed-4-rows-zeros": (
        compressed(4, None, zeros=True),
        _compressed_config("pack-quantized", 4, "int", strategy="channel", symmetric=False),
    ),
    "packed-4-ordered": (
        compressed(4, GROUP, ordered=True),
        _compressed_config("pack-quantized", 4, "int", strategy="group", group_size=GROUP, actorder="group"),
    ),
    "packed-8-zeros": (
        compressed(8, NARROW, zeros=True),
        _compressed_config("pack-quantized", 8, "int", strategy="group", group_size=NARROW, symmetric=False),
    ),
    "gptq-4": (gptq(4, GROUP), _gptq(4, GROUP)),
    "gptq-4-ordered": (gptq(4, GROUP, ordered=True), _gptq(4, GROUP, desc_act=True)),
    "gptq-4-v2": (gptq(4, GROUP, lowered=False), _gptq(4, GROUP, checkpoint_format="gptq_v2")),
    "gptq-8": (gptq(8, None), _gptq(8, -1)),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    ),
}


def quantise(source: Path, kind: str, target: Path, said: Path) -> None:
    """`target`: the model with quantised projections, all but those of the last layer; `said`: its numbers, plainly."""
    form, config = FORMATS[kind]
    tensors, numbers = Tensors(), Tensors()
    for name, tensor in load_file(source / "model.safetensors").items():
        numbers[name] = tensor
        if name.endswith("_proj.weight") and ".layers.2." not in name:
            found, numbers[name] = form(name, tensor.float(), torch.Generator().manual_seed(len(numbers)))
            tensors |= found
        else:
            tensors[name] = tensor
    for folder, content in ((target, tensors), (said, numbers)):
        shutil.copytree(source, folder)
        dense = {name: each.contiguous() for name, each in content.items()}
        save_file(dense, folder / "model.safetensors", {"format": "pt"})
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
