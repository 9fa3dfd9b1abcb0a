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
from isthmus.engine.rope import rotate

PLANES = 256
LEAST_COSINE = 0.4
"""What is less alike has no counterpart, and is computed."""
_SEED = 2509_24832
REACH = 512
"""So far from its own place a token is looked for. Rotation makes even the same word unlike itself before that."""
THETA = 10_000.0
_TILE = 512


def nearest(
    target_TN: Tensor, donor_RN: Tensor, target_at_T: Tensor, donor_at_R: Tensor, *, rotated: bool = True
) -> Tensor:
    """For each token of the target the one of the donor that is most alike, or -1: `[T]` int64. Several may have the
    same one. Of equals the nearest counts. `..._at`: ascending positions; of the donor they may be between the target's
    (float), for a rewritten prompt drifts away from the one it was."""
    device = target_TN.device
    target, donor = (
        _hashed(rows, at if rotated else None)
        for rows, at in ((target_TN, target_at_T), (donor_RN, donor_at_R))
    )
    target_at_T, donor_at_R = target_at_T.float(), donor_at_R.float()
    found, least = torch.full((len(target),), -1, device=device), _agreement(LEAST_COSINE)
    for start in range(0, len(target), _TILE):
        rows, at_T = target[start : start + _TILE], target_at_T[start : start + _TILE]
        low, high = torch.searchsorted(donor_at_R, torch.stack((at_T[0] - REACH, at_T[-1] + REACH))).tolist()
        if low == high:
            continue
        score_TR = rows @ donor[low:high].T  # bits that agree less those that do not: whole numbers, two apart
        score_TR -= (at_T[:, None] - donor_at_R[low:high]).abs_().mul_(1 / (2 * REACH + 2 * _TILE))
        best, index = score_TR.max(dim=1)
        found[start : start + _TILE] = torch.where(best > least, index + low, -1)
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


def _hashed(rows_TN: Tensor, at_T: Tensor | None) -> Tensor:
    """1 or -1 for each plane, `[T, P]`."""
    hidden, device = rows_TN.shape[1], rows_TN.device
    if at_T is not None:
        turns = THETA ** (-torch.arange(0, hidden, 2, device=device) / hidden)
        angles = at_T[:, None].float() * turns
        rows_TN = rotate(rows_TN[:, None], torch.cat((angles.cos(), angles.sin()), 1))[:, 0]
    planes_NP = torch.randn(hidden, PLANES, generator=torch.Generator().manual_seed(_SEED)).to(device)
    return (rows_TN.float() @ planes_NP).sign_()
