"""Chooses the next token of each row from its logits.

The random draw for output token i of a request is a hash of (seed, i): neither the batch it sits in, nor
pre-emption, nor a move to another node changes what a request samples.

Legend: S sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.engine.interface import Row, Sampled
from isthmus.types import Sampling, TokenLogprobs

_MASK = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from (seed, index): two rounds of the SplitMix64 finaliser."""
    value = seed & _MASK
    for word in (index + 1, 0x632BE59BD9B4E019):
        value = (value + word * 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return (value >> 11) * 2.0**-53


def sample(logits_SV: Tensor, rows: Sequence[Row]) -> Sampled:
    """Token and log-probabilities (None unless asked for) of each row. Does not change the logits."""
    if all(_is_plain_greedy(row.sampling) for row in rows):
        return logits_SV.argmax(dim=-1).tolist(), [None] * len(rows)
    tokens = [_choose(logits, row) for logits, row in zip(logits_SV, rows, strict=True)]
    return tokens, [_logprobs(*at) for at in zip(logits_SV, tokens, rows, strict=True)]


def _is_plain_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0 and sampling.logprobs is None and not _adjusts(sampling)


def _adjusts(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias)


def _choose(logits_V: Tensor, row: Row) -> int:
    sampling = row.sampling
    if _adjusts(sampling):
        logits_V = _adjusted(logits_V, row)
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # A temperature near 0 must not overflow: the largest logit becomes 0 first.
    scaled = (logits_V - logits_V.max()) / sampling.temperature
    probabilities, tokens = scaled.softmax(dim=-1).sort(descending=True, stable=True)
    kept = _kept(probabilities, sampling)
    cumulative = probabilities[:kept].double().cumsum(dim=0)
    draw = uniform(sampling.seed, len(row.outputs)) * float(cumulative[-1])
    at = int(torch.searchsorted(cumulative, draw, right=True))
    return int(tokens[min(at, kept - 1)])


def _kept(probabilities_V: Tensor, sampling: Sampling) -> int:
    """How many of the most likely tokens stay: top_k, then min_p, then top_p, never fewer than one."""
    kept = min(sampling.top_k or len(probabilities_V), len(probabilities_V))
    if sampling.min_p > 0:
        kept = min(kept, int((probabilities_V >= sampling.min_p * probabilities_V[0]).sum()))
    if sampling.top_p < 1:
        share = probabilities_V[:kept].double().cumsum(dim=0) / float(probabilities_V[:kept].double().sum())
        kept = min(kept, int((share < sampling.top_p).sum()) + 1)
    return max(kept, 1)


def _adjusted(logits_V: Tensor, row: Row) -> Tensor:
    """Logit bias, then presence and frequency penalties over the generated tokens (OpenAI's formula)."""
    sampling, logits_V = row.sampling, logits_V.clone()
    for token, bias in sampling.logit_bias:
        logits_V[token] += bias
    if row.outputs and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = torch.bincount(torch.tensor(row.outputs), minlength=len(logits_V)).to(logits_V.device)
        logits_V -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    return logits_V


def _logprobs(logits_V: Tensor, token: int, row: Row) -> TokenLogprobs | None:
    wanted = row.sampling.logprobs
    if wanted is None:
        return None
    logprobs_V = logits_V.log_softmax(dim=-1)
    values, tokens = logprobs_V.topk(min(wanted, len(logprobs_V)))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(chosen=float(logprobs_V[token]), top=top)
