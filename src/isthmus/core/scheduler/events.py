"""Limits of a scheduler, facts about runs, and its actions. Token positions are 0-based, half-open.

`request`, and `key`: the key of the attempt, by which the node knows a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from isthmus.core.attempts import Assembly, Holding
from isthmus.core.blocks import MAX_SNAPSHOTS
from isthmus.core.reuse import Packing
from isthmus.core.types import BlockName, RequestId


class SchedulerLimits(msgspec.Struct, frozen=True):
    """Limits of one node's engine, in the node's role."""

    num_blocks: int
    block_size: int
    token_budget: int = 512  # tokens of an iteration; prompts get what decodes leave, at least one token
    max_sequences: int = 64  # that compute or are handed over, and as many again that are received
    max_steps: int = 16  # iterations of one run of decodes
    max_chunks: int = 1  # chunks of one prompt in one run
    prompt_batch: int = 1 << 30  # no further prompt joins an iteration with so many prompt tokens
    partial_prefills: int = 1  # prompts computed in parts at the same time; 1: one after the other
    order: str = "fcfs"  # of waiting requests; or `promise`
    state_blocks: int = 0  # blocks that a snapshot of the model's recurrent state fills, 0 for models without

    @property
    def capacity_tokens(self) -> int:
        """Longest request, prompt and answer, that fits alone with all snapshots it may need at once."""
        return (self.num_blocks - MAX_SNAPSHOTS * self.state_blocks) * self.block_size


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """`steps` iterations of the run were executed; the requests in `ended` are over. `answers`: for each of these, the
    names of all full blocks of prompt and answer, which the cache keeps; () to keep none."""

    steps: int
    ended: tuple[RequestId, ...] = ()
    answers: tuple[tuple[BlockName, ...], ...] = ()


class Saved(msgspec.Struct, frozen=True, tag=True):
    """The blocks of one `SaveBlocks` are saved, or cannot be, and may be written over."""

    request: RequestId


class Piece(msgspec.Struct, frozen=True):
    """Compute tokens `[start, start + count)` of one request, whose KV lies in `blocks`. A piece that `samples` reaches
    the end of the known tokens and yields the next one.

    `remote`: holders of its leading blocks, in their order, before `blocks`. `packing`: of a packed prompt, whose
    `blocks` begin with those that packing keeps.

    `assembly`: the prompt is assembled from its donors' KV, which lies in the blocks `scratch`, in their order, and
    then packed into the first of these.

    With recurrent layers the live state is in `slot`: zero at `start` 0, else read from the blocks `restore` if there
    are any, else it goes on. `snapshots`: (position, blocks) to write the state after so many tokens to.
    """

    request: RequestId
    start: int
    count: int
    blocks: tuple[int, ...]
    samples: bool
    slot: int = 0
    restore: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, tuple[int, ...]], ...] = ()
    remote: tuple[Holding, ...] = ()
    packing: Packing | None = None
    assembly: Assembly | None = None
    scratch: tuple[int, ...] = ()

    @property
    def num_absent(self) -> int:
        """Leading blocks that are not in `blocks`: with holders, or dropped by packing."""
        num_remote = sum([holding.num_blocks for holding in self.remote])
        return num_remote if self.packing is None else num_remote + self.packing.num_dropped

    @property
    def table(self) -> tuple[int, ...]:
        """`blocks` by the number of the block in the request, 0 for absent ones."""
        return (0,) * self.num_absent + self.blocks


class Run:
    """Execute this batch, unchanged, for up to `steps` iterations; decodes first. Iteration i computes position
    `start + i` of a decode; a chunk repeats only when it is alone, and iteration i then computes
    `[start + i * count, start + (i + 1) * count)`."""

    __slots__ = ("_expand", "_pieces", "chunks", "context", "num_decodes", "steps")

    def __init__(
        self,
        chunks: tuple[Piece, ...],
        num_decodes: int,
        context: int,
        steps: int,
        expand: Callable[[], list[Piece]],
    ) -> None:
        """`chunks`: the prompts' pieces. `context`: of all that decode, with the tokens of the first iteration."""
        self.chunks, self.num_decodes, self.context, self.steps = chunks, num_decodes, context, steps
        self._expand, self._pieces = expand, None if num_decodes else chunks

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Every piece of the first iteration. Made when first asked for, which must be before the next event; a
        simulator never asks, since times need only the sums."""
        if self._pieces is None:
            self._pieces = (*self._expand(), *self.chunks)
        return self._pieces


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A request got its blocks; its first `cached_tokens` tokens need no computing. With tiers they are loaded into
    `blocks`, `disk_blocks` of them from the SSD, perhaps after a fetch. `state`: blocks with the recurrent state after
    these tokens, or into which it is loaded."""

    request: RequestId
    cached_tokens: int
    blocks: tuple[int, ...]
    disk_blocks: int = 0
    state: tuple[int, ...] = ()


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A received request got a place, and decodes from the next run on."""

    request: RequestId


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """A request lost its blocks to an older one, and is queued again."""

    request: RequestId


class LoadBlocks(msgspec.Struct, frozen=True, tag=True):
    """Load a cached prefix, perhaps with the recurrent state after it and blocks of donors, into these blocks of the
    engine; a run that needs them waits. `arriving`: the fetch of this key brings some. `num_tokens`: tokens that need
    no computing. `told`: answer with `Loaded`."""

    key: RequestId
    names: tuple[BlockName, ...]
    blocks: tuple[int, ...]
    num_tokens: int
    arriving: bool = False
    told: bool = False


class SaveBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks of the engine into DRAM, and later to the SSD; answer with `Saved`, and `BlocksLost`
    of those that found no room. Before that nobody else gets
    `blocks`. `head`: the block before the first one. The last `num_sunk` are for the SSD only: each is in DRAM no
    longer than writing it takes."""

    request: RequestId
    names: tuple[BlockName, ...]
    head: BlockName | None
    blocks: tuple[int, ...]
    num_sunk: int = 0


class AdoptBlocks(msgspec.Struct, frozen=True, tag=True):
    """Keep blocks in the cache that the fetch for a request brought into DRAM; answer with `BlocksLost` of those that
    cannot be kept."""

    request: RequestId
    names: tuple[BlockName, ...]


class Promote(msgspec.Struct, frozen=True, tag=True):
    """Move blocks from the SSD to DRAM."""

    names: tuple[BlockName, ...]


class Demote(msgspec.Struct, frozen=True, tag=True):
    """Move blocks from DRAM to the SSD."""

    names: tuple[BlockName, ...]


class DropBlocks(msgspec.Struct, frozen=True, tag=True):
    """Drop blocks from all tiers."""

    names: tuple[BlockName, ...]


Actions = list[Any]
"""Actions in order: those above, reports to the conductor, and those of the node."""
