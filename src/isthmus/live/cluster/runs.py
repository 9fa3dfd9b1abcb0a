"""Executes a node's runs on its engine, one iteration at a time: decided runs in, tokens and facts out.

Owns the tokens of attempts, which decisions do not need. Has no thread: one worker thread calls it, under the node's
lock where stated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from isthmus.core.blocks import BlockNamer
from isthmus.core.node.events import Broken, LoadBlocks, Missing, ReleaseResources, Shorten, StartAttempt
from isthmus.core.scheduler import Admitted, Piece, Preempted, Run, Stepped
from isthmus.core.types import BlockName, FinishReason, Generated, RequestId, Reused, Role, Span, TokenLogprobs
from isthmus.live.engine.constraints import Constraints
from isthmus.live.engine.interface import (
    Assembling,
    Chunk,
    Donated,
    Elsewhere,
    Engine,
    Held,
    Hidden,
    HolderLost,
    OnLayer,
    OnScores,
    Row,
)
from isthmus.live.kv.cache import BlockStaging, PrefixMissing
from isthmus.live.kv.mover import KVMover
from isthmus.live.peers.messages import Output, Scores, StageSampled

COUNTERS = (
    "engine_seconds",
    "kv_wait_seconds",
    "iterations",
    "tokens_computed",
    "tokens_sampled",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "num_preemptions",
)
"""Totals since the start; each is a metric with the suffix `_total`."""
MAX_NAMERS = 64

Names = tuple[BlockName, ...]


class TokenSequence:
    """An attempt with all its known tokens. `cached`: prompt tokens found in a cache; `num_loading`: blocks of its
    cached prefix that are still loaded; `snapshots`: blocks of recurrent states taken, by position."""

    __slots__ = ("_outputs", "begin", "cached", "num_loading", "reused", "row", "snapshots", "tokens")

    def __init__(self, begin: StartAttempt) -> None:
        self.begin = begin
        self.num_loading = 0
        self.reused: Reused | None = None
        self.snapshots: dict[int, tuple[int, ...]] = {}
        self.tokens = list(begin.tokens)
        self._outputs = list(begin.tokens[begin.num_prompt :])
        repeats_less = begin.sampling.repetition_penalty != 1
        prompt = tuple(dict.fromkeys(begin.tokens[: begin.num_prompt])) if repeats_less else ()
        self.row = Row(begin.sampling, self._outputs, prompt)
        self.cached: int | None = None

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self._outputs.append(token)

    @property
    def num_top(self) -> int | None:
        """Most likely tokens reported with each score of the prompt; None if it is not scored, or was already."""
        wanted = self.row.sampling.prompt_logprobs
        return wanted if len(self.tokens) == self.begin.num_prompt else None

    @property
    def hands_over(self) -> bool:
        """Whether a decode node continues this attempt after its prefill."""
        return self.begin.part is Role.PREFILL

    @property
    def names(self) -> Names:
        return self.begin.names

    def finish_reason(self, token: int, constraints: Constraints) -> FinishReason | None:
        if constraints.ends(self.begin.sampling, token):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.begin.stop_length else None


@dataclass
class Execution:
    """A run in progress: its batch, and the chunks that it samples from. `elsewhere`: holders of more KV of its chunks.

    An iteration does not count if a cached prefix turned out `missing`, or a holder of KV was `lost`. `broken`:
    attempts that cannot continue."""

    run: Run
    batch: Any
    sampled: list[tuple[TokenSequence, Piece]]
    on_layer: OnLayer | None
    before_layer: OnLayer | None
    on_scores: OnScores | None
    elsewhere: Elsewhere | None = None
    missing: Missing | None = None
    lost: bool = False
    steps: int = 0
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs | None] = ()
    ended: list[TokenSequence] = field(default_factory=list)
    broken: dict[RequestId, Broken] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return bool(self.ended or self.broken) or self.steps == self.run.steps or self.missing is not None


class Runs:
    """Executes runs. `outputs` takes the tokens of an iteration, in order; `scores` takes scores of prompts during it.
    `onward`: sends a batch's hidden states to the next stage; None for a whole model or the last stage."""

    def __init__(
        self,
        engine: Engine,
        mover: KVMover,
        outputs: Callable[[Sequence[Output]], None],
        scores: Callable[[Scores], None],
        clock_ns: Callable[[], int],
        onward: Callable[[Run, Hidden], None] | None = None,
    ) -> None:
        self.engine, self._mover, self._outputs, self._scores = engine, mover, outputs, scores
        self._clock_ns, self._onward = clock_ns, onward
        self._size, self._state_blocks = engine.layout.block_size, engine.layout.state_blocks
        self._attempts: dict[RequestId, TokenSequence] = {}
        self._awaited: RequestId
        self._namer = lru_cache(MAX_NAMERS)(self._new_namer)
        self.keeps_answers = self.saves = False
        """Whether the node caches answers, and any blocks, outside the engine's memory."""
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)

    # Under the node's lock.

    def begin(self, begin: StartAttempt) -> None:
        self._attempts[begin.key] = TokenSequence(begin)
        self.prepare(begin)

    def prepare(self, begin: StartAttempt) -> Future[None] | None:
        """Starts compiling the grammar of an attempt; returns its future, None if there is nothing to wait for."""
        return self.engine.constraints.prepare(begin.sampling) if self._onward is None else None

    def received(self, key: RequestId, token: int) -> None:
        """Takes the first token of an attempt from its prefill node."""
        attempt = self._attempts.get(key)
        if attempt is not None:
            attempt.append(token)

    def released(self, action: ReleaseResources) -> None:
        """Forgets an attempt, which no run needs any more."""
        self._attempts.pop(action.key, None)

    def admitted(self, action: Admitted) -> None:
        attempt = self._attempts.get(action.request)
        if attempt is None:
            return
        if attempt.cached is None:  # not again after a pre-emption
            attempt.cached = min(action.cached_tokens, attempt.begin.num_prompt)
            self.counters["prefix_cache_hits"] += attempt.cached
            self.counters["prefix_cache_queries"] += attempt.begin.num_prompt

    def loading(self, action: LoadBlocks) -> None:
        attempt = self._attempts.get(action.key)
        if attempt is not None:
            attempt.num_loading = len(action.names)

    def shortened(self, action: Shorten) -> None:
        """Corrects the counters of a cached prefix that could not be loaded whole."""
        attempt = self._attempts.get(action.key)
        if attempt is None:
            return
        attempt.num_loading = -(-action.num_tokens // self._size)
        if attempt.cached is not None:
            self.counters["prefix_cache_hits"] -= max(0, attempt.cached - action.num_tokens)
            attempt.cached = min(attempt.cached, action.num_tokens)

    def preempted(self, action: Preempted) -> None:
        self.counters["num_preemptions"] += 1
        attempt = self._attempts.get(action.request)
        if attempt is not None:
            attempt.snapshots.clear()

    def start(self, run: Run) -> Execution:
        """Builds the batch of a run, whose attempts have all begun."""
        pieces = run.pieces
        attempts = [self._attempts[piece.request] for piece in pieces]
        chunks = [
            self._chunk(attempt, piece, index < run.num_decodes)
            for index, (attempt, piece) in enumerate(zip(attempts, pieces, strict=True))
        ]
        batch = self.engine.build(chunks)
        sampled = [(attempts[index], pieces[index]) for index in batch.order]
        prompts = list(zip(attempts[run.num_decodes :], run.chunks, strict=True))
        staged = [each for attempt, piece in prompts if (each := self._stage(attempt, piece)) is not None]
        leaving = [piece for attempt, piece in prompts if attempt.hands_over and not _packs(piece)]
        on_layer = before_layer = None
        if leaving or staged:
            on_layer = lambda layer: self._layer_done(layer, leaving, staged)  # noqa: E731
        loading = [attempt for attempt, _ in prompts if attempt.num_loading]
        if loading:
            before_layer = lambda layer: self._await_loads(layer, loading)  # noqa: E731
        on_scores: OnScores | None = None
        if any(chunk.targets for chunk in chunks):
            on_scores = lambda index, *found: self._scored(attempts[index], *found)  # noqa: E731
        elsewhere: Elsewhere | None = None
        if any(piece.remote for piece in pieces):
            elsewhere = self._mover.holders.remote([piece.request for piece in pieces])
        return Execution(run, batch, sampled, on_layer, before_layer, on_scores, elsewhere)

    def add_tokens(self, execution: Execution) -> None:
        """Appends an iteration's tokens to their attempts, and outputs them."""
        if execution.missing is not None or execution.lost or self._onward is not None:
            return
        if self._state_blocks:
            self._note_states(execution.run)
        if any(piece.assembly is not None for piece in execution.run.chunks):
            self._note_assembled(execution)
        sampled = zip(execution.sampled, execution.tokens, execution.logprobs, strict=True)
        execution.ended += self._emit(
            (attempt, token, chosen)
            for (attempt, piece), token, chosen in sampled
            if piece.request not in execution.broken
        )

    def finish(self, execution: Execution) -> list[Missing | Broken | Stepped]:
        """Returns the facts of an executed run, broken attempts first: the node then plans without them."""
        run, steps, counters = execution.run, execution.steps, self.counters
        sampled = sum([piece.samples for piece in run.pieces])
        counters["iterations"] += steps
        counters["tokens_computed"] += sum([piece.count for piece in run.pieces]) + (steps - 1) * sampled
        counters["tokens_sampled"] += sampled * steps if self._onward is None else 0
        for piece in run.chunks if execution.before_layer is not None and steps else ():
            self._mover.loaded(piece.request)
            if piece.request in self._attempts:
                self._attempts[piece.request].num_loading = 0
        ended = tuple([attempt.begin.key for attempt in execution.ended])
        answers = tuple([self._all_names(attempt) for attempt in execution.ended]) if self.keeps_answers else ()
        stepped = Stepped(steps, ended, answers)
        before = [] if execution.missing is None else [execution.missing]
        return [*before, *execution.broken.values(), stepped]

    def sampled(self, message: StageSampled) -> tuple[RequestId, ...]:
        """Appends first tokens from the last pipeline stage; returns the attempts that are over."""
        found = zip(map(self._attempts.get, message.keys), message.tokens, message.logprobs, strict=True)
        ended = self._emit((attempt, token, chosen) for attempt, token, chosen in found if attempt is not None)
        return tuple([attempt.begin.key for attempt in ended])

    # By the worker, without the lock.

    def compute(self, execution: Execution, hidden: Hidden | None = None) -> None:
        """Computes one iteration; changes only `execution` and counters. `hidden`: from the stage before."""
        started_ns = self._clock_ns()
        inputs = execution.on_layer, execution.before_layer, hidden
        try:
            if self._onward is None:
                rows, on_scores = [attempt.row for attempt, _ in execution.sampled], execution.on_scores
                found = self.engine.step(execution.batch, rows, *inputs, on_scores, execution.elsewhere)
                execution.tokens, execution.logprobs = found
                execution.broken = self._broken(execution)
            else:
                self._onward(execution.run, self.engine.relay(execution.batch, *inputs))
            execution.steps += 1
        except PrefixMissing as missing:
            execution.missing = Missing(self._awaited, missing.num_blocks)
        except HolderLost as lost:
            execution.lost = True
            execution.broken = self._lost(execution.run, lost)
        self.counters["engine_seconds"] += (self._clock_ns() - started_ns) / 1e9

    def _lost(self, run: Run, lost: HolderLost) -> dict[RequestId, Broken]:
        """Returns the attempts that a lost holder breaks: those with KV there, and all of a recurrent model, whose
        states are already past the aborted iteration."""
        reason = f"{lost.holder} has its KV and did not attend to it: {lost}"
        broken = [
            piece.request
            for piece in run.pieces
            if self._state_blocks or any(lost.holder in holding.holders for holding in piece.remote)
        ]
        return {key: Broken(key, reason) for key in broken}

    def _broken(self, execution: Execution) -> dict[RequestId, Broken]:
        objection = self.engine.constraints.objection
        followed = [(a, piece) for a, piece in execution.sampled if a.begin.sampling.grammar]
        reasons = [(piece.request, objection(attempt.row)) for attempt, piece in followed]
        return {key: Broken(key, reason, final=True) for key, reason in reasons if reason}

    @staticmethod
    def advance(execution: Execution) -> None:
        """Advances the batch to the next iteration."""
        execution.batch.advance(execution.tokens)

    # One iteration.

    def _chunk(self, attempt: TokenSequence, piece: Piece, decodes: bool) -> Chunk:
        start, stop, num_top = piece.start, piece.start + piece.count, attempt.num_top
        return Chunk(
            attempt.tokens[start:stop], start, piece.blocks, piece.samples, decodes, attempt.begin.salt,
            piece.slot, piece.restore, piece.snapshots,
            () if num_top is None else attempt.tokens[start + 1 : stop + 1], num_top or 0,
            tuple([Held(each.holders, each.num_blocks * self._size) for each in piece.remote]),
            self._assembling(attempt.begin, piece), piece.packing,
        )  # fmt: skip

    def _assembling(self, begin: StartAttempt, piece: Piece) -> Assembling | None:
        assembly = piece.assembly
        if assembly is None:
            return None
        donated, first = list[Donated](), 0
        for donor, tokens in zip(assembly.donors, begin.donors, strict=True):
            count = len(donor.names) - donor.first
            donated.append(Donated(tokens, piece.scratch[first : first + count], donor.first * self._size))
            first += count
        packing = assembly.packing
        packed = () if packing is None else piece.scratch[: packing.num_packed]
        return Assembling(assembly.selection, tuple(donated), assembly.passages, packing, packed)

    def _scored(self, attempt: TokenSequence, position: int, found: Sequence[TokenLogprobs]) -> None:
        route = attempt.begin.route
        self._scores(Scores(route.request, route.attempt, position - 1, tuple(found)))

    def _stage(self, attempt: TokenSequence, piece: Piece) -> BlockStaging | None:
        """Starts saving the blocks that a chunk completes, while it is computed."""
        if not self.saves or piece.assembly is not None:
            return None
        full = slice(
            piece.start // self._size, min((piece.start + piece.count) // self._size, len(attempt.names))
        )
        return self._mover.stage(piece.request, attempt.names[full], piece.table[full])

    def _await_loads(self, layer: int, loading: Sequence[TokenSequence]) -> None:
        """Waits for a layer of all cached prefixes in the batch. Raises PrefixMissing if one, noted in `_awaited`,
        cannot be loaded."""
        started_ns = self._clock_ns()
        for attempt in loading:
            self._awaited = attempt.begin.key
            load = self._mover.load_of(self._awaited)
            if load is not None:
                load.wait(layer, attempt.num_loading)
        self.counters["kv_wait_seconds"] += (self._clock_ns() - started_ns) / 1e9

    def _layer_done(self, layer: int, leaving: Sequence[Piece], staged: Sequence[BlockStaging]) -> None:
        for staging in staged:
            self._mover.save_layer(staging, layer)
        for piece in leaving:
            self._announce(layer, piece)

    def _announce(self, layer: int, piece: Piece) -> None:
        """Announces one layer of the blocks that a chunk completed; of the last chunk, the partial block too."""
        end = piece.start + piece.count
        stop = end if piece.samples else end // self._size * self._size
        if stop:  # from 0 on: earlier blocks may not have been announced yet
            self._mover.kv_ready(piece.request, Span(layer, layer + 1), Span(0, stop), piece.table)

    def _note_states(self, run: Run) -> None:
        """Notes the iteration's snapshots; announces the last one of a prompt that is handed over."""
        for piece in run.chunks:
            attempt = self._attempts[piece.request]
            attempt.snapshots.update(piece.snapshots)
            if piece.samples and attempt.hands_over:
                count = -(-len(attempt.tokens) // self._size)
                blocks = piece.table[:count] + attempt.snapshots[len(attempt.tokens)]
                layers = Span(0, self.engine.memory.layout.num_layers)
                self._mover.kv_ready(
                    piece.request, layers, Span(count * self._size, len(blocks) * self._size), blocks
                )

    def _note_assembled(self, execution: Execution) -> None:
        """Notes where the KV of assembled prompts came from; announces that of packed ones that are handed over."""
        num_decodes = execution.run.num_decodes
        for at, piece in enumerate(execution.run.chunks, num_decodes):
            if piece.assembly is None:
                continue
            attempt = self._attempts[piece.request]
            attempt.reused = execution.batch.reused[at]
            packing = piece.assembly.packing
            if attempt.hands_over and packing is not None:
                dropped = packing.num_dropped
                kept = piece.scratch[: packing.num_packed] + piece.blocks[packing.num_blocks :]
                layers = Span(0, self.engine.memory.layout.num_layers)
                tokens = Span(dropped * self._size, len(attempt.tokens))
                self._mover.kv_ready(piece.request, layers, tokens, (0,) * dropped + kept)

    def _emit(self, sampled: Iterable[tuple[TokenSequence, int, TokenLogprobs | None]]) -> list[TokenSequence]:
        """Appends sampled tokens to their attempts and outputs them; returns the attempts that are over."""
        outputs, ended = [], []
        for attempt, token, logprobs in sampled:
            begin = attempt.begin
            route, first = begin.route, len(attempt.tokens) == len(begin.tokens)
            attempt.append(token)
            finish = attempt.finish_reason(token, self.engine.constraints)
            cached = attempt.cached if first else None
            index, reused = len(attempt.tokens) - 1 - begin.num_prompt, attempt.reused if first else None
            generated = Generated(index, token, finish, logprobs, cached, reused=reused)
            outputs.append((route.request, route.attempt, generated))
            if finish is not None:
                ended.append(attempt)
            elif attempt.hands_over:
                self._mover.first_token(begin.key, token)
        if outputs:
            self._outputs(outputs)
        return ended

    def _all_names(self, attempt: TokenSequence) -> Names:
        """Returns the names of all full blocks of prompt and answer. The last token has no KV yet."""
        if attempt.begin.route.assembly is not None:
            return ()  # assembled KV depends on more than its tokens
        known, tokens, salt = attempt.names, attempt.tokens, attempt.begin.salt
        full = (len(tokens) - 1) // self._size
        if full <= len(known):
            return known[:full]
        parent = known[-1] if known else None
        assert parent is None or isinstance(parent, bytes)
        return (
            *known,
            *self._namer(salt).names(tokens[: full * self._size], parent=parent, start=len(known) * self._size),
        )

    def _new_namer(self, salt: str) -> BlockNamer:
        return BlockNamer(revision=self.engine.revision, layout=self.engine.layout, salt=salt)


def _packs(piece: Piece) -> bool:
    """Whether the KV of a chunk's prompt is packed."""
    return piece.assembly is not None and piece.assembly.packing is not None
