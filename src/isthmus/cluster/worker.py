"""The thread that computes: mailbox in, scheduler and engine in the middle, a listener out.

The node's event loop owns sessions; this thread owns scheduler, engine and the tokens of live requests. They
meet only in `post` (a thread-safe queue) and in the listener, whose methods are called from this thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from isthmus.cluster.messages import Begin, Output
from isthmus.engine.batch import Chunk
from isthmus.engine.engine import Engine
from isthmus.engine.sampling import Row, sample
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
    """What the worker tells. Calls come from the worker's thread, in order; `key` is `Begin.key`."""

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


class Worker:
    """Start it once; talk to it with `begin`, `imported`, `released`, `forget`, `stop`, from any thread."""

    def __init__(self, engine: Engine, scheduler: Scheduler, listener: Listener) -> None:
        self._engine, self._scheduler, self._listener = engine, scheduler, listener
        self._mailbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._live: dict[RequestId, _Live] = {}
        self._run: Run | None = None
        self._running = True
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._thread = threading.Thread(target=self._main, name="worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, begin: Begin) -> None:
        """Compute a request (PREFILL, MIXED), or make room for one whose KV will come (DECODE)."""
        self._mailbox.put(lambda: self._begin(begin))

    def imported(self, key: RequestId, token: int) -> None:
        """All KV of an expected request has landed; its first new token is `token`."""
        self._mailbox.put(lambda: self._imported(key, token))

    def released(self, key: RequestId) -> None:
        """A departed request's KV has landed elsewhere."""
        self._mailbox.put(lambda: self._drop(key, Released(key)))

    def forget(self, key: RequestId) -> None:
        self._mailbox.put(lambda: self._drop(key, Cancelled(key)))

    def stop(self) -> None:
        def end() -> None:
            self._running = False

        self._mailbox.put(end)
        self._thread.join(timeout=5)

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

    def _main(self) -> None:
        try:
            while self._running:
                if self._run is None:
                    self._serve_mailbox(wait=True)
                else:
                    self._execute(self._run)
        except BaseException as error:
            self._listener.died(error)
            raise

    def _serve_mailbox(self, *, wait: bool) -> None:
        """Takes entries until none waits, or a run was formed: no entry comes between forming and executing,
        so the requests of a run are all live when it starts."""
        while self._run is None:
            try:
                self._mailbox.get(block=wait)()
            except Empty:
                return
            wait = False

    # Mailbox entries.

    def _begin(self, begin: Begin) -> None:
        live = self._live[begin.key] = _Live(begin)
        length = len(live.tokens)
        if begin.part is Role.DECODE:
            self._decide(Expected(begin.key, length, begin.stop_length))
        else:
            self._decide(Arrived(begin.key, length, begin.stop_length, begin.names, live.departs))

    def _imported(self, key: RequestId, token: int) -> None:
        live = self._live.get(key)
        if live is not None:
            live.append(token)
            self._decide(Imported(key))

    def _drop(self, key: RequestId, event: Event) -> None:
        if self._live.pop(key, None) is not None:
            self._decide(event)

    # Decisions and their execution.

    def _decide(self, event: Event) -> None:
        for action in self._scheduler.on(event):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Run():
                self._run = action
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
            layers = Span(0, self._engine.layout.num_layers)
            self._listener.kv_ready(action.request, layers, Span(0, action.cached_tokens), action.blocks)

    def _execute(self, run: Run) -> None:
        """Iterates a run until it ends, a request ends or a message waits; then asks for the next one."""
        self._run = None
        batch = self._engine.build([self._chunk(piece) for piece in run.pieces])
        departing = [piece for piece in run.pieces if self._live[piece.request].departs]
        sampled = [run.pieces[index] for index in batch.order]
        on_layer = (lambda layer: self._announce(layer, departing)) if departing else None
        ended: tuple[RequestId, ...] = ()
        steps, started_s = 0, time.perf_counter()
        while True:
            logits = self._engine.forward(batch, on_layer)
            steps += 1
            tokens, logprobs = sample(logits, [self._live[piece.request].row for piece in sampled])
            self.counters["engine_seconds"] += time.perf_counter() - started_s
            ended = self._emit(sampled, tokens, logprobs)
            if steps == run.steps or ended or not self._mailbox.empty():
                break
            started_s = time.perf_counter()
            batch.advance(tokens)
        self._count(run, steps)
        self._serve_mailbox(wait=False)
        self._decide(Stepped(steps, ended))

    def _chunk(self, piece: Piece) -> Chunk:
        tokens = self._live[piece.request].tokens[piece.start : piece.start + piece.count]
        return Chunk(tokens, piece.start, piece.blocks, piece.samples)

    def _announce(self, layer: int, departing: Sequence[Piece]) -> None:
        """Blocks that this chunk completed in one layer; the last chunk also gives the unfinished block."""
        size = self._engine.layout.block_size
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

    def _count(self, run: Run, steps: int) -> None:
        computed = sum(piece.count for piece in run.pieces)
        sampled = sum(piece.samples for piece in run.pieces)
        self.counters["iterations"] += steps
        self.counters["tokens_computed"] += computed + (steps - 1) * sampled
        self.counters["tokens_sampled"] += sampled * steps
