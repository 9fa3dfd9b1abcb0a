"""Routing: the cluster that a request decodes in, its *home*, the cluster that prefills it, and the nodes in both.

The home is the cluster with the longest cached prefix, of equals that with the least loaded decode nodes. A prompt with
more *uncached* tokens than the threshold is prefilled in another cluster (Prefill-as-a-Service, arXiv 2604.15039). With
scarce bandwidth each cluster's own cache counts, and no prefix crosses; with abundant bandwidth the longest prefix
counts wherever it lies, and is copied to the cluster that computes. The policy chooses the nodes. Clusters that are
down or too small are passed over, and a further attempt after a failure is prefilled at home if any node there can.

The threshold balances capacity in the long run; a guard corrects it for the moment (`Rules.control`) by the cost of the
prompt in each cluster,

    cost = TTFT + price * node time

with the TTFT predicted from queues, caches and the link until the KV is at the decode node, and the price of the
`isthmus` policy. A prompt above the threshold stays at home if that costs less; one below is offloaded if that costs
less than half (`FAR_LESS`), since a queue that long at home outweighs the room kept for long prompts elsewhere. With a
threshold of 0 the guard decides alone (`Rules.priced`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import partial
from operator import attrgetter

from isthmus.core.attempts import FetchOrder
from isthmus.core.conductor.donors import Donors
from isthmus.core.conductor.estimates import Estimator, Matched, can_copy, least_sending, match
from isthmus.core.conductor.events import RequestArrived, Rules
from isthmus.core.conductor.index import bits, deepest
from isthmus.core.conductor.lending import blocks_away, free_tokens, longest, num_blocks, spread
from isthmus.core.conductor.policies import FETCHING, POLICIES
from isthmus.core.conductor.view import Cluster, Kept, NodeView, Placement, View
from isthmus.core.types import MIXED, PREFILL

FAR_LESS = 2.0


def offloads(num_tokens: int, home: int, there: int, threshold: int | None, *, abundant: bool) -> bool:
    """Whether another cluster prefills `num_tokens`, of which `home` and `there` are cached. None: nothing is
    offloaded."""
    cached = max(home, there) if abundant else home
    return threshold is not None and num_tokens - cached > threshold


def guarded(offload: bool, home_ns: float, there_ns: float) -> bool:
    """The threshold's answer `offload`, corrected by the costs. Ties leave it."""
    return home_ns >= there_ns if offload else FAR_LESS * there_ns < home_ns


class Router:
    """Places requests by a view that it only reads. `OffloadControl` sets `threshold`, `abundant` and `guards`."""

    def __init__(self, view: View, rules: Rules, donors: Donors) -> None:
        self._view, self._rules, self._donors = view, rules, donors
        self._links = view.links
        self._policy = partial(POLICIES[rules.policy], **dict(rules.policy_parameters))
        self.threshold = rules.threshold  # uncached tokens, None while nothing is offloaded
        self.abundant = rules.cache_mode == "abundant"  # cached prefixes are copied between clusters
        self.guards = False  # the guard may overrule the threshold

    def place(self, request: RequestArrived, now: int, *, again: bool = False) -> Placement | None:
        """Places a request; None when no node or pair can take it. `again`: after a failure."""
        alone = self._view.alone
        if alone is not None:
            found = self._place_in(request, alone, alone, now)
            if found is None:
                return self._place_across(request, alone, now)
            return self._with_donors(self._with_holders(found[0], request), found[1], again)
        caches = _Caches(self._view, request)
        for home in self._homes(request, caches):
            for cluster, foreign in self._prefill_clusters(request, home, caches, now, again):
                found = self._place_in(request, home, cluster, now, foreign, caches.matched)
                placement = None
                if found is not None:
                    placement = self._with_holders(self._with_transfers(*found, home, caches), request)
                    placement = self._with_donors(placement, found[1], again)
                if placement is not None:
                    return placement
        for cluster in self._view.clusters.values():
            placement = self._place_across(request, cluster, now)
            if placement is not None:
                return placement
        return None

    def _with_holders(self, placement: Placement, request: RequestArrived) -> Placement | None:
        """The placement with its KV on nodes of role attention, if the cluster has any. None while they have no room
        and the decode node has none for the rest: a request that waited there would keep memory from others. Recalled
        blocks stay at home."""
        prefill, decode = placement.prefill, placement.decode
        if not decode.cluster.has_attention or placement.handover_start or not (prefill.lends and decode.lends):
            return placement
        found = spread(self._view, request, prefill, decode)
        if found is not None:
            placement.held, placement.growth = found
        away = num_blocks(placement.held) * decode.block_size
        length = request.num_tokens + request.max_tokens
        if not placement.growth and length - away > free_tokens(decode):
            return None
        return placement

    def _with_donors(self, placement: Placement | None, estimator: Estimator, again: bool) -> Placement | None:
        """The placement with a prompt assembled from others' KV, if asked for and quicker; not after a failure."""
        if placement is None or again or estimator.request.content is None:
            return placement
        return self._donors.assembled(estimator, placement) or placement

    def place_with(self, request: RequestArrived, kept: Kept, now: int) -> Placement | None:
        """Places a further attempt on other nodes, its kept KV staying with its holders; None where that cannot be."""
        holders, num_kept = kept.holders, num_blocks(kept.held)
        if any(self._view.nodes.get(node.node) is not node or node.draining for node in holders):
            return None
        rooms = [(node, held.room * node.block_size) for held in kept.held for node in held.holders]
        if any(free_tokens(node) < room for node, room in rooms):
            return None  # others have taken that memory meanwhile
        placement = self._place_beside(request, next(iter(holders)).cluster, holders, now)
        if placement is None:
            return None
        prefill, decode = placement.prefill, placement.decode
        if not kept.growth and num_kept < blocks_away(request, prefill, decode):
            return None
        placement.held, placement.growth, placement.taken = kept.held, kept.growth, kept.attempt
        wait = placement.ttft_ns - placement.work_ns
        placement.work_ns = prefill.prefill_ns(request.num_tokens, num_kept)
        placement.ttft_ns, placement.compute_ns = wait + placement.work_ns, 0
        placement.cached = placement.own = 0
        return placement

    def _place_across(self, request: RequestArrived, cluster: Cluster, now: int) -> Placement | None:
        """Places a request that is too long for any single node, with a part of its blocks on other nodes of a
        cluster."""
        if request.whole or request.num_tokens + request.max_tokens > longest(self._view.members(cluster)):
            return None
        placement = self._place_beside(request, cluster, (), now)
        found = None if placement is None else spread(self._view, request, placement.prefill, placement.decode)
        if placement is None or found is None:
            return None
        placement.held, placement.growth = found
        return placement

    def _place_beside(
        self, request: RequestArrived, cluster: Cluster, holders: Collection[NodeView], now: int
    ) -> Placement | None:
        """Places by the policy on nodes of a cluster other than `holders`, without a fetch."""
        decodes = [node for node in cluster.decodes if node.lends and node not in holders]
        nodes = [node for node in cluster.prefills if node.lends and node not in holders]
        nodes = [node for node in nodes if decodes or node.role is MIXED]
        if not nodes:
            return None
        placement = self._chosen(Estimator(self._view, request, nodes, now), decodes)
        placement.fetch = placement.source = placement.across = None
        placement.fetch_bytes = 0
        return placement

    # Clusters.

    def _homes(self, request: RequestArrived, caches: _Caches) -> list[Cluster]:
        """Clusters that can decode a request, the best first."""
        ranked = []
        for at, cluster in enumerate(self._view.clusters.values()):
            nodes = _that_fit(cluster.decodes, request) or _that_fit(cluster.mixed, request)
            if nodes:
                least = min([_step_key(node, request.num_tokens) for node in nodes])
                ranked.append((-caches.by_cluster[cluster], least, at, cluster))
        return [cluster for *_, cluster in sorted(ranked)]

    def _prefill_clusters(
        self, request: RequestArrived, home: Cluster, caches: _Caches, now: int, again: bool
    ) -> Iterator[tuple[Cluster, int]]:
        """Clusters to prefill in, the best first, each with the mask of nodes in other clusters to fetch from."""
        clusters = [home, *[each for each in self._view.clusters.values() if self._serves(each, home)]]
        costs_ns = {cluster: self._cost_ns(request, home, cluster, caches, now) for cluster in clusters}
        # Clusters over links that are not trusted come last.
        others = sorted(
            clusters[1:], key=lambda other: (not self._links[other.name, home.name].trusted, costs_ns[other])
        )
        if others and not again and self._links[others[0].name, home.name].trusted:
            there, have = others[0], caches.by_cluster
            offload = offloads(
                request.num_tokens, have[home], have[there], self.threshold, abundant=self.abundant
            )
            if self.guards and self.threshold is not None:
                offload = guarded(offload, costs_ns[home], costs_ns[there])
            chosen, other = (there, home) if offload else (home, there)
            copies = self.abundant and have[chosen] < have[other]
            yield chosen, caches.longer_than(chosen) if copies else 0
            others = others[offload:]
        yield home, 0
        for cluster in others:
            yield cluster, 0

    def _serves(self, cluster: Cluster, home: Cluster) -> bool:
        """Whether a cluster can prefill for a home in another."""
        link = self._links.get((cluster.name, home.name))
        return link is not None and link.up and cluster.has_prefill

    def _cost_ns(
        self, request: RequestArrived, home: Cluster, cluster: Cluster, caches: _Caches, now: int
    ) -> float:
        """The guard's cost of a prefill in one cluster: on the node with the shortest queue, with the longest prefix
        that the cluster has cached, until its KV is at the decode node."""
        nodes = _that_fit(cluster.prefills if cluster is home else cluster.senders, request)
        if not nodes:
            return math.inf
        waits = [node.wait_ns(now) for node in nodes]
        node, cached = nodes[waits.index(min(waits))], caches.by_cluster[cluster]
        work = node.cost.prefill_ns(request.num_tokens - cached, cached) * node.ratio
        price = cluster.recent.backlog_price(waits, now)
        if node.role is MIXED:
            price += node.num_delayed
        ttft = min(waits) + work
        if cluster is not home:
            link = self._links[cluster.name, home.name]
            sent = (request.num_tokens - caches.by_cluster[home]) * node.cost.kv_token_bytes + node.state_bytes
            ttft = link.handed_over_ns(sent, node.state_bytes, ttft)
        return ttft + price * work

    # Nodes.

    def _place_in(
        self,
        request: RequestArrived,
        home: Cluster,
        cluster: Cluster,
        now: int,
        foreign: int = 0,
        matched: Matched | None = None,
    ) -> tuple[Placement, Estimator] | None:
        """Places the prefill on a node of `cluster`, and decode there (mixed) or on a node of `home`."""
        length = request.num_tokens + request.max_tokens  # a later attempt prefills what was generated as well
        nodes, decodes = cluster.prefills if cluster is home else cluster.senders, home.decodes
        if length > home.smallest_decode:
            decodes = _that_fit(decodes, request)
        if cluster is not home and not decodes:
            decodes = _that_fit(home.mixed, request)
            if not decodes:
                return None
        if length > cluster.smallest_prefill or (cluster.has_prefill and not decodes):
            nodes = [node for node in _that_fit(nodes, request) if decodes or node.role is MIXED]
        if request.whole:
            nodes = [node for node in nodes if node.role is MIXED]
        if not nodes:
            return None
        estimator = Estimator(self._view, request, nodes, now, foreign, matched)
        return self._chosen(estimator, decodes, moves=cluster is not home), estimator

    def _chosen(self, estimator: Estimator, decodes: list[NodeView], *, moves: bool = False) -> Placement:
        """The policy's placement with a decode node. `moves`: the decode node is always another one."""
        placement = self._policy(estimator, self._rules)
        placement.deepest = estimator.deepest
        # After one token nothing is left to decode: the KV need not move.
        if estimator.request.max_tokens > 1 and (placement.prefill.role is PREFILL or moves):
            placement.decode = _least_step(decodes, estimator.num_tokens)
        return placement

    def _with_transfers(
        self, placement: Placement, estimator: Estimator, home: Cluster, caches: _Caches
    ) -> Placement:
        """The placement with the fetch and the recall of a prefill in another cluster."""
        if estimator.foreign and placement.fetch is None and self._rules.policy not in FETCHING:
            placement = _fetching(estimator, placement)
        if placement.decode.cluster is not placement.prefill.cluster:
            _recall(self._view, estimator.request, placement)
        placement.uncached = estimator.num_tokens - caches.by_cluster[home]
        if self.abundant:
            placement.uncached = estimator.num_tokens - max(caches.by_cluster.values())
        return placement


class _Caches:
    """How many tokens of a prompt each cluster has cached, or will have. However many, the last one is computed."""

    def __init__(self, view: View, request: RequestArrived) -> None:
        self._view = view
        clusters = view.clusters.values()
        everywhere = sum([cluster.prefill_mask | cluster.lender_mask for cluster in clusters])
        self.matched = match(view, request, everywhere)
        _, levels = self.matched
        depths = {each: deepest(levels, each.prefill_mask | each.lender_mask) for each in clusters}
        most = request.num_tokens - 1
        self.by_cluster = {each: min(depth * view.block_size, most) for each, depth in depths.items()}

    def longer_than(self, cluster: Cluster) -> int:
        """Mask of the nodes in linked clusters with a longer prefix than this one."""
        mask = 0
        for other, tokens in self.by_cluster.items():
            link = self._view.links.get((other.name, cluster.name))
            if tokens > self.by_cluster[cluster] and link is not None and link.trusted:
                mask |= other.prefill_mask | other.lender_mask
        return mask


def _fetching(estimator: Estimator, placement: Placement) -> Placement:
    """The placement with the longest prefix fetched from another cluster, for policies that never fetch."""
    longest, holders = estimator.held[-1]
    node = placement.prefill
    source = least_sending(estimator, holders)
    if longest <= placement.cached or not can_copy(source, node):
        return placement
    fetched = estimator.fetched(estimator.nodes.index(node), source, longest)
    fetched.decode, fetched.deepest = placement.decode, placement.deepest
    return fetched


def _recall(view: View, request: RequestArrived, placement: Placement) -> None:
    """Leaves blocks out of the hand-over that the decode node has, or can get within its cluster. A recurrent state
    comes whole from the prefill node in any case."""
    decode = placement.decode
    if not decode.cache_blocks:
        return  # it reuses only KV of requests that it computes itself
    names = request.names[: (request.num_tokens - 1) // decode.block_size]
    cluster = decode.cluster
    levels, _ = view.index.match(names, cluster.prefill_mask | cluster.lender_mask | decode.bit)
    own = deepest(levels, decode.bit)
    for depth, holders in reversed(levels):
        if depth <= own:
            break
        nodes = [node for node in map(view.node_at, bits(holders)) if can_copy(node, decode)]
        if nodes:
            lender = min(nodes, key=lambda node: len(node.link_out.copies))
            placement.lender, placement.handover_start = lender, depth
            placement.recall = FetchOrder(lender.node, own, depth)
            return
    if own:
        placement.handover_start, placement.recall = own, FetchOrder(decode.node, 0, own)


def _that_fit(nodes: list[NodeView], request: RequestArrived) -> list[NodeView]:
    length = request.num_tokens + request.max_tokens
    return [node for node in nodes if node.capacity_tokens >= length]


def _step_key(node: NodeView, num_tokens: int) -> tuple[bool, int, int]:
    """The order of decode nodes: those with a place and room for the prompt, then by the time of an iteration with it,
    then by batch."""
    batch, context = node.batch + 1, node.context + num_tokens
    full = context > node.capacity_tokens or 0 < node.max_sequences < batch
    fixed, slope = node.cost.decode_step_ps(batch)
    return full, fixed + slope * context, batch


_batch = attrgetter("batch")


def _least_step(nodes: list[NodeView], num_tokens: int) -> NodeView:
    """The best decode node by `_step_key`; requests still in prefill or hand-over count as there."""
    best, best_key, best_context = nodes[0], (True, math.inf, 0), math.inf
    for node in sorted(nodes, key=_batch):  # of nodes alike, one with a longer context now cannot be better
        if node.context < best_context or node.kind != best.kind:
            key = _step_key(node, num_tokens)
            if key < best_key:
                best, best_key = node, key
                best_context = math.inf if key[0] else node.context
    return best
