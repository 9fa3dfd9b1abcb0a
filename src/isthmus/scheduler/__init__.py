"""Decides for one node: the next batch, chunk sizes, which blocks a request holds, which cached blocks stay.

Pure: facts in, actions out, no clock, no torch. The live node and the simulator drive the same object.
"""

from isthmus.scheduler.chunks import CPU_TILE as CPU_TILE
from isthmus.scheduler.chunks import TILE as TILE
from isthmus.scheduler.chunks import Chunking as Chunking
from isthmus.scheduler.chunks import StepTime as StepTime
from isthmus.scheduler.chunks import TbtTarget as TbtTarget
from isthmus.scheduler.events import Actions as Actions
from isthmus.scheduler.events import Admitted as Admitted
from isthmus.scheduler.events import Adopt as Adopt
from isthmus.scheduler.events import Demote as Demote
from isthmus.scheduler.events import Drop as Drop
from isthmus.scheduler.events import Joined as Joined
from isthmus.scheduler.events import Limits as Limits
from isthmus.scheduler.events import Load as Load
from isthmus.scheduler.events import Piece as Piece
from isthmus.scheduler.events import Preempted as Preempted
from isthmus.scheduler.events import Promote as Promote
from isthmus.scheduler.events import Run as Run
from isthmus.scheduler.events import Save as Save
from isthmus.scheduler.events import Saved as Saved
from isthmus.scheduler.events import Stepped as Stepped
from isthmus.scheduler.pool import BlockPool as BlockPool
from isthmus.scheduler.pool import CountingPool as CountingPool
from isthmus.scheduler.prefixes import Keeper as Keeper
from isthmus.scheduler.scheduler import Scheduler as Scheduler
from isthmus.scheduler.sequence import Sequence as Sequence
from isthmus.scheduler.tiers import ReadAhead as ReadAhead
from isthmus.scheduler.tiers import TierCache as TierCache
