"""KV copies under way between caches, as the conductor expects them to proceed on shared links.

Every node has one link in and one link out. The links' real shares are unknown here; on one fairly shared link
with no later arrivals the estimate is exact: a copy with less left than ours delays us by what it has left, one
with more delays us by as much as we have. Copies that come later make it longer by 1 / (1 - utilisation) of each
link on average (the sojourn time of M/G/1 with processor sharing), which matters where links are nearly full.

KV from prefill to decode that shares a link counts as such use. It is no copy here: it streams while its prompt
computes, and what delays it delays no first token.

Between clusters there is one more link, which all nodes of both share: a copy that goes `across` it is on three.
"""

from __future__ import annotations

from isthmus.core.conductor.events import LinkRule
from isthmus.core.conductor.learning import WINDOW_NS, Decaying
from isthmus.core.types import NS_PER_S

FULLEST = 0.95
"""Utilisation that a link is taken to have at most: more may be asked of it than fits, and a transfer still ends."""


class Copy:
    """`num_bytes` from one node's link out to another's link in, expected to end at `until_ns`.

    `across`: the link between their clusters, None within one. When another joins it, `num_bytes` and `start_ns` are
    those from then on.
    """

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
        """As if it went on evenly from its start, or since another joined it, to its expected end."""
        if now >= self.until_ns:
            return 0.0
        return self.num_bytes * (self.until_ns - now) / (self.until_ns - self.start_ns)

    def share(self, newer: Copy, now: int) -> None:
        """Ends later by what passes of `newer` meanwhile, on the slower of the links they share."""
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
        """So many bytes will pass, soon."""
        self._used.add(num_bytes, now)
        self._stretch_at = -1

    def stretch(self, now: int) -> float:
        """By how much later copies make a transfer longer, if they come as they did of late."""
        if self._stretch_at != now:
            used = self._used.at(now) * NS_PER_S / WINDOW_NS / self.bytes_per_s
            self._stretch, self._stretch_at = 1 / (1 - min(FULLEST, used)), now
        return self._stretch

    def ahead(self, num_bytes: int, now: int) -> float:
        """Bytes of other copies that pass before `num_bytes` more have."""
        total = 0.0
        for copy in self.copies:
            if copy.until_ns > now:
                left = copy.num_bytes * (copy.until_ns - now) / (copy.until_ns - copy.start_ns)
                total += left if left < num_bytes else num_bytes
        return total


class ClusterLink(Link):
    """One direction of a link between two clusters.

    `bytes_per_s`: what it carries, as measured of late; `nominal`: what it was said to carry; `lasting`: what it seems
    to carry in the long run. `owed`: bytes of hand-overs that were decided and are not whole at the other end. `up`:
    whether anything crosses it; `trusted`: whether it is counted on.
    """

    __slots__ = ("lasting", "nominal", "owed", "rtt_ns", "source", "target", "trusted", "up")

    def __init__(self, rule: LinkRule) -> None:
        super().__init__(rule.bytes_per_s)
        self.source, self.target, self.rtt_ns = rule.source, rule.target, rule.rtt_ns
        self.nominal, self.owed = rule.bytes_per_s, 0
        self.up = self.trusted = True
        self.lasting = float(rule.bytes_per_s)

    def handed_over_ns(self, num_bytes: int, state_bytes: int, computed_ns: float) -> float:
        """Until all KV of a prompt is across whose computing ends in `computed_ns`.

        Its KV streams while it computes, behind what is owed; a recurrent state (`state_bytes` of `num_bytes`) is
        final only at the end. All that leaves at the rate of the time to come, not of this moment.
        """
        streaming = (self.owed + num_bytes) * NS_PER_S / self.lasting
        return max(streaming, computed_ns + state_bytes * NS_PER_S / self.lasting) + self.rtt_ns / 2


def transfer_ns(
    link_out: Link, link_in: Link, num_bytes: int, now: int, across: ClusterLink | None = None
) -> tuple[float, float]:
    """(how long a copy that starts now takes, by how much it delays the others in all), both in ns."""
    if across is not None:
        own, delay = transfer_ns(link_out, link_in, num_bytes, now)
        before = across.ahead(num_bytes, now)
        own = max(own, (num_bytes + before) * NS_PER_S / across.bytes_per_s) + across.rtt_ns / 2
        # Who shares two of the links is delayed once; to count it twice is on the safe side.
        return own, delay + before * NS_PER_S / across.bytes_per_s
    if not link_out.copies and not link_in.copies:
        return num_bytes * NS_PER_S / min(link_out.bytes_per_s, link_in.bytes_per_s), 0.0
    before_out, before_in = link_out.ahead(num_bytes, now), link_in.ahead(num_bytes, now)
    out_ns, in_ns = NS_PER_S / link_out.bytes_per_s, NS_PER_S / link_in.bytes_per_s
    own = max((num_bytes + before_out) * out_ns, (num_bytes + before_in) * in_ns)
    delay = before_out * out_ns + before_in * in_ns
    if before_out and before_in:  # who shares both links is delayed once
        both = [copy for copy in link_in.copies if copy.link_out is link_out]
        delay -= sum([min(copy.bytes_left(now), num_bytes) for copy in both]) * min(out_ns, in_ns)
    return own, delay


def expected_ns(
    link_out: Link, link_in: Link, num_bytes: int, now: int, across: ClusterLink | None = None
) -> tuple[float, float]:
    """As `transfer_ns`, with copies that will come later."""
    own, delay = transfer_ns(link_out, link_in, num_bytes, now, across)
    own *= link_out.stretch(now) * link_in.stretch(now)
    return (own if across is None else own * across.stretch(now)), delay


def begin(link_out: Link, link_in: Link, num_bytes: int, now: int, across: ClusterLink | None = None) -> Copy:
    """Counts a copy, and the delay it brings to those it shares a link with."""
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
