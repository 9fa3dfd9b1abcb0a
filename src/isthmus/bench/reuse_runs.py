"""Prompts on an engine, in full and assembled of a donor's KV: logits of their answers, and what was computed.

The engine's memory is cut into regions: the donor's prompt, the target's (computed in full, then assembled in its
place), and blocks to pack into. An answer is judged teacher-forced: all of its positions go through the engine as rows
of one batch, each of which attends to those before it. How near it is to another: ROUGE-L, equal tokens, and distances
of next-token distributions.

Legend: N positions of an answer, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from msgspec.structs import replace
from torch import Tensor

from isthmus.bench import BenchError
from isthmus.core.reuse import Packing, Selection, cut, pack, passages, rows_per_layer
from isthmus.core.types import Reused
from isthmus.live.engine.engine import Engine
from isthmus.live.engine.interface import Assembling, Chunk, Donated

_PIECE = 2048
"""Tokens of the pieces in which a full prompt is computed."""
_SALT = "bench"


class Spoil(StrEnum):
    """What becomes of a donor's KV before a prompt is assembled of it: nothing, or a control."""

    NONE = "its own"
    ZEROED = "zeroed"
    RANDOM = "random"


@dataclass(frozen=True)
class Setting:
    """One way to compute a prompt. `packs`: what the selection drops is dropped."""

    name: str
    selection: Selection
    packs: bool = True
    spoil: Spoil = Spoil.NONE


@dataclass(frozen=True, eq=False)
class Answer:
    """Greedy tokens, and logits of their positions `[N, V]`, computed as those of other prompts along these tokens."""

    tokens: list[int]
    logits_NV: Tensor


@dataclass(frozen=True, eq=False)
class Assembled:
    """`forced_NV`: logits at the positions of another answer, given that answer; `tokens`: its own greedy one.
    `computed`: of the prompt's tokens, mean over the layers; `kept`: of its KV, left for the answer."""

    tokens: list[int]
    forced_NV: Tensor
    computed: float
    kept: float


class Prompts:
    """An engine whose memory holds one donor and one target at a time."""

    def __init__(self, engine: Engine, ends: Sequence[int] = ()) -> None:
        """`ends`: tokens that end an answer. Raises BenchError for a model whose prompts are not assembled."""
        if engine.spec.no_reuse:
            raise BenchError(f"prompts of this model are not assembled: {engine.spec.no_reuse}")
        self.engine, self._ends = engine, frozenset(ends)
        self.block_size = engine.layout.block_size
        self.most_tokens = min(engine.num_blocks // 3 * self.block_size, engine.max_length)
        count = self.most_tokens // self.block_size
        self._donor_blocks, self._blocks, self._packed = (
            list(range(part * count, (part + 1) * count)) for part in range(3)
        )
        self._donor: list[int] = []
        self._own: list[Tensor] = []
        self._known: dict[bytes, tuple[int, int]] = {}
        self._candidates: dict[str, int] = {}  # by selector, of the target that the donor is there for

    def donate(self, tokens: Sequence[int]) -> None:
        """Computes a donor in full, in place of the one before."""
        self.fit(len(tokens))
        self._donor = list(tokens[: len(tokens) // self.block_size * self.block_size])
        self._prefill(tokens, self._donor_blocks)
        self._candidates.clear()
        self._own = [layer[self._slots].clone() for layer in self.engine.memory.layers]
        digests, stops = cut(self._donor, _SALT)
        starts = (0, *stops)
        self._known = {digest: (0, start) for digest, start in zip(digests, starts, strict=False)}

    def spoil(self, how: Spoil, seed: int = 0) -> None:
        """Overwrites the donor's KV, or brings it back. Random numbers vary as each layer's keys and values do."""
        generator = torch.Generator().manual_seed(seed)
        for layer, own in zip(self.engine.memory.layers, self._own, strict=True):
            if how is Spoil.ZEROED:
                layer[self._slots] = 0
            elif how is Spoil.RANDOM:
                noise = torch.randn(own.shape, generator=generator).to(own.device)
                scale = own.float().std(dim=(0, 2, 3), keepdim=True)
                layer[self._slots] = (noise * scale).to(own.dtype)
            else:
                layer[self._slots] = own

    def full(self, tokens: Sequence[int], num_answers: int) -> Answer:
        """Computes a prompt in full, with a greedy answer of at most `num_answers` tokens."""
        self.fit(len(tokens) + num_answers)
        logits_1V = self._prefill(tokens, self._blocks)
        chosen = self._greedy(logits_1V, len(tokens), num_answers, self._blocks, None)
        return Answer(chosen, self._forced(logits_1V, chosen, len(tokens), self._blocks, None))

    def assembled(
        self, tokens: Sequence[int], setting: Setting, answer: Sequence[int], num_answers: int
    ) -> Assembled:
        """The prompt of the donor's KV; logits along `answer`, and a greedy answer of its own."""
        self.fit(len(tokens) + max(num_answers, len(answer)))
        self.spoil(setting.spoil)
        logits_1V, reused, packing = self.prefill(tokens, setting)
        blocks = self._blocks
        if packing is not None:
            blocks = self._packed[: packing.num_packed] + blocks[packing.num_blocks :]
        forced_NV = self._forced(logits_1V, answer, len(tokens), blocks, packing)
        chosen = self._greedy(logits_1V, len(tokens), num_answers, blocks, packing)
        dropped = 0 if packing is None else packing.num_dropped * self.block_size
        computed = self.computed(tokens, setting.selection, reused)
        return Assembled(chosen, forced_NV, computed, 1 - dropped / len(tokens))

    def computed(self, tokens: Sequence[int], selection: Selection, reused: Reused) -> float:
        """The share of the tokens that a layer computes, mean over the layers. Spoils what was assembled last, unless
        it is known how many tokens are candidates: a step that chooses none of them says so."""
        count = reused.moved + reused.similar
        if selection.full_layers:
            if selection.name not in self._candidates:
                none = Setting(selection.name, replace(selection, recompute=0.0, floor=0.0), packs=False)
                _, found, _ = self.prefill(tokens, none)
                self._candidates[selection.name] = found.moved + found.similar
            count = self._candidates[selection.name]
        num_layers = self.engine.memory.layout.num_layers
        rows = rows_per_layer(selection, count, len(tokens) - count, num_layers)
        return sum(rows) / (num_layers * len(tokens))

    def prefill(self, tokens: Sequence[int], setting: Setting) -> tuple[Tensor, Reused, Packing | None]:
        """One assembled step: the first token's logits."""
        assert self._donor, "there is a donor"
        selection = setting.selection
        found = passages(*cut(tokens, _SALT), self._known)
        packing = None
        if setting.packs:
            packing = pack(selection, len(tokens), self.engine.memory.layout.num_layers, self.block_size)
        packed = self._packed[: packing.num_packed] if packing is not None else ()
        donor = Donated(self._donor, self._donor_blocks[: len(self._donor) // self.block_size])
        assembling = Assembling(selection, (donor,), found, packing, packed)
        batch = self.engine.build([Chunk(tokens, 0, self._blocks, True, assembling=assembling)])
        return self.engine.forward(batch), batch.reused[0], packing

    @property
    def _slots(self) -> slice:
        return slice(0, len(self._donor))

    def fit(self, count: int) -> None:
        """Raises BenchError if `count` tokens do not fit."""
        if count > self.most_tokens:
            raise BenchError(
                f"a prompt and its answer have {count} tokens, and there is room for {self.most_tokens}"
            )

    def _run(self, chunks: Sequence[Chunk]) -> Tensor:
        return self.engine.forward(self.engine.build(chunks))

    def _prefill(self, tokens: Sequence[int], blocks: Sequence[int]) -> Tensor:
        for start in range(0, len(tokens), _PIECE):
            piece = tokens[start : start + _PIECE]
            logits = self._run([Chunk(piece, start, blocks, True)])
        return logits

    def _decode(self, token: int, at: int, blocks: Sequence[int], packing: Packing | None) -> Chunk:
        return Chunk((token,), at, blocks, True, True, packing=packing)

    def _forced(
        self, logits_1V: Tensor, answer: Sequence[int], at: int, blocks: Sequence[int], packing: Packing | None
    ) -> Tensor:
        """Logits at all positions of an answer, the first of which there are already."""
        chunks = [self._decode(token, place, blocks, packing) for place, token in enumerate(answer[:-1], at)]
        return torch.cat((logits_1V, self._run(chunks))) if chunks else logits_1V

    def _greedy(
        self, logits_1V: Tensor, at: int, count: int, blocks: Sequence[int], packing: Packing | None
    ) -> list[int]:
        """Tokens up to an end token, which is among them."""
        tokens = [int(logits_1V.argmax())]
        while len(tokens) < count and tokens[-1] not in self._ends:
            logits_1V = self._run([self._decode(tokens[-1], at + len(tokens) - 1, blocks, packing)])
            tokens.append(int(logits_1V.argmax()))
        return tokens


_WORD = re.compile(r"[^\W_]+")


def rouge_l(found: str, reference: str) -> float:
    """F1 of the longest common subsequence of words, case and punctuation aside (Lin 2004). Of two empty texts 1."""
    one, other = (_WORD.findall(text.lower()) for text in (found, reference))
    if not one or not other:
        return float(one == other)
    return 2 * common(one, other) / (len(one) + len(other))


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the longest common subsequence."""
    best = [0] * (len(other) + 1)
    for left in one:
        before = 0
        for at, right in enumerate(other, 1):
            before, best[at] = best[at], before + 1 if left == right else max(best[at], best[at - 1])
    return best[-1]


def divergence(full_NV: Tensor, other_NV: Tensor) -> float:
    """KL(full || other) in nats, mean over the positions; of logits. Never below 0, as rounding could make it."""
    full, other = (each.float().log_softmax(-1) for each in (full_NV, other_NV))
    return max(0.0, float((full.exp() * (full - other)).sum(-1).mean()))


def agreement(full_NV: Tensor, other_NV: Tensor) -> float:
    """The share of positions at which both would choose the same token."""
    return float((full_NV.argmax(-1) == other_NV.argmax(-1)).float().mean())


def surprise(logits_NV: Tensor, tokens: Sequence[int]) -> float:
    """Mean negative log-probability of these tokens, one a position; its exponential is the perplexity."""
    at = torch.tensor(tokens, device=logits_NV.device)[:, None]
    return -float(logits_NV.float().log_softmax(-1).gather(1, at).mean())


def perplexity_ratio(full_NV: Tensor, other_NV: Tensor, tokens: Sequence[int]) -> float:
    """How much less likely the tokens are: above 1 if `other` is worse."""
    return math.exp(surprise(other_NV, tokens) - surprise(full_NV, tokens))


def says(answer: str, fact: str) -> bool:
    """The fact is in the answer, word for word, case aside, and nothing denies it."""
    words, wanted = (_WORD.findall(text.lower()) for text in (answer, fact))
    found = [at for at in range(len(words)) if words[at : at + len(wanted)] == wanted]
    return any(not at or words[at - 1] != "not" for at in found)
