"""What is asked of a fleet: how long uncached prompts and answers are, from a trace, a file or a distribution."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from isthmus.config import Config
from isthmus.core.cost.lengths import Lengths, LogNormal, Sample, mean_of
from isthmus.core.errors import ConfigError
from isthmus.core.scheduler import TierCache
from isthmus.core.types import NS_PER_S, BlockName
from isthmus.lab.planner.fleet import Fleet
from isthmus.lab.sim.workloads import Workload, load
from isthmus.lab.sim.workloads.lines import read_lines, whole, wrong_line

_SPEC = re.compile(r"(\w+):(.*)")
_LOGNORMAL = ("mu", "sigma", "min", "max")
_EXAMPLE = "lognormal:mu=9.9,sigma=1,min=128,max=131072"


class Demand(msgspec.Struct, frozen=True):
    """Requests to plan for. `lengths`: uncached tokens of prompts, which prefill computes; `cached`: mean cached tokens
    of a prompt; `output_tokens`: mean of an answer. Of a trace, also its `workload` and `rate` (requests/s)."""

    source: str
    lengths: Lengths
    cached: float
    output_tokens: float
    workload: Workload | None = None
    rate: float | None = None

    @property
    def prompt_tokens(self) -> float:
        """Mean of a whole prompt."""
        return mean_of(self.lengths) + self.cached

    @property
    def context(self) -> float:
        """Mean length of a sequence while it decodes."""
        return self.prompt_tokens + self.output_tokens / 2


def demand_of_trace(path: Path, config: Config, fleet: Fleet) -> Demand:
    """The requests of a trace. What is cached of each is what one pool would have: the caches of the home's prefill
    nodes taken together, or their engines' own memory where they have none.

    Raises ConfigError for a trace that cannot be read.
    """
    workload = load(path)
    requests = workload.requests
    capacity = _pool_tokens(fleet) // workload.block_size
    hits = pool_hits([each.blocks for each in requests], capacity)
    cached = [
        min(found * workload.block_size, each.num_tokens - 1)
        for each, found in zip(requests, hits, strict=True)
    ]
    uncached = [each.num_tokens - found for each, found in zip(requests, cached, strict=True)]
    span_ns = requests[-1].arrival_ns - requests[0].arrival_ns
    return Demand(
        source=f"{workload.name}: {len(requests):,} requests",
        lengths=Sample(uncached),
        cached=fmean(cached),
        output_tokens=fmean(each.output_tokens for each in requests),
        workload=workload,
        rate=(len(requests) - 1) * NS_PER_S / span_ns if span_ns else None,
    )


def pool_hits(chains: Sequence[Sequence[BlockName]], capacity: int) -> Iterator[int]:
    """Blocks found of each chain in turn in a pool of `capacity` blocks; each is looked up and then stored."""
    cache = TierCache(capacity)
    for names in chains:
        yield cache.match(names)[0]
        cache.put(names)


def demand_of_lengths(text: str, output_tokens: int | None) -> Demand:
    """`text`: a distribution, one length for all, or a file with a length a line and, after a comma, its answer's.

    Raises ConfigError, one line, for what cannot be read and where nothing says how long answers are.
    """
    match = _SPEC.fullmatch(text)
    outputs: list[int] = []
    if match is not None:
        lengths: Lengths = _distribution(match[1], match[2])
    elif text.isascii() and text.isdigit():
        if not int(text):
            raise ConfigError("--lengths 0: a prompt has at least 1 token")
        lengths = Sample([int(text)])
    else:
        inputs, outputs = _read(Path(text))
        lengths = Sample(inputs)
    if outputs and output_tokens is not None:
        raise ConfigError(
            f"--output-tokens: {text} has the lengths of answers; leave the option or the column out"
        )
    if not outputs and output_tokens is None:
        raise ConfigError("--output-tokens: say how many tokens an answer has; lengths of prompts alone do not")
    return Demand(text, lengths, 0.0, fmean(outputs) if outputs else float(output_tokens or 0))


def _pool_tokens(fleet: Fleet) -> int:
    """Of KV that the home's prefill nodes keep, as they are configured."""
    facts = fleet.home.prefill
    per_node = facts.cache_blocks or facts.kv_blocks
    return per_node * facts.block_size * max(1, fleet.home.configured)


def _distribution(name: str, inside: str) -> LogNormal:
    if name != "lognormal":
        raise ConfigError(f"--lengths: no distribution {name!r}; write e.g. {_EXAMPLE}")
    values: dict[str, float] = {}
    for part in inside.split(","):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals or key not in _LOGNORMAL or key in values:
            raise ConfigError(f"--lengths: {part.strip()!r}: lognormal takes each once: {_EXAMPLE}")
        try:
            values[key] = float(text)
        except ValueError:
            raise ConfigError(f"--lengths: {key}: {text!r} is not a number") from None
    missing = [key for key in _LOGNORMAL if key not in values]
    if missing:
        raise ConfigError(f"--lengths: lognormal needs {' and '.join(missing)} too; e.g. {_EXAMPLE}")
    return LogNormal(*(values[key] for key in _LOGNORMAL))


def _read(path: Path) -> tuple[list[int], list[int]]:
    """Lengths of prompts, and of answers if every line has them."""
    rows: list[list[int]] = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = [whole("tokens", field, 1) for field in line.decode(errors="replace").split(",")]
        except ValueError:
            row = []
        if len(row) not in (1, 2):
            raise wrong_line(
                path, number, "expected a prompt's tokens, or those and an answer's: 2048 or 2048,128"
            )
        if rows and len(row) != len(rows[0]):
            raise wrong_line(path, number, "some lines have the tokens of an answer, some have not")
        rows.append(row)
    return [row[0] for row in rows], [row[1] for row in rows if len(row) == 2]
