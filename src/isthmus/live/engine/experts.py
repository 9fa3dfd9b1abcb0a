"""Mixtures of experts: which experts a token goes to, and their work, expert by expert.

Legend: T tokens, N hidden size, E experts, A experts of a token, I inner size of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from isthmus.live.engine.kernels import Kernels

Choice = tuple[Tensor, Tensor]
"""(experts [T, A], weights [T, A] float32)."""


class Routing(msgspec.Struct, frozen=True):
    """How experts are chosen. `normalise`: a token's weights sum to `scale`.

    `scores`: "softmax" over all experts (Qwen3-Next), or "sigmoid" of each (DeepSeek-V3's noaux_tc, Kimi-Linear), where
    a bias is added for the choice alone, and only experts of the `top_groups` best of `groups` groups can be chosen.
    """

    top_k: int
    scores: str
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class Mlp:
    """silu(gate) * up, down: `gate_up_2IN` with the rows of gate first, matrices as stored `[out, in]`."""

    gate_up_2IN: Tensor
    down_NI: Tensor


@dataclass(frozen=True)
class Mixture:
    """The MLP of a layer with experts. `router_EN`: as stored with softmax scores, float32 with sigmoid ones;
    `bias_E`: float32, of sigmoid scores; `shared`: runs for every token (shared experts side by side are one);
    `shared_gate_1N`: of whose sigmoid the shared one's output is multiplied with, if any."""

    routing: Routing
    router_EN: Tensor
    bias_E: Tensor | None
    gate_up_E2IN: Tensor
    down_ENI: Tensor
    shared: Mlp | None = None
    shared_gate_1N: Tensor | None = None


def mix(mixture: Mixture, x_TN: Tensor, kernels: Kernels) -> Tensor:
    """`[T, N]` in the type of `x_TN`."""
    out = run_experts(mixture, x_TN, choose(mixture, x_TN, kernels), kernels)
    if mixture.shared is None:
        return out
    shared = _mlp(x_TN, mixture.shared.gate_up_2IN, mixture.shared.down_NI, kernels)
    if mixture.shared_gate_1N is not None:
        shared *= kernels.linear(x_TN, mixture.shared_gate_1N, None).sigmoid()
    return out.add_(shared)


def choose(mixture: Mixture, x_TN: Tensor, kernels: Kernels) -> Choice:
    """Each token's experts and their weights."""
    if mixture.routing.scores == "softmax":
        return by_softmax(kernels.linear(x_TN, mixture.router_EN, None), mixture.routing)
    assert mixture.bias_E is not None, "sigmoid scores come with a bias"
    logits_TE = torch.nn.functional.linear(x_TN.float(), mixture.router_EN)
    return by_sigmoid(logits_TE, mixture.bias_E, mixture.routing)


def by_softmax(logits_TE: Tensor, routing: Routing) -> Choice:
    weights, experts = logits_TE.float().softmax(-1).topk(routing.top_k, dim=-1)
    return experts, _scaled(weights, routing)


def by_sigmoid(logits_TE: Tensor, bias_E: Tensor, routing: Routing) -> Choice:
    """DeepSeek-V3 (2024), section 2.1.2. A group counts as much as its two best experts together."""
    scores_TE = logits_TE.float().sigmoid()
    biased = scores_TE + bias_E
    if routing.top_groups < routing.groups:
        grouped = biased.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
        barred = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=biased.device).scatter_(
            -1, best, False
        )
        biased = grouped.masked_fill(barred[..., None], float("-inf")).flatten(-2)
    experts = biased.topk(routing.top_k, dim=-1).indices
    return experts, _scaled(scores_TE.gather(-1, experts), routing)


def _scaled(weights_TA: Tensor, routing: Routing) -> Tensor:
    if routing.normalise:
        weights_TA = weights_TA / (weights_TA.sum(-1, keepdim=True) + 1e-20)
    return weights_TA * routing.scale


def run_experts(mixture: Mixture, x_TN: Tensor, choice: Choice, kernels: Kernels) -> Tensor:
    """The weighted sum of each token's experts, `[T, N]`, in the type of `x_TN`.

    Tokens are brought together by expert, so that each expert that is needed runs once. A token's parts are added in
    the order of its choice, whatever else is in the batch.
    """
    experts_TA, weights_TA = choice
    num_tokens, num_chosen = experts_TA.shape
    order = experts_TA.flatten().argsort(stable=True)
    counts = experts_TA.flatten().bincount(minlength=mixture.gate_up_E2IN.shape[0]).tolist()
    rows = x_TN[order // num_chosen]
    parts = kernels.expert_mlps(rows, counts, mixture.gate_up_E2IN, mixture.down_ENI)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    chosen_TAN = parts[back].unflatten(0, (num_tokens, num_chosen))
    return torch.einsum("tan,ta->tn", chosen_TAN.float(), weights_TA).to(x_TN.dtype)


def _mlp(x_TN: Tensor, gate_up_2IN: Tensor, down_NI: Tensor, kernels: Kernels) -> Tensor:
    return kernels.linear(kernels.silu_mul(kernels.linear(x_TN, gate_up_2IN, None)), down_NI, None)
