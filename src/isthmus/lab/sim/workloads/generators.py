"""Workloads made up by rule, from one seed.

A specification is one line, `poisson:rate=8,num=10000,input=1024,output=128`, or the same as a mapping,
`{arrivals: poisson, rate: 8, num: 10000, input: 1024, output: 128}`. The names:

* `poisson`, `gamma` or `even`: gaps between arrivals are exponential, gamma with coefficient of variation `cv`,
  or all equal; with `turns`, between the starts of conversations.
* `rate`, requests per second in the mean, and `num`, how many.
* `input`, `output`: tokens in and out, each a number or a distribution (`lengths.py`).
* `few=0.01,few_input=60000,few_output=1000`: so large a share of the requests, drawn at random, have these lengths
  in place of the others: many short requests and few very long ones. Not with `prefixes` or `turns`.
* `seed` of all that is drawn, 0 if not given; `block_size`, tokens per block id, 512 if not given.
* `prefixes=100,prefix_tokens=4096`: each conversation starts with one of so many shared prefixes of so many
  tokens, which come before `input`; the i-th most popular is chosen in proportion to i ** -`zipf`, 1 if not
  given.
* `turns=5,think_s=30`: conversations of several requests, their number geometric with mean `turns`. Each
  prompt is all that was said before and `input` new tokens, and comes an exponential time with mean `think_s`
  after the one before, whether that was answered or not. `rate` counts requests once conversations end as
  often as they start; before that there are fewer, since the first start at time 0.

* `documents=500,document_tokens=1024,retrieved=8`: each prompt has so many different documents of a corpus in any order
  (the i-th most popular in proportion to i ** -`zipf`), after its shared prefix if there is one and before a question
  of `input` tokens. Not with `turns` or `few`.
* `reuse=chunks` or `semantic`, `exact` if not given: the KV such prompts may be computed with (docs/reuse.md).
  `paraphrases=0.3,alike=0.9`: so large a share of them say in other words what an earlier one says, and their
  embeddings have this cosine.

What is drawn for one purpose does not depend on what is drawn for another: another `output` leaves the
arrivals as they are, and so does another number of prefixes.
"""

from __future__ import annotations

import difflib
import math
import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import accumulate, count, islice
from typing import Any

import msgspec

from isthmus.core.errors import ConfigError
from isthmus.core.types import Reuse
from isthmus.lab.sim.workloads.documents import DocumentPrompts, Documents
from isthmus.lab.sim.workloads.lengths import LengthDistribution, parse_lengths
from isthmus.lab.sim.workloads.workload import PLAIN_BLOCK_SIZE, Request, Workload

ARRIVALS = ("poisson", "gamma", "even")

_SPEC = re.compile(r"\w+:\w+=|(?:" + "|".join(ARRIVALS) + "):")

# A comma inside the parentheses of a distribution separates nothing.
_COMMA = re.compile(r",(?![^(]*\))")


class _Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A checked specification; the names are those of the module's text."""

    rate: float
    num: int
    input: LengthDistribution
    output: LengthDistribution
    cv: float = 0.0
    seed: int = 0
    block_size: int = PLAIN_BLOCK_SIZE
    prefixes: int = 0
    prefix_tokens: int = 0
    zipf: float = 1.0
    turns: float = 1.0
    think_s: float = 0.0
    few: float = 0.0
    few_input: LengthDistribution | None = None
    few_output: LengthDistribution | None = None
    documents: int = 0
    document_tokens: LengthDistribution | None = None
    retrieved: int = 0
    reuse: Reuse = Reuse.EXACT
    paraphrases: float = 0.0
    alike: float = 1.0


def is_spec(text: str) -> bool:
    """Whether `text` asks for a generated workload rather than naming a file."""
    return _SPEC.match(text) is not None


def generate(source: str | Mapping[str, Any]) -> Workload:
    """The workload of a specification. Raises ConfigError, one line, for one that cannot be read."""
    kind, fields = _fields(source)
    name = f"{kind}:" + ",".join(f"{key}={value}" for key, value in fields.items())
    spec = _checked(kind, fields)
    gap = _gap(kind, spec.cv, random.Random(f"{spec.seed}/arrivals"))
    plain = spec.prefixes == 0 and spec.turns == 1.0
    if spec.few and not plain:
        raise ConfigError("workload: few goes with neither prefixes nor turns")
    if spec.documents:
        requests = list(_retrieved(spec, gap))
    else:
        requests = list(_plain(spec, gap) if plain else _conversations(spec, gap))
    return Workload(name, spec.block_size, requests)


def _gap(kind: str, cv: float, rng: random.Random) -> Callable[[], float]:
    """Draws gaps with mean 1."""
    if kind == "poisson":
        return lambda: rng.expovariate(1.0)
    if kind == "gamma":
        # Shape k and scale s have mean k * s and variation k ** -0.5.
        return lambda: rng.gammavariate(cv**-2, cv**2)
    return lambda: 1.0


def _plain(spec: _Spec, gap: Callable[[], float]) -> Iterator[Request]:
    """Requests that share nothing."""
    inputs, outputs = random.Random(f"{spec.seed}/input"), random.Random(f"{spec.seed}/output")
    draw_input, draw_output = spec.input.draw, spec.output.draw
    ns_per_gap = 1e9 / spec.rate
    is_one_of_few, few = random.Random(f"{spec.seed}/few"), random.Random(f"{spec.seed}/few lengths")
    time = 0.0
    for _ in range(spec.num):
        time += gap()
        if spec.few_input and spec.few_output and is_one_of_few.random() < spec.few:
            yield Request(int(time * ns_per_gap), spec.few_input.draw(few), spec.few_output.draw(few))
            continue
        yield Request(int(time * ns_per_gap), draw_input(inputs), draw_output(outputs))


def _retrieved(spec: _Spec, gap: Callable[[], float]) -> Iterator[Request]:
    """Requests that are made of documents."""
    if spec.few or spec.turns != 1.0:
        raise ConfigError("workload: documents go with neither few nor turns")
    if spec.retrieved > spec.documents:
        raise ConfigError(f"workload: retrieved: there are not {spec.retrieved} of {spec.documents} documents")
    assert spec.document_tokens is not None
    made = Documents(
        spec.input,
        spec.documents,
        spec.document_tokens,
        spec.retrieved,
        spec.prefixes,
        spec.prefix_tokens,
        spec.zipf,
        spec.paraphrases,
        spec.alike,
        spec.reuse,
        spec.seed,
        spec.block_size,
    )
    prompts, outputs, time = DocumentPrompts(made), random.Random(f"{spec.seed}/output"), 0.0
    for _ in range(spec.num):
        time += gap()
        num_tokens, blocks, content = prompts.draw()
        arrival_ns, output = int(time * (1e9 / spec.rate)), spec.output.draw(outputs)
        yield Request(arrival_ns, num_tokens, output, blocks, content=content)


class _Conversation:
    """What its next prompt starts with: so many tokens, whose full blocks are `blocks`."""

    __slots__ = ("blocks", "num_tokens")

    def __init__(self, num_tokens: int, blocks: list[int]) -> None:
        self.num_tokens = num_tokens
        self.blocks = blocks


def _conversations(spec: _Spec, gap: Callable[[], float]) -> Iterator[Request]:
    """Requests that share prefixes with each other, with those before them in their conversation, or both."""
    inputs, outputs = random.Random(f"{spec.seed}/input"), random.Random(f"{spec.seed}/output")
    turns = random.Random(f"{spec.seed}/turns")
    ids = count()
    begin = _beginnings(spec, ids)
    ns_per_gap = 1e9 * spec.turns / spec.rate
    start = gap() * ns_per_gap
    due: list[tuple[float, int, _Conversation]] = []  # heap: time of the next turn, and a number against ties
    for number in range(spec.num):
        if due and due[0][0] <= start:
            time, _, conversation = heappop(due)
        else:
            time, conversation = start, begin()
            start += gap() * ns_per_gap
        request = _turn(conversation, int(time), spec.input.draw(inputs), spec.output.draw(outputs), spec, ids)
        if turns.random() * spec.turns >= 1.0:
            heappush(due, (time - math.log(1.0 - turns.random()) * spec.think_s * 1e9, number, conversation))
        yield request


def _beginnings(spec: _Spec, ids: Iterator[int]) -> Callable[[], _Conversation]:
    """Opens conversations, each with a shared prefix where there are any."""
    if spec.prefixes == 0:
        return lambda: _Conversation(0, [])
    rng = random.Random(f"{spec.seed}/prefixes")
    popularity = list(accumulate(rank**-spec.zipf for rank in range(1, spec.prefixes + 1)))
    full_blocks: dict[int, list[int]] = {}

    def begin() -> _Conversation:
        prefix = bisect_left(popularity, rng.random() * popularity[-1])
        if prefix not in full_blocks:
            full_blocks[prefix] = list(islice(ids, spec.prefix_tokens // spec.block_size))
        return _Conversation(spec.prefix_tokens, full_blocks[prefix].copy())

    return begin


def _turn(
    conversation: _Conversation, arrival_ns: int, new_tokens: int, output: int, spec: _Spec, ids: Iterator[int]
) -> Request:
    """The next request of a conversation. Its answer becomes part of what is said before the one after."""
    num_tokens = conversation.num_tokens + new_tokens
    num_full, rest = divmod(num_tokens, spec.block_size)
    conversation.blocks += islice(ids, num_full - len(conversation.blocks))
    conversation.num_tokens = num_tokens + output
    # What fills the last block is not known before the next turn: until then it is another block.
    blocks = (*conversation.blocks, next(ids)) if rest else tuple(conversation.blocks)
    return Request(arrival_ns, num_tokens, output, blocks)


def _fields(source: str | Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Kind of arrivals, and the other fields as text."""
    if isinstance(source, str):
        kind, _, rest = source.partition(":")
        pairs = [_pair(part) for part in _COMMA.split(rest) if rest]
    else:
        kind = str(source.get("arrivals", ""))
        pairs = [(str(key), str(value)) for key, value in source.items() if key != "arrivals"]
    if kind not in ARRIVALS:
        raise ConfigError(f"workload: arrivals {kind!r} are not known; known: {', '.join(ARRIVALS)}")
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ConfigError("workload: one name is given twice; give each once")
    return kind, fields


def _pair(part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals:
        raise ConfigError(f"workload: {part.strip()!r} is not name=value; known names: {', '.join(_OPTIONS)}")
    return name.strip(), value.strip()


def _checked(kind: str, fields: Mapping[str, str]) -> _Spec:
    values: dict[str, Any] = {}
    for name, text in fields.items():
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"workload: {name!r} is not known{hint}; known names: {', '.join(_OPTIONS)}")
        try:
            values[name] = _OPTIONS[name](text)
        except ValueError as error:
            raise ConfigError(f"workload: {name}: {error}") from None
    if "cv" in values and kind != "gamma":
        raise ConfigError(f"workload: cv belongs to gamma arrivals; leave it out with {kind}")
    given = {kind, *values}
    needed = _NEEDS if "documents" in given else [*_NEEDS, ("zipf", "prefixes")]
    for name, needs in needed:
        if name in given and needs not in given:
            raise ConfigError(f"workload: {name} needs {needs} too; write e.g. {needs}={_EXAMPLES[needs]}")
    return _Spec(**values)


def _whole(text: str) -> int:
    """A whole number above 0."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"{text!r} is not a whole number above 0")
    return int(text)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _number(least: float, *, above: bool = False) -> Callable[[str], float]:
    """Reads a number of at least `least`, or above it."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and (value > least if above else value >= least)):
            raise ValueError(f"{text!r} is not a number {'above' if above else 'of at least'} {least:g}")
        return value

    return read


def _share(text: str) -> float:
    value = _number(0.0, above=True)(text)
    if value >= 1:
        raise ValueError(f"{text!r} is not a number between 0 and 1")
    return value


def _reuse(text: str) -> Reuse:
    if text not in list(Reuse):
        raise ValueError(f"{text!r} is none of {', '.join(Reuse)}")
    return Reuse(text)


_OPTIONS: dict[str, Callable[[str], Any]] = {
    "rate": _number(0.0, above=True),
    "num": _whole,
    "input": parse_lengths,
    "output": parse_lengths,
    "cv": _number(0.0, above=True),
    "seed": _seed,
    "block_size": _whole,
    "prefixes": _whole,
    "prefix_tokens": _whole,
    "zipf": _number(0.0),
    "turns": _number(1.0),
    "think_s": _number(0.0),
    "few": _share,
    "few_input": parse_lengths,
    "few_output": parse_lengths,
    "documents": _whole,
    "document_tokens": parse_lengths,
    "retrieved": _whole,
    "reuse": _reuse,
    "paraphrases": _share,
    "alike": _share,
}

_NEEDS = [
    *((kind, name) for kind in ARRIVALS for name in ("rate", "num", "input", "output")),
    ("gamma", "cv"),
    ("prefixes", "prefix_tokens"),
    ("prefix_tokens", "prefixes"),
    ("turns", "think_s"),
    ("think_s", "turns"),
    ("few", "few_input"),
    ("few", "few_output"),
    ("few_input", "few"),
    ("few_output", "few"),
    ("documents", "document_tokens"),
    ("documents", "retrieved"),
    ("document_tokens", "documents"),
    ("retrieved", "documents"),
    ("reuse", "documents"),
    ("paraphrases", "documents"),
    ("paraphrases", "alike"),
    ("alike", "paraphrases"),
]

_EXAMPLES = {
    "rate": "8",
    "num": "10000",
    "input": "1024",
    "output": "128",
    "cv": "2",
    "prefixes": "100",
    "prefix_tokens": "4096",
    "turns": "5",
    "think_s": "30",
    "few": "0.01",
    "few_input": "60000",
    "few_output": "1000",
    "documents": "500",
    "document_tokens": "1024",
    "retrieved": "8",
    "paraphrases": "0.3",
    "alike": "0.9",
}
