"""Gaps between the parts of a streamed answer as they pass, for the recording: the pace that its client gets."""

from __future__ import annotations

from array import array
from heapq import nlargest
from itertools import pairwise


class Gaps:
    """Times of one answer's parts."""

    __slots__ = ("_times_s",)

    def __init__(self) -> None:
        self._times_s = array("d")

    def take(self, now_s: float) -> None:
        """Takes a part that came now."""
        self._times_s.append(now_s)

    def tbt_ns(self, num_tokens: int) -> int:
        """Returns the mean of the longest tenth of the gaps between so many tokens, in ns; 0 without gaps. Parts that
        came together, as the end of an answer and its usage do, are no gaps."""
        count = -(-(num_tokens - 1) // 10)
        longest = nlargest(count, [after - before for before, after in pairwise(self._times_s)])
        return round(1e9 * sum(longest) / len(longest)) if longest else 0
