"""Tokens of two prompts that are alike, by their embeddings alone (SemShareKV, arXiv 2509.24832).

Rows of the embedding table know no place, so all copies of a word would be drawn to the first of them. They are rotated
by their positions before they are hashed, as keys are. The hash is the side of random planes on which a row lies: the
share of bits in which two hashes agree is the angle between the rows.

Legend: T tokens of the target, R tokens of the donor, N hidden size, P planes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from isthmus.live.engine.interface import SIGNATURE_BITS
from isthmus.live.engine.rope import rotate

PLANES = 256
_SEED = 2509_24832
REACH = 512
"""So far from its own place a token is looked for. Rotation makes even the same word unlike itself before that."""
THETA = 10_000.0
RUN = 4
SPARSE = 64
"""Two prompts that have fewer runs in common than one in so many tokens are not put beside each other."""
_TILE = 512
_COMMON, _TURNS, _FREQUENT = 32768, 8, 1e-3


def nearest(
    target_TN: Tensor,
    donor_RN: Tensor,
    target_at_T: Tensor,
    donor_at_R: Tensor,
    *,
    least: float,
    rotated: bool = True,
) -> Tensor:
    """For each token of the target the one of the donor that is most alike, or -1: `[T]` int64. Several may have the
    same one. Of equals the nearest counts; `least`: a cosine below which none is alike. `..._at`: ascending positions;
    of the donor they may be between the target's (float), for a rewritten prompt drifts away from the one it was."""
    device = target_TN.device
    target, donor = (
        _hashed(rows, at if rotated else None)
        for rows, at in ((target_TN, target_at_T), (donor_RN, donor_at_R))
    )
    target_at_T, donor_at_R = target_at_T.float(), donor_at_R.float()
    found, agreement = torch.full((len(target),), -1, device=device), _agreement(least)
    for start in range(0, len(target), _TILE):
        rows, at_T = target[start : start + _TILE], target_at_T[start : start + _TILE]
        low, high = torch.searchsorted(donor_at_R, torch.stack((at_T[0] - REACH, at_T[-1] + REACH))).tolist()
        if low == high:
            continue
        score_TR = rows @ donor[low:high].T  # bits that agree less those that do not: whole numbers, two apart
        score_TR -= (at_T[:, None] - donor_at_R[low:high]).abs_().mul_(1 / (2 * REACH + 2 * _TILE))
        best, index = score_TR.max(dim=1)
        found[start : start + _TILE] = torch.where(best > agreement, index + low, -1)
    return found


def warped(
    target: Sequence[int], target_at: np.ndarray, donor: Sequence[int], donor_at: np.ndarray
) -> np.ndarray:
    """Positions of the donor's tokens in the target: a sentence more, and all that follows stands elsewhere. Runs of
    `RUN` tokens that both have once are where they are in the target, as far as they are in the same order; what is
    between them keeps its distances."""
    runs, places = zip(*[_unique_runs(tokens) for tokens in (target, donor)], strict=True)
    _, mine, other = np.intersect1d(runs[0], runs[1], assume_unique=True, return_indices=True)
    pairs = sorted(zip(places[0][mine].tolist(), places[1][other].tolist(), strict=True))
    here, there = _increasing(pairs)
    if len(here) < len(donor) // SPARSE + 1:
        return donor_at.astype(float)
    offsets = target_at[here] - donor_at[there]
    return donor_at + np.interp(np.arange(len(donor)), there, offsets)


def _unique_runs(tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the runs that occur once, ascending, and where they begin."""
    known = np.asarray(tokens, np.uint64)
    count = max(0, len(known) - RUN + 1)
    hashes = np.zeros(count, np.uint64)
    for step in range(RUN):
        hashes = (hashes ^ known[step : step + count]) * np.uint64(0x9E3779B97F4A7C15)
    values, first, times = np.unique(hashes, return_index=True, return_counts=True)
    return values[times == 1], first[times == 1]


def _increasing(pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The longest part of pairs, sorted by their first numbers, whose second numbers ascend too."""
    ends, tails, before = list[int](), list[int](), list[int]()
    for at, (_, second) in enumerate(pairs):
        length = bisect_left(ends, second)
        ends[length : length + 1] = [second]
        tails[length : length + 1] = [at]
        before.append(tails[length - 1] if length else -1)
    found, at = list[tuple[int, int]](), tails[-1] if tails else -1
    while at >= 0:
        found.append(pairs[at])
        at = before[at]
    return [first for first, _ in found[::-1]], [second for _, second in found[::-1]]


def directions(embedding_VN: Tensor) -> bytes:
    """See `isthmus.live.engine.interface.Engine`.

    What all texts have in common says nothing of one: frequent tokens count less (Arora et al., ICLR'17: a / (a + p)),
    and the directions in which rows differ most are taken out (Mu and Viswanath, ICLR'18). Else any two prompts are
    alike at 0.98. How frequent a token is nobody tells; by Zipf's law it is one over its number, for tokenizers number
    tokens as they found them, the most frequent first.
    """
    size, hidden = embedding_VN.shape
    device = embedding_VN.device
    generator = torch.Generator().manual_seed(_SEED + 1)
    share_V = 1 / torch.arange(2, size + 2, device=device)
    share_V /= share_V.sum()
    common = slice(0, _COMMON)
    mean_N = (share_V[common, None] * embedding_VN[common].float()).sum(0) / share_V[common].sum()

    def centred(rows: slice) -> Tensor:
        return torch.nn.functional.normalize(embedding_VN[rows].float() - mean_N, dim=1)

    most_CN = centred(common) * share_V[common, None].sqrt()
    taken_NK = torch.linalg.qr(torch.randn(hidden, max(1, hidden // 16), generator=generator).to(device)).Q
    for _ in range(_TURNS):  # of subspace iteration, towards the largest singular vectors
        taken_NK = torch.linalg.qr(most_CN.T @ (most_CN @ taken_NK)).Q
    planes_NP = torch.randn(hidden, SIGNATURE_BITS, generator=generator).to(device)
    found = torch.empty(size, SIGNATURE_BITS, dtype=torch.int8)
    for start in range(0, size, 8192):
        rows = slice(start, start + 8192)
        rows_CN = centred(rows)
        rows_CN = torch.nn.functional.normalize(rows_CN - (rows_CN @ taken_NK) @ taken_NK.T, dim=1)
        sides = rows_CN @ planes_NP * (_FREQUENT / (_FREQUENT + share_V[rows, None]))
        found[rows] = (sides * 32).round_().clamp_(-127, 127).to(torch.int8).cpu()
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
