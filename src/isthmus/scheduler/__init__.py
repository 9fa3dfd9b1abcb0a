"""Decides for one node: the next batch, chunk sizes, which blocks a request holds, which cached blocks stay.

Pure: facts in, actions out, no clock, no torch. The live node and the simulator drive the same object.
"""

from isthmus.scheduler.budget import CPU_TILE, TILE, Chunking, StepTime, TbtTarget
from isthmus.scheduler.events import (
    Action,
    Admitted,
    Arrived,
    Cancelled,
    Event,
    Evicted,
    Expected,
    Fetched,
    Imported,
    Joined,
    Lost,
    Missing,
    Offered,
    Piece,
    Preempted,
    Recovered,
    Released,
    Reserved,
    Run,
    Stepped,
    Stored,
)
from isthmus.scheduler.pool import BlockPool, CountingPool
from isthmus.scheduler.scheduler import Limits, Scheduler
from isthmus.scheduler.states import capacity_tokens
from isthmus.scheduler.tiers import TierCache

__all__ = [
    "CPU_TILE",
    "TILE",
    "Action",
    "Admitted",
    "Arrived",
    "BlockPool",
    "Cancelled",
    "Chunking",
    "CountingPool",
    "Event",
    "Evicted",
    "Expected",
    "Fetched",
    "Imported",
    "Joined",
    "Limits",
    "Lost",
    "Missing",
    "Offered",
    "Piece",
    "Preempted",
    "Recovered",
    "Released",
    "Reserved",
    "Run",
    "Scheduler",
    "StepTime",
    "Stepped",
    "Stored",
    "TbtTarget",
    "TierCache",
    "capacity_tokens",
]
