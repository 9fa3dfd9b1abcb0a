"""Controllers beside placement: codecs of transfers, roles of nodes, and the offload threshold by the links' state."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from isthmus.core.attempts import Convert, FetchOrder
from isthmus.core.conductor.capacity import Capacity
from isthmus.core.conductor.copies import ClusterLink
from isthmus.core.conductor.events import LinksMeasured, LinkState, Rules, ThresholdSet
from isthmus.core.conductor.routing import Router
from isthmus.core.conductor.view import DECODING, Cluster, NodeView, Placement, RequestView, View
from isthmus.core.cost.transfer import INT8, NONE, Transfer, choose_codec
from isthmus.core.types import NS_PER_S, Role


def encoded(
    rules: Rules, request: RequestView, placement: Placement, kv_bytes: int, now: int
) -> tuple[FetchOrder | None, str]:
    """The fetch of a placement with its codec, and the codec of its hand-over of `kv_bytes` (a recurrent state is never
    encoded). `cost.transfer` says by which codec KV arrives first; the rates are those that the links have left."""
    prefill, decode, fetch = placement.prefill, placement.decode, placement.fetch
    if fetch is not None and placement.source is not None:
        rate = _rate(placement.source, prefill, placement.across, now)
        # A fetch begins at once, and has until the uncached tokens are computed.
        computing = prefill.prefill_ns(request.arrived.num_tokens, placement.cached)
        waiting = placement.ttft_ns - placement.work_ns
        codecs = rules.codecs
        if prefill.state_blocks:  # int8 would not fit the bytes of the recurrent state in the fetch
            codecs = tuple([name for name in codecs if name != INT8])
        codec = _choose(codecs, prefill, placement.fetch_bytes, rate, waiting + computing)
        fetch = replace(fetch, codec=codec)
    if decode is prefill:
        return fetch, NONE
    computing, link, rails = placement.work_ns, request.across, (prefill.paths, decode.paths)
    if link is not None:
        # Hand-overs cross the link in turn: the bytes owed to others take a part of the time that computing hides.
        rates = [each for paths in rails if (each := paths.handover or paths.network)]
        rate = min([link.bytes_per_s, *rates])
        computing = max(0, computing - int((link.owed - request.owed) * NS_PER_S / link.bytes_per_s))
    elif all(paths.handover for paths in rails):
        rate = min(paths.handover for paths in rails)
    else:
        rate = _rate(prefill, decode, None, now)
    return fetch, _choose(rules.codecs, prefill, kv_bytes, rate, computing)


def _rate(source: NodeView, target: NodeView, across: ClusterLink | None, now: int) -> float:
    """Bytes per second that other copies leave of the links between two caches; 0 if not known."""
    rate = min(source.paths.network, target.paths.network)
    if not rate:
        return 0.0
    left = rate / (source.link_out.stretch(now) * target.link_in.stretch(now))
    return left if across is None else min(left, across.bytes_per_s / across.stretch(now))


def _choose(codecs: Sequence[str], node: NodeView, num_bytes: int, rate: float, compute_ns: int) -> str:
    if not node.kv_dtype or rate <= 0:
        return NONE
    transfer = Transfer(num_bytes, node.cost.num_layers, rate, compute_ns)
    return choose_codec(transfer, codecs, node.cost.handling.speeds(node.kv_dtype, node.block_size))


# Long-term control: nodes of a cluster change between prefill and decode, one at a time, to restore equations (7) and
# (8) of Prefill-as-a-Service (arXiv 2604.15039). A node is converted when
#
# 1. its new stage is *pressed*: over about `WINDOW_NS` its nodes were busy for a share `PRESSED` of the time (prefill),
#    or filled to that share of the largest batch (decode);
# 2. by equation (6), with measured times, rates and lengths and a new threshold, the deployment then serves more
#    requests by a factor `GAIN`. The same gain is needed to convert it back, so splits do not alternate;
# 3. another node of its role, no smaller, stays, and `cool_down_s` have passed since the last conversion.
#
# The node drains first: it gets no new work, and is converted when no request needs it.


WINDOW_NS = 30 * NS_PER_S
PAUSE_NS = 5 * NS_PER_S
"""Between two evaluations of a conversion, which take milliseconds."""
PRESSED = 0.8
GAIN = 1.1
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class Conversion:
    """Converts nodes; at most one drains, or was asked to convert, at a time."""

    def __init__(self, view: View, rules: Rules, capacity: Capacity) -> None:
        self._view, self._rules, self._capacity = view, rules, capacity
        self._node: NodeView | None = None
        self._asked = False
        self._rest_until, self._measured_ns = 0, -1
        self._pressure: dict[tuple[Cluster, Role], float] = {}

    def measured(self, now: int) -> list[Convert]:
        """Called with every `LinksMeasured`. Returns the order to a node that has drained."""
        if not self._rules.convert:
            return []
        self._sample(now)
        if self._node is None and now >= self._rest_until and self._capacity.knows_lengths:
            self._begin(self._choose())
            self._rest_until = max(self._rest_until, now + PAUSE_NS)
        return self._ask()

    def role_changed(self, node: NodeView, now: int) -> None:
        """Ends a conversion. The node turns back if it was the last of its old role; one that is to leave drains on."""
        if node is not self._node:
            return
        node.draining = False
        self._view.sort_roles()
        self._end(now)
        if not self._others(node, OTHER[node.role]) and self._others(node, node.role):
            self._begin(node)

    def left(self, node: NodeView, now: int) -> None:
        """Ends the conversion of a node that left or is to leave; and of one that drains, if no other node of its role,
        no smaller, is left."""
        drained = self._node
        if drained is node:
            self._end(now)
        elif drained is not None and not self._asked and not self._others(drained, drained.role, drained):
            drained.draining = False
            self._view.sort_roles()
            self._end(now)

    def check(self) -> None:
        assert self._node is None or self._node.draining

    def _sample(self, now: int) -> None:
        passed_ns = now - self._measured_ns if self._measured_ns >= 0 else self._rules.period_ns
        self._measured_ns = now
        weight = min(1.0, passed_ns / WINDOW_NS)
        for cluster in self._view.clusters.values():
            busy = [bool(node.prefills) for node in cluster.senders]
            shares = {Role.PREFILL: sum(busy) / len(busy) if busy else 0.0}
            if self._capacity.knows_lengths:
                shares[Role.DECODE] = self._filled(cluster.decodes)
            for role, share in shares.items():
                before = self._pressure.get((cluster, role), 0.0)
                self._pressure[cluster, role] = before + (share - before) * weight

    def _filled(self, nodes: list[NodeView]) -> float:
        """Decoding requests as a share of the largest batches; above 1 where requests wait for a place."""
        batches = sum(self._capacity.largest_batch(node) for node in nodes)
        there = sum(request.state is DECODING for node in nodes for request in node.decodes.values())
        return there / batches if batches else 0.0

    def _choose(self) -> NodeView | None:
        """The node to convert, if any: the least loaded of its role in the first cluster where that helps."""
        for cluster in self._view.clusters.values():
            for role in (Role.DECODE, Role.PREFILL):  # the role that is short of nodes
                if self._pressure.get((cluster, role), 0.0) >= PRESSED:
                    node = self._spare(cluster, OTHER[role])
                    if node is not None and self._helps(cluster, role):
                        return node
        return None

    def _helps(self, cluster: Cluster, role: Role) -> bool:
        num_prefill = len(cluster.senders)
        if not num_prefill or not cluster.decodes:
            return False
        then = num_prefill + (1 if role is Role.PREFILL else -1)
        return self._capacity.rate(cluster, then) >= GAIN * self._capacity.rate(cluster, num_prefill)

    def _spare(self, cluster: Cluster, role: Role) -> NodeView | None:
        """The node of a role that drains soonest, if another one, no smaller, stays."""
        nodes = cluster.decodes if role is Role.DECODE else cluster.senders
        for node in sorted(nodes, key=lambda node: (node.batch, node.work_ns)):
            if any(other.capacity_tokens >= node.capacity_tokens for other in nodes if other is not node):
                return node
        return None

    def _others(self, node: NodeView, role: Role, least: NodeView | None = None) -> bool:
        """Whether another node of the cluster has this role, is no smaller than `least`, and stays."""
        return any(
            other.cluster is node.cluster and other.role is role and other is not node and not other.draining
            for other in self._view.nodes.values()
            if least is None or other.capacity_tokens >= least.capacity_tokens
        )

    def _begin(self, node: NodeView | None) -> None:
        if node is not None:
            node.draining, self._node, self._asked = True, node, False
            self._view.sort_roles()

    def _ask(self) -> list[Convert]:
        node = self._node
        if node is None or self._asked or not self._view.is_idle(node):
            return []
        self._asked = True
        return [Convert(node.node, OTHER[node.role])]

    def _end(self, now: int) -> None:
        self._node, self._asked = None, False
        self._rest_until = now + int(self._rules.cool_down_s * NS_PER_S)
        self._pressure.clear()


# Short-term control of offloading: the threshold follows recent lengths and the state of the links. Each
# `LinksMeasured` updates, in this order:
#
# 1. Links. A link that is down is not used. After its return it is trusted once it was up for `RETURN_NS`, twice as
#    long after each further fall up to `LONGEST_RETURN_NS`; an untrusted link serves only requests that nothing else
#    can. `FORGIVEN_NS` without a fall resets the wait. The measured rate is bytes sent over busy time. A higher rate is
#    believed at once; a lower one, by half of the difference a report, only if bytes waited all the time, since
#    otherwise the sender was slow. After `QUIET_NS` without congestion the believed rate grows by `GROWTH` a second; if
#    it then falls again, the next wait is twice as long, up to `LONGEST_QUIET_NS`.
# 2. Threshold. Fixed, or solved for the latest prompts, the nodes and the lasting link rates, every `SOLVE_NS` and when
#    nodes or rates changed. A fixed one is raised to the solved one while links carry less than they should. Until
#    enough prompts were seen it is 0, and the guard in `routing` decides alone. The lasting rate follows a lower rate
#    in about `LASTING_NS` and a higher one at once: a short drop is left to the guard, which counts bytes owed to the
#    link, and a return brings the threshold back. Too high a threshold costs more than too low a one (by a fifth: a
#    quarter of the requests against a twentieth).
# 3. Cache mode, if `auto`: bandwidth is abundant while links are used less than `IDLE_SHARE`, scarce from `BUSY_SHARE`
#    or congestion on.
#
# Congestion begins when more than `QUEUE_HIGH_S` of link time waits, or a share above `LOSS_HIGH` is sent again, in two
# reports in a row, and ends after `QUIET_NS` below `QUEUE_LOW_S` and `LOSS_LOW`. A new threshold is told if it differs
# by more than `DEAD_BAND` from the one in force and `HOLD_NS` have passed, or if clusters went out of reach or came
# back. The numbers are not tuned: seconds are the time of a prompt on a link, minutes that of a change of load.


RETURN_NS, LONGEST_RETURN_NS, FORGIVEN_NS = 5 * NS_PER_S, 160 * NS_PER_S, 300 * NS_PER_S
QUIET_NS, LONGEST_QUIET_NS, GROWTH = 10 * NS_PER_S, 160 * NS_PER_S, 1.05
QUEUE_HIGH_S, QUEUE_LOW_S = 1.0, 0.25
LOSS_HIGH, LOSS_LOW = 0.02, 0.005
SEGMENT_BYTES = 1448
"""Of one TCP segment over Ethernet, with timestamps."""
HOLD_NS, DEAD_BAND = 5 * NS_PER_S, 0.05
LASTING_NS = 60 * NS_PER_S
SOLVE_NS = 30 * NS_PER_S
IDLE_SHARE, BUSY_SHARE, SHARE_MEMORY = 0.3, 0.6, 10.0
"""`SHARE_MEMORY`: seconds over which the share is smoothed."""
ALMOST, RATE_BAND = 0.95, 0.1
"""A link at a share `ALMOST` of its nominal rate is well. A change of all links together by `RATE_BAND` solves the
threshold again."""


class LinkControl:
    """The state of one direction of a link: `congested`, `share` of its rate used. Updates the link's rates and
    trust."""

    def __init__(self, link: ClusterLink) -> None:
        self.link = link
        self.congested = False
        self.share = 0.0
        self._waited = False
        self._bad_reports = self._falls = 0
        self._good_since = self._up_since = 0
        self._quiet_ns, self._grown = QUIET_NS, False

    def availability(self, up: bool, now: int) -> None:
        """Distrusts a link that is down at once, and trusts it again after a while up."""
        link = self.link
        link.up = up
        if not up:
            if link.trusted:
                link.trusted = False
                self._falls = 1 if now - self._up_since >= FORGIVEN_NS else self._falls + 1
            self._up_since = -1
            return
        if self._up_since < 0:
            self._up_since = now
        wait_ns = min(RETURN_NS << max(0, self._falls - 1), LONGEST_RETURN_NS)
        if not link.trusted and now - self._up_since >= wait_ns:
            link.trusted = True

    def measured(self, state: LinkState, passed_ns: int, now: int) -> None:
        link = self.link
        link.rtt_ns = state.rtt_ns or link.rtt_ns
        queue_s = state.queued_bytes / link.bytes_per_s
        loss = state.retransmits * SEGMENT_BYTES / state.sent_bytes if state.sent_bytes else 0.0
        self._judge(queue_s, loss, now)
        waiting, self._waited = self._waited and queue_s > QUEUE_LOW_S, queue_s > QUEUE_LOW_S
        if state.busy_ns * 10 >= passed_ns:  # long enough to measure by
            self._learn(state.sent_bytes * NS_PER_S / state.busy_ns, waiting=waiting)
        if link.bytes_per_s < link.nominal and now - self._good_since >= self._quiet_ns:
            grown = link.bytes_per_s * GROWTH ** (passed_ns / NS_PER_S)
            link.bytes_per_s, self._grown = min(link.nominal, int(grown) + 1), True
        link.lasting += (link.bytes_per_s - link.lasting) * min(1.0, passed_ns / LASTING_NS)
        link.lasting = max(link.lasting, link.bytes_per_s)
        used = state.sent_bytes * NS_PER_S / passed_ns / link.bytes_per_s
        weight = min(1.0, passed_ns / NS_PER_S / SHARE_MEMORY)
        self.share += (used - self.share) * weight

    def _judge(self, queue_s: float, loss: float, now: int) -> None:
        if queue_s > QUEUE_HIGH_S or loss > LOSS_HIGH:
            self._bad_reports += 1
            self._good_since = now
            if self._bad_reports >= 2 and not self.congested:
                self.congested = True
                if self._grown:  # it was tried too early
                    self._quiet_ns, self._grown = min(2 * self._quiet_ns, LONGEST_QUIET_NS), False
            return
        self._bad_reports = 0
        if queue_s > QUEUE_LOW_S or loss > LOSS_LOW:
            self._good_since = now
        if now - self._good_since >= QUIET_NS:
            self.congested = False

    def _learn(self, rate: float, *, waiting: bool) -> None:
        link = self.link
        if rate >= link.bytes_per_s:
            link.bytes_per_s = min(link.nominal, int(rate))
        elif waiting:
            link.bytes_per_s = max(1, int((link.bytes_per_s + rate) / 2))
        if link.bytes_per_s >= ALMOST * link.nominal:
            self._quiet_ns, self._grown = QUIET_NS, False


class OffloadControl:
    """Sets `threshold`, `abundant` and `guards` of a router, and the links' rates, by `LinksMeasured` reports."""

    def __init__(self, view: View, rules: Rules, router: Router, capacity: Capacity) -> None:
        self._rules, self._router, self._capacity = rules, router, capacity
        self._links = {pair: LinkControl(link) for pair, link in view.links.items()}
        self._measured_ns = self._told_ns = -1
        self._reachable = False
        self._solved: tuple[int | None, str] = (None, "")
        self._solved_for: tuple[tuple[int, int], float] = ((0, 0), 0.0)  # nodes there and here, egress
        self._solved_ns = 0
        router.threshold = 0 if rules.threshold is None or rules.priced else rules.threshold
        router.guards = self._guards

    @property
    def _guards(self) -> bool:
        rules = self._rules
        return rules.control or rules.priced or (rules.threshold is None and not self._capacity.knows_lengths)

    def measured(self, event: LinksMeasured, now: int) -> list[ThresholdSet]:
        """Updates links and router; returns the new threshold if it changed."""
        if not self._links:
            return []
        passed_ns = now - self._measured_ns if 0 <= self._measured_ns < now else self._rules.period_ns
        self._measured_ns = now
        for state in event.links:
            control = self._links.get((state.source, state.target))
            if control is None:
                continue
            if not self._rules.control:
                control.link.up = control.link.trusted = state.up
                continue
            control.availability(state.up, now)
            if state.up:
                control.measured(state, passed_ns, now)
        if self._rules.cache_mode == "auto":
            self._set_cache_mode()
        return self._set_threshold(now)

    def _set_cache_mode(self) -> None:
        links = self._links.values()
        share = max(control.share for control in links)
        if share > BUSY_SHARE or any(control.congested for control in links):
            self._router.abundant = False
        elif share < IDLE_SHARE:
            self._router.abundant = True

    def _set_threshold(self, now: int) -> list[ThresholdSet]:
        tokens, reason = self._best(now)
        router, before = self._router, self._reachable
        router.guards, self._reachable = self._guards, bool(self._capacity.remote_nodes)
        first, soon = self._told_ns < 0, now - self._told_ns < HOLD_NS
        if not first and (not _differ(router.threshold, tokens) or (soon and self._reachable == before)):
            return []
        router.threshold, self._told_ns = tokens, now
        return [ThresholdSet(tokens, reason)]

    def _best(self, now: int) -> tuple[int | None, str]:
        """The best threshold now, and the reason."""
        capacity, fixed = self._capacity, self._rules.threshold
        if not capacity.remote_nodes:
            return None, "no other cluster can be reached that prefills"
        if not capacity.local_nodes:
            return 0, "no node at home prefills"
        if self._rules.priced:
            return 0, "priced"
        if fixed is not None and (not self._rules.control or self._links_are_well):
            return fixed, "fixed"
        if not capacity.knows_lengths:
            return fixed or 0, "too few prompts were seen"
        self._solve(now)
        tokens, reason = self._solved
        return (tokens if fixed is None or tokens is None else max(fixed, tokens)), reason

    @property
    def _links_are_well(self) -> bool:
        return all(control.link.lasting >= ALMOST * control.link.nominal for control in self._links.values())

    def _solve(self, now: int) -> None:
        """Solves the threshold anew if it is time, or nodes or rates changed."""
        capacity = self._capacity
        nodes, egress = (len(capacity.remote_nodes), len(capacity.local_nodes)), capacity.egress
        known_nodes, known_egress = self._solved_for
        same = nodes == known_nodes and abs(egress - known_egress) <= RATE_BAND * known_egress
        if same and now - self._solved_ns < SOLVE_NS:
            return
        found = capacity.threshold(nodes[1])
        self._solved = found.tokens, f"{found.binds} binds at {found.rate:.3g} requests/s"
        self._solved_for, self._solved_ns = (nodes, egress), now


def _differ(old: int | None, new: int | None) -> bool:
    if old is None or new is None:
        return old is not new
    return abs(new - old) > DEAD_BAND * old
