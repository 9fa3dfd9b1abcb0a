"""How soon the first token of an assembled prompt comes, against the same in full; and how tokens are matched."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from isthmus.bench.reuse_runs import Prompts, Setting
from isthmus.core.reuse import SEMANTIC
from isthmus.live.engine.alike import nearest, warped


@dataclass(frozen=True)
class Cost:
    """`ratio`: the assembled step's time over that of the prompt in full, median over the rounds; `computed`: of the
    tokens, mean over the layers; `kept`: KV blocks left for the answer, of the whole."""

    num_tokens: int
    setting: str
    kind: str
    full_ms: float
    ratio: float
    computed: float
    kept: float


@dataclass(frozen=True)
class Matching:
    """Tokens that found a counterpart, and of these: the same word, several with one counterpart. `off`: values of
    the counterpart against the token's own, the norm of the difference over the norm, all layers."""

    kind: str
    how: str
    found: float
    same: float
    shared: float
    off: float


def costs(
    prompts: Prompts,
    kind: str,
    donor: Sequence[int],
    target: Sequence[int],
    settings: Sequence[Setting],
    rounds: int,
) -> list[Cost]:
    """Full and assembled steps in turns, after one of each that does not count."""
    prompts.donate(donor)
    full = list[float]()
    ratios: dict[str, list[float]] = {setting.name: [] for setting in settings}
    shares: dict[str, tuple[float, float]] = {}
    for _ in range(rounds + 1):
        started = time.perf_counter()
        prompts.full(target, 1)
        full.append(time.perf_counter() - started)
        for setting in settings:
            started = time.perf_counter()
            _, reused, packing = prompts.prefill(target, setting)
            ratios[setting.name].append((time.perf_counter() - started) / full[-1])
            dropped = packing.num_dropped * prompts.block_size if packing is not None else 0
            computed = prompts.computed(target, setting.selection, reused)
            shares[setting.name] = computed, 1 - dropped / len(target)
    return [
        Cost(
            len(target),
            name,
            kind,
            statistics.median(full[1:]) * 1e3,
            statistics.median(found[1:]),
            *shares[name],
        )
        for name, found in ratios.items()
    ]


def matchings(prompts: Prompts, kind: str, donor: Sequence[int], target: Sequence[int]) -> list[Matching]:
    """The engine's matching, and what it is without its parts: other words count, as in SemShareKV; positions of the
    donor are as they are; there are none."""
    prompts.donate(donor)
    donor = donor[: len(donor) // prompts.block_size * prompts.block_size]
    theirs = [each[:, 1] for each in prompts.donor_kv()]
    prompts.full(target, 1)
    own = [each[:, 1] for each in prompts.target_kv(len(target))]
    at, there = np.arange(len(target)), np.arange(len(donor))
    placed = warped(target, at, donor, there)
    ways = {
        "as served": (placed, True),
        "other words too": (placed, True),
        "other words, own positions": (there.astype(float), True),
        "other words, no positions": (there.astype(float), False),
    }
    embed = prompts.engine.model.embed
    with torch.inference_mode():
        rows, others = (embed(torch.tensor(tokens, device=own[0].device)) for tokens in (target, donor))
    found = list[Matching]()
    for how, (places, rotated) in ways.items():
        pairs = (torch.as_tensor(each).to(rows.device) for each in (at, places))
        matched = nearest(rows, others, *pairs, least=SEMANTIC.least, rotated=rotated)
        is_same = (torch.tensor(donor)[matched] == torch.tensor(target)) & (matched >= 0)
        here = (is_same if how == "as served" else matched >= 0).nonzero()[:, 0]
        to, same = matched[here], int(is_same.sum())
        count = max(1, len(here))
        off = sum(
            float((a[here].float() - b[to].float()).square().sum()) for a, b in zip(own, theirs, strict=True)
        )
        whole = sum(float(each[here].float().square().sum()) for each in own)
        shared = 1 - len(set(to.tolist())) / count
        found.append(
            Matching(kind, how, len(here) / len(target), same / count, shared, (off / max(whole, 1e-9)) ** 0.5)
        )
    return found
