"""Prompts that are documents in any order, and a question: what is retrieved for one user after another.

Whether two prompts begin alike is a matter of chance, so a prefix cache is of little use; that they have documents in
common is not. Each document is cut into pieces that are the same wherever it stands. A prompt's signature is the sum of
its documents' random directions, so that two prompts with the share s of their documents in common are alike by s.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

import blake3

from isthmus.conductor import Content
from isthmus.reuse.passages import DIGEST_BYTES
from isthmus.sim.workloads.lengths import Lengths
from isthmus.sim.workloads.workload import Request
from isthmus.types import Reuse

PIECE = 32
"""Tokens of a piece: as many as passages have in the mean, by and large."""
SIGNATURE_BITS = 256
SCOPE = b""


class Documents:
    """A corpus, and prompts made of it. `most`: documents of a prompt, fewer where one is drawn twice."""

    def __init__(self, num: int, tokens: Lengths, most: int, zipf: float, block_size: int, seed: int) -> None:
        lengths = random.Random(f"{seed}/documents")
        self._lengths = [tokens.draw(lengths) for _ in range(num)]
        self._popularity = list(accumulate(rank**-zipf for rank in range(1, num + 1)))
        self._most, self._size, self._seed = most, block_size, seed
        self._rng = random.Random(f"{seed}/chosen documents")
        self._blocks: dict[tuple[tuple[int, ...], int], int] = {}
        self._directions: dict[int, list[float]] = {}

    def request(self, arrival_ns: int, question: int, output: int, reuse: Reuse, ids: Iterator[int]) -> Request:
        """With a question of so many tokens, which nobody asked before."""
        chosen = tuple(dict.fromkeys(self._draw() for _ in range(self._most)))
        stops = list(accumulate(self._lengths[each] for each in chosen))
        num_tokens = stops[-1] + question
        blocks = tuple([self._block(chosen, stops, stop, ids) for stop in self._block_stops(num_tokens)])
        content = None if reuse is Reuse.EXACT else self._content(chosen, num_tokens, reuse, next(ids))
        return Request(arrival_ns, num_tokens, output, blocks, content=content)

    def _draw(self) -> int:
        return bisect_left(self._popularity, self._rng.random() * self._popularity[-1])

    def _block_stops(self, num_tokens: int) -> list[int]:
        return [*range(self._size, num_tokens, self._size), num_tokens]

    def _block(self, chosen: tuple[int, ...], stops: list[int], stop: int, ids: Iterator[int]) -> int:
        """A block is known by all documents up to its end; one with something of the question is new."""
        if stop > stops[-1]:
            return next(ids)
        key = chosen[: bisect_left(stops, stop) + 1], stop
        if key not in self._blocks:
            self._blocks[key] = next(ids)
        return self._blocks[key]

    def _content(self, chosen: tuple[int, ...], num_tokens: int, reuse: Reuse, number: int) -> Content:
        pieces, stops, at = list[bytes](), list[int](), 0
        for each in chosen:
            length = self._lengths[each]
            for start in range(0, length, PIECE):
                pieces.append(self._digest(f"{each} {start}"))
                stops.append(at + min(start + PIECE, length))
            at += length
        if at < num_tokens:
            pieces.append(self._digest(f"question {number}"))
            stops.append(num_tokens)
        return Content(reuse, SCOPE, tuple(pieces), tuple(stops), self._signature(chosen))

    def _digest(self, what: str) -> bytes:
        return blake3.blake3(what.encode()).digest(length=DIGEST_BYTES)

    def _signature(self, chosen: tuple[int, ...]) -> bytes:
        sums = map(sum, zip(*map(self._direction, chosen), strict=True))
        signs = sum([1 << bit for bit, value in enumerate(sums) if value > 0])
        return signs.to_bytes(SIGNATURE_BITS // 8, "little")

    def _direction(self, document: int) -> list[float]:
        if document not in self._directions:
            rng = random.Random(f"{self._seed}/direction {document}")
            self._directions[document] = [rng.gauss(0.0, 1.0) for _ in range(SIGNATURE_BITS)]
        return self._directions[document]
