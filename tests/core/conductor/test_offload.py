from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.conductor.routing import guarded, offloads

tokens = st.integers(0, 200)


def published(l_total: int, l_prfaas: int, l_pd: int, t: int, mode: str) -> tuple[str, bool]:
    """The paper's rule (arXiv 2604.15039), transcribed: (cluster that computes, whether a cached prefix crosses)."""
    if mode == "scarce":
        return ("PD-P" if l_total - l_pd <= t else "PrfaaS"), False
    l_prefix = max(l_prfaas, l_pd)
    compute = "PD-P" if l_total - l_prefix <= t else "PrfaaS"
    holds = {"PD-P": l_pd, "PrfaaS": l_prfaas}[compute]
    return compute, holds != l_prefix  # a tie is held by both


@given(tokens, tokens, tokens, tokens)
def test_it_is_the_published_rule(total: int, home: int, there: int, threshold: int) -> None:
    home, there = min(home, total), min(there, total)
    for mode in ("scarce", "abundant"):
        compute, _ = published(total, there, home, threshold, mode)
        assert offloads(total, home, there, threshold, abundant=mode == "abundant") == (compute == "PrfaaS")
        assert not offloads(10**9, home, there, None, abundant=mode == "abundant")


def test_the_guard_weighs_what_both_cost() -> None:
    assert guarded(True, 16.0, 12.0) and not guarded(True, 8.0, 9.0)
    assert guarded(True, 8.0, 8.0) and not guarded(False, 8.0, 8.0)  # a tie goes where the threshold says
    assert not guarded(False, 8.0, 5.0)  # short, and not much slower at home
    assert guarded(False, 11.0, 5.0) and not guarded(False, 10.0, 5.0)
    assert guarded(True, float("inf"), 5.0)  # no node at home can take it
