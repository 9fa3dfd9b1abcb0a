"""Decides for one node: the next batch, chunk sizes, which blocks a request holds, which cached blocks stay.

Pure: facts in, actions out, no clock, no torch. The live node and the simulator drive the same object.
"""

from isthmus.scheduler.budget import CPU_TILE, TILE, Chunking, StepTime, TbtTarget
from isthmus.scheduler.events import (
    Actions,
    Admitted,
    Adopt,
    Demote,
    Drop,
    Joined,
    Load,
    Piece,
    Preempted,
    Promote,
    Run,
    Save,
    Saved,
    Stepped,
)
from isthmus.scheduler.keeper import Keeper
from isthmus.scheduler.limits import Limits
from isthmus.scheduler.pool import BlockPool, CountingPool
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduler.sequence import Sequence
from isthmus.scheduler.tiers import ReadAhead, TierCache

__all__ = [
    "CPU_TILE",
    "TILE",
    "Actions",
    "Admitted",
    "Adopt",
    "BlockPool",
    "Chunking",
    "CountingPool",
    "Demote",
    "Drop",
    "Joined",
    "Keeper",
    "Limits",
    "Load",
    "Piece",
    "Preempted",
    "Promote",
    "ReadAhead",
    "Run",
    "Save",
    "Saved",
    "Scheduler",
    "Sequence",
    "StepTime",
    "Stepped",
    "TbtTarget",
    "TierCache",
]
