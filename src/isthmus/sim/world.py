"""The simulated cluster: one conductor, a scheduler per node, links, and a clock that jumps from event to event.

At equal times arrivals come first, then ends of prefills, then of transfers, then of decode runs; then in the order
in which they were set. Nothing is drawn at random and no set is iterated: the same input gives the same result.

A request's way: arrival, route, Expected at its decode node and Arrived at its prefill node; a fetch starts at once,
the load from the node's own cache when the prefill does; KV streams to the decode node while the prefill runs, all but
the last layer, which follows when it is done; when all has landed the request joins the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

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
    NodeJoined,
    Paths,
    PrefillFinished,
    Refuse,
    Replicate,
    RequestArrived,
    RequestEnded,
    Route,
)
from isthmus.cost import compile_cost
from isthmus.scheduler import Action as NodeAction
from isthmus.scheduler import (
    Admitted,
    Arrived,
    BlockPool,
    Cancelled,
    Copied,
    CountingPool,
    Evicted,
    Expected,
    Fetched,
    Imported,
    Limits,
    Preempted,
    Released,
    Reserved,
    Run,
    Scheduler,
    Stepped,
    Stored,
    TierCache,
)
from isthmus.scheduler import Event as NodeEvent
from isthmus.sim.deployment import UNLIMITED, Deployment, NodeSpec
from isthmus.sim.gaps import set_tbt
from isthmus.sim.job import Job
from isthmus.sim.network import Flow, Network
from isthmus.sim.node import SimNode
from isthmus.sim.records import LinkRecord, Result, Status
from isthmus.sim.workloads import Workload
from isthmus.types import NS_PER_MS, NodeId, RequestId, Role, Tier

PREFILL_ENDS, STEP_ENDS = 1, 3
"""Priorities at equal times; arrivals, 0, and transfers, 2, are not on the heap."""

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
        self._network = Network()
        self._heap: list[tuple[int, int, int, SimNode, int]] = []
        self._sequence = self._num_events = 0
        self._jobs = [Job(index, request) for index, request in enumerate(workload.requests)]
        self._job_of: dict[RequestId, Job] = {}
        self._links: list[LinkRecord] = []
        self._spine = self._link("spine", "spine", deployment.spine) if deployment.spine != UNLIMITED else -1
        self._nodes = [self._node(spec, slot) for slot, spec in enumerate(deployment.nodes)]
        self._slot_of = {node.spec.node: node.slot for node in self._nodes}
        self._bytes = dict.fromkeys(("handover", "fetch", "replicate", "load", "disk_read", "disk_write"), 0)
        self._tails: dict[int, list[Job]] = {}
        self.now = 0

    # Building.

    def _link(self, name: str, kind: str, bytes_per_s: int) -> int:
        self._links.append(LinkRecord(name, kind, bytes_per_s))
        return self._network.add_link(name, bytes_per_s)

    def _node(self, spec: NodeSpec, slot: int) -> SimNode:
        deployment = self._deployment
        limits = Limits(
            num_blocks=spec.kv_blocks,
            block_size=deployment.block_size,
            token_budget=deployment.token_budget,
            prompt_batch=deployment.prompt_batch,
            max_sequences=deployment.max_sequences,
            max_steps=deployment.max_steps,
            max_chunks=deployment.max_chunks if spec.role is Role.PREFILL else 1,
            order=deployment.order,
        )
        if spec.dram_blocks and spec.role is not Role.DECODE:
            tiers = TierCache(spec.dram_blocks, spec.ssd_blocks, deployment.eviction)
            scheduler = Scheduler(limits, tiers, CountingPool(spec.kv_blocks))
        elif spec.role is Role.DECODE:
            scheduler = Scheduler(limits, None, CountingPool(spec.kv_blocks))
        else:
            scheduler = Scheduler(limits, None, BlockPool(spec.kv_blocks))
        node = SimNode(spec, slot, scheduler, compile_cost(spec.cost))
        rates, links, name = spec.rates, node.links, spec.node
        links.net_in = self._link(f"{name} in", "network", rates.network)
        links.net_out = self._link(f"{name} out", "network", rates.network)
        own = rates.handover > 0
        links.handover_in = (
            self._link(f"{name} handover in", "handover", rates.handover) if own else links.net_in
        )
        links.handover_out = (
            self._link(f"{name} handover out", "handover", rates.handover) if own else links.net_out
        )
        links.memory_in = self._link(f"{name} to device", "memory", rates.memory)
        links.memory_out = self._link(f"{name} from device", "memory", rates.memory)
        links.disk_read = self._link(f"{name} disk read", "disk", rates.disk_read)
        links.disk_write = self._link(f"{name} disk write", "disk", rates.disk_write)
        return node

    def _join(self, spec: NodeSpec) -> None:
        capacity = spec.kv_blocks * self._deployment.block_size
        rates = spec.rates
        paths = Paths()
        if spec.dram_blocks and spec.role is not Role.DECODE:
            paths = Paths(rates.network, rates.memory, rates.disk_read if spec.ssd_blocks else 0)
        cached = spec.dram_blocks + spec.ssd_blocks
        joined = NodeJoined(
            spec.node, spec.role, capacity, self._deployment.block_size, spec.cost, paths, cached
        )
        self._decide(joined)

    # The loop.

    def run(self, progress: Progress | None = None) -> Result:
        """Simulates until nothing is left to happen. `progress` hears (requests arrived, of how many)."""
        for spec in self._deployment.nodes:
            self._join(spec)
        jobs, heap, network = self._jobs, self._heap, self._network
        arrived, num_jobs = 0, len(jobs)
        never = 1 << 62
        next_arrival = jobs[0].request.arrival_ns if jobs else never
        every = max(1, num_jobs // 100)
        while True:
            flow_end = network.next_finish()
            if flow_end is None:
                flow_end = never
            top = heap[0] if heap else None
            heap_time = top[0] if top is not None else never
            if next_arrival <= heap_time and next_arrival <= flow_end:
                if next_arrival == never:
                    break
                self.now = next_arrival
                self._arrive(jobs[arrived])
                arrived += 1
                next_arrival = jobs[arrived].request.arrival_ns if arrived < num_jobs else never
                if progress is not None and arrived % every == 0:
                    progress(arrived, num_jobs)
            elif top is not None and (heap_time < flow_end or (heap_time == flow_end and top[1] < 2)):
                heappop(heap)
                _, _, _, node, version = top
                if version == node.version:
                    self.now = heap_time
                    self._run_ends(node)
                elif version < 0:
                    self.now = heap_time
                    self._tail_ends(-version)
                else:
                    continue
            else:
                self.now = flow_end
                for flow in network.finish(flow_end):
                    self._flow_ends(flow)
            self._num_events += 1
            if self._check:
                self._check_all()
        return self._result()

    def _check_all(self) -> None:
        self._conductor.check()
        self._network.check()
        for node in self._nodes:
            node.scheduler.check()

    # The conductor.

    def _decide(self, event: Event) -> None:
        actions = self._conductor.on(event, self.now)
        if self._log is not None:
            self._log(self.now, event, actions)
        for action in actions:
            kind = type(action)
            if kind is Route:
                self._route(action)  # type: ignore[arg-type]
            elif kind is Abort:
                self._abort(action)  # type: ignore[arg-type]
            elif kind is Refuse:
                self._refuse(action)  # type: ignore[arg-type]
            elif kind is Replicate:
                self._replicate(action)  # type: ignore[arg-type]
            elif kind is Fail:
                self._job_of.pop(action.request).record.status = Status.FAILED  # type: ignore[union-attr]

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
        request = job.request
        prefill, decode = self._nodes[self._slot_of[route.prefill]], self._nodes[self._slot_of[route.decode]]
        job.attempt = route.attempt
        job.prefill_slot, job.target = prefill.slot, decode.slot
        job.record.prefill, job.record.decode = prefill.slot, decode.slot
        length, stop = request.num_tokens, request.num_tokens + request.output_tokens
        departs = decode is not prefill
        if departs:  # taking blocks for it changes nothing in the run under way, so it need not end
            self._perform(decode, decode.scheduler.on(Expected(job.name, length, stop), self.now))
        fetch = route.fetch
        start, end, until = (fetch.start, fetch.stop, fetch.until_ns) if fetch is not None else (0, 0, 0)
        self._tell(
            prefill,
            Arrived(
                job.name, length, stop, request.blocks, departs, route.num_cached, start, end, until,
                route.work_ns, route.deadline_ns,
            ),
        )  # fmt: skip
        if fetch is not None:
            self._start_fetch(job, prefill, fetch.source, fetch.start, fetch.stop)
        elif prefill.spec.ssd_blocks and route.num_cached:
            self._read_disk(job, prefill)

    def _abort(self, abort: Abort) -> None:
        job = self._job_of[abort.request]
        if job.record.status is Status.COMPLETED:
            return  # its nodes know
        for flow in job.flows:
            self._network.cancel(flow, self.now)
        job.flows.clear()
        self._release_source(job)
        job.pending = 0
        job.attempt = -1
        for node in abort.nodes:
            target = self._nodes[self._slot_of[node]]
            self._tell(target, Cancelled(abort.request))
            if target.stalled:
                self._maybe_unstall(target)

    def _refuse(self, refuse: Refuse) -> None:
        record = self._job_of.pop(refuse.request).record
        record.status, record.stage, record.end_ns = Status.REFUSED, refuse.stage or refuse.code, self.now

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
                self._push(ends, STEP_ENDS, node, node.version)

    def _push(self, time: int, priority: int, node: SimNode, version: int) -> None:
        self._sequence += 1
        heappush(self._heap, (time, priority, self._sequence, node, version))

    def _give(self, node: SimNode, event: NodeEvent) -> None:
        self._perform(node, node.scheduler.on(event, self.now))
        if type(event) is Imported:
            job = self._job_of.get(event.request)
            if job is not None:
                self._join_batch(node, job)

    def _join_batch(self, node: SimNode, job: Job) -> None:
        if job.record.joined_ns < 0:
            job.record.joined_ns = self.now
        node.join(job, job.request.output_tokens - job.num_generated)

    def _perform(self, node: SimNode, actions: list[NodeAction]) -> None:
        for action in actions:
            kind = type(action)
            if kind is Run:
                self._start_run(node, action)  # type: ignore[arg-type]
            elif kind is Admitted:
                self._admitted(node, action)  # type: ignore[arg-type]
            elif kind is Reserved:
                self._reserved(action)  # type: ignore[arg-type]
            elif kind is Stored:
                self._stored(node, action)  # type: ignore[arg-type]
            elif kind is Evicted:
                node.record.blocks_evicted += len(action.names)  # type: ignore[union-attr]
                self._decide(BlocksEvicted(node.spec.node, action.names))  # type: ignore[union-attr]
            elif kind is Preempted:
                self._preempted(node, action)  # type: ignore[arg-type]

    def _start_run(self, node: SimNode, run: Run) -> None:
        ends = node.begin(run, self.now)
        for piece in run.chunks:
            job = self._job_of.get(piece.request)
            if job is not None and not job.started:
                job.started = True
                if job.record.prefill_start_ns < 0:
                    job.record.prefill_start_ns = self.now
                if job.reserved:
                    self._start_handover(job)
        self._push(ends, STEP_ENDS if run.num_decodes else PREFILL_ENDS, node, node.version)

    def _run_ends(self, node: SimNode) -> None:
        """The compute of a run is done; it is over unless KV that its prompts need is still on its way."""
        run = node.run
        assert run is not None
        if run.chunks and not node.stalled:
            for piece in run.chunks:
                if piece.samples:
                    job = self._job_of.get(piece.request)
                    if job is not None and job.pending:
                        node.stalled = node.ending = True
                        node.stalled_since = self.now
                        return
        self._finish_run(node, run)

    def _maybe_unstall(self, node: SimNode) -> None:
        run = node.run
        assert run is not None
        for piece in run.chunks:
            job = self._job_of.get(piece.request)
            if piece.samples and job is not None and job.pending:
                return
        node.stalled = False
        node.record.stalled_ns += self.now - node.stalled_since
        self._finish_run(node, run)

    def _finish_run(self, node: SimNode, run: Run) -> None:
        """Tokens go out first; then the scheduler hears what came during the run, and that the run is over."""
        came, node.inbox, node.ending = node.inbox, [], True
        steps, done = node.end(self.now)
        ended = [job.name for job in done]
        for job in done:
            job.num_generated = job.request.output_tokens
            self._ended(job)
        prefilled = self._sampled(node, run, ended) if run.chunks else []
        if node.tail_ns and prefilled:
            # In a pipeline group, the last chunk passes the other stages while the first takes the next prompt.
            self._tails[self._sequence + 1] = prefilled
            self._push(self.now + node.tail_ns, PREFILL_ENDS, node, -(self._sequence + 1))
        else:
            for job in prefilled:
                self._prefilled(node, job)
        node.run, node.ending = None, False
        for event in came:
            self._give(node, event)
        for job in prefilled:
            if job.target == node.slot and job.attempt > 0:
                self._join_batch(node, job)
        late, node.inbox = node.inbox, []
        self._perform(node, node.scheduler.on(Stepped(steps, tuple(ended)), self.now))
        for event in late:
            self._tell(node, event)

    def _sampled(self, node: SimNode, run: Run, ended: list[RequestId]) -> list[Job]:
        """The jobs whose prompts a run completed; those that end with this token go to `ended`."""
        prefilled = []
        for piece in run.chunks:
            node.record.tokens_prefilled += piece.count * run.steps
            job = self._job_of.get(piece.request)
            if piece.samples and job is not None and job.attempt > 0:
                job.num_generated += 1
                if job.num_generated >= job.request.output_tokens:
                    ended.append(job.name)
                prefilled.append(job)
        return prefilled

    def _tail_ends(self, number: int) -> None:
        for job in self._tails.pop(number):
            if job.attempt > 0:
                self._prefilled(self._nodes[job.prefill_slot], job)

    def _prefilled(self, node: SimNode, job: Job) -> None:
        """The first token of a prefill: the first of all, or the next one after a pre-emption."""
        record = job.record
        if record.first_token_ns >= 0:
            job.resumed_ns.append(self.now)
        else:
            record.first_token_ns = self.now
            record.prefill_ns = self.now - record.prefill_start_ns
            self._decide(FirstToken(job.name, job.attempt))
            if job.attempt < 0:
                return  # refused by its decode node
        if job.num_generated >= job.request.output_tokens:
            self._ended(job)
        elif job.target != node.slot:
            self._end_handover(job)

    def _ended(self, job: Job) -> None:
        record = job.record
        record.end_ns, record.status = self.now, Status.COMPLETED
        if job.first_step >= 0:
            job.spans.append((job.decodes_on, job.first_step, job.last_step))
            job.decodes_on = -1
        self._decide(RequestEnded(job.name, job.request.output_tokens))
        self._job_of.pop(job.name, None)

    def _preempted(self, node: SimNode, action: Preempted) -> None:
        node.record.preemptions += 1
        job = self._job_of[action.request]
        if job.decodes_on == node.slot:
            job.num_generated += node.steps - job.first_step
            job.spans.append((node.slot, job.first_step, node.steps))
            job.first_step = job.last_step = job.decodes_on = -1

    def _admitted(self, node: SimNode, action: Admitted) -> None:
        """Loads what is cached beside the engine; what is cached in its own memory needs none."""
        job = self._job_of.get(action.request)
        if job is None:
            return
        record = job.record
        if record.prefill_start_ns < 0:
            record.cached_tokens = action.cached_tokens
            record.cached_blocks = -(-action.cached_tokens // self._deployment.block_size)
        if node.scheduler.tiers is not None and action.cached_tokens:
            size = action.cached_tokens * node.cost.kv_token_bytes
            self._bytes["load"] += size
            self._send(job, (node.links.memory_in,), size, "load")

    def _stored(self, node: SimNode, action: Stored) -> None:
        if action.tier is Tier.DISK:
            size = len(action.names) * self._deployment.block_size * node.cost.kv_token_bytes
            self._bytes["disk_write"] += size
            self._network.start((node.links.disk_write,), size, None, self.now)
        self._decide(BlocksStored(node.spec.node, action.names, action.tier))

    # KV on its way.

    def _send(self, job: Job, path: tuple[int, ...], num_bytes: int, purpose: str) -> Flow:
        """Bytes that this job's prefill waits for."""
        job.pending += 1
        flow = self._network.start(path, num_bytes, (job, purpose), self.now)
        job.flows.append(flow)
        return flow

    def _flow_ends(self, flow: Flow) -> None:
        if flow.tag is None:
            return
        job, purpose = flow.tag  # type: ignore[misc]
        if purpose == "replicate":
            self._replicated(job)
            return
        job.flows.remove(flow)
        if purpose == "handover":
            self._handover_ends(job)
            return
        node = self._nodes[job.prefill_slot]
        job.pending -= 1
        if purpose == "fetch":
            self._fetch_ends(job, node)
        if node.stalled and not job.pending:
            self._maybe_unstall(node)

    def _start_fetch(self, job: Job, node: SimNode, source_id: NodeId, start: int, stop: int) -> None:
        """From the other node's cache; what it no longer has is computed."""
        source = self._nodes[self._slot_of[source_id]]
        tiers = source.scheduler.tiers
        assert tiers is not None, "only a node with a cache is fetched from"
        names = job.request.blocks
        found, on_disk = tiers.match(names)
        job.stop = stop = min(stop, found)
        if stop <= start:
            node_actions = node.scheduler.on(Fetched(job.name, 0), self.now)
            self._perform(node, node_actions)
            self._decide(FetchFinished(job.name, job.attempt))
            return
        tiers.pin(names[:stop])
        job.source = source_id
        num_tokens = min((stop - start) * self._deployment.block_size, job.request.num_tokens)
        size = num_tokens * node.cost.kv_token_bytes
        job.record.fetched_tokens = num_tokens
        self._bytes["fetch"] += size
        path = self._across(source.links.net_out, node.links.net_in)
        if on_disk:
            path = (source.links.disk_read, *path)
        self._send(job, path, size, "fetch")

    def _across(self, out: int, into: int) -> tuple[int, ...]:
        return (out, into) if self._spine < 0 else (out, self._spine, into)

    def _fetch_ends(self, job: Job, node: SimNode) -> None:
        self._release_source(job)
        self._perform(node, node.scheduler.on(Fetched(job.name, job.stop), self.now))
        self._decide(FetchFinished(job.name, job.attempt))

    def _release_source(self, job: Job) -> None:
        if job.source is not None:
            tiers = self._nodes[self._slot_of[job.source]].scheduler.tiers
            assert tiers is not None
            tiers.unpin(job.request.blocks[: job.stop])
            job.source = None

    def _read_disk(self, job: Job, node: SimNode) -> None:
        """Brings what lies on the node's own disk into its memory while the request waits."""
        tiers = node.scheduler.tiers
        assert tiers is not None
        _, on_disk = tiers.match(job.request.blocks)
        if on_disk:
            num_tokens = on_disk * self._deployment.block_size
            size = num_tokens * node.cost.kv_token_bytes
            job.record.disk_tokens = num_tokens
            self._bytes["disk_read"] += size
            self._send(job, (node.links.disk_read,), size, "disk_read")

    def _replicate(self, order: Replicate) -> None:
        source, target = self._nodes[self._slot_of[order.source]], self._nodes[self._slot_of[order.target]]
        tiers = source.scheduler.tiers
        assert tiers is not None
        found = tiers.match(order.names)[0]
        held = 0 if target.scheduler.tiers is None else target.scheduler.tiers.match(order.names)[0]
        if found <= held:
            return
        tiers.pin(order.names[:found])
        size = (found - held) * self._deployment.block_size * source.cost.kv_token_bytes
        self._bytes["replicate"] += size
        tag = ((source, target, order.names[:found]), "replicate")
        self._network.start(self._across(source.links.net_out, target.links.net_in), size, tag, self.now)

    def _replicated(self, copy: tuple[SimNode, SimNode, tuple[int, ...]]) -> None:
        source, target, names = copy
        assert source.scheduler.tiers is not None
        source.scheduler.tiers.unpin(names)
        self._perform(target, target.scheduler.on(Copied(names), self.now))

    # From prefill to decode.

    def _reserved(self, action: Reserved) -> None:
        job = self._job_of.get(action.request)
        if job is None:
            return
        job.reserved = True
        if job.started:
            self._start_handover(job)

    def _start_handover(self, job: Job) -> None:
        """All layers but the last stream while the prefill computes; after it, whatever was not sent."""
        if job.target == job.prefill_slot:
            return
        cost = self._nodes[job.prefill_slot].cost
        size = job.request.num_tokens * cost.kv_token_bytes + cost.state_bytes
        self._bytes["handover"] += size
        computed = job.record.first_token_ns >= 0
        first = size if computed else size - size // cost.num_layers
        job.landing = computed
        job.handover = self._stream(job, first)

    def _stream(self, job: Job, num_bytes: int) -> Flow:
        source, target = self._nodes[job.prefill_slot].links, self._nodes[job.target].links
        across = self._across(source.handover_out, target.handover_in)
        path = (source.memory_out, *across, target.memory_in)
        flow = self._network.start(path, num_bytes, (job, "handover"), self.now)
        job.flows.append(flow)
        return flow

    def _end_handover(self, job: Job) -> None:
        """The prompt is computed: the last layer's KV follows."""
        if not job.reserved:
            return  # it starts when there is room
        cost = self._nodes[job.prefill_slot].cost
        last = (job.request.num_tokens * cost.kv_token_bytes + cost.state_bytes) // cost.num_layers
        job.landing = True
        if job.handover is not None:
            self._network.grow(job.handover, last, self.now)
        else:
            job.handover = self._stream(job, last)

    def _handover_ends(self, job: Job) -> None:
        job.handover = None
        if not job.landing:
            return  # the prefill is not done yet
        record = job.record
        record.landed_ns = self.now
        self._decide(PrefillFinished(job.name, job.attempt))
        self._tell(self._nodes[job.prefill_slot], Released(job.name))
        self._tell(self._nodes[job.target], Imported(job.name))

    # The end.

    def _result(self) -> Result:
        records = [job.record for job in self._jobs]
        set_tbt(self._jobs, self._nodes)
        end = max((record.end_ns for record in records), default=0)
        for number, link in enumerate(self._links):
            link.bytes_moved = self._network.bytes_moved(number, self.now)
            link.busy_ns = self._network.busy_ns(number, self.now)
        rules = self._deployment.rules
        return Result(
            workload=self._workload.name,
            policy=rules.policy,
            admission=rules.admission,
            order=self._deployment.order,
            records=records,
            nodes=[node.record for node in self._nodes],
            links=self._links,
            start_ns=records[0].arrival_ns if records else 0,
            end_ns=max(end, 0),
            bytes_moved=self._bytes,
            num_events=self._num_events,
        )
