"""What a node computes, one iteration at a time: scheduler and engine in the middle, a listener out.

It owns the tokens of live requests. It has no mailbox and no thread: a worker calls it, from one thread, and
decides when an iteration happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from isthmus.blocks import state_names
from isthmus.cluster.cache import Load, PrefixMissing, Staging
from isthmus.cluster.fetches import Fetch
from isthmus.cluster.keeper import Held, Keeper
from isthmus.cluster.messages import Begin, Output
from isthmus.cluster.pipeline import Group
from isthmus.engine.interface import Chunk, Engine, OnLayer, Row
from isthmus.scheduler import (
    Action,
    Admitted,
    Arrived,
    Cancelled,
    Event,
    Evicted,
    Expected,
    Fetched,
    Imported,
    Lost,
    Missing,
    Offered,
    Piece,
    Preempted,
    Recovered,
    Released,
    Reserved,
    Run,
    Scheduler,
    Stepped,
    Stored,
)
from isthmus.types import (
    BlockName,
    FinishReason,
    Generated,
    RequestId,
    Role,
    Span,
    Tier,
    TokenLogprobs,
)

COUNTERS = (
    "engine_seconds",
    "kv_wait_seconds",
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
        """KV of an expected request may be received into `blocks`: its prompt's, then those of its recurrent state."""

    def kv_ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        """KV of a departing request is in place for these layers and token positions; the blocks of its recurrent
        state count as if they followed the prompt's last one."""

    def prefilled(self, key: RequestId, token: int, logprobs: TokenLogprobs | None) -> None:
        """A departing request's prompt is computed; all its KV was announced by `kv_ready`."""

    def finished(self, key: RequestId) -> None:
        """A request ended here."""

    def cache_changed(
        self,
        stored: tuple[BlockName, ...] = (),
        demoted: tuple[BlockName, ...] = (),
        evicted: tuple[BlockName, ...] = (),
    ) -> None:
        """Blocks are now in this node's cache, on its disk only, or no longer in it."""

    def died(self, error: BaseException) -> None:
        """The worker cannot go on."""


class _Live:
    """A request on this node. `tokens`: all known ones; `cached`: prompt tokens found in the cache; `load`: of its
    cached prefix of `load_tokens` tokens, on its way to the engine, of whose blocks `num_loading` are waited for;
    `fetch`: of blocks that such a load will read; `staged`: its blocks on their way to the store; `snapshots` of its
    recurrent state, by position, that were taken.
    """

    fetch: Fetch | None
    load: Load | None

    __slots__ = (
        "_outputs",
        "begin",
        "cached",
        "fetch",
        "load",
        "load_tokens",
        "num_loading",
        "row",
        "snapshots",
        "staged",
        "tokens",
    )

    def __init__(self, begin: Begin, fetch: Fetch | None = None) -> None:
        self.begin = begin
        self.fetch, self.load = fetch, None
        self.load_tokens = self.num_loading = 0
        self.staged: list[Staging] = []
        self.snapshots: dict[int, tuple[int, ...]] = {}
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


class _Broken(Exception):
    """An iteration cannot go on: of a prefix in it only `num_blocks` are there."""

    def __init__(self, request: RequestId, num_blocks: int) -> None:
        super().__init__(request, num_blocks)
        self.request, self.num_blocks = request, num_blocks


class Execution:
    """A run under way: its batch, and what it samples and announces."""

    def __init__(
        self,
        run: Run,
        batch: Any,
        sampled: list[Piece],
        on_layer: OnLayer | None,
        before_layer: OnLayer | None,
    ) -> None:
        self.run, self.batch, self.sampled = run, batch, sampled
        self.on_layer, self.before_layer = on_layer, before_layer
        self.missing: Missing | None = None
        """A prefix turned out shorter in the midst of an iteration, which therefore does not count."""
        self.steps = 0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.ended: tuple[RequestId, ...] = ()
        self.leaving: list[tuple[_Live, Piece]] = []
        """Those that ended, each with where its last KV was written."""

    @property
    def over(self) -> bool:
        return bool(self.ended) or self.steps == self.run.steps or self.missing is not None


class Stepper:
    """Take requests in and out with `expect`, `begin`, `imported`, `released`, `forget`. When `run` is set:
    `start` it; `compute` and `book` its iterations, with an `advance` in between, until it is `over` or broken
    off; take in what came meanwhile; then `finish`, which may set the next run.

    Of the first five only `expect` may come between forming a run and starting it, or during `compute`, from
    another thread even: it takes nothing from what runs. So may `sampled`.

    `group`: this node's engine is the first stage of a pipeline; what it computes goes on there, and its tokens come
    by `sampled`. Then all requests depart, or are over with one token.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        listener: Listener,
        clock_ns: Callable[[], int],
        keeper: Keeper | None = None,
        group: Group | None = None,
    ) -> None:
        self.engine, self._scheduler, self._listener, self.clock_ns = engine, scheduler, listener, clock_ns
        self._keeper, self._group = keeper, group
        if keeper is not None:
            keeper.decide = self._decide
        self._live: dict[RequestId, _Live] = {}
        self._state_blocks = engine.layout.state_blocks
        self.run: Run | None = None
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)

    def expect(self, begin: Begin) -> None:
        """Make room for a request whose KV will come."""
        live = self._live[begin.key] = _Live(begin)
        self._decide(Expected(begin.key, len(live.tokens), begin.stop_length))

    def begin(self, begin: Begin, deadline_ns: int, fetch: Fetch | None = None) -> None:
        """Compute a request. `deadline_ns`: when its first token was promised, by this clock; 0: no promise.
        `fetch`: that was begun for it."""
        live = self._live[begin.key] = _Live(begin, fetch)
        if self._group is not None:
            assert live.departs or begin.stop_length == len(begin.tokens) + 1, "a pipeline group prefills only"
            self._group.begin(begin)
        order = begin.fetch if fetch is not None else None
        self._decide(
            Arrived(
                request=begin.key,
                num_tokens=len(live.tokens),
                stop_length=begin.stop_length,
                names=begin.names,
                detach=live.departs or self._group is not None,
                num_cached=begin.num_cached,
                fetch_start=order.start if order else 0,
                fetch_stop=order.stop if order else 0,
                fetch_until_ns=self.clock_ns() + order.within_ns if order else 0,
                work_ns=begin.work_ns,
                deadline_ns=deadline_ns,
            )
        )

    def fetched(self, key: RequestId, num_blocks: int) -> None:
        """A request's fetch is over; its first `num_blocks` blocks are in the store."""
        self._decide(Fetched(key, num_blocks))

    def offered(self, names: tuple[BlockName, ...]) -> None:
        """A prefix that no prompt here waits for is in the store."""
        self._decide(Offered(names))
        if self._keeper is not None:
            self._keeper.settle(names)

    def recovered(self, chains: tuple[tuple[BlockName, ...], ...]) -> None:
        """Prefixes that the store found on its disk."""
        self._decide(Recovered(chains))
        if self._keeper is not None:
            for chain in chains:
                self._keeper.settle(chain)

    def lost(self, names: tuple[BlockName, ...]) -> None:
        """The bytes of these blocks are gone from the store."""
        self._decide(Lost(names))

    def imported(self, key: RequestId, token: int) -> None:
        """All KV of an expected request has landed; its first new token is `token`."""
        live = self._live.get(key)
        if live is not None:
            live.append(token)
            self._decide(Imported(key))

    def sampled(
        self,
        keys: Sequence[RequestId],
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
    ) -> list[RequestId]:
        """First tokens of requests whose prompts the last pipeline stage has computed, unless they were forgotten.
        Returns which of them are over: they are to be `released`."""
        found = zip(map(self._live.get, keys), tokens, logprobs, strict=True)
        ended = self._emit((live, token, chosen) for live, token, chosen in found if live is not None)
        return [live.begin.key for live in ended]

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
            "kv_blocks_transfer": pool.num_transfer,
            **{f"{name}_total": value for name, value in self.counters.items()},
        }

    def await_turn(self) -> None:
        """Waits until the run that was formed may start: when the later stages of a pipeline keep up."""
        if self._group is not None:
            self._group.take_turn()

    def start(self) -> Execution:
        """Lays out the run that was formed. Its requests are all live."""
        run, self.run = self.run, None
        assert run is not None
        pieces = enumerate(run.pieces)
        batch = self.engine.build([self._chunk(piece, index < run.num_decodes) for index, piece in pieces])
        departing = [piece for piece in run.pieces if self._live[piece.request].departs]
        sampled = [run.pieces[index] for index in batch.order]
        staged = self._stage(run) if self._keeper is not None and run.chunks else []
        on_layer = None
        if departing or staged:
            on_layer = lambda layer: self._layer_done(layer, departing, staged)  # noqa: E731
        loading = [live for live in map(self._live_of, run.chunks) if live.load is not None]
        before_layer = (lambda layer: self._await_load(layer, loading)) if loading else None
        return Execution(run, batch, sampled, on_layer, before_layer)

    def advance(self, execution: Execution) -> None:
        """Moves the batch on to the next iteration."""
        execution.batch.advance(execution.tokens)

    def compute(self, execution: Execution) -> None:
        """One iteration of the engine. Touches nothing else."""
        started_ns = self.clock_ns()
        rows = [self._live[piece.request].row for piece in execution.sampled]
        hooks = execution.on_layer, execution.before_layer
        try:
            if self._group is None:
                execution.tokens, execution.logprobs = self.engine.step(execution.batch, rows, *hooks)
            else:
                self._group.compute(execution.run, self.engine.relay(execution.batch, *hooks))
            execution.steps += 1
        except _Broken as broken:
            execution.missing = Missing(broken.request, broken.num_blocks)
        self.counters["engine_seconds"] += (self.clock_ns() - started_ns) / 1e9

    def book(self, execution: Execution) -> None:
        """Adds the tokens of an iteration to their requests, and tells them."""
        if execution.missing is not None or self._group is not None:
            return
        lives = map(self._live_of, execution.sampled)
        if self._state_blocks:
            self._book_states(execution.run)
        ended = self._emit(zip(lives, execution.tokens, execution.logprobs, strict=True))
        execution.ended = tuple([live.begin.key for live in ended])
        if ended:
            pieces = {piece.request: piece for piece in execution.sampled}
            execution.leaving += [(live, pieces[live.begin.key]) for live in ended]
        for key in execution.ended:
            del self._live[key]

    def finish(self, execution: Execution) -> None:
        """Books an executed run, and asks for the next one."""
        run, steps = execution.run, execution.steps
        computed = sum(piece.count for piece in run.pieces)
        sampled = sum(piece.samples for piece in run.pieces)
        self.counters["iterations"] += steps
        self.counters["tokens_computed"] += computed + (steps - 1) * sampled
        self.counters["tokens_sampled"] += sampled * steps
        if execution.missing is not None:
            self._shorten(execution.missing)
        if execution.before_layer is not None and steps:
            self._loaded(run)
        if self._keeper is None:
            self._decide(Stepped(steps, execution.ended))
            return
        answers = self._answers(execution, self._keeper)
        with self._keeper.holding(self._prompts(execution) + answers, self._take_staged(execution)):
            for (live, _), (names, _) in zip(execution.leaving, answers, strict=True):
                if not live.departs:  # its next turn finds prompt and answer in the cache
                    self._decide(Offered(tuple(names)))
            self._decide(Stepped(steps, execution.ended))

    def died(self, error: BaseException) -> None:
        self._listener.died(error)

    def _drop(self, key: RequestId, event: Event) -> None:
        live = self._live.pop(key, None)
        if live is not None:
            if live.load is not None:
                live.load.cancel()  # before anybody else gets its blocks
            if live.fetch is not None:
                live.fetch.release()
            self._unstage(live)
            if self._group is not None:
                self._group.forget(key)
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
                blocks = action.blocks
                if action.state:
                    num_tokens = len(self._live[action.request].tokens)
                    blocks = blocks[: self.engine.layout.blocks_for(num_tokens)] + action.state
                self._listener.reserved(action.request, blocks)
            case Stored():
                if self._keeper is not None:
                    self._keeper.act(action)
                if action.tier is Tier.DISK:
                    self._listener.cache_changed(demoted=action.names)
                else:
                    self._listener.cache_changed(stored=action.names)
            case Evicted():
                if self._keeper is not None:
                    self._keeper.act(action)
                self.counters["kv_blocks_evicted"] += len(action.names)
                self._listener.cache_changed(evicted=action.names)
            case Preempted():
                self.counters["num_preemptions"] += 1
                live = self._live[action.request]
                if live.load is not None:
                    live.load.cancel()
                    live.load = None
                live.snapshots.clear()
                self._unstage(live)

    def _admitted(self, action: Admitted) -> None:
        live = self._live[action.request]
        if live.cached is None:  # not again after a pre-emption
            live.cached = min(action.cached_tokens, live.begin.num_prompt)
            self.counters["prefix_cache_hits"] += live.cached
            self.counters["prefix_cache_queries"] += live.begin.num_prompt
        if self._keeper is not None:
            self._load(live, action, self._keeper)
        elif live.departs and action.cached_tokens:
            layers = Span(0, self.engine.memory.layout.num_layers)
            self._listener.kv_ready(action.request, layers, Span(0, action.cached_tokens), action.blocks)

    # Cached prefixes.

    def _load(self, live: _Live, action: Admitted, keeper: Keeper) -> None:
        fetch, live.fetch = live.fetch, None
        live.load_tokens = action.cached_tokens
        if action.cached_tokens:
            live.load = keeper.load(live.begin.names, action.blocks, action.cached_tokens, action.state, fetch)
            live.num_loading = len(live.load.names)
            if self._group is not None:
                self._group.load(action.request, live.load.blocks)
        elif fetch is not None:
            fetch.release()

    def _await_load(self, layer: int, loading: Sequence[_Live]) -> None:
        """The engine needs this layer of all prefixes in its batch."""
        started_ns = self.clock_ns()
        for live in loading:
            assert live.load is not None
            try:
                live.load.wait(layer, live.num_loading)
            except PrefixMissing as missing:
                raise _Broken(live.begin.key, missing.num_blocks) from None
        self.counters["kv_wait_seconds"] += (self.clock_ns() - started_ns) / 1e9

    def _shorten(self, missing: Missing) -> None:
        """Of a cached prefix not all could be loaded."""
        live = self._live.get(missing.request)
        if live is not None:
            if self._state_blocks and live.load is not None:
                live.load.cancel()  # the blocks of the state go to somebody else
                live.load = None
            found = 0 if self._state_blocks else missing.num_blocks * self.engine.layout.block_size
            live.load_tokens = min(live.load_tokens, found)
            live.num_loading = self.engine.layout.blocks_for(live.load_tokens)
            if self._group is not None:
                self._group.shorten(missing.request, missing.num_blocks)
            if live.cached is not None:
                self.counters["prefix_cache_hits"] -= max(0, live.cached - live.load_tokens)
                live.cached = min(live.cached, live.load_tokens)
        self._decide(missing)

    def _loaded(self, run: Run) -> None:
        for piece in run.chunks:
            live = self._live.get(piece.request)
            if live is not None:
                live.load = None

    def _stage(self, run: Run) -> list[Staging]:
        """What this run's chunks complete goes to the store while they are computed."""
        assert self._keeper is not None
        staged = []
        for piece in run.chunks:
            live = self._live_of(piece)
            staging = self._keeper.stage(live.begin.names, piece)
            if staging is not None:
                live.staged.append(staging)
                staged.append(staging)
        return staged

    def _layer_done(self, layer: int, departing: Sequence[Piece], staged: Sequence[Staging]) -> None:
        for staging in staged:
            assert self._keeper is not None
            self._keeper.cache.save_layer(staging, layer)
        if departing:
            self._announce(layer, departing)

    def _take_staged(self, execution: Execution) -> list[Staging]:
        """Of the prompts that are computed now."""
        found: list[Staging] = []
        if execution.missing is not None:
            return found
        done = [
            self._live_of(piece)
            for piece in execution.run.chunks
            if piece.samples and piece.request in self._live
        ]
        for live in [*done, *[live for live, _ in execution.leaving]]:
            found += live.staged
            live.staged = []
        return found

    def _unstage(self, live: _Live) -> None:
        for staging in live.staged:
            assert self._keeper is not None
            self._keeper.cache.unstage(staging)
        live.staged = []

    def _prompts(self, execution: Execution) -> list[Held]:
        """Prompts that are computed now, and the snapshots of their states."""
        pieces = [piece for piece in execution.run.chunks if piece.samples and piece.request in self._live]
        held: list[Held] = []
        for piece in pieces:
            live = self._live_of(piece)
            held.append((live.begin.names, piece.blocks))
            for position, blocks in live.snapshots.items():
                if position < piece.start + piece.count:  # the one at its end only travels
                    depth = position // self.engine.layout.block_size
                    names = state_names(live.begin.names[depth - 1], self._state_blocks)
                    held.append((live.begin.names[:depth] + names, piece.blocks[:depth] + blocks))
        return held

    def _answers(self, execution: Execution, keeper: Keeper) -> list[Held]:
        """Requests that ended, with the blocks they filled while they decoded. Without a state at their end, of which
        nobody takes a snapshot, they would be of no use."""
        if self._state_blocks:
            return [((), ()) for _ in execution.leaving]
        return [
            (keeper.names(live.begin, live.tokens, len(live.tokens) - 1), piece.blocks)
            for live, piece in execution.leaving
        ]

    def _live_of(self, piece: Piece) -> _Live:
        return self._live[piece.request]

    def _chunk(self, piece: Piece, decodes: bool) -> Chunk:
        live = self._live[piece.request]
        tokens = live.tokens[piece.start : piece.start + piece.count]
        return Chunk(
            tokens,
            piece.start,
            piece.blocks,
            piece.samples,
            decodes,
            live.begin.salt,
            piece.slot,
            piece.restore,
            piece.snapshots,
        )

    def _book_states(self, run: Run) -> None:
        """Snapshots that the iteration took; of a departing request that is computed, the one that goes with it."""
        layout = self.engine.layout
        for piece in run.chunks:
            live = self._live_of(piece)
            live.snapshots.update(piece.snapshots)
            if piece.samples and live.departs:
                count = layout.blocks_for(len(live.tokens))
                blocks = piece.blocks[:count] + live.snapshots[len(live.tokens)]
                span = Span(count * layout.block_size, len(blocks) * layout.block_size)
                self._listener.kv_ready(
                    piece.request, Span(0, self.engine.memory.layout.num_layers), span, blocks
                )

    def _announce(self, layer: int, departing: Sequence[Piece]) -> None:
        """Blocks that this chunk completed in one layer; the last chunk also gives the unfinished block."""
        size = self.engine.layout.block_size
        for piece in departing:
            end = piece.start + piece.count
            first = piece.start // size * size
            if self._keeper is not None:
                first = 0  # what was loaded before it is here as well, and perhaps was not told yet
            span = Span(first, end if piece.samples else end // size * size)
            if len(span) > 0:
                self._listener.kv_ready(piece.request, Span(layer, layer + 1), span, piece.blocks)

    def _emit(self, sampled: Iterable[tuple[_Live, int, TokenLogprobs | None]]) -> list[_Live]:
        """Books and reports sampled tokens; returns the requests that are over."""
        outputs, departed, ended = [], [], []
        for live, token, token_logprobs in sampled:
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
                ended.append(live)
            elif live.departs:
                departed.append((begin.key, token, token_logprobs))
        if outputs:
            self._listener.outputs(outputs)
        for key, token, token_logprobs in departed:
            self._listener.prefilled(key, token, token_logprobs)
        for live in ended:
            self._listener.finished(live.begin.key)
        return ended

    @staticmethod
    def _finish_reason(live: _Live, token: int) -> FinishReason | None:
        if token in live.begin.sampling.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(live.tokens) >= live.begin.stop_length else None
