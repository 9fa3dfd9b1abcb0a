"""Decides for the cluster: where a request prefills and decodes, whom to refuse, what to do when a node leaves.

Pure: facts in, actions out. The live cluster and the simulator drive the same object, and a recording of one
replays in the other with identical decisions.
"""

from isthmus.conductor.conductor import Conductor, Rules
from isthmus.conductor.events import (
    Abort,
    Action,
    BlocksEvicted,
    BlocksStored,
    Event,
    Fail,
    Hold,
    HoldExpired,
    NodeJoined,
    NodeLeft,
    PrefillFinished,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestFailed,
    Route,
)

__all__ = [
    "Abort",
    "Action",
    "BlocksEvicted",
    "BlocksStored",
    "Conductor",
    "Event",
    "Fail",
    "Hold",
    "HoldExpired",
    "NodeJoined",
    "NodeLeft",
    "PrefillFinished",
    "Refuse",
    "RequestArrived",
    "RequestCancelled",
    "RequestEnded",
    "RequestFailed",
    "Route",
    "Rules",
]
