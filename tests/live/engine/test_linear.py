"""Recurrent layers against the definition of the delta rule, and against the published layers' reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.live.engine.linear import advance_rule, step_each, step_rule, step_together
from tests.live.engine.support import largest_error, randn

LENGTHS = (1, 2, 3, 7, 31, 63, 64, 65, 127, 200)
CLOSE = 5e-6


# The convolution.


# The delta rule.

Rule = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def rule_of(length: int, *, strength: float = 1.0, channels: bool, heads: tuple[int, int] = (2, 4)) -> Rule:
    """Inputs of the rule: unit keys that resemble each other, decays that come and go."""
    keys, values = heads
    q = torch.nn.functional.normalize(randn(length, keys, 16, seed=1), dim=-1)
    k = torch.nn.functional.normalize(randn(length, keys, 16, seed=2) + 0.5, dim=-1)
    v, beta = randn(length, values, 12, seed=3), randn(length, values, seed=4).sigmoid()
    some = randn(length, values, 1, seed=6) > 0
    decay = -strength * some * randn(length, values, 16 if channels else 1, seed=5).abs()
    return q, k, v, decay, beta


def by_definition(rule: Rule, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token in float64."""
    q, k, v, decay, beta = (x.double() for x in rule)
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    state, outs = state_HKV.double(), []
    for at in range(len(q)):
        state = state * decay[at].exp()[..., None]
        change = (v[at] - torch.einsum("hkv,hk->hv", state, k[at])) * beta[at][:, None]
        state = state + k[at][..., None] * change[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[at]))
    return torch.stack(outs), state


def piece(rule: Rule, tokens: slice) -> Rule:
    q, k, v, decay, beta = rule
    return q[tokens], k[tokens], v[tokens], decay[tokens], beta[tokens]


KINDS = [(False, (2, 4)), (False, (3, 3)), (True, (4, 4))]


@pytest.mark.parametrize(("channels", "heads"), KINDS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_run_equals_its_tokens_one_by_one(
    channels: bool, heads: tuple[int, int], length: int, fresh: bool
) -> None:
    rule = rule_of(length, channels=channels, heads=heads)
    state = torch.zeros(heads[1], 16, 12) if fresh else randn(heads[1], 16, 12, seed=9)
    out, after = by_definition(rule, state)
    assert largest_error(advance_rule(*rule, state), out) < CLOSE
    assert largest_error(state, after) < CLOSE


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("strength", [1e-3, 10.0, 300.0, 1e5])
def test_strong_decays_neither_overflow_nor_lose_what_follows(channels: bool, strength: float) -> None:
    """Half the tokens decay, by up to e^-1e5; between them others must keep everything."""
    rule = rule_of(200, strength=strength, channels=channels, heads=(4, 4))
    state = randn(4, 16, 12, seed=9)
    out, after = by_definition(rule, state)
    assert largest_error(advance_rule(*rule, state), out) < CLOSE
    assert largest_error(state, after) < CLOSE


def test_a_strong_decay_does_not_blur_the_weak_ones_after_it() -> None:
    """Sums of decays from the chunk's start would lose the digits of the later ones."""
    q, k, v, decay, beta = rule_of(64, strength=0.05, channels=True, heads=(4, 4))
    decay[3] = -1e6
    state = torch.zeros(4, 16, 12)
    out, _ = by_definition((q, k, v, decay, beta), state)
    assert largest_error(advance_rule(q, k, v, decay, beta, state), out) < 1e-6


@pytest.mark.parametrize("channels", [False, True])
def test_equal_keys_that_are_overwritten_at_once(channels: bool) -> None:
    """The triangular system at its worst: every token replaces what the one before wrote."""
    q, k, v, decay, beta = rule_of(130, channels=channels, heads=(4, 4))
    k, beta = k[:1].expand(130, -1, -1).contiguous(), torch.ones_like(beta)
    rule = (q, k, v, torch.zeros_like(decay), beta)
    state = torch.zeros(4, 16, 12)
    out, after = by_definition(rule, state)
    assert largest_error(advance_rule(*rule, state), out) < CLOSE
    assert largest_error(state, after) < CLOSE


@settings(max_examples=25)
@given(st.lists(st.integers(0, 150), max_size=5), st.booleans())
def test_a_run_may_be_cut_anywhere(cuts: Sequence[int], channels: bool) -> None:
    rule = rule_of(150, channels=channels, heads=(4, 4))
    whole, parts = torch.zeros(4, 16, 12), torch.zeros(4, 16, 12)
    out = advance_rule(*rule, whole)
    edges = sorted({0, 150, *cuts})
    outs = [advance_rule(*piece(rule, slice(*run)), parts) for run in pairwise(edges)]
    assert largest_error(torch.cat(outs), out) < CLOSE
    assert largest_error(parts, whole) < CLOSE


@pytest.mark.parametrize("update", [step_rule, step_each, step_together])
@pytest.mark.parametrize(("channels", "heads"), KINDS)
def test_single_tokens_of_many_requests(
    channels: bool, heads: tuple[int, int], update: Callable[..., Tensor]
) -> None:
    """Three requests at slots 4, 0 and 2, five tokens each; the other slots keep what they hold."""
    rule = rule_of(15, channels=channels, heads=heads)
    states, slots = randn(5, heads[1], 16, 12, seed=9), torch.tensor([4, 0, 2])
    before = states.clone()
    outs = torch.stack([update(*piece(rule, slice(at, None, 5)), states, slots) for at in range(5)])
    for row, slot in enumerate(slots.tolist()):
        out, after = by_definition(piece(rule, slice(5 * row, 5 * row + 5)), before[slot])
        assert largest_error(outs[:, row], out) < CLOSE
        assert largest_error(states[slot], after) < CLOSE
    assert torch.equal(states[[1, 3]], before[[1, 3]])


# Whole layers against transformers.
