"""Numbers by hand: a decode step of B sequences with C tokens takes 10 ms + B ms + C us."""

from __future__ import annotations

import pytest

from isthmus.core.conductor import Abort, Refuse, RequestArrived, Route, Rules
from isthmus.core.conductor.admission import FORECASTS, Admission, Overload
from isthmus.core.conductor.view import Placement, RequestView, View
from isthmus.core.types import NS_PER_S, RequestId, Role

from .cluster import Cluster
from .views import MS, accept, arrival, view_of

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def refused(
    view: View, rules: Rules, request: RequestArrived, ttft_ms: float = 0, now: int = 0
) -> Overload | None:
    """The verdict on a request placed on the first prefill node, by these rules."""
    prefill = view.prefills[0]
    placement = Placement(prefill, 0, 0, 0, ttft_ms * MS)
    placement.decode = prefill if prefill.role is M else view.decodes[0]
    return Admission(rules).at_arrival(view, request, placement, now)


def load(view: View, tbt_ms: int, num_tokens: int = 200) -> float:
    """Load of the decode pool that `early` refuses a request for."""
    overload = refused(view, Rules(admission="early", tbt_ms=tbt_ms), arrival(num_tokens))
    assert overload is not None and overload.stage == "decode"
    return overload.load


def forecast(name: str, view: View, now: int, then: int, **parameters: float) -> tuple[float, float]:
    """Of the first node that decodes."""
    found = FORECASTS[name]
    assert found is not None
    return found(
        view, next(node for node in view.nodes.values() if node.role is not P), now, then, **parameters
    )


def decoding(view: View, count: int, num_tokens: int, now: int = 0, *, node: int = -1) -> list[RequestView]:
    """So many requests whose answers began at `now`."""
    begun = []
    for _ in range(count):
        decode = list(view.nodes.values())[node]
        name = f"d{len(view.requests)}"
        request = accept(view, arrival(num_tokens, request=name), view.prefills[0], decode, 1, now)
        view.first_token(request, now)
        view.handed_over(request, now)
        begun.append(request)
    return begun


@pytest.mark.parametrize(
    ("rules", "limit_ms"),
    [
        *[
            (Rules(admission=name, ttft_ms=100), 100)
            for name in ("baseline", "early", "predictive", "survival")
        ],
        (Rules(admission="baseline", ttft_ms=100, reserve=0.1), 90),
        (Rules(admission="baseline", ttft_ms=100, load_limit=2.0), 200),
    ],
)
def test_a_first_token_after_its_limit_is_refused(rules: Rules, limit_ms: int) -> None:
    view = view_of(P, D)
    assert refused(view, rules, arrival(10), limit_ms) is None
    overload = refused(view, rules, arrival(10), limit_ms + 1)
    assert overload is not None and overload.stage == "prefill"
    promised_ms = 100 * (1 - rules.reserve)
    assert (overload.load, overload.excess) == pytest.approx(((limit_ms + 1) / promised_ms, 1 * MS))
    for ttft_ms in (limit_ms + 900, limit_ms + 4000):
        overload = refused(view, rules, arrival(10), ttft_ms)
        assert overload is not None and overload.retry_after_ms == max(1000, ttft_ms - limit_ms)


def test_nobody_is_refused_without_admission_or_without_a_limit() -> None:
    view = view_of(P, D)
    decoding(view, 50, 100)
    assert refused(view, Rules(admission="none", ttft_ms=1, tbt_ms=1), arrival(10), 99_999) is None
    for admission in FORECASTS:
        assert refused(view, Rules(admission=admission), arrival(10), 99_999) is None


def test_a_requests_own_limits_go_before_those_of_the_deployment() -> None:
    view = view_of(P, D)
    decoding(view, 10, 100)
    for rules in (Rules(admission="early", ttft_ms=100, tbt_ms=30), Rules(admission="early")):
        assert refused(view, rules, arrival(10, ttft_ms=50, tbt_ms=30), 51) is not None
        assert refused(view, rules, arrival(10, ttft_ms=500, tbt_ms=30), 400) is None
        assert refused(view, rules, arrival(10, tbt_ms=20), 50) is not None
        assert refused(view, rules, arrival(10, tbt_ms=25), 50) is None


def test_early_counts_what_decodes_now_and_this_request_spread_over_the_decode_nodes() -> None:
    view = view_of(P, D)
    decoding(view, 10, 100)
    accept(view, arrival(5000, request="queued"), view.prefills[0], view.decodes[0], 5)
    assert refused(view, Rules(admission="early", tbt_ms=23), arrival(200)) is None
    assert load(view, 22) == pytest.approx((10 + 11 + 1.2) / 22)
    view = view_of(P, D, D)
    decoding(view, 5, 100, node=1)
    decoding(view, 5, 100, node=2)
    assert refused(view, Rules(admission="early", tbt_ms=17), arrival(200)) is None
    assert load(view, 16) == pytest.approx((10 + 5.5 + 0.6) / 16)


def test_baseline_asks_the_decode_node_only_when_the_prompt_is_computed() -> None:
    view, rules = view_of(P, D), Rules(admission="baseline", tbt_ms=20)
    decoding(view, 50, 100)
    assert refused(view, rules, arrival(10)) is None
    request = accept(view, arrival(100, request="r"), view.prefills[0], view.decodes[0], 1)
    view.first_token(request, 0)
    overload = Admission(rules).at_decode(view, request, 0)
    assert overload is not None and overload.stage == "decode"
    assert overload.load == pytest.approx((10 + 51 + 5.1) / 20)


@pytest.mark.parametrize("admission", ["baseline", "early", "predictive", "survival"])
def test_one_output_token_needs_no_decode_node(admission: str) -> None:
    view, rules = view_of(P, D), Rules(admission=admission, tbt_ms=1)
    decoding(view, 50, 100)
    assert refused(view, rules, arrival(10, max_tokens=1)) is None
    request = accept(view, arrival(10, request="r", max_tokens=1), view.prefills[0], view.prefills[0], 1)
    view.first_token(request, 0)
    assert Admission(rules).at_decode(view, request, 0) is None


def test_when_to_come_back_to_a_decode_pool() -> None:
    """10 requests with answers of 500 tokens in steps of 22.2 ms; 2.2 ms of 11.2 must go: 1.96 requests."""
    view, rules = view_of(P, D), Rules(admission="early")
    decoding(view, 10, 100)
    overload = refused(view, rules, arrival(200, tbt_ms=20))
    assert overload is not None and overload.retry_after_ms == 1000  # nobody knows how long answers are
    view.outputs.add(500)
    overload = refused(view, rules, arrival(200, tbt_ms=20))
    assert overload is not None
    assert overload.excess == pytest.approx(10 * 2.2 / 11.2)
    assert overload.retry_after_ms == pytest.approx(22.2 * 500 * (2.2 / 11.2), abs=1)
    overload = refused(view, rules, arrival(200, tbt_ms=11))
    assert overload is not None and overload.excess > 10, "no thinner batch would keep this limit"
    alone = refused(view_of(P, D), rules, arrival(200, tbt_ms=5))
    assert alone is not None and alone.retry_after_ms >= 1000


def test_predictive_adds_who_comes_and_drops_who_began_long_ago() -> None:
    view = view_of(P, D)
    now = 100 * NS_PER_S
    decoding(view, 3, 100, now - 9 * NS_PER_S)  # they end in 1 s
    decoding(view, 4, 100, now - 2 * NS_PER_S)
    for name, work in (("soon", 500), ("late", 3000)):  # done in 0.5 and 3.5 s
        accept(view, arrival(300, request=name), view.prefills[0], view.decodes[0], work, now)
    expected = {0.1: (7, 700), 0.6: (8, 1000), 1.1: (5, 700), 4.0: (6, 1000), 9.0: (2, 600)}
    for seconds, batch in expected.items():
        assert forecast("predictive", view, now, now + int(seconds * NS_PER_S)) == batch


def test_a_prefill_that_is_late_is_expected_now() -> None:
    view, now = view_of(P, D), 60 * NS_PER_S
    accept(view, arrival(300, request="late"), view.prefills[0], view.decodes[0], 100, 0)
    for name in ("predictive", "survival"):
        assert forecast(name, view, now, now) == (1, 300)


def test_survival_counts_each_with_its_chance_to_go_on_from_when_it_comes() -> None:
    """Half of the answers end after 10 tokens, half after 1,000; a step takes 10 + 2 + 0.2 ms."""
    view, step = view_of(P, D), 12.2 * MS
    for _ in range(50):
        view.outputs.add(10)
        view.outputs.add(1000)
    begun = decoding(view, 2, 100)
    assert forecast("survival", view, 0, 0) == (2, 200)
    assert forecast("survival", view, 0, int(50 * step)) == pytest.approx((1.0, 150), rel=1e-3)
    old = int(50 * step)  # now they have 50 tokens: the short ones ended
    assert forecast("survival", view, old, int(100 * step)) == pytest.approx((2, 400), rel=1e-3)
    assert forecast("survival", view, old, int(2000 * step)) == (0, 0)
    for request in begun:
        view.unassign(request, 0)
    accept(view, arrival(100, request="r"), view.prefills[0], view.decodes[0], 1000, 0)
    for ms, batch in ((999, (0, 0)), (1000, (1, 100)), (1000 + 50 * 11.1, (0.5, 75))):
        assert forecast("survival", view, 0, int(ms * MS)) == pytest.approx(batch, rel=1e-3)


def test_mixed_nodes_are_a_decode_pool_of_their_own() -> None:
    """Prefill nodes that decode nothing do not thin their mean, nor decode nodes they never give work to."""
    view = view_of(M, P, D)
    decoding(view, 12, 100, node=0)
    assert load(view, 20, 100) == pytest.approx((10 + 13 + 1.3) / 20)
    view = view_of(P, M, D)
    decoding(view, 12, 100, node=1)
    assert refused(view, Rules(admission="early", tbt_ms=20), arrival(100)) is None


def test_on_a_mixed_node_an_answer_begins_with_its_first_token() -> None:
    view = view_of(M)
    request = accept(view, arrival(100, request="r"), view.prefills[0], view.prefills[0], 10)
    view.first_token(request, 5 * NS_PER_S)
    assert request.decode_ns == 5 * NS_PER_S
    assert forecast("predictive", view, 7 * NS_PER_S, 7 * NS_PER_S, decode_s=1.0) == (0, 0)


# The whole way.


def cluster(rules: Rules) -> Cluster:
    some = Cluster(rules, step_ns=0)
    some.join("p1", P, 10_000)
    some.join("d1", D, 10_000)
    return some


def test_what_streams_is_never_refused_and_what_is_refused_after_its_prefill_is_gone() -> None:
    some = cluster(Rules(admission="baseline", tbt_ms=13))
    for request in "abc":
        some.route(request, 10)
    assert some.first_token("a") == some.first_token("b") == []
    abort, refuse = some.first_token("c")
    assert isinstance(abort, Abort) and abort.nodes == ("p1", "d1")
    assert isinstance(refuse, Refuse) and (refuse.code, refuse.stage) == ("overloaded", "decode")
    assert refuse.retry_after_ms >= 1000
    some.fail("a", 1)
    some.route("d", 10)
    some.first_token("d")
    assert some.first_token("a", 2) == []
    some.drain()


def test_a_queue_that_is_too_long_refuses_and_says_for_how_long() -> None:
    some = cluster(Rules(admission="early", ttft_ms=10_000))
    for at in range(2):
        some.route(f"r{at}", 5000)
    refuse = some.refusal("late", 3000)
    assert (refuse.stage, refuse.retry_after_ms) == ("prefill", 3000)
    some.now += 3 * NS_PER_S
    (route,) = some.arrives("late again", 3000)
    assert isinstance(route, Route) and route.request == RequestId("late again")
    assert route.deadline_ns == some.now + 10 * NS_PER_S
