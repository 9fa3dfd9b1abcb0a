"""`python -m benchmarks recall`: what selectors of assembled prompts cost a model that does nothing but recall.

A model of the size at hand may answer anything or nothing. The one trained here (`recall_model.py`) is right as long as
its prompt is computed in full, so what is lost is the donor's doing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks.recall_model import ASK, BOS, VALUES, WORDS, Shape, Training, pairs_of, save, text_of, train
from isthmus.bench.reuse import rows_table
from isthmus.bench.reuse_measures import Case, Row, all_settings, measure
from isthmus.bench.reuse_runs import Prompts
from isthmus.core.reuse.selection import TAIL
from isthmus.live.engine.engine import Engine, EngineOptions

NUM_PASSAGES, PASSAGE_TOKENS, PASSAGE_PAIRS = 6, 64, 4
KINDS = ("identical", "reworded", "reordered", "50 % changed", "false", "unrelated")
REWORDED, MOVED = 0.3, 0.05
"""The share of words that are others; the share that is left out, and as many that are put in."""


class Text(msgspec.Struct, frozen=True):
    """Passages, and the value of each key in them."""

    passages: tuple[tuple[int, ...], ...]
    values: dict[int, int]

    def prompt(self, key: int, rng: random.Random) -> list[int]:
        """With words behind the text, as many as are computed in any case, and a key that is asked for."""
        tail = [rng.choice(WORDS) for _ in range(TAIL - 2)]
        return [BOS, *(token for part in self.passages for token in part), *tail, ASK, key]


class Plan(msgspec.Struct, frozen=True):
    """`folder`: of the trained model, which is trained and written there unless it is there."""

    folder: Path
    cases: int = 60
    threads: int = 1
    seed: int = 0


def made(rng: random.Random) -> Text:
    pairs = pairs_of(NUM_PASSAGES * PASSAGE_PAIRS, rng)
    parts = [pairs[at : at + PASSAGE_PAIRS] for at in range(0, len(pairs), PASSAGE_PAIRS)]
    return Text(tuple([tuple(text_of(part, PASSAGE_TOKENS, rng)) for part in parts]), dict(pairs))


def donor_of(kind: str, text: Text, rng: random.Random) -> Text:
    """What was computed before the text."""
    parts = list(text.passages)
    if kind == "identical":
        return text
    if kind == "reworded":
        return Text(tuple([_reworded(part, rng) for part in parts]), text.values)
    if kind == "reordered":
        return Text(tuple(rng.sample(parts, len(parts))), text.values)
    if kind == "false":
        values = {key: rng.choice([each for each in VALUES if each != old]) for key, old in text.values.items()}
        return Text(tuple([_revalued(part, values) for part in parts]), values)
    other = made(rng)
    if kind == "unrelated":
        return other
    taken = set(rng.sample(range(len(parts)), len(parts) // 2))
    mixed = [other.passages[at] if at in taken else part for at, part in enumerate(parts)]
    return Text(tuple(mixed), {key: value for part in mixed for key, value in _pairs_in(part)})


def _reworded(part: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    found = list[int]()
    for token in part:
        is_word, chance = token in WORDS, rng.random()
        if is_word and chance < MOVED:
            continue
        found.append(rng.choice(WORDS) if is_word and chance < MOVED + REWORDED else token)
        if is_word and rng.random() < MOVED:
            found.append(rng.choice(WORDS))
    return tuple(found)


def _pairs_in(part: Sequence[int]) -> Iterator[tuple[int, int]]:
    for key, value in pairwise(part):
        if value in VALUES:
            yield key, value


def _revalued(part: Sequence[int], values: dict[int, int]) -> tuple[int, ...]:
    found = list(part)
    for at in range(1, len(part)):
        if part[at] in VALUES:
            found[at] = values[part[at - 1]]
    return tuple(found)


def cases(number: int, seed: int) -> Iterator[Case]:
    """So many of each kind, with the same targets."""
    for at in range(number):
        for kind in KINDS:
            rng = random.Random(f"{seed} {at}")
            text = made(rng)
            key, other_key = rng.sample(sorted(text.values), 2)
            target = text.prompt(key, rng)
            donor = donor_of(kind, text, rng)
            said = donor.values.get(key)
            asked = target if kind == "identical" else donor.prompt(other_key, rng)
            is_wrong = _says(said) if said is not None and said != text.values[key] else None
            yield Case(kind, asked, target, 1, _says(text.values[key]), is_wrong)


def _says(value: int) -> Callable[[Sequence[int]], bool]:
    return lambda tokens: tokens[0] == value


def run(plan: Plan, report: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Raises BenchError if the model does not learn."""
    if not (plan.folder / "model.safetensors").exists():
        save(train(Shape(), Training(plan.seed, plan.threads), report), plan.folder)
    engine = Engine(plan.folder, EngineOptions(threads=plan.threads, kv_bytes=64 << 20))
    settings = all_settings()
    return measure(Prompts(engine), cases(plan.cases, plan.seed + 1), lambda case: settings)


def table(rows: Sequence[Row]) -> Table:
    return rows_table("recall of a small model, whose prompt was assembled", rows)
