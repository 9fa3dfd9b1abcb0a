"""Prompts as retrieval makes them: a common beginning, documents in any order, a question.

Tokens are drawn, so that block names and pieces are those of a real prompt: names are a chain over blocks of tokens,
pieces are cut by the code of the live cluster. A paraphrase shares only the beginning with its original, and has a
similar signature; signatures of other prompts are never similar, whatever documents they share.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left
from itertools import accumulate, count
from typing import NamedTuple

from isthmus.core.conductor import PromptContent
from isthmus.core.reuse import cut
from isthmus.core.types import Reuse
from isthmus.lab.sim.workloads.specification import Spec

VOCABULARY = 1 << 17
SIGNATURE_BITS = 256


class Prompt(NamedTuple):
    """A prompt's block ids, and its content if it may use KV beyond its own prefix."""

    num_tokens: int
    blocks: tuple[int, ...]
    content: PromptContent | None


class _Paraphrase(NamedTuple):
    """A prompt that may be paraphrased: `num_more` tokens follow its `beginning`."""

    beginning: list[int]
    num_more: int
    signature: bytes


class DocumentPrompts:
    """Draws prompts one after the other. The `reuse` of a specification changes only the kind of reuse asked for."""

    def __init__(self, spec: Spec) -> None:
        assert spec.document_tokens is not None
        self._spec = spec
        self._picks, self._words, self._others = (
            spec.random(purpose) for purpose in ("documents", "words", "paraphrases")
        )
        texts = spec.random("texts")
        self._beginnings = [_tokens(texts, spec.prefix_tokens) for _ in range(spec.prefixes)] or [[]]
        self._documents = [_tokens(texts, spec.document_tokens(texts)) for _ in range(spec.documents)]
        self._of_beginnings = _popularity(len(self._beginnings), spec.zipf)
        self._of_documents = _popularity(spec.documents, spec.zipf)
        self._said: list[_Paraphrase] = []
        self._ids: dict[tuple[int, bytes], int] = {}
        self._numbers = count()

    def draw(self) -> Prompt:
        spec = self._spec
        if self._said and self._others.random() < spec.paraphrases:
            said = self._said[int(self._others.random() * len(self._said))]
            tokens = said.beginning + _tokens(self._words, said.num_more)
            return self._prompt(tokens, self._alike(said.signature))
        beginning = self._beginnings[self._choose(self._of_beginnings)]
        chosen: dict[int, None] = {}
        while len(chosen) < spec.retrieved:
            chosen[self._choose(self._of_documents)] = None
        order = list(chosen)
        self._picks.shuffle(order)
        more = [token for number in order for token in self._documents[number]]
        more += _tokens(self._words, spec.input(self._words))
        signature = self._words.randbytes(SIGNATURE_BITS // 8)
        if spec.paraphrases:
            self._said.append(_Paraphrase(beginning, len(more), signature))
        return self._prompt(beginning + more, signature)

    def _choose(self, popularity: list[float]) -> int:
        return bisect_left(popularity, self._picks.random() * popularity[-1])

    def _alike(self, signature: bytes) -> bytes:
        """A signature with as many flipped bits as the specified cosine means."""
        differing = round(math.acos(self._spec.alike) / math.pi * SIGNATURE_BITS)
        flipped = sum([1 << bit for bit in self._others.sample(range(SIGNATURE_BITS), differing)])
        return (int.from_bytes(signature, "little") ^ flipped).to_bytes(len(signature), "little")

    def _prompt(self, tokens: list[int], signature: bytes) -> Prompt:
        spec, content = self._spec, None
        if spec.reuse is not Reuse.EXACT:
            content = PromptContent(spec.reuse, b"", *cut(tokens, ""), signature)
        return Prompt(len(tokens), self._names(tokens), content)

    def _names(self, tokens: list[int]) -> tuple[int, ...]:
        """An id for each block, equal for equal tokens up to its end; a partial last block gets an id of its own."""
        ids, size, names = self._ids, self._spec.block_size, list[int]()
        for at in range(0, len(tokens) - size + 1, size):
            key = names[-1] if names else -1, array("I", tokens[at : at + size]).tobytes()
            if key not in ids:
                ids[key] = next(self._numbers)
            names.append(ids[key])
        if len(tokens) % size:
            names.append(next(self._numbers))
        return tuple(names)


def _popularity(number: int, zipf: float) -> list[float]:
    """Cumulative weights: the i-th most popular is chosen in proportion to i ** -zipf."""
    return list(accumulate([rank**-zipf for rank in range(1, number + 1)]))


def _tokens(rng: random.Random, number: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=number)
