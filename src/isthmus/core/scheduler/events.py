"""What a scheduler may use, what it is told of runs, and what it answers. Token positions are 0-based, half-open.

`request`, and `key`: what the node calls it, which is the key of the attempt.
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
    """What one node may use of its engine in the role that it has."""

    num_blocks: int
    block_size: int
    token_budget: int = (
        512  # of one iteration: decodes are never cut, prompts get what is left, at least one token
    )
    max_sequences: int = 64  # that compute or are handed over, and as many again that come
    max_steps: int = 16  # iterations of one run of decodes
    max_chunks: int = 1  # of one prompt in one run
    prompt_batch: int = 1 << 30  # no further prompt joins an iteration that has so many prompt tokens already
    partial_prefills: int = (
        1  # computed in parts at the same time; 1: each waits until the one before it is through
    )
    order: str = "fcfs"  # of waiting requests; or `promise`
    state_blocks: int = 0  # that a snapshot of the model's recurrent state fills, 0 for models without

    @property
    def capacity_tokens(self) -> int:
        """The longest request, prompt and answer, that fits alone, with all snapshots it may need at once."""
        return (self.num_blocks - MAX_SNAPSHOTS * self.state_blocks) * self.block_size


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """`steps` iterations of the current run were executed; the requests in `ended` are over.

    `answers`: of each of these, the names of all full blocks of prompt and answer, to be kept; () to keep none.
    """

    steps: int
    ended: tuple[RequestId, ...] = ()
    answers: tuple[tuple[BlockName, ...], ...] = ()


class Saved(msgspec.Struct, frozen=True, tag=True):
    """What one `SaveBlocks` wanted saved of the engine's blocks of a request is, or cannot be: they may hold something
    else from now on."""

    request: RequestId


class Piece(msgspec.Struct, frozen=True):
    """Compute tokens `[start, start + count)` of one request, whose KV lies in `blocks`.

    When `samples`, this piece reaches the end of the known tokens and yields the next one.

    `remote`: where its leading blocks lie if not here, in their order; `blocks` are those that follow. Of a prompt that
    was packed they begin with what `packing` keeps; what it drops lies nowhere.

    `assembly`: it is put together from its donors' KV, whose blocks lie in `scratch`, in their order, and then packed
    into the first of these.

    Of a model with recurrent layers: the live state is in `slot`. At `start` 0 it is zero; else it is what the blocks
    `restore` hold, if there are any; else it goes on. `snapshots`: (position, blocks to write the state after so many
    tokens to), those that this piece reaches.
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
        """Leading blocks that are not in `blocks`: they lie elsewhere, or were dropped."""
        num_remote = sum([holding.num_blocks for holding in self.remote])
        return num_remote if self.packing is None else num_remote + self.packing.num_dropped

    @property
    def table(self) -> tuple[int, ...]:
        """`blocks` by the number of the block in the request; what stands for those absent means nothing."""
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
        """Every piece of the first iteration. Made when first asked for, which must be before the next event:
        a simulator never asks, since times need only the sums."""
        if self._pieces is None:
            self._pieces = (*self._expand(), *self.chunks)
        return self._pieces


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A request got its blocks; its first `cached_tokens` tokens need no computing.

    They are in `blocks` already, or, on a node with a tiered cache, are to be loaded from there, `disk_blocks`
    of them from SSD, and a fetch may be under way. `state`: blocks that hold the recurrent state after these tokens,
    or that it is to be loaded to.
    """

    request: RequestId
    cached_tokens: int
    blocks: tuple[int, ...]
    disk_blocks: int = 0
    state: tuple[int, ...] = ()


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A request that was imported decodes from the next run on: there is a place for it."""

    request: RequestId


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """A request lost its blocks to an older one; it is queued again and computed anew."""

    request: RequestId


class LoadBlocks(msgspec.Struct, frozen=True, tag=True):
    """Bring cached blocks, the first of a prompt and perhaps the recurrent state after them, into these blocks of the
    engine; of them the fetch of this key brings some if `arriving`. A run that needs them waits. `num_tokens`: that
    need no computing. `told`: say so when they are there. Blocks of donors may follow those of the prompt."""

    key: RequestId
    names: tuple[BlockName, ...]
    blocks: tuple[int, ...]
    num_tokens: int
    arriving: bool = False
    told: bool = False


class SaveBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks of the engine into DRAM, and from there, as time allows, to the SSD; then say `Saved`, and which of
    them found no room. Nobody else gets `blocks` before that. `head`: the block that the first follows. The last
    `num_sunk` are for the SSD only: DRAM holds each no longer than it takes to write it."""

    request: RequestId
    names: tuple[BlockName, ...]
    head: BlockName | None
    blocks: tuple[int, ...]
    num_sunk: int = 0


class AdoptBlocks(msgspec.Struct, frozen=True, tag=True):
    """These blocks, which the fetch for a request brought into DRAM, are the cache's from now on; say which of them
    could not be."""

    request: RequestId
    names: tuple[BlockName, ...]


class Promote(msgspec.Struct, frozen=True, tag=True):
    """Bring these blocks from the SSD to DRAM."""

    names: tuple[BlockName, ...]


class Demote(msgspec.Struct, frozen=True, tag=True):
    """Only on the SSD from now on."""

    names: tuple[BlockName, ...]


class DropBlocks(msgspec.Struct, frozen=True, tag=True):
    """In no tier any more."""

    names: tuple[BlockName, ...]


Actions = list[Any]
"""What follows, in order: the values above and reports to the conductor, between which a node puts its own."""
