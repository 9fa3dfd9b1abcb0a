"""One node that runs its scheduler by the iteration times of LLaMA-13B on one A6000 that SARATHI prints.

Linear operators work on tiles of 128 rows. Between the printed sizes their time is linear in tiles, beyond 1,024 rows
proportional. The first three are whole iterations, so their small attention part is counted twice; 92.33 ms, printed
for 257 rows, holds to the end of that tile. Attention of a prompt grows with the square of what it has seen (10 ms at
1,024 tokens), that of decodes with their contexts (5.68 ms for four of 1,024).
"""

from __future__ import annotations

from collections import abc
from functools import cache
from itertools import pairwise

import msgspec

from isthmus.core.cost import (
    Analytic,
    Coefficients,
    NodeCost,
    compile_cost,
    engine_coefficients,
    facts_of,
    hardware_named,
)
from isthmus.core.scheduler import (
    Actions,
    Admitted,
    Chunking,
    CountingPool,
    Preempted,
    Run,
    Scheduler,
    SchedulerLimits,
    Sequence,
    Stepped,
    StepTime,
)
from isthmus.core.types import RequestId

TILE = 128
_ROWS_MS = ((128, 55.0), (256, 69.8), (384, 92.33), (1024, 224.8))
_DECODES_MS = 44.28
_MAX_DECODES = 18  # the largest batch that fits: up to there an iteration takes as long as its weights are read
_PAIR_MS = 10 / 1024**2
_CONTEXT_MS = 5.68 / 4 / 1024
_PS_PER_MS = 1e9


def linear_ms(rows: int, *, decodes_only: bool = False) -> float:
    """Time of all operators but attention for `rows` tokens; 0 for none."""
    if not rows:
        return 0.0
    if decodes_only and rows <= _MAX_DECODES:
        return _DECODES_MS
    rows = -(-rows // TILE) * TILE
    if rows <= _ROWS_MS[0][0]:
        return _ROWS_MS[0][1]
    for (below, fewer), (above, more) in pairwise(_ROWS_MS):
        if rows <= above:
            return fewer + (more - fewer) * (rows - below) / (above - below)
    return _ROWS_MS[-1][1] * rows / _ROWS_MS[-1][0]


def attention_ms(chunks: abc.Sequence[tuple[int, int]], context: int) -> float:
    pairs = sum([(start + count) ** 2 - start**2 for count, start in chunks])
    return _PAIR_MS * pairs + _CONTEXT_MS * context


def step_ps(chunks: abc.Sequence[tuple[int, int]], num_decodes: int, context: int) -> int:
    """A `StepTime`."""
    rows = num_decodes + sum([count for count, _ in chunks])
    linear = linear_ms(rows, decodes_only=not chunks)
    return round(_PS_PER_MS * (linear + attention_ms(chunks, context)))


# Models and machines of the papers that have no printed iteration times: the analytic cost model.
#
# Shapes are from the models' public configurations; GPT-3's (SARATHI, section 5) is written with gated matrices of the
# same total size.


def llama(
    layers: int, heads: int, hidden: int, intermediate: int, vocab: int, kv_heads: int
) -> dict[str, object]:
    """The `config.json` of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": 32_768,
    }


LLAMA_33B = llama(60, 52, 6_656, 17_920, 32_000, 52)
YI_34B = llama(60, 56, 7_168, 20_480, 64_000, 8)
GPT_3 = llama(96, 96, 12_288, 32_768, 50_257, 96)

_A100 = hardware_named("a100")


def coefficients() -> Coefficients:
    """Coefficients of vLLM on an A100 with weights and KV of 16 bits, fitted elsewhere (docs/cost-model.md)."""
    return engine_coefficients("vllm", _A100, weight_dtype="bf16", kv_dtype="bf16")


@cache
def on_a100(model: str, num_gpus: int, by: Coefficients | None = None) -> tuple[Analytic, NodeCost]:
    """One of the models above on so many A100, and its evaluator."""
    facts = facts_of({"33B": LLAMA_33B, "Yi-34B": YI_34B, "GPT-3": GPT_3}[model])
    cost = Analytic(facts, _A100, by or coefficients(), num_gpus=num_gpus)
    return cost, compile_cost(cost)


# One node alone in virtual time: the real scheduler forms the batches, a given function says how long each takes.
#
# For questions about batches that need no cluster, and for times that are no cost model of a deployment, such as a
# table of somebody's measurements.


WHOLE = 1 << 30
"""A token budget that no prompt exceeds: prompts are not cut."""
_BLOCK = 16
_PS_PER_NS = 1000


class BatchLimits(msgspec.Struct, frozen=True):
    """Limits of the node's scheduler; fields as of `scheduler.SchedulerLimits`. `kv_tokens`: memory; `tbt_ms`: longest
    iteration with decodes, by the step time."""

    token_budget: int
    max_sequences: int
    prompt_batch: int = WHOLE
    partial_prefills: int = 1
    kv_tokens: int = WHOLE
    tbt_ms: int | None = None


class PaperRequest(msgspec.Struct, frozen=True):
    """A request: tokens of the prompt and of the answer, the first of which the prompt's last chunk gives."""

    num_tokens: int
    output_tokens: int
    arrival_ns: int = 0


class Iteration(msgspec.Struct, frozen=True):
    """One iteration: what was asked of the step time, and the answer."""

    chunks: tuple[tuple[int, int], ...]
    num_decodes: int
    context: int
    took_ps: int


class ServedRun(msgspec.Struct, frozen=True):
    """Batches in order of time, with their ends. Of each request, `admitted`: the batch in which its prompt began;
    `first`: the batch of its first token. No decode ever waits, so the batches that follow gave its other tokens."""

    requests: abc.Sequence[PaperRequest]
    batches: list[Iteration]
    ends_ps: list[int]
    admitted: list[int]
    first: list[int]

    @property
    def worked_ps(self) -> int:
        """The time of all batches; between them the node was idle."""
        return sum([batch.took_ps for batch in self.batches])

    def last(self, number: int) -> int:
        """The batch that gave a request's last token."""
        return self.first[number] + self.requests[number].output_tokens - 1

    def ttft_ns(self) -> list[int]:
        """TTFT of each request."""
        return [
            self.ends_ps[first] // _PS_PER_NS - asked.arrival_ns
            for first, asked in zip(self.first, self.requests, strict=True)
        ]

    def gaps_ns(self) -> list[int]:
        """Gaps between tokens, of all requests together."""
        gaps: list[int] = []
        for number, first in enumerate(self.first):
            ends = self.ends_ps[first : self.last(number) + 1]
            gaps += [(later - sooner) // _PS_PER_NS for sooner, later in pairwise(ends)]
        return gaps


def serve(requests: abc.Sequence[PaperRequest], step_ps: StepTime, batch_limits: BatchLimits) -> ServedRun:
    """Serves all requests, which are in order of arrival. No prefix is shared."""
    node, now = OneNode(requests, batch_limits, step_ps), 0
    while not node.is_done:
        if node.batch is None:
            now = max(now, node.next_arrival_ps)
            node.arrive(now)
        else:
            now += node.batch.took_ps
            node.step(now)
    return node.served


class OneNode:
    """A node for drivers with a time of their own. `batch`: to execute next, None while there is no request."""

    def __init__(
        self, requests: abc.Sequence[PaperRequest], batch_limits: BatchLimits, step_ps: StepTime
    ) -> None:
        limits = SchedulerLimits(
            num_blocks=batch_limits.kv_tokens // _BLOCK,
            block_size=_BLOCK,
            token_budget=batch_limits.token_budget,
            prompt_batch=batch_limits.prompt_batch,
            partial_prefills=batch_limits.partial_prefills,
            max_sequences=batch_limits.max_sequences,
            max_steps=1,
        )
        target = Chunking(batch_limits.partial_prefills, batch_limits.tbt_ms).target(step_ps)
        self._scheduler = Scheduler(limits, None, CountingPool(limits.num_blocks), target)
        self._step_ps = step_ps
        nowhere = [-1] * len(requests)
        self.served = ServedRun(requests, [], [], nowhere, nowhere[:])
        self.batch: Iteration | None = None
        self._sampled: list[int] = []  # who gets the first token from it
        self._ending: dict[int, list[RequestId]] = {}  # batch -> who gets the last token from it
        self._arrived = 0

    @property
    def is_done(self) -> bool:
        return self.batch is None and self._arrived == len(self.served.requests)

    @property
    def next_arrival_ps(self) -> int:
        return self.served.requests[self._arrived].arrival_ns * _PS_PER_NS

    def arrive(self, now_ps: int) -> None:
        """Takes the requests that have arrived by now."""
        requests = self.served.requests
        while self._arrived < len(requests) and self.next_arrival_ps <= now_ps:
            asked, name = requests[self._arrived], RequestId(str(self._arrived))
            self._arrived += 1
            length = asked.num_tokens
            self._scheduler.arrive(Sequence(name, length, length + asked.output_tokens))
            self._plan([], now_ps)

    def step(self, now_ps: int) -> None:
        """Ends the batch now, after the arrivals in the meantime."""
        served, number = self.served, len(self.served.batches)
        assert self.batch is not None
        served.batches.append(self.batch)
        served.ends_ps.append(now_ps)
        self.arrive(now_ps)
        for request in self._sampled:
            served.first[request] = number
            self._ending.setdefault(served.last(request), []).append(RequestId(str(request)))
        self.batch = None
        actions: Actions = []
        self._scheduler.step(Stepped(1, tuple(self._ending.pop(number, ()))), actions)
        self._plan(actions, now_ps)

    def _plan(self, actions: Actions, now_ps: int) -> None:
        self._scheduler.plan(actions, now_ps // _PS_PER_NS)
        for action in actions:
            assert not isinstance(action, Preempted), "kv_tokens: too few; a prompt would be computed twice"
            if isinstance(action, Admitted):
                self.served.admitted[int(action.request)] = len(self.served.batches)
                continue
            assert isinstance(action, Run)
            assert action.num_decodes == sum(map(len, self._ending.values())), "a decode waits"
            chunks = tuple([(piece.count, piece.start) for piece in action.chunks])
            took_ps = self._step_ps(chunks, action.num_decodes, action.context)
            self.batch = Iteration(chunks, action.num_decodes, action.context, took_ps)
            self._sampled = [int(piece.request) for piece in action.chunks if piece.samples]
