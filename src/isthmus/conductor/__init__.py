"""Decides for the cluster: where a request prefills and decodes, whom to refuse, what to do when a node leaves.

Pure: facts in, actions out. The live cluster and the simulator drive the same object, and a recording of one
replays in the other with identical decisions.
"""

from isthmus.conductor.conductor import Conductor
from isthmus.conductor.events import (
    Abort,
    Action,
    BlocksEvicted,
    BlocksStored,
    Event,
    Fail,
    Fetch,
    FetchFinished,
    FirstToken,
    Hold,
    HoldExpired,
    NodeJoined,
    NodeLeft,
    Paths,
    PrefillFinished,
    Refuse,
    Replicate,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestFailed,
    Route,
)
from isthmus.conductor.rules import Rules

__all__ = [
    "Abort",
    "Action",
    "BlocksEvicted",
    "BlocksStored",
    "Conductor",
    "Event",
    "Fail",
    "Fetch",
    "FetchFinished",
    "FirstToken",
    "Hold",
    "HoldExpired",
    "NodeJoined",
    "NodeLeft",
    "Paths",
    "PrefillFinished",
    "Refuse",
    "Replicate",
    "RequestArrived",
    "RequestCancelled",
    "RequestEnded",
    "RequestFailed",
    "Route",
    "Rules",
]
