"""What the stages of one pipeline group say to each other, along the chain that they form.

Everything for later stages comes from the leader and keeps its order: each stage passes it on when it has carried it
out itself. Everything for the leader is passed on at once.
"""

from __future__ import annotations

import msgspec

from isthmus.blocks import KVLayout
from isthmus.cluster.messages import Begin
from isthmus.scheduler import Piece
from isthmus.types import BlockName, NodeId, RequestId, TokenLogprobs


class StageOpen(msgspec.Struct, frozen=True, tag=True):
    """First message down: be the next stage. `later`: addresses of those that follow it.

    `num_blocks`, `num_slots`, `num_records`: of the leader's KV memory, and of its cache in DRAM and on disk, which
    every stage must be able to follow block by block.
    """

    protocol: int
    token: str
    group: NodeId
    stage: int
    revision: str
    layout: KVLayout
    num_blocks: int
    num_slots: int
    num_records: int
    later: tuple[str, ...]


class StageBegin(msgspec.Struct, frozen=True, tag=True):
    """Take part in the prefill of an attempt."""

    begin: Begin


class StageForget(msgspec.Struct, frozen=True, tag=True):
    """An attempt is over, or is given up: its blocks may hold something else from now on."""

    key: RequestId


class StageLoad(msgspec.Struct, frozen=True, tag=True):
    """The first blocks of an attempt's prompt are cached: bring them into these blocks of the engine."""

    key: RequestId
    blocks: tuple[int, ...]


class StageShorten(msgspec.Struct, frozen=True, tag=True):
    """Only the first `num_blocks` blocks of a cached prefix are needed: what follows them will be computed."""

    key: RequestId
    num_blocks: int


class StageRun(msgspec.Struct, frozen=True, tag=True):
    """Compute this batch. Payload: the hidden states of the stage before, a dense array.

    `poisoned`: attempts whose hidden states mean nothing, since a stage before misses some of their KV.
    """

    run: int
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    dtype: str
    poisoned: tuple[RequestId, ...] = ()


class StageSave(msgspec.Struct, frozen=True, tag=True):
    """Copy these blocks of the engine into the cache; `heads`: the block that each follows."""

    save: int
    names: tuple[BlockName, ...]
    heads: tuple[BlockName | None, ...]
    blocks: tuple[int, ...]


class StageDemote(msgspec.Struct, frozen=True, tag=True):
    """Only on disk from now on."""

    names: tuple[BlockName, ...]


class StageDrop(msgspec.Struct, frozen=True, tag=True):
    """In no tier any more."""

    names: tuple[BlockName, ...]


Downward = (
    StageOpen
    | StageBegin
    | StageForget
    | StageLoad
    | StageShorten
    | StageRun
    | StageSave
    | StageDemote
    | StageDrop
)


class StageFound(msgspec.Struct, frozen=True, tag=True):
    """Blocks that this stage found on its disk when it started; perhaps not all of them."""

    stage: int
    names: tuple[BlockName, ...]


class StageReady(msgspec.Struct, frozen=True, tag=True):
    """This stage and all after it can begin; all that was found was told."""

    stage: int


class StageSampled(msgspec.Struct, frozen=True, tag=True):
    """A batch has left the last stage, with these tokens; `keys`: of the attempts that they belong to."""

    run: int
    keys: tuple[RequestId, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class StageSaved(msgspec.Struct, frozen=True, tag=True):
    """A stage has carried out a StageSave; `lost`: those that found no room."""

    save: int
    lost: tuple[BlockName, ...]


class StageLost(msgspec.Struct, frozen=True, tag=True):
    """Bytes of these blocks are gone from this stage's cache."""

    names: tuple[BlockName, ...]


class StageFailed(msgspec.Struct, frozen=True, tag=True):
    """A stage cannot go on with an attempt."""

    key: RequestId
    reason: str


Upward = StageFound | StageReady | StageSampled | StageSaved | StageLost | StageFailed
