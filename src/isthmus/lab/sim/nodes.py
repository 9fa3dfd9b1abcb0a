"""All nodes of the simulated world: each one's `decider` decides, and what it asks for takes its time here.

A run's end is heard by the node first, which may start the next; then its tokens go out; then what the node reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from isthmus.core.attempts import (
    BlocksEvicted,
    BlocksStored,
    FetchFinished,
    HoldingsChanged,
    MemoryUsed,
    Order,
    PrefillFinished,
    Report,
    RequestFailed,
    RoleChanged,
    Route,
)
from isthmus.core.conductor import Event as ConductorEvent
from isthmus.core.conductor import FirstToken, RequestEnded
from isthmus.core.cost.node_cost import assembled_weight
from isthmus.core.node import events
from isthmus.core.scheduler import Admitted, Joined, Piece, Preempted, Run, Stepped
from isthmus.core.types import BlockName, NodeId, RequestId
from isthmus.lab.sim.clock import PREFILL_ENDS, STEP_ENDS, TRANSFER_ENDS, Clock
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.node import SimNode, build_node, node_of
from isthmus.lab.sim.records import RoleConversion, SimJob
from isthmus.lab.sim.transfers import Due, KVTransfers

TAKE_NO_TIME = (
    events.ReceiveHandover, events.EndGive, events.OpenLine, events.Host, events.Rekey, events.Trim,
    events.Unhost, events.AdoptBlocks, events.Promote, events.Demote, events.DropBlocks,
)  # fmt: skip


class Nodes:
    """Carries out what the nodes decide, and tells them and the conductor what came of it.

    `attempts`: requests under way, by the key of their attempt. `conversions`: roles that nodes were given. `due`:
    what nodes hear, and the conductor of them, when the present event is done, in this order.

    `decide` tells the conductor, and does what it answers.
    """

    def __init__(self, deployment: Deployment, clock: Clock, decide: Callable[[ConductorEvent], None]) -> None:
        self.nodes = [build_node(deployment, slot) for slot in range(len(deployment.nodes))]
        self.by_name: dict[NodeId, SimNode] = {node.facts.node: node for node in self.nodes}
        self.attempts: dict[RequestId, SimJob] = {}
        self.conversions: list[RoleConversion] = []
        self.due: Due = []
        self.moves = KVTransfers(deployment, clock, self.nodes, self.attempts, self.due)
        self._failing = self.moves.disks if self.moves.disks.are_at_risk else None
        self._deployment, self._clock, self._decide = deployment, clock, decide
        self._has_answers, self._block_size = deployment.has_answers, deployment.block_size
        self._handlers: dict[type, Callable[[SimNode, Any], None]] = {
            **dict.fromkeys(TAKE_NO_TIME, _needs_no_time),
            Run: self._start_run,
            events.Cut: self._cut,
            Admitted: self._admitted,
            Joined: self._joined,
            Preempted: self._preempted,
            events.Shorten: self._shorten,
            events.Wake: self._wake,
            **dict.fromkeys(
                (BlocksStored, FetchFinished, PrefillFinished, RequestFailed, HoldingsChanged, MemoryUsed),
                self._report,
            ),
            BlocksEvicted: self._evicted,
            RoleChanged: self._role_changed,
            **self.moves.handlers,
        }

    def tell(self, node: SimNode, event: events.Event) -> None:
        """Gives an event to a node and carries out what it answers; what it reports is due."""
        self._carry_out(node, node.decider.on(event, self._clock.now))

    def _carry_out(self, node: SimNode, actions: Sequence[events.Action]) -> None:
        handlers = self._handlers
        for action in actions:
            handlers[type(action)](node, action)

    def settle(self) -> None:
        """All that is due, and what follows from that."""
        due, decide, handlers, now = self.due, self._decide, self._handlers, self._clock.now
        stalled: list[SimNode] = []
        while due:
            for node, event in due:  # grows meanwhile
                if node is None:
                    decide(event)
                elif event is not None:
                    for action in node.decider.on(event, now):
                        handlers[type(action)](node, action)
                else:
                    stalled.append(node)
            due.clear()
            for node in stalled:  # it reports what came before its run ends with that
                if node.is_broken:
                    self._carry_out(node, node.decider.on(Stepped(node.interrupt(now)), now))
                elif node.stalled:
                    self.run_ends(node)
            stalled.clear()

    # Attempts.

    def begin(self, job: SimJob, route: Route, parts: Sequence[tuple[NodeId, events.StartAttempt]]) -> None:
        """An attempt, of whose way nothing is done."""
        job.begin(route)
        self.attempts[job.key] = job
        job.prefill_slot = job.record.prefill = self.by_name[route.prefill].slot
        job.decode_slot = job.record.decode = self.by_name[route.decode].slot
        for node, begin in parts:
            self.tell(self.by_name[node], begin)

    def order(self, name: NodeId, order: Order) -> None:
        """What the conductor has a node told. One that is done with an attempt need not hear that it is over."""
        node = self.by_name[name]
        if not isinstance(order, events.DropAttempt) or order.key in node.decider:
            self.tell(node, order)
        if node.stalled:
            self.due.append((node, None))

    def withdraw(self, job: SimJob) -> None:
        """Its attempt is over; its nodes, if they are there still, are told apart from this."""
        del self.attempts[job.key]
        prefill = self.nodes[job.prefill_slot]
        for jobs in (prefill.sampling, prefill.loading):
            if job in jobs:
                jobs.remove(job)
        if job.decodes_on >= 0:
            job.leave(self.nodes[job.decodes_on].steps_by(self._clock.now))
        job.withdraw()

    def check(self) -> None:
        for node in self.nodes:
            node.decider.check()
            assert node.run is node.decider.scheduler.run, "a node runs what it was not told to"

    def check_idle(self) -> None:
        """All that requests took was given back."""
        self.moves.check_idle()
        assert not self.attempts, "a request never ended"
        for node in self.nodes:
            node.decider.check_idle()

    # Runs.

    def _start_run(self, node: SimNode, run: Run) -> None:
        now = self._clock.now
        ends = node.begin(run, now)
        if run.chunks:
            self._start_prompts(node, run)
            if self._failing is not None:
                self._failing.look(node, run)
            if node.missing and self._misses(node, run):
                ends = now
        self._clock.run_ends(ends, STEP_ENDS if run.num_decodes else PREFILL_ENDS, node)

    def _start_prompts(self, node: SimNode, run: Run) -> None:
        for piece in run.chunks:
            job = self.attempts.get(piece.request)
            if job is None:
                continue
            if piece.samples:
                node.sampling.append(job)
            if job.loaded_ns > self._clock.now or self.moves.awaits(job):
                node.loading.append(job)
            if job.record.first_token_ns < 0 and job.record.prefill_start_ns < 0:
                job.record.prefill_start_ns = self._clock.now
            if piece.assembly is not None and job.record.first_token_ns < 0:
                self._reuses(node, job, piece)

    def _reuses(self, node: SimNode, job: SimJob, piece: Piece) -> None:
        """A candidate counts as reused as far as it is not computed: in the mean over the layers."""
        assembly, record = piece.assembly, job.record
        assert assembly is not None
        selection, most = assembly.selection, assembly.num_reused
        passed = most  # all, but where tokens are alike
        if selection.alike:
            passed = sum([max(0, each.count - selection.first) for each in assembly.passages])
        reused = piece.count - assembled_weight(selection, piece.count, most, node.cost.num_layers)
        record.moved_tokens = reused * min(passed, most) // max(1, most)
        record.similar_tokens = reused - record.moved_tokens

    def _cut(self, node: SimNode, cut: events.Cut) -> None:
        ends = node.cut(self._clock.now)
        if ends is not None:
            self._clock.run_ends(ends, STEP_ENDS, node)

    def run_ends(self, node: SimNode) -> None:
        """The compute of a run is done; it is over unless KV that its chunks attend to is still on its way."""
        if self._failing is not None and node.run is not None:
            self._failing.look(node, node.run)
        if not (node.loading or node.missing or node.stalled) or self._has_all(node):
            self._finish_run(node)

    def _has_all(self, node: SimNode) -> bool:
        now = self._clock.now
        if node.missing and self._break_off(node):
            return False
        for job in node.loading:
            if job.loaded_ns > now or self.moves.awaits(job):
                self._stall(node)
                return False
        if node.stalled:
            node.stalled = False
            node.version += 1  # for a timer may be left
            stalled_ns = now - node.stalled_since
            node.record.stalled_ns += stalled_ns
            for job in node.loading:
                if job.record.first_token_ns < 0:
                    job.record.stalled_ns += stalled_ns
        node.loading = []
        return True

    def _stall(self, node: SimNode) -> None:
        if not node.stalled:
            node.stalled = True
            node.stalled_since = self._clock.now
        node.version += 1
        if not any(self.moves.awaits(job) for job in node.loading):  # of these the network tells
            self._clock.run_ends(max(job.loaded_ns for job in node.loading), TRANSFER_ENDS, node)

    def _misses(self, node: SimNode, run: Run) -> list[RequestId]:
        return [piece.request for piece in run.chunks if piece.request in node.missing]

    def _break_off(self, node: SimNode) -> bool:
        """Of a cached prefix that the run needs not all came: it was for nothing, and the node plans anew."""
        assert node.run is not None
        missed = self._misses(node, node.run)
        if not missed:
            return False
        node.break_off(self._clock.now)
        for key in missed:
            self.tell(node, events.Missing(key, node.missing.pop(key)))
        self.tell(node, Stepped(0))
        for key in missed:
            self.moves.missed(node, key)
        return True

    def _finish_run(self, node: SimNode) -> None:
        now, decider = self._clock.now, node.decider
        if self._failing is not None and node.run is not None:
            for piece in node.run.chunks:
                self._failing.over(node, piece.request)
        tail_ns = node.tail_ns  # the next run begins before this one has left the group
        steps, done = node.end(now)
        if not done and not node.sampling:
            self._carry_out(node, decider.on(Stepped(steps), now))
            return
        ended = [job.key for job in done]
        sampled: list[SimJob] = []
        leaving: list[tuple[SimJob, RequestId]] = []
        if node.sampling:
            sampled, node.sampling = node.sampling, []  # the next run begins before their tokens go out
            if node.facts.pipeline > 1:
                leaving, sampled = [(job, job.key) for job in sampled], []
            for job in sampled:
                self._got_token(node, job, ended)
        answers = self._answers(ended) if self._has_answers and ended and decider.keeps_answers else ()
        self._carry_out(node, decider.on(Stepped(steps, tuple(ended), answers), now))
        for job in done:
            self._complete(job)
        for job in sampled:
            self._send_token(job)
        if leaving and tail_ns:
            # In a pipeline group, the last chunk passes the other stages while the first takes the next prompt.
            self._clock.call(now + tail_ns, PREFILL_ENDS, partial(self._leave_group, node, leaving))
        elif leaving:
            self._leave_group(node, leaving)

    def _leave_group(self, node: SimNode, leaving: list[tuple[SimJob, RequestId]]) -> None:
        sampled = [job for job, key in leaving if self.attempts.get(key) is job]
        ended: list[RequestId] = []
        for job in sampled:
            self._got_token(node, job, ended)
        self.tell(node, events.Sampled(tuple([job.key for job in sampled]), tuple(ended)))
        for job in sampled:
            self._send_token(job)

    def _answers(self, ended: list[RequestId]) -> tuple[tuple[BlockName, ...], ...]:
        """Names of all full blocks, where the workload knows those of the answer."""
        size, answers = self._block_size, []
        for key in ended:
            request = self.attempts[key].request
            full = request.blocks[: request.num_tokens // size]
            answers.append(() if request.answer is None else full + request.answer)
        return tuple(answers)

    def _got_token(self, node: SimNode, job: SimJob, ended: list[RequestId]) -> None:
        """The token of a prefill: the first of all, or the next one after a pre-emption. If it is the last, its key
        goes to `ended`."""
        now, record = self._clock.now, job.record
        job.num_generated += 1
        if record.first_token_ns >= 0:
            job.resumed_ns.append(now)
        else:
            record.first_token_ns = now
            record.prefill_ns = now - record.prefill_start_ns
        if not job.num_left:
            ended.append(job.key)
        elif job.decode_slot == node.slot:
            self._join_batch(node, job)

    def _send_token(self, job: SimJob) -> None:
        self._decide(FirstToken(job.name, job.route.attempt))
        if job.key in self.attempts and not job.num_left:  # else it was refused
            self._complete(job)

    def _complete(self, job: SimJob) -> None:
        """Its last token has come."""
        self._decide(RequestEnded(job.name, job.request.output_tokens))

    # What becomes of attempts.

    def _admitted(self, node: SimNode, action: Admitted) -> None:
        job = self.attempts.get(action.request)
        if job is not None:
            node.admit(job)
            if job.record.prefill_start_ns < 0:
                self._uses(job, action.cached_tokens)

    def _shorten(self, node: SimNode, action: events.Shorten) -> None:
        job = self.attempts.get(action.key)
        if job is not None and job.record.first_token_ns < 0:
            self._uses(job, action.num_tokens)

    def _uses(self, job: SimJob, cached_tokens: int) -> None:
        job.record.cached_tokens = cached_tokens
        job.record.cached_blocks = -(-cached_tokens // self._block_size)
        job.record.moved_tokens = job.record.similar_tokens = 0  # until it is assembled

    def _joined(self, node: SimNode, action: Joined) -> None:
        job = self.attempts.get(action.request)
        if job is not None:
            node.admit(job)
            self._join_batch(node, job)

    def _join_batch(self, node: SimNode, job: SimJob) -> None:
        if job.record.joined_ns < 0:
            job.record.joined_ns = self._clock.now
        node.join(job)

    def _preempted(self, node: SimNode, action: Preempted) -> None:
        node.record.preemptions += 1
        job = self.attempts.get(action.request)
        if job is not None and job.decodes_on == node.slot:
            job.leave(node.steps)

    def _wake(self, node: SimNode, wake: events.Wake) -> None:
        self._clock.wake(wake.at_ns, node, partial(self.due.append, (node, events.Woken())))

    # What nodes report.

    def _report(self, node: SimNode, report: Report) -> None:
        self.due.append((None, report))

    def _evicted(self, node: SimNode, report: BlocksEvicted) -> None:
        node.record.blocks_evicted += len(report.names)
        self.due.append((None, report))

    def _role_changed(self, node: SimNode, report: RoleChanged) -> None:
        node.facts = msgspec.structs.replace(node.facts, role=report.role)
        self.conversions.append(RoleConversion(self._clock.now, report.node, report.role))
        self.due.append((None, report))

    def lose(self, node: SimNode, tell_conductor: Callable[[], None]) -> None:
        """A node is gone with all that it held. Other nodes to which the conductor says nothing find out by their
        sessions."""
        node.die(self._clock.now)
        node.begin_anew(node_of(self._deployment, node.facts))
        node.alive = False
        tell_conductor()
        self.moves.lose(node)


def _needs_no_time(node: SimNode, action: events.Action) -> None:
    """Nothing waits for it."""
