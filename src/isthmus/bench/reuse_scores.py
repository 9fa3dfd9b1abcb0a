"""How near an answer is to another: ROUGE-L, equal tokens, and distances of next-token distributions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = re.compile(r"[^\W_]+")


def rouge_l(found: str, reference: str) -> float:
    """F1 of the longest common subsequence of words, case and punctuation aside (Lin 2004). Of two empty texts 1."""
    one, other = (_WORD.findall(text.lower()) for text in (found, reference))
    if not one or not other:
        return float(one == other)
    return 2 * common(one, other) / (len(one) + len(other))


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the longest common subsequence."""
    best = [0] * (len(other) + 1)
    for left in one:
        before = 0
        for at, right in enumerate(other, 1):
            before, best[at] = best[at], before + 1 if left == right else max(best[at], best[at - 1])
    return best[-1]


def divergence(full_NV: Tensor, other_NV: Tensor) -> float:
    """KL(full || other) in nats, mean over the positions; of logits. Never below 0, as rounding could make it."""
    full, other = (each.float().log_softmax(-1) for each in (full_NV, other_NV))
    return max(0.0, float((full.exp() * (full - other)).sum(-1).mean()))


def agreement(full_NV: Tensor, other_NV: Tensor) -> float:
    """The share of positions at which both would choose the same token."""
    return float((full_NV.argmax(-1) == other_NV.argmax(-1)).float().mean())


def surprise(logits_NV: Tensor, tokens: Sequence[int]) -> float:
    """Mean negative log-probability of these tokens, one a position; its exponential is the perplexity."""
    at = torch.tensor(tokens, device=logits_NV.device)[:, None]
    return -float(logits_NV.float().log_softmax(-1).gather(1, at).mean())


def perplexity_ratio(full_NV: Tensor, other_NV: Tensor, tokens: Sequence[int]) -> float:
    """How much less likely the tokens are: above 1 if `other` is worse."""
    return math.exp(surprise(other_NV, tokens) - surprise(full_NV, tokens))


def says(answer: str, fact: str) -> bool:
    """The fact is in the answer, word for word, case aside, and nothing denies it."""
    words, wanted = (_WORD.findall(text.lower()) for text in (answer, fact))
    found = [at for at in range(len(words)) if words[at : at + len(wanted)] == wanted]
    return any(not at or words[at - 1] != "not" for at in found)
