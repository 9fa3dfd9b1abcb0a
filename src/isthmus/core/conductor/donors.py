"""Prompts that others may be assembled from: found by pieces that both have, or by signatures that are alike.

A prompt is remembered once it was computed, exactly, for a request that may itself be computed with more than its own
prefix. Names, pieces, signatures and scopes are opaque here; prompts of different scopes never meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import msgspec

from isthmus.core.attempts import Assembly, Donor, FetchOrder
from isthmus.core.conductor.copies import expected_ns
from isthmus.core.conductor.estimates import Estimator, can_copy, least_sending
from isthmus.core.conductor.events import PromptContent, Remember, Rules, Unremember
from isthmus.core.conductor.index import deepest
from isthmus.core.conductor.view import NodeView, Placement, RequestView, View
from isthmus.core.cost.node_cost import assembled_ns
from isthmus.core.reuse import (
    MEAN,
    MIN_PASSAGE,
    SELECTIONS,
    SEMANTIC,
    SIMILAR,
    Passage,
    Selection,
    pack,
    passages,
    similarity,
)
from isthmus.core.types import MIXED, NS_PER_S, BlockName, RequestId, Reuse

MAX_OWNERS = 8
"""Prompts that are known to have a piece, the latest: what all begin with is in everybody's prefix anyway."""


class Known:
    """A prompt that is remembered. `starts`: of its pieces, where each begins."""

    __slots__ = ("content", "names", "request", "starts")

    def __init__(self, request: RequestId, names: tuple[BlockName, ...], content: PromptContent) -> None:
        self.request, self.names, self.content = request, names, content
        self.starts = dict(zip(content.pieces, (0, *content.stops), strict=False))


class Prompts:
    """At most so many of them, those that were of use last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[RequestId, Known] = {}  # the least used first
        self._by_end: dict[tuple[bytes, BlockName], RequestId] = {}  # the last name stands for all before it
        self._by_scope: dict[bytes, dict[RequestId, Known]] = {}
        self._owners: dict[tuple[bytes, bytes], dict[RequestId, None]] = {}  # by scope and piece

    def remember(self, request: RequestView) -> Iterator[Remember | Unremember]:
        """Its prompt is computed."""
        arrived = request.arrived
        name, content, names = arrived.request, arrived.content, arrived.names
        if content is None or not names or not request.is_exact:
            return
        before = self._by_end.get((content.scope, names[-1]))
        if before is not None:
            self.use(before)  # it says the same, so that one will do
            return
        if name in self._known:
            yield self.forget(name)
        self._known[name] = Known(name, names, content)
        self._by_end[content.scope, names[-1]] = name
        self._by_scope.setdefault(content.scope, {})[name] = self._known[name]
        for piece in content.pieces:
            owners = self._owners.setdefault((content.scope, piece), {})
            owners[name] = None
            if len(owners) > MAX_OWNERS:
                del owners[next(iter(owners))]
        yield Remember(name)
        if len(self._known) > self._most:
            yield self.forget(next(iter(self._known)))

    def forget(self, name: RequestId) -> Unremember:
        known = self._known.pop(name)
        scope = known.content.scope
        del self._by_end[scope, known.names[-1]]
        del self._by_scope[scope][name]
        if not self._by_scope[scope]:
            del self._by_scope[scope]
        for piece in known.starts:
            owners = self._owners.get((scope, piece), {})
            owners.pop(name, None)
            if not owners:
                self._owners.pop((scope, piece), None)
        return Unremember(name)

    def use(self, name: RequestId) -> None:
        """It is of use again."""
        self._known[name] = self._known.pop(name)

    def alike(self, content: PromptContent) -> list[tuple[float, Known]]:
        """Those whose signatures are alike enough, the most alike first."""
        found = [
            (share, known)
            for known in self._by_scope.get(content.scope, {}).values()
            if (share := similarity(content.signature, known.content.signature)) >= SIMILAR
        ]
        return sorted(found, key=lambda pair: pair[0], reverse=True)

    def owners(self, scope: bytes, piece: bytes) -> Iterable[Known]:
        """Those that have this piece, the latest last."""
        return [self._known[name] for name in self._owners.get((scope, piece), ())]

    def check(self) -> None:
        assert len(self._known) <= self._most
        assert self._by_end == {(k.content.scope, k.names[-1]): k.request for k in self._known.values()}
        scoped = [name for prompts in self._by_scope.values() for name in prompts]
        assert sorted(scoped) == sorted(self._known), "a prompt is in no scope, or in two"
        for (scope, piece), owners in self._owners.items():
            assert owners, "a piece that nobody has is kept"
            for name in owners:
                known = self._known[name]
                assert known.content.scope == scope and piece in known.starts, "a piece of another prompt"


# What a prompt is assembled from, and whether that pays (docs/reuse.md).
#
# What is needed of a donor must be in a cache of the cluster that prefills; nothing else is asked for. The placement
# that the policy chose is compared with the same prompt assembled, there and on the node that has most of its donors.


GAIN = 0.5
"""A prompt is assembled where that is predicted to take at most so many times the node time. Where it gains less it is
worth more whole: then others can be assembled from it (measured: docs/decisions/0017). What waits in the queue has no
part in this, or nothing would be assembled where that is needed most."""
BEYOND = 32
"""Tokens beyond a passage that are loaded with it: more than a piece has in the mean."""
MAX_DONORS = 8
"""Of one prompt: each is a chain that has to stay in a cache meanwhile."""


class _Owned(msgspec.Struct, frozen=True):
    """A donor with its leading blocks that some node has."""

    known: Known
    depth: int


class _Found(msgspec.Struct, frozen=True):
    """What a prompt can be assembled from. `first`: block from which on the first donor is searched for tokens that are
    alike; `num_alike`: so many are counted on, beside those of passages."""

    selection: Selection
    donors: tuple[_Owned, ...]
    passages: tuple[Passage, ...]
    first: int = 0
    num_alike: int = 0

    @property
    def num_reused(self) -> int:
        """With what the engine finds beyond a passage's ends (`reuse.extended`): at each about a piece, where there is
        so much before the next one."""
        ends = [each.at + each.count for each in self.passages]
        gaps = [each.at - end for each, end in zip(self.passages[1:], ends, strict=False)]
        beyond = sum([min(gap, 2 * MEAN) for gap in gaps]) + (2 * MEAN if ends else 0)
        passed = sum([max(0, each.count - self.selection.first) for each in self.passages])
        return self.num_alike + passed + beyond

    def span(self, number: int, size: int) -> tuple[int, int]:
        """Blocks that are needed of a donor."""
        if not number and self.selection.alike:
            return self.first, self.donors[0].depth
        taken = [each for each in self.passages if each.donor == number]
        first, stop = min([each.start for each in taken]), max([each.start + each.count for each in taken])
        # The same text goes on beyond what it is known by: see `reuse.extended`.
        return max(0, first - BEYOND) // size, min(-(-(stop + BEYOND) // size), self.donors[number].depth)


class Donors:
    """Finds them for one request at a time; reads the view."""

    def __init__(self, view: View, rules: Rules) -> None:
        self._view, self._rules = view, rules
        self._prompts = Prompts(rules.reuse_prompts)
        self._gone: dict[RequestId, None] = {}

    def remember(self, request: RequestView) -> Iterator[Remember | Unremember]:
        """Its prompt is computed."""
        return self._prompts.remember(request)

    def forget_gone(self) -> Iterator[Unremember]:
        """Those of which nothing is left that is of use, as was seen since the last time."""
        gone, self._gone = self._gone, {}
        for name in gone:
            yield self._prompts.forget(name)

    def assembled(self, estimator: Estimator, exact: Placement) -> Placement | None:
        """A placement in place of this one, None where that is as good."""
        content, chosen = estimator.request.content, exact.prefill
        within = chosen.cluster is exact.decode.cluster and not exact.handover_start
        if content is None or exact.held or exact.growth or not within:
            return None
        finder = _Finder(self._view, self._prompts, estimator, self._rules, self._gone)
        options = [self._on(chosen, finder, exact)]
        most = finder.most_of_them(chosen)
        if most is not None:
            options.append(self._on(most, finder, exact))
        best = min([each for each in options if each is not None], key=lambda each: each.ttft_ns, default=None)
        if best is None or best.ttft_ns > exact.ttft_ns or best.work_ns > GAIN * exact.work_ns:
            return None
        assert best.assembly is not None
        for donor in best.assembly.donors:
            self._prompts.use(donor.request)
        return best

    def _on(self, node: NodeView, finder: _Finder, exact: Placement) -> Placement | None:
        """Its prefill on this node; None where nothing is assembled there."""
        estimator, size = finder.estimator, node.block_size
        num_tokens = estimator.num_tokens
        at, depth = estimator.nodes.index(node), estimator.depths[node.slot]
        cached, wait = min(depth * size, num_tokens - 1), estimator.waits[at]
        left = num_tokens - cached
        if not node.reuse_layers or left < self._rules.reuse_tokens:
            return None
        found = finder.find(cached)
        sent = finder.sent(found, node) if found is not None else None
        if found is None or sent is None:
            return None
        donors, copied, transfer_ns = sent
        packing = None
        if self._rules.reuse_packs:
            packing = pack(found.selection, num_tokens, node.reuse_layers, size)
        num_blocks = sum([len(donor.names) - donor.first for donor in donors])
        scratch = max(num_blocks, packing.num_packed if packing is not None else 0)
        if num_tokens + estimator.request.max_tokens + scratch * size > node.capacity_tokens:
            return None
        work = assembled_ns(node.cost, found.selection, left, cached, found.num_reused) * estimator.ratio
        if node.paths.memory:
            work = max(work, (depth + num_blocks) * node.block_bytes * NS_PER_S / node.paths.memory)
        disk_ns = [estimator.read_ns(node, donor.names[donor.first :]) for donor in donors]
        work = max(work, estimator.disk_ns(node, depth) + sum(disk_ns) - wait)
        option = Placement(node, depth, depth, int(work), int(max(wait, transfer_ns) + work))
        option.decode = node if node.role is MIXED else exact.decode
        option.deepest, option.donated = exact.deepest, copied
        reused = min(found.num_reused, left)
        layers = node.reuse_layers
        option.assembly = Assembly(found.selection, donors, found.passages, reused, layers, packing)
        return option

    def check(self) -> None:
        self._prompts.check()


class _Finder:
    """The donors of one request, by what the nodes of its cluster have."""

    def __init__(
        self, view: View, prompts: Prompts, estimator: Estimator, rules: Rules, gone: dict[RequestId, None]
    ) -> None:
        self.estimator = estimator
        self._view, self._prompts, self._rules, self._gone = view, prompts, rules, gone
        content = estimator.request.content
        assert content is not None
        self._content: PromptContent = content
        cluster = estimator.cluster
        self._everyone = view.index.users
        self._nodes = (cluster.prefill_mask | cluster.lender_mask) & self._everyone
        self._depths: dict[RequestId, int] = {}
        ranked = prompts.alike(content) if content.reuse is Reuse.SEMANTIC else []
        self._alike = [(share, _Owned(each, depth)) for share, each in ranked if (depth := self._depth(each))]

    def most_of_them(self, chosen: NodeView) -> NodeView | None:
        """The node of this role that has most of what the prompt could be assembled from, if that is another one."""
        found = self.find(0)
        others = [node for node in self.estimator.nodes if node.role is chosen.role]
        if found is None or not others:
            return None

        def here(node: NodeView) -> int:
            match = self._view.index.match
            return sum([match(each.known.names[: each.depth], node.bit)[0][-1][0] for each in found.donors])

        best = max(others, key=lambda node: (here(node), node is chosen))
        return None if best is chosen else best

    def find(self, start: int) -> _Found | None:
        """Of what follows its first `start` tokens."""
        request, size = self.estimator.request, self._view.block_size
        for share, owned in self._alike:
            # What both begin with is in the cache as it is.
            first = min(_common(owned.known.names, request.names), start // size)
            if first < owned.depth:
                donors, found = self._cover(start, owned)
                most = min(int(share * (request.num_tokens - start)), (owned.depth - first) * size)
                passed = sum([each.count for each in found])
                return _Found(SEMANTIC, donors, found, first, max(0, most - passed))
        donors, found = self._cover(start, None)
        return _Found(SELECTIONS[self._rules.reuse_selector], donors, found) if found else None

    def sent(
        self, found: _Found, node: NodeView
    ) -> tuple[tuple[Donor, ...], Sequence[tuple[NodeView, int]], float] | None:
        """Donors as a route names them; whom what of them is fetched from, in bytes, and how many ns that takes. None
        where a node that has the rest of a donor cannot send it."""
        view, size, now = self._view, node.block_size, self.estimator.now
        donors, copied, transfer = list[Donor](), list[tuple[NodeView, int]](), 0.0
        for number, owned in enumerate(found.donors):
            first, stop = found.span(number, size)
            names, fetch = owned.known.names[:stop], None
            levels, _ = view.index.match(names, self._nodes | node.bit)
            own = deepest(levels, node.bit)
            if own < stop:
                source = least_sending(self.estimator, levels[-1][1])
                if not can_copy(source, node):
                    return None
                num_bytes = (stop - own) * node.block_bytes
                transfer += expected_ns(source.link_out, node.link_in, num_bytes, now)[0]
                fetch = FetchOrder(source.node, own, stop, now + int(transfer))
                copied.append((source, num_bytes))
            donors.append(Donor(owned.known.request, names, first, fetch))
        return tuple(donors), copied, transfer

    def _depth(self, known: Known) -> int:
        """Its leading blocks that some node has. Notes a prompt of which nobody has more than this one begins with."""
        found = self._depths.get(known.request)
        if found is None:
            found = self._depths[known.request] = self._deepest(known, self._nodes)
            begins = _common(known.names, self.estimator.request.names)
            if found < len(known.names) and found <= begins and self._deepest(known, self._everyone) <= begins:
                self._gone[known.request] = None
        return found

    def _deepest(self, known: Known, nodes: int) -> int:
        return deepest(self._view.index.match(known.names, nodes)[0], nodes)

    def _cover(self, start: int, given: _Owned | None) -> tuple[tuple[_Owned, ...], tuple[Passage, ...]]:
        """Passages behind `start` of the `given` donor, which is the first, and of few others that have most of the
        rest; those others are left out that no passage is of."""
        content = self._content
        pieces = zip(content.pieces, (0, *content.stops), content.stops, strict=False)
        wanted = {piece: stop - at for piece, at, stop in pieces if at >= start}
        donors, known = list[_Owned](), dict[bytes, tuple[int, int]]()
        best = given if given is not None else self._next(wanted)
        while best is not None:
            for piece in [piece for piece in wanted if self._has(best, piece, wanted)]:
                known[piece] = len(donors), best.known.starts[piece]
                del wanted[piece]
            donors.append(best)
            best = self._next(wanted) if len(donors) < MAX_DONORS else None
        found = passages(content.pieces, content.stops, known, start=start)
        used = {each.donor for each in found} | ({0} if given is not None else set())
        places = {number: place for place, number in enumerate(sorted(used))}
        kept = [msgspec.structs.replace(each, donor=places[each.donor]) for each in found]
        return tuple([donors[number] for number in places]), tuple(kept)

    def _next(self, wanted: dict[bytes, int]) -> _Owned | None:
        """The prompt that has most of these pieces in some cache; None where that is no passage."""
        gains, owners = dict[RequestId, int](), dict[RequestId, _Owned]()
        for piece, count in wanted.items():
            for each in self._prompts.owners(self._content.scope, piece):
                owned = owners.setdefault(each.request, _Owned(each, self._depth(each)))
                if self._has(owned, piece, wanted):
                    gains[each.request] = gains.get(each.request, 0) + count
        best = max(gains, key=lambda name: gains[name], default=None)
        return None if best is None or gains[best] < MIN_PASSAGE else owners[best]

    def _has(self, owned: _Owned, piece: bytes, wanted: dict[bytes, int]) -> bool:
        start = owned.known.starts.get(piece)
        return start is not None and start + wanted[piece] <= owned.depth * self._view.block_size


def _common(one: Sequence[BlockName], other: Sequence[BlockName]) -> int:
    """Leading blocks that both have."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
