"""What the stages of one pipeline group say to each other, along the chain that they form.

Downwards go the leader's own actions, as they are, and what is to be computed: each stage passes them on in their order
when it has carried them out itself. Upwards go facts for the leader, at once.
"""

from __future__ import annotations

import msgspec

from isthmus.cluster.messages import PeerHello, Task
from isthmus.node.events import (
    Broken,
    Demote,
    Drop,
    Load,
    Lost,
    Offer,
    Promote,
    Read,
    Release,
    Save,
    Severed,
    Shorten,
)
from isthmus.scheduler import Piece, Preempted
from isthmus.types import BlockName, RequestId, TokenLogprobs

MAX_NAMES = 1 << 16
"""In one message: far from the limit of its length."""


class StageOpen(msgspec.Struct, frozen=True, tag=True):
    """First message down: be this stage. `hello`: of the leader; `later`: addresses of the stages that follow.

    `num_blocks`, `num_slots`, `num_records`: of the leader's KV memory, and of its cache in DRAM and on disk, which
    every stage must be able to follow block by block.
    """

    hello: PeerHello
    stage: int
    num_blocks: int
    num_slots: int
    num_records: int
    later: tuple[str, ...]


class StageRun(msgspec.Struct, frozen=True, tag=True):
    """Compute this batch. Payload: the hidden states of the stage before, a dense array.

    `poisoned`: attempts whose hidden states mean nothing, since a stage before misses some of their KV.
    """

    run: int
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    dtype: str
    poisoned: tuple[RequestId, ...] = ()


Followed = Load | Read | Save | Promote | Demote | Drop | Shorten | Offer | Release | Preempted
"""Actions of the leader's node that every stage carries out for its layers."""

Downward = StageOpen | Task | StageRun | Followed


class StageFound(msgspec.Struct, frozen=True, tag=True):
    """Blocks that this stage found on its disk when it started. `last`: all of them are told, and it can begin."""

    stage: int
    names: tuple[BlockName, ...]
    last: bool = False


class StageSampled(msgspec.Struct, frozen=True, tag=True):
    """A batch has left the last stage, with these tokens; `keys`: of the attempts that they belong to."""

    run: int
    keys: tuple[RequestId, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class StageSaved(msgspec.Struct, frozen=True, tag=True):
    """A stage has carried out a `Save` of this request's blocks."""

    stage: int
    request: RequestId


Upward = StageFound | StageSampled | StageSaved | Lost | Broken | Severed
