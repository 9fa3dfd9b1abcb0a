"""Recurrent layers against the definition of the delta rule, and against the published layers' reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from isthmus.core.models import Delta
from isthmus.live.engine.kernels import Kernels
from isthmus.live.engine.kernels.plain import PlainKernels
from isthmus.live.engine.linear import (
    GatedDeltaNet,
    Inputs,
    KimiDelta,
    State,
    advance,
    layer_output,
    step,
)
from isthmus.live.engine.linear.layer import convolve, convolve_step, inputs_gdn, inputs_kda, projection
from isthmus.live.engine.linear.rule import advance_rule, step_each, step_rule, step_together
from tests.live.engine.support import largest_error, randn

LENGTHS = (1, 2, 3, 7, 31, 63, 64, 65, 127, 200)
CLOSE = 5e-6


# The convolution.


def convolved(x_TC: Tensor, weight_KC: Tensor) -> Tensor:
    """By its definition, from the start of a sequence."""
    taps = weight_KC.shape[0]
    padded = torch.cat((torch.zeros(taps - 1, x_TC.shape[1]), x_TC)).double()
    sums = [(padded[at : at + taps] * weight_KC).sum(0) for at in range(len(x_TC))]
    return torch.nn.functional.silu(torch.stack(sums))


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("cut", range(9))
def test_a_convolution_goes_on_from_its_window(taps: int, cut: int) -> None:
    x, weight = randn(8, 6), randn(taps, 6, seed=1)
    window = torch.zeros(taps - 1, 6)
    out = torch.cat([convolve(x[:cut], window, weight), convolve(x[cut:], window, weight)])
    assert largest_error(out, convolved(x, weight)) < CLOSE
    assert torch.equal(window, x[8 - taps + 1 :])


def test_one_token_of_many_requests_is_convolved_with_the_window_of_each() -> None:
    x, weight = randn(3, 9, 6), randn(4, 6, seed=1)
    windows, slots = randn(5, 3, 6, seed=2), torch.tensor([4, 0, 2])
    untouched = windows[[1, 3]].clone()
    windows[slots] = 0
    outs = [convolve_step(x[:, at], windows, slots, weight) for at in range(9)]
    for row in range(3):
        assert largest_error(torch.stack(outs)[:, row], convolved(x[row], weight)) < CLOSE
    assert torch.equal(windows[slots], x[:, 6:])
    assert torch.equal(windows[[1, 3]], untouched)


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

HIDDEN = 40
GDN_HEADS = Delta("gdn", num_keys=2, num_values=4, key_dim=16, value_dim=12, taps=4)
KDA_HEADS = Delta("kda", num_keys=3, num_values=3, key_dim=16, value_dim=16, taps=4)


def drawn(module: Any) -> dict[str, Tensor]:
    """The module's parameters, filled so that every part of the layer matters."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values if parameter.ndim <= 1 or "A_log" in name else 0.3 * values)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def gated_delta_net() -> tuple[Any, GatedDeltaNet]:
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=GDN_HEADS.num_keys,
        linear_num_value_heads=GDN_HEADS.num_values,
        linear_key_head_dim=GDN_HEADS.key_dim,
        linear_value_head_dim=GDN_HEADS.value_dim,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    reference = Qwen3NextGatedDeltaNet(config, 0).eval()
    found = drawn(reference)
    layer = GatedDeltaNet(
        heads=GDN_HEADS,
        project_PN=projection(found["in_proj_qkvz.weight"], found["in_proj_ba.weight"], GDN_HEADS),
        conv_KC=found["conv1d.weight"][:, 0].T.contiguous(),
        rate_H=-found["A_log"].exp(),
        dt_bias_H=found["dt_bias"],
        norm_V=found["norm.weight"],
        output_NM=found["out_proj.weight"],
        eps=config.rms_norm_eps,
    )
    return reference, layer


def kimi_delta() -> tuple[Any, KimiDelta]:
    config = KimiLinearConfig(
        hidden_size=HIDDEN,
        linear_num_heads=KDA_HEADS.num_values,
        linear_head_dim=KDA_HEADS.key_dim,
        linear_conv_kernel_dim=KDA_HEADS.taps,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    reference = KimiLinearDeltaAttention(config, 0).eval()
    found = drawn(reference)
    names = ("q_proj", "k_proj", "v_proj", "forget_gate.f_a_proj", "g_a_proj", "b_proj")
    layer = KimiDelta(
        heads=KDA_HEADS,
        project_PN=torch.cat([found[f"{name}.weight"] for name in names]),
        conv_KC=found["conv1d.weight"][:, 0].T.contiguous(),
        forget_MD=found["forget_gate.f_b_proj.weight"],
        gate_MD=found["g_b_proj.weight"],
        rate_H=-found["forget_gate.A_log"].exp().flatten(),
        dt_bias_HK=found["forget_gate.dt_bias"].view(KDA_HEADS.num_values, KDA_HEADS.key_dim),
        norm_V=found["o_norm.weight"],
        output_NM=found["o_proj.weight"],
        eps=config.rms_norm_eps,
    )
    return reference, layer


CASES: dict[str, Any] = {"gdn": (gated_delta_net, inputs_gdn), "kda": (kimi_delta, inputs_kda)}


@pytest.mark.parametrize("length", [1, 2, 65, 130])
@pytest.mark.parametrize("case", list(CASES))
def test_a_layer_equals_the_reference(case: str, length: int, kernels: Kernels) -> None:
    make, project = CASES[case]
    reference, layer = make()
    x = randn(length, HIDDEN, seed=7)
    with torch.no_grad():
        expected = reference(x[None])[0]
    state = State.of(torch.zeros(2, layer.heads.state_numbers), layer.heads)
    inputs: Inputs = project(layer, x, kernels)
    out = advance(layer, inputs, state, 1, kernels)
    found = layer_output(layer, out, inputs.gate_THV, kernels)
    assert largest_error(found, expected) < 2e-5


@pytest.mark.parametrize("case", list(CASES))
def test_prompts_and_decodes_of_a_layer_equal_the_reference(case: str) -> None:
    """Two requests at slots 3 and 0: prompts in two runs each, then decoded together."""
    make, project = CASES[case]
    reference, layer = make()
    kernels, prompts, cuts = PlainKernels(), (70, 9), (33, 8)
    xs = [randn(length + 6, HIDDEN, seed=length) for length in prompts]
    with torch.no_grad():
        expected = [reference(x[None])[0] for x in xs]
    live = torch.zeros(4, layer.heads.state_numbers)
    state, slots = State.of(live, layer.heads), torch.tensor([3, 0])
    for x, length, cut, slot in zip(xs, prompts, cuts, slots.tolist(), strict=True):
        inputs = project(layer, x[:length], kernels)
        for run in (slice(0, cut), slice(cut, length)):
            advance(layer, inputs[run], state, slot, kernels)
    for at in range(6):
        x = torch.stack([x[length + at] for x, length in zip(xs, prompts, strict=True)])
        inputs = project(layer, x, kernels)
        found = layer_output(layer, step(layer, inputs, state, slots, kernels), inputs.gate_THV, kernels)
        wanted = torch.stack([y[length + at] for y, length in zip(expected, prompts, strict=True)])
        assert largest_error(found, wanted) < 2e-5
    assert not live[[1, 2]].any()


@pytest.mark.parametrize("case", list(CASES))
def test_narrow_activations_are_computed_in_float32(case: str) -> None:
    """bfloat16 in and out; the error is that of rounding weights, inputs and the gates, and does not grow."""
    make, project = CASES[case]
    _, layer = make()
    kernels, x = PlainKernels(), randn(100, HIDDEN, seed=7)
    outs = []
    for dtype in (torch.float32, torch.bfloat16):
        state = State.of(torch.zeros(1, layer.heads.state_numbers), layer.heads)
        inputs = project(layer, x.to(dtype), kernels)
        out = advance(layer, inputs, state, 0, kernels)
        assert out.dtype == torch.float32
        outs.append(layer_output(layer, out, inputs.gate_THV, kernels))
    assert outs[1].dtype == torch.bfloat16
    error = (outs[1].float() - outs[0]).norm() / outs[0].norm()
    assert error < 0.05


def test_the_state_of_a_slot_is_one_range_of_bytes() -> None:
    live = torch.arange(2 * GDN_HEADS.state_numbers, dtype=torch.float32).view(2, -1)
    state = State.of(live, GDN_HEADS)
    assert state.window_SWC.shape == (2, 3, 2 * 32 + 48)
    assert state.matrix_SHKV.shape == (2, 4, 16, 12)
    flat = torch.cat((state.window_SWC[1].flatten(), state.matrix_SHKV[1].flatten()))
    assert torch.equal(flat, live[1])
    assert state.matrix_SHKV.data_ptr() == live.data_ptr() + 4 * (
        GDN_HEADS.state_numbers - GDN_HEADS.matrix_numbers
    )
