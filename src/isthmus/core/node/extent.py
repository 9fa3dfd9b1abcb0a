"""What of a request's KV is handed over, in token positions.

0          start                        num_tokens   states          stop
├─ recalled ─┼────── KV of the prompt ───────┤ (pad) ├─ whole blocks ─┤
                                                     of the recurrent state
"""

from __future__ import annotations

import msgspec

from isthmus.core.attempts import Route, num_left_out

NONE = "none"


class HandoverSpan(msgspec.Struct, frozen=True):
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


def extent_of(route: Route, num_tokens: int, block_size: int, state_blocks: int) -> HandoverSpan:
    states = -(-num_tokens // block_size) * block_size
    stop = states + state_blocks * block_size if state_blocks else num_tokens
    start = num_left_out(route, num_tokens, block_size) * block_size
    return HandoverSpan(block_size, start, num_tokens, states, stop, route.codec)
