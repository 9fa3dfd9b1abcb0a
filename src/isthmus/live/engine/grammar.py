"""Masks of the tokens that may come next in answers that must match a grammar.

Each grammar has a process of its own, which may die (`following.py`): it compiles the grammar once, copies the
matcher for each row, and is told the rows' tokens. A mask depends on grammar and outputs alone, so another node
continues alike, and a new process replays the rows' outputs.

A grammar that cannot be followed (it does not compile, takes too much, or the library fails) is an objection to its
own rows; nothing is raised, and other rows go on.
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.core.errors import StartError
from isthmus.live.engine.interface import Row
from isthmus.model_files import end_tokens, open_files
from isthmus.model_files.grammar_limits import GRAMMAR_LIMITS, GrammarLimits
from isthmus.sandbox import ForkServer, Limits, Sandbox, SandboxError, ask_all

MAX_IDLE = 8
"""Most compiled grammars that are kept without a row."""
IDLE_S = 5.0
"""Seconds without a question after which a grammar's process ends."""
NUM_COMPILERS = max(1, len(os.sched_getaffinity(0)) // 2)
"""Grammars that are compiled at once: not on all cores."""


class GrammarSetup(msgspec.Struct, frozen=True):
    """`model`: where tokenizer and end tokens are, None: nowhere; `vocab_size`: of the logits."""

    model: str | None
    vocab_size: int
    limits: GrammarLimits


class Step(msgspec.Struct, frozen=True, array_like=True):
    """Question to a grammar's process. `grammar`: its text in the first question, else "". `gone`: rows that ended.
    `rows`: number and new tokens of each row. The answer is a `GrammarStep` followed by the mask of each row."""

    grammar: str
    gone: tuple[int, ...] = ()
    rows: tuple[tuple[int, tuple[int, ...]], ...] = ()


class GrammarStep(msgspec.Struct, frozen=True, array_like=True):
    """Objections to the grammar and to each row, empty where there is none. `num_bytes`: memory of the process."""

    num_bytes: int
    objection: str
    objections: tuple[str, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_stepped = msgspec.msgpack.Decoder(GrammarStep).decode


@lru_cache(8)
def _server(setup: bytes) -> ForkServer:
    """One fork server for all engines of this process with the same model."""
    return ForkServer("isthmus.live.engine.following", setup)


class _Told:
    """Number of a row in its grammar's process, tokens told so far, and the objection to it."""

    def __init__(self, number: int) -> None:
        self.number, self.num_tokens, self.objection = number, 0, ""


class _Grammar:
    """One grammar and its process. `question` and `hear` from one thread at a time."""

    def __init__(self, text: str, server: ForkServer, limits: GrammarLimits) -> None:
        self.text = text
        of_process = Limits(limits.memory_bytes, 2 * limits.cpu_s, idle_s=IDLE_S)
        self.sandbox = Sandbox(server, of_process)
        self.compiled: Future[None] = Future()
        self.rows: WeakKeyDictionary[Row, _Told] = WeakKeyDictionary()
        self.num_bytes = 0
        self.objection = ""
        self.may_be_tried_again = False  # it is not the grammar that is objected to
        self._generation = 0
        self._numbers = itertools.count()
        self._known = set[int]()

    def meet(self, rows: Sequence[Row]) -> None:
        """Follows these rows from now on."""
        for row in rows:
            if row not in self.rows:
                self.rows[row] = _Told(next(self._numbers))

    def question(self, rows: Sequence[Row]) -> bytes:
        """News of these rows for the process, all of them if it is a new one, and the rows that ended."""
        is_new = self._generation != self.sandbox.generation
        if is_new:
            self._generation = self.sandbox.generation
            self._known.clear()
            for told in self.rows.values():
                told.num_tokens = 0
        gone = self._known - {told.number for told in self.rows.values()}
        self._known -= gone
        news = []
        for row in rows:
            told = self.rows[row]
            self._known.add(told.number)
            news.append((told.number, tuple(row.outputs[told.num_tokens :])))
        return _encode(Step(self.text if is_new else "", tuple(gone), tuple(news)))

    def hear(self, rows: Sequence[Row], answer: bytearray | SandboxError | StartError) -> None:
        if isinstance(answer, StartError):
            self.object(str(answer))
            self.may_be_tried_again = True
            return
        if isinstance(answer, SandboxError):
            self.object("it takes too long or too much memory, or the library of grammars fails on it")
            return
        said = _stepped(answer)
        self.num_bytes = said.num_bytes
        if said.objection:
            self.object(said.objection)
        for row, objection in zip(rows, said.objections, strict=False):
            told = self.rows[row]
            told.num_tokens = len(row.outputs)
            told.objection = told.objection or objection

    def object(self, reason: str) -> None:
        self.objection = reason
        self.sandbox.close()


class Grammars:
    """Grammars of one model. `prepare` and `objection` from any thread, `fill` from one at a time. State of a row
    goes with the row; grammars without rows go least recently used first."""

    def __init__(self, model: Path | None, vocab_size: int, limits: GrammarLimits = GRAMMAR_LIMITS) -> None:
        """`model`: where tokenizer and end tokens are, if it has them; None, or without: every grammar is objected to.
        `vocab_size`: of the logits."""
        self._model, self._limits, self._width = model, limits, -(-vocab_size // 32)
        path = None if model is None else str(model.absolute())
        self._server = _server(_encode(GrammarSetup(path, vocab_size, limits)))
        self._grammars: OrderedDict[str, _Grammar] = OrderedDict()
        self._lock = Lock()
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, "grammar-compiler")
        self._num_deaths = 0

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Raises ModelError."""
        return () if self._model is None else end_tokens(open_files(self._model))

    def prepare(self, text: str) -> Future[None]:
        """Compiles a grammar unless that was begun; done when it can be followed, or is objected to."""
        return self._begun(text).compiled

    def fill(self, rows: Sequence[tuple[int, Row]], bits_RW: NDArray[np.int32]) -> None:
        """Writes the mask of each (at, row) to row `at` of `bits_RW`, 32 tokens in a word. Undefined for rows with an
        objection."""
        groups: dict[str, list[tuple[int, Row]]] = {}
        for at, row in rows:
            groups.setdefault(row.sampling.grammar, []).append((at, row))
        begun = [(self._begun(text), group) for text, group in groups.items()]
        for grammar, group in begun:
            grammar.meet([row for _, row in group])
            grammar.compiled.result()
        asked = [(grammar, group) for grammar, group in begun if not grammar.objection]
        masks = [np.empty((len(group), self._width), np.int32) for _, group in asked]
        questions = [
            (grammar.sandbox, partial(grammar.question, [row for _, row in group]), mask.data.cast("B"))
            for (grammar, group), mask in zip(asked, masks, strict=True)
        ]
        for (grammar, group), mask, answer in zip(asked, masks, ask_all(questions), strict=True):
            grammar.hear([row for _, row in group], answer)
            bits_RW[[at for at, _ in group]] = mask

    def objection(self, row: Row) -> str:
        """Reason why this row cannot go on; empty while it can."""
        grammar = self._grammars.get(row.sampling.grammar)
        if grammar is None:
            return ""
        told = grammar.rows.get(row)
        objection = grammar.objection or (told.objection if told is not None else "")
        return objection and f"the grammar cannot be followed: {objection}"

    def gauges(self) -> dict[str, float]:
        """By metric name: grammars that are compiled, the memory that they take, and processes that died over one."""
        with self._lock:
            grammars = list(self._grammars.values())
            return {
                "grammars": len(grammars),
                "grammar_bytes": sum(grammar.num_bytes for grammar in grammars),
                "grammar_deaths_total": self._num_deaths + sum(grammar.sandbox.deaths for grammar in grammars),
            }

    def _begun(self, text: str) -> _Grammar:
        with self._lock:
            grammar = self._grammars.get(text)
            if grammar is not None and (grammar.rows or not grammar.may_be_tried_again):
                self._grammars.move_to_end(text)
                return grammar
            self._make_room()
            grammar = self._grammars[text] = _Grammar(text, self._server, self._limits)
        self._compilers.submit(self._compile, grammar)
        return grammar

    def _compile(self, grammar: _Grammar) -> None:
        """In a thread."""
        try:
            [answer] = ask_all([(grammar.sandbox, partial(grammar.question, ()), memoryview(b""))])
            grammar.hear((), answer)
        finally:
            grammar.compiled.set_result(None)

    def _make_room(self) -> None:
        """Under the lock."""
        idle = [each for each in self._grammars.values() if not each.rows and each.compiled.done()]
        num_bytes = sum(each.num_bytes for each in idle)
        while len(idle) >= MAX_IDLE or num_bytes > self._limits.kept_bytes:
            gone = idle.pop(0)
            num_bytes -= gone.num_bytes
            self._num_deaths += gone.sandbox.deaths
            gone.sandbox.close()
            del self._grammars[gone.text]
