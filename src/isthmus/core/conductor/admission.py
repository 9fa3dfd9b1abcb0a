"""Load is shed by priority, and between tenants by their shares: whom to turn away in place of an arriving request, of
those that wait for prefill.

Nothing of them was streamed, so they are refused like an arriving request. Lower priorities go first; of one priority
the most work where a queue is too long, so that few go for one, and the newest where too many would decode, since to
take long prompts out lets more begin to decode. docs/policies.md has figures. Nobody is turned away unless that makes
room for the request it is done for.

Clients say their priorities themselves, so these rank the requests of one tenant only. Of other tenants those go that
have more requests in progress, next to their weights, than the arriving request's tenant would have, the most first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from isthmus.core.conductor.events import RequestArrived, Rules
from isthmus.core.conductor.view import PREFILLING, NodeView, Placement, RequestView, View
from isthmus.core.types import NS_PER_MS, NS_PER_S, Role

KEPT_NS = 3 * NS_PER_S
"""Somewhat longer than refused clients are told to wait (`Rules.retry_after_ms`)."""


def newest_first(request: RequestView) -> float:
    return -request.arrived_ns


def most_work_first(request: RequestView) -> float:
    return -request.work_ns


def waiting_below(
    view: View,
    nodes: Iterable[NodeView],
    arriving: RequestArrived,
    order: Callable[[RequestView], float] = newest_first,
) -> list[RequestView]:
    """Requests in these nodes' queues that may be turned away for `arriving`, the first to go first; not those in
    service."""
    waiting = []
    for node in nodes:
        in_service = True
        for request in node.prefills.values():
            if not in_service and not request.answering:
                waiting.append(request)
            in_service = False
    waiting.reverse()  # so that of those that came at one time the last goes first
    waiting.sort(key=lambda request: (request.arrived.priority, order(request), newest_first(request)))
    above = _above_share(view, waiting, arriving) if arriving.weight else []
    return above + [request for request in waiting if _ranks_below(request.arrived, arriving)]


def _ranks_below(waiting: RequestArrived, arriving: RequestArrived) -> bool:
    """By priority, which tenants that have shares give to their own requests."""
    apart = waiting.weight and arriving.weight and waiting.tenant != arriving.tenant
    return waiting.priority < arriving.priority and not apart


def _above_share(view: View, waiting: Iterable[RequestView], arriving: RequestArrived) -> list[RequestView]:
    """Those of other tenants that have more than the arriving request's would; of each tenant, in the order given, so
    many that this stays true with one of them less. The tenant with the most goes first."""
    numbers = in_progress(view)
    level = (numbers[arriving.tenant] + 1) / arriving.weight
    ranked: list[tuple[float, RequestView]] = []
    for request in waiting:
        facts = request.arrived
        if not facts.weight or facts.tenant == arriving.tenant:
            continue
        above = numbers[facts.tenant] / facts.weight
        if above > level:
            numbers[facts.tenant] -= 1
            ranked.append((above, request))
    ranked.sort(key=lambda item: -item[0])
    return [request for _, request in ranked]


def in_progress(view: View) -> Counter[str]:
    """Requests of each tenant that has a share."""
    return Counter([each.arrived.tenant for each in view.requests.values() if each.arrived.weight])


class ReservedPlaces:
    """Kept for tenants that were refused with less than their share in progress, one for each, until it is taken or
    nobody came for it in `KEPT_NS`. Else who asks most often would get each place that becomes free."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[int, float]] = {}  # and the tenant's weight

    def num_kept(self, view: View, arriving: RequestArrived, now: int) -> int:
        """From this request: for tenants that have less, next to their weights, than its own would."""
        self._until = {name: kept for name, kept in self._until.items() if kept[0] > now}
        if not self._until or not arriving.weight:
            return 0
        numbers = in_progress(view)
        level = (numbers[arriving.tenant] + 1) / arriving.weight
        others = [(name, weight) for name, (_, weight) in self._until.items() if name != arriving.tenant]
        return sum([(numbers[name] + 1) / weight < level for name, weight in others])

    def refused(self, arriving: RequestArrived, now: int) -> None:
        if arriving.weight:
            self._until[arriving.tenant] = now + KEPT_NS, arriving.weight

    def taken(self, arriving: RequestArrived) -> None:
        self._until.pop(arriving.tenant, None)


def to_replace(view: View, request: RequestArrived) -> list[RequestView]:
    """Whom to turn away so that there is one request less; empty when nobody may be."""
    return waiting_below(view, view.prefills, request, most_work_first)[:1]


def to_shorten(view: View, node: NodeView, request: RequestArrived, excess_ns: float) -> list[RequestView]:
    """Whom to turn away so that the node's queue is `excess_ns` shorter; empty when that is not enough."""
    chosen = []
    for victim in waiting_below(view, [node], request, most_work_first):
        if excess_ns <= 0:
            break
        chosen.append(victim)
        excess_ns -= victim.work_ns
    return chosen if excess_ns <= 0 else []


def to_thin(view: View, request: RequestArrived, num_requests: int, until: int) -> list[RequestView]:
    """Whom to turn away so that at `until` `num_requests` fewer decode; empty when there are not so many."""
    waiting = waiting_below(view, view.prefills, request)
    chosen = [victim for victim in waiting if victim.expected_ns <= until][:num_requests]
    return chosen if len(chosen) == num_requests else []


# Overload control: whom to refuse, and when (Mooncake, arXiv 2407.00079, section 7).
#
# The load of a pool is its predicted latency over its limit, and a request is refused when the load it would meet
# exceeds `load_limit`. The admissions differ in which load they look at, and when:
#
# none         no refusal
# baseline     the prefill pool at arrival; the decode pool only when the prompt is computed
# early        both pools at arrival, the decode pool as it is now
# predictive   both at arrival, the decode pool as it will be when the prompt is computed; every request is
# taken to decode equally long (its parameter `decode_s`)
# survival     the same, with the chance that each request goes on, from the answers seen so far; and the decode
# node once more when the prompt is computed, for by then its batch is known
#
# `early` and `predictive` are the paper's: the decode node's check moves to the arrival and is not repeated, so a
# forecast that was too low is paid by those that decode. A request without a limit is never refused for it.


Forecast = Callable[..., tuple[float, float]]
"""(view, node, now, then, its own parameters) -> requests and context tokens expected to decode on `node` at `then`."""


def limit_ns(own_ms: int | None, rules_ms: int | None) -> int:
    """The limit of a request that may bring its own; 0 for none."""
    limit = own_ms if own_ms is not None else rules_ms
    return 0 if limit is None else limit * NS_PER_MS


class Overload(NamedTuple):
    """A pool that cannot take a request: which, how loaded it would be, and when to come back.

    `excess`: what is too much, ns of queue for prefill, requests in the batches for decode.
    """

    stage: str
    load: float
    excess: float
    wait_ns: float

    @property
    def retry_after_ms(self) -> int:
        return max(1000, int(self.wait_ns / NS_PER_MS))

    def __str__(self) -> str:
        return f"the {self.stage} nodes would be loaded to {self.load:.0%} of what the limits allow"


class Admission:
    """The checks of one admission by name. `sees_queues`: what waits for prefill counts in its decode load."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._forecast = FORECASTS[rules.admission]
        self._parameters = dict(rules.admission_parameters)
        self._active = rules.admission != "none"
        self._checks_at_decode = rules.admission in ("baseline", "survival")
        self.sees_queues = self._forecast not in (None, _as_now)

    def at_arrival(
        self, view: View, request: RequestArrived, placement: Placement, now: int, waited_ns: int = 0
    ) -> Overload | None:
        """Refuses what its placement would let break a limit. `waited_ns`: for a node, before."""
        if not self._active:
            return None
        ttft_ns = limit_ns(request.ttft_ms, self._rules.ttft_ms) * (1 - self._rules.reserve)
        expected_ns = waited_ns + placement.ttft_ns
        excess = expected_ns - ttft_ns * self._rules.load_limit
        if ttft_ns and excess > 0:
            return Overload("prefill", expected_ns / ttft_ns, excess, excess)
        tbt_ns = limit_ns(request.tbt_ms, self._rules.tbt_ms)
        if self._forecast is None or not tbt_ns or request.max_tokens <= 1:
            return None
        cluster, does_both = placement.decode.cluster, placement.decode.role is Role.MIXED
        nodes = cluster.mixed if does_both else cluster.decodes
        load = self._decode_load(view, nodes, request, now, now + placement.ttft_ns) / tbt_ns
        return self._judge(load, tbt_ns, nodes, view)

    def at_decode(self, view: View, request: RequestView, now: int) -> Overload | None:
        """The decode node's own check, when the prompt is computed."""
        facts, node = request.arrived, request.decode
        tbt_ns = limit_ns(facts.tbt_ms, self._rules.tbt_ms)
        if not self._checks_at_decode or not tbt_ns or node is None or facts.max_tokens <= 1:
            return None
        batch = sum(1 for other in node.decodes.values() if other.state is not PREFILLING)
        mean = node.context / node.batch
        return self._judge(_step_ns(view, node, batch, batch * mean) / tbt_ns, tbt_ns, [node], view)

    def _judge(self, load: float, tbt_ns: float, nodes: list[NodeView], view: View) -> Overload | None:
        limit = self._rules.load_limit
        if load <= limit:
            return None
        batch = sum([node.batch for node in nodes])
        # What a batch adds is about proportional to its size, what an iteration takes in any case is not.
        least = sum([_step_ns(view, node, 1, 0) for node in nodes]) / len(nodes) / tbt_ns
        too_many = batch * (load - limit) / (load - least) if least < limit else batch + 1
        # About when so many will have ended: each takes its mean length in iterations of this time.
        wait_ns = load * tbt_ns * view.outputs.mean * too_many / max(1, batch)
        return Overload("decode", load, too_many, wait_ns)

    def _decode_load(
        self, view: View, nodes: list[NodeView], request: RequestArrived, now: int, then: int
    ) -> float:
        """Mean over these nodes of the predicted time between tokens (ns), this request spread over them."""
        assert self._forecast is not None
        total, share = 0.0, 1 / len(nodes)
        for node in nodes:
            batch, context = self._forecast(view, node, now, then, **self._parameters)
            total += _step_ns(view, node, batch + share, context + share * request.num_tokens)
        return total / len(nodes)


def _step_ns(view: View, node: NodeView, batch: float, context: float) -> float:
    """One iteration; between whole batch sizes linear."""
    whole = int(batch)
    fixed, slope = node.cost.decode_step_ps(max(1, whole))
    between = 0.0
    if batch > whole:
        above, _ = node.cost.decode_step_ps(whole + 1)
        between = (above - fixed) * (batch - whole)
    return (fixed + between + slope * context) / 1000


def _as_now(view: View, node: NodeView, now: int, then: int) -> tuple[float, float]:
    """What decodes at this moment, as early rejection sees it: requests still in prefill do not count."""
    running = [request for request in node.decodes.values() if request.state is not PREFILLING]
    return len(running), sum([request.arrived.num_tokens for request in running])


def _uniform(view: View, node: NodeView, now: int, then: int, decode_s: float = 10.0) -> tuple[float, float]:
    """Every request decodes for `decode_s`: those that began before that are gone, queued ones have come."""
    batch, context = 0, 0
    for request in node.decodes.values():
        begins = _decode_begins(request, now)
        if begins <= then < begins + int(decode_s * NS_PER_S):
            batch += 1
            context += request.arrived.num_tokens
    return batch, context


def _survival(view: View, node: NodeView, now: int, then: int) -> tuple[float, float]:
    """Each request counts with the chance that it still goes on, by the tokens it has and will have by then."""
    if not node.decodes:
        return 0.0, 0.0
    step_ns = _step_ns(view, node, node.batch, node.context)
    outputs = view.outputs
    batch = context = 0.0
    for request in node.decodes.values():
        begins = _decode_begins(request, now)
        if begins > then:
            continue
        age = (now - begins) / step_ns if begins < now else 0.0
        chance = outputs.going_on(age, (then - max(begins, now)) / step_ns)
        batch += chance
        context += chance * (request.arrived.num_tokens + (then - begins) / step_ns)
    return batch, context


def _decode_begins(request: RequestView, now: int) -> int:
    """When it began to decode, or will, as far as its place in a queue tells."""
    if request.state is not PREFILLING:
        return request.decode_ns if request.decode_ns >= 0 else now
    return max(request.expected_ns, now)  # it may be late


FORECASTS: dict[str, Forecast | None] = {
    "none": None,
    "baseline": None,
    "early": _as_now,
    "predictive": _uniform,
    "survival": _survival,
}
