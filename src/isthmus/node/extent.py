"""What of a request's KV is handed over, in token positions.

0          start                        num_tokens   states          stop
├─ recalled ─┼────── KV of the prompt ───────┤ (pad) ├─ whole blocks ─┤
                                                     of the recurrent state
"""

from __future__ import annotations

import msgspec

from isthmus.attempts import Assembly, Holding, Route
from isthmus.scheduler.remote import num_blocks

NONE = "none"


class Extent(msgspec.Struct, frozen=True):
    """Tokens `[start, num_tokens)`, then whole blocks from `states` on that hold the recurrent state, up to `stop`.
    `codec`: of the KV."""

    block_size: int
    start: int
    num_tokens: int
    states: int
    stop: int
    codec: str = NONE

    def codec_at(self, position: int) -> str:
        """States are not KV: no codec of numbers fits them."""
        return self.codec if position < self.states else NONE

    def resumes(self, received: int) -> int:
        """Where the next frame of a layer starts that has so much."""
        if received == self.num_tokens < self.stop:
            return self.states
        return received // self.block_size * self.block_size


def extent_of(route: Route, num_tokens: int, block_size: int, state_blocks: int) -> Extent:
    states = -(-num_tokens // block_size) * block_size
    stop = states + state_blocks * block_size if state_blocks else num_tokens
    away = num_blocks(holdings_of(route, num_tokens, block_size))
    start = route.handover_start + away + num_dropped(route)
    return Extent(block_size, start * block_size, num_tokens, states, stop, route.codec)


def assembly_of(route: Route) -> Assembly | None:
    """How a prompt is assembled, as both its nodes see it. With KV at holders it is not; nor is one to be packed where
    some of it is recalled, for that is not packed."""
    assembly = route.assembly
    if assembly is None or route.holdings or route.growth or route.taken:
        return None
    return None if assembly.packing is not None and route.handover_start else assembly


def num_dropped(route: Route) -> int:
    """Blocks of the prompt that are not handed over, since it is packed."""
    assembly = assembly_of(route)
    return assembly.packing.num_dropped if assembly is not None and assembly.packing is not None else 0


def holdings_of(route: Route, num_tokens: int, block_size: int) -> tuple[Holding, ...]:
    """Where an attempt's leading blocks are to lie when it begins with so many tokens: with growth all full ones but
    the last token's, whatever of them an earlier attempt generated."""
    holdings, growth = route.holdings, route.growth
    if not growth:
        return holdings
    if holdings and holdings[-1].holders == growth:
        holdings = holdings[:-1]
    rest = (num_tokens - 1) // block_size - num_blocks(holdings)
    return (*holdings, Holding(growth, rest)) if rest else holdings
