"""Flows over paths of links, with max-min fair rates that are right at every instant.

A flow is a number of bytes on its way across all links of its path at once. The rates are those of max-min
fairness (Bertsekas and Gallager, Data Networks, section 6.5.2): all flows grow together, and a flow stops
growing when a link of its path is full. They change when a flow starts or ends, and only then.

What keeps this cheap:

* A flow is never faster than the narrowest link of its path: its *bound*. Where the bounds of all flows on a
  link add up to no more than its capacity, the link holds nobody back: it is not *contended*, and couples no
  flows. A flow without a contended link runs at its bound and touches no other; a link wide enough for all costs
  nothing.
* Where a link is contended, only the flows connected to it through contended links are filled again, and only
  those whose rate changed get a new finish. Flows of one route have the same rate, so links know routes, not flows.
* Filling waits until somebody asks or time moves on, so what starts and ends at one instant is filled once.
* The earliest finish of all is kept, so the driver needs one timer for the whole network.
* Nobody waits for the end of a *quiet* flow. While no link of it is contended it changes nothing either, so it sets
  no timer, and is taken off when another flow comes to one of its links.

Times are integer ns, bytes are integers, rates float bytes per second. Knows nothing of nodes, blocks or
requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import chain, compress, repeat
from operator import attrgetter, sub

NEVER = 1 << 62
"""Finish of a flow that stands still."""

# An unlimited link ends every transfer at once. Finite, so that sums and shares stay numbers.
_UNLIMITED = 1e30

# Halved rates give finishes at exactly x.5 ns, where float noise would decide. This offset no small fraction
# hits.
ROUNDING = 0.3183

_MANY = 4
"""So many flows of one route are worth the trouble of keeping them in step."""

_finish_ns, _number = attrgetter("finish_ns"), attrgetter("number")


class _Link:
    __slots__ = (
        "behind", "bound", "busy_ns", "busy_since", "busy_until", "capacity", "name", "num_flows", "num_open",
        "number", "room", "routes", "untimed",
    )  # fmt: skip

    def __init__(self, number: int, name: str, capacity: float, behind: _Link | None) -> None:
        self.number = number
        self.behind = behind
        self.name = name
        self.capacity = capacity
        # Those that have flows, on this link or the one it is behind.
        self.routes: dict[_Route, None] = {} if behind is None else behind.routes
        self.num_flows = 0
        self.untimed: dict[Flow, None] = {}  # if it may hold them back, in order of start
        self.bound = 0.0  # sum of the bounds of its flows; not kept while it is slack
        self.busy_ns = 0  # before busy_since
        self.busy_since = 0
        self.busy_until = 0  # last end of a flow that was taken off
        # While its flows are being filled: capacity not given out yet, and flows that have no rate yet.
        self.room = 0.0
        self.num_open = 0

    @property
    def is_slack(self) -> bool:
        """It holds nobody back, since whatever crosses it crosses a link that is no wider."""
        return self.behind is not None and self.behind.capacity <= self.capacity

    def in_order(self) -> list[_Route]:
        """Its routes, in the order in which their first flows started."""
        behind = self.behind is not None
        routes = [route for route in self.routes if self in route.links] if behind else self.routes
        return sorted(routes, key=_number)

    @property
    def flows(self) -> list[Flow]:
        """In order of start."""
        return sorted([flow for route in self.in_order() for flow in route.flows], key=_number)


class _Route:
    """A path. `limits`: the links of it that may hold a flow back; `bound`: capacity of the narrowest. Its `flows`, in
    order of start, the first of them the `number`-th that came, have one rate, which is their `share` when they are
    filled; `open`: that is still to be found. `bytes_ended`: by flows that have ended. `trunks`: the links that are
    behind no other.

    Many flows go in step: `left` of each is kept here, the bytes to go at `since`, from when all move at `rate`. Of
    them the `first` to end alone is aimed. Another flow does not go in step until its rate changes with theirs.
    """

    __slots__ = (
        "bound", "bytes_ended", "first", "flows", "left", "limits", "links", "number", "open", "rate", "share", "since",
        "trunks",
    )  # fmt: skip

    limits: tuple[_Link, ...]

    def __init__(self, links: tuple[_Link, ...]) -> None:
        self.links = links
        self.trunks = tuple(link for link in links if link.behind is None)
        self.flows: dict[Flow, None] = {}
        self.left: dict[Flow, float] = {}
        self.first: Flow | None = None
        self.rate, self.since = 0.0, 0
        self.bytes_ended, self.number, self.open = 0, 0, False
        self.measure()

    def measure(self) -> None:
        """To be called whenever the capacity of some link has changed."""
        self.limits = tuple(link for link in self.links if not link.is_slack)
        self.bound = self.share = min(link.capacity for link in self.limits)

    def change_rate(self, rate: float, now: int) -> None:
        """Brings what is left of each flow up to `now`; from then on all move at `rate`."""
        if self.left or len(self.flows) >= _MANY:
            self.leave_ended(now)
            if len(self.flows) < _MANY:
                for flow in tuple(self.left):
                    self.leave(flow)
            elif rate != self.rate or not self.left:
                self._keep_step(rate, now)
        if len(self.left) < len(self.flows):
            for flow in self.flows:
                if flow.rate != rate and flow not in self.left:
                    flow.change_rate(rate, now)

    def _keep_step(self, rate: float, now: int) -> None:
        moved = repeat(self.rate * ((now - self.since) * 1e-9))
        left = dict(zip(self.left, map(sub, self.left.values(), moved), strict=False))
        for flow in self.flows if len(left) < len(self.flows) else ():
            if flow not in left and flow.rate != rate and flow.finish_ns > now:
                left[flow] = flow.left - flow.rate * ((now - flow.since) * 1e-9)
                flow.finish_ns = NEVER
        self.left, self.rate, self.since = left, rate, now
        self._aim()

    def _aim(self) -> None:
        if self.first is not None and self.first in self.left:
            self.first.finish_ns = NEVER
        first = self.first = min(self.left, key=self.left.__getitem__, default=None)
        if first is not None:
            first.left, first.rate, first.since = self.left[first], self.rate, self.since
            first.aim()

    def leave(self, flow: Flow) -> None:
        """Writes down of a flow by itself what was kept of it in step."""
        left = self.left.pop(flow, None)
        if left is not None:
            flow.left, flow.rate, flow.since = left, self.rate, self.since
            flow.aim()
            if flow is self.first:
                self._aim()

    def leave_ended(self, now: int) -> None:
        while self.first is not None and self.first.finish_ns <= now:
            self.leave(self.first)


class Flow:
    """One transfer. The driver reads `tag`, `num_bytes` and `started_ns`; the rest belongs to the network.

    `live`: it is on its links, as the `number`-th that came; `timed`: its end is on the network's timer.
    """

    __slots__ = (
        "finish_ns", "left", "live", "num_bytes", "number", "quiet", "rate", "route", "since", "started_ns", "tag",
        "timed",
    )  # fmt: skip

    def __init__(self, route: _Route, num_bytes: int, tag: object, now: int, quiet: bool) -> None:
        self.route, self.tag, self.quiet = route, tag, quiet
        self.live = self.timed = False
        self.number = 0
        self.begin(num_bytes, now)

    def begin(self, num_bytes: int, now: int) -> None:
        """Nothing of it has moved."""
        self.num_bytes, self.started_ns = num_bytes, now
        self.rate = 0.0  # holds from `since` on, when `left` bytes were to go
        self.left = float(num_bytes)
        self.since = now
        self.finish_ns = NEVER

    def change_rate(self, rate: float, now: int) -> None:
        """Brings `left` up to `now`; from then on it moves at `rate`."""
        if self.finish_ns <= now:
            # It has ended and waits to be taken off: to aim again could move its end by the rounding of before.
            self.left, self.rate, self.since = 0.0, rate, now
            return
        self.left -= self.rate * ((now - self.since) * 1e-9)
        self.rate, self.since = rate, now
        self.aim()

    def aim(self) -> None:
        """Sets the finish from what is left."""
        if self.left <= 0.0:
            self.finish_ns = self.since
        elif self.rate > 0.0:
            self.finish_ns = self.since + int(self.left * 1e9 / self.rate + ROUNDING)
        else:
            self.finish_ns = NEVER


class FlowNetwork:
    """All links and the flows on them.

    `now` never goes back, and never passes `next_finish()` without a call of `finish`. `version` changes
    whenever the next finish may have changed.
    """

    def __init__(self) -> None:
        self.version = 0
        self._links: list[_Link] = []
        self._routes: dict[tuple[int, ...], _Route] = {}
        self._timed: dict[Flow, None] = {}  # in order of start, quiet ones since a timer matters
        self._unfilled: dict[_Link, None] = {}  # links whose flows await new rates, all since the same instant
        self._unfilled_at = 0
        self._next: int | None = NEVER  # None: not known, look for it
        self._num_joined = 0

    def add_link(self, name: str, bytes_per_s: float, behind: int | None = None) -> int:
        """Number of a new link. `bytes_per_s` may be infinite, and 0 for a link that is down.

        `behind`: a link that every flow on this one crosses too. While that is no wider, this one holds nobody
        back, and only its bytes and its time are counted.
        """
        other = None if behind is None else self._links[behind]
        self._links.append(_Link(len(self._links), name, _capacity(name, bytes_per_s), other))
        return len(self._links) - 1

    def start(
        self, path: tuple[int, ...], num_bytes: int, tag: object, now: int, *, quiet: bool = False
    ) -> Flow:
        """Sends bytes across all links of `path`, which are distinct. No bytes: finishes at `now`.

        The end of a `quiet` flow is not told.
        """
        if self._unfilled and now != self._unfilled_at:
            self._fill()
        flow = Flow(self._routes.get(path) or self._route(path), num_bytes, tag, now, quiet)
        self._join(flow, now)
        return flow

    def grow(self, flow: Flow, num_bytes: int, now: int) -> None:
        """Adds bytes to a flow that is live, or was quiet. From now on its end is told."""
        self._catch_up(now)
        flow.route.leave(flow)
        if flow.quiet:
            if flow.finish_ns <= now:
                self._resume(flow, num_bytes, now)
                return
            self._time(flow)
            flow.quiet = False
        assert flow.live, f"flow {flow.tag!r} has ended"
        flow.num_bytes += num_bytes
        flow.left += num_bytes - flow.rate * ((now - flow.since) * 1e-9)
        flow.since = now
        flow.aim()
        self._next = None
        self.version += 1

    def _resume(self, flow: Flow, num_bytes: int, now: int) -> None:
        """Sends more of a quiet flow that has ended."""
        route, alone = flow.route, flow.live and not flow.timed
        for link in route.links:
            if link.num_flows > 1:
                alone = False
        if not alone:
            if flow.live:
                self._remove(flow, flow.num_bytes, flow.finish_ns)
            flow.begin(num_bytes, now)
            flow.quiet = False
            self._join(flow, now)
            return
        rate, until = flow.rate, flow.finish_ns
        route.bytes_ended += flow.num_bytes
        for link in route.links:  # it stays on them, at the rate it had
            link.busy_ns += (until if until > link.busy_until else link.busy_until) - link.busy_since
            link.busy_since = now
        flow.begin(num_bytes, now)
        flow.rate = rate
        self._tell_end(flow)
        flow.quiet = False

    def _tell_end(self, flow: Flow) -> None:
        """Aims a flow, and puts its end on the timer."""
        flow.aim()
        self._time(flow)
        if self._next is not None and flow.finish_ns < self._next:
            self._next = flow.finish_ns
        self.version += 1

    def cancel(self, flow: Flow, now: int) -> None:
        """Takes a live or quiet flow off the network; what it has moved still counts."""
        assert flow.live or flow.quiet, f"flow {flow.tag!r} has ended"
        self._catch_up(now)
        flow.route.leave(flow)
        if flow.quiet and flow.finish_ns <= now:
            if flow.live:
                self._remove(flow, flow.num_bytes, flow.finish_ns)
        else:
            self._remove(flow, flow.num_bytes - self.bytes_left(flow, now), now)
        self.version += 1

    def next_finish(self) -> int | None:
        """When the next flow ends, in ns; None while none will. Of quiet flows, those that hold others back count."""
        if self._unfilled:
            self._fill()
        if self._next is None:
            self._next = min(map(_finish_ns, self._timed), default=NEVER)
        return self._next if self._next < NEVER else None

    def finish(self, now: int) -> list[Flow]:
        """Takes off the flows that have ended by `now`; returns them without the quiet ones, in order of start."""
        if self._unfilled:
            self._fill()
        told, ended = [], self._ended(now)
        in_step = [flow.route for flow in ended if flow.route.first is flow]
        for route in in_step:
            route.leave_ended(now)
        for flow in self._ended(now) if in_step else ended:
            self._remove(flow, flow.num_bytes, now)
            if not flow.quiet:
                told.append(flow)
        self.version += 1
        return told

    def set_rate(self, link: int, bytes_per_s: float, now: int) -> None:
        """Gives a link another capacity from `now` on; 0 stops what crosses it."""
        self._catch_up(now)
        live = [flow for flow in self._flows() if not self._is_over(flow, now)]
        changed = self._links[link]
        changed.capacity = _capacity(changed.name, bytes_per_s)
        for route in self._routes.values():
            route.measure()
        for each in self._links:
            each.bound = 0.0
            each.untimed = dict.fromkeys(
                [] if each.is_slack else [flow for flow in each.flows if not flow.timed]
            )
        for flow in live:
            for each in flow.route.limits:
                each.bound += flow.route.bound
        self._refill(self._links, now)
        self._next = None
        self.version += 1

    def flows_on(self, link: int) -> list[Flow]:
        """Those on a link, in order of start. Quiet ones among them may have ended."""
        return self._links[link].flows

    def bytes_left(self, flow: Flow, now: int) -> int:
        """Bytes a live flow has still to send at `now`, rounded up."""
        self._catch_up(now)
        flow.route.leave(flow)
        if flow.finish_ns <= now:
            return 0
        return min(flow.num_bytes, max(0, math.ceil(flow.left - flow.rate * ((now - flow.since) * 1e-9))))

    def bytes_moved(self, link: int, now: int) -> int:
        """Bytes a link has carried until `now`, of live, ended and cancelled flows."""
        each = self._links[link]
        ended = sum([route.bytes_ended for route in self._routes.values() if each in route.links])
        return ended + sum([flow.num_bytes - self.bytes_left(flow, now) for flow in each.flows])

    def busy_ns(self, link: int, now: int) -> int:
        """Time until `now` during which a link had at least one flow."""
        each = self._links[link]
        if not each.num_flows:
            return each.busy_ns
        ends = [flow.finish_ns if flow.quiet and flow.finish_ns < now else now for flow in each.flows]
        return each.busy_ns + max(each.busy_until, *ends) - each.busy_since

    def _route(self, path: tuple[int, ...]) -> _Route:
        assert path and len(set(path)) == len(path), f"a path is distinct links, at least one: {path}"
        links = tuple(self._links[number] for number in path)
        assert all(link.behind is None or link.behind in links for link in links), f"{path} passes a link by"
        route = self._routes[path] = _Route(links)
        return route

    def _catch_up(self, now: int) -> None:
        if self._unfilled and now != self._unfilled_at:
            self._fill()

    def _ended(self, now: int) -> list[Flow]:
        """By what they know of their ends, in order of start."""
        return list(compress(self._timed, map(now.__ge__, map(_finish_ns, self._timed))))

    def _flows(self) -> list[Flow]:
        """All on the network, in order of link and start."""
        return list(dict.fromkeys([flow for link in self._links for flow in link.flows]))

    def _is_over(self, flow: Flow, now: int) -> bool:
        """Takes a quiet flow that has ended off."""
        if flow.timed or flow.finish_ns > now:
            return False
        self._remove(flow, flow.num_bytes, flow.finish_ns)
        return True

    def _join(self, flow: Flow, now: int) -> None:
        """Puts a flow on its links."""
        flow.live, route = True, flow.route
        for link in route.limits:
            if link.untimed:
                for other in tuple(link.untimed):
                    self._is_over(other, now)
        flow.number = self._num_joined = self._num_joined + 1
        if not route.flows:
            route.number = flow.number
            for link in route.trunks:
                link.routes[route] = None
        route.flows[flow] = None
        for link in route.links:
            if not link.num_flows:
                link.busy_since = now
            link.num_flows += 1
        bound, contended = route.bound, False
        for link in route.limits:
            link.bound += bound
            if link.bound > link.capacity:
                contended = True
                self._unfilled[link] = None
        if contended:
            self._unfilled_at = now
        else:
            flow.rate = bound
            if flow.quiet:
                flow.aim()
                for link in route.limits:
                    link.untimed[flow] = None
                return
        self._tell_end(flow)

    def _time(self, flow: Flow) -> None:
        self._timed[flow] = None
        flow.timed = True
        if flow.quiet:
            for link in flow.route.limits:
                link.untimed.pop(flow, None)

    def _remove(self, flow: Flow, moved: int, now: int) -> None:
        flow.live, route = False, flow.route
        del route.flows[flow]
        if not route.flows:
            for link in route.trunks:
                del link.routes[route]
        elif flow.number == route.number:
            route.number = next(iter(route.flows)).number
        route.bytes_ended += moved
        for link in route.links:
            link.num_flows -= 1
            if now > link.busy_until:
                link.busy_until = now
            if not link.num_flows:
                link.busy_ns += link.busy_until - link.busy_since
        for link in route.limits:
            if not link.num_flows:
                link.bound = 0.0  # exactly: no rounding is carried on
                continue
            if link.bound > link.capacity:
                self._unfilled[link] = None
                self._unfilled_at = now
            link.bound -= route.bound
        if flow.timed:
            del self._timed[flow]
            flow.timed = False
            self._next = None
        else:
            for link in route.limits:
                del link.untimed[flow]

    def _fill(self) -> None:
        """New rates for the flows of the unfilled links and all connected to them."""
        unfilled, now = list(self._unfilled), self._unfilled_at
        self._unfilled.clear()
        if len(unfilled) > 1 or not self._share_alone(unfilled[0], now):
            self._refill(unfilled, now)
        self._next = None

    def _share_alone(self, link: _Link, now: int) -> bool:
        """The common case at little cost: the flows of a link share it evenly, or all have room, and no other link
        holds any of them back. False if it is not so."""
        contended = link.bound > link.capacity
        share = link.capacity / link.num_flows if contended else _UNLIMITED
        routes = link.in_order()
        for route in routes:
            if contended and route.bound < share:
                return False
            for other in route.limits:
                if other.bound > other.capacity and other is not link:
                    return False
        for flow in tuple(link.untimed) if contended else ():
            self._time(flow)
        for route in routes:
            route.change_rate(share if contended else route.bound, now)
        return True

    def _refill(self, seeds: Iterable[_Link], now: int) -> None:
        """New rates for the flows of these links, and for all that contended links connect to them."""
        untimed = dict.fromkeys([flow for link in seeds for flow in link.untimed])
        crossings = {link: link.in_order() for link in seeds}
        routes = dict.fromkeys([route for crossing in crossings.values() for route in crossing])
        links: dict[_Link, list[_Route]] = {}  # the contended ones, and how their flows go
        queue = list(routes)
        for route in queue:  # grows meanwhile
            route.share, route.open = route.bound, False
            for link in route.limits:
                if link.bound > link.capacity:
                    route.open = True
                    if link not in links:
                        untimed.update(link.untimed)
                        crossing = links[link] = crossings.get(link) or link.in_order()
                        queue += [other for other in crossing if other not in routes]
                        routes.update(dict.fromkeys(crossing))
        _set_shares(links)
        for flow in untimed if links else ():
            self._time(flow)
        for route in queue:
            route.change_rate(route.share, now)

    def check(self) -> None:
        """Asserts that the rates are the max-min fair ones and that the sums agree. For tests: slow."""
        if self._unfilled:
            self._fill()
        for route in self._routes.values():
            for flow in tuple(route.left):
                route.leave(flow)
        near = 1.0 + 1e-9
        crossing = [link.flows for link in self._links]
        loads = [sum([flow.rate for flow in flows]) for flows in crossing]
        fastest = [max([flow.rate for flow in flows], default=0.0) for flows in crossing]
        for link, flows, load in zip(self._links, crossing, loads, strict=True):
            assert link.num_flows == len(flows)
            assert all(route.number == next(iter(route.flows)).number for route in link.routes)
            untimed = [flow for flow in flows if not flow.timed]
            assert list(link.untimed) == ([] if link.is_slack else untimed)
            assert load <= link.capacity * near, f"link {link.name} carries {load} of {link.capacity} bytes/s"
            bound = 0.0 if link.is_slack else sum([flow.route.bound for flow in flows])
            assert math.isclose(link.bound, bound, rel_tol=1e-9, abs_tol=link.capacity * 1e-9)
            assert all(link in flow.route.links and flow.live for flow in flows)
        for flow in dict.fromkeys(chain(*crossing)):
            assert flow.timed == (flow in self._timed) and (flow.timed or flow.quiet)
            if not flow.timed:
                assert flow.rate == flow.route.bound
                assert all(link.bound <= link.capacity for link in flow.route.limits)
                continue
            assert -1.0 <= flow.left <= flow.num_bytes
            assert any(
                loads[link.number] * near >= link.capacity and flow.rate * near >= fastest[link.number]
                for link in flow.route.links
            ), f"flow {flow.tag!r} at {flow.rate} bytes/s has no bottleneck"
        if self._next is not None:
            assert self._next == min((flow.finish_ns for flow in self._timed), default=NEVER)


def _capacity(name: str, bytes_per_s: float) -> float:
    assert bytes_per_s >= 0.0, f"link {name}: {bytes_per_s} bytes/s"
    return min(bytes_per_s, _UNLIMITED)


def _set_shares(links: Mapping[_Link, Iterable[_Route]]) -> None:
    """Sets `share`, the max-min rate, of all routes of these links: the contended ones of whole components.

    Progressive filling: the link with the least room for each of its flows gives its flows their rate. That
    least share only rises, so a link whose share has grown when its turn comes is put back.
    """
    heap = []
    for link in links:
        link.room = link.capacity
        link.num_open = link.num_flows
        heap.append((link.room / link.num_open, link.number, link))
    heapify(heap)
    while heap:
        promised, number, link = heappop(heap)
        if not link.num_open:
            continue
        share = link.room / link.num_open
        if share > promised:
            heappush(heap, (share, number, link))
            continue
        waiting = [route for route in links[link] if route.open]
        # Flows that a narrower link holds below the share come first: they leave more to the others.
        bounded = [route for route in waiting if route.bound < share]
        for route in bounded or waiting:
            rate = route.bound if bounded else share
            route.share, route.open = rate, False
            num_flows = len(route.flows)
            for crossed in route.limits:
                crossed.room -= rate * num_flows
                crossed.num_open -= num_flows
        if bounded:
            heappush(heap, (share, number, link))
