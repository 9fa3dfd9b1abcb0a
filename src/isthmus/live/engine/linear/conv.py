"""The short causal convolution before a recurrence: each channel by itself, over a token and the few before it.

Legend: T tokens, R rows (one token each of as many requests), C channels, K taps, W = K - 1 inputs kept, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def convolve(x_TC: Tensor, window_WC: Tensor, weight_KC: Tensor) -> Tensor:
    """silu of the convolution, `[T, C]` float32. The last tap weighs the token itself.

    `window_WC`: the W inputs before the first token, oldest first (zeros at the start of a sequence); it becomes that
    of the last token. Inputs of any type; window and weight float32.
    """
    num_tokens, taps = x_TC.shape[0], weight_KC.shape[0]
    padded = torch.cat((window_WC, x_TC.float()))
    window_WC.copy_(padded[num_tokens:])
    out = padded[:num_tokens] * weight_KC[0]
    for tap in range(1, taps):
        out.addcmul_(padded[tap : tap + num_tokens], weight_KC[tap])
    return torch.nn.functional.silu(out, inplace=True)


def convolve_step(x_RC: Tensor, windows_SWC: Tensor, slots_R: Tensor, weight_KC: Tensor) -> Tensor:
    """The same for one token each of R requests, `[R, C]`, whose windows lie at `slots_R` (distinct) and move on."""
    padded_RKC = torch.cat((windows_SWC[slots_R], x_RC.float()[:, None]), dim=1)
    windows_SWC[slots_R] = padded_RKC[:, 1:]
    out = (padded_RKC * weight_KC).sum(dim=1)
    return torch.nn.functional.silu(out, inplace=True)
