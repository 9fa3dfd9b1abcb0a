"""Pairs of texts: one that was computed before, and one that is to be assembled of its KV. Pure, and the same by seed.

A text is passages of prose with facts planted in them, which no model can know. What is asked about the target has an
answer in the target; what the donor says in its place tells whether an answer follows the wrong text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from isthmus.bench.reuse_texts import Passage
from isthmus.bench.reuse_words import contradicted, paraphrased

NUM_FACTS = 6
DOCUMENT = 3
"""Passages that stay together where a text is reordered."""
REWRITTEN = 0.5
"""The share of the sentences that are put in other words where a text is paraphrased."""
INSTRUCTION = "Read these notes. A question about them follows."
SUMMARY = "Summarise these notes in a few sentences."

PLACES = (
    "harbour mill tower library bakery station museum garden bridge castle market school theatre orchard chapel "
    "workshop lighthouse brewery stable observatory warehouse vineyard quarry ferry"
).split()
WORDS = (
    "maple copper velvet falcon ginger marble thunder lemon pepper silver walnut cactus amber tulip saddle ribbon "
    "candle pebble lantern meadow anchor button cherry feather"
).split()
NAMES = (
    "Anna Bruno Clara David Emma Felix Greta Henry Irene Jacob Karen Louis Maria Nadia Oscar Paula Robert Sofia "
    "Thomas Ursula Victor Wanda Martin Helen"
).split()


@dataclass(frozen=True)
class Kind:
    """A kind of fact: what is said, the same in other words, the question, and how an answer begins."""

    says: str
    also: str
    question: str
    lead: str


KINDS = {
    "word": Kind(
        "The code word of the {place} is {value}.",
        "{value} is what the code word of the {place} is.",
        "What is the code word of the {place}?",
        "The code word of the {place} is",
    ),
    "number": Kind(
        "The locker number of the {place} is {value}.",
        "{value} is the number of the {place}'s locker.",
        "What is the locker number of the {place}?",
        "The locker number of the {place} is",
    ),
    "name": Kind(
        "The keeper of the {place} is {value}.",
        "{value} is the one who keeps the {place}.",
        "Who is the keeper of the {place}?",
        "The keeper of the {place} is",
    ),
    "negation": Kind(
        "The gate of the {place} is {value}.",
        "The {place} has a gate, and that is {value}.",
        "Is the gate of the {place} open or not open?",
        "The gate of the {place} is",
    ),
}
GATES = ("open", "not open")


@dataclass(frozen=True)
class Fact:
    kind: str
    place: str
    value: str
    is_reworded: bool = False

    @property
    def text(self) -> str:
        kind = KINDS[self.kind]
        said = (kind.also if self.is_reworded else kind.says).format(place=self.place, value=self.value)
        return said[0].upper() + said[1:]

    @property
    def question(self) -> str:
        return KINDS[self.kind].question.format(place=self.place)

    @property
    def lead(self) -> str:
        return KINDS[self.kind].lead.format(place=self.place)


Item = str | Fact
"""A sentence of prose, or a fact, which is a sentence too."""
Text = tuple[tuple[Item, ...], ...]


def written(text: Text) -> str:
    """As it stands in a prompt."""
    return "\n\n".join(
        [" ".join([each if isinstance(each, str) else each.text for each in part]) for part in text]
    )


@dataclass(frozen=True)
class Pair:
    """`donor` and `target`: prompts without the chat template. `facts`: of the target; `others`: what the donor says in
    their places, "" where it says the same or nothing. `about`: the fact that the donor was asked for."""

    kind: str
    donor: str
    target: str
    facts: tuple[Fact, ...]
    others: tuple[str, ...]
    about: Fact


class Maker:
    """Makes pairs of some prose, of about so many words each."""

    def __init__(self, prose: Sequence[Passage], num_words: int, seed: int) -> None:
        self._prose, self._num_words, self._seed = prose, num_words, seed

    def pair(self, kind: str, number: int) -> Pair:
        """Every kind has the same targets, by their number, but for the order of its facts."""
        rng = random.Random(f"{self._seed} {number}")
        used = rng.sample(self._prose, len(self._prose))
        facts = _facts(rng, number)
        text = _planted(self._filled(used), facts, rng)
        donor = DONORS[kind](text, list(used), self, random.Random(f"{self._seed} {kind} {number}"))
        said = {
            (each.kind, each.place): each.value for part in donor for each in part if isinstance(each, Fact)
        }
        others = [said.get((each.kind, each.place), "") for each in facts]
        others = ["" if other == each.value else other for other, each in zip(others, facts, strict=True)]
        about = facts[0] if kind in ("identical", "false") else facts[-1]
        return Pair(kind, written(donor), written(text), tuple(facts), tuple(others), about)

    def _filled(self, used: list[Passage]) -> list[Passage]:
        """Takes passages from the end of `used` until there are words enough."""
        found, count = list[Passage](), 0
        while count < self._num_words and used:
            found.append(used.pop())
            count += sum(len(sentence.split()) for sentence in found[-1])
        return found

    def fresh(self, used: list[Passage], rng: random.Random) -> Text:
        """Another text with other facts."""
        return _planted(self._filled(used), _facts(rng, rng.randrange(100)), rng)


def _facts(rng: random.Random, number: int) -> list[Fact]:
    """Of all kinds in turns, the first by the number; no place and no value twice, but for gates."""
    kinds = list(KINDS)
    places = rng.sample(PLACES, NUM_FACTS)
    values = {"word": rng.sample(WORDS, NUM_FACTS), "name": rng.sample(NAMES, NUM_FACTS)}
    values["number"] = [str(each) for each in rng.sample(range(11, 99), NUM_FACTS)]
    values["negation"] = [rng.choice(GATES) for _ in range(NUM_FACTS)]
    ordered = [kinds[(number + at) % len(kinds)] for at in range(NUM_FACTS)]
    return [
        Fact(kind, place, values[kind][at])
        for at, (kind, place) in enumerate(zip(ordered, places, strict=True))
    ]


def _planted(passages: Sequence[Passage], facts: Sequence[Fact], rng: random.Random) -> Text:
    """Facts stand behind sentences anywhere, in an order of their own."""
    found: list[list[Item]] = [list(each) for each in passages]
    for fact in rng.sample(facts, len(facts)):
        part = rng.choice(found)
        part.insert(rng.randrange(1, len(part) + 1), fact)
    return tuple([tuple(each) for each in found])


Change = Callable[[Text, list[Passage], Maker, random.Random], Text]


def _identical(text: Text, used: list[Passage], maker: Maker, rng: random.Random) -> Text:
    return text


def _reworded(text: Text, used: list[Passage], maker: Maker, rng: random.Random) -> Text:
    def said(item: Item) -> Item:
        if rng.random() >= REWRITTEN:
            return item
        return paraphrased(item) if isinstance(item, str) else replace(item, is_reworded=True)

    return tuple([tuple([said(each) for each in part]) for part in text])


def _reordered(text: Text, used: list[Passage], maker: Maker, rng: random.Random) -> Text:
    """As documents that were found for another question come in another order."""
    documents = [text[at : at + DOCUMENT] for at in range(0, len(text), DOCUMENT)]
    moved = list(documents)
    while len(documents) > 1 and moved == documents:
        rng.shuffle(moved)
    return tuple([part for document in moved for part in document])


def _changed(share: float) -> Change:
    """So many of the sentences, facts among them, are others."""

    def change(text: Text, used: list[Passage], maker: Maker, rng: random.Random) -> Text:
        spare = [sentence for passage in used for sentence in passage]
        places = [(at, index) for at, part in enumerate(text) for index in range(len(part))]
        parts = [list(part) for part in text]
        for at, index in rng.sample(places, round(share * len(places))):
            parts[at][index] = rng.choice(spare)
        return tuple([tuple(part) for part in parts])

    return change


def _false(text: Text, used: list[Passage], maker: Maker, rng: random.Random) -> Text:
    """Every fact is another, and every sentence that can be is turned round."""

    def turned(item: Item) -> Item:
        if isinstance(item, str):
            return contradicted(item)
        return replace(item, value=_other_value(item, text, rng))

    return tuple([tuple([turned(each) for each in part]) for part in text])


def _other_value(fact: Fact, text: Text, rng: random.Random) -> str:
    """None that the text has."""
    taken = {each.value for part in text for each in part if isinstance(each, Fact)}
    if fact.kind == "negation":
        return next(each for each in GATES if each != fact.value)
    open_ones = {"word": WORDS, "name": NAMES, "number": [str(each) for each in range(11, 99)]}[fact.kind]
    return rng.choice([each for each in open_ones if each not in taken])


def _unrelated(text: Text, used: list[Passage], maker: Maker, rng: random.Random) -> Text:
    return maker.fresh(used, rng)


DONORS: dict[str, Change] = {
    "identical": _identical,
    "paraphrased": _reworded,
    "reordered": _reordered,
    "20 % changed": _changed(0.2),
    "50 % changed": _changed(0.5),
    "false": _false,
    "unrelated": _unrelated,
}
