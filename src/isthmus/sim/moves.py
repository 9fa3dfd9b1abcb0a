"""KV on its way: which links it crosses, how much it is, and who is told when it has come.

Loads bring what a prefill finds in its node's DRAM to the device, and reads what lies on its SSD into DRAM; fetches
and copies bring blocks from another node's cache; a hand-over brings a computed prompt to where it decodes, and a
recall what a hand-over from another cluster left out, since the prompt's own cluster has it.

A recurrent state goes with every prefix that is loaded or fetched, and whole at the end of every hand-over: it is
final only when the last token is computed, so no part of it is sent before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from isthmus.blocks import state_names
from isthmus.conductor import Fetch, LinkState
from isthmus.scheduler import TierCache
from isthmus.sim.clock import TRANSFER_ENDS, Clock
from isthmus.sim.deployment import Deployment
from isthmus.sim.job import Job
from isthmus.sim.links import ClusterLink, Wiring
from isthmus.sim.network import Flow
from isthmus.sim.node import SimNode
from isthmus.types import NS_PER_S, BlockName, NodeId

PURPOSES = ("handover", "recall", "fetch", "replicate", "load", "disk_read", "disk_write")

Over = Callable[[Any, Flow], None]
Tag = tuple[Over, Any]
"""What a flow is started with: what to do when it is over, and for whom."""


class Listener(Protocol):
    """Who is told."""

    def loaded(self, job: Job) -> None:
        """Something that the job's prefill waited for is here."""

    def fetched(self, job: Job) -> None:
        """The job's leading `job.stop` blocks are at its prefill node."""

    def copied(self, node: SimNode, names: tuple[BlockName, ...]) -> None:
        """A prefix that no request waits for is at this node."""

    def landed(self, job: Job) -> None:
        """All KV of the job is where it decodes."""

    def lost(self, job: Job, reason: str) -> None:
        """Some of it will not come."""


class _Copy:
    """Blocks on their way between two caches for no request in particular."""

    __slots__ = ("flow", "names", "source", "target")

    flow: Flow

    def __init__(self, source: SimNode, target: SimNode, names: tuple[BlockName, ...]) -> None:
        self.source, self.target, self.names = source, target, names


class _Way(NamedTuple):
    """Of hand-overs from one node to another. `over`: what to do at the end of one."""

    path: tuple[int, ...]
    link: ClusterLink | None
    over: Over


class Moves:
    """What moves on the links. `bytes_moved` by purpose."""

    def __init__(self, deployment: Deployment, clock: Clock, listener: Listener) -> None:
        self.wiring = Wiring(deployment)
        self.network = self.wiring.network
        self.bytes_moved = dict.fromkeys(PURPOSES, 0)
        self._clock, self._listener, self._block_size = clock, listener, deployment.block_size
        self._link_ns = deployment.link_ns
        self._nodes: list[SimNode] = []
        self._named: dict[NodeId, SimNode] = {}
        self._ways: dict[tuple[int, int], _Way] = {}
        self._copies: dict[_Copy, None] = {}
        self._state_blocks = deployment.nodes[0].state_blocks
        self._measured = [(0, 0)] * len(self.wiring.between)  # bytes and time of each link so far

    def connect(self, node: SimNode) -> None:
        """Gives the next node its links."""
        node.links = self.wiring.connect(node.facts)
        self._nodes.append(node)
        self._named[node.facts.node] = node

    def end(self, now: int) -> None:
        for flow in self.network.finish(now):
            tag: Tag = flow.tag  # type: ignore[assignment]
            over, what = tag
            over(what, flow)

    def cancel(self, job: Job, now: int) -> None:
        """Stops all that is on its way for this job."""
        for flow in job.flows:
            self.network.cancel(flow, now)
        job.flows.clear()
        while job.pinned:
            tiers, names = job.pinned.popitem()[1]
            tiers.unpin(names)

    def check_idle(self) -> None:
        assert self.network.next_finish() is None, "a flow is left"
        assert not self._copies, "a copy is left"
        for node in self._nodes:
            assert node.tiers is None or not node.tiers.num_pinned, "a block is still pinned"

    # To a prefill: from its node's own memory and disk.

    def load(self, job: Job, node: SimNode, num_tokens: int, now: int) -> None:
        """Its compute may end before that, but its first token waits for it."""
        size = num_tokens * node.cost.kv_token_bytes + node.cost.state_bytes
        self.bytes_moved["load"] += size
        job.loaded_ns = node.links.load.take(size, now)

    def read_disk(self, job: Job, node: SimNode, now: int) -> None:
        """Brings what lies on the node's own disk into its memory while the request waits."""
        names = self._chain(job.names, min(job.route.num_cached, len(job.names)))
        _, on_disk = _tiers(node).match(names if self._state_blocks else job.names)
        if on_disk:
            job.record.disk_tokens = on_disk * self._block_size
            size = self._block_bytes(node, on_disk)
            self._await(job, "disk_read", (node.links.disk_read,), size, self._read_ends, now)

    def write_disk(self, node: SimNode, num_blocks: int, now: int) -> None:
        size = self._block_bytes(node, num_blocks)
        self.bytes_moved["disk_write"] += size
        node.links.disk_write.take(size, now)

    def _await(
        self, job: Job, purpose: str, path: tuple[int, ...], num_bytes: int, over: Over, now: int
    ) -> None:
        """Moves what the job's prefill waits for."""
        self.bytes_moved[purpose] += num_bytes
        job.pending += 1
        job.flows.append(self.network.start(path, num_bytes, (over, job), now))

    def _read_ends(self, job: Job, flow: Flow) -> None:
        job.flows.remove(flow)
        self._came(job)

    def _came(self, job: Job) -> None:
        job.pending -= 1
        self._listener.loaded(job)

    # Between caches.

    def fetch(self, job: Job, node: SimNode, source: SimNode, start: int, stop: int, now: int) -> bool:
        """Blocks `[start, stop)` from another node's cache; what it no longer has is computed. False: all of it."""
        found, on_disk = self._match(source, job.names, stop)
        job.stop = stop = min(stop, found)
        if stop <= start:
            job.stop = 0
            return False
        self._pin(job, "fetch", source, self._chain(job.names, stop))
        num_tokens = min((stop - start) * self._block_size, job.length)
        job.record.fetched_tokens = num_tokens
        size = int(num_tokens * node.cost.kv_token_bytes * job.fetch_kept) + node.cost.state_bytes
        path = self._from_cache(source, node, on_disk, (node.links.net_in,))
        link = self.wiring.crossing(source.facts, node.facts)
        over = self._fetch_ends if link is None else partial(self._crossed, self._fetch_came, link)
        self._await(job, "fetch", path, size, over, now)
        if link is not None:
            self._watch(link, job, now)
        return True

    def _fetch_ends(self, job: Job, flow: Flow) -> None:
        job.flows.remove(flow)
        self._fetch_came(job, flow)

    def _fetch_came(self, job: Job, flow: Flow) -> None:
        self._unpin(job, "fetch")
        job.record.fetch_ns = flow.finish_ns - flow.started_ns
        self._listener.fetched(job)
        self._came(job)

    def replicate(self, source: SimNode, target: SimNode, names: tuple[BlockName, ...], now: int) -> None:
        """As much of a prefix as one node has and the other, which has a cache too, has not."""
        found, held = _tiers(source).match(names)[0], _tiers(target).match(names)[0]
        if found <= held:
            return
        copy = _Copy(source, target, names[:found])
        _tiers(source).pin(copy.names)
        size = self._block_bytes(source, found - held)
        self.bytes_moved["replicate"] += size
        path = self._from_cache(source, target, 0, (target.links.net_in,))
        copy.flow = self.network.start(path, size, (self._copy_ends, copy), now)
        self._copies[copy] = None

    def _copy_ends(self, copy: _Copy, flow: Flow) -> None:
        del self._copies[copy]
        _tiers(copy.source).unpin(copy.names)
        self._listener.copied(copy.target, copy.names)

    def forget_copies(self, node: SimNode, now: int) -> None:
        """The node is gone, and with it all copies from and to it."""
        for copy in [copy for copy in self._copies if node in (copy.source, copy.target)]:
            self.network.cancel(copy.flow, now)
            _tiers(copy.source).unpin(copy.names)
            del self._copies[copy]

    # From prefill to decode.

    def promise_recall(self, job: Job, recall: Fetch) -> bool:
        """Keeps what is to be recalled where it is. False: it is not there any more."""
        job.landing += 1
        kept = [("recall", self._named[recall.source], recall.stop)]
        if recall.start:  # what the decode node has itself
            kept.append(("own", self._nodes[job.target], recall.start))
            job.landing += 1
        for _, node, stop in kept:
            if node.tiers is None or node.tiers.match(job.names[:stop])[0] < stop:
                return False
        for purpose, node, stop in kept:
            self._pin(job, purpose, node, job.names[:stop])
        return True

    def recall(self, job: Job, recall: Fetch, now: int) -> None:
        """The leading blocks that the hand-over leaves out, from caches in the decode node's own cluster."""
        source, target = self._named[recall.source], self._nodes[job.target]
        size = self._block_bytes(target, recall.stop - recall.start)
        self.bytes_moved["recall"] += size
        if source is target:
            self._recall_own(job, "recall", size, now)
            return
        if recall.start:
            self._recall_own(job, "own", self._block_bytes(target, recall.start), now)
        into = (target.links.handover_in, *target.links.to_device)
        _, on_disk = _tiers(source).match(job.names[: recall.stop])
        path = self._from_cache(source, target, on_disk, into)
        job.flows.append(self.network.start(path, size, (self._recall_ends, job), now))

    def _recall_own(self, job: Job, purpose: str, size: int, now: int) -> None:
        """From the decode node's own memory."""
        ends = self._nodes[job.target].links.load.take(size, now)
        self.later(ends, job, lambda: self._recall_came(job, purpose))

    def _recall_ends(self, job: Job, flow: Flow) -> None:
        job.flows.remove(flow)
        self._recall_came(job, "recall")

    def _recall_came(self, job: Job, purpose: str) -> None:
        self._unpin(job, purpose)
        self._part_landed(job)

    def start_handover(self, job: Job, now: int) -> None:
        """All layers but the last stream while the prefill computes; after it, whatever was not sent."""
        kv, state = self._handover_bytes(job)
        self.bytes_moved["handover"] += kv + state
        way = self._way(job)
        computed = job.prefilled
        first = kv + state if computed else kv - kv // self._nodes[job.prefill_slot].cost.num_layers
        job.handover = self.network.start(way.path, first, (way.over, job), now, quiet=not computed)
        job.flows.append(job.handover)
        if way.link is not None:
            self._watch(way.link, job, now)

    def finish_handover(self, job: Job, now: int) -> None:
        """The prompt is computed: the last layer's KV follows, and the recurrent state."""
        kv, state = self._handover_bytes(job)
        assert job.handover is not None
        self.network.grow(job.handover, kv // self._nodes[job.prefill_slot].cost.num_layers + state, now)
        link = self._way(job).link
        if link is not None:
            self._watch(link, job, now)

    def _way(self, job: Job) -> _Way:
        """From its prefill node's device to its decode node's. Roles change nothing about it."""
        slots = job.prefill_slot, job.target
        found = self._ways.get(slots)
        if found is None:
            source, target = self._nodes[job.prefill_slot], self._nodes[job.target]
            path = (
                *source.links.from_device, source.links.handover_out,
                *self.wiring.trunk(source.facts, target.facts),
                target.links.handover_in, *target.links.to_device,
            )  # fmt: skip
            link = self.wiring.crossing(source.facts, target.facts)
            over = self._handover_ends if link is None else partial(self._crossed, self._handover_came, link)
            found = self._ways[slots] = _Way(path, link, over)
        return found

    def _handover_bytes(self, job: Job) -> tuple[int, int]:
        """Of KV, encoded as its route says, and of recurrent state."""
        cost = self._nodes[job.prefill_slot].cost
        tokens = job.length - job.route.handover_start * self._block_size
        return int(tokens * cost.kv_token_bytes * job.kept), cost.state_bytes

    def _handover_ends(self, job: Job, flow: Flow) -> None:
        job.flows.remove(flow)
        self._handover_came(job, flow)

    def _handover_came(self, job: Job, flow: Flow) -> None:
        job.handover = None
        self._part_landed(job)

    def _part_landed(self, job: Job) -> None:
        job.landing -= 1
        if not job.landing:
            self._listener.landed(job)

    # Between clusters.

    def _crossed(self, came: Over, link: ClusterLink, job: Job, flow: Flow) -> None:
        """The last byte has left; it is there after the link's latency."""
        job.flows.remove(flow)
        if link.latency_ns:
            self.later(flow.finish_ns + link.latency_ns, job, lambda: came(job, flow))
        else:
            came(job, flow)

    def later(self, time: int, job: Job, call: Callable[[], None]) -> None:
        """Calls it then, unless the attempt is over."""
        attempt = job.attempt
        self._clock.call(time, TRANSFER_ENDS, lambda: call() if job.attempt == attempt else None)

    def change_links(self, factor_of: Callable[[frozenset[str]], float], now: int) -> None:
        """Gives each link between clusters so much of its rate from now on."""
        for link in self.wiring.between:
            factor = factor_of(link.ends)
            if factor == link.factor:
                continue
            self.wiring.set_factor(link, factor, now)
            if not factor:
                for flow in self.wiring.flows_on(link):
                    tag: Tag = flow.tag  # type: ignore[assignment]
                    if isinstance(tag[1], Job):
                        self._watch(link, tag[1], now)

    def _watch(self, link: ClusterLink, job: Job, now: int) -> None:
        """Where a link is down, what is to cross it may stand still for so long and no longer."""
        if link.factor:
            return
        since = link.since_ns

        def stalled() -> None:
            flows = [flow for flow in self.wiring.flows_on(link) if flow in job.flows]
            if link.since_ns == since and any(self.network.bytes_left(flow, flow.since) for flow in flows):
                seconds = self._link_ns / NS_PER_S
                self._listener.lost(job, f"no KV crossed {link.record.name} for {seconds:g} s")

        self.later(now + self._link_ns, job, stalled)

    def link_states(self, now: int) -> tuple[LinkState, ...]:
        """Of all links between clusters, since the call before."""
        states = []
        for at, link in enumerate(self.wiring.between):
            sent, busy = self.network.bytes_moved(link.number, now), self.network.busy_ns(link.number, now)
            before, busy_before = self._measured[at]
            self._measured[at] = sent, busy
            states.append(
                LinkState(
                    link.rule.source,
                    link.rule.target,
                    up=link.factor > 0,
                    sent_bytes=sent - before,
                    busy_ns=busy - busy_before,
                    queued_bytes=sum([self._queued(flow, now) for flow in self.wiring.flows_on(link)]),
                    rtt_ns=link.rule.rtt_ns,
                )
            )
        return tuple(states)

    def _queued(self, flow: Flow, now: int) -> int:
        """What of a transfer could be sent and is not. KV is there to be sent as its prefill goes on, evenly."""
        tag: Tag = flow.tag  # type: ignore[assignment]
        left = self.network.bytes_left(flow, now)
        if not flow.quiet:
            return left
        job: Job = tag[1]
        sent = flow.num_bytes - left
        computed = min(1.0, (now - flow.started_ns) / max(1, job.route.work_ns))
        return max(0, int(flow.num_bytes * computed) - sent)

    # Names, pins, paths.

    def _chain(self, names: tuple[BlockName, ...], stop: int) -> tuple[BlockName, ...]:
        """So many leading blocks and the recurrent state at their end."""
        if not self._state_blocks or not stop:
            return names[:stop]
        return names[:stop] + state_names(names[stop - 1], self._state_blocks)

    def _match(self, node: SimNode, names: tuple[BlockName, ...], stop: int) -> tuple[int, int]:
        """Blocks that a node has of a prefix and can give, with a state all or none; and how many are on its disk."""
        if not self._state_blocks:
            return _tiers(node).match(names)
        chain = self._chain(names, min(stop, len(names)))
        found, on_disk = _tiers(node).match(chain)
        return (stop, on_disk) if found == len(chain) else (0, 0)

    def _from_cache(
        self, source: SimNode, target: SimNode, on_disk: int, into: tuple[int, ...]
    ) -> tuple[int, ...]:
        path = (source.links.net_out, *self.wiring.trunk(source.facts, target.facts), *into)
        return (source.links.disk_read, *path) if on_disk else path

    def _pin(self, job: Job, purpose: str, node: SimNode, names: tuple[BlockName, ...]) -> None:
        """Until it has left there, or the attempt is over. Of a node that dies, the cache goes with its pins."""
        tiers = _tiers(node)
        tiers.pin(names)
        job.pinned[purpose] = tiers, names

    def _unpin(self, job: Job, purpose: str) -> None:
        tiers, names = job.pinned.pop(purpose)
        tiers.unpin(names)

    def _block_bytes(self, node: SimNode, num_blocks: int) -> int:
        return num_blocks * self._block_size * node.cost.kv_token_bytes


def _tiers(node: SimNode) -> TierCache:
    assert node.tiers is not None, "only a node with a cache is loaded or fetched from"
    return node.tiers
