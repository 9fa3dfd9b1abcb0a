"""One node alone in virtual time: the real scheduler forms the batches, a given function says how long each takes.

For questions about batches that need no cluster, and for times that are no cost model of a deployment, such as a
table of somebody's measurements.
"""

from __future__ import annotations

from collections import abc
from itertools import pairwise

import msgspec

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

WHOLE = 1 << 30
"""A token budget that no prompt exceeds: prompts are not cut."""
_BLOCK = 16
_PS_PER_NS = 1000


class BatchLimits(msgspec.Struct, frozen=True):
    """What the node's scheduler may do; fields as of `scheduler.SchedulerLimits`. `kv_tokens`: memory; `tbt_ms`: what
    it lets an iteration with decodes take, as the step time says."""

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
    """What happened. `batches` in order of time, which ended at `ends_ps`. Of each request, `admitted`: the batch in
    which its prompt began; `first`: the one that gave its first token. No decode ever waits, so the other tokens came
    from those that follow."""

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
        """Of each request, from its arrival."""
        return [
            self.ends_ps[first] // _PS_PER_NS - asked.arrival_ns
            for first, asked in zip(self.first, self.requests, strict=True)
        ]

    def gaps_ns(self) -> list[int]:
        """Between tokens, of all requests together."""
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
    """For drivers with a time of their own. `batch`: the one to execute next, None while nobody is here."""

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
        """Those that have come by now."""
        requests = self.served.requests
        while self._arrived < len(requests) and self.next_arrival_ps <= now_ps:
            asked, name = requests[self._arrived], RequestId(str(self._arrived))
            self._arrived += 1
            length = asked.num_tokens
            self._scheduler.arrive(Sequence(name, length, length + asked.output_tokens))
            self._plan([], now_ps)

    def step(self, now_ps: int) -> None:
        """The batch ends now; who came in the meantime is heard before that."""
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
