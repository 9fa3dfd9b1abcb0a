"""KV of other prompts, moved and mended: which tokens are computed anyway, what is kept, which prompts are alike."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

import blake3
import msgspec

WINDOW = 4
"""Tokens that decide whether a piece ends with the last of them."""
LEAST, MASK, MOST = 8, 15, 128
"""A piece has at least and at most so many tokens; one in 16 tokens ends one otherwise."""
MEAN = LEAST + MASK
"""Tokens of a piece in the mean."""
MIN_PASSAGE = 32
"""Shorter passages are not worth their place."""
DIGEST_BYTES = 8


class Passage(msgspec.Struct, frozen=True):
    """Tokens `[at, at + count)` of a prompt are those from `start` on of its donor number `donor`."""

    at: int
    count: int
    donor: int
    start: int


def cut(tokens: Sequence[int], salt: str) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """Digests of the pieces, and where each ends. Digests are keyed by `salt`: those of two tenants never match."""
    key = blake3.blake3(salt.encode(), derive_key_context="isthmus 2026 passage").digest()
    digests, stops = list[bytes](), list[int]()
    start, rolling, num_tokens = 0, 0, len(tokens)
    for at, token in enumerate(tokens):
        # The product spreads a token's bits; what is older than WINDOW tokens has left the 32 bits.
        rolling = (rolling << 32 // WINDOW) + token * 0x9E3779B1 & 0xFFFFFFFF
        count = at + 1 - start
        ends = count >= LEAST and (rolling >> 24 ^ rolling >> 12) & MASK == 0
        if ends or count >= MOST or at + 1 == num_tokens:
            body = array("I", tokens[start : at + 1]).tobytes()
            digests.append(blake3.blake3(body, key=key).digest(length=DIGEST_BYTES))
            stops.append(at + 1)
            start = at + 1
    return tuple(digests), tuple(stops)


def passages(
    digests: Sequence[bytes],
    stops: Sequence[int],
    known: Mapping[bytes, tuple[int, int]],
    *,
    start: int = 0,
) -> tuple[Passage, ...]:
    """Passages of a prompt, from token `start` on, that donors have. `known`: of a piece's digest, the donor's number
    and where the piece starts there. Pieces that follow each other in both become one passage."""
    found = list[Passage]()
    first = 0
    for digest, stop in zip(digests, stops, strict=True):
        at, first = first, stop
        there = known.get(digest)
        if there is None or at < start:
            continue
        donor, origin = there
        _add(found, Passage(at, stop - at, donor, origin))
    return tuple([each for each in found if each.count >= MIN_PASSAGE])


def extended(
    found: Sequence[Passage],
    tokens: Sequence[int],
    donors: Sequence[tuple[int, Sequence[int]]],
    *,
    start: int = 0,
) -> tuple[Passage, ...]:
    """The same passages as far as the text is the same: found by pieces, they end where pieces do. `tokens`: of the
    prompt, and of each of the `donors`, from a position on; the prompt's is `start`. What of a passage is not there is
    left out. None overlaps another."""
    parts = []
    for each in found:
        first, theirs = donors[each.donor]
        # In places of `tokens`; `shift` further it is in `theirs`.
        shift = each.start - each.at - first + start
        low = max(0, -shift, each.at - start)
        high = min(len(tokens), len(theirs) - shift, each.at + each.count - start)
        if low < high:
            parts.append((each.donor, shift, low, high))
    grown = list[Passage]()
    for number, (donor, shift, low, high) in enumerate(parts):
        first, theirs = donors[donor]
        least = max(0, -shift, grown[-1].at + grown[-1].count - start if grown else 0)
        most = parts[number + 1][2] if number + 1 < len(parts) else len(tokens)
        most = min(most, len(theirs) - shift)
        while low > least and tokens[low - 1] == theirs[low - 1 + shift]:
            low -= 1
        while high < most and tokens[high] == theirs[high + shift]:
            high += 1
        _add(grown, Passage(low + start, high - low, donor, low + shift + first))
    return tuple(grown)


def _add(found: list[Passage], new: Passage) -> None:
    """Behind the last, or as a part of it where both go on in both prompts."""
    last = found[-1] if found else None
    if last is not None and (last.donor, last.at + last.count, last.start + last.count) == (
        new.donor,
        new.at,
        new.start,
    ):
        found[-1] = Passage(last.at, last.count + new.count, last.donor, last.start)
    else:
        found.append(new)


# How alike two prompts are, by the signatures of their embeddings.
#
# A signature is a string of bits, one a random direction: on which side of it the prompt's embedding lies (sign random
# projections; the table that they are made of is the engine's). The share of bits that differ is the angle between the
# two embeddings over pi.


SIMILAR = 0.8
"""Prompts that are less alike take the normal path (SemShareKV's threshold)."""


def similarity(one: bytes, other: bytes) -> float:
    """The cosine that two signatures of one length stand for, at least 0. Exactly 1 for equal ones, 0 without any."""
    if len(one) != len(other):
        return 0.0
    differing = (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).bit_count()
    return max(0.0, math.cos(math.pi * differing / (8 * len(one)))) if one else 0.0


# Which tokens of an assembled prompt are computed in which layer, and which of its KV is kept.
#
# One mechanism, three selectors (../docs/reuse.md): SemShareKV (arXiv 2509.24832), CacheBlend (arXiv 2405.16444) and
# EPIC (arXiv 2410.15332). All are a `Selection`: numbers, and no code of their own.
#
# Layers are counted among those that keep KV, from 0. A *candidate* is a token with KV of a donor; all others, and the
# prompt's last `TAIL` tokens, are computed in every layer.


TAIL = 32
"""The prompt's last tokens: the question, whose attention says what matters. Always computed, never dropped."""


class Selection(msgspec.Struct, frozen=True):
    """`full_layers`: so many layers are computed for all tokens, and the keys and values of the one behind them, where
    candidates are chosen by how far their donors' are off; 0: none is chosen. In layer i of those behind, the share
    `recompute * decay ** (i - full_layers)` of the candidates, at least `floor`, is computed; of these the share `hot`
    by what the tail attends to, the others by deviation. `first`: of each passage so many tokens are computed in any
    case. In layer i of n the share `keep * exp(-fade * i / (n - 1))` of the prompt is kept for the answer.
    `alike`: tokens outside of passages have KV of the first donor's tokens that are most like them, unless the cosine
    of the two is below `least`, or, if `same`, they are other words."""

    name: str
    full_layers: int = 1
    recompute: float = 0.0
    decay: float = 1.0
    floor: float = 0.0
    hot: float = 0.0
    first: int = 0
    keep: float = 1.0
    fade: float = 0.0
    alike: bool = False
    least: float = 0.6
    same: bool = True

    def computed(self, layer: int) -> float:
        """The share of the candidates that goes through attention and MLP of this layer. Never grows with it."""
        if layer < self.full_layers:
            return 1.0
        return max(min(self.recompute, 1.0) * self.decay ** (layer - self.full_layers), self.floor)

    def kept(self, layer: int, num_layers: int) -> float:
        """The share of the prompt whose KV stays in this layer. Never grows with it."""
        return min(1.0, self.keep * math.exp(-self.fade * layer / max(1, num_layers - 1)))

    @property
    def drops(self) -> bool:
        return self.keep < 1.0 or self.fade > 0.0


SEMANTIC = Selection("semantic", recompute=0.4, decay=0.85, floor=0.02, hot=0.5, keep=0.8, fade=0.7, alike=True)
CACHEBLEND = Selection("cacheblend", recompute=0.15, decay=1.0)
EPIC = Selection("epic", full_layers=0, first=16)
SELECTIONS = {each.name: each for each in (SEMANTIC, CACHEBLEND, EPIC)}


class Packing(msgspec.Struct, frozen=True):
    """What is kept of a prompt's first `num_blocks` blocks: `kept[i]` blocks of layer i. They lie in `num_packed`
    blocks of the engine, layer by layer, one slice after the other; the blocks behind follow as ever."""

    num_blocks: int
    kept: tuple[int, ...]

    @property
    def num_packed(self) -> int:
        return -(-sum(self.kept) // len(self.kept))

    @property
    def num_dropped(self) -> int:
        """Blocks that are free again."""
        return self.num_blocks - self.num_packed


def pack(selection: Selection, num_tokens: int, num_layers: int, block_size: int) -> Packing | None:
    """Of a prompt of so many tokens; None where nothing is dropped."""
    num_blocks = (num_tokens - TAIL) // block_size
    if not selection.drops or num_blocks < 1:
        return None
    shares = [selection.kept(layer, num_layers) for layer in range(num_layers)]
    packing = Packing(num_blocks, tuple([max(1, math.ceil(num_blocks * share)) for share in shares]))
    return packing if packing.num_dropped else None


def rows_per_layer(
    selection: Selection, num_candidates: int, num_others: int, num_layers: int
) -> tuple[int, ...]:
    """Tokens computed in each layer of a prompt with so many candidates and so many others."""
    shares = [selection.computed(layer) for layer in range(num_layers)]
    return tuple([num_others + math.ceil(num_candidates * share) for share in shares])
