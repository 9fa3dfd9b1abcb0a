"""The head: drives the conductor for the live cluster and is the gateway's backend.

Owns the sessions of nodes and the answer streams of accepted requests. The conductor decides; the head carries out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from isthmus.core import conductor
from isthmus.core.attempts import (
    Convert,
    FetchFinished,
    HoldingsChanged,
    PrefillFinished,
    Report,
    RequestFailed,
)
from isthmus.core.blocks import BlockNamer, KVLayout
from isthmus.core.errors import ProtocolError, RequestError, UnavailableError
from isthmus.core.types import NS_PER_MS, NS_PER_S, Generated, Job, ModelCard, NodeId, RequestId, Role
from isthmus.live.cluster.donors import DonorTokens
from isthmus.live.cluster.joining import is_loopback
from isthmus.live.cluster.launcher import process_name
from isthmus.live.cluster.links import AddressBook, LinkStats, Offload
from isthmus.live.cluster.pipeline import Groups, Stage
from isthmus.live.cluster.recorder import Recorder
from isthmus.live.cluster.streams import AnswerStream, refusal
from isthmus.live.messenger import Network, RunningClock, RunningTimer, Session, address_of
from isthmus.live.peers import messages
from isthmus.live.peers.sessions import REFUSED, NoPayloads

if TYPE_CHECKING:
    from isthmus.live.cluster.authority import Authority

log = logging.getLogger(__name__)

BEAT_MS = 500
BEATS = "node_beats_total"
POLL_S = 0.5
"""How long `poll` waits for a node that does not answer."""
MAX_NAMERS = 1024
"""Block namers kept, one for each salt: clients choose salts."""


class _Member:
    """A node that joined: its session, and the gauges of its last heartbeat."""

    def __init__(self, hello: messages.NodeHello, session: Session, now_ns: int) -> None:
        self.hello, self.session, self.role = hello, session, hello.joined.role
        self.becoming: Role | None = None  # the role that it was told to take next
        self.cluster = hello.joined.cluster
        self.heard_ns = now_ns
        self.gauges: dict[str, float] = {}


class Head:
    """Serves jobs from `submit` after `open`, in one event loop.

    `silence_s`: after which a silent node is gone; `rejoin_s`: how long requests wait for a node that comes back;
    `network`: authenticates whoever opens a session; `addresses`: of nodes, as each cluster reaches them; `enrolment`:
    signs node certificates, None where the head signs none; `clock_ns`: replaced in virtual time; `alias_of`: the name
    of a tenant for conductor and nodes.
    """

    def __init__(
        self,
        rules: conductor.Rules,
        card: ModelCard,
        *,
        silence_s: float,
        rejoin_s: float,
        network: Network,
        recorder: Recorder | None = None,
        addresses: AddressBook | None = None,
        enrolment: Authority | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        alias_of: Callable[[str], str] = str,
    ) -> None:
        log = recorder.record if recorder is not None else None
        self._desk = conductor.Desk(conductor.Conductor(rules), round(rejoin_s * 1000), log)
        self._rules = rules
        self._addresses, self._link_stats = addresses or AddressBook(), LinkStats(rules.links)
        self._offload = Offload(links=self._link_stats.views())
        self._card, self._silence_s = card, silence_s
        self._rejoin_s, self._enrolment = rejoin_s, enrolment
        self._network, self._clock_ns = network, clock_ns
        self._running = RunningClock(clock_ns)
        self._talking = RunningClock(self._running.now_ns)
        """Clocks: the time in which this process ran, and the part of it in which any node sent something."""
        self._heard_ns = 0  # when a node last sent something, by `_running`
        self._refused: Counter[str] = Counter()
        self._members: dict[NodeId, _Member] = {}
        self._groups = Groups()
        self._streams: dict[RequestId, AnswerStream] = {}
        self._layout: KVLayout | None = None
        self._revision = ""
        self._namer = lru_cache(MAX_NAMERS)(self._new_namer)
        self._donors = DonorTokens(card)
        self._alias_of = alias_of
        self._tenants: dict[str, str] = {}  # by alias
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    async def open(self, host: str, port: int) -> str:
        """Listens for nodes; returns `host:port`. Raises OSError when the port is taken."""
        self._server, port = await self._network.listen(host, port, messages.HeadBound, lambda: _FromNode(self))
        self._start(self._watch())
        return address_of(host, port)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a task until `close`."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(_report)
        self._tasks.append(task)

    async def close(self) -> None:
        """Stops all nodes, and fails requests in progress."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        for stream in list(self._streams.values()):
            stream.fail(UnavailableError("the cluster is shutting down"))
        sessions = [member.session for member in self._members.values()]
        for session in [*sessions, *[stage.session for stage in self._groups.followers()]]:
            session.send(messages.Stop())
        self._server.close()

    # For the gateway (`isthmus.live.gateway.backend.Backend`).

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def healthy(self) -> bool:
        members = self._members.values()
        if any(member.role is Role.MIXED for member in members):
            return True
        decoding = {member.cluster for member in members if member.role is Role.DECODE}
        return any(
            decoding.intersection((member.cluster, *self._addresses.linked(member.cluster)))
            for member in members
            if member.role is Role.PREFILL
        )

    def _beating(self) -> dict[NodeId, _Member | Stage]:
        """Returns all node and stage processes that are connected, by name."""
        return self._members | {stage.name: stage for stage in self._groups.followers()}

    async def poll(self) -> None:
        asked = {name: (each, each.gauges.get(BEATS, 0)) for name, each in self._beating().items()}
        for each, _ in asked.values():
            each.session.send(messages.Poll())

        def told() -> bool:
            here = self._beating()
            return all(
                here.get(name) is not each or each.gauges.get(BEATS, 0) > before
                for name, (each, before) in asked.items()
            )

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait_until(told), POLL_S)

    def gauges(self) -> dict[str, dict[str, float]]:
        """Returns the latest value of each node metric: metric name -> node -> value. `REFUSED` has the head's too."""
        found: dict[str, dict[str, float]] = {REFUSED: {"head": self._server.refused}}
        for node, each in self._beating().items():
            for name, value in each.gauges.items():
                metric, slash, tenant = name.partition("/")
                known = f"{metric}/{self._tenants.get(tenant, tenant)}" if slash else name
                found.setdefault(known, {})[str(node)] = value
        return found

    def nodes(self) -> dict[NodeId, tuple[Role, KVLayout, str]]:
        """Returns role, KV layout and cluster of each node, in the order of joining."""
        return {
            node: (member.role, member.hello.layout, member.cluster) for node, member in self._members.items()
        }

    def products(self) -> dict[NodeId, tuple[str, ...]]:
        """Returns the matrix product kernels of each node's engine; for a pipeline group, of its first stage."""
        return {node: member.hello.products for node, member in self._members.items()}

    def remarks(self) -> dict[NodeId, str]:
        """Returns the remarks for operators that nodes made when they joined."""
        return {node: member.hello.remark for node, member in self._members.items() if member.hello.remark}

    def offload(self) -> Offload | None:
        """Returns the state of offloading between clusters; None without links."""
        return self._offload if self._rules.links else None

    def refusals(self) -> dict[str, int]:
        """Returns the number of requests refused so far, by the stage that refused them."""
        return dict(self._refused)

    def submit(self, job: Job) -> AnswerStream:
        """Starts a job. Raises RequestError, OverloadedError or UnavailableError if it is refused at once. Its stream
        may raise OverloadedError later, before the first token.
        """
        if job.request in self._streams:
            raise RequestError(f"a request with id {job.request} is in progress", param=None)
        tenant, job = job.tenant, replace(job, tenant=self._alias_of(job.tenant))
        if job.weight:
            self._tenants[job.tenant] = tenant
        names = self._names(job)
        arrived = conductor.RequestArrived(
            request=job.request,
            tenant=job.tenant,
            num_tokens=len(job.tokens),
            max_tokens=job.max_tokens,
            names=names,
            priority=job.priority,
            ttft_ms=job.ttft_ms,
            tbt_ms=job.tbt_ms,
            content=self._donors.content_of(job) if names else None,
            weight=job.weight,
        )
        stream = self._streams[job.request] = AnswerStream(job, self._cancel)
        self._decide(arrived)
        if stream.error is not None:
            raise stream.error
        return stream

    async def ready_to_reuse(self) -> None:
        """As in `Backend`: waits for the table of prompt signatures. Asks another node if the one asked leaves;
        returns at once if no node can assemble prompts."""
        while not self._donors.ready:
            if self._donors.asked is None:
                able = [node for node, member in self._members.items() if member.hello.joined.reuse_layers]
                if not able:
                    return
                self._donors.asked = able[0]
                self._send(able[0], messages.TellDirections())
            self._changed.clear()
            await self._changed.wait()

    def _names(self, job: Job) -> tuple[Any, ...]:
        """Returns the names of the prompt's full blocks. Without names nothing is found in caches and the whole
        prompt is computed: for prompts to be scored, and before the first node has told its KV layout."""
        if self._layout is None or job.sampling.prompt_logprobs is not None:
            return ()
        return tuple(self._namer(job.salt).names(job.tokens))

    def _new_namer(self, salt: str) -> BlockNamer:
        assert self._layout is not None
        return BlockNamer(revision=self._revision, layout=self._layout, salt=salt)

    def _cancel(self, request: RequestId) -> None:
        self._decide(conductor.RequestCancelled(request))

    # Decisions.

    def _decide(self, event: conductor.Event) -> None:
        now = self._clock_ns()
        for answer in self._desk.on(event, now):
            self._act(answer, now)

    def _act(self, answer: conductor.Answer, now: int) -> None:
        match answer:
            case conductor.Route():
                self._route(answer, now)
            case conductor.Abort():
                self._streams[answer.request].end_attempt()
            case conductor.SendOrder():
                if isinstance(answer.order, Convert) and answer.node in self._members:
                    self._members[answer.node].becoming = answer.order.role
                self._send(answer.node, answer.order)
            case conductor.Hold():
                expired = partial(self._decide, conductor.HoldExpired(answer.request, answer.attempt))
                RunningTimer(asyncio.get_running_loop(), answer.wait_ms / 1000, expired)
            case conductor.Refuse():
                self._refused[answer.stage or answer.code] += 1
                self._streams.pop(answer.request).fail(refusal(answer))
            case conductor.Fail():
                error = RequestError(answer.reason) if answer.final else UnavailableError(answer.reason)
                self._streams.pop(answer.request).fail(error)
            case conductor.RequestEnded() | conductor.RequestCancelled():
                del self._streams[answer.request]
            case conductor.ThresholdSet():
                self._offload.threshold, self._offload.reason = answer.threshold, answer.reason
                self._offload.changes += 1
            case conductor.Remember():
                self._donors.keep(self._streams[answer.request].job)
            case conductor.Unremember():
                self._donors.drop(answer.request)

    def _route(self, route: conductor.Route, now: int) -> None:
        """Sends an attempt's orders and tokens to its nodes."""
        stream = self._streams[route.request]
        job, generated = stream.job, stream.generated
        text = {"tokens": job.tokens + generated, "num_prompt": len(job.tokens), "sampling": job.sampling}
        for node, begin in self._desk.parts(route, len(generated)):
            donors = self._donors.of(route, job) if begin.part is not Role.DECODE else ()
            self._send(node, replace(begin, now_ns=now, salt=job.salt, donors=donors, **text))
        self._offload.requests += self._addresses.crosses(route.prefill, route.decode)

    def _send(self, node: NodeId, message: Any) -> None:
        if node in self._members:
            self._members[node].session.send(message)

    # From nodes.

    def enrol(self, session: Session, asked: messages.Enrol) -> None:
        """Answers a node's request for its first certificate, or the next one. Raises ProtocolError."""
        if self._enrolment is None:
            raise ProtocolError("certificates of this cluster are not given by its head")
        if session.identity is None and (reason := self._taken(asked)):
            self._turn_away(session, asked.node, reason)
            return
        session.send(self._enrolment.enrolled(session.identity, asked))
        if session.identity is None:
            session.close("it has its certificate, and comes back with it")

    def _taken(self, asked: messages.Enrol) -> str:
        here = {stage.name for stage in self._groups.followers()} if asked.stage else self._members.keys()
        name = process_name(asked.node, asked.stage)
        return f"a node named {name} is here already" if name in here else ""

    def _turn_away(self, session: Session, name: str, reason: str) -> None:
        log.warning("turned %s away: %s", name, reason)
        session.send(messages.NodeRefused(reason))
        session.close(reason)

    def join(self, session: Session, hello: messages.NodeHello) -> NodeId | None:
        """Admits a node and returns its id; else refuses it with the reason and returns None."""
        joined = hello.joined
        reason = self._disowned(session, joined.node) or self._objection(hello)
        if not reason:
            try:
                self._addresses.open(joined.node, joined.cluster, hello.address)
            except UnavailableError as error:
                reason = str(error)
        if reason:
            self._turn_away(session, joined.node, reason)
            return None
        if self._layout is None:
            self._layout, self._revision = hello.layout, hello.revision
            self._donors.block_size = hello.layout.block_size
        self._members[joined.node] = _Member(hello, session, self._hear())
        session.send(messages.NodeWelcome(self._beat_ms))
        self._tell_neighbours(joined.cluster)
        self._decide(joined)
        self._changed.set()
        return joined.node

    def _tell_neighbours(self, cluster: str) -> None:
        """Tells all processes in a cluster whose nodes changed, and in linked clusters, which nodes they can reach."""
        view = cache(self._addresses.view)
        for node, member in self._members.items():
            reached = (member.cluster, *self._addresses.linked(member.cluster))
            for other in reached if cluster in reached else ():
                for session in (member.session, *self._groups.sessions(node)):
                    session.send(view(other, member.cluster))

    def _disowned(self, session: Session, node: NodeId) -> str:
        return self._enrolment.objection(session.identity, node) if self._enrolment is not None else ""

    def _alien(self, hello: messages.NodeHello | messages.StageHello) -> str:
        if hello.protocol != messages.PROTOCOL:
            return f"it speaks protocol {hello.protocol}, this cluster {messages.PROTOCOL}"
        return ""

    def _objection(self, hello: messages.NodeHello) -> str:
        if reason := self._alien(hello):
            return reason
        if hello.joined.node in self._members:
            return f"a node named {hello.joined.node} is here already"
        if hello.joined.cluster not in self._addresses.clusters:
            known = ", ".join(filter(None, self._addresses.clusters))
            return (
                f"give --cluster, one of: {known}" if known else "this deployment has no clusters: no --cluster"
            )
        if hello.max_length < self._card.max_length:
            return f"its engine.max_length {hello.max_length} is below the cluster's {self._card.max_length}"
        if self._layout is not None and (hello.layout, hello.revision) != (self._layout, self._revision):
            return "its model revision or KV layout differs from the cluster's"
        return self._apart(hello.address)

    def _apart(self, address: str) -> str:
        """Returns an objection if one of two nodes is at a loopback address, which only this machine reaches."""
        for node, member in self._members.items():
            if _is_local(member.hello.address) != _is_local(address):
                return (
                    f"it is at {address} and {node} at {member.hello.address}, and only one of them can be reached "
                    "from other machines: join_host must be an address that other machines reach, not 0.0.0.0"
                )
        return ""

    def join_stage(self, session: Session, hello: messages.StageHello) -> Stage | None:
        """Admits one process of a pipeline group; else refuses it with the reason and returns None."""
        alien = self._disowned(session, hello.group) or self._alien(hello)
        if reason := alien or self._groups.objection(hello):
            self._turn_away(session, f"stage {hello.stage} of {hello.group}", reason)
            return None
        stage = Stage(hello, session, self._hear())
        self._groups.enter(stage)
        if hello.stage:
            session.send(messages.NodeWelcome(self._beat_ms))
        return stage

    def heard_stage(self, stage: Stage, message: messages.HeadBound) -> None:
        if not isinstance(message, messages.Heartbeat):
            raise ProtocolError(f"a {type(message).__name__} from a later pipeline stage")
        stage.heard_ns, stage.gauges = self._hear(), _counted(stage.gauges, message)
        self._changed.set()
        leader = self._members.get(stage.hello.group)
        if leader is not None:
            self._link_stats.heard(stage.name, leader.cluster, message.links, self._clock_ns())

    def leave_stage(self, stage: Stage, reason: str) -> None:
        """Removes a stage, and its whole group with it."""
        self._groups.leave(stage)
        self._link_stats.left(stage.name)
        self._changed.set()
        self.leave(stage.hello.group, f"stage {stage.hello.stage}: {reason}")

    def leave(self, node: NodeId, reason: str, session: Session | None = None) -> None:
        """Removes a node. `session`: that ended; the node stays if it has joined again over another session."""
        member = self._members.get(node)
        if member is not None and session in (None, member.session):
            del self._members[node]
            log.log(logging.DEBUG if self._closing else logging.WARNING, "%s left: %s", node, reason)
            self._addresses.close(node)
            self._link_stats.left(node)
            self._donors.left(node)
            self._tell_neighbours(member.cluster)
            self._decide(conductor.NodeLeft(node))
            self._changed.set()

    def heard(self, node: NodeId, message: messages.HeadBound, session: Session) -> None:
        """Takes a node's message; ignores sessions of nodes that left. Raises ProtocolError."""
        member = self._members.get(node)
        if member is None or member.session is not session:
            return
        member.heard_ns = self._hear()
        match message:
            case messages.Outputs():
                for output in message.outputs:
                    self._output(node, *output)
            case messages.Scores():
                if self._speaks(node, message.request, message.attempt) is not None:
                    self._streams[message.request].score(message.first, message.logprobs)
            case messages.Heartbeat():
                member.gauges = _counted(member.gauges, message)
                self._changed.set()
                self._link_stats.heard(node, member.cluster, message.links, self._clock_ns())
            case messages.Directions():
                if node == self._donors.asked:
                    self._donors.take(message)
                    self._changed.set()
            case messages.NodeHello() | messages.StageHello() | messages.Enrol():
                raise ProtocolError("a second Hello")
            case _:
                self._check_own(node, message)
                if isinstance(message, conductor.RoleChanged):
                    if message.role is not member.becoming:
                        raise ProtocolError(f"{node} took the role {message.role}, which nobody gave it")
                    member.role, member.becoming = message.role, None
                    self._offload.conversions += 1
                self._decide(message)

    def _check_own(self, node: NodeId, report: Report) -> None:
        """Raises ProtocolError if a node reports for another node or another node's request."""
        if isinstance(report, FetchFinished | PrefillFinished | RequestFailed | HoldingsChanged):
            self._speaks(node, report.request, report.attempt)
        elif report.node != node:
            raise ProtocolError(f"{node} reports what {report.node} does")

    def _speaks(self, node: NodeId, name: RequestId, attempt: int) -> conductor.RequestView | None:
        """Returns the request of an attempt, None if the attempt is over. Raises ProtocolError unless it involves the
        node."""
        request = self._desk.under_way(name, attempt)
        if request is not None and not request.involves(node):
            raise ProtocolError(f"{node} speaks of {name}, which other nodes compute")
        return request

    def _output(self, node: NodeId, name: RequestId, attempt: int, token: Generated) -> None:
        request = self._speaks(node, name, attempt)
        if request is None:
            return
        stream = self._streams[name]
        if request.is_silent:
            self._decide(conductor.FirstToken(name, attempt))
            if stream.error is not None:
                return  # refused after the prefill
        if stream.deliver(token):
            self._decide(conductor.RequestEnded(name, len(stream.generated)))

    # Liveness.

    async def wait_for(self, nodes: Sequence[NodeId]) -> None:
        """Returns when all these nodes have joined."""
        await self.wait_until(lambda: self._members.keys() >= set(nodes))
        self.complete()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Returns when `holds`, which is evaluated whenever a node joins, leaves or sends a heartbeat."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def complete(self) -> None:
        """Begins to report links to the conductor, when all nodes have joined: earlier reports would be of some nodes
        only."""
        if self._rules.links or self._rules.convert:
            self._start(self._measure())

    @property
    def _beat_ms(self) -> int:
        """Heartbeat interval: half the period at which the conductor hears of links, at most `BEAT_MS`."""
        return min(BEAT_MS, max(1, self._rules.period_ns // (2 * NS_PER_MS)))

    async def _measure(self) -> None:
        period_s = self._rules.period_ns / NS_PER_S
        while True:
            await asyncio.sleep(period_s)
            self._decide(conductor.LinksMeasured(self._link_stats.take()))

    def _hear(self) -> int:
        """Notes that a process sent something; returns the time by `_talking`."""
        self._talking.tick()
        self._heard_ns = self._running.now_ns()
        return self._talking.now_ns()

    async def _watch(self) -> None:
        """Removes processes that are silent for `silence_s` while others send and the head itself runs. When all are
        silent, the network or the machine is the likelier cause, and they are given `rejoin_s`."""
        silence_ns, patience_ns = (round(limit_s * NS_PER_S) for limit_s in (self._silence_s, self._rejoin_s))
        while True:
            await asyncio.sleep(BEAT_MS / 1000)
            if self._running.tick():
                continue
            all_silent = self._running.now_ns() - self._heard_ns > max(silence_ns, patience_ns)
            now_ns, limit_s = self._talking.now_ns(), self._rejoin_s if all_silent else self._silence_s
            for node, member in list(self._members.items()):
                if all_silent or now_ns - member.heard_ns > silence_ns:
                    member.session.close(f"silent for {limit_s:g} s")
                    self.leave(node, f"silent for {limit_s:g} s")
            for stage in list(self._groups.followers()):
                if all_silent or now_ns - stage.heard_ns > silence_ns:
                    stage.session.abort(f"silent for {limit_s:g} s")


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("the head goes on without one of its tasks", exc_info=task.exception())


def _is_local(address: str) -> bool:
    return is_loopback(address.rpartition(":")[0].strip("[]"))


class _FromNode(NoPayloads):
    """The head's side of a session with a node or stage, which must begin with a valid Hello, or with Enrol."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._node: NodeId | None = None
        self._stage: Stage | None = None

    def on_message(self, session: Session, message: messages.HeadBound) -> None:
        if isinstance(message, messages.Enrol):
            self._head.enrol(session, message)
        elif isinstance(message, messages.NodeHello) and self._node is None:
            self._node = self._head.join(session, message)
        elif isinstance(message, messages.StageHello) and self._stage is None:
            self._stage = self._head.join_stage(session, message)
        elif self._node is not None:
            self._head.heard(self._node, message, session)
        elif self._stage is not None:
            self._head.heard_stage(self._stage, message)
        else:
            raise ProtocolError("a message came before Hello")

    def on_close(self, session: Session, reason: str) -> None:
        if self._stage is not None:
            self._head.leave_stage(self._stage, reason)
        if self._node is not None:
            self._head.leave(self._node, reason, session)


def _counted(before: Mapping[str, float], beat: messages.Heartbeat) -> dict[str, float]:
    """Returns a heartbeat's gauges with the number of heartbeats so far."""
    return beat.gauges | {BEATS: before.get(BEATS, 0) + 1}
