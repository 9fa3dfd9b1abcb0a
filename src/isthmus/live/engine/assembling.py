"""A prompt put together from other prompts' KV: moved to its place, and computed where that is not good enough.

One mechanism for SemShareKV, CacheBlend and EPIC; which tokens are computed where is a `Selection`
(`isthmus.core.reuse`). The prompt passes the layers as any other (`program.py`), and loses tokens on its way:

    layer    0 ... full - 1    full                     full + 1 ...
    tokens   all               all up to K and V,       those that are left, fewer from layer to layer;
                               then those chosen        others have their donor's K and V, moved

Keys are kept with their rotation, so a key that moves by d positions is rotated by d more, which is exact; values are
not rotated.

Legend: T tokens of the chunk, S of them that are computed, C candidates, L tokens of the whole prompt, H query heads, K
key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from isthmus.core.reuse import extended
from isthmus.core.reuse.selection import TAIL
from isthmus.core.types import Reused
from isthmus.live.engine.alike import nearest, warped
from isthmus.live.engine.batch import BatchTensors, build_batch
from isthmus.live.engine.interface import Assembling, Chunk
from isthmus.live.engine.kv import KVMemory
from isthmus.live.engine.mixers import Pass
from isthmus.live.engine.packed import slices_of
from isthmus.live.engine.rope import rotate

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
