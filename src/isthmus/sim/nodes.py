"""All nodes of the simulated world: what their schedulers are told, and what follows from their answers.

A request's way on them: Expected at its decode node and Arrived at its prefill node; the load from the node's own
cache starts when its prefill does; KV streams to the decode node from then on; when all has landed, the request joins
the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from isthmus.conductor import (
    BlocksEvicted,
    BlocksStored,
    Event,
    FetchFinished,
    FirstToken,
    PrefillFinished,
    RequestFailed,
    RoleChanged,
)
from isthmus.scheduler import (
    Admitted,
    Cancelled,
    Evicted,
    Fetched,
    Imported,
    Joined,
    Offered,
    Preempted,
    Released,
    Reserved,
    Run,
    Stepped,
    Stored,
)
from isthmus.scheduler import Event as NodeEvent
from isthmus.sim.build import build_node, scheduler_of
from isthmus.sim.clock import PREFILL_ENDS, STEP_ENDS, TRANSFER_ENDS, Clock
from isthmus.sim.deployment import Deployment
from isthmus.sim.job import Job
from isthmus.sim.moves import Moves
from isthmus.sim.node import SimNode
from isthmus.sim.records import Conversion
from isthmus.types import BlockName, NodeId, RequestId, Role, Tier


class Host(Protocol):
    """Who hears of it."""

    def decide(self, event: Event) -> None:
        """Tells the conductor, and does what it answers."""

    def completed(self, job: Job) -> None:
        """Its last token is out."""


class Nodes:
    """`attempts`: requests under way, by the key of their attempt. `conversions`: roles that nodes were given."""

    def __init__(self, deployment: Deployment, clock: Clock, host: Host) -> None:
        self.nodes = [build_node(deployment, slot) for slot in range(len(deployment.nodes))]
        self.attempts: dict[RequestId, Job] = {}
        self.conversions: list[Conversion] = []
        self.moves = Moves(deployment, clock, self)
        for node in self.nodes:
            self.moves.connect(node)
        self._deployment, self._clock, self._host = deployment, clock, host
        self.by_name = {node.facts.node: node for node in self.nodes}
        self._effects: dict[type, Callable[[SimNode, Any], None]] = {
            Run: self._start_run,
            Admitted: self._admitted,
            Reserved: self._reserved,
            Joined: self._joined,
            Preempted: self._preempted,
            Stored: self._stored,
            Evicted: self._evicted,
        }

    def withdraw(self, job: Job) -> None:
        """Its attempt is over; its nodes, if they are there still, are told apart from this."""
        self.moves.cancel(job, self._clock.now)
        del self.attempts[job.key]
        prefill = self.nodes[job.prefill_slot]
        if job in prefill.sampling:
            prefill.sampling.remove(job)
        if job.decodes_on >= 0:
            job.leave(self.nodes[job.decodes_on].steps)
        job.withdraw()

    def convert(self, name: NodeId, role: Role) -> None:
        """Gives a node another role, once what runs there is over: nobody waits for that any more."""
        node = self.by_name[name]
        node.next_role = role
        if node.run is None:
            self._switch(node, role)

    def _switch(self, node: SimNode, role: Role) -> None:
        """It begins anew in another role and keeps its cache."""
        before = node.scheduler
        assert before.num_waiting == before.num_running == 0, (
            "somebody needs a node that was given another role"
        )
        facts = msgspec.structs.replace(node.facts, role=role)
        node.begin_anew(facts, scheduler_of(self._deployment, facts, before))
        self.conversions.append(Conversion(self._clock.now, facts.node, role))
        self._host.decide(RoleChanged(facts.node, role))

    def check(self) -> None:
        for node in self.nodes:
            node.scheduler.check()
            if node.scheduler.tiers is not None:
                node.scheduler.tiers.check()

    def check_idle(self) -> None:
        """All that requests took was given back."""
        self.moves.check_idle()
        assert not self.attempts, "a request never ended"
        for node in self.nodes:
            scheduler = node.scheduler
            assert node.run is None and not node.inbox, "a node still works"
            assert scheduler.num_waiting == scheduler.num_running == 0, "a node holds a request that ended"
            assert scheduler.pool.available == node.facts.kv_blocks, "blocks did not come back"

    # Runs.

    def tell(self, node: SimNode, event: NodeEvent) -> None:
        """Gives an event to a node: at once when nothing runs there, else when the iteration under way ends."""
        if node.run is None:
            self.give(node, event)
            return
        node.inbox.append(event)
        if len(node.inbox) == 1 and not node.ending:
            ends = node.cut(self._clock.now)
            if ends is not None:
                self._clock.run_ends(ends, STEP_ENDS, node)

    def give(self, node: SimNode, event: NodeEvent) -> None:
        for action in node.scheduler.on(event, self._clock.now):
            self._effects[type(action)](node, action)

    def _joined(self, node: SimNode, action: Joined) -> None:
        job = self.attempts.get(action.request)
        if job is not None:
            node.admit(job)
            self._join_batch(node, job)

    def _join_batch(self, node: SimNode, job: Job) -> None:
        if job.record.joined_ns < 0:
            job.record.joined_ns = self._clock.now
        node.join(job)

    def _start_run(self, node: SimNode, run: Run) -> None:
        ends = node.begin(run, self._clock.now)
        if run.chunks:
            self._start_prompts(node, run)
        self._clock.run_ends(ends, STEP_ENDS if run.num_decodes else PREFILL_ENDS, node)

    def _start_prompts(self, node: SimNode, run: Run) -> None:
        for piece in run.chunks:
            job = self.attempts.get(piece.request)
            if job is None:
                continue
            if piece.samples:
                node.sampling.append(job)
            if not job.started:
                job.started = True
                if job.record.first_token_ns < 0:
                    job.record.prefill_start_ns = self._clock.now
                if job.reserved:
                    self.moves.start_handover(job, self._clock.now)

    def run_ends(self, node: SimNode) -> None:
        """The compute of a run is done; it is over unless KV that its prompts need is still on its way."""
        for job in node.sampling:
            if job.pending or job.loaded_ns > self._clock.now:
                self._stall(node)
                return
        if node.stalled:
            node.stalled = False
            node.version += 1  # for a timer may be left
            stalled_ns = self._clock.now - node.stalled_since
            node.record.stalled_ns += stalled_ns
            for job in node.sampling:
                if job.record.first_token_ns < 0:
                    job.record.stalled_ns += stalled_ns
        self._finish_run(node)

    def _stall(self, node: SimNode) -> None:
        if not node.stalled:
            node.stalled = node.ending = True
            node.stalled_since = self._clock.now
        node.version += 1
        if not any(job.pending for job in node.sampling):  # of what is pending, the network tells
            self._clock.run_ends(max(job.loaded_ns for job in node.sampling), TRANSFER_ENDS, node)

    def _finish_run(self, node: SimNode) -> None:
        """Tokens go out first; then the scheduler hears what came during the run, and that the run is over."""
        came, node.inbox, node.ending = node.inbox, [], True
        steps, done = node.end(self._clock.now)
        ended: list[RequestId] = []
        for job in done:
            self._host.completed(job)
            ended.append(job.key)
        going_on = self._sampled(node, ended) if node.sampling else []
        node.run, node.ending = None, False
        for event in came:
            self.give(node, event)
        for job in going_on:
            if job.attempt > 0:
                self._join_batch(node, job)
        late, node.inbox = node.inbox, []
        self.give(node, Stepped(steps, tuple(ended)))
        for event in late:
            self.tell(node, event)
        if node.next_role is not None and node.run is None:
            self._switch(node, node.next_role)

    def _sampled(self, node: SimNode, ended: list[RequestId]) -> list[Job]:
        """The prompts that a run completed got a token. Those that end with it go to `ended`; returns those that
        go on here."""
        jobs, going_on = [], []
        for job in node.sampling:
            jobs.append(job)
            job.num_generated += 1
            if not job.num_left:
                ended.append(job.key)
            elif job.target == node.slot:
                going_on.append(job)
        node.sampling = []
        if node.tail_ns and jobs:
            # In a pipeline group, the last chunk passes the other stages while the first takes the next prompt.
            leaving = [(job, job.attempt) for job in jobs]
            self._clock.call(
                self._clock.now + node.tail_ns, PREFILL_ENDS, partial(self._leave_group, node, leaving)
            )
        else:
            for job in jobs:
                self._prefilled(node, job)
        return going_on

    def _leave_group(self, node: SimNode, jobs: list[tuple[Job, int]]) -> None:
        for job, attempt in jobs:
            if job.attempt == attempt:
                self._prefilled(node, job)

    def _prefilled(self, node: SimNode, job: Job) -> None:
        """The token of a prefill is out: the first of all, or the next one after a pre-emption."""
        record = job.record
        if record.first_token_ns >= 0:
            job.resumed_ns.append(self._clock.now)
        else:
            record.first_token_ns = self._clock.now
            record.prefill_ns = self._clock.now - record.prefill_start_ns
        if not job.prefilled:  # and not pre-empted since
            job.prefilled = True
            self._host.decide(FirstToken(job.name, job.attempt))
            if job.attempt < 0:
                return  # refused by its decode node
        if not job.num_left:
            if job.target != node.slot:  # an attempt after one that gave all tokens but this
                self.tell(self.nodes[job.target], Cancelled(job.key))
            self._host.completed(job)
        elif job.target != node.slot and job.reserved:
            self.moves.finish_handover(job, self._clock.now)

    # What a scheduler answers.

    def _admitted(self, node: SimNode, action: Admitted) -> None:
        """Loads what is cached beside the engine; what is cached in its own memory needs none."""
        job = self.attempts.get(action.request)
        if job is None:
            return
        node.admit(job)
        record = job.record
        if record.prefill_start_ns < 0:
            record.cached_tokens = action.cached_tokens
            record.cached_blocks = -(-action.cached_tokens // self._deployment.block_size)
        if action.cached_tokens and node.scheduler.tiers is not None:
            self.moves.load(job, node, action.cached_tokens, self._clock.now)

    def _reserved(self, node: SimNode, action: Reserved) -> None:
        job = self.attempts.get(action.request)
        if job is not None:
            job.reserved = True
            if job.route.recall is not None:
                self.moves.recall(job, job.route.recall, self._clock.now)
            if job.started:
                self.moves.start_handover(job, self._clock.now)

    def _preempted(self, node: SimNode, action: Preempted) -> None:
        node.record.preemptions += 1
        job = self.attempts.get(action.request)
        if job is not None and job.decodes_on == node.slot:
            job.leave(node.steps)

    def _stored(self, node: SimNode, action: Stored) -> None:
        if action.tier is Tier.DISK:
            self.moves.write_disk(node, len(action.names), self._clock.now)
        self._host.decide(BlocksStored(node.facts.node, action.names, action.tier))

    def _evicted(self, node: SimNode, action: Evicted) -> None:
        node.record.blocks_evicted += len(action.names)
        self._host.decide(BlocksEvicted(node.facts.node, action.names))

    # What the links bring (`moves.Listener`).

    def loaded(self, job: Job) -> None:
        node = self.nodes[job.prefill_slot]
        if node.stalled and not job.pending:
            self.run_ends(node)

    def fetched(self, job: Job) -> None:
        # Heard at once, also during a run: a prompt that waits for nothing else may start with the next one.
        self.give(self.nodes[job.prefill_slot], Fetched(job.key, job.stop))
        self._host.decide(FetchFinished(job.name, job.attempt))

    def copied(self, node: SimNode, names: tuple[BlockName, ...]) -> None:
        self.give(node, Offered(names))

    def landed(self, job: Job) -> None:
        if job.record.joined_ns < 0:
            job.record.landed_ns = self._clock.now
        self._host.decide(PrefillFinished(job.name, job.attempt))
        self.tell(self.nodes[job.prefill_slot], Released(job.key))
        self.tell(self.nodes[job.target], Imported(job.key))

    def lost(self, job: Job, reason: str) -> None:
        self._host.decide(RequestFailed(job.name, job.attempt, reason))
