"""Specifications of generated workloads: one line, read into a checked `Spec`.

A specification is one line, `poisson:rate=8,num=10000,input=1024,output=128`, or the same as a mapping,
`{arrivals: poisson, rate: 8, num: 10000, input: 1024, output: 128}`. The names:

* `poisson`, `gamma` or `even`: gaps between arrivals are exponential, gamma with coefficient of variation `cv`,
  or all equal; with `turns`, between the starts of conversations.
* `rate`, requests per second in the mean, and `num`, how many.
* `input`, `output`: tokens in and out, each a number or a distribution, such as `lognormal(p50=900,p99=8000)`. `max`
  turns larger values into itself; `truncated_lognormal`, the workload of Prefill-as-a-Service (arXiv 2604.15039,
  section 4), is drawn again until it lies within its limits.
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
"""

from __future__ import annotations

import difflib
import math
import random
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from isthmus.core.errors import ConfigError
from isthmus.core.types import Reuse
from isthmus.lab.sim.workloads.workload import PLAIN_BLOCK_SIZE

ARRIVALS = ("poisson", "gamma", "even")

_SPEC = re.compile(r"\w+:\w+=|(?:" + "|".join(ARRIVALS) + "):")
_COMMA = re.compile(r",(?![^(]*\))")  # not inside the parentheses of a distribution
_CALL = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
_Z99 = 2.3263478740408408  # below it lie 99 % of a standard normal variable

_LEAST_INSIDE = 0.01  # else drawing again would take long

Draw = Callable[[random.Random], int]
"""Draws from a distribution of token counts, all at least 1."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A checked specification; the names are those of the module's text."""

    arrivals: str
    rate: float
    num: int
    input: Draw
    output: Draw
    cv: float = 0.0
    seed: int = 0
    block_size: int = PLAIN_BLOCK_SIZE
    prefixes: int = 0
    prefix_tokens: int = 0
    zipf: float = 1.0
    turns: float = 1.0
    think_s: float = 0.0
    few: float = 0.0
    few_input: Draw | None = None
    few_output: Draw | None = None
    documents: int = 0
    document_tokens: Draw | None = None
    retrieved: int = 0
    reuse: Reuse = Reuse.EXACT
    paraphrases: float = 0.0
    alike: float = 1.0

    def random(self, purpose: str) -> random.Random:
        """A source of chance for one purpose, independent of what is drawn for others: another `output` leaves the
        arrivals as they are, and so does another number of prefixes."""
        return random.Random(f"{self.seed}/{purpose}")


def is_spec(text: str) -> bool:
    """Whether `text` asks for a generated workload rather than naming a file."""
    return _SPEC.match(text) is not None


def parse(source: str | Mapping[str, Any]) -> tuple[str, Spec]:
    """The specification as one line, and checked. Raises ConfigError, one line, for one that cannot be read."""
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
    return f"{kind}:" + ",".join(f"{key}={value}" for key, value in fields.items()), _checked(kind, fields)


def _pair(part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals:
        raise ConfigError(f"workload: {part.strip()!r} is not name=value; known names: {', '.join(_OPTIONS)}")
    return name.strip(), value.strip()


def _checked(kind: str, fields: Mapping[str, str]) -> Spec:
    values: dict[str, Any] = {}
    for name, text in fields.items():
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"workload: {name!r} is not known{hint}; known names: {', '.join(_OPTIONS)}")
        try:
            values[name] = _OPTIONS[name].read(text)
        except ValueError as error:
            raise ConfigError(f"workload: {name}: {error}") from None
    if "cv" in values and kind != "gamma":
        raise ConfigError(f"workload: cv belongs to gamma arrivals; leave it out with {kind}")
    _need(kind, ("rate", "num", "input", "output", *(["cv"] if kind == "gamma" else [])), values)
    for name in _OPTIONS:
        if name in values:
            _need(name, _OPTIONS[name].needs, values)
    if "documents" not in values and "zipf" in values:
        _need("zipf", ("prefixes",), values)
    spec = Spec(arrivals=kind, **values)
    if spec.documents and (spec.few or spec.turns != 1.0):
        raise ConfigError("workload: documents go with neither few nor turns")
    if spec.few and (spec.prefixes or spec.turns != 1.0):
        raise ConfigError("workload: few goes with neither prefixes nor turns")
    if spec.retrieved > spec.documents:
        raise ConfigError(f"workload: retrieved: there are not {spec.retrieved} of {spec.documents} documents")
    return spec


def _need(name: str, needed: tuple[str, ...], values: Mapping[str, Any]) -> None:
    for each in needed:
        if each not in values:
            raise ConfigError(f"workload: {name} needs {each} too; write e.g. {each}={_OPTIONS[each].example}")


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


def parse_lengths(text: str) -> Draw:
    """Reads a distribution. Raises ValueError saying what is wrong with `text`."""
    match = _CALL.fullmatch(text)
    if match is None:
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise ValueError(f"{text!r} is neither a whole number above 0 nor one of {_KNOWN}")
        length = int(text)
        return lambda rng: length
    name, inside = match.groups()
    if name not in _FORMS:
        raise ValueError(f"no distribution {name!r}; known: {_KNOWN}")
    values = _values(name, inside)
    for names, make in _FORMS[name].items():
        if "max" in names and set(names) == set(values):
            return make(*(values[each] for each in names))
        if set(names) == set(values) - {"max"}:
            return _limited(make(*(values[each] for each in names)), values.get("max"))
    raise ValueError(f"{name} takes {_forms(name)}")


def _values(name: str, inside: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in inside.split(","):
        key, _, text = (piece.strip() for piece in part.partition("="))
        try:
            value = float(text)
        except ValueError:
            raise ValueError(
                f"{name}: {part.strip()!r} is not name=number; {name} takes {_forms(name)}"
            ) from None
        if not (value >= 0.0 and math.isfinite(value)):
            raise ValueError(f"{name}: {key} of {text} is not a number from 0 up")
        if key in values:
            raise ValueError(f"{name}: {key} twice")
        values[key] = value
    return values


def _uniform(low: float, high: float) -> Draw:
    if not 1 <= low <= high or low % 1 or high % 1:
        raise ValueError(f"uniform: low={low:g}, high={high:g} are not whole numbers with 1 <= low <= high")
    least, width = int(low), int(high) - int(low) + 1
    return lambda rng: least + int(rng.random() * width)


def _exponential(mean: float) -> Draw:
    if mean < 1:
        raise ValueError(f"exponential: mean={mean:g} is below 1 token")
    return lambda rng: max(1, round(rng.expovariate(1.0 / mean)))


def _lognormal(mean: float, sigma: float) -> Draw:
    if mean < 1:
        raise ValueError(f"lognormal: mean={mean:g} is below 1 token")
    mu = math.log(mean) - sigma * sigma / 2.0
    return lambda rng: max(1, round(rng.lognormvariate(mu, sigma)))


def _lognormal_of_quantiles(p50: float, p99: float) -> Draw:
    if not 1 <= p50 <= p99:
        raise ValueError(f"lognormal: p50={p50:g}, p99={p99:g} are not 1 <= p50 <= p99")
    mu, sigma = math.log(p50), math.log(p99 / p50) / _Z99
    return lambda rng: max(1, round(rng.lognormvariate(mu, sigma)))


def _truncated_lognormal(mu: float, sigma: float, low: float, high: float) -> Draw:
    if not (1 <= low < high and sigma > 0) or low % 1 or high % 1:
        raise ValueError(
            f"truncated_lognormal: min={low:g}, max={high:g}, sigma={sigma:g} are not whole numbers with "
            "1 <= min < max, and a sigma above 0"
        )
    inside = _normal_below((math.log(high) - mu) / sigma) - _normal_below((math.log(low) - mu) / sigma)
    if inside < _LEAST_INSIDE:
        raise ValueError(f"truncated_lognormal: only {inside:.2g} of it lies between min and max")

    def draw(rng: random.Random) -> int:
        while True:
            value = rng.lognormvariate(mu, sigma)
            if low <= value <= high:
                return round(value)

    return draw


def _normal_below(z: float) -> float:
    """Share of a standard normal variable below `z`."""
    return (1.0 + math.erf(z / math.sqrt(2.0))) / 2.0


def _limited(draw: Draw, most: float | None) -> Draw:
    if most is None:
        return draw
    if most < 1 or most % 1:
        raise ValueError(f"max={most:g} is not a whole number above 0")
    limit = int(most)
    return lambda rng: min(limit, draw(rng))


# Per distribution, the sets of names it can be given by; `max` may be added to each without one and cuts the tail off.
_FORMS: dict[str, dict[tuple[str, ...], Callable[..., Draw]]] = {
    "uniform": {("low", "high"): _uniform},
    "exponential": {("mean",): _exponential},
    "lognormal": {("mean", "sigma"): _lognormal, ("p50", "p99"): _lognormal_of_quantiles},
    "truncated_lognormal": {("mu", "sigma", "min", "max"): _truncated_lognormal},
}


def _forms(name: str) -> str:
    forms = " or ".join(",".join(f"{each}=" for each in names) for names in _FORMS[name])
    return forms if "max=" in forms else f"{forms}, and max= if wanted"


_KNOWN = ", ".join(
    f"{name}({','.join(f'{each}=' for each in names)})" for name in _FORMS for names in _FORMS[name]
)


class _Option(NamedTuple):
    read: Callable[[str], Any]
    """Raises ValueError."""
    example: str = ""
    needs: tuple[str, ...] = ()
    """Options that must be given with it."""


_OPTIONS = {
    "rate": _Option(_number(0.0, above=True), "8"),
    "num": _Option(_whole, "10000"),
    "input": _Option(parse_lengths, "1024"),
    "output": _Option(parse_lengths, "128"),
    "cv": _Option(_number(0.0, above=True), "2"),
    "seed": _Option(_seed),
    "block_size": _Option(_whole),
    "prefixes": _Option(_whole, "100", ("prefix_tokens",)),
    "prefix_tokens": _Option(_whole, "4096", ("prefixes",)),
    "zipf": _Option(_number(0.0)),
    "turns": _Option(_number(1.0), "5", ("think_s",)),
    "think_s": _Option(_number(0.0), "30", ("turns",)),
    "few": _Option(_share, "0.01", ("few_input", "few_output")),
    "few_input": _Option(parse_lengths, "60000", ("few",)),
    "few_output": _Option(parse_lengths, "1000", ("few",)),
    "documents": _Option(_whole, "500", ("document_tokens", "retrieved")),
    "document_tokens": _Option(parse_lengths, "1024", ("documents",)),
    "retrieved": _Option(_whole, "8", ("documents",)),
    "reuse": _Option(_reuse, needs=("documents",)),
    "paraphrases": _Option(_share, "0.3", ("documents", "alike")),
    "alike": _Option(_share, "0.9", ("paraphrases",)),
}
