"""Decides for one node: the next batch, chunk sizes, which blocks a request holds, which cached blocks stay.

Pure: facts in, actions out, no clock, no torch. The live node and the simulator drive the same object.
"""

from isthmus.core.scheduler.chunks import CPU_TILE as CPU_TILE
from isthmus.core.scheduler.chunks import TILE as TILE
from isthmus.core.scheduler.chunks import Chunking as Chunking
from isthmus.core.scheduler.chunks import StepTime as StepTime
from isthmus.core.scheduler.chunks import TbtTarget as TbtTarget
from isthmus.core.scheduler.events import Actions as Actions
from isthmus.core.scheduler.events import Admitted as Admitted
from isthmus.core.scheduler.events import AdoptBlocks as AdoptBlocks
from isthmus.core.scheduler.events import Demote as Demote
from isthmus.core.scheduler.events import DropBlocks as DropBlocks
from isthmus.core.scheduler.events import Joined as Joined
from isthmus.core.scheduler.events import LoadBlocks as LoadBlocks
from isthmus.core.scheduler.events import Piece as Piece
from isthmus.core.scheduler.events import Preempted as Preempted
from isthmus.core.scheduler.events import Promote as Promote
from isthmus.core.scheduler.events import Run as Run
from isthmus.core.scheduler.events import SaveBlocks as SaveBlocks
from isthmus.core.scheduler.events import Saved as Saved
from isthmus.core.scheduler.events import SchedulerLimits as SchedulerLimits
from isthmus.core.scheduler.events import Stepped as Stepped
from isthmus.core.scheduler.pool import BlockPool as BlockPool
from isthmus.core.scheduler.pool import CountingPool as CountingPool
from isthmus.core.scheduler.prefixes import TierKeeper as TierKeeper
from isthmus.core.scheduler.scheduler import Scheduler as Scheduler
from isthmus.core.scheduler.sequence import Sequence as Sequence
from isthmus.core.scheduler.tiers import Chain as Chain
from isthmus.core.scheduler.tiers import Entry as Entry
from isthmus.core.scheduler.tiers import ReadAhead as ReadAhead
from isthmus.core.scheduler.tiers import TierCache as TierCache
from isthmus.core.scheduler.tiers import chains_of as chains_of
