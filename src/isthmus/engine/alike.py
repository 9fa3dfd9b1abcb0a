"""Tokens of two prompts that are alike, by their embeddings alone (SemShareKV, arXiv 2509.24832).

Rows of the embedding table know no place, so all copies of a word would be drawn to the first of them. They are rotated
by their positions before they are hashed, as keys are. The hash is the side of random planes on which a row lies: the
share of bits in which two hashes agree is the angle between the rows.

Legend: T tokens of the target, R tokens of the donor, N hidden size, P planes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isthmus.engine.interface import SIGNATURE_BITS
from isthmus.engine.rope import cos_sin_table, rotate
from isthmus.models import RopeSpec

PLANES = 256
LEAST_COSINE = 0.4
"""What is less alike has no counterpart, and is computed."""
_SEED = 2509_24832
_TILE = 1024


def nearest(
    target_TN: Tensor, donor_RN: Tensor, first: int, donor_first: int, *, rotated: bool = True
) -> Tensor:
    """For each token of the target the one of the donor that is most alike, or -1: `[T]` int64. Several may have the
    same one. Of equals the one whose position is nearest counts. `first`, `donor_first`: of the first tokens."""
    num_targets, num_donors, device = len(target_TN), len(donor_RN), target_TN.device
    target, donor = _hashed(target_TN, first, rotated), _hashed(donor_RN, donor_first, rotated)
    at_R = torch.arange(donor_first, donor_first + num_donors, device=device)
    found, least = torch.empty(num_targets, dtype=torch.int64, device=device), _agreement(LEAST_COSINE)
    for start in range(0, num_targets, _TILE):
        rows = target[start : start + _TILE]
        score_TR = rows @ donor.T  # bits that agree less those that do not: whole numbers, two apart
        at_T = torch.arange(first + start, first + start + len(rows), device=device)
        score_TR -= (at_T[:, None] - at_R).abs_().to(score_TR.dtype) / (num_targets + num_donors + first)
        best, index = score_TR.max(dim=1)
        found[start : start + _TILE] = torch.where(best > least, index, -1)
    return found


def directions(embedding_VN: Tensor) -> bytes:
    """See `isthmus.engine.interface.Engine`. Rows are taken from their mean, at equal length."""
    generator = torch.Generator().manual_seed(_SEED + 1)
    planes_NP = torch.randn(embedding_VN.shape[1], SIGNATURE_BITS, generator=generator)
    mean_N = embedding_VN.float().mean(0)
    found = torch.empty(len(embedding_VN), SIGNATURE_BITS, dtype=torch.int8)
    for start in range(0, len(embedding_VN), 8192):
        rows = embedding_VN[start : start + 8192].float() - mean_N
        sides = torch.nn.functional.normalize(rows, dim=1).cpu() @ planes_NP
        found[start : start + 8192] = (sides * 32).round_().clamp_(-127, 127).to(torch.int8)
    return found.numpy().tobytes()


def _agreement(cosine: float) -> float:
    """Bits that agree less those that do not, between rows at this angle."""
    return PLANES * (1 - 2 * math.acos(cosine) / math.pi)


def _hashed(rows_TN: Tensor, first: int, rotated: bool) -> Tensor:
    """1 or -1 for each plane, `[T, P]`."""
    num_tokens, hidden = rows_TN.shape
    if rotated:
        table = cos_sin_table(RopeSpec(dim=hidden), first + num_tokens)[first:].to(rows_TN.device)
        rows_TN = rotate(rows_TN[:, None], table)[:, 0]
    generator = torch.Generator().manual_seed(_SEED)
    planes_NP = torch.randn(hidden, PLANES, generator=generator).to(rows_TN.device)
    return torch.where(rows_TN.float() @ planes_NP > 0, 1.0, -1.0)
