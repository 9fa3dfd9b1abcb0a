"""What a node computes, one iteration at a time: scheduler and engine in the middle, a listener out.

It owns the tokens of live requests. It has no mailbox and no thread: a worker calls it, from one thread, and
decides when an iteration happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from isthmus.cluster.messages import Begin, Output
from isthmus.engine.interface import Chunk, Engine, OnLayer, Row
from isthmus.scheduler import (
    Action,
    Admitted,
    Arrived,
    Cancelled,
    Event,
    Evicted,
    Expected,
    Imported,
    Piece,
    Preempted,
    Released,
    Reserved,
    Run,
    Scheduler,
    Stepped,
    Stored,
)
from isthmus.types import BlockName, FinishReason, Generated, RequestId, Role, Span, TokenLogprobs

COUNTERS = (
    "engine_seconds",
    "iterations",
    "tokens_computed",
    "tokens_sampled",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "num_preemptions",
    "kv_blocks_evicted",
)
"""Totals since the start; each is a metric with the suffix `_total`."""


class Listener(Protocol):
    """What is told, in order, from whatever thread calls the stepper; `key` is `Begin.key`."""

    def outputs(self, outputs: Sequence[Output]) -> None:
        """The tokens of one iteration."""

    def reserved(self, key: RequestId, blocks: Sequence[int]) -> None:
        """KV of an expected request may be received into `blocks`."""

    def kv_ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        """KV of a departing request is in place for these layers and token positions."""

    def prefilled(self, key: RequestId, token: int, logprobs: TokenLogprobs | None) -> None:
        """A departing request's prompt is computed; all its KV was announced by `kv_ready`."""

    def finished(self, key: RequestId) -> None:
        """A request ended here."""

    def cache_changed(self, stored: tuple[BlockName, ...], evicted: tuple[BlockName, ...]) -> None:
        """Blocks entered or left this node's cache."""

    def died(self, error: BaseException) -> None:
        """The worker cannot go on."""


class _Live:
    """A request on this node. `tokens`: all known ones; `cached`: prompt tokens found in the cache."""

    __slots__ = ("_outputs", "begin", "cached", "row", "tokens")

    def __init__(self, begin: Begin) -> None:
        self.begin = begin
        self.tokens = list(begin.tokens)
        self._outputs = list(begin.tokens[begin.num_prompt :])
        self.row = Row(begin.sampling, self._outputs)
        self.cached: int | None = None

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self._outputs.append(token)

    @property
    def departs(self) -> bool:
        return self.begin.part is Role.PREFILL


class Execution:
    """A run under way: its batch, and what it samples and announces."""

    def __init__(self, run: Run, batch: Any, sampled: list[Piece], on_layer: OnLayer | None) -> None:
        self.run, self.batch, self.sampled, self.on_layer = run, batch, sampled, on_layer
        self.steps = 0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.ended: tuple[RequestId, ...] = ()

    @property
    def over(self) -> bool:
        return bool(self.ended) or self.steps == self.run.steps


class Stepper:
    """Take requests in and out with `expect`, `begin`, `imported`, `released`, `forget`. When `run` is set:
    `start` it; `compute` and `book` its iterations, with an `advance` in between, until it is `over` or broken
    off; take in what came meanwhile; then `finish`, which may set the next run.

    Of the first five only `expect` may come between forming a run and starting it, or during `compute`, from
    another thread even: it takes nothing from what runs.
    """

    def __init__(
        self, engine: Engine, scheduler: Scheduler, listener: Listener, clock_ns: Callable[[], int]
    ) -> None:
        self.engine, self._scheduler, self._listener, self.clock_ns = engine, scheduler, listener, clock_ns
        self._live: dict[RequestId, _Live] = {}
        self.run: Run | None = None
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)

    def expect(self, begin: Begin) -> None:
        """Make room for a request whose KV will come."""
        live = self._live[begin.key] = _Live(begin)
        self._decide(Expected(begin.key, len(live.tokens), begin.stop_length))

    def begin(self, begin: Begin, deadline_ns: int) -> None:
        """Compute a request. `deadline_ns`: when its first token was promised, by this clock; 0: no promise."""
        live = self._live[begin.key] = _Live(begin)
        self._decide(
            Arrived(
                request=begin.key,
                num_tokens=len(live.tokens),
                stop_length=begin.stop_length,
                names=begin.names,
                detach=live.departs,
                work_ns=begin.work_ns,
                deadline_ns=deadline_ns,
            )
        )

    def imported(self, key: RequestId, token: int) -> None:
        """All KV of an expected request has landed; its first new token is `token`."""
        live = self._live.get(key)
        if live is not None:
            live.append(token)
            self._decide(Imported(key))

    def released(self, key: RequestId) -> None:
        """A departed request's KV has landed elsewhere."""
        self._drop(key, Released(key))

    def forget(self, key: RequestId) -> None:
        self._drop(key, Cancelled(key))

    def gauges(self) -> dict[str, float]:
        """Present state and totals, by metric name; read without a lock, so they may be a step apart."""
        pool = self._scheduler.pool
        return {
            "node_requests_running": self._scheduler.num_running,
            "node_requests_waiting": self._scheduler.num_waiting,
            "kv_blocks": pool.num_blocks,
            "kv_blocks_available": pool.available,
            "kv_blocks_cached": pool.cached,
            **{f"{name}_total": value for name, value in self.counters.items()},
        }

    def start(self) -> Execution:
        """Lays out the run that was formed. Its requests are all live."""
        run, self.run = self.run, None
        assert run is not None
        pieces = enumerate(run.pieces)
        batch = self.engine.build([self._chunk(piece, index < run.num_decodes) for index, piece in pieces])
        departing = [piece for piece in run.pieces if self._live[piece.request].departs]
        sampled = [run.pieces[index] for index in batch.order]
        on_layer = (lambda layer: self._announce(layer, departing)) if departing else None
        return Execution(run, batch, sampled, on_layer)

    def advance(self, execution: Execution) -> None:
        """Moves the batch on to the next iteration."""
        execution.batch.advance(execution.tokens)

    def compute(self, execution: Execution) -> None:
        """One iteration of the engine. Touches nothing else."""
        started_ns = self.clock_ns()
        rows = [self._live[piece.request].row for piece in execution.sampled]
        execution.tokens, execution.logprobs = self.engine.step(execution.batch, rows, execution.on_layer)
        execution.steps += 1
        self.counters["engine_seconds"] += (self.clock_ns() - started_ns) / 1e9

    def book(self, execution: Execution) -> None:
        """Adds the tokens of an iteration to their requests, and tells them."""
        execution.ended = self._emit(execution.sampled, execution.tokens, execution.logprobs)

    def finish(self, execution: Execution) -> None:
        """Books an executed run, and asks for the next one."""
        run, steps = execution.run, execution.steps
        computed = sum(piece.count for piece in run.pieces)
        sampled = sum(piece.samples for piece in run.pieces)
        self.counters["iterations"] += steps
        self.counters["tokens_computed"] += computed + (steps - 1) * sampled
        self.counters["tokens_sampled"] += sampled * steps
        self._decide(Stepped(steps, execution.ended))

    def died(self, error: BaseException) -> None:
        self._listener.died(error)

    def _drop(self, key: RequestId, event: Event) -> None:
        if self._live.pop(key, None) is not None:
            self._decide(event)

    def _decide(self, event: Event) -> None:
        for action in self._scheduler.on(event, self.clock_ns()):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Run():
                self.run = action
            case Admitted():
                self._admitted(action)
            case Reserved():
                self._listener.reserved(action.request, action.blocks)
            case Stored():
                self._listener.cache_changed(action.names, ())
            case Evicted():
                self.counters["kv_blocks_evicted"] += len(action.names)
                self._listener.cache_changed((), action.names)
            case Preempted():
                self.counters["num_preemptions"] += 1

    def _admitted(self, action: Admitted) -> None:
        live = self._live[action.request]
        if live.cached is None:  # not again after a pre-emption
            live.cached = min(action.cached_tokens, live.begin.num_prompt)
            self.counters["prefix_cache_hits"] += live.cached
            self.counters["prefix_cache_queries"] += live.begin.num_prompt
        if live.departs and action.cached_tokens:
            layers = Span(0, self.engine.layout.num_layers)
            self._listener.kv_ready(action.request, layers, Span(0, action.cached_tokens), action.blocks)

    def _chunk(self, piece: Piece, decodes: bool) -> Chunk:
        live = self._live[piece.request]
        tokens = live.tokens[piece.start : piece.start + piece.count]
        return Chunk(tokens, piece.start, piece.blocks, piece.samples, decodes, live.begin.salt)

    def _announce(self, layer: int, departing: Sequence[Piece]) -> None:
        """Blocks that this chunk completed in one layer; the last chunk also gives the unfinished block."""
        size = self.engine.layout.block_size
        for piece in departing:
            end = piece.start + piece.count
            span = Span(piece.start // size * size, end if piece.samples else end // size * size)
            if len(span) > 0:
                self._listener.kv_ready(piece.request, Span(layer, layer + 1), span, piece.blocks)

    def _emit(
        self, pieces: Sequence[Piece], tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> tuple[RequestId, ...]:
        """Books and reports sampled tokens; returns the requests that are over."""
        outputs, ended, departed = [], [], []
        for piece, token, token_logprobs in zip(pieces, tokens, logprobs, strict=True):
            live = self._live[piece.request]
            begin = live.begin
            first = len(live.tokens) == len(begin.tokens)
            live.append(token)
            finish = self._finish_reason(live, token)
            index = len(live.tokens) - 1 - begin.num_prompt
            cached = live.cached if first else None
            outputs.append(
                Output(begin.request, begin.attempt, Generated(index, token, finish, token_logprobs, cached))
            )
            if finish is not None:
                ended.append(begin.key)
            elif live.departs:
                departed.append((begin.key, token, token_logprobs))
        if outputs:
            self._listener.outputs(outputs)
        for key, token, token_logprobs in departed:
            self._listener.prefilled(key, token, token_logprobs)
        for key in ended:
            del self._live[key]
            self._listener.finished(key)
        return tuple(ended)

    @staticmethod
    def _finish_reason(live: _Live, token: int) -> FinishReason | None:
        if token in live.begin.sampling.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(live.tokens) >= live.begin.stop_length else None
