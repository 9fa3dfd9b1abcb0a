"""A first guess of what servers take, by linear least squares on recorded times.

Of the iterations of a server a recording tells when prompts were computed and when answers ended. An answer shares its
iterations with others as far as their times overlap, and takes longer by the prompts that are computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PARTS = ("prefill_fixed_s", "prefill_token_s", "decode_fixed_s", "decode_sequence_s", "decode_context_s")
"""What of a curve is learnt."""
SAME_S = 0.002
"""First tokens that are no further apart are taken to be of one iteration."""


class Answer(NamedTuple):
    """An answer of a server; times in seconds. `num_tokens`: of its prompt, of which `num_computed` were computed;
    `num_out`: of the answer. `is_measured`: its times are no presumption."""

    sent_s: float
    first_s: float
    end_s: float
    num_tokens: int
    num_computed: int
    num_out: int
    is_measured: bool


def guessed(servers: Sequence[Sequence[Answer]]) -> dict[str, float]:
    """Returns the parts of a curve, each above 0. `servers`: the answers of each."""
    rows, times = list[list[float]](), list[float]()
    for answers in servers:
        ordered = sorted(answers, key=lambda each: each.first_s)
        for at, each in enumerate(ordered):
            if each.is_measured:
                rows.append(_first(ordered, at))
                times.append(each.first_s - each.sent_s)
                if each.num_out > 1:
                    rows.append(_rest(ordered, at))
                    times.append(each.end_s - each.first_s)
    weights = 1 / np.maximum(np.array(times), 1e-4)
    return dict(
        zip(PARTS, _positive(np.array(rows) * weights[:, None], np.array(times) * weights), strict=True)
    )


def _first(ordered: Sequence[Answer], at: int) -> list[float]:
    """How often each part counts until a first token: the prompts that were computed since it was sent, and the decodes
    beside them."""
    mine = ordered[at]
    fixed = tokens = 0.0
    before = None
    for number in range(at, -1, -1):
        each = ordered[number]
        if each.first_s <= mine.sent_s:
            break
        begun_s = max(each.sent_s, ordered[number - 1].first_s if number else each.sent_s)
        took = each.first_s - begun_s
        share = 1.0 if begun_s >= mine.sent_s or took <= 0 else (each.first_s - mine.sent_s) / took
        tokens += share * each.num_computed
        if before is None or before - each.first_s > SAME_S:
            fixed += share
        before = each.first_s
    num, context = _beside(ordered, mine, mine.sent_s, mine.first_s)
    idle = 0.5 if num and fixed <= 1.0 else 0.0  # it waits for an iteration of decodes
    return [fixed, tokens, idle, (fixed + idle) * num, (fixed + idle) * context]


def _rest(ordered: Sequence[Answer], at: int) -> list[float]:
    """How often each part counts from a first token to the end."""
    mine, steps = ordered[at], ordered[at].num_out - 1
    fixed, tokens, before = 0, 0, mine.first_s
    for each in ordered[at + 1 :]:
        if each.first_s >= mine.end_s:
            break
        tokens += each.num_computed
        if each.first_s - before > SAME_S:
            fixed += 1
        before = each.first_s
    num, context = _beside(ordered, mine, mine.first_s, mine.end_s)
    fixed = min(fixed, steps)
    return [
        fixed,
        tokens,
        steps - fixed,
        steps * (num + 1),
        steps * (context + mine.num_tokens + mine.num_out / 2),
    ]


def _beside(ordered: Sequence[Answer], mine: Answer, start_s: float, end_s: float) -> tuple[float, float]:
    """Mean number of other answers that are generated meanwhile, and their mean context."""
    num = context = 0.0
    for each in ordered:
        if each.first_s >= end_s:
            break
        if each is not mine and each.end_s > start_s:
            share = (min(each.end_s, end_s) - max(each.first_s, start_s)) / max(end_s - start_s, 1e-9)
            num += share
            context += share * (each.num_tokens + each.num_out / 2)
    return num, context


def _positive(rows: np.ndarray, times: np.ndarray) -> list[float]:
    """Least squares without negative values: those that would be are left out, the most negative first, and count as a
    thousandth of the times at most."""
    kept, scale = list(range(rows.shape[1])), np.maximum(rows.max(axis=0), 1e-30)
    found = times.max() / 1000 / scale
    while kept:
        values = np.linalg.lstsq(rows[:, kept] / scale[kept], times, rcond=None)[0]
        if values.min() > 0:
            found[kept] = values / scale[kept]
            break
        del kept[int(values.argmin())]
    return [float(value) for value in found]
