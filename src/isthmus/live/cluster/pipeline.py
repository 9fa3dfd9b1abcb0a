"""A pipeline group (Mooncake, FAST'25, 5.1): `Group` for its leader, which has one session with the later stages, and
`Groups` for the head.

    leader (decides, first layers) ══ hidden states, actions ══> stage 1 ══> … ══> last stage ── tokens ──> leader

The leader computes the next chunk while later stages compute the one before. Each stage keeps the KV of its layers
under the same block numbers, carries out the leader's actions on it, and sends it to the decode node itself.

When all stages have come, the head tells the leader, which connects them and joins the cluster as one node. A group
ends as a whole.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from isthmus.core.node.events import Action, DropBlocks, Event, StartAttempt
from isthmus.core.scheduler import Run, Saved
from isthmus.core.types import BlockName, NodeId, RequestId
from isthmus.facts import NodeFacts
from isthmus.live.engine.interface import Hidden
from isthmus.live.messenger import Network, Priority, Session
from isthmus.live.peers import messages
from isthmus.live.peers.sessions import NoPayloads, check_peer

_FOLLOWED = frozenset(get_args(messages.Followed))


class Group(NoPayloads):
    """The later stages, for their leader. `begin`, `do` and `compute` are sent in order: `later` calls a function in
    the event loop. There `tell` takes facts for the node, `scored` scores of prompts, `sampled` the tokens of a batch
    that the last stage has computed, and `end` why a stage is gone."""

    def __init__(
        self,
        stages: int,
        tell: Callable[[Event], None],
        sampled: Callable[[messages.StageSampled], None],
        scored: Callable[[messages.Scores], None],
        end: Callable[[str], None],
        later: Callable[..., None],
    ) -> None:
        assert stages > 1
        self.stages, self._tell, self._end, self._later = stages, tell, end, later
        self._sampled, self._scored = sampled, scored
        self._session: Session | None = None
        self._num_ready = 0
        self._formed = asyncio.Event()
        self._found: list[set[BlockName]] = [set() for _ in range(stages - 1)]
        self._saves: dict[RequestId, list[int]] = {}
        """Saves that each stage has finished, by request, while their numbers differ."""
        self._turn = threading.Condition()
        self._in_flight = self._num_runs = self._max_in_flight = 0
        self._closed = False
        self._wait_s = 0.0

    # While the node decides, and while the engine computes.

    def begin(self, begin: StartAttempt) -> None:
        self._later(self._send, begin)

    def do(self, action: Action) -> None:
        """Sends an action to all stages, if it concerns their KV."""
        if type(action) in _FOLLOWED:
            self._later(self._send, action)

    def take_turn(self) -> None:
        """Waits until no more batches are in flight than there are stages."""
        started_ns = time.monotonic_ns()
        with self._turn:
            self._turn.wait_for(lambda: self._in_flight <= self.stages or self._closed)
        self._wait_s += (time.monotonic_ns() - started_ns) / 1e9

    def compute(self, run: Run, hidden: Hidden) -> None:
        """Sends a batch on that the first stage has computed."""
        with self._turn:
            self._in_flight += 1
            self._max_in_flight = max(self._max_in_flight, self._in_flight)
        self._num_runs += 1
        onward = messages.StageRun(self._num_runs, run.pieces, hidden.shape, hidden.dtype)
        self._later(self._send, onward, hidden.data)

    # In the event loop.

    def tell(self, fact: Event) -> None:
        """Takes a fact of the leader's own mover; a save counts once all stages have finished it."""
        if isinstance(fact, Saved):
            self._saved(0, fact.request)
        else:
            self._tell(fact)

    def _saved(self, stage: int, request: RequestId) -> None:
        """Counts a finished save of a request at a stage; stages carry out saves in the same order."""
        done = self._saves.setdefault(request, [0] * self.stages)
        before = min(done)
        done[stage] += 1
        if min(done) == max(done):
            del self._saves[request]
        if min(done) > before:
            self._tell(Saved(request))

    def _send(self, message: Any, *payload: memoryview) -> None:
        if self._session is not None:  # one priority for all, or they would overtake each other
            self._session.send(message, *payload, priority=Priority.URGENT)

    async def form(
        self,
        network: Network,
        hello: messages.PeerHello,
        facts: NodeFacts,
        addresses: Sequence[str],
        timeout_s: float,
    ) -> None:
        """Connects the stages; returns when all are ready. Raises OSError or TimeoutError."""
        self._session = await network.connect(addresses[0], messages.Upward, self, timeout_s=timeout_s)
        check_peer(self._session, hello.node)
        later, sizes = tuple(addresses[1:]), (facts.kv_blocks, facts.num_slots, facts.ssd_blocks)
        self._send(messages.StageOpen(hello, 1, *sizes, later))
        await self._formed.wait()

    def common(
        self, found: list[tuple[BlockName, BlockName | None]]
    ) -> tuple[list[tuple[BlockName, BlockName | None]], tuple[BlockName, ...]]:
        """Returns those blocks `found` on the leader's disk that all stages have, and the names of all others, which
        the later stages drop."""
        names = [name for name, _ in found]
        everywhere = set(names).intersection(*self._found)
        anywhere = dict.fromkeys(names)
        for stage in self._found:
            anywhere |= dict.fromkeys(sorted(stage, key=repr))
        self._found = []
        useless = tuple([name for name in anywhere if name not in everywhere])
        for at in range(0, len(useless), messages.MAX_NAMES):
            self.do(DropBlocks(useless[at : at + messages.MAX_NAMES]))
        return [pair for pair in found if pair[0] in everywhere], useless

    def gauges(self) -> dict[str, float]:
        """Returns present state and totals, by metric name."""
        with self._turn:
            return {
                "pipeline_runs_in_flight": self._in_flight,
                "pipeline_runs_in_flight_max": self._max_in_flight,
                "pipeline_runs_total": self._num_runs,
                "pipeline_wait_seconds_total": self._wait_s,
            }

    def close(self) -> None:
        """Releases a leader that waits for its turn."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if self._session is not None:
            self._session.close()

    def on_message(self, session: Session, message: messages.Upward) -> None:
        match message:
            case messages.StageFound():
                self._found[message.stage - 1].update(message.names)
                self._num_ready += message.last
                if self._num_ready == self.stages - 1:
                    self._formed.set()
            case messages.StageSampled():
                with self._turn:
                    self._in_flight -= 1
                    self._turn.notify_all()
                self._sampled(message)
            case messages.Scores():
                self._scored(message)
            case messages.StageSaved():
                self._saved(message.stage, message.request)
            case _:
                self._tell(message)

    def on_close(self, session: Session, reason: str) -> None:
        self._end(f"the session with the next stage at {session.peer} ended: {reason}")


@dataclass(eq=False)
class Stage:
    """One process of a group: its session, and the gauges of its last heartbeat."""

    hello: messages.StageHello
    session: Session
    heard_ns: int
    gauges: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> NodeId:
        return NodeId(f"{self.hello.group}.{self.hello.stage}")


class Groups:
    """The pipeline groups of a cluster, for the head."""

    def __init__(self) -> None:
        self._groups: dict[NodeId, dict[int, Stage]] = {}

    def objection(self, hello: messages.StageHello) -> str:
        """Returns why a stage is refused, "" if it is not."""
        stages = self._groups.get(hello.group, {})
        if not 0 <= hello.stage < hello.stages:
            return f"there is no stage {hello.stage} among {hello.stages}"
        if hello.stage in stages:
            return f"stage {hello.stage} of {hello.group} is here already"
        if any(stage.hello.stages != hello.stages for stage in stages.values()):
            return f"{hello.group} has another number of stages"
        return ""

    def enter(self, stage: Stage) -> None:
        """Adds a stage. The last one completes its group, which the leader is told."""
        group = self._groups.setdefault(stage.hello.group, {})
        group[stage.hello.stage] = stage
        if len(group) == stage.hello.stages:
            addresses = tuple([group[number].hello.address for number in range(1, stage.hello.stages)])
            group[0].session.send(messages.GroupGathered(addresses))

    def leave(self, stage: Stage) -> None:
        """Removes a stage and stops the other processes of its group, which may come back as a new group."""
        group = self._groups.get(stage.hello.group, {})
        if group.get(stage.hello.stage) is not stage:
            return
        del self._groups[stage.hello.group]
        for other in group.values():
            if other is not stage:
                other.session.send(messages.Stop())

    def sessions(self, group: NodeId) -> list[Session]:
        """Returns the sessions with the stages after the leader; none for other nodes."""
        stages = sorted(self._groups.get(group, {}).items())
        return [stage.session for number, stage in stages if number]

    def followers(self) -> Iterator[Stage]:
        """Returns all stages after the leaders."""
        for group in self._groups.values():
            yield from [stage for number, stage in sorted(group.items()) if number]
