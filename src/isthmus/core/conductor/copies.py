"""Copies of KV under way between caches, and their expected ends on shared links.

Every node has one link in and one link out; a link between clusters is shared by all nodes of both. On one fairly
shared link without later arrivals the estimate is exact: a copy with fewer bytes left delays a new one by these, one
with more by as many as the new one has. Later copies lengthen a transfer by 1 / (1 - utilisation) of each link on
average (the sojourn time of M/G/1 with processor sharing). Hand-overs on a link count in its utilisation alone: they
stream while their prompt computes, and delay no first token.
"""

from __future__ import annotations

from isthmus.core.conductor.events import LinkRule
from isthmus.core.conductor.learning import WINDOW_NS, Decaying
from isthmus.core.types import NS_PER_S

FULLEST = 0.95
"""The highest utilisation assumed, so that every transfer ends even if more is asked of a link than fits."""


class Copy:
    """`num_bytes` from one node's link out to another's link in, expected to end at `until_ns`. `across`: the link
    between their clusters, None within one. `num_bytes` and `start_ns` restart when another copy joins it."""

    __slots__ = ("across", "link_in", "link_out", "num_bytes", "start_ns", "until_ns")

    def __init__(
        self, link_out: Link, link_in: Link, num_bytes: float, start_ns: int, across: Link | None = None
    ) -> None:
        self.link_out, self.link_in, self.across, self.num_bytes = link_out, link_in, across, num_bytes
        self.start_ns = self.until_ns = start_ns

    @property
    def links(self) -> list[Link]:
        return (
            [self.link_out, self.link_in] if self.across is None else [self.link_out, self.link_in, self.across]
        )

    def bytes_left(self, now: int) -> float:
        """Bytes left at `now`, at an even rate from `start_ns` to the expected end."""
        if now >= self.until_ns:
            return 0.0
        return self.num_bytes * (self.until_ns - now) / (self.until_ns - self.start_ns)

    def share(self, newer: Copy, now: int) -> None:
        """Moves the expected end by the bytes of `newer` that pass meanwhile, on the slowest shared link."""
        left = self.bytes_left(now)
        if not left:
            return
        others = newer.links
        slowest = min([link.bytes_per_s for link in self.links if link in others])
        delay = min(left, newer.num_bytes) * NS_PER_S / slowest
        self.num_bytes, self.start_ns = left, now
        self.until_ns += int(delay)


class Link:
    """One direction of one node's link, or of a link between clusters. `copies` in the order they began."""

    __slots__ = ("_stretch", "_stretch_at", "_used", "bytes_per_s", "copies")

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self.copies: dict[Copy, None] = {}
        self._used = Decaying()
        self._stretch, self._stretch_at = 1.0, -1

    def add(self, copy: Copy, now: int) -> None:
        self.copies[copy] = None
        self.use(copy.num_bytes, now)

    def use(self, num_bytes: float, now: int) -> None:
        """Counts bytes that will pass soon in the utilisation."""
        self._used.add(num_bytes, now)
        self._stretch_at = -1

    def stretch(self, now: int) -> float:
        """The factor by which later copies lengthen a transfer, at the recent utilisation."""
        if self._stretch_at != now:
            used = self._used.at(now) * NS_PER_S / WINDOW_NS / self.bytes_per_s
            self._stretch, self._stretch_at = 1 / (1 - min(FULLEST, used)), now
        return self._stretch

    def ahead(self, num_bytes: int, now: int) -> float:
        """Bytes of other copies that pass while `num_bytes` do."""
        total = 0.0
        for copy in self.copies:
            if copy.until_ns > now:
                left = copy.num_bytes * (copy.until_ns - now) / (copy.until_ns - copy.start_ns)
                total += left if left < num_bytes else num_bytes
        return total


class ClusterLink(Link):
    """One direction of a link between two clusters. `bytes_per_s`: the measured rate; `nominal`: the configured one;
    `lasting`: the smoothed one. `owed`: bytes of hand-overs under way. `up`: whether a session crosses it; `trusted`:
    whether requests are sent over it."""

    __slots__ = ("lasting", "nominal", "owed", "rtt_ns", "source", "target", "trusted", "up")

    def __init__(self, rule: LinkRule) -> None:
        super().__init__(rule.bytes_per_s)
        self.source, self.target, self.rtt_ns = rule.source, rule.target, rule.rtt_ns
        self.nominal, self.owed = rule.bytes_per_s, 0
        self.up = self.trusted = True
        self.lasting = float(rule.bytes_per_s)

    def handed_over_ns(self, num_bytes: int, state_bytes: int, computed_ns: float) -> float:
        """Time until all KV of a prompt is across that is computed in `computed_ns`: it streams meanwhile, behind the
        bytes owed; a recurrent state (`state_bytes` of `num_bytes`) is final only at the end."""
        streaming = (self.owed + num_bytes) * NS_PER_S / self.lasting
        return max(streaming, computed_ns + state_bytes * NS_PER_S / self.lasting) + self.rtt_ns / 2


def transfer_ns(
    link_out: Link, link_in: Link, num_bytes: int, now: int, across: ClusterLink | None = None
) -> tuple[float, float]:
    """(time of a copy that starts now, sum of the delays of other copies by it), in ns."""
    if across is not None:
        own, delay = transfer_ns(link_out, link_in, num_bytes, now)
        before = across.ahead(num_bytes, now)
        own = max(own, (num_bytes + before) * NS_PER_S / across.bytes_per_s) + across.rtt_ns / 2
        # A copy on two of the shared links is delayed once, but counted twice, which is on the safe side.
        return own, delay + before * NS_PER_S / across.bytes_per_s
    if not link_out.copies and not link_in.copies:
        return num_bytes * NS_PER_S / min(link_out.bytes_per_s, link_in.bytes_per_s), 0.0
    before_out, before_in = link_out.ahead(num_bytes, now), link_in.ahead(num_bytes, now)
    out_ns, in_ns = NS_PER_S / link_out.bytes_per_s, NS_PER_S / link_in.bytes_per_s
    own = max((num_bytes + before_out) * out_ns, (num_bytes + before_in) * in_ns)
    delay = before_out * out_ns + before_in * in_ns
    if before_out and before_in:  # a copy on both links is delayed once
        both = [copy for copy in link_in.copies if copy.link_out is link_out]
        delay -= sum([min(copy.bytes_left(now), num_bytes) for copy in both]) * min(out_ns, in_ns)
    return own, delay


def expected_ns(
    link_out: Link, link_in: Link, num_bytes: int, now: int, across: ClusterLink | None = None
) -> tuple[float, float]:
    """As `transfer_ns`, lengthened by copies that will come later."""
    own, delay = transfer_ns(link_out, link_in, num_bytes, now, across)
    own *= link_out.stretch(now) * link_in.stretch(now)
    return (own if across is None else own * across.stretch(now)), delay


def begin(link_out: Link, link_in: Link, num_bytes: int, now: int, across: ClusterLink | None = None) -> Copy:
    """Begins a copy, and delays those that it shares a link with."""
    copy = Copy(link_out, link_in, num_bytes, now, across)
    own, _ = transfer_ns(link_out, link_in, num_bytes, now, across)
    for other in dict.fromkeys([other for link in copy.links for other in link.copies]):
        other.share(copy, now)
    copy.until_ns = now + int(own) + 1
    for link in copy.links:
        link.add(copy, now)
    return copy


def end(copy: Copy) -> None:
    for link in copy.links:
        link.copies.pop(copy, None)
