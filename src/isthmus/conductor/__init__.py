"""Decides for the cluster: where a request prefills and decodes, whom to refuse, what to do when a node leaves.

Pure: facts in, actions out. The live cluster and the simulator drive the same object, and a recording of one
replays in the other with identical decisions.
"""

from isthmus.attempts import BlocksEvicted as BlocksEvicted
from isthmus.attempts import BlocksStored as BlocksStored
from isthmus.attempts import FetchFinished as FetchFinished
from isthmus.attempts import FetchOrder as FetchOrder
from isthmus.attempts import MemoryUsed as MemoryUsed
from isthmus.attempts import PrefillFinished as PrefillFinished
from isthmus.attempts import RequestFailed as RequestFailed
from isthmus.attempts import RoleChanged as RoleChanged
from isthmus.attempts import Route as Route
from isthmus.attempts import Spread as Spread
from isthmus.conductor.conductor import Conductor as Conductor
from isthmus.conductor.desk import Answer as Answer
from isthmus.conductor.desk import Desk as Desk
from isthmus.conductor.desk import End as End
from isthmus.conductor.desk import Tell as Tell
from isthmus.conductor.desk import Wait as Wait
from isthmus.conductor.events import Abort as Abort
from isthmus.conductor.events import Action as Action
from isthmus.conductor.events import Content as Content
from isthmus.conductor.events import Convert as Convert
from isthmus.conductor.events import Event as Event
from isthmus.conductor.events import Fail as Fail
from isthmus.conductor.events import FirstToken as FirstToken
from isthmus.conductor.events import Hold as Hold
from isthmus.conductor.events import HoldExpired as HoldExpired
from isthmus.conductor.events import Lend as Lend
from isthmus.conductor.events import LinksMeasured as LinksMeasured
from isthmus.conductor.events import LinkState as LinkState
from isthmus.conductor.events import NodeJoined as NodeJoined
from isthmus.conductor.events import NodeLeft as NodeLeft
from isthmus.conductor.events import Paths as Paths
from isthmus.conductor.events import Refuse as Refuse
from isthmus.conductor.events import Remember as Remember
from isthmus.conductor.events import Repay as Repay
from isthmus.conductor.events import RequestArrived as RequestArrived
from isthmus.conductor.events import RequestCancelled as RequestCancelled
from isthmus.conductor.events import RequestEnded as RequestEnded
from isthmus.conductor.events import ThresholdSet as ThresholdSet
from isthmus.conductor.events import Unremember as Unremember
from isthmus.conductor.rules import LinkRule as LinkRule
from isthmus.conductor.rules import Rules as Rules
from isthmus.conductor.view import RequestView as RequestView
