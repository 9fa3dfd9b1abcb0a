"""Decides for the cluster: where a request prefills and decodes, whom to refuse, what to do when a node leaves.

Pure: facts in, actions out. The live cluster and the simulator drive the same object, and a recording of one
replays in the other with identical decisions.
"""

from isthmus.core.attempts import BlocksEvicted as BlocksEvicted
from isthmus.core.attempts import BlocksStored as BlocksStored
from isthmus.core.attempts import Convert as Convert
from isthmus.core.attempts import FetchFinished as FetchFinished
from isthmus.core.attempts import FetchOrder as FetchOrder
from isthmus.core.attempts import HoldingsChanged as HoldingsChanged
from isthmus.core.attempts import Lend as Lend
from isthmus.core.attempts import MemoryUsed as MemoryUsed
from isthmus.core.attempts import PrefillFinished as PrefillFinished
from isthmus.core.attempts import Repay as Repay
from isthmus.core.attempts import RequestFailed as RequestFailed
from isthmus.core.attempts import RoleChanged as RoleChanged
from isthmus.core.attempts import Route as Route
from isthmus.core.conductor.conductor import Conductor as Conductor
from isthmus.core.conductor.desk import Answer as Answer
from isthmus.core.conductor.desk import Desk as Desk
from isthmus.core.conductor.desk import End as End
from isthmus.core.conductor.desk import SendOrder as SendOrder
from isthmus.core.conductor.events import Abort as Abort
from isthmus.core.conductor.events import Action as Action
from isthmus.core.conductor.events import Dismiss as Dismiss
from isthmus.core.conductor.events import Event as Event
from isthmus.core.conductor.events import Fail as Fail
from isthmus.core.conductor.events import FirstToken as FirstToken
from isthmus.core.conductor.events import Hold as Hold
from isthmus.core.conductor.events import HoldExpired as HoldExpired
from isthmus.core.conductor.events import LinkRule as LinkRule
from isthmus.core.conductor.events import LinksMeasured as LinksMeasured
from isthmus.core.conductor.events import LinkState as LinkState
from isthmus.core.conductor.events import NodeDrains as NodeDrains
from isthmus.core.conductor.events import NodeJoined as NodeJoined
from isthmus.core.conductor.events import NodeLeft as NodeLeft
from isthmus.core.conductor.events import NodeProbed as NodeProbed
from isthmus.core.conductor.events import NodeStays as NodeStays
from isthmus.core.conductor.events import Paths as Paths
from isthmus.core.conductor.events import PromptContent as PromptContent
from isthmus.core.conductor.events import Refuse as Refuse
from isthmus.core.conductor.events import Remember as Remember
from isthmus.core.conductor.events import RequestArrived as RequestArrived
from isthmus.core.conductor.events import RequestCancelled as RequestCancelled
from isthmus.core.conductor.events import RequestEnded as RequestEnded
from isthmus.core.conductor.events import Rules as Rules
from isthmus.core.conductor.events import ThresholdSet as ThresholdSet
from isthmus.core.conductor.events import TimePassed as TimePassed
from isthmus.core.conductor.events import Unremember as Unremember
from isthmus.core.conductor.view import RequestView as RequestView
