"""A whole cluster in one event loop and in virtual time: the live head and node processes, and links whose times are
the simulator's.

The loop jumps to the next timer when nothing is left to do, and takes timers one by one: whatever follows
from one without time passing is done before the next, even when both are due at the same instant. What one node says
to another comes first then, then arrivals, as in the simulator, iterations of prompts alone next, then what moves
between nodes, then iterations with decodes. So a run depends on nothing but its input.

Sessions between nodes are real, and so are the frames, seals, stores and memories of the emulated engines: of what
nodes send each other, each message waits at a gate until the simulator says that it has come. The emulated engine
draws its tokens from all KV bytes of a request, so a wrong one shows.
"""

from tests.virtual.cluster import Flight, Outcome, VirtualCluster, VirtualRequest
from tests.virtual.loop import ManualLoop

__all__ = ["Flight", "ManualLoop", "Outcome", "VirtualCluster", "VirtualRequest"]
