"""The simulated cluster: one conductor, a scheduler per node, links, and a clock that jumps from event to event.

At equal times arrivals come first, then ends of prefills, then of transfers, then of decode runs; then in the order
in which they were set. Nothing is drawn at random and no set is iterated: the same input gives the same result.

A request's way: arrival, route, Expected at its decode node and Arrived at its prefill node; a fetch starts at once,
the load from the node's own cache when the prefill does; KV streams to the decode node while the prefill runs, all but
the last layer, which follows when it is done; when all has landed the request joins the batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from isthmus.conductor import (
    Abort,
    Action,
    BlocksEvicted,
    BlocksStored,
    Conductor,
    Event,
    Fail,
    FetchFinished,
    FirstToken,
    PrefillFinished,
    Refuse,
    Replicate,
    RequestArrived,
    RequestEnded,
    Route,
)
from isthmus.cost.transfer import NONE
from isthmus.scheduler import (
    Admitted,
    Arrived,
    Cancelled,
    Evicted,
    Expected,
    Fetched,
    Imported,
    Offered,
    Preempted,
    Released,
    Reserved,
    Run,
    Stepped,
    Stored,
)
from isthmus.scheduler import Event as NodeEvent
from isthmus.sim.build import build_node, joined, kept
from isthmus.sim.deployment import Deployment
from isthmus.sim.gaps import set_tbt
from isthmus.sim.job import Job
from isthmus.sim.moves import Moves
from isthmus.sim.network import NEVER
from isthmus.sim.node import SimNode
from isthmus.sim.records import Result, Status
from isthmus.sim.workloads import Workload
from isthmus.types import NS_PER_MS, BlockName, RequestId, Tier

PREFILL_ENDS, TRANSFER_ENDS, STEP_ENDS = 1, 2, 3
"""Priorities at equal times; arrivals come before all. Of transfers, the heap has those the network does not know."""

Log = Callable[[int, Event, list[Action]], None]
Progress = Callable[[int, int], None]


class World:
    """`run` it once. `log` hears every event of the conductor and its answer; `check` tests invariants after each."""

    def __init__(
        self, deployment: Deployment, workload: Workload, *, log: Log | None = None, check: bool = False
    ) -> None:
        self._deployment, self._workload = deployment, workload
        self._log, self._check = log, check
        self._conductor = Conductor(deployment.rules)
        self._moves = Moves(deployment, self)
        self._nodes = [build_node(deployment, slot) for slot in range(len(deployment.nodes))]
        for node in self._nodes:
            self._moves.connect(node)
        self._node_of = {node.spec.node: node for node in self._nodes}
        self._jobs = [Job(index, request) for index, request in enumerate(workload.requests)]
        self._job_of: dict[RequestId, Job] = {}
        # (time, priority, number, node, version of the node's run, jobs that leave a pipeline group or none)
        self._heap: list[tuple[int, int, int, SimNode, int, list[Job]]] = []
        self._num_pushed = 0
        self.now = 0
        self._orders: dict[type, Callable[[Any], None]] = {
            Route: self._route,
            Abort: self._abort,
            Refuse: self._refuse,
            Fail: self._fail,
            Replicate: self._replicate,
        }
        self._effects: dict[type, Callable[[SimNode, Any], None]] = {
            Run: self._start_run,
            Admitted: self._admitted,
            Reserved: self._reserved,
            Preempted: self._preempted,
            Stored: self._stored,
            Evicted: self._evicted,
        }

    # The loop.

    def run(self, progress: Progress | None = None) -> Result:
        """Simulates until nothing is left to happen. `progress` hears (requests arrived, of how many)."""
        collects = gc.isenabled()
        gc.disable()  # nothing that ends here is part of a cycle, so to look for cycles gains nothing
        try:
            return self._run(progress)
        finally:
            if collects:
                gc.enable()

    def _run(self, progress: Progress | None) -> Result:
        for spec in self._deployment.nodes:
            self._decide(joined(self._deployment, spec))
        jobs, heap, moves, network = self._jobs, self._heap, self._moves, self._moves.network
        arrived, num_jobs, check = 0, len(jobs), self._check
        every = max(1, num_jobs // 100)
        arrival = jobs[0].request.arrival_ns if jobs else NEVER
        transfer, version_seen = NEVER, network.version
        num_events = 0
        while True:
            if network.version != version_seen:
                version_seen, next_finish = network.version, network.next_finish()
                transfer = NEVER if next_finish is None else next_finish
            if heap:
                time, priority, _, node, version, leaving = heap[0]
            else:
                time = NEVER
            if arrival <= time and arrival <= transfer:
                if arrival == NEVER:
                    break
                self.now = arrival
                self._arrive(jobs[arrived])
                arrived += 1
                arrival = jobs[arrived].request.arrival_ns if arrived < num_jobs else NEVER
                if progress is not None and arrived % every == 0:
                    progress(arrived, num_jobs)
            elif transfer < time or (transfer == time and priority > TRANSFER_ENDS):
                self.now = transfer
                moves.end(transfer)
            else:
                heappop(heap)
                if leaving:
                    self.now = time
                    self._leave_group(node, leaving)
                elif version == node.version:
                    self.now = time
                    self._run_ends(node)
                else:
                    continue  # the run was cut short
            num_events += 1
            if check:
                self._check_all()
        if check:
            self._check_idle()
        return self._result(num_events)

    def _push(self, time: int, priority: int, node: SimNode, leaving: list[Job]) -> None:
        self._num_pushed += 1
        heappush(self._heap, (time, priority, self._num_pushed, node, node.version, leaving))

    def _check_all(self) -> None:
        self._conductor.check()
        self._moves.network.check()
        for node in self._nodes:
            node.scheduler.check()
            if node.scheduler.tiers is not None:
                node.scheduler.tiers.check()

    def _check_idle(self) -> None:
        """Every request has ended, and all that it took was given back."""
        assert not self._job_of, "a request never ended"
        assert not self._conductor.view.requests, "the conductor holds a request that ended"
        self._moves.check_idle()
        for node in self._nodes:
            scheduler = node.scheduler
            assert node.run is None and not node.inbox, "a node still works"
            assert scheduler.num_waiting == scheduler.num_running == 0, "a node holds a request that ended"
            assert scheduler.pool.available == node.spec.kv_blocks, "blocks did not come back"

    # The conductor.

    def _decide(self, event: Event) -> None:
        actions = self._conductor.on(event, self.now)
        if self._log is not None:
            self._log(self.now, event, actions)
        for action in actions:
            self._orders[type(action)](action)

    def _arrive(self, job: Job) -> None:
        request, rules, record = job.request, self._deployment.rules, job.record
        ttft_ms = request.ttft_slo_ms if request.ttft_slo_ms is not None else rules.ttft_ms
        tbt_ms = request.tbt_slo_ms if request.tbt_slo_ms is not None else rules.tbt_ms
        record.ttft_limit_ns = (ttft_ms or 0) * NS_PER_MS
        record.tbt_limit_ns = (tbt_ms or 0) * NS_PER_MS
        self._job_of[job.name] = job
        self._decide(
            RequestArrived(
                job.name,
                request.tenant,
                request.num_tokens,
                request.output_tokens,
                request.blocks,
                request.priority,
                request.ttft_slo_ms,
                request.tbt_slo_ms,
            )
        )

    def _route(self, route: Route) -> None:
        job = self._job_of[route.request]
        request, record, fetch = job.request, job.record, route.fetch
        prefill, decode = self._node_of[route.prefill], self._node_of[route.decode]
        job.attempt = route.attempt
        if self._deployment.rules.codecs:
            job.kept = kept(prefill, route.codec, self._deployment.block_size)
            job.fetch_kept = kept(prefill, fetch.codec if fetch else NONE, self._deployment.block_size)
        job.prefill_slot = record.prefill = prefill.slot
        job.target = record.decode = decode.slot
        length, stop = request.num_tokens, request.num_tokens + request.output_tokens
        departs = decode is not prefill
        if departs:  # taking blocks for it changes nothing in the run under way, so it need not end
            self._give(decode, Expected(job.name, length, stop))
        start, end, until = (fetch.start, fetch.stop, fetch.until_ns) if fetch is not None else (0, 0, 0)
        self._tell(
            prefill,
            Arrived(
                job.name, length, stop, request.blocks, departs, route.num_cached, start, end, until,
                route.work_ns, route.deadline_ns,
            ),
        )  # fmt: skip
        if fetch is not None:
            source = self._node_of[fetch.source]
            if not self._moves.fetch(job, prefill, source, start, end, self.now):
                self.fetched(job)
        elif prefill.spec.ssd_blocks and route.num_cached:
            self._moves.read_disk(job, prefill, self.now)

    def _abort(self, abort: Abort) -> None:
        job = self._job_of[abort.request]
        if job.record.status is Status.COMPLETED:
            return  # its nodes know
        self._moves.cancel(job, self.now)
        job.attempt = -1
        for name in abort.nodes:
            node = self._node_of[name]
            self._tell(node, Cancelled(abort.request))
            if node.stalled:
                self._run_ends(node)

    def _refuse(self, refuse: Refuse) -> None:
        record = self._job_of.pop(refuse.request).record
        record.status, record.stage, record.end_ns = Status.REFUSED, refuse.stage or refuse.code, self.now

    def _fail(self, fail: Fail) -> None:
        record = self._job_of.pop(fail.request).record
        record.status, record.end_ns = Status.FAILED, self.now

    def _replicate(self, order: Replicate) -> None:
        source, target = self._node_of[order.source], self._node_of[order.target]
        self._moves.replicate(source, target, order.names, self.now)

    # Nodes.

    def _tell(self, node: SimNode, event: NodeEvent) -> None:
        """Gives an event to a node: at once when nothing runs there, else when the iteration under way ends."""
        if node.run is None:
            self._give(node, event)
            return
        node.inbox.append(event)
        if len(node.inbox) == 1 and not node.ending:
            ends = node.cut(self.now)
            if ends is not None:
                self._push(ends, STEP_ENDS, node, [])

    def _give(self, node: SimNode, event: NodeEvent) -> None:
        if type(event) is Imported:  # it decodes from now on; the scheduler may pre-empt it at once
            job = self._job_of.get(event.request)
            if job is not None:
                node.admit(job)
                self._join_batch(node, job)
        for action in node.scheduler.on(event, self.now):
            self._effects[type(action)](node, action)

    def _join_batch(self, node: SimNode, job: Job) -> None:
        if job.record.joined_ns < 0:
            job.record.joined_ns = self.now
        node.join(job)

    def _start_run(self, node: SimNode, run: Run) -> None:
        ends = node.begin(run, self.now)
        if run.chunks:
            self._start_prompts(node, run)
        self._push(ends, STEP_ENDS if run.num_decodes else PREFILL_ENDS, node, [])

    def _start_prompts(self, node: SimNode, run: Run) -> None:
        for piece in run.chunks:
            job = self._job_of.get(piece.request)
            if job is None:
                continue
            if piece.samples:
                node.sampling.append(job)
            if not job.started:
                job.started = True
                job.record.prefill_start_ns = self.now
                if job.reserved:
                    self._moves.start_handover(job, self.now)

    def _run_ends(self, node: SimNode) -> None:
        """The compute of a run is done; it is over unless KV that its prompts need is still on its way."""
        for job in node.sampling:
            if job.pending or job.loaded_ns > self.now:
                self._stall(node)
                return
        if node.stalled:
            node.stalled = False
            node.version += 1  # for a timer may be left
            node.record.stalled_ns += self.now - node.stalled_since
        self._finish_run(node)

    def _stall(self, node: SimNode) -> None:
        if not node.stalled:
            node.stalled = node.ending = True
            node.stalled_since = self.now
        node.version += 1
        if not any(job.pending for job in node.sampling):  # of what is pending, the network tells
            self._push(max(job.loaded_ns for job in node.sampling), TRANSFER_ENDS, node, [])

    def _finish_run(self, node: SimNode) -> None:
        """Tokens go out first; then the scheduler hears what came during the run, and that the run is over."""
        came, node.inbox, node.ending = node.inbox, [], True
        steps, done = node.end(self.now)
        ended: list[RequestId] = []
        for job in done:
            self._ended(job)
            ended.append(job.name)
        going_on = self._sampled(node, ended) if node.sampling else []
        node.run, node.ending = None, False
        for event in came:
            self._give(node, event)
        for job in going_on:
            if job.attempt > 0:
                self._join_batch(node, job)
        late, node.inbox = node.inbox, []
        self._give(node, Stepped(steps, tuple(ended)))
        for event in late:
            self._tell(node, event)

    def _sampled(self, node: SimNode, ended: list[RequestId]) -> list[Job]:
        """The prompts that a run completed got a token. Those that end with it go to `ended`; returns those that
        go on here."""
        jobs, going_on = [], []
        for job in node.sampling:
            if job.attempt < 0:
                continue
            jobs.append(job)
            job.num_generated += 1
            if not job.num_left:
                ended.append(job.name)
            elif job.target == node.slot:
                going_on.append(job)
        node.sampling = []
        if node.tail_ns and jobs:
            # In a pipeline group, the last chunk passes the other stages while the first takes the next prompt.
            self._push(self.now + node.tail_ns, PREFILL_ENDS, node, jobs)
        else:
            for job in jobs:
                self._prefilled(node, job)
        return going_on

    def _leave_group(self, node: SimNode, jobs: list[Job]) -> None:
        for job in jobs:
            if job.attempt > 0:
                self._prefilled(node, job)

    def _prefilled(self, node: SimNode, job: Job) -> None:
        """The token of a prefill is out: the first of all, or the next one after a pre-emption."""
        record = job.record
        if record.first_token_ns >= 0:
            job.resumed_ns.append(self.now)
        else:
            record.first_token_ns = self.now
            record.prefill_ns = self.now - record.prefill_start_ns
            self._decide(FirstToken(job.name, job.attempt))
            if job.attempt < 0:
                return  # refused by its decode node
        if not job.num_left:
            self._ended(job)
        elif job.target != node.slot and job.reserved:
            self._moves.finish_handover(job, self.now)

    def _ended(self, job: Job) -> None:
        job.record.end_ns, job.record.status = self.now, Status.COMPLETED
        self._decide(RequestEnded(job.name, job.request.output_tokens))
        del self._job_of[job.name]

    # What a scheduler answers.

    def _admitted(self, node: SimNode, action: Admitted) -> None:
        """Loads what is cached beside the engine; what is cached in its own memory needs none."""
        job = self._job_of.get(action.request)
        if job is None:
            return
        node.admit(job)
        record = job.record
        if record.prefill_start_ns < 0:
            record.cached_tokens = action.cached_tokens
            record.cached_blocks = -(-action.cached_tokens // self._deployment.block_size)
        if action.cached_tokens and node.scheduler.tiers is not None:
            self._moves.load(job, node, action.cached_tokens, self.now)

    def _reserved(self, node: SimNode, action: Reserved) -> None:
        job = self._job_of.get(action.request)
        if job is not None:
            job.reserved = True
            if job.started:
                self._moves.start_handover(job, self.now)

    def _preempted(self, node: SimNode, action: Preempted) -> None:
        node.record.preemptions += 1
        job = self._job_of[action.request]
        if job.decodes_on == node.slot:
            job.leave(node.steps)

    def _stored(self, node: SimNode, action: Stored) -> None:
        if action.tier is Tier.DISK:
            self._moves.write_disk(node, len(action.names), self.now)
        self._decide(BlocksStored(node.spec.node, action.names, action.tier))

    def _evicted(self, node: SimNode, action: Evicted) -> None:
        node.record.blocks_evicted += len(action.names)
        self._decide(BlocksEvicted(node.spec.node, action.names))

    # What the links bring (`moves.Listener`).

    def loaded(self, job: Job) -> None:
        node = self._nodes[job.prefill_slot]
        if node.stalled and not job.pending:
            self._run_ends(node)

    def fetched(self, job: Job) -> None:
        # Heard at once, also during a run: a prompt that waits for nothing else may start with the next one.
        self._give(self._nodes[job.prefill_slot], Fetched(job.name, job.stop))
        self._decide(FetchFinished(job.name, job.attempt))

    def copied(self, node: SimNode, names: tuple[BlockName, ...]) -> None:
        self._give(node, Offered(names))

    def landed(self, job: Job) -> None:
        job.record.landed_ns = self.now
        self._decide(PrefillFinished(job.name, job.attempt))
        self._tell(self._nodes[job.prefill_slot], Released(job.name))
        self._tell(self._nodes[job.target], Imported(job.name))

    # The end.

    def _result(self, num_events: int) -> Result:
        records = [job.record for job in self._jobs]
        set_tbt(self._jobs, self._nodes)
        rules = self._deployment.rules
        return Result(
            workload=self._workload.name,
            policy=rules.policy,
            admission=rules.admission,
            order=self._deployment.order,
            records=records,
            nodes=[node.record for node in self._nodes],
            links=self._moves.records(self.now),
            start_ns=records[0].arrival_ns if records else 0,
            end_ns=max([record.end_ns for record in records], default=0),
            bytes_moved=self._moves.bytes_moved,
            num_events=num_events,
        )
