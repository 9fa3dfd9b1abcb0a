"""Short-term control of offloading: the threshold follows recent lengths and the state of the links.

With every `LinksMeasured`, in this order:

1. **Links.** A link that is down is not used, and its requests go elsewhere. It is trusted again once it was up for
   `RETURN_NS`, twice as long after each further fall, up to `LONGEST_RETURN_NS`; until then it is used only for what
   nothing else can serve. `FORGIVEN_NS` up, and its falls are forgotten. What it carries is measured: bytes sent over
   the time something was on its way. More than believed is believed at once; less only where something was left waiting
   all the time, half of the difference in each report, for otherwise the sender was slow and not the link. A link
   believed to carry less than it should is tried again: after `QUIET_NS` without congestion (below) the belief grows by
   `GROWTH` a second. If it falls again then, the next wait is twice as long, up to `LONGEST_QUIET_NS`.

   The guard of `offload` counts with what the link carries in the long run and with what is owed to it: prompts that
   would be served sooner at home stay there, one by one, until that is over.
2. **Threshold.** Fixed, or solved for the latest prompts, the nodes and what the links carry in the long run, every
   `SOLVE_NS` and when nodes or rates changed. A fixed one is raised to the solved one while links carry less than they
   should. Until enough prompts were seen it is 0, and the guard decides alone, which needs no lengths.

   "In the long run" forgets a better rate in about `LASTING_NS`, and a worse one at once. So a drop that passes is left
   to the guard and moves the threshold little, one that lasts moves it to what equation (6) says and not beyond, and
   a return brings it back: too high a threshold costs more than too low a one (by a fifth: a quarter of the requests
   against a twentieth), and the home cluster takes longer to work off what it was given too much of than a link does.
3. **Cache mode**, where it is `auto`: bandwidth is abundant while links are used less than `IDLE_SHARE`, and scarce
   from `BUSY_SHARE` or congestion on.

Congestion begins when more than `QUEUE_HIGH_S` of link time is waiting, or more than `LOSS_HIGH` of what is sent is
sent again, in two reports in a row, and is over after `QUIET_NS` below `QUEUE_LOW_S` and `LOSS_LOW`.

A new threshold is told when it differs by more than `DEAD_BAND` from the one in force, and `HOLD_NS` after the last,
unless the other clusters went out of reach or came back. So it changes at most 60 s / `HOLD_NS` times a minute, and
twice more for each time a link falls and returns, which `RETURN_NS` bounds. None of these numbers was tuned: each was
set once, by what it stands for. Seconds are what a prompt takes on a link, minutes what a load takes to change.
"""

from __future__ import annotations

from isthmus.core.conductor.capacity import Capacity
from isthmus.core.conductor.copies import ClusterLink
from isthmus.core.conductor.events import LinksMeasured, LinkState, ThresholdSet
from isthmus.core.conductor.routing import Router
from isthmus.core.conductor.rules import Rules
from isthmus.core.conductor.view import View
from isthmus.core.types import NS_PER_S

RETURN_NS, LONGEST_RETURN_NS, FORGIVEN_NS = 5 * NS_PER_S, 160 * NS_PER_S, 300 * NS_PER_S
QUIET_NS, LONGEST_QUIET_NS, GROWTH = 10 * NS_PER_S, 160 * NS_PER_S, 1.05
QUEUE_HIGH_S, QUEUE_LOW_S = 1.0, 0.25
LOSS_HIGH, LOSS_LOW = 0.02, 0.005
SEGMENT_BYTES = 1448
"""Of one TCP segment over Ethernet, with timestamps: what a retransmit sends again."""
HOLD_NS, DEAD_BAND = 5 * NS_PER_S, 0.05
LASTING_NS = 60 * NS_PER_S
SOLVE_NS = 30 * NS_PER_S
IDLE_SHARE, BUSY_SHARE, SHARE_MEMORY = 0.3, 0.6, 10.0
"""The share is smoothed over about so many seconds."""
ALMOST, RATE_BAND = 0.95, 0.1
"""A link that carries this share of its nominal rate is as it should be. The threshold is solved again when the links
together carry more or less by this share."""


class LinkControl:
    """What is known of one direction. `congested`, `share` (of its rate used), and what it does to the link itself."""

    def __init__(self, link: ClusterLink) -> None:
        self.link = link
        self.congested = False
        self.share = 0.0
        self._waited = False
        self._bad_reports = self._falls = 0
        self._good_since = self._up_since = 0
        self._quiet_ns, self._grown = QUIET_NS, False

    def availability(self, up: bool, now: int) -> None:
        """Takes the link out of use at once, and back into use after a while."""
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
    """Steers a router by what `LinksMeasured` reports. It sets `threshold`, `abundant` and `guards` there, and
    the links."""

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
        """Takes in the reports; returns the new threshold if there is one."""
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
        """The threshold without congestion, and why."""
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
        """Anew, if it is time or something changed."""
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
