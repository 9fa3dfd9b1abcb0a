"""Chooses the next token of each row from its logits.

The random draw for output token i of a request is a hash of (seed, i): neither the batch it sits in, nor
pre-emption, nor a move to another node changes what a request samples.

No vocabulary is sorted. What top-k, min-p and top-p leave out is known by the least weight that stays, and for that the
few largest weights of each row are enough; a token is then drawn from all that stay, in the order of their ids.

Legend: S sampled rows, R rows that draw, V vocabulary, C chunks of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from isthmus.core.types import Sampling, TokenLogprobs
from isthmus.live.engine.batch import Scored
from isthmus.live.engine.constraints import Allowed
from isthmus.live.engine.interface import Row, Sampled

_MASK = (1 << 64) - 1
CHUNK = 256
"""Weights summed together: a draw finds its chunk first, then its token there."""
_MINUS_INFINITY = np.int32(-(1 << 23))
"""Its bits as a float32, read as an integer."""
LEADING = 256
"""Largest weights that are searched first for the end of top-p."""


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from (seed, index): two rounds of the SplitMix64 finaliser."""
    value = seed & _MASK
    for word in (index + 1, 0x632BE59BD9B4E019):
        value = (value + word * 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return (value >> 11) * 2.0**-53


@torch.inference_mode()
def sample(logits_SV: Tensor, rows: Sequence[Row], allowed: Allowed | None = None) -> Sampled:
    """Token and log-probabilities (None unless asked for) of each row. Changes the logits of rows that are not free,
    unless somebody asks for log-probabilities."""
    samplings = [row.sampling for row in rows]
    if any(map(_adjusts, samplings)):
        pairs = zip(logits_SV, rows, strict=True)
        wanted_SV = torch.stack(
            [_adjusted(logits, row) if _adjusts(row.sampling) else logits for logits, row in pairs]
        )
    else:
        wanted_SV = logits_SV
    if allowed is not None:
        if wanted_SV is logits_SV and any(sampling.logprobs is not None for sampling in samplings):
            wanted_SV = logits_SV.clone()
        _mask(wanted_SV, allowed)
    tokens: list[int] = wanted_SV.argmax(dim=-1).tolist()
    drawing = [at for at, sampling in enumerate(samplings) if sampling.temperature]
    if drawing:
        if len(drawing) < len(rows):
            wanted_SV = wanted_SV[drawing]
        for at, token in zip(drawing, _drawn(wanted_SV, [rows[at] for at in drawing]), strict=True):
            tokens[at] = token
    return tokens, [_logprobs(*at) for at in zip(logits_SV, tokens, rows, strict=True)]


def _adjusts(sampling: Sampling) -> bool:
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or sampling.repetition_penalty != 1
    )


def _drawn(logits_RV: Tensor, rows: Sequence[Row]) -> list[int]:
    """A token of each row, by its own draw."""
    temperatures = [row.sampling.temperature for row in rows]
    # A temperature near 0 must not overflow: the largest logit becomes 0 first, and its weight 1.
    weights_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
    weights_RV.div_(torch.tensor(temperatures, device=weights_RV.device)[:, None]).exp_()
    cut = [at for at, row in enumerate(rows) if _cuts(row.sampling)]
    if len(cut) == len(rows):
        _cut(weights_RV, [row.sampling for row in rows])
    elif cut:
        weights_RV[cut] = _cut(weights_RV[cut], [rows[at].sampling for at in cut])
    draws = [uniform(row.sampling.seed, len(row.outputs)) for row in rows]
    return _found(weights_RV, torch.tensor(draws, dtype=torch.float64, device=weights_RV.device))


def _found(weights_RV: Tensor, draws_R: Tensor) -> list[int]:
    """Which token each draw, a share of all weights, falls on."""
    padded = torch.nn.functional.pad(weights_RV, (0, -weights_RV.shape[1] % CHUNK))
    chunks_RCN = padded.unflatten(1, (-1, CHUNK))
    chunk_R1, rest_R1 = _fallen(chunks_RCN.sum(-1).double(), draws_R[:, None])
    rows = torch.arange(len(chunk_R1), device=chunk_R1.device)
    inside_RN = chunks_RCN[rows, chunk_R1[:, 0]].double()
    token_R1, _ = _fallen(inside_RN, rest_R1)
    found: list[int] = (chunk_R1 * CHUNK + token_R1)[:, 0].tolist()
    return found


def _fallen(weights_RN: Tensor, draws_R1: Tensor) -> tuple[Tensor, Tensor]:
    """The first at which the sum passes the draw, a share in [0, 1), and what share of its own weight is left of it."""
    sums_RN = weights_RN.cumsum(dim=-1)
    total_R1 = sums_RN[:, -1:]
    # By rounding the product may be all there is, and then nothing would pass it.
    target_R1 = torch.minimum(draws_R1 * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    at_R1 = torch.searchsorted(sums_RN, target_R1, right=True)
    own_R1 = weights_RN.gather(1, at_R1)
    share_R1 = (target_R1 - (sums_RN.gather(1, at_R1) - own_R1)) / own_R1
    return at_R1, share_R1.clamp_(0, 1 - 2.0**-53)


def _cuts(sampling: Sampling) -> bool:
    return bool(sampling.top_k or sampling.min_p or sampling.top_p < 1)


def _cut(weights_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Only what stays keeps its weight, in place: top_k, then min_p, then top_p of the rest, never fewer than one; of
    equal weights those with lower ids. The largest weight is 1."""
    device, vocabulary = weights_RV.device, weights_RV.shape[1]

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    limits = [min(each.top_k or vocabulary, vocabulary) for each in samplings]
    limit_R1, share_R1 = column(limits, torch.int64), column([each.top_p for each in samplings])
    weights_RV *= weights_RV >= column([each.min_p for each in samplings], torch.float32)
    narrow = [limit for limit in limits if limit < vocabulary]
    num_leading = min(vocabulary, max(LEADING, *narrow) if narrow else LEADING)
    while True:
        leading_RN = weights_RV.topk(num_leading).values
        sums_RN = leading_RN.double().cumsum(dim=-1)
        all_R1 = weights_RV.sum(dim=-1, dtype=torch.float64, keepdim=True)
        within_R1 = limit_R1.clamp(max=num_leading)
        total_R1 = torch.where(limit_R1 < vocabulary, sums_RN.gather(1, within_R1 - 1), all_R1)
        count_R1 = (sums_RN < share_R1 * total_R1).sum(dim=-1, keepdim=True) + 1
        open_R1 = (count_R1 > num_leading) & (limit_R1 > num_leading) & (share_R1 < 1)
        if num_leading == vocabulary or not bool(open_R1.any()):
            break
        num_leading = min(vocabulary, 16 * num_leading)
    count_R1 = torch.where(share_R1 < 1, torch.minimum(count_R1, limit_R1), limit_R1)
    return _largest(weights_RV, leading_RN, count_R1)


def _largest(weights_RV: Tensor, leading_RN: Tensor, count_R1: Tensor) -> Tensor:
    """Zero for all but the `count` largest, in place; where those are more than `leading` holds, all stay."""
    least_R1 = leading_RN.gather(1, count_R1.clamp(max=leading_RN.shape[1]) - 1)
    least_R1 = torch.where(count_R1 <= leading_RN.shape[1], least_R1, 0.0)
    stays_RV = weights_RV >= least_R1
    if bool((stays_RV.sum(dim=-1, keepdim=True) > count_R1).any()):
        equal_RV = weights_RV == least_R1
        left_R1 = count_R1 - (weights_RV > least_R1).sum(dim=-1, keepdim=True)
        stays_RV &= ~equal_RV | (equal_RV.cumsum(dim=-1) <= left_R1)
    weights_RV *= stays_RV
    return weights_RV


def _adjusted(logits_V: Tensor, row: Row) -> Tensor:
    """Logit bias, then the penalty of repetition over prompt and answer (Keskar et al., CTRL, section 4.1), then those
    of presence and frequency over the answer (OpenAI's formula)."""
    sampling, logits_V = row.sampling, logits_V.clone()
    for token, bias in sampling.logit_bias:
        logits_V[token] += bias
    outputs = torch.tensor(row.outputs, dtype=torch.int64, device=logits_V.device)
    if sampling.repetition_penalty != 1:
        prompt = torch.as_tensor(row.prompt, dtype=torch.int64, device=logits_V.device)
        seen = torch.cat((prompt, outputs)).unique()
        found, by = logits_V[seen], sampling.repetition_penalty
        logits_V[seen] = torch.where(found > 0, found / by, found * by)
    if row.outputs and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = torch.bincount(outputs, minlength=len(logits_V))
        logits_V -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    return logits_V


def _mask(logits_SV: Tensor, allowed: Allowed) -> None:
    """Sets logits of tokens that are not allowed to minus infinity, in place. On the host it is added by one thread:
    a tenth of the time of filling, and too little for several threads."""
    if logits_SV.device.type == "cpu":
        logits = logits_SV.numpy()
        for at, tokens_V in allowed:
            logits[at] += ((tokens_V.view(np.int8) - 1).astype(np.int32) & _MINUS_INFINITY).view(np.float32)
    else:
        allowed_MV = torch.from_numpy(allowed.tokens_MV).to(logits_SV.device)
        rows = torch.tensor(allowed.rows, device=logits_SV.device)
        logits_SV[rows] = logits_SV[rows].masked_fill_(~allowed_MV, -torch.inf)


def _logprobs(logits_V: Tensor, token: int, row: Row) -> TokenLogprobs | None:
    wanted = row.sampling.logprobs
    if wanted is None:
        return None
    logprobs_V = logits_V.log_softmax(dim=-1)
    values, tokens = logprobs_V.topk(min(wanted, len(logprobs_V)))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(chosen=float(logprobs_V[token]), top=top)


# Scores of a prompt's tokens. Legend: S scored tokens, V vocabulary.


MAX_LOGITS = 1 << 23
"""Most logits at a time: 32 MiB, and as much again for log-probabilities."""
MAX_ENTRIES = 1 << 15
"""Most tokens with log-probabilities that are told at a time, in at most a MiB."""


def parts_of(scored: Sequence[Scored], vocab_size: int) -> Iterator[Scored]:
    """Splits targets into parts within these limits, of at least one token."""
    for each in scored:
        most = max(1, min(MAX_LOGITS // vocab_size, MAX_ENTRIES // (1 + each.num_top)))
        for at in range(0, len(each.targets), most):
            targets = each.targets[at : at + most]
            yield replace(each, first=each.first + at, position=each.position + at, targets=targets)


def score(logits_SV: Tensor, targets: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probability and rank (1: no token is likelier) of each row's target, and the `num_top` most likely tokens."""
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
