"""What one node may use of its engine in the role that it has."""

from __future__ import annotations

import msgspec

from isthmus.blocks import MAX_SNAPSHOTS


class Limits(msgspec.Struct, frozen=True):
    """What one node may use.

    `token_budget`: tokens computed in one iteration (decodes are never cut, prompts get what is left, at
    least one); `prompt_batch`: no further prompt joins an iteration that has so many prompt tokens already;
    `partial_prefills`: prompts that are computed in parts at the same time, 1: each waits until the one before it is
    through; `max_sequences`: requests that compute or leave, and as many again that come; `max_steps`: iterations of
    one run of decodes, `max_chunks` of one prompt's chunks; `order`: of waiting requests, `fcfs` or `promise`;
    `state_blocks`: that a snapshot of the model's recurrent state fills, 0 for models without.
    """

    num_blocks: int
    block_size: int
    token_budget: int = 512
    max_sequences: int = 64
    max_steps: int = 16
    max_chunks: int = 1
    prompt_batch: int = 1 << 30
    partial_prefills: int = 1
    order: str = "fcfs"
    state_blocks: int = 0

    @property
    def capacity_tokens(self) -> int:
        """The longest request, prompt and answer, that fits alone, with all snapshots it may need at once."""
        return (self.num_blocks - MAX_SNAPSHOTS * self.state_blocks) * self.block_size
