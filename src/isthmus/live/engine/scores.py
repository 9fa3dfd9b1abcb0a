"""How likely the model finds each token of a prompt, given those before it.

Legend: S scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from isthmus.core.types import TokenLogprobs
from isthmus.live.engine.batch import Scored

MAX_LOGITS = 1 << 23
"""So many logits exist at a time: 32 MiB, and as much again for their log-probabilities."""
MAX_ENTRIES = 1 << 15
"""So many tokens with their log-probabilities are told at a time, in at most a MiB."""


def parts_of(scored: Sequence[Scored], vocab_size: int) -> Iterator[Scored]:
    """The same, in parts within these limits; one token at least."""
    for each in scored:
        most = max(1, min(MAX_LOGITS // vocab_size, MAX_ENTRIES // (1 + each.num_top)))
        for at in range(0, len(each.targets), most):
            targets = each.targets[at : at + most]
            yield replace(each, first=each.first + at, position=each.position + at, targets=targets)


def score(logits_SV: Tensor, targets: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of each row's target its log-probability, the `num_top` most likely, and its rank: 1 if no token is likelier."""
    targets_S1 = torch.tensor(targets, device=logits_SV.device)[:, None]
    rank_S = (logits_SV > logits_SV.gather(1, targets_S1)).count_nonzero(dim=-1) + 1
    logprobs_SV = logits_SV.log_softmax(dim=-1)
    chosen_S = logprobs_SV.gather(1, targets_S1)[:, 0]
    top = logprobs_SV.topk(min(num_top, logits_SV.shape[1]))
    columns = chosen_S.tolist(), top.indices.tolist(), top.values.tolist(), rank_S.tolist()
    return [
        TokenLogprobs(chosen, tuple(zip(tokens, values, strict=True)), rank)
        for chosen, tokens, values, rank in zip(*columns, strict=True)
    ]
