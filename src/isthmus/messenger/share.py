"""A share of the bandwidth: a token bucket, without a clock of its own (Turner 1986: the leaky bucket)."""

from __future__ import annotations

from isthmus.types import NS_PER_S


class Share:
    """At most `bytes_per_s` on average, and `burst` bytes at once. May be common to several sessions.

    A message may overdraw it: what goes next then waits until that is paid for.
    """

    def __init__(self, bytes_per_s: int, burst: int = 4 << 20) -> None:
        if bytes_per_s <= 0 or burst <= 0:
            raise ValueError("a share and its burst must be positive")
        self.bytes_per_s, self._burst = bytes_per_s, burst
        self._paid_ns = 0
        """All that was taken is paid for at this time; one burst earlier is as good as now."""

    def free_ns(self, now_ns: int) -> int:
        """When the next bytes may be taken: `now_ns`, or later."""
        return max(now_ns, self._paid_ns - self._burst * NS_PER_S // self.bytes_per_s)

    def take(self, count: int, now_ns: int) -> None:
        self._paid_ns = max(self._paid_ns, now_ns) + count * NS_PER_S // self.bytes_per_s
