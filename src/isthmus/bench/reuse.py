"""`isthmus bench reuse`: answers to prompts that were assembled of another prompt's KV, against the same in full.

Nobody labelled anything: the prompt in full, on the same engine, is the reference. Facts planted in real prose are
asked for besides, so that an answer can be right, wrong, or what the donor said in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from isthmus.bench import BenchError
from isthmus.bench.reuse_costs import Cost, Matching, costs, matchings
from isthmus.bench.reuse_measures import SWEPT, Case, Row, all_settings, measure
from isthmus.bench.reuse_pairs import DONORS, INSTRUCTION, SUMMARY, Fact, Maker, Pair
from isthmus.bench.reuse_runs import Prompts, Setting, Spoil
from isthmus.bench.reuse_scores import says
from isthmus.bench.reuse_texts import Passage, digest, prose
from isthmus.core.errors import RequestError
from isthmus.core.reuse import CACHEBLEND, EPIC, SELECTIONS, SEMANTIC
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
class Result:
    """`texts`: digest of the prose. Rows of facts asked for, of summaries, of times, of matched tokens."""

    texts: str
    recall: list[Row]
    summaries: list[Row]
    costs: list[Cost]
    matchings: list[Matching]


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
        return Case(
            pair.kind,
            donor,
            self.prompt(pair.target, fact.question, fact.lead),
            RECALL_TOKENS,
            self._says(fact.value),
            self._says(other) if other else None,
        )

    def _says(self, value: str) -> Callable[[Sequence[int]], bool]:
        return lambda tokens: says(self._tokenizer.decode(tokens), value)

    def cut(self, kind: str, num_tokens: int) -> tuple[list[int], list[int]]:
        """Donor and target of exactly so many tokens. Raises BenchError where there is not prose enough, or no room."""
        self.prompts.fit(num_tokens + 1)
        num_words, most = round(num_tokens * _WORDS_PER_TOKEN), sum(map(_words, self._prose))
        donor, target = self._pair(kind, num_words)
        num_words = round(
            num_words * num_tokens / len(target)
        )  # as many tokens as this tokenizer makes of a word
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


def _words(passage: Passage) -> int:
    return sum(len(sentence.split()) for sentence in passage)


def run(
    model: Path, plan: Plan, threads: int | None = None, report: Callable[[str], None] = lambda line: None
) -> Result:
    """Raises ConfigError, ModelError and BenchError."""
    bench = Bench(model, plan, threads)
    served = all_settings("")
    # Made first: that there is no prompt of some length is said before anything is measured.
    timed = [(kind, chosen, bench.cut(kind, length)) for length in plan.lengths for kind, chosen in _TIMED]
    recall = measure(
        bench.prompts,
        bench.recall(),
        lambda case: all_settings(case.kind),
        lambda line: report(f"facts, {line}"),
    )
    summaries = measure(
        bench.prompts, bench.summaries(), lambda case: served, lambda line: report(f"summaries, {line}")
    )
    matched = list[Matching]()
    for kind in ("paraphrased", "20 % changed", "50 % changed"):
        matched += matchings(bench.prompts, kind, *bench.cut(kind, plan.tokens))
    found = list[Cost]()
    for kind, chosen, (donor, target) in timed:
        settings = [Setting(each.name, each) for each in chosen]
        found += costs(bench.prompts, kind, donor, target, settings, plan.rounds)
        report(f"time to the first token, {kind}: {len(target)} tokens")
    return Result(bench.texts, recall, summaries, found, matched)


def tables(result: Result) -> list[Table]:
    return [
        rows_table("isthmus bench reuse: facts asked for, as served", _served(result.recall)),
        rows_table("facts asked for, shares recomputed and controls; nothing packed", _others(result.recall)),
        rows_table("summaries, as served", result.summaries),
        matching_table(result.matchings),
        cost_table(result.costs),
    ]


def _served(rows: Sequence[Row]) -> list[Row]:
    names = {setting.name for setting in all_settings("")}
    return [row for row in rows if row.setting in names]


def _others(rows: Sequence[Row]) -> list[Row]:
    """The sweeps, each with its selector's own share in its place; controls behind."""
    selectors, kinds = list(SELECTIONS), list(DONORS)

    def place(row: Row) -> tuple[int, int, bool, float]:
        return selectors.index(row.selector), kinds.index(row.kind), row.donor != Spoil.NONE, row.share

    return sorted([row for row in rows if row.kind in SWEPT[row.selector] and not row.packs], key=place)


def rows_table(title: str, rows: Sequence[Row]) -> Table:
    """Columns that no row has a figure for are left out."""
    shares = {"computed": "computed", "kept": "KV kept"}
    figures = {
        "full_right": "right in full", "right": "right", "wrong": "as the donor", "rouge": "ROUGE-L",
        "agreement": "equal tokens", "kl": "KL", "perplexity": "perplexity ratio",
    }  # fmt: skip
    figures = {
        name: said for name, said in figures.items() if any(getattr(row, name) is not None for row in rows)
    }
    found = Table("donor is", "selector", "cases", *shares.values(), *figures.values(), title=title)
    for row in rows:
        shown = [_percent(getattr(row, name)) for name in shares]
        for name in figures:
            value = getattr(row, name)
            if name in ("kl", "perplexity", "rouge"):
                shown.append("–" if value is None else f"{value:.3f}" if value < 1000 else f"{value:.1e}")
            else:
                shown.append(_percent(value))
        found.add_row(row.kind, row.setting, str(row.num_cases), *shown)
    return found


def matching_table(rows: Sequence[Matching]) -> Table:
    found = Table(
        "donor is", "positions", "matched", "same word", "several to one", "values off",
        title="tokens that are alike in both prompts, by semantic",
    )  # fmt: skip
    for row in rows:
        shares = [_percent(each) for each in (row.found, row.same, row.shared)]
        found.add_row(row.kind, row.how, *shares, f"{row.off:.2f}")
    return found


def cost_table(rows: Sequence[Cost]) -> Table:
    found = Table(
        "tokens", "selector", "donor is", "full ms", "assembled / full", "computed", "KV kept",
        title="time to the first token",
    )  # fmt: skip
    for row in rows:
        found.add_row(
            f"{row.num_tokens:,}", row.setting, row.kind, f"{row.full_ms:.0f}", f"{row.ratio:.2f}",
            _percent(row.computed), _percent(row.kept),
        )  # fmt: skip
    return found


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def as_json(plan: Plan, model: str, result: Result) -> dict[str, Any]:
    """`recall`, `summaries`, `costs`, `matchings`: rows; `plan`, `model` and `texts`: what they were measured with."""
    asked = asdict(plan) | {"texts": None if plan.texts is None else str(plan.texts)}
    return {"model": model, "plan": asked} | asdict(result)
