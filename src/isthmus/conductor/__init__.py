"""Decides for the cluster: where a request prefills and decodes, whom to refuse, what to do when a node leaves.

Pure: facts in, actions out. The live cluster and the simulator drive the same object, and a recording of one
replays in the other with identical decisions.
"""

from isthmus.attempts import (
    BlocksEvicted,
    BlocksStored,
    FetchFinished,
    FetchOrder,
    MemoryUsed,
    PrefillFinished,
    RequestFailed,
    RoleChanged,
    Route,
    Spread,
)
from isthmus.conductor.conductor import Conductor
from isthmus.conductor.events import (
    Abort,
    Action,
    Convert,
    Event,
    Fail,
    FirstToken,
    Hold,
    HoldExpired,
    Lend,
    LinksMeasured,
    LinkState,
    NodeJoined,
    NodeLeft,
    Paths,
    Refuse,
    Repay,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    ThresholdSet,
)
from isthmus.conductor.rules import LinkRule, Rules

__all__ = [
    "Abort",
    "Action",
    "BlocksEvicted",
    "BlocksStored",
    "Conductor",
    "Convert",
    "Event",
    "Fail",
    "FetchFinished",
    "FetchOrder",
    "FirstToken",
    "Hold",
    "HoldExpired",
    "Lend",
    "LinkRule",
    "LinkState",
    "LinksMeasured",
    "MemoryUsed",
    "NodeJoined",
    "NodeLeft",
    "Paths",
    "PrefillFinished",
    "Refuse",
    "Repay",
    "RequestArrived",
    "RequestCancelled",
    "RequestEnded",
    "RequestFailed",
    "RoleChanged",
    "Route",
    "Rules",
    "Spread",
    "ThresholdSet",
]
