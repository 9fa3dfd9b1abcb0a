"""Tokens of two prompts that are alike, by their embeddings alone (SemShareKV, arXiv 2509.24832).

Rows of the embedding table know no place, so all copies of a word would be drawn to the first of them. They are rotated
by their positions before they are hashed, as keys are. The hash is the side of random planes on which a row lies: the
share of bits in which two hashes agree is the angle between the rows.

Legend: T tokens of the target, R tokens of the donor, N hidden size, P planes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from isthmus.core.reuse import TAIL, extended
from isthmus.core.types import Reused
from isthmus.live.engine.batch import BatchTensors, build_batch, slices_of
from isthmus.live.engine.interface import SIGNATURE_BITS, Assembling, Chunk
from isthmus.live.engine.kv import KVMemory
from isthmus.live.engine.mixers import Pass
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


# A prompt put together from other prompts' KV: moved to its place, and computed where that is not good enough.
#
# One mechanism for SemShareKV, CacheBlend and EPIC; which tokens are computed where is a `Selection`
# (`isthmus.core.reuse`). The prompt passes the layers as any other (`program.py`), and loses tokens on its way:
#
# layer    0 ... full - 1    full                     full + 1 ...
# tokens   all               all up to K and V,       those that are left, fewer from layer to layer;
# then those chosen        others have their donor's K and V, moved
#
# Keys are kept with their rotation, so a key that moves by d positions is rotated by d more, which is exact; values are
# not rotated.
#
# Legend: T tokens of the chunk, S of them that are computed, C candidates, L tokens of the whole prompt, H query
# heads, K key/value heads, D head size.


RECOVERED = 0.55
"""The tokens that have this share of the tail's attention are hot (SemShareKV's attention recovery)."""


class Assembled:
    """One prompt on its way through a step. `index`: of its chunk, in the caller's order."""

    def __init__(
        self, index: int, chunk: Chunk, memory: KVMemory, cos_sin: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> None:
        """`embed`: gives rows of the embedding table, `[T, N]`."""
        assert chunk.assembling is not None and not chunk.targets and not chunk.holdings
        self.index, self._memory, self._chunk = index, memory, chunk
        self._cos_sin, self._embed = cos_sin, embed
        self.assembling: Assembling = chunk.assembling
        self._selection, self._start = chunk.assembling.selection, chunk.start
        device = memory.layers[0].device
        self._batch = build_batch([replace(chunk, assembling=None)], memory.layout.block_size, device)
        self._slots_T = self._batch.slots_T.long()
        size, table = memory.layout.block_size, np.asarray(chunk.blocks)
        at = np.arange(chunk.stop)
        self._slots_L = torch.as_tensor(table[at // size] * size + at % size).to(device)
        # Tokens that are left, in order; None: all.
        self._left_S: Tensor | None = None
        self._chosen_T: Tensor | None = None
        self._kept: dict[int, Tensor] = {}
        self._is_matched = False

    def _match(self) -> None:
        """Finds out which tokens have KV of a donor, once."""
        chunk, device = self._chunk, self._slots_L.device
        slots, old, must, similar = self._sources(chunk)
        self._similar_T = torch.as_tensor(similar).to(device)
        self._must_T = torch.as_tensor(must).to(device)
        self._slots_of_donor_T = torch.as_tensor(slots).to(device)
        self._candidate_T = self._slots_of_donor_T >= 0
        self._num_candidates = int(self._candidate_T.sum())
        new = np.arange(chunk.start, chunk.stop)
        self._cos_sin_TD: Tensor | None = None
        if (old != new)[slots >= 0].any():
            places = (torch.as_tensor(each).to(device) for each in (old, new))
            self._cos_sin_TD = _between(self._cos_sin, *places)
        self._is_matched = True

    def _sources(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of each token where its donor's KV lies, -1 for none; the position it had there; whether it is computed in
        any case; whether its KV is of another text."""
        start, num_tokens, size = chunk.start, len(chunk.tokens), self._memory.layout.block_size
        slots, old = np.full(num_tokens, -1, np.int64), np.zeros(num_tokens, np.int64)
        must, similar = np.zeros(num_tokens, bool), np.zeros(num_tokens, bool)
        donors = self.assembling.donors
        there_is = [(donor.position, donor.tokens) for donor in donors]
        whole = extended(self.assembling.passages, chunk.tokens, there_is, start=start)

        def take(here: np.ndarray, donor: int, there: np.ndarray) -> None:
            """`there`: counted from the first token that the donor has here."""
            table = np.asarray(donors[donor].blocks)
            slots[here] = table[there // size] * size + there % size
            old[here] = there + donors[donor].position

        for passage in whole:
            here = np.arange(passage.at, passage.at + passage.count) - start
            there = here + start - passage.at + passage.start - donors[passage.donor].position
            take(here, passage.donor, there)
            must[here[: self._selection.first]] = True
        if self._selection.alike:
            found = self._counterparts(chunk)
            here = np.flatnonzero((found >= 0) & (slots < 0))
            take(here, 0, found[here])
            similar[here] = True
        must |= slots < 0
        must[max(0, num_tokens - TAIL) :] = True
        slots[must] = -1
        return slots, old, must, similar

    def _counterparts(self, chunk: Chunk) -> np.ndarray:
        """For each token the first donor's that is most like it, -1 for none. As a rule another word is none, however
        much alike: its KV says what the donor said there, and answers follow it where the two texts contradict each
        other (measured: docs/reuse.md)."""
        donor, device, selection = self.assembling.donors[0], self._slots_L.device, self._selection
        own, other = (self._embed(torch.tensor(each, device=device)) for each in (chunk.tokens, donor.tokens))
        at, there = (
            first + np.arange(len(rows)) for first, rows in ((chunk.start, own), (donor.position, other))
        )
        there = warped(chunk.tokens, at, donor.tokens, there)
        places = (torch.as_tensor(each).to(device) for each in (at, there))
        found = nearest(own, other, *places, least=selection.least).cpu().numpy()
        if selection.same and len(donor.tokens):
            # Of what was not found the last is taken, and stays not found.
            is_same = np.asarray(donor.tokens)[found] == np.asarray(chunk.tokens)
            found = np.where(is_same, found, -1)
        return found

    @property
    def whole(self) -> bool:
        """Nothing of a donor is of use: all is computed, as for any other prompt."""
        return not self._num_candidates or self._selection.computed(self._memory.layout.num_layers - 1) >= 1

    def begin(self, run: Pass) -> Pass:
        """The pass with which it begins. It may be begun anew."""
        if not self._is_matched:
            self._match()
        self._left_S = self._chosen_T = None
        self._kept.clear()
        batch = self._batch
        if not self._selection.full_layers and not self.whole:
            self._left_S = self._must_T.nonzero()[:, 0]
            batch = batch.thinned(self._left_S)
        thins = not self.whole or self.assembling.packing is not None
        return replace(run, batch=batch, thinning=self if thins else None)

    def enter(self, layer: int) -> None:
        """See `Thinning`: tokens that are not computed in this layer have their donor's KV."""
        if layer <= self._selection.full_layers and self._selection.full_layers:
            return
        if self._left_S is None:
            return
        moved_T = self._candidate_T.clone()
        moved_T[self._left_S] = False
        rows = moved_T.nonzero()[:, 0]
        self._memory.layers[layer][self._slots_T[rows]] = self._donated(layer, rows)

    def thin(
        self, layer: int, values: dict[str, Tensor], queries: str, kv: str, run: Pass
    ) -> tuple[dict[str, Tensor], Pass]:
        """See `Thinning`."""
        packing, selection = self.assembling.packing, self._selection
        quota = self._quota(layer)
        chooses = quota is not None
        scores_L = None
        if packing is not None or (chooses and selection.hot):
            scores_L = self._attended(values[queries], values[kv], run.batch)
        if packing is not None and scores_L is not None:
            size = self._memory.layout.block_size
            count, within = packing.kept[layer] * size, packing.num_blocks * size
            self._kept[layer] = scores_L[:within].topk(count).indices.sort().values
        if quota is None:
            return values, run
        before_S = self._left_S
        if before_S is None:
            before_S = torch.arange(len(self._slots_T), device=self._slots_T.device)
        stays = self._chosen(layer, before_S, quota, scores_L)
        if layer == selection.full_layers:
            self._chosen_T = stays
        if bool(stays.all()):
            return values, run
        rows = stays.nonzero()[:, 0]
        self._left_S = before_S[rows]
        values = {name: value if name == kv else value[rows] for name, value in values.items()}
        return values, replace(run, batch=run.batch.thinned(rows))

    def _quota(self, layer: int) -> int | None:
        """How many candidates go on, None where that is not asked."""
        selection = self._selection
        if self.whole or not selection.full_layers or layer < selection.full_layers:
            return None
        return math.ceil(self._num_candidates * selection.computed(layer))

    def _chosen(self, layer: int, before_S: Tensor, quota: int, scores_L: Tensor | None) -> Tensor:
        """Which of the tokens that came so far go on, `[S]`: those that must, and so many candidates."""
        stays = self._must_T[before_S]
        open_C = (~stays).nonzero()[:, 0]
        if quota >= len(open_C):
            return torch.ones_like(stays)
        rows = before_S[open_C]
        fresh = self._memory.layers[layer][self._slots_T[rows]].float()
        off_C2 = (fresh - self._donated(layer, rows).float()).flatten(2).norm(dim=2)
        off_C = off_C2.sum(1)
        if scores_L is not None and self._selection.hot:
            scores_C = scores_L[rows + self._start]
            order = scores_C.argsort(descending=True, stable=True)
            recovered = scores_L.sort(descending=True).values.cumsum(0)
            least = scores_L.sort(descending=True).values[int((recovered < RECOVERED * recovered[-1]).sum())]
            num_hot = min(int(quota * self._selection.hot), int((scores_C >= least).sum()))
            off_C[order[:num_hot]] = math.inf
        stays[open_C[off_C.topk(quota).indices]] = True
        return stays

    def _attended(self, q_SHD: Tensor, kv: Tensor, batch: BatchTensors) -> Tensor:
        """What the last tokens attend to in this layer: mean weights over them and all heads, `[L]`."""
        q, length = q_SHD[-TAIL:].float() * q_SHD.shape[-1] ** -0.5, len(self._slots_L)
        k_KDL = kv[self._slots_L, 0].float().permute(1, 2, 0)
        q_KRD = q.unflatten(1, (len(k_KDL), -1)).permute(1, 2, 0, 3).flatten(1, 2)
        scores_RTL = (q_KRD @ k_KDL).view(-1, len(q), length)
        at_T = batch.positions_T[-TAIL:].to(q.device)
        first = int(at_T[0])
        later = torch.arange(first, length, device=q.device) > at_T[:, None]
        scores_RTL[:, :, first:].masked_fill_(later, float("-inf"))
        return scores_RTL.softmax(-1).flatten(0, 1).mean(0)

    def _donated(self, layer: int, rows_C: Tensor) -> Tensor:
        """KV of candidates as their donors had it, moved: `[C, 2, K, D]`."""
        kv = self._memory.layers[layer][self._slots_of_donor_T[rows_C]]
        if self._cos_sin_TD is not None:
            kv[:, 0] = rotate(kv[:, 0], self._cos_sin_TD[rows_C]).to(kv.dtype)
        return kv

    def finish(self) -> Reused:
        """All layers are through: what is to be packed is."""
        packing, memory = self.assembling.packing, self._memory
        if packing is not None:
            size, device = memory.layout.block_size, self._slots_L.device
            offsets = torch.arange(size, device=device)
            blocks = slices_of(packing, self.assembling.packed, memory.num_blocks)
            for layer, places in enumerate(blocks):
                to = (torch.as_tensor(places).to(device)[:, None] * size + offsets).flatten()
                memory.whole[to] = memory.layers[layer][self._slots_L[self._kept[layer]]]
            for layer in range(memory.layout.num_layers):
                memory.written(layer)
        used_T = torch.zeros_like(self._candidate_T) if self.whole else self._candidate_T
        if self._chosen_T is not None:
            used_T = used_T & ~self._chosen_T
        used, similar = int(used_T.sum()), int((used_T & self._similar_T).sum())
        return Reused(self._start, used - similar, similar, len(used_T) - used)


def _between(cos_sin: Tensor, old_T: Tensor, new_T: Tensor) -> Tensor:
    """What rotates a key from one position to another, `[T, D]` as the table has it. A table that scales, as YaRN's
    does, has scaled the key before."""
    (cos, sin), (was_cos, was_sin) = cos_sin[new_T].chunk(2, -1), cos_sin[old_T].chunk(2, -1)
    scale, _ = cos_sin[0].chunk(2)
    squared = scale.square()
    turned = (cos * was_cos + sin * was_sin) / squared, (sin * was_cos - cos * was_sin) / squared
    stays = (old_T == new_T)[:, None]
    return torch.cat((turned[0].masked_fill(stays, 1.0), turned[1].masked_fill(stays, 0.0)), -1)
