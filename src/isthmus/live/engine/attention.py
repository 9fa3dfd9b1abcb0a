"""Attention as a sum of parts: `partial` over one piece of the KV, `merge` of several, exactly.

A cached prefix plus a new chunk, and later a request whose KV lies on several nodes, are this operation in
different places (the merge is the usual log-sum-exp identity, e.g. FlashAttention section 3.1,
Infinite-LLM's DistAttention). `lse` is the natural logarithm of the sum of exponentials of the scaled scores.

Legend: T query tokens, L key/value tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]
"""(out [T, H, D], lse [T, H]); lse is float32, or float64 for float64 inputs."""


def partial(
    q_THD: Tensor, kv_L2KD: Tensor, *, scale: float, causal_from: int | None = None, window: int = 0
) -> Part:
    """Attention of T queries over one piece of L keys and values; the piece may be empty.

    `causal_from`: query t sees keys `[0, causal_from + t]` of this piece; None: all. `window`: query t sees
    at most the `window` keys that end at its own (needs `causal_from`); 0: no limit. Queries that see nothing
    give out 0 and lse -inf, which `merge` ignores.
    """
    if kv_L2KD.shape[0] == 0:
        shape = q_THD.shape[:2]
        wide = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
        return torch.zeros_like(q_THD), q_THD.new_full(shape, float("-inf"), dtype=wide)
    flash = q_THD.device.type == "cpu" and q_THD.dtype in (torch.float32, torch.bfloat16)
    plain_causal = causal_from in (None, 0) and not window
    if flash and plain_causal and (causal_from is None or q_THD.shape[0] <= kv_L2KD.shape[0]):
        return _flash(q_THD, kv_L2KD.to(q_THD.dtype), scale, causal_from is not None)
    return _reference(q_THD, kv_L2KD, scale, causal_from, window)


def merge(parts: Sequence[Part]) -> Part:
    """The attention over the union of the parts' keys. Exact; a part with lse -inf adds nothing."""
    if len(parts) == 1:
        return parts[0]
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(lses, dim=0)
    weights = _exp_difference(lses, total)
    merged = (outs.to(weights.dtype) * weights[..., None]).sum(dim=0)
    return merged.to(outs.dtype), total


def _exp_difference(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), with 0 for hidden scores, also where a whole row is hidden and lse is -inf."""
    return (scores - lse).exp().masked_fill_(scores.isneginf(), 0.0)


def _flash(q_THD: Tensor, kv_L2KD: Tensor, scale: float, causal: bool) -> Part:
    """torch's CPU flash kernel, which also returns lse. Causal is aligned to the top left corner.

    Grouped query heads become a second batch dimension over an expanded view: no key is copied.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    length, _, num_kv_heads, _ = kv_L2KD.shape
    group = num_heads // num_kv_heads
    q = q_THD.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = (
        kv_L2KD[:, side].transpose(0, 1)[:, None].expand(num_kv_heads, group, length, head_dim)
        for side in (0, 1)
    )
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(q_THD.shape), lse.permute(2, 0, 1).reshape(num_tokens, num_heads)


def _reference(q_THD: Tensor, kv_L2KD: Tensor, scale: float, causal_from: int | None, window: int) -> Part:
    """Plain torch, any device and type; scores in float32 or wider."""
    num_tokens, num_heads, head_dim = q_THD.shape
    length, _, num_kv_heads, _ = kv_L2KD.shape
    wide = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    q_TKGD = q_THD.to(wide).view(num_tokens, num_kv_heads, -1, head_dim)
    kv = kv_L2KD.to(wide)
    scores_KGTL = torch.einsum("tkgd,lkd->kgtl", q_TKGD, kv[:, 0]) * scale
    if causal_from is not None:
        last_T = causal_from + torch.arange(num_tokens, device=q_THD.device)[:, None]
        keys_L = torch.arange(length, device=q_THD.device)
        hidden_TL = keys_L > last_T
        if window:
            hidden_TL |= keys_L <= last_T - window
        scores_KGTL.masked_fill_(hidden_TL, float("-inf"))
    lse_KGT = scores_KGTL.logsumexp(dim=-1)
    weights = _exp_difference(scores_KGTL, lse_KGT[..., None])
    out = torch.einsum("kgtl,lkd->tkgd", weights, kv[:, 1])
    return out.reshape(q_THD.shape).to(q_THD.dtype), lse_KGT.permute(2, 0, 1).reshape(num_tokens, num_heads)
