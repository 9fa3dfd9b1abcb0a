"""Rotary angles for the supported RoPE variants (RoFormer; YaRN, arXiv 2309.00071; Llama 3.1's smoothing)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.spec import RopeSpec

# Each variant: (powers [D/2] = theta ** (2i/D), options, theta) -> (frequencies [D/2], factor on cos and sin).
# The order of operations is the reference's: at position 4,000 one unit in the last place is 1e-4 of an angle.


def _default(powers: Tensor, options: dict[str, Any], theta: float) -> tuple[Tensor, float]:
    return 1.0 / powers, 1.0


def _linear(powers: Tensor, options: dict[str, Any], theta: float) -> tuple[Tensor, float]:
    return 1.0 / powers / options["factor"], 1.0


def _llama3(powers: Tensor, options: dict[str, Any], theta: float) -> tuple[Tensor, float]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    frequencies = 1.0 / powers
    factor, original = options["factor"], options["original_max_position_embeddings"]
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, stretched), 1.0


def _yarn(powers: Tensor, options: dict[str, Any], theta: float) -> tuple[Tensor, float]:
    """Interpolates the slow dimensions, keeps the fast ones, with a linear ramp between (YaRN, section 3.2)."""
    factor, original = options["factor"], options["original_max_position_embeddings"]
    dim = 2 * len(powers)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(options.get("beta_fast") or 32)
    high = dimension_of(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, _yarn_scale(options)


def _yarn_scale(options: dict[str, Any]) -> float:
    """Factor on cos and sin (YaRN, section 3.4), unless the config states it."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(options["factor"]) + 1.0 if options["factor"] > 1 else 1.0

    if options.get("attention_factor") is not None:
        return float(options["attention_factor"])
    if options.get("mscale") and options.get("mscale_all_dim"):
        return scale(options["mscale"]) / scale(options["mscale_all_dim"])
    return scale(1.0)


_VARIANTS: dict[str, Callable[[Tensor, dict[str, Any], float], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def cos_sin_table(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """`[num_positions, head_dim]` float32: the cosines of each pair, then the sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies, scale = _VARIANTS[rope.kind](rope.theta**exponents, rope.options, rope.theta)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).contiguous()
