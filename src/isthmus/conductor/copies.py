"""KV copies under way between caches, as the conductor expects them to proceed on shared links.

Every node has one link in and one link out. The links' real shares are unknown here; on one fairly shared link
with no later arrivals the estimate is exact: a copy with less left than ours delays us by what it has left, one
with more delays us by as much as we have.
"""

from __future__ import annotations

from isthmus.types import NS_PER_S


class Copy:
    """`num_bytes` from one node's link out to another's link in, expected to end at `until_ns`."""

    __slots__ = ("link_in", "link_out", "num_bytes", "start_ns", "until_ns")

    def __init__(self, link_out: Link, link_in: Link, num_bytes: int, start_ns: int) -> None:
        self.link_out, self.link_in, self.num_bytes = link_out, link_in, num_bytes
        self.start_ns = self.until_ns = start_ns

    def bytes_left(self, now: int) -> float:
        """As if it went on evenly from its start to its expected end."""
        if now >= self.until_ns:
            return 0.0
        return self.num_bytes * (self.until_ns - now) / (self.until_ns - self.start_ns)


class Link:
    """One direction of one node's link. `copies` in the order they began."""

    __slots__ = ("bytes_per_s", "copies")

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self.copies: dict[Copy, None] = {}

    def ahead(self, num_bytes: int, now: int) -> float:
        """Bytes of other copies that pass before `num_bytes` more have."""
        if not self.copies:
            return 0.0
        return sum(min(copy.bytes_left(now), num_bytes) for copy in self.copies)


def transfer_ns(link_out: Link, link_in: Link, num_bytes: int, now: int) -> tuple[float, float]:
    """(how long a copy that starts now takes, by how much it delays the others in all), both in ns."""
    if not link_out.copies and not link_in.copies:
        return num_bytes * NS_PER_S / min(link_out.bytes_per_s, link_in.bytes_per_s), 0.0
    before_out, before_in = link_out.ahead(num_bytes, now), link_in.ahead(num_bytes, now)
    out_ns, in_ns = NS_PER_S / link_out.bytes_per_s, NS_PER_S / link_in.bytes_per_s
    own = max((num_bytes + before_out) * out_ns, (num_bytes + before_in) * in_ns)
    return own, before_out * out_ns + before_in * in_ns


def begin(link_out: Link, link_in: Link, num_bytes: int, now: int) -> Copy:
    """Books a copy, and the delay it brings to those it shares a link with."""
    copy = Copy(link_out, link_in, num_bytes, now)
    own, _ = transfer_ns(link_out, link_in, num_bytes, now)
    for link in (link_out, link_in):
        for other in link.copies:
            delay = min(other.bytes_left(now), num_bytes) * NS_PER_S / link.bytes_per_s
            if other.until_ns > now:
                other.until_ns += int(delay)
    copy.until_ns = now + int(own) + 1
    link_out.copies[copy] = link_in.copies[copy] = None
    return copy


def end(copy: Copy) -> None:
    copy.link_out.copies.pop(copy, None)
    copy.link_in.copies.pop(copy, None)
