"""Which waiting request comes next: first come first served, or the shortest that breaks no promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol


class Waiting(Protocol):
    """A request in a queue."""

    work_ns: int
    """Time its prefill takes."""
    deadline_ns: int
    """When its first token was promised; 0 for no promise."""


def promise_order(queue: Sequence[Waiting], now: int, ready: Callable[[Waiting], bool]) -> int:
    """Index of the request to start at `now`. `queue` is in order of arrival.

    Whoever was admitted in order of arrival has slack: its deadline less the time it would end in that order.
    The shortest request goes first that fits into the least slack of those before it, and whose KV will be here
    by the time it has computed the rest. No constant; with admission nobody starves.
    """
    end, least_slack, choice = now, math.inf, 0
    shortest = queue[0].work_ns
    for index, request in enumerate(queue):
        work = request.work_ns
        if work < shortest and work <= least_slack and ready(request):
            choice, shortest = index, work
        end += work
        if request.deadline_ns:
            slack = request.deadline_ns - end
            if 0 <= slack < least_slack:
                least_slack = slack
    return choice
