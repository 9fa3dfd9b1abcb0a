"""Process that follows one grammar and may die; see `grammar.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from isthmus.core.errors import ModelError
from isthmus.live.engine.grammar import GrammarSetup, GrammarStep, Step
from isthmus.model_files import end_tokens, open_files
from isthmus.model_files.grammar import check, compile_grammar, grammar_tokenizer
from isthmus.model_files.grammar_limits import GrammarError
from isthmus.sandbox import Answer, cpu_limit, grown_bytes, serve

NUM_THREADS = len(os.sched_getaffinity(0)) // 2
"""Threads that share a batch's rows; handing a few to a single other thread takes longer than computing them."""
MASK_S = 0.05
"""Most CPU seconds of a row in one step."""
SLOW_S, SLOW_TOKEN_S = 0.1, 0.005
"""Most CPU seconds of a row in all, plus for each of its tokens. Schemas take 0.15 ms a token, at worst 1 ms;
ambiguous grammars take ever longer."""
IDLE_S = 20.0
"""Seconds without a grammar after which the fork server ends."""


class _MatcherRow:
    """A matcher that has taken a row's tokens; or why there is none any more."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher: LLMatcher | None = matcher
        self.objection = ""
        self.seconds = 0.0
        self.num_tokens = 0

    def take(self, tokens: Sequence[int]) -> None:
        before = time.process_time()
        self.num_tokens += len(tokens)
        if self.matcher is not None and tokens:
            self.matcher.consume_tokens(list(tokens))
        self.check(time.process_time() - before)

    def check(self, seconds: float) -> None:
        """`seconds`: more that it took."""
        self.seconds += seconds
        try:
            if self.matcher is not None:
                check(self.matcher)
                if self.seconds > SLOW_S + SLOW_TOKEN_S * self.num_tokens:
                    raise GrammarError(f"it takes more than {1000 * SLOW_TOKEN_S:g} ms for each token")
        except GrammarError as error:
            self.objection, self.matcher = str(error), None


class _Follower:
    def __init__(self, tokenizer: LLTokenizer, setup: GrammarSetup) -> None:
        self._tokenizer, self._limits = tokenizer, setup.limits
        self._width = -(-setup.vocab_size // 32)
        self._first: LLMatcher | None = None
        self._rows: dict[int, _MatcherRow] = {}
        self._executor: LLExecutor | None = None

    def answer(self, question: bytes) -> Sequence[bytes | memoryview]:
        step = _step(question)
        for number in step.gone:
            self._rows.pop(number, None)
        bits_RW = np.full((len(step.rows), self._width), -1, np.int32)
        try:
            if step.grammar:
                self._first = compile_grammar(step.grammar, self._tokenizer, self._limits)
        except GrammarError as error:
            return [_encode(GrammarStep(grown_bytes(), str(error))), bits_RW.tobytes()]
        assert self._first is not None, "the first question brings the grammar"
        num_tokens = sum(len(tokens) for _, tokens in step.rows)
        with cpu_limit(MASK_S * (1 + len(step.rows)) + SLOW_TOKEN_S * num_tokens):
            rows = []
            for number, tokens in step.rows:
                if number not in self._rows:
                    self._rows[number] = _MatcherRow(self._first.deep_copy())
                rows.append(self._rows[number])
                rows[-1].take(tokens)
            self._mask(rows, bits_RW)
        return [
            _encode(GrammarStep(grown_bytes(), "", tuple([row.objection for row in rows]))),
            bits_RW.tobytes(),
        ]

    def _mask(self, rows: Sequence[_MatcherRow], bits_RW: NDArray[np.int32]) -> None:
        """Bits of rows with an objection mean nothing."""
        address, stride = bits_RW.ctypes.data, self._width * bits_RW.itemsize
        pairs = [(row.matcher, at) for at, row in enumerate(rows) if row.matcher is not None]
        if len(pairs) > 1 and NUM_THREADS > 1:
            before = time.process_time()
            self._executor = self._executor or LLExecutor(NUM_THREADS)
            self._executor.unsafe_compute_mask_ptr(pairs, address, stride, len(bits_RW))
            seconds = (time.process_time() - before) / len(pairs)
            for _, at in pairs:
                rows[at].check(seconds)
            return
        for matcher, at in pairs:
            before = time.process_time()
            matcher.unsafe_compute_mask_ptr(address + at * stride, stride)
            rows[at].check(time.process_time() - before)


_encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
_step = msgspec.msgpack.Decoder(Step).decode


def _load(setup: bytes) -> Answer:
    """Raises ModelError with why no grammar can be followed."""
    said = msgspec.msgpack.decode(setup, type=GrammarSetup)
    if said.model is None:
        raise ModelError("this engine has no tokenizer")
    files = open_files(Path(said.model))
    try:
        tokenizer = grammar_tokenizer(files.required("tokenizer.json"), end_tokens(files), said.vocab_size)
    except GrammarError as error:
        raise ModelError(str(error)) from None
    followers: list[_Follower] = []

    def answer(question: bytes) -> Sequence[bytes | memoryview]:
        if not followers:  # in the worker
            followers.append(_Follower(tokenizer, said))
        return followers[0].answer(question)

    return answer


def main() -> None:
    """Of the fork server."""
    serve(_load, IDLE_S)
