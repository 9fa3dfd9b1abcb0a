from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.conductor.offload import Decision, Prediction, abundant, guarded, scarce

tokens = st.integers(0, 200)
thresholds = st.none() | st.integers(0, 200)


def published(l_total: int, l_prfaas: int, l_pd: int, t: int, mode: str) -> tuple[str, bool]:
    """The paper's rule (arXiv 2604.15039), transcribed: (cluster that computes, whether a cached prefix crosses)."""
    if mode == "scarce":
        return ("PD-P" if l_total - l_pd <= t else "PrfaaS"), False
    l_prefix = max(l_prfaas, l_pd)
    compute = "PD-P" if l_total - l_prefix <= t else "PrfaaS"
    holds = {"PD-P": l_pd, "PrfaaS": l_prfaas}[compute]
    return compute, holds != l_prefix  # a tie is held by both


@given(tokens, tokens, tokens, st.integers(0, 200))
def test_it_is_the_published_rule(total: int, home: int, there: int, threshold: int) -> None:
    home, there = min(home, total), min(there, total)
    for mode, rule in (("scarce", scarce), ("abundant", abundant)):
        compute, crosses = published(total, there, home, threshold, mode)
        assert rule(total, home, there, threshold) == Decision(compute == "PrfaaS", crosses)


@pytest.mark.parametrize("rule", [scarce, abundant])
def test_the_threshold_itself_stays_and_none_keeps_all(rule: object) -> None:
    assert callable(rule)
    assert not rule(120, 20, 20, 100).offload and rule(121, 20, 20, 100).offload
    assert not rule(10**9, 0, 0, None).offload


@given(tokens, tokens, thresholds)
def test_equal_caches_never_copy(total: int, cached: int, threshold: int | None) -> None:
    assert not abundant(total, cached, cached, threshold).copy


def test_modes_differ_when_the_prefix_lies_elsewhere() -> None:
    # 1,000 tokens, 900 of them cached there alone, threshold 200.
    assert scarce(1000, 0, 900, 200) == Decision(True)
    assert abundant(1000, 0, 900, 200) == Decision(False, copy=True)  # little is left: at home, with the copy
    assert abundant(1000, 300, 0, 200) == Decision(True, copy=True)
    assert abundant(1000, 300, 600, 200) == Decision(True)


def test_the_guard_weighs_waiting_and_work() -> None:
    here, there = Prediction(8.0, 8.0, 0.0), Prediction(5.0, 3.0, 0.0)
    assert guarded(True, here, there)
    assert not guarded(True, here, Prediction(9.0, 3.0, 0.0))  # its queue is long and nobody else comes
    assert guarded(
        True, Prediction(8.0, 8.0, 1.0), Prediction(9.0, 3.0, 1.0)
    )  # 8 + 8 of node time against 9 + 3
    assert guarded(True, here, here)  # a tie goes where the threshold says
    assert not guarded(False, here, there)  # short, and not much slower at home
    assert guarded(False, Prediction(11.0, 8.0, 0.0), there) and not guarded(
        False, Prediction(10.0, 8.0, 0.0), there
    )
    assert not guarded(False, here, here)
