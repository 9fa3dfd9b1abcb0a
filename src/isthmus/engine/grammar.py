"""Which tokens may come next in answers that must match a grammar.

A grammar is compiled once, and each row gets a copy of that matcher, which is told the row's tokens as they come. What
a row may go on with depends on its grammar and its outputs alone, so another node that is given both goes on alike. A
row that is seen first with outputs, after the death of a node, has them replayed.

A grammar that cannot be followed (it does not compile, or it takes too much) is an objection to its
own rows; nothing is raised, and other rows do not notice.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from isthmus.engine.interface import Row
from isthmus.errors import ModelError
from isthmus.files import end_tokens, open_files
from isthmus.files.grammar import GrammarError, check, compile_grammar, grammar_tokenizer

MAX_COMPILED = 128
"""So many grammars stay compiled."""
NUM_THREADS = len(os.sched_getaffinity(0)) // 2
"""That share the rows of a batch. To hand a few to one other thread takes longer than to do them here."""


@dataclass
class _Followed:
    """The matcher of a row, which has taken the first `num_taken` of its outputs; or why there is none any more."""

    matcher: LLMatcher | None
    objection: str
    num_taken: int = 0

    def take(self, outputs: Sequence[int]) -> None:
        if self.matcher is not None and len(outputs) > self.num_taken:
            self.matcher.consume_tokens(list(outputs[self.num_taken :]))
            self.num_taken = len(outputs)
            self.check()

    def check(self) -> None:
        try:
            if self.matcher is not None:
                check(self.matcher)
        except GrammarError as error:
            self.objection, self.matcher = f"the grammar cannot be followed: {error}", None


class Grammars:
    """Of one model. `prepare` and `objection` from any thread, `fill` from one at a time. Matchers go with their rows;
    of compiled grammars the least recently used go first."""

    def __init__(self, model: Path | None, vocab_size: int) -> None:
        """`model`: where tokenizer and end tokens are, if it has them; None, or without: every grammar is objected to.
        `vocab_size`: of the logits."""
        self._model, self._vocab_size = model, vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._reading, self._lock = Lock(), Lock()
        self._compiled: OrderedDict[str, Future[_Followed]] = OrderedDict()
        self._followed: WeakKeyDictionary[Row, _Followed] = WeakKeyDictionary()
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._executor: LLExecutor | None = None

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Raises ModelError."""
        return () if self._model is None else end_tokens(open_files(self._model))

    def read(self) -> None:
        """Reads the tokenizer, if there is one that serves; what is wrong with it is said of each grammar."""
        with suppress(GrammarError, ModelError):
            self._read_tokenizer()

    def prepare(self, grammar: str) -> None:
        """Begins to compile it, unless that was done."""
        with self._lock:
            self._begin(grammar)

    def fill(self, rows: Sequence[tuple[int, Row]], bits_RW: NDArray[np.int32]) -> None:
        """Row `at` of `bits_RW` becomes the tokens that each of these (at, row) may go on with, 32 in a word. Of rows
        that are objected to it means nothing."""
        found = [(at, self._follow(row)) for at, row in rows]
        pairs = [(each.matcher, at) for at, each in found if each.matcher is not None]
        address, width = bits_RW.ctypes.data, bits_RW.strides[0]
        if len(pairs) > 1 and NUM_THREADS > 1:
            self._executor = self._executor or LLExecutor(NUM_THREADS)
            self._executor.unsafe_compute_mask_ptr(pairs, address, width, len(bits_RW))
        else:
            for matcher, at in pairs:
                matcher.unsafe_compute_mask_ptr(address + at * width, width)
        for _, each in found:
            each.check()

    def objection(self, row: Row) -> str:
        """Why this row cannot go on; empty while it can."""
        followed = self._followed.get(row)
        return followed.objection if followed is not None else ""

    def _follow(self, row: Row) -> _Followed:
        """The row's matcher, with all outputs taken."""
        followed = self._followed.get(row)
        if followed is None:
            first = self._first(row.sampling.grammar)
            matcher = first.matcher and first.matcher.deep_copy()
            followed = self._followed[row] = _Followed(matcher, first.objection)
        followed.take(row.outputs)
        return followed

    def _first(self, grammar: str) -> _Followed:
        """Before any output. What waits behind other grammars to be compiled is not waited for, but compiled here."""
        with self._lock:
            future = self._begin(grammar)
            if waits := future.cancel():
                future = self._compiled[grammar] = Future()
                future.set_running_or_notify_cancel()
        if waits:
            future.set_result(self._compile(grammar))
        return future.result()

    def _begin(self, grammar: str) -> Future[_Followed]:
        """Under the lock."""
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
        else:
            self._compiled[grammar] = self._compiler.submit(self._compile, grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)[1].cancel()
        return self._compiled[grammar]

    def _compile(self, grammar: str) -> _Followed:
        try:
            return _Followed(compile_grammar(grammar, self._read_tokenizer()), "")
        except (GrammarError, ModelError, RuntimeError) as error:  # the last where no thread can be started
            return _Followed(None, f"the grammar cannot be followed: {error}")

    def _read_tokenizer(self) -> LLTokenizer:
        """Raises GrammarError or ModelError."""
        with self._reading:
            if self._tokenizer is None:
                if self._model is None:
                    raise GrammarError("this engine has no tokenizer")
                text = open_files(self._model).required("tokenizer.json")
                self._tokenizer = grammar_tokenizer(text, self.end_tokens, self._vocab_size)
            return self._tokenizer
