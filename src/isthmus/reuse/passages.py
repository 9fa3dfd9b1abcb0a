"""The same text at another place: prompts cut where their content says, so that equal passages are cut alike.

Boundaries depend on the last few tokens alone (content-defined chunking), so a passage that stands elsewhere, between
other texts, is cut into the same pieces but for its ends. No separator has to be agreed on.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import blake3
import msgspec

WINDOW = 4
"""Tokens that decide whether a piece ends with the last of them."""
LEAST, MASK, MOST = 8, 15, 128
"""A piece has at least and at most so many tokens; one in 16 tokens ends one otherwise."""
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
        if found:
            last = found[-1]
            if (last.donor, last.at + last.count, last.start + last.count) == (donor, at, origin):
                found[-1] = Passage(last.at, last.count + stop - at, donor, last.start)
                continue
        found.append(Passage(at, stop - at, donor, origin))
    return tuple([each for each in found if each.count >= MIN_PASSAGE])


def extended(
    found: Sequence[Passage], tokens: Sequence[int], donors: Sequence[Sequence[int]], *, start: int = 0
) -> tuple[Passage, ...]:
    """The same passages, with what is equal before and behind them: pieces end where their content says, and not where
    the text does that two prompts have in common. `found`: in order, none over another. `donors`: the tokens of each,
    from its first. Tokens before `start` are in no passage."""
    grown = list[Passage]()
    for number, each in enumerate(found):
        theirs, shift = donors[each.donor], each.start - each.at
        first, stop = each.at, each.at + each.count
        before = grown[-1].at + grown[-1].count if grown else start
        behind = found[number + 1].at if number + 1 < len(found) else len(tokens)
        while first > before and first + shift > 0 and tokens[first - 1] == theirs[first + shift - 1]:
            first -= 1
        while stop < behind and stop + shift < len(theirs) and tokens[stop] == theirs[stop + shift]:
            stop += 1
        grown.append(Passage(first, stop - first, each.donor, first + shift))
    return tuple(grown)
