"""Assembled prompts against the same prompts in full: what becomes of their answers, as rows of means.

Knows tokens alone, so it measures any model and any task that can say what its prompts are.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from isthmus.bench.reuse_runs import Answer, Assembled, Prompts, Setting, Spoil
from isthmus.bench.reuse_scores import agreement, divergence, perplexity_ratio, rouge_l
from isthmus.core.reuse import SELECTIONS, Selection

SHARES = {
    "semantic": (0.0, 0.1, 0.2, 0.7, 1.0),
    "cacheblend": (0.0, 0.05, 0.3, 0.6, 1.0),
    "epic": (0, 1, 4, 64),
}
"""What is swept beside each selector's own: the share recomputed, or of each passage the first tokens."""
SWEPT = {
    "semantic": ("paraphrased", "50 % changed", "false"),
    "cacheblend": ("reordered", "20 % changed"),
    "epic": ("reordered", "20 % changed"),
}
"""Kinds of donors with which shares are swept, and controls measured: those that a selector is for, and false ones."""


@dataclass(frozen=True)
class Case:
    """A donor, a target, and what its answer should say (`right`) and would say by the donor (`wrong`)."""

    kind: str
    donor: Sequence[int]
    target: Sequence[int]
    num_answers: int
    right: Callable[[Sequence[int]], bool] | None = None
    wrong: Callable[[Sequence[int]], bool] | None = None
    text: Callable[[Sequence[int]], str] | None = None


@dataclass(frozen=True)
class Row:
    """Means over the cases of a kind. `share`: what was swept; `computed`: of the
    prompt's tokens, mean over the layers; `kept`: of its KV; `right`,
    `full_right`, `wrong`: of the answers, where it can be said; `rouge`: ROUGE-L against the answer in full."""

    kind: str
    setting: str
    selector: str
    share: float
    donor: str
    packs: bool
    num_cases: int
    computed: float
    kept: float
    kl: float
    agreement: float
    perplexity: float
    rouge: float | None
    full_right: float | None
    right: float | None
    wrong: float | None


def settings(selection: Selection) -> list[Setting]:
    """As it is served, and whole where it packs."""
    found = [Setting(selection.name, selection)]
    return [*found, Setting(f"{selection.name}, whole", selection, packs=False)] if selection.drops else found


def sweep(selection: Selection) -> list[Setting]:
    """Other shares recomputed, and controls with another KV in place of the donor's. Nothing is packed."""
    name, found = selection.name, list[Setting]()
    for share in SHARES[name]:
        if selection.full_layers:
            changed = replace(selection, recompute=share)
        else:
            changed = replace(selection, first=int(share))
        found.append(Setting(f"{name} {share:g}", changed, packs=False))
    if selection.alike:  # as re-implementations have it, and as the paper does
        found.append(Setting(f"{name}, other words", replace(selection, same=False), packs=False))
        found.append(Setting(f"{name}, all matched", replace(selection, least=-1.0, same=False), packs=False))
    return [*found, *[Setting(f"{name}, {how}", selection, False, how) for how in (Spoil.ZEROED, Spoil.RANDOM)]]


def all_settings(kind: str | None = None) -> list[Setting]:
    """What is served, of every selector; and what is swept with donors of this kind. None: all."""
    found = list[Setting]()
    for selection in SELECTIONS.values():
        found += settings(selection)
        if kind is None or kind in SWEPT[selection.name]:
            found += sweep(selection)
    return found


@dataclass
class _Sums:
    """What was found of a kind and a setting, a list each."""

    found: dict[str, list[float]] = field(default_factory=dict)

    def add(self, case: Case, full: Answer, other: Assembled) -> None:
        values: dict[str, float] = {
            "computed": other.computed,
            "kept": other.kept,
            "kl": divergence(full.logits_NV, other.forced_NV),
            "agreement": agreement(full.logits_NV, other.forced_NV),
            "perplexity": perplexity_ratio(full.logits_NV, other.forced_NV, full.tokens),
        }
        if case.text is not None and other.tokens:
            values["rouge"] = rouge_l(case.text(other.tokens), case.text(full.tokens))
        if case.right is not None:
            values |= {"full_right": case.right(full.tokens), "right": case.right(other.tokens)}
        if case.wrong is not None:
            values["wrong"] = case.wrong(other.tokens)
        for name, value in values.items():
            self.found.setdefault(name, []).append(float(value))

    def row(self, kind: str, setting: Setting) -> Row:
        """A perplexity ratio is a ratio, so its mean is the geometric one."""
        means: dict[str, Any] = dict.fromkeys(("rouge", "full_right", "right", "wrong"))
        means |= {name: statistics.fmean(values) for name, values in self.found.items()}
        means["perplexity"] = statistics.geometric_mean(self.found["perplexity"])
        return Row(
            kind, setting.name, setting.selection.name, setting.swept, setting.spoil.value,
            setting.packs and setting.selection.drops, len(self.found["kl"]), **means,
        )  # fmt: skip


def measure(
    prompts: Prompts,
    cases: Iterable[Case],
    settings_of: Callable[[Case], Sequence[Setting]],
    report: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Every case with its settings; rows in the order in which kinds and settings first occur."""
    sums: dict[tuple[str, str], tuple[Setting, _Sums]] = {}
    for case in cases:
        prompts.donate(case.donor)
        full = prompts.full(case.target, case.num_answers)
        for setting in settings_of(case):
            other = prompts.assembled(case.target, setting, full.tokens, case.num_answers)
            _, found = sums.setdefault((case.kind, setting.name), (setting, _Sums()))
            found.add(case, full, other)
        report(f"{case.kind}: {len(case.target)} tokens")
    return [found.row(kind, setting) for (kind, _), (setting, found) in sums.items()]
