"""`isthmus bench reuse`: answers to prompts that were assembled of another prompt's KV, against the same in full.

Nobody labelled anything: the prompt in full, on the same engine, is the reference. Facts planted in real prose are
asked for besides, so that an answer can be right, wrong, or what the donor said in its place.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isthmus.bench import BenchError
from isthmus.bench.reuse_pairs import DONORS, INSTRUCTION, SUMMARY, Fact, Maker, Pair, digest, prose, words
from isthmus.bench.reuse_runs import (
    Answer,
    Assembled,
    Prompts,
    Setting,
    agreement,
    divergence,
    perplexity_ratio,
    rouge_l,
    says,
)
from isthmus.bench.study import Columns, Outcome, Report, in_turns, percent, silent, table, timed
from isthmus.core.errors import RequestError
from isthmus.core.reuse import CACHEBLEND, EPIC, SELECTIONS, SEMANTIC, Selection
from isthmus.live.engine.engine import Engine, EngineOptions
from isthmus.live.gateway.tokenizer import GatewayTokenizer

RECALL_TOKENS = 8
_WORDS_PER_TOKEN = 0.6
"""Of this prose, about."""
_COST_TAIL = 48
"""The question's tokens, which stay where a prompt is cut to a length."""
_TIMED = (("paraphrased", (SEMANTIC,)), ("reordered", (CACHEBLEND, EPIC)))


@dataclass(frozen=True)
class Plan:
    """`pairs`: of each kind; half as many are summarised. `tokens`: of a prompt, about. `lengths`: of the prompts whose
    time is measured, exactly; `rounds`: turns of those."""

    texts: Path | None = None
    pairs: int = 8
    tokens: int = 700
    answer_tokens: int = 32
    lengths: tuple[int, ...] = (1000, 2000, 5000)
    rounds: int = 3
    seed: int = 0


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


class Bench:
    """A model with its tokenizer, and the prose it is measured with."""

    def __init__(self, model: Path, plan: Plan, threads: int | None = None) -> None:
        """Raises ConfigError for texts that cannot be read, BenchError for a model that cannot be measured."""
        self.plan, self._prose = plan, prose(plan.texts)
        self._tokenizer = GatewayTokenizer.load(model)
        engine = Engine(model, EngineOptions(threads=threads))
        self.prompts = Prompts(engine, self._tokenizer.generation.eos)
        self.texts = digest(self._prose)
        self._maker = Maker(self._prose, round(plan.tokens * _WORDS_PER_TOKEN), plan.seed)

    def prompt(self, text: str, question: str, lead: str = "") -> list[int]:
        """With the chat template, and the beginning of the answer."""
        try:
            messages = [{"role": "user", "content": f"{INSTRUCTION}\n\n{text}\n\n{question}"}]
            tokens = self._tokenizer.encode_chat(messages, add_generation_prompt=True)
        except RequestError as error:
            raise BenchError(str(error)) from None
        return tokens + (self._tokenizer.encode_text(lead, add_special_tokens=False) if lead else [])

    def recall(self) -> Iterator[Case]:
        """Facts asked for; numbers of pairs outside, so that what is broken off has some of every kind."""
        for number in range(self.plan.pairs):
            for kind in DONORS:
                yield self._asked(self._maker.pair(kind, number))

    def summaries(self) -> Iterator[Case]:
        for number in range(-(-self.plan.pairs // 2)):
            for kind in DONORS:
                pair = self._maker.pair(kind, number)
                donor, target = (self.prompt(text, SUMMARY) for text in (pair.donor, pair.target))
                yield Case(kind, donor, target, self.plan.answer_tokens, text=self._tokenizer.decode)

    def _asked(self, pair: Pair) -> Case:
        fact, other = pair.facts[0], pair.others[0]
        donor = self.prompt(pair.donor, pair.about.question, pair.about.lead)
        target = self.prompt(pair.target, fact.question, fact.lead)
        wrong = self._says(other) if other else None
        return Case(pair.kind, donor, target, RECALL_TOKENS, self._says(fact.value), wrong)

    def _says(self, value: str) -> Callable[[Sequence[int]], bool]:
        return lambda tokens: says(self._tokenizer.decode(tokens), value)

    def cut(self, kind: str, num_tokens: int) -> tuple[list[int], list[int]]:
        """Donor and target of exactly so many tokens. Raises BenchError where there is not prose enough, or no room."""
        self.prompts.fit(num_tokens + 1)
        num_words, most = round(num_tokens * _WORDS_PER_TOKEN), sum(map(words, self._prose))
        donor, target = self._pair(kind, num_words)
        # As many tokens as this tokenizer makes of a word.
        num_words = round(num_words * num_tokens / len(target))
        donor, target = self._pair(kind, num_words)
        while len(target) < num_tokens:
            if num_words > most:
                raise BenchError(f"the texts make prompts of {len(target)} tokens, and not of {num_tokens}")
            # Little more than is needed: what is cut off of one of the two is missing for the other.
            num_words += max(1, num_words // 50)
            donor, target = self._pair(kind, num_words)
        donor, target = (each[: num_tokens - _COST_TAIL] + each[-_COST_TAIL:] for each in (donor, target))
        return donor, target

    def _pair(self, kind: str, num_words: int) -> tuple[list[int], list[int]]:
        pair = Maker(self._prose, num_words, self.plan.seed).pair(kind, 0)
        asked: list[tuple[str, Fact]] = [(pair.donor, pair.about), (pair.target, pair.facts[0])]
        donor, target = [self.prompt(text, fact.question, fact.lead) for text, fact in asked]
        return donor, target


def settings(selection: Selection) -> list[Setting]:
    """As it is served, and whole where it packs."""
    found = [Setting(selection.name, selection)]
    return [*found, Setting(f"{selection.name}, whole", selection, packs=False)] if selection.drops else found


def measure(
    prompts: Prompts, cases: Iterable[Case], chosen: Sequence[Setting], report: Report = silent
) -> list[dict[str, Any]]:
    """Every case with every setting: a row of means for each kind of donor and setting.

    `computed`: of the prompt's tokens, mean over the layers; `kept`: of its KV; `right`, `full_right`, `wrong`: of the
    answers, where it can be said; `rouge`: ROUGE-L against the answer in full. A perplexity ratio is a ratio, so its
    mean is the geometric one.
    """
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        prompts.donate(case.donor)
        full = prompts.full(case.target, case.num_answers)
        for setting in chosen:
            other = prompts.assembled(case.target, setting, full.tokens, case.num_answers)
            for name, value in _judged(case, full, other).items():
                found[case.kind, setting.name][name].append(float(value))
        report(f"{case.kind}: {len(case.target)} tokens")
    rows = []
    for (kind, setting_name), values in found.items():
        means: dict[str, Any] = {name: statistics.fmean(each) for name, each in values.items()}
        means["perplexity"] = statistics.geometric_mean(values["perplexity"])
        rows.append({"kind": kind, "setting": setting_name, "num_cases": len(values["kl"])} | means)
    return rows


def _judged(case: Case, full: Answer, other: Assembled) -> dict[str, float]:
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
    return values


def costs(
    prompts: Prompts,
    kind: str,
    donor: Sequence[int],
    target: Sequence[int],
    selections: Sequence[Selection],
    rounds: int,
) -> list[dict[str, Any]]:
    """Full and assembled steps in turns. `ratio`: the assembled step's time over that of the prompt in full just
    before, median over the rounds; `computed`: of the tokens, mean over the layers; `kept`: of the KV, for the answer.
    """
    prompts.donate(donor)
    chosen = {each.name: Setting(each.name, each) for each in selections}
    steps: dict[str, Callable[[], object]] = {"full": lambda: prompts.full(target, 1)}
    steps |= {name: partial(prompts.prefill, target, setting) for name, setting in chosen.items()}
    found = in_turns({name: partial(timed, step) for name, step in steps.items()}, rounds)
    full = found.pop("full")
    rows = []
    for name, seconds in found.items():
        _, reused, packing = prompts.prefill(target, chosen[name])
        dropped = packing.num_dropped * prompts.block_size if packing is not None else 0
        computed = prompts.computed(target, chosen[name].selection, reused)
        row = {
            "num_tokens": len(target),
            "setting": name,
            "kind": kind,
            "full_ms": 1e3 * statistics.median(full),
        }
        ratio = statistics.median([one / other for one, other in zip(seconds, full, strict=True)])
        rows.append(row | {"ratio": ratio, "computed": computed, "kept": 1 - dropped / len(target)})
    return rows


def run(model: Path, name: str, plan: Plan, threads: int | None = None, report: Report = silent) -> Outcome:
    """`name`: what the model is called. Raises ConfigError, ModelError and BenchError."""
    bench = Bench(model, plan, threads)
    # Made first: that there is no prompt of some length is said before anything is measured.
    timed_prompts = [
        (kind, chosen, bench.cut(kind, length)) for length in plan.lengths for kind, chosen in _TIMED
    ]
    served = [setting for selection in SELECTIONS.values() for setting in settings(selection)]
    recall = measure(bench.prompts, bench.recall(), served, lambda line: report(f"facts, {line}"))
    summaries = measure(bench.prompts, bench.summaries(), served, lambda line: report(f"summaries, {line}"))
    times: list[dict[str, Any]] = []
    for kind, chosen, (donor, target) in timed_prompts:
        times += costs(bench.prompts, kind, donor, target, chosen, plan.rounds)
        report(f"time to the first token, {kind}: {len(target)} tokens")
    asked = asdict(plan) | {"texts": None if plan.texts is None else str(plan.texts)}
    found = {"recall": recall, "summaries": summaries, "costs": times}
    tables = [
        table("isthmus bench reuse: facts asked for", ANSWERS | RIGHT, recall),
        table("summaries", ANSWERS | {"ROUGE-L": "rouge"}, summaries),
        table("time to the first token", TIMES, times),
    ]
    return Outcome(tables, {"model": name, "plan": asked, "texts": bench.texts} | found)


def _shares(**heads: str) -> dict[str, Callable[[Any], str | None]]:
    def share(row: dict[str, Any], name: str) -> str | None:
        return percent(row.get(name))

    return {head.replace("_", " "): partial(share, name=name) for head, name in heads.items()}


ANSWERS: dict[str, Any] = {"donor is": "kind", "selector": "setting", "cases": "num_cases"}
ANSWERS |= _shares(computed="computed", KV_kept="kept", equal_tokens="agreement")
ANSWERS |= {"KL": "kl", "perplexity ratio": "perplexity"}
RIGHT = _shares(right_in_full="full_right", right="right", as_the_donor="wrong")
TIMES: Columns = {
    "tokens": "num_tokens", "selector": "setting", "donor is": "kind", "full ms": "full_ms",
    "assembled / full": "ratio", **_shares(computed="computed", KV_kept="kept"),
}  # fmt: skip
