"""Decides for the cluster: where a request prefills and decodes, whom to refuse, what to do when a node leaves.

Pure: facts in, actions out. The live cluster and the simulator drive the same object, and a recording of one
replays in the other with identical decisions.
"""

from isthmus.attempts import (
    BlocksEvicted,
    BlocksStored,
    FetchFinished,
    FetchOrder,
    PrefillFinished,
    RequestFailed,
    RoleChanged,
    Route,
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
    LinksMeasured,
    LinkState,
    NodeJoined,
    NodeLeft,
    Paths,
    Refuse,
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
    "LinkRule",
    "LinkState",
    "LinksMeasured",
    "NodeJoined",
    "NodeLeft",
    "Paths",
    "PrefillFinished",
    "Refuse",
    "RequestArrived",
    "RequestCancelled",
    "RequestEnded",
    "RequestFailed",
    "RoleChanged",
    "Route",
    "Rules",
    "ThresholdSet",
]
