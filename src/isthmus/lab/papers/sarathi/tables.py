"""What chunked prefills with piggybacked decodes gain over batches of prompts only and of decodes only.

Both are runs of the same node: requests of one shape queue for `batch` places, the scheduler forms the batches. The
baseline computes prompts whole and each of its batches as two, one of prompts and one of decodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from math import log
from random import Random
from statistics import median

import msgspec

from isthmus.core.types import NS_PER_S
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.sarathi import one_node
from isthmus.lab.papers.sarathi.one_node import (
    TILE,
    WHOLE,
    BatchLimits,
    Iteration,
    OneNode,
    PaperRequest,
    ServedRun,
    StepTime,
    attention_ms,
    coefficients,
    linear_ms,
    on_a100,
    serve,
    step_ps,
)
from isthmus.lab.papers.table import Figures, PaperCell, Table, compare

_ROUNDS_GAIN = 8
"""How often each place is taken."""


class BatchShape(msgspec.Struct, frozen=True):
    """`batch` requests at once of `length` tokens each, `ratio` (P:D) times as many in the prompt as in the answer."""

    length: int
    batch: int
    ratio: float

    @property
    def prompt(self) -> int:
        return round(self.length * self.ratio / (self.ratio + 1))


@lru_cache(maxsize=16)
def apart(step_ps: StepTime) -> StepTime:
    """The same work as two batches, of the prompts and of the decodes."""

    def separate(chunks: Sequence[tuple[int, int]], num_decodes: int, context: int) -> int:
        together = 0
        if chunks:
            together += step_ps(chunks, 0, 0)
        if num_decodes:
            together += step_ps((), num_decodes, context)
        return together

    return separate


def run(shape: BatchShape, step_ps: StepTime, budget: int, rounds: int = _ROUNDS_GAIN) -> ServedRun:
    """A queue of requests through `batch` places. Each decodes as many iterations as it has tokens beyond its prompt,
    as in the paper's formulas; the prompt's own token comes on top."""
    asked = PaperRequest(shape.prompt, shape.length - shape.prompt + 1)
    return serve([asked] * (rounds * shape.batch), step_ps, BatchLimits(budget, shape.batch, prompt_batch=1))


@lru_cache(maxsize=1024)
def steady_ps(shape: BatchShape, step_ps: StepTime, budget: int) -> int:
    """Time of `_ROUNDS` rounds between filling the places and emptying them, which take longer."""
    once, twice = (run(shape, step_ps, budget, rounds).worked_ps for rounds in (_ROUNDS_GAIN, 2 * _ROUNDS_GAIN))
    return twice - once


def gain(shape: BatchShape, step_ps: StepTime, budget: int) -> float:
    """Throughput with iterations of `budget` tokens, over the baseline's."""
    return steady_ps(shape, apart(step_ps), WHOLE) / steady_ps(shape, step_ps, budget)


def best_gain(shape: BatchShape, step_ps: StepTime, budgets: Sequence[int]) -> float:
    """With whichever of the budgets is best for this shape, or with the baseline's batches if none is better."""
    return max(1.0, *[gain(shape, step_ps, budget) for budget in budgets])


def decode_speed_up(shape: BatchShape, step_ps: StepTime, budget: int) -> float:
    """Time of a decode in a batch of decodes, over what it adds to a batch with a chunk."""
    hybrid = [batch for batch in run(shape, step_ps, budget).batches if batch.chunks and batch.num_decodes]
    alone = [
        batch for batch in run(shape, apart(step_ps), WHOLE).batches if not batch.chunks and batch.num_decodes
    ]

    def added_ps(batch: Iteration) -> int:
        return batch.took_ps - step_ps(batch.chunks, 0, 0)

    return _per_decode(alone, [batch.took_ps for batch in alone]) / _per_decode(
        hybrid, [*map(added_ps, hybrid)]
    )


def _per_decode(batches: Sequence[Iteration], times_ps: Sequence[int]) -> float:
    return sum(times_ps) / sum([batch.num_decodes for batch in batches])


# What one iteration takes: prompts, decodes, both together, and one row more than a tile (SARATHI, Table 2).


_CONTEXT = 1024

_PUBLISHED_ITERATIONS: dict[str, tuple[Sequence[tuple[int, int]], int, tuple[float, float, float]]] = {
    "prompt of 1,024": ([(1024, 0)], 0, (224.8, 10.0, 234.8)),
    "4 decodes": ([], 4, (44.28, 5.68, 49.96)),
    "1,021 of a prompt and 3 decodes": ([(1021, 0)], 3, (223.2, 15.2, 238.4)),
}
"""Chunks, decodes; linear operators, attention, all."""

_PER_DECODE = (12.49, 1.2)
_TILES = {128: 55.0, 256: 69.8, 257: 92.33}


def _measure_iterations(lab: Lab) -> Iterator[PaperCell]:
    totals = []
    for row, (chunks, decodes, published) in _PUBLISHED_ITERATIONS.items():
        rows = decodes + sum([count for count, _ in chunks])
        linear = linear_ms(rows, decodes_only=not chunks)
        attention = attention_ms(chunks, decodes * _CONTEXT)
        totals.append(linear + attention)
        ours = (linear, attention, linear + attention)
        for column, figure, value in zip(("linear", "attention", "all"), published, ours, strict=True):
            yield PaperCell(row, f"{column} (ms)", figure, value)
    prompt, decodes_only, both = totals
    alone, added = decodes_only / 4, (both - prompt) / 3
    yield PaperCell("a decode in a batch of 4", "all (ms)", _PER_DECODE[0], alone)
    yield PaperCell("a decode beside the prompt", "all (ms)", _PER_DECODE[1], added)
    yield PaperCell("the former over the latter", "times", 10.0, alone / added)
    for rows, figure in _TILES.items():
        yield PaperCell(f"{rows} tokens", "all (ms)", figure, linear_ms(rows))


ITERATIONS = Table(
    name="sarathi-iterations",
    title="Time of one iteration",
    source="SARATHI, Table 2 and tile quantisation",
    setup=(
        "LLaMA-13B on one A6000. Our times are interpolated between the printed ones, so rows of prompts only or of "
        "decodes only agree by construction; those with both do not. The paper's 10 times is a marginal cost: what a "
        "decode adds to an iteration that runs anyway."
    ),
    measure=_measure_iterations,
)


# What it costs to cut a prompt: tiles that are not full, weights and KV that are read again (SARATHI).


_LENGTH = 1024
_PUBLISHED_CHUNKS = {64: 5.0, 128: 2.0, 256: 1.2, 512: 1.1}
"""In words: about 5 times, more than 2 times, within 20 %, within 10 %."""


def _prefill_ps(budget: int) -> int:
    return serve([PaperRequest(_LENGTH, 1)], step_ps, BatchLimits(budget, 1)).worked_ps


def _measure_chunks(lab: Lab) -> Iterator[PaperCell]:
    whole = _prefill_ps(WHOLE)
    for size, figure in _PUBLISHED_CHUNKS.items():
        yield PaperCell(
            f"chunks of {size}", "prefill, times that of one piece", figure, _prefill_ps(size) / whole
        )


CHUNKS = Table(
    name="sarathi-chunks",
    title="Prefill time by chunk size",
    source="SARATHI, chunking overhead",
    setup=(
        "One prompt of 1,024 tokens, LLaMA-13B on one A6000, times from the printed anchors. Published in words, for "
        "all lengths: about 5, more than 2, at most 1.2, at most 1.1. Reading KV again is not in the anchors."
    ),
    measure=_measure_chunks,
)


# Peak gains of chunked prefills with piggybacked decodes (SARATHI, Table 4).


_CHUNK_THROUGHPUT = 256

MATMUL, WEIGHT_READ = 0.46, 0.79
"""Shares of an A100's peaks: what fits both figures of `CALIBRATED` best, to a hundredth; no other row was used."""
CALIBRATED = BatchShape(1024, 10, 28)


class _Row(msgspec.Struct, frozen=True):
    name: str
    shape: BatchShape
    speed_up: float
    gain: float


_13B = (
    _Row("13B on A6000, 1K", BatchShape(1024, 6, 50), 5.45, 1.33),
    _Row("13B on A6000, 2K", BatchShape(2048, 6, 50), 3.26, 1.26),
    _Row("13B on A6000, 3K", BatchShape(3072, 6, 50), 2.51, 1.22),
)
_33B = (
    _Row("33B on A100, 1K", CALIBRATED, 3.83, 1.25),
    _Row("33B on A100, 2K", BatchShape(2048, 5, 63), 4.25, 1.22),
    _Row("33B on A100, 3K", BatchShape(3072, 3, 127), 3.51, 1.14),
)


def step_33b(matmul: float = MATMUL, weight_read: float = WEIGHT_READ) -> StepTime:
    _, cost = on_a100("33B", 1, coefficients().but(matmul=matmul, weight_read=weight_read))
    return cost.step_ps


def _measure_throughput(lab: Lab) -> Iterator[PaperCell]:
    for rows, step in ((_13B, one_node.step_ps), (_33B, step_33b())):
        for row in rows:
            yield from compare(
                row.name,
                {"decode speed-up (times)": row.speed_up, "throughput (times)": row.gain},
                {
                    "decode speed-up (times)": decode_speed_up(row.shape, step, _CHUNK_THROUGHPUT),
                    "throughput (times)": gain(row.shape, step, _CHUNK_THROUGHPUT),
                },
            )


THROUGHPUT = Table(
    name="sarathi-throughput",
    title="Peak gain over batches of prompts only and of decodes only, chunks of 256",
    source="SARATHI, Table 4",
    setup=(
        "One node, batches formed by our scheduler, in steady state. 13B: times from the printed anchors (Table 2 and "
        "tile quantisation), none of them of these rows; linear operators of piggybacked decodes are then free, so "
        "their speed-up is an upper bound. 33B: no time is printed; analytic cost model, two of its efficiencies "
        f"(matmul {MATMUL}, weight reads {WEIGHT_READ}) fitted to the 1K row, the others follow."
    ),
    measure=_measure_throughput,
)


# Gain by the ratio of prompt to answer tokens: its peak, and what is left away from it (SARATHI).


_LENGTHS = {1024: 18, 2048: 10, 3072: 6}
"""Tokens of a request, and the largest batch of them."""

_BALANCED = {1024: 1.27, 2048: 1.25, 3072: 1.23}
_PEAKS = {256: (14, 1.27), 512: (28, 1.23)}
"""Chunk: P:D of the peak and the gain there, at 1K."""
_ORCA = 1.11
_AWAY = (5, 10, 20, 40, 80, 160)
_AWAY_GAIN = 1.10
_BUDGETS = tuple(TILE * tiles for tiles in range(1, 9))


def balanced(length: int, budget: int) -> BatchShape:
    """All decodes piggyback on the chunks of others, exactly: P:D = chunk / (batch - 1)."""
    batch = _LENGTHS[length]
    return BatchShape(length, batch, (budget - (batch - 1)) / (batch - 1))


def peak(budget: int) -> int:
    """The whole P:D with the highest gain at 1K."""
    expected = round(balanced(1024, budget).ratio)
    return max(
        range(max(1, expected - 6), expected + 7),
        key=lambda ratio: gain(BatchShape(1024, _LENGTHS[1024], ratio), step_ps, budget),
    )


def _measure_balance(lab: Lab) -> Iterator[PaperCell]:
    for length, figure in _BALANCED.items():
        shape = balanced(length, 256)
        yield PaperCell(
            f"chunks of 256, {length} tokens", "throughput (times)", figure, gain(shape, step_ps, 256)
        )
    for budget, (ratio, figure) in _PEAKS.items():
        found = peak(budget)
        yield PaperCell(f"peak of chunks of {budget}", "P:D", ratio, found)
        shape = BatchShape(1024, _LENGTHS[1024], found)
        yield PaperCell(
            f"peak of chunks of {budget}", "throughput (times)", figure, gain(shape, step_ps, budget)
        )
    yield PaperCell("Orca at best", "throughput (times)", _ORCA, gain(balanced(1024, 256), step_ps, WHOLE))
    for ratio in _AWAY:
        shape = BatchShape(1024, _LENGTHS[1024], ratio)
        ours = best_gain(shape, step_ps, (*_BUDGETS, WHOLE))
        yield PaperCell(f"the best chunk at P:D {ratio}", "throughput (times)", _AWAY_GAIN, ours)


BALANCE = Table(
    name="sarathi-balance",
    title="Gain by the ratio of prompt to answer tokens",
    source="SARATHI, figures on P:D and on Orca",
    setup=(
        "LLaMA-13B on one A6000, the largest batches (18, 10 and 6 requests); times from the printed anchors, batches "
        "formed by our scheduler. Orca at best computes a whole prompt beside the decodes in every iteration. The "
        "last rows switch, away from a chunk's peak, to the best multiple of a tile up to 1,024, to whole prompts or "
        "to separate batches; the paper says that this keeps gains of about 10 % over a wide range."
    ),
    measure=_measure_balance,
)


# Chunked prefills and hybrid batches, each without the other (Sarathi-Serve, OSDI'24).


_NUM_REQUESTS, _BUDGET, _MAX_SEQUENCES = 128, 1024, 128
_UTILISATION = 0.7
_Z90 = 1.2816  # of the normal distribution


class _Lengths(msgspec.Struct, frozen=True):
    """Median and 90th percentile of prompts and answers; longer requests than `limit` tokens are left out."""

    prompt: tuple[int, int]
    answer: tuple[int, int]
    limit: int


_TRACES = {
    "chat": _Lengths((1730, 5696), (415, 834), 8192),
    "summarisation": _Lengths((7059, 12985), (208, 371), 16384),
}

_PUBLISHED_ABLATION: dict[str, dict[str, tuple[float, float]]] = {
    "chat": {
        "hybrid batches only": (0.53, 0.68),
        "chunked prefills only": (1.04, 0.17),
        "both": (0.76, 0.14),
    },
    "summarisation": {
        "hybrid batches only": (3.78, 1.38),
        "chunked prefills only": (5.38, 0.20),
        "both": (3.90, 0.17),
    },
}


def requests_of_ablation(lengths: _Lengths, rate: float) -> list[PaperRequest]:
    """Log-normal lengths, Poisson arrivals of so many a second; the same every time."""
    random, now = Random(1), 0.0
    found: list[PaperRequest] = []

    def draw(of: tuple[int, int]) -> int:
        return max(2, round(random.lognormvariate(log(of[0]), log(of[1] / of[0]) / _Z90)))

    while len(found) < _NUM_REQUESTS:
        prompt, answer = draw(lengths.prompt), draw(lengths.answer)
        if prompt + answer <= lengths.limit:
            now += random.expovariate(rate)
            found.append(PaperRequest(prompt, answer, round(now * NS_PER_S)))
    return found


def rate_of(lengths: _Lengths) -> float:
    """At which hybrid batches of chunks are at work for the given share of the time, if all come at once."""
    at_once = [PaperRequest(each.num_tokens, each.output_tokens) for each in requests_of_ablation(lengths, 1.0)]
    return _UTILISATION * _NUM_REQUESTS / (_serve("both", at_once).worked_ps / 1e12)


def _serve(row: str, requests: list[PaperRequest]) -> ServedRun:
    cost, compiled = on_a100("Yi-34B", 2)
    budget = WHOLE if row == "hybrid batches only" else _BUDGET
    step = apart(compiled.step_ps) if row == "chunked prefills only" else compiled.step_ps
    return serve(requests, step, BatchLimits(budget, _MAX_SEQUENCES, kv_tokens=cost.kv_capacity_tokens))


def _measure_ablation(lab: Lab) -> Iterator[PaperCell]:
    for trace, rows in _PUBLISHED_ABLATION.items():
        lengths = _TRACES[trace]
        requests = requests_of_ablation(lengths, rate_of(lengths))
        for row, figures in rows.items():
            served = _serve(row, requests)
            ttft, gaps = sorted(served.ttft_ns()), sorted(served.gaps_ns())
            ours = ttft[len(ttft) // 2] / NS_PER_S, gaps[len(gaps) * 99 // 100] / NS_PER_S
            yield from compare(f"{trace}, {row}", _columns(figures), _columns(ours))


def _columns(figures: tuple[float, float]) -> Figures:
    return dict(zip(("TTFT P50 (s)", "TBT P99 (s)"), figures, strict=True))


ABLATION = Table(
    name="sarathi-ablation",
    title="Chunked prefills and hybrid batches, each without the other",
    source="Sarathi-Serve (OSDI'24), ablation",
    setup=(
        "Yi-34B on two A100, budget 1,024, 128 requests on one node with our scheduler and the analytic cost model. "
        "Without chunks prompts are computed whole beside the decodes; without hybrid batches each iteration is "
        "one batch of chunks and then one of decodes. The paper does not give the load: ours is 70 % of what the node "
        "can do. Lengths are log-normal with the printed medians and 90th percentiles."
    ),
    measure=_measure_ablation,
)


# Pipeline bubbles: batches of equal length leave stages idle for less time (SARATHI, GPT-3 on 64 A100).


_STAGES, _REPLICAS = 8, 8
_STAGED_BATCH, _WHOLE_BATCH, _CHUNK_BUBBLES = 27, 11, 256
_ROUNDS_BUBBLES = 4
"""How often each place of a batch is taken; the paper serves 10,000 requests."""
_SHORTEST, _LONGEST, _THETA, _RATIO = 1024, 4096, 0.4, 10

_PUBLISHED_BUBBLES = {
    "median bubble time of a request": 6.29,
    "throughput over TP-PP with whole prompts": 1.91,
    "throughput over tensor parallelism only": 1.48,
}


class Piped(msgspec.Struct, frozen=True):
    """`took_ps`: from the first batch to the last; `bubbles_ps`: of each request, the time for which stages stood idle
    right before the batches that it was in."""

    took_ps: int
    bubbles_ps: list[int]


def piped(queues: list[list[PaperRequest]], step_ps: StepTime, batch_limits: BatchLimits) -> Piped:
    """Each queue is served in a micro-batch of its own. They pass the stages in turn, and each may enter again, with
    the tokens of its last pass, when it has left the last stage. A stage takes its share of a batch's time;
    communication takes none."""
    nodes = [OneNode(queue, batch_limits, step_ps) for queue in queues]
    free = [0] * _STAGES
    idle_ps: list[list[int]] = [[] for _ in nodes]
    ready: list[tuple[int, int]] = []
    for number, node in enumerate(nodes):
        node.arrive(0)
        heappush(ready, (0, number))
    while ready:
        now, number = heappop(ready)
        node = nodes[number]
        assert node.batch is not None
        took, idle = node.batch.took_ps, 0
        for stage, was_free in enumerate(free):
            begin = max(now, was_free)
            idle += begin - was_free
            now = free[stage] = begin + took // _STAGES
        idle_ps[number].append(idle)
        node.step(now)
        if not node.is_done:
            heappush(ready, (now, number))
    bubbles = []
    for node, idle_of in zip(nodes, idle_ps, strict=True):
        until = [0, *accumulate(idle_of)]
        served = node.served
        bubbles += [until[served.last(at) + 1] - until[begin] for at, begin in enumerate(served.admitted)]
    return Piped(free[-1], bubbles)


def requests_of_bubbles(count: int) -> list[PaperRequest]:
    """Lengths by Zipf's law between the shortest and the longest; a tenth as many tokens in the answer."""
    sizes = range(_SHORTEST, _LONGEST + 1)
    weights = [rank**-_THETA for rank in range(1, len(sizes) + 1)]
    lengths = Random(1).choices(sizes, weights, k=count)
    answers = [length // (_RATIO + 1) for length in lengths]
    return [PaperRequest(length - answer, answer) for length, answer in zip(lengths, answers, strict=True)]


@cache
def _piped(budget: int) -> Piped:
    requests = requests_of_bubbles(_STAGES * _STAGED_BATCH * _ROUNDS_BUBBLES)
    _, cost = on_a100("GPT-3", 8)
    queues = [requests[number::_STAGES] for number in range(_STAGES)]
    return piped(queues, cost.step_ps, BatchLimits(budget, _STAGED_BATCH, prompt_batch=1))


def _tensor_only_ps() -> int:
    """One of eight replicas, with its share of the requests; batches as Orca forms them at best."""
    requests = requests_of_bubbles(_STAGES * _STAGED_BATCH * _ROUNDS_BUBBLES)[::_REPLICAS]
    _, cost = on_a100("GPT-3", 8)
    return serve(requests, cost.step_ps, BatchLimits(WHOLE, _WHOLE_BATCH, prompt_batch=1)).worked_ps


def _measure_bubbles(lab: Lab) -> Iterator[PaperCell]:
    chunked, whole = _piped(_CHUNK_BUBBLES), _piped(WHOLE)
    ours = (
        median(whole.bubbles_ps) / median(chunked.bubbles_ps),
        whole.took_ps / chunked.took_ps,
        _tensor_only_ps() / chunked.took_ps,
    )
    for (row, figure), value in zip(_PUBLISHED_BUBBLES.items(), ours, strict=True):
        yield PaperCell(row, "times", figure, value)


BUBBLES = Table(
    name="sarathi-bubbles",
    title="Pipeline bubbles of GPT-3 on 64 A100",
    source="SARATHI, GPT-3 simulation",
    setup=(
        "Direction only. Eight stages of eight GPUs, eight micro-batches of 27 requests, each with our scheduler; the "
        "analytic cost model, no communication between stages, 864 requests. The paper's packing of micro-batches and "
        "its communication profile are not published, and nothing is fitted."
    ),
    measure=_measure_bubbles,
)
