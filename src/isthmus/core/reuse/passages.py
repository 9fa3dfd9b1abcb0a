"""The same text at another place: prompts cut where their content says, so that equal passages are cut alike.

Boundaries depend on the last few tokens alone (content-defined chunking), so a passage that stands elsewhere, between
other texts, is cut into the same pieces but for its ends. No separator has to be agreed on.
"""

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
