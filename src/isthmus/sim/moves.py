"""KV on its way: which links it crosses, how much it is, and who is told when it has come.

Loads bring what a prefill finds in its node's DRAM to the device, and reads what lies on its SSD into DRAM; fetches
and copies bring blocks from another node's cache; a hand-over brings a computed prompt to where it decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from isthmus.deploy import UNLIMITED
from isthmus.scheduler import TierCache
from isthmus.sim.deployment import Deployment
from isthmus.sim.job import Job
from isthmus.sim.network import Flow, Network
from isthmus.sim.node import Lane, SimNode
from isthmus.sim.records import LinkRecord
from isthmus.types import BlockName, Role

PURPOSES = ("handover", "fetch", "replicate", "load", "disk_read", "disk_write")

Tag = tuple[Callable[[Any, Flow], None], Any]
"""What a flow is started with: what to do when it is over, and for whom."""


class Listener(Protocol):
    """Who is told. `now` is the time of the call of `Moves.end` in which this happens."""

    def loaded(self, job: Job) -> None:
        """Something that the job's prefill waited for is here."""

    def fetched(self, job: Job) -> None:
        """The job's leading `job.stop` blocks are at its prefill node."""

    def copied(self, node: SimNode, names: tuple[BlockName, ...]) -> None:
        """A prefix that no request waits for is at this node."""

    def landed(self, job: Job) -> None:
        """All KV of the job is where it decodes."""


class _Copy:
    """Blocks on their way between two caches for no request in particular."""

    __slots__ = ("names", "source", "target")

    def __init__(self, source: SimNode, target: SimNode, names: tuple[BlockName, ...]) -> None:
        self.source, self.target, self.names = source, target, names


class Moves:
    """All links and what moves on them. `bytes_moved` by purpose."""

    def __init__(self, deployment: Deployment, listener: Listener) -> None:
        self.network = Network()
        self.bytes_moved = dict.fromkeys(PURPOSES, 0)
        self._listener, self._block_size = listener, deployment.block_size
        self._nodes: list[SimNode] = []
        self._records: list[LinkRecord] = []
        self._numbers: list[tuple[int, LinkRecord]] = []  # of the links in the network
        self._spine: tuple[int, ...] = ()
        if deployment.spine != UNLIMITED:
            self._spine = (self._link("spine", "spine", deployment.spine),)

    def connect(self, node: SimNode) -> None:
        """Gives the next node its links."""
        rates, links, name = node.spec.rates, node.links, node.spec.node
        links.net_in = links.handover_in = self._link(f"{name} in", "network", rates.network)
        links.net_out = links.handover_out = self._link(f"{name} out", "network", rates.network)
        decodes = node.spec.role is Role.DECODE
        to_device, from_device = f"{name} to device", f"{name} from device"
        if rates.handover:
            # From the device goes a hand-over alone, so it and the rail are one link, as wide as the narrower.
            width = min(rates.handover, rates.memory)
            links.handover_in = self._link(f"{name} handover in", "handover", rates.handover, width)
            links.handover_out = self._link(f"{name} handover out", "handover", rates.handover, width)
            self._same_link(from_device, rates.memory, links.handover_out)
            if decodes:  # to its device comes nothing else
                self._same_link(to_device, rates.memory, links.handover_in)
        else:
            memory = self._link(from_device, "memory", rates.memory, behind=links.handover_out)
            links.from_device = (memory,)
            if decodes:
                memory = self._link(to_device, "memory", rates.memory, behind=links.handover_in)
                links.to_device = (memory,)
        if not decodes:  # to its device comes what it loads from its own memory
            links.load = self._lane(to_device, "memory", rates.memory)
        links.disk_read = self._link(f"{name} disk read", "disk", rates.disk_read)
        links.disk_write = self._lane(f"{name} disk write", "disk", rates.disk_write)
        self._nodes.append(node)

    def _link(self, name: str, kind: str, bytes_per_s: int, width: int = 0, behind: int | None = None) -> int:
        """A link of the network, there `width` wide if that is given."""
        number = self.network.add_link(name, width or bytes_per_s, behind)
        self._same_link(name, bytes_per_s, number, kind)
        return number

    def _same_link(self, name: str, bytes_per_s: int, number: int, kind: str = "memory") -> None:
        """Also a part of a link of the network: what crosses one crosses the other."""
        self._numbers.append((number, self._record(name, kind, bytes_per_s)))

    def _lane(self, name: str, kind: str, bytes_per_s: int) -> Lane:
        return Lane(self._record(name, kind, bytes_per_s))

    def _record(self, name: str, kind: str, bytes_per_s: int) -> LinkRecord:
        self._records.append(LinkRecord(name, kind, bytes_per_s))
        return self._records[-1]

    def end(self, now: int) -> None:
        """Tells of all that has come by `now`."""
        for flow in self.network.finish(now):
            tag: Tag = flow.tag  # type: ignore[assignment]
            over, what = tag
            over(what, flow)

    def cancel(self, job: Job, now: int) -> None:
        """Stops all that is on its way for this job."""
        for flow in job.flows:
            self.network.cancel(flow, now)
        job.flows.clear()
        job.pending = job.loaded_ns = 0
        self._release_source(job)

    def records(self, now: int) -> list[LinkRecord]:
        for number, link in self._numbers:
            link.bytes_moved = self.network.bytes_moved(number, now)
            link.busy_ns = self.network.busy_ns(number, now)
        return self._records

    def check_idle(self) -> None:
        assert self.network.next_finish() is None, "a flow is left"
        for node in self._nodes:
            tiers = node.scheduler.tiers
            assert tiers is None or not tiers.num_pinned, "a block is still pinned"

    # To a prefill: from its node's own memory and disk.

    def load(self, job: Job, node: SimNode, num_tokens: int, now: int) -> None:
        """Its compute may end before that, but its first token waits for it."""
        size = num_tokens * node.cost.kv_token_bytes
        self.bytes_moved["load"] += size
        job.loaded_ns = node.links.load.take(size, now)

    def read_disk(self, job: Job, node: SimNode, now: int) -> None:
        """Brings what lies on the node's own disk into its memory while the request waits."""
        _, on_disk = _tiers(node).match(job.request.blocks)
        if on_disk:
            job.record.disk_tokens = on_disk * self._block_size
            self._await(job, "disk_read", (node.links.disk_read,), self._block_bytes(node, on_disk), now)

    def write_disk(self, node: SimNode, num_blocks: int, now: int) -> None:
        size = self._block_bytes(node, num_blocks)
        self.bytes_moved["disk_write"] += size
        node.links.disk_write.take(size, now)

    def _await(self, job: Job, purpose: str, path: tuple[int, ...], num_bytes: int, now: int) -> None:
        """Moves what the job's prefill waits for."""
        self.bytes_moved[purpose] += num_bytes
        over = self._fetch_ends if purpose == "fetch" else self._read_ends
        job.pending += 1
        job.flows.append(self.network.start(path, num_bytes, (over, job), now))

    def _read_ends(self, job: Job, flow: Flow) -> None:
        job.flows.remove(flow)
        job.pending -= 1
        self._listener.loaded(job)

    # Between caches.

    def fetch(self, job: Job, node: SimNode, source: SimNode, start: int, stop: int, now: int) -> bool:
        """Blocks `[start, stop)` from another node's cache; what it no longer has is computed. False: all of it."""
        tiers, names = _tiers(source), job.request.blocks
        found, on_disk = tiers.match(names)
        job.stop = stop = min(stop, found)
        if stop <= start:
            job.stop = 0
            return False
        tiers.pin(names[:stop])
        job.source_slot = source.slot
        num_tokens = min((stop - start) * self._block_size, job.request.num_tokens)
        job.record.fetched_tokens = num_tokens
        path = (source.links.net_out, *self._spine, node.links.net_in)
        if on_disk:
            path = (source.links.disk_read, *path)
        self._await(job, "fetch", path, int(num_tokens * node.cost.kv_token_bytes * job.fetch_kept), now)
        return True

    def _fetch_ends(self, job: Job, flow: Flow) -> None:
        self._release_source(job)
        job.record.fetch_ns = flow.finish_ns - flow.started_ns
        self._listener.fetched(job)
        self._read_ends(job, flow)

    def _release_source(self, job: Job) -> None:
        if job.source_slot >= 0:
            _tiers(self._nodes[job.source_slot]).unpin(job.request.blocks[: job.stop])
            job.source_slot = -1

    def replicate(self, source: SimNode, target: SimNode, names: tuple[BlockName, ...], now: int) -> None:
        """As much of a prefix as one node has and the other, which has a cache too, has not."""
        found, held = _tiers(source).match(names)[0], _tiers(target).match(names)[0]
        if found <= held:
            return
        copy = _Copy(source, target, names[:found])
        _tiers(source).pin(copy.names)
        size = self._block_bytes(source, found - held)
        self.bytes_moved["replicate"] += size
        path = (source.links.net_out, *self._spine, target.links.net_in)
        self.network.start(path, size, (self._copy_ends, copy), now)

    def _copy_ends(self, copy: _Copy, flow: Flow) -> None:
        _tiers(copy.source).unpin(copy.names)
        self._listener.copied(copy.target, copy.names)

    # From prefill to decode.

    def start_handover(self, job: Job, now: int) -> None:
        """All layers but the last stream while the prefill computes; after it, whatever was not sent."""
        cost = self._nodes[job.prefill_slot].cost
        size = int((job.request.num_tokens * cost.kv_token_bytes + cost.state_bytes) * job.kept)
        self.bytes_moved["handover"] += size
        computed = job.record.first_token_ns >= 0
        source, target = self._nodes[job.prefill_slot].links, self._nodes[job.target].links
        path = (
            *source.from_device, source.handover_out, *self._spine, target.handover_in, *target.to_device
        )  # fmt: skip
        first = size if computed else size - size // cost.num_layers
        job.handover = self.network.start(path, first, (self._handover_ends, job), now, quiet=not computed)
        job.flows.append(job.handover)

    def finish_handover(self, job: Job, now: int) -> None:
        """The prompt is computed: the last layer's KV follows."""
        cost = self._nodes[job.prefill_slot].cost
        size = int((job.request.num_tokens * cost.kv_token_bytes + cost.state_bytes) * job.kept)
        last = size // cost.num_layers
        assert job.handover is not None
        self.network.grow(job.handover, last, now)

    def _handover_ends(self, job: Job, flow: Flow) -> None:
        job.flows.remove(flow)
        job.handover = None
        self._listener.landed(job)

    def _block_bytes(self, node: SimNode, num_blocks: int) -> int:
        return num_blocks * self._block_size * node.cost.kv_token_bytes


def _tiers(node: SimNode) -> TierCache:
    assert node.scheduler.tiers is not None, "only a node with a cache is loaded or fetched from"
    return node.scheduler.tiers
