"""Rotary angles for the supported RoPE variants (RoFormer; YaRN, arXiv 2309.00071; Llama 3.1's smoothing)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus.core.models import RopeSpec

# Each variant: (powers [D/2] = theta ** (2i/D), options, theta) -> (frequencies [D/2], factor on cos and sin).
# The order of operations is the reference's: at position 4,000 one unit in the last place is 1e-4 of an angle.


def _default(powers: Tensor, options: dict[str, Any], theta: float) -> tuple[Tensor, float]:
    return 1.0 / powers, 1.0


def _linear(powers: Tensor, options: dict[str, Any], theta: float) -> tuple[Tensor, float]:
    return 1.0 / powers / options["factor"], 1.0


def _factors(powers: Tensor, options: dict[str, Any], theta: float) -> tuple[Tensor, float]:
    """Each frequency divided by a number of its own, as GGUF files have it."""
    return 1.0 / powers / torch.tensor(options["factors"], dtype=torch.float32), 1.0


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
    "factors": _factors,
}


def cos_sin_table(rope: RopeSpec, num_positions: int) -> Tensor:
    """`[num_positions, dim]` float32: the cosines of each pair, then the sines."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies, scale = _VARIANTS[rope.kind](rope.theta**exponents, rope.options, rope.theta)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).contiguous()


def padded(cos_sin: Tensor, head_dim: int) -> Tensor:
    """The table of heads that are rotated in part: `[num_positions, head_dim]`, whose further pairs turn by nothing.
    Their numbers stand as `half_split` puts them."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    still = (head_dim - cos_sin.shape[-1]) // 2
    pad = torch.nn.functional.pad
    return torch.cat((pad(cos, (0, still), value=1.0), pad(sin, (0, still))), dim=-1)


def half_split(head_dim: int, dim: int, *, interleaved: bool = False) -> Tensor:
    """Which number of a head, as its weights have them, comes where for kernels that rotate number i with number
    i + head_dim / 2: all of a head of which the first `dim` are rotated.

    Weights pair number i with i + dim / 2, or with i + 1 where pairs are `interleaved`. Attention does not see the
    order, as long as queries and keys have the same.
    """
    numbers = torch.arange(head_dim)
    turned, still = numbers[:dim], numbers[dim:]
    first, second = (turned[::2], turned[1::2]) if interleaved else turned.chunk(2)
    still_first, still_second = still.chunk(2) if len(still) else (still, still)
    return torch.cat((first, still_first, second, still_second))


def rotate(x_THD: Tensor, cos_sin_TD: Tensor) -> Tensor:
    """Rotary embedding of number i of each head with number i + D / 2; computed and given in float32."""
    cos, sin = cos_sin_TD[:, None].float().chunk(2, dim=-1)
    a, b = x_THD.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
