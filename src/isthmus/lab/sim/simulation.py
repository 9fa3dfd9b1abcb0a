"""The simulated world: one conductor, nodes and links, driven by a clock that jumps from event to event.

The order of events at equal times is fixed (`clock.py`), nothing is drawn at random and no set is iterated: the same
input gives the same result. Nodes decide by the code of live nodes (`isthmus.core.node`); this room gives the actions
their durations. When a node or a transfer fails, the conductor is told and may route the request again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop
from typing import Any

import msgspec

from isthmus.core.conductor import (
    Abort,
    Action,
    Conductor,
    Desk,
    Dismiss,
    End,
    Event,
    Fail,
    Hold,
    HoldExpired,
    LinksMeasured,
    NodeDrains,
    NodeLeft,
    NodeStays,
    Refuse,
    Remember,
    RequestArrived,
    RequestEnded,
    Route,
    SendOrder,
    ThresholdSet,
    Unremember,
)
from isthmus.core.conductor.view import WAITING
from isthmus.core.types import NS_PER_MS, NS_PER_S, NodeId, RequestId
from isthmus.lab.sim import no_cycles
from isthmus.lab.sim.clock import OTHERS, TRANSFER_ENDS, Clock
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.network import NEVER
from isthmus.lab.sim.node import SimNode
from isthmus.lab.sim.nodes import Nodes
from isthmus.lab.sim.records import (
    COMPLETED,
    FAILED,
    REFUSED,
    LinkSample,
    RequestStatus,
    Result,
    SimJob,
    ThresholdChange,
)
from isthmus.lab.sim.summary import set_tbt
from isthmus.lab.sim.workloads import Workload

PATIENCE_NS = 600 * NS_PER_S
"""Links are measured for so long while nothing else happens: a node may still get another role and serve the rest."""

_STATUS: dict[type, RequestStatus] = {Refuse: REFUSED, Fail: FAILED, RequestEnded: COMPLETED}

Log = Callable[[int, Event, list[Action]], None]
Progress = Callable[[int, int], None]


class Simulation:
    """One simulation, to be `run` once. `log` is called with every event of the conductor and its answer; `check`
    asserts invariants after each event."""

    def __init__(
        self, deployment: Deployment, workload: Workload, *, log: Log | None = None, check: bool = False
    ) -> None:
        has_names = any(request.blocks for request in workload.requests)
        has_answers = any(request.answer is not None for request in workload.requests)
        deployment = msgspec.structs.replace(deployment, has_names=has_names, has_answers=has_answers)
        self._deployment, self._workload = deployment, workload
        self._check = check
        self._desk = Desk(Conductor(deployment.rules), deployment.rejoin_ns // NS_PER_MS, log)
        self._clock = Clock()
        self._nodes = Nodes(deployment, self._clock, self.decide)
        self._moves = self._nodes.moves
        self._samples: list[LinkSample] = []
        self._idle_since = 0
        self._jobs = [SimJob(index, request) for index, request in enumerate(workload.requests)]
        self._num_left = self._num_to_come = len(self._jobs)
        self._job_of: dict[RequestId, SimJob] = {}
        self._draining: set[NodeId] = set()
        self._thresholds: list[ThresholdChange] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Route: self._route,
            Abort: self._abort,
            SendOrder: self._tell,
            Hold: self._hold,
            Dismiss: self._dismiss,
            **dict.fromkeys((Refuse, Fail, RequestEnded), self._end),
            ThresholdSet: self._threshold_set,
            **dict.fromkeys((Remember, Unremember), _keeps_no_tokens),
        }

    # The loop.

    def run(self, progress: Progress | None = None) -> Result:
        """Simulates until no event is left. Calls `progress(requests arrived, all requests)` now and then."""
        with no_cycles():
            return self._run(progress)

    def _run(self, progress: Progress | None) -> Result:
        for facts in self._deployment.nodes:
            self.decide(facts.joined())
        self._start_timers()
        clock, moves, network, run_ends = self._clock, self._moves, self._moves.network, self._nodes.run_ends
        due, settle = self._nodes.due, self._nodes.settle
        jobs, heap = self._jobs, clock.heap
        arrived, num_jobs, check = 0, len(jobs), self._check
        every = max(1, num_jobs // 100)
        arrival = jobs[0].request.arrival_ns if jobs else NEVER
        transfer, version_seen = NEVER, network.version
        num_events = 0
        while True:
            if network.version != version_seen:
                version_seen, next_finish = network.version, network.next_finish()
                transfer = NEVER if next_finish is None else next_finish
            time = heap[0][0] if heap else NEVER
            if arrival <= time and arrival <= transfer:
                if arrival == NEVER:
                    break
                clock.now = arrival
                self._arrive(jobs[arrived])
                arrived += 1
                self._num_to_come -= 1
                arrival = jobs[arrived].request.arrival_ns if arrived < num_jobs else NEVER
                if progress is not None and arrived % every == 0:
                    progress(arrived, num_jobs)
            elif transfer < time or (transfer == time and heap[0][1] > TRANSFER_ENDS):
                clock.now = transfer
                moves.end(transfer)
            else:
                _, _, _, node, version, call = heappop(heap)
                if call is not None:
                    clock.now = time
                    call()
                elif node is not None and version == node.version:
                    clock.now = time
                    run_ends(node)
                else:
                    continue  # the run was cut short
            if due:
                settle()
            num_events += 1
            if check:
                self._check_all()
        if check:
            self._check_idle()
        return self._result(num_events)

    def _check_all(self) -> None:
        self._desk.check()
        self._moves.network.check()
        self._nodes.check()
        attempts = [(job.name, job.route.attempt) for job in self._nodes.attempts.values()]
        assert all(self._desk.under_way(*each) is not None for each in attempts), (
            "an attempt that nobody asked for"
        )
        waiting = [job for job in self._job_of.values() if job.key not in self._nodes.attempts]
        requests = self._desk.conductor.view.requests
        assert all(requests[job.name].state is WAITING for job in waiting), "a request was forgotten"

    def _check_idle(self) -> None:
        """Asserts that every request has ended."""
        assert not self._job_of and not self._num_left, "a request never ended"
        self._desk.check()
        self._nodes.check_idle()

    # The conductor.

    def decide(self, event: Event) -> None:
        for answer in self._desk.on(event, self._clock.now):
            self._handlers[type(answer)](answer)

    def _arrive(self, job: SimJob) -> None:
        request, rules, record = job.request, self._deployment.rules, job.record
        ttft_ms = request.ttft_slo_ms if request.ttft_slo_ms is not None else rules.ttft_ms
        tbt_ms = request.tbt_slo_ms if request.tbt_slo_ms is not None else rules.tbt_ms
        record.ttft_limit_ns = (ttft_ms or 0) * NS_PER_MS
        record.tbt_limit_ns = (tbt_ms or 0) * NS_PER_MS
        self._job_of[job.name] = job
        names, content = request.blocks, request.content
        if content is not None:  # live, full blocks alone have names: the last one tells donors apart
            names = names[: request.num_tokens // self._deployment.block_size]
        self.decide(
            RequestArrived(
                job.name,
                request.tenant,
                request.num_tokens,
                request.output_tokens,
                names,
                request.priority,
                request.ttft_slo_ms,
                request.tbt_slo_ms,
                content,
                self._deployment.shares.weight_of(request.tenant),
            )
        )

    def _route(self, route: Route) -> None:
        job = self._job_of[route.request]
        self._nodes.begin(job, route, self._desk.parts(route, job.num_generated))

    def _abort(self, abort: Abort) -> None:
        self._nodes.withdraw(self._job_of[abort.request])

    def _tell(self, tell: SendOrder) -> None:
        self._nodes.order(tell.node, tell.order)

    def _hold(self, hold: Hold) -> None:
        expired = partial(self.decide, HoldExpired(hold.request, hold.attempt))
        self._clock.call(self._clock.now + hold.wait_ms * NS_PER_MS, OTHERS, expired)

    def _end(self, end: End) -> None:
        """Records how a request ended."""
        job = self._job_of.pop(end.request)
        job.record.status, job.record.end_ns = _STATUS[type(end)], self._clock.now
        if isinstance(end, Refuse):
            job.record.stage = end.stage or end.code
        self._num_left -= 1

    def _threshold_set(self, order: ThresholdSet) -> None:
        self._thresholds.append(ThresholdChange(self._clock.now, order.threshold, order.reason))

    # Beside the requests: links are measured, and faults come and go.

    def _start_timers(self) -> None:
        rules, clock = self._deployment.rules, self._clock
        if rules.links or rules.convert:
            clock.call(clock.now + rules.period_ns, OTHERS, self._measure)
        for time in self._deployment.faults.times():
            clock.call(time, OTHERS, self._change_faults)

    def _measure(self) -> None:
        if not self._num_left:
            return
        now, clock = self._clock.now, self._clock
        if clock.heap or self._moves.network.next_finish() is not None or self._num_to_come:
            self._idle_since = now
        if now - self._idle_since > PATIENCE_NS:
            return
        states = self._moves.link_states(now)
        sent, queued = [state.sent_bytes for state in states], [state.queued_bytes for state in states]
        self._samples.append(LinkSample(now, tuple(sent), tuple(queued)))
        self.decide(LinksMeasured(states))
        clock.call(now + self._deployment.rules.period_ns, OTHERS, self._measure)

    def _change_faults(self) -> None:
        """Applies faults that begin or end now."""
        faults, now = self._deployment.faults, self._clock.now
        self._moves.change_links(partial(faults.factor, now=now), now)
        for node in self._nodes.nodes:
            dead, unwanted = faults.is_dead(node.names, now), faults.is_unwanted(node.names, now)
            name = node.facts.node
            if node.alive and dead:
                self._lose(node)
            elif not node.alive and not dead and not unwanted:
                node.alive = True
                self.decide(node.facts.joined())
            elif node.alive and unwanted and name not in self._draining:
                self._draining.add(name)
                self.decide(NodeDrains(name))
            elif node.alive and not unwanted and name in self._draining:
                self._draining.remove(name)
                self.decide(NodeStays(name))
        self._change_around()

    def _lose(self, node: SimNode) -> None:
        self._draining.discard(node.facts.node)
        self._nodes.lose(node, partial(self.decide, NodeLeft(node.facts.node)))

    def _change_around(self) -> None:
        self._moves.sessions.change(self._nodes.nodes)
        self._moves.disks.change(self._nodes.nodes, self._clock.now)

    def _dismiss(self, order: Dismiss) -> None:
        """The node leaves when what happens now is over, if it is unwanted still."""
        node = self._nodes.by_name[order.node]

        def leave() -> None:
            if node.alive and order.node in self._draining:
                self._lose(node)
                self._change_around()

        self._clock.call(self._clock.now, OTHERS, leave)

    # The end.

    def _result(self, num_events: int) -> Result:
        records = [job.record for job in self._jobs]
        set_tbt(self._jobs, self._nodes.nodes)
        rules = self._deployment.rules
        return Result(
            workload=self._workload.name,
            policy=rules.policy,
            admission=rules.admission,
            order=self._deployment.nodes[0].order,
            records=records,
            nodes=[node.record for node in self._nodes.nodes],
            links=self._moves.wiring.records(self._clock.now),
            start_ns=records[0].arrival_ns if records else 0,
            end_ns=max([record.end_ns for record in records], default=0),
            bytes_moved=self._moves.bytes_moved,
            thresholds=self._thresholds,
            conversions=self._nodes.conversions,
            link_samples=self._samples,
            num_events=num_events,
        )


def _keeps_no_tokens(order: Remember | Unremember) -> None:
    """Does nothing: live, the head keeps a donor's tokens, and a simulated prompt has none."""
