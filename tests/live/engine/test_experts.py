"""Mixtures of experts against the published layers' reference, and their order of work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearMoE
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from isthmus.live.engine.kernels import Kernels
from isthmus.live.engine.kernels.plain import PlainKernels
from isthmus.live.engine.layers import Mixture, Mlp, Routing, choose, mix, run_experts
from tests.live.engine.support import largest_error, randn

HIDDEN, INNER, EXPERTS = 32, 24, 16


def drawn(module: Any) -> dict[str, Tensor]:
    """The module's parameters and buffers, filled so that every part matters."""
    generator = torch.Generator().manual_seed(5)
    found = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for tensor in found.values():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return {name: tensor.detach() for name, tensor in found.items()}


def qwen3_next(normalise: bool = True) -> tuple[Any, Mixture]:
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=5,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=20,
        norm_topk_prob=normalise,
    )
    config._experts_implementation = "eager"
    reference = Qwen3NextSparseMoeBlock(config).eval()
    found = drawn(reference)
    mixture = Mixture(
        routing=Routing(top_k=5, scores="softmax", normalise=normalise),
        router_EN=found["gate.weight"],
        bias_E=None,
        gate_up_E2IN=found["experts.gate_up_proj"],
        down_ENI=found["experts.down_proj"],
        shared=shared_of(found, "shared_expert"),
        shared_gate_1N=found["shared_expert_gate.weight"],
    )
    return reference, mixture


SIGMOID: dict[str, tuple[Any, Any]] = {
    "deepseek": (DeepseekV3Config, DeepseekV3MoE),
    "kimi": (KimiLinearConfig, KimiLinearMoE),
}


def sigmoid_scored(
    family: str, groups: int = 1, top_groups: int = 1, normalise: bool = True
) -> tuple[Any, Mixture]:
    make_config, make = SIGMOID[family]
    config = make_config(
        hidden_size=HIDDEN,
        num_local_experts=EXPERTS,
        num_experts_per_tok=5,
        moe_intermediate_size=INNER,
        n_shared_experts=2,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=normalise,
        routed_scaling_factor=2.5,
    )
    config._experts_implementation = "eager"
    reference = make(config).eval()
    found = drawn(reference)
    mixture = Mixture(
        routing=Routing(5, "sigmoid", normalise, 2.5, groups, top_groups),
        router_EN=found["gate.weight"],
        bias_E=found["gate.e_score_correction_bias"],
        gate_up_E2IN=found["experts.gate_up_proj"],
        down_ENI=found["experts.down_proj"],
        shared=shared_of(found, "shared_experts"),
    )
    return reference, mixture


def shared_of(found: dict[str, Tensor], name: str) -> Mlp:
    gate, up, down = (found[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return Mlp(torch.cat((gate, up)), down)


CASES: dict[str, Any] = {
    "qwen3_next": qwen3_next,
    "qwen3_next, not normalised": lambda: qwen3_next(False),
    "deepseek": lambda: sigmoid_scored("deepseek", 4, 2),
    "deepseek, one group": lambda: sigmoid_scored("deepseek"),
    "deepseek, not normalised": lambda: sigmoid_scored("deepseek", 8, 3, False),
    "kimi": lambda: sigmoid_scored("kimi", 1, 1),
    "kimi, groups": lambda: sigmoid_scored("kimi", 4, 3),
}


@pytest.mark.parametrize("num_tokens", [1, 2, 67])
@pytest.mark.parametrize("case", list(CASES))
def test_a_mixture_equals_the_reference(case: str, num_tokens: int, kernels: Kernels) -> None:
    reference, mixture = CASES[case]()
    x = randn(num_tokens, HIDDEN, seed=num_tokens)
    with torch.no_grad():
        expected = reference(x[None])[0]
    found = mix(mixture, x, kernels)
    assert found.dtype == x.dtype
    assert largest_error(found, expected) < 5e-6


class Counting(PlainKernels):
    """Counts rows that went through matrix products, by the product."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        self.rows.append(len(x_TK))
        return super().linear(x_TK, weight_NK, bias_N)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_only_experts_that_are_chosen_run_and_only_for_their_tokens(num_tokens: int) -> None:
    _, mixture = qwen3_next()
    x, kernels = randn(num_tokens, HIDDEN), Counting()
    choice = choose(mixture, x, kernels)
    kernels.rows.clear()
    run_experts(mixture, x, choice, kernels)
    counts = choice[0].flatten().bincount().tolist()
    assert kernels.rows == [count for count in counts if count for _ in range(2)]
    assert sum(kernels.rows) == 2 * 5 * num_tokens


def test_a_mixture_without_a_shared_expert_in_bfloat16() -> None:
    _, mixture = qwen3_next()
    bare = Mixture(mixture.routing, mixture.router_EN, None, mixture.gate_up_E2IN, mixture.down_ENI)
    x = randn(30, HIDDEN)
    found, expected = mix(bare, x.bfloat16(), PlainKernels()), mix(bare, x.bfloat16().float(), PlainKernels())
    assert found.dtype == torch.bfloat16
    error = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 0.01, "rounding alone; a token near a tie may choose another expert"
