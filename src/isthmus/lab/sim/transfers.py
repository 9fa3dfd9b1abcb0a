"""KV on its way: which links it crosses, how much it is, and which node is told when it has come.

What a node's actions say is done here, as flows and clock times. A recurrent state goes with every prefix that is
loaded or fetched for a prefill, and whole at the end of every hand-over: it is final only when the last token is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from isthmus.core.conductor import LinkState
from isthmus.core.cost.transfer import NONE, CodecSpeed, after_ns
from isthmus.core.node import events
from isthmus.core.scheduler import Saved
from isthmus.core.types import NS_PER_S, BlockName, NodeId, RequestId
from isthmus.lab.sim.clock import TRANSFER_ENDS, Call, Clock
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.disks import Disks
from isthmus.lab.sim.links import SimulatedLink, Wiring
from isthmus.lab.sim.network import Flow
from isthmus.lab.sim.node import Attending, SimNode
from isthmus.lab.sim.records import SimJob
from isthmus.lab.sim.sessions import SimulatedSessions

PURPOSES = ("handover", "recall", "fetch", "load", "disk_read", "disk_write", "shipment", "queries")

Reads = dict[RequestId, tuple[SimNode, Flow]]
"""By attempt: which node reads."""

Due = list[tuple[SimNode | None, Any]]
"""What nodes are told as soon as the present event is done, or the conductor (no node); None in place of an event: to
look again at what the node's run waits for."""


class _Leg(NamedTuple):
    """Of hand-overs from one node to another."""

    source: SimNode
    target: SimNode
    path: tuple[int, ...]
    link: SimulatedLink | None


class _Handover:
    """An attempt's KV on its way to where it decodes. `rest`: bytes that follow when all is computed; `kv`: bytes
    before they were encoded; it began at `since_ns`."""

    __slots__ = ("flow", "job", "key", "kv", "leg", "rest", "since_ns")

    flow: Flow

    def __init__(self, key: RequestId, job: SimJob, leg: _Leg, rest: int, kv: int, since_ns: int) -> None:
        self.key, self.job, self.leg, self.rest = key, job, leg, rest
        self.kv, self.since_ns = kv, since_ns

    @property
    def ends(self) -> tuple[SimNode, SimNode]:
        return self.leg.source, self.leg.target


class _Transfer:
    """Blocks `[start, stop)` on their way from one node's cache to another's. `until_ns`: when all that was to be
    loaded beside them is. `is_prompts`: a prefill waits for it, whose load counts on `counted_on` tokens. Donors'
    blocks are nobody's: they come before their prompt queues."""

    __slots__ = (
        "asked",
        "counted_on",
        "flow",
        "is_prompts",
        "job",
        "kv",
        "source",
        "stop",
        "target",
        "until_ns",
    )

    def __init__(self, asked: events.Fetch, source: SimNode, target: SimNode, job: SimJob | None) -> None:
        self.asked, self.source, self.target, self.job = asked, source, target, job
        self.flow: Flow | None = None
        self.stop = self.kv = self.counted_on = 0
        self.until_ns = -1
        self.is_prompts = job is not None and job.prefill_slot == target.slot

    @property
    def ends(self) -> tuple[SimNode, SimNode]:
        return self.source, self.target

    @property
    def purpose(self) -> str:
        return "fetch" if self.is_prompts or self.job is None else "recall"


class KVTransfers:
    """What moves on the links. `bytes_moved` by purpose. `attempts`: by key; `due`: where what has come is told."""

    def __init__(
        self,
        deployment: Deployment,
        clock: Clock,
        nodes: Sequence[SimNode],
        attempts: dict[RequestId, SimJob],
        due: Due,
    ) -> None:
        self.wiring = Wiring(deployment)
        self.network = self.wiring.network
        self.bytes_moved = dict.fromkeys(PURPOSES, 0)
        self._clock, self._attempts, self._due = clock, attempts, due
        self._block_size, self._link_ns = deployment.block_size, deployment.link_ns
        self._named: dict[NodeId, SimNode] = {}
        for node in nodes:
            node.links = self.wiring.connect(node.facts)
            self._named[node.facts.node] = node
        attending = Attending(self._named, self.wiring, self.bytes_moved)
        for node in nodes:
            node.attending = attending
        self._nodes = nodes
        self._state_blocks = nodes[0].facts.state_blocks if nodes else 0
        self._legs: dict[tuple[int, int], _Leg] = {}
        self._handovers: dict[RequestId, _Handover] = {}
        self._reads: Reads = {}
        self._donor_reads: Reads = {}
        """What is read for a prompt that waits, and of its donors for one that is loaded."""
        self._fetches: dict[tuple[RequestId, int], _Transfer] = {}
        self._recalled: dict[RequestId, tuple[Sequence[BlockName], int]] = {}
        """What a decode node has itself, and how much it has now that the rest was fetched, before its load."""
        self._shipments: dict[RequestId, dict[tuple[int, int], Flow]] = {}
        """By attempt and the nodes that they go from and to."""
        self._returns: dict[RequestId, SimNode] = {}
        """To which home something comes back."""
        self.sessions = SimulatedSessions(deployment.faults, clock, self.cut_off)
        self.disks = Disks(deployment.faults)
        self._measured = [(0, 0)] * len(self.wiring.between)  # bytes and time of each link so far
        self.handlers: dict[type, Callable[[SimNode, Any], None]] = {
            events.SendLetter: self._tell,
            events.LoadBlocks: self._load,
            events.Read: self._read,
            events.SaveBlocks: self._save,
            events.Fetch: self._fetch,
            events.EndFetch: self._end_fetch,
            events.Give: self._give,
            events.OfferHandover: self._offer,
            events.SendHandover: self._send,
            events.FinishHandover: self._finish,
            events.Ship: self._ship,
            events.Reclaim: self._reclaim,
            events.ReleaseResources: self._release,
        }
        if self.disks.are_at_risk:
            self.handlers |= {events.Demote: self._demote, events.Promote: self._promote}

    def _count(self, purpose: str, source: SimNode, target: SimNode, key: RequestId, num_bytes: int) -> None:
        """So much begins to move between two nodes, for an attempt or a fetch of its donors."""
        self.bytes_moved[purpose] += num_bytes

    def end(self, now: int) -> None:
        """What has come by now."""
        for flow in self.network.finish(now):
            tag: Any = flow.tag
            flow.tag = None  # a flow and what it moves know each other, and the collector of cycles is off
            tag[0](tag[1])

    def check_idle(self) -> None:
        assert self.network.next_finish() is None, "a flow is left"
        assert not self._fetches and not self._handovers, "a transfer is left"
        assert not self._reads and not self._donor_reads, "a read is left"
        assert not self._recalled, "what was recalled was never loaded"
        assert not self._shipments and not self._returns, "KV is on its way to a holder, or back"

    # From a node's own memory and disk, and to them.

    def _load(self, node: SimNode, load: events.LoadBlocks) -> None:
        """A run's compute may end before that, but its first token waits for it."""
        job, now = self._attempts.get(load.key), self._clock.now
        if job is None:
            return
        size = load.num_tokens * node.cost.kv_token_bytes + (0 if load.told else node.cost.state_bytes)
        donated = _donated(load, job, self._block_size)
        if donated:
            size += self._bytes(node, donated)
            self._read_donors(node, job, donated)
        self.bytes_moved["load"] += size
        serial = node.links.load or self.wiring.load_link(node.links, node.facts)
        ends = serial.take(size, now)
        transfer = self._fetches.get((load.key, node.slot))
        if not load.told:
            job.loaded_ns, names = ends, load.names
            if load.arriving and transfer is not None:
                transfer.counted_on, names = load.num_tokens, names[: transfer.asked.start] + donated
            self.disks.load(node, load.key, names)
        elif transfer is not None:
            transfer.until_ns = ends
        else:
            own, found = self._recalled.pop(load.key, (load.names, len(load.names)))
            self._clock.call(ends, TRANSFER_ENDS, partial(self._recall_loaded, node, load.key, own, found))

    def _recall_loaded(self, node: SimNode, key: RequestId, own: Sequence[BlockName], found: int) -> None:
        """`own`: what of the `found` blocks its tiers give. A node that does not know the attempt any more makes
        nothing of it."""
        job, lost = self._attempts.get(key), self.disks.missing(node, own)
        if job is not None:
            self._is_there(job, self._clock.now)
        self._lose(node, lost)
        self._due.append((node, events.Loaded(key, len(own) - len(lost) if lost else found)))

    def missed(self, node: SimNode, key: RequestId) -> None:
        """The run that needed it has broken off, and its node hears why."""
        self._lose(node, self.disks.missed(node, key))

    def _lose(self, node: SimNode, names: Sequence[BlockName]) -> None:
        """As the node finds out, one after the other."""
        self._due += [(node, events.BlocksLost((name,))) for name in names]

    def _read(self, node: SimNode, read: events.Read) -> None:
        """Brings what lies on the node's disk into its memory while the request waits."""
        lost = self.disks.read(node, read.key, read.names)
        if lost:
            self._lose(node, lost)
            return
        job = self._attempts[read.key]
        job.record.disk_tokens = len(read.names) * self._block_size
        self._begin_read(node, job, read.names, self._reads)

    def _begin_read(self, node: SimNode, job: SimJob, names: Sequence[BlockName], reads: Reads) -> None:
        size = self._bytes(node, names)
        self.bytes_moved["disk_read"] += size
        tag = self._read_ends, (job.key, node, reads)
        reads[job.key] = node, self.network.start((node.links.disk_read,), size, tag, self._clock.now)

    def _read_ends(self, what: tuple[RequestId, SimNode, Reads]) -> None:
        key, node, reads = what
        del reads[key]
        if key in self._attempts:
            self._due.append((node, None))

    def _stop_reads(self, node: SimNode, key: RequestId) -> None:
        for reads in (self._reads, self._donor_reads):
            if key in reads and reads[key][0] is node:
                self.network.cancel(reads.pop(key)[1], self._clock.now)

    def _read_donors(self, node: SimNode, job: SimJob, names: Sequence[BlockName]) -> None:
        """What of donors lies on the disk alone is read when it is loaded; once, if the prompt is pre-empted."""
        tiers = node.decider.tiers
        on_disk = [name for name in names if name not in tiers.dram.held] if tiers is not None else []
        if on_disk and job.key not in self._donor_reads and not self.disks.fails(node):
            self._begin_read(node, job, on_disk, self._donor_reads)

    def _bytes(self, node: SimNode, names: Sequence[BlockName]) -> int:
        return len(names) * self._block_size * node.cost.kv_token_bytes

    def awaits(self, job: SimJob) -> bool:
        """Whether anything that its prefill needs is still read or fetched."""
        key = job.key
        return key in self._reads or key in self._donor_reads or (key, job.prefill_slot) in self._fetches

    def _save(self, node: SimNode, save: events.SaveBlocks) -> None:
        if self.disks.are_at_risk:
            self.disks.settled(node, save.names)
        if node.facts.ssd_blocks:
            self._write(node, save.names)
            if save.num_sunk and self.disks.fails(node):
                self._due.append((node, events.BlocksLost(save.names[-save.num_sunk :])))
        self._due.append((node, Saved(save.request)))

    def _write(self, node: SimNode, names: Sequence[BlockName]) -> None:
        """What is in DRAM is written behind."""
        if self.disks.fails(node):
            self.disks.unwritten[node.slot].update(names)
            return
        size = self._bytes(node, names)
        self.bytes_moved["disk_write"] += size
        node.links.disk_write.take(size, self._clock.now)

    def _demote(self, node: SimNode, demote: events.Demote) -> None:
        self.disks.settled(node, demote.names)
        unwritten = self.disks.unwritten.get(node.slot, ())
        lost = tuple([name for name in demote.names if name in unwritten])
        if lost:
            self._due.append((node, events.BlocksLost(lost)))

    def _promote(self, node: SimNode, promote: events.Promote) -> None:
        self._lose(node, self.disks.unreadable(node, promote.names))
        self.disks.settled(node, promote.names)

    # Between caches.

    def _fetch(self, node: SimNode, fetch: events.Fetch) -> None:
        source, key = self._named[fetch.source], fetch.key
        transfer = _Transfer(fetch, source, node, self._attempts.get(key))
        self._fetches[key, node.slot] = transfer

    def _give(self, node: SimNode, give: events.Give) -> None:
        key, target = give.key, self._named[give.peer]
        transfer = self._fetches.get((key, target.slot))
        if transfer is None:
            return  # it has ended, and says so
        stop = give.stop
        if give.on_disk and self.disks.fails(node):
            stop -= give.on_disk
            self._due.append((node, events.BlocksLost((give.names[stop],))))
        if stop <= give.start:
            self.sessions.carry(node, target, partial(self._nothing_came, transfer))
            return
        transfer.stop, purpose = stop, transfer.purpose
        size = self._given_bytes(transfer)
        self._count(purpose, node, target, key, size)
        path = (node.links.net_out, *self.wiring.trunk(node.facts, target.facts), target.links.net_in)
        if stop == give.stop and give.on_disk:
            path = (node.links.disk_read, *path)
        transfer.flow = self.network.start(path, size, (self._given, transfer), self._clock.now)
        link = self.wiring.link_between(node.facts, target.facts)
        if link is not None:
            self._watch(link, transfer)

    def _given_bytes(self, transfer: _Transfer) -> int:
        asked, node, size = transfer.asked, transfer.target, self._block_size
        whole = self._state_blocks if asked.whole else 0
        tokens = (transfer.stop - whole - asked.start) * size
        if transfer.is_prompts and transfer.job is not None:
            tokens = min(tokens, transfer.job.length)
            transfer.job.record.fetched_tokens = tokens
        transfer.kv, speed = tokens * node.cost.kv_token_bytes, self._speed(node, asked.codec)
        sent = transfer.kv if speed is None else int(transfer.kv * speed.kept)
        return sent + (node.cost.state_bytes if whole else 0)

    def _speed(self, node: SimNode, codec: str) -> CodecSpeed | None:
        """Of a codec on a node; None where nothing is encoded."""
        if codec == NONE:
            return None
        return node.cost.handling.speeds(node.facts.kv_dtype, self._block_size)[codec]

    def _given(self, transfer: _Transfer) -> None:
        source, target, flow = transfer.source, transfer.target, transfer.flow
        assert flow is not None
        link = self.wiring.link_between(source.facts, target.facts)
        after = self._after_ns(source, target, transfer.kv, transfer.asked.codec, flow.started_ns)
        self._arrive(source, target, partial(self._given_came, transfer), link, after)

    def _after_ns(self, source: SimNode, target: SimNode, kv: int, codec: str, since_ns: int) -> int:
        """So long after its last byte has left KV can be used, the first of which left at `since_ns`."""
        speed, took_ns = self._speed(source, codec), self._clock.now - since_ns
        ends = source.cost.handling, target.cost.handling
        return after_ns(kv, source.cost.num_layers, took_ns, speed, *ends)

    def _nothing_came(self, transfer: _Transfer) -> None:
        if self._fetches.get((transfer.asked.key, transfer.target.slot)) is transfer:
            self._fetch_over(transfer, transfer.asked.start)

    def _given_came(self, transfer: _Transfer) -> None:
        key, target, flow = transfer.asked.key, transfer.target, transfer.flow
        if self._fetches.get((key, target.slot)) is not transfer:
            return
        assert flow is not None
        if transfer.is_prompts and transfer.job is not None:
            transfer.job.record.fetch_ns = flow.finish_ns - flow.started_ns
        if target.facts.ssd_blocks:
            self._write(target, transfer.asked.names[transfer.asked.start : transfer.stop])
        self._fetch_over(transfer, transfer.stop)

    def _fetch_over(self, transfer: _Transfer, stop: int) -> None:
        """So much is there, and no more will come."""
        asked, target, job = transfer.asked, transfer.target, transfer.job
        key = asked.key
        del self._fetches[key, target.slot]
        self._due.append((target, events.BlocksFetched(key, stop)))
        if job is None or self._attempts.get(key) is not job:
            return
        if transfer.is_prompts:
            if stop * self._block_size < transfer.counted_on:
                target.missing[key] = stop
            self._due.append((target, None))
        elif transfer.until_ns >= 0:
            loaded = partial(self._recall_loaded, target, key, asked.names[: asked.start], stop)
            self._clock.call(max(transfer.until_ns, self._clock.now), TRANSFER_ENDS, loaded)
        else:
            self._recalled[key] = asked.names[: asked.start], stop

    def _end_fetch(self, node: SimNode, end: events.EndFetch) -> None:
        transfer = self._fetches.get((end.key, node.slot))
        if transfer is not None:
            self._break_off(transfer)

    def _break_off(self, transfer: _Transfer) -> None:
        """Of what is under way nothing is whole."""
        if transfer.flow is not None and transfer.flow.live:
            self.network.cancel(transfer.flow, self._clock.now)
        self._fetch_over(transfer, transfer.asked.start)

    # From prefill to decode.

    def _offer(self, node: SimNode, offer: events.OfferHandover) -> None:
        """A session with the decode node is opened, if there is none."""
        if not self._reaches(node, self._named[offer.peer]):
            self._due.append((node, events.Gone(offer.peer, "it cannot be reached")))

    def _send(self, node: SimNode, send: events.SendHandover) -> None:
        """All layers but the last stream while the prefill computes; after it, whatever was not sent."""
        key, extent = send.key, send.extent
        job = self._attempts.get(key)
        target = self._named[send.peer]
        if job is None or not self._reaches(node, target):
            return
        computed, speed = (
            (extent.num_tokens - extent.start) * node.cost.kv_token_bytes,
            self._speed(node, extent.codec),
        )
        kv = computed if speed is None else int(computed * speed.kept)
        size = kv + node.cost.state_bytes
        self._count("handover", node, target, key, size)
        rest = 0 if send.computed else kv // node.cost.num_layers + node.cost.state_bytes
        leg = self._legs.get((node.slot, target.slot)) or self._leg(node, target)
        handover = self._handovers[key] = _Handover(key, job, leg, rest, computed, self._clock.now)
        tag = self._handed_over, handover
        handover.flow = self.network.start(leg.path, size - rest, tag, self._clock.now, quiet=not send.computed)
        if leg.link is not None:
            self._watch(leg.link, handover)

    def _finish(self, node: SimNode, finish: events.FinishHandover) -> None:
        """The prompt is computed: the last layer's KV follows, and the recurrent state."""
        handover = self._handovers.get(finish.key)
        if handover is None:
            return
        self.network.grow(handover.flow, handover.rest, self._clock.now)
        if handover.leg.link is not None:
            self._watch(handover.leg.link, handover)

    def _leg(self, source: SimNode, target: SimNode) -> _Leg:
        """From a prefill node's device to a decode node's. Roles change nothing about it."""
        path = (
            *source.links.from_device, source.links.handover_out,
            *self.wiring.trunk(source.facts, target.facts),
            target.links.handover_in, *target.links.to_device,
        )  # fmt: skip
        leg = _Leg(source, target, path, self.wiring.link_between(source.facts, target.facts))
        self._legs[source.slot, target.slot] = leg
        return leg

    def _handed_over(self, handover: _Handover) -> None:
        leg = handover.leg
        del self._handovers[handover.key]
        kv, codec = handover.kv, handover.job.route.codec
        after = self._after_ns(leg.source, leg.target, kv, codec, handover.since_ns)
        latency = leg.link.latency_ns if leg.link is not None else 0
        self._is_there(handover.job, self._clock.now + latency + after)
        self._say(leg.source, leg.target, events.HandoverComplete(handover.key), leg.link, after)

    @staticmethod
    def _is_there(job: SimJob, now: int) -> None:
        """Some of what a decode node waits for."""
        if job.record.joined_ns < 0:
            job.record.landed_ns = max(job.record.landed_ns, now)

    def _release(self, node: SimNode, release: events.ReleaseResources) -> None:
        key = release.key
        handover = self._handovers.get(key)
        if handover is not None and (handover.leg.source is node or handover.leg.target is node):
            self._stop_handover(handover)
        if self._fetches or self._recalled:
            transfer = self._fetches.get((key, node.slot))
            if transfer is not None:
                self._break_off(transfer)
            self._recalled.pop(key, None)
        if key in self._shipments or key in self._returns:
            self._stop_shipments(node, key)
        if self.disks.are_at_risk:
            self.disks.over(node, key)
        if key in self._reads or key in self._donor_reads:
            self._stop_reads(node, key)

    def _stop_handover(self, handover: _Handover) -> None:
        del self._handovers[handover.key]
        self.network.cancel(handover.flow, self._clock.now)

    # To holders, and back.

    def _ship(self, source: SimNode, ship: events.Ship) -> None:
        target, key = self._named[ship.peer], ship.key
        if not self._reaches(source, target):
            return
        if self._returns.get(key) is not target and target.decider.num_stowed(key) > ship.first:
            self._due.append((target, events.ShipmentStored(key, source.facts.node, ship.first)))
        size = len(ship.blocks) * self._block_size * source.cost.kv_token_bytes // ship.share.parts
        self._count("shipment", source, target, key, size)
        path = (source.links.net_out, *self.wiring.trunk(source.facts, target.facts), target.links.net_in)
        flow = self.network.start(path, size, (self._shipped, (source, target, ship)), self._clock.now)
        self._shipments.setdefault(key, {})[source.slot, target.slot] = flow

    def _shipped(self, what: tuple[SimNode, SimNode, events.Ship]) -> None:
        source, target, ship = what
        key, flows = ship.key, self._shipments[ship.key]
        del flows[source.slot, target.slot]
        if not flows:
            del self._shipments[key]
        if self._returns.get(key) is target:
            del self._returns[key]
            self._due.append((target, events.Reclaimed(key, whole=True)))
        else:
            stowed = events.ShipmentStored(key, source.facts.node, ship.first + len(ship.blocks))
            self._due.append((target, stowed))

    def _reclaim(self, node: SimNode, reclaim: events.Reclaim) -> None:
        self._returns[reclaim.key] = node

    def _stop_shipments(self, node: SimNode, key: RequestId) -> None:
        """Nothing more is read from the attempt's blocks here, or written to those of what comes back."""
        self._cancel_shipments(key, lambda source, target: source == node.slot)
        if self._returns.get(key) is node:
            self._cancel_shipments(key, lambda source, target: target == node.slot)
            del self._returns[key]
            self._due.append((node, events.Reclaimed(key, whole=False)))

    def _cancel_shipments(self, key: RequestId, concerns: Callable[[int, int], bool]) -> None:
        flows = self._shipments.get(key, {})
        for way in [way for way in flows if concerns(*way)]:
            self.network.cancel(flows.pop(way), self._clock.now)
        if not flows:
            self._shipments.pop(key, None)

    # What nodes say to each other.

    def _reaches(self, source: SimNode, target: SimNode) -> bool:
        return target.alive and not self.sessions.are_cut(source, target)

    def _tell(self, node: SimNode, tell: events.SendLetter) -> None:
        target = self._named[tell.peer]
        if self._reaches(node, target):
            self._say(node, target, events.LetterReceived(node.facts.node, tell.letter))
        else:
            self._due.append((node, events.Gone(tell.peer, "it cannot be reached")))

    def _say(
        self,
        source: SimNode,
        target: SimNode,
        event: events.Event,
        link: SimulatedLink | None = None,
        after_ns: int = 0,
    ) -> None:
        """`link`: what this is about has just left over it; `after_ns`: until it can be used there."""
        if link is None and not after_ns and not self.sessions.are_at_risk:
            self._due.append((target, event))
        else:
            self._arrive(source, target, partial(self._due.append, (target, event)), link, after_ns)

    def _arrive(
        self, source: SimNode, target: SimNode, heard: Call, link: SimulatedLink | None, after_ns: int
    ) -> None:
        """The last byte has left; it is there after the link's latency, and of use so much later."""
        delay_ns = after_ns + (link.latency_ns if link is not None else 0)
        if not delay_ns:
            self.sessions.carry(source, target, heard)
        else:
            carry = partial(self.sessions.carry, source, target, heard)
            self._clock.call(self._clock.now + delay_ns, TRANSFER_ENDS, carry)

    # What goes wrong.

    def cut_off(self, one: SimNode, other: SimNode, reason: str = "cut") -> None:
        """The sessions of two nodes end, and what was on its way over them."""
        self._stop_between(lambda source, target: {source, target} == {one.slot, other.slot})
        self._gone(one, other, reason)
        self._gone(other, one, reason)

    def _gone(self, node: SimNode, peer: SimNode, reason: str) -> None:
        """A run that asks the peer for attention ends with that."""
        self._due.append((node, events.Gone(peer.facts.node, reason)))
        node.lose_holder(peer.facts.node)
        if node.is_broken:
            self._due.append((node, None))

    def _stop_between(self, concerns: Callable[[int, int], bool]) -> None:
        """Of fetches, who fetches is told to end them."""
        for handover in list(self._handovers.values()):
            if concerns(handover.leg.source.slot, handover.leg.target.slot):
                self._stop_handover(handover)
        for key in list(self._shipments):
            self._cancel_shipments(key, concerns)

    def lose(self, node: SimNode) -> None:
        """The node is gone, and with it what was on its way from and to it."""
        self._stop_between(lambda source, target: node.slot in (source, target))
        for transfer in [each for each in self._fetches.values() if each.target is node]:
            self._break_off(transfer)
        for key in [key for key, home in self._returns.items() if home is node]:
            del self._returns[key]
        for key in [*self._reads, *self._donor_reads]:
            self._stop_reads(node, key)
        for other in self._nodes:
            if other.alive and other is not node:
                self._gone(other, node, "it died")

    def change_links(self, factor_of: Callable[[frozenset[str]], float], now: int) -> None:
        """Gives each link between clusters so much of its rate from now on."""
        for link in self.wiring.between:
            factor = factor_of(link.ends)
            if factor == link.factor:
                continue
            self.wiring.set_factor(link, factor, now)
            for flow in self.wiring.flows_on(link) if not factor else ():
                tag: Any = flow.tag
                self._watch(link, tag[1])

    def _watch(self, link: SimulatedLink, what: _Handover | _Transfer) -> None:
        """Where a link is down, what is to cross it may stand still for so long and no longer."""
        if not link.factor:
            call = partial(self._stalled, link, link.since_ns, what)
            self._clock.call(self._clock.now + self._link_ns, TRANSFER_ENDS, call)

    def _stalled(self, link: SimulatedLink, since: int, what: _Handover | _Transfer) -> None:
        """As a live node ends a session that stands still."""
        flow = what.flow
        is_over = link.since_ns != since or flow is None or not flow.live
        if flow is None or is_over or not self.network.bytes_left(flow, self._clock.now):
            return
        source, target = what.ends
        self.cut_off(source, target, f"nothing crossed {link.record.name} for {self._link_ns / NS_PER_S:g} s")

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
        left = self.network.bytes_left(flow, now)
        if not flow.quiet:
            return left
        tag: Any = flow.tag
        sent = flow.num_bytes - left
        computed = min(1.0, (now - flow.started_ns) / max(1, tag[1].job.route.work_ns))
        return max(0, int(flow.num_bytes * computed) - sent)


def _call(there: Call) -> None:
    there()


def _donated(load: events.LoadBlocks, job: SimJob, block_size: int) -> tuple[BlockName, ...]:
    """What a load brings of donors, behind what is cached of the prompt. Models with states have no donors."""
    return load.names[-(-load.num_tokens // block_size) :] if job.route.assembly is not None else ()
