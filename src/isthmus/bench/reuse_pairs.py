"""Real English prose for studies: a folder of the user's, or what is installed anyway.

Without a folder it is Python's own reference manual, as `help()` shows it, and what the packages that Isthmus needs
say of themselves. Nothing of it is kept in this repository.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics

import blake3

from isthmus.core.errors import ConfigError

SUFFIXES = (".txt", ".md", ".rst", ".py")
LEAST_WORDS, MOST_WORDS = 5, 60
"""Of a sentence; what has fewer or more is a heading, a list or code."""
LEAST_SENTENCES = 2
LETTERS = 0.95
"""Of the characters of a paragraph, those that are letters, spaces or plain marks."""
MOST_BYTES = 1 << 20
"""Of one file: more is not read."""
_CODE = re.compile(r">>>|::=|https?://|[{}<>|\\=]|^\s*[#.]|\bself\b")
_MARKUP = re.compile(r"[*`_\"]+")
_STOP = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")

Passage = tuple[str, ...]
"""The sentences of a paragraph."""


def prose(folder: Path | None) -> list[Passage]:
    """Paragraphs, none twice, in the same order every time. Raises ConfigError for a folder without any."""
    texts = _installed() if folder is None else _files(folder)
    found: dict[Passage, None] = {}
    for text in texts:
        found |= dict.fromkeys(paragraphs(text))
    if folder is not None and not found:
        raise ConfigError(f"--texts {folder}: no paragraph of prose in its {', '.join(SUFFIXES)} files")
    return list(found)


def words(passage: Passage) -> int:
    return sum(len(sentence.split()) for sentence in passage)


def digest(passages: Iterable[Passage]) -> str:
    """Which texts a measurement was made with: they are another Python's in another Python."""
    return blake3.blake3("\n".join(" ".join(each) for each in passages).encode()).hexdigest(length=8)


def paragraphs(text: str) -> Iterator[Passage]:
    """What reads like prose: whole sentences without code."""
    for part in re.split(r"\n\s*\n", text):
        if part.startswith(("    ", "   ", "\t")) and "\n" not in part.strip():
            continue
        flat = _MARKUP.sub("", " ".join(part.split()))
        if _CODE.search(flat) or not flat[:1].isupper() or not flat.endswith("."):
            continue
        sentences = tuple(_STOP.split(flat))
        counts = [len(sentence.split()) for sentence in sentences]
        letters = sum(char.isalpha() or char in " ,.'" for char in flat)
        is_even = min(counts) >= LEAST_WORDS and max(counts) <= MOST_WORDS
        if len(sentences) >= LEAST_SENTENCES and is_even and letters >= LETTERS * len(flat):
            yield sentences


def _installed() -> Iterator[str]:
    yield from (topics[name] for name in sorted(topics))
    for requirement in sorted(metadata.requires("isthmus") or ()):
        if "extra ==" in requirement:
            continue
        name = re.split(r"[=<>!~;\[ ]", requirement)[0]
        yield str(metadata.metadata(name).json["description"])


def _files(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        raise ConfigError(f"--texts {folder}: no such folder")
    for file in sorted(folder.rglob("*")):
        if file.suffix in SUFFIXES and file.is_file():
            try:
                with file.open(encoding="utf-8", errors="replace") as opened:
                    yield opened.read(MOST_BYTES)
            except OSError as error:
                raise ConfigError(f"--texts {file}: cannot be read: {error.strerror}") from None


# Pairs of texts: one that was computed before, and one that is to be assembled of its KV. Pure, and the same by seed.
#
# A text is passages of prose with facts planted in them, which no model can know. What is asked about the target has an
# answer in the target; what the donor says in its place tells whether an answer follows the wrong text. Sentences are
# rewritten by rules, in other words of the same meaning or the opposite. That is a stand-in for what people or models
# write: words and phrases of a fixed table are replaced, verbs contracted and openings moved, and no more.


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


# Other words.

_SAME = """
a number of=several|able to=in a position to|according to=following|actual=real|added=appended|additional=further
allow=permit|allows=permits|allowed=permitted|almost=nearly|alphabetical=alphabetic|already=by now|also=as well
although=even though|always=in every case|any number of=arbitrarily many|appear=show up|appears=shows up
appropriate=suitable|as well as=and also|associated=linked|at least=no fewer than|at most=no more than|attempt=try
attempts=tries|automatically=by itself|available=at hand|basic=fundamental|because=since|before=prior to|begin=start
begins=starts|behaves=acts|between=among|big=large|both=the two|brief=short|build=construct|built=constructed
by default=unless told otherwise|called=invoked|carefully=with care|causes=makes|certain=particular|change=alter
changed=altered|changes=alters|choose=pick|chosen=picked|collection=set|common=usual|complete=full
completely=entirely|consists of=is made up of|contain=hold|contains=holds|containing=holding|convert=turn
converted=turned|correct=right|create=make|created=made|creates=makes|current=present|currently=at present
defined=given|deleted=removed|depending on=according to|describe=explain|described=explained|describes=explains
determine=find out|determined=found out|different=other|directly=straight|discussed=treated|done=carried out
during=in the course of|each=every|easily=without effort|easy=simple|either=one of|empty=blank|end=finish
ends=finishes|ensure=make sure|ensures=makes sure|entire=whole|equal=the same|equivalent=equal|especially=above all
evaluated=worked out|every=each|exactly=precisely|example=instance|except=apart from|executed=run|execution=running
exist=are there|exists=is there|explicitly=expressly|fast=quick|feature=facility|features=facilities|final=last
finally=at last|find=discover|first=initial|following=next|for example=for instance|found=discovered|frequently=often
function=routine|functions=routines|further=more|generally=in general|get=obtain|given=supplied|gives=supplies
handle=deal with|handles=deals with|hence=so|however=but|identical=the very same|if=in case|immediately=at once
implement=realise|implemented=realised|important=essential|in addition=besides|in order to=to|include=comprise
includes=comprises|indicate=show|indicates=shows|instead of=in place of|invalid=wrong|issue=problem|issues=problems
kind=sort|kinds=sorts|large=big|later=afterwards|like=as|located=placed|made=produced|make=produce|many=a lot of
match=fit|matches=fits|may=can|meaning=sense|means=signifies|modified=adapted|modify=adapt|must=has to|necessary=needed
need=require|needs=requires|never=at no time|new=fresh|normally=ordinarily|note that=mind that|number=count
obtain=get|obtained=got|occur=happen|occurs=happens|often=frequently|only=just|optional=not required|original=first
other=further|otherwise=if not|particular=specific|performed=done|performs=does|permitted=allowed|possible=feasible
previous=earlier|prevent=stop|prevents=stops|provide=offer|provided=offered|provides=offers|quickly=fast
raise=throw|raised=thrown|raises=throws|rather than=instead of|receive=get|receives=gets|refer to=point to
refers to=points to|regardless of=no matter|related=connected|remain=stay|remains=stays|remove=delete|removed=deleted
replaced=exchanged|represent=stand for|represents=stands for|require=need|required=needed|requires=needs
result=outcome|results=outcomes|return=give back|returned=given back|returns=gives back|same=identical|see also=compare
select=choose|selected=chosen|several=a number of|should=ought to|similar=alike|simple=plain|simply=just
since=because|single=sole|slow=sluggish|small=little|some=a few|sometimes=at times|special=particular|specified=stated
specifies=states|specify=state|start=begin|starts=begins|stop=halt|subsequent=later|such as=like|supplied=given
support=back|supported=backed|supports=backs|therefore=so|these=the following|though=although|thus=so|together=jointly
treated=regarded|tries=attempts|true=correct|type=kind|types=kinds|typically=as a rule|unchanged=as it was|unless=if not
until=up to when|use=employ|used=employed|useful=helpful|user=person|uses=employs|using=with|usually=mostly
valid=legal|value=content|values=contents|via=through|want=wish|way=manner|when=whenever|whether=if|whole=entire
will=shall|with respect to=regarding|within=inside|without=lacking|wrong=mistaken
""".replace("\n", "|")
SAME = dict(entry.split("=") for entry in _SAME.strip("|").split("|"))

_SHORT = {
    "cannot": "can't", "can not": "can't", "do not": "don't", "does not": "doesn't", "did not": "didn't",
    "is not": "isn't", "are not": "aren't", "was not": "wasn't", "were not": "weren't", "will not": "won't",
    "would not": "wouldn't", "should not": "shouldn't", "has not": "hasn't", "have not": "haven't",
    "it is": "it's", "that is": "that's", "there is": "there's", "they are": "they're",
}  # fmt: skip

_OPPOSITE = """
is not=is|are not=are|cannot=can|does not=does|do not=do|was not=was|will not=will|must not=must|should not=should
is=is not|are=are not|can=cannot|does=does not|do=do not|was=was not|will=will not|must=must not|should=should not
may=may not|always=never|never=always|all=no|none=all|every=no|before=after|after=before|first=last|last=first
more=less|less=more|larger=smaller|smaller=larger|higher=lower|lower=higher|true=false|false=true|with=without
without=with|same=different|different=same|valid=invalid|invalid=valid|allowed=forbidden|at least=at most
at most=at least|left=right|right=left|open=closed|closed=open|optional=required|required=optional|empty=full
one=nine|two=eight|three=seven|four=six|five=four|ten=twelve
""".replace("\n", "|")
OPPOSITE = dict(entry.split("=") for entry in _OPPOSITE.strip("|").split("|"))


def _matcher(table: dict[str, str]) -> re.Pattern[str]:
    longest_first = sorted(table, key=lambda each: (-len(each), each))
    return re.compile(r"\b(" + "|".join(map(re.escape, longest_first)) + r")\b", re.IGNORECASE)


_SAME_AT, _SHORT_AT, _OPPOSITE_AT = _matcher(SAME), _matcher(_SHORT), _matcher(OPPOSITE)
_OPENING = re.compile(r"^(If|When|In|For|By|With|As|Since|Because|After|Before) ([^,]{8,60}), ([^,]{12,})\.$")
_NUMBER = re.compile(r"\d+")


def paraphrased(sentence: str) -> str:
    """The same in other words, as far as the table goes."""
    opening = _OPENING.match(sentence)
    if opening is not None:
        word, clause, rest = opening.groups()
        sentence = f"{rest[0].upper()}{rest[1:]}, {word.lower()} {clause}."
    return _replaced(_SHORT_AT, _SHORT, _replaced(_SAME_AT, SAME, sentence))


def contradicted(sentence: str) -> str:
    """The opposite, in nearly the same words: the first two that have one are turned round, all numbers changed."""
    turned = _replaced(_OPPOSITE_AT, OPPOSITE, sentence, count=2)
    return _NUMBER.sub(lambda match: str(int(match[0]) * 3 + 7)[-max(1, len(match[0])) :], turned)


def _replaced(at: re.Pattern[str], table: dict[str, str], text: str, count: int = 0) -> str:
    def other(match: re.Match[str]) -> str:
        found = table[match[0].lower()]
        return found[0].upper() + found[1:] if match[0][0].isupper() else found

    return at.sub(other, text, count=count)
