"""Restricts next tokens by `Sampling.grammar`, `allowed_tokens`, `bad_words` and `min_tokens`, in this order.

A constraint that would leave no token is skipped for this step: a complete grammar ends the answer, whatever
`min_tokens` says. Legend: M rows that are not free, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from isthmus.core.types import Sampling
from isthmus.live.engine.grammar import Grammars
from isthmus.live.engine.interface import Row
from isthmus.model_files.grammar_limits import GRAMMAR_LIMITS, GrammarLimits


@dataclass(frozen=True)
class Allowed:
    """Allowed next tokens, at least one, of the constrained rows with indices `rows`."""

    rows: Sequence[int]
    tokens_MV: NDArray[np.bool_]

    def __iter__(self) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        return zip(self.rows, self.tokens_MV, strict=True)


class Constraints:
    """Constraints of one engine. `model`: where tokenizer and end tokens are, if it has any."""

    def __init__(self, model: Path | None, vocab_size: int, limits: GrammarLimits = GRAMMAR_LIMITS) -> None:
        self._grammars, self._vocab_size = Grammars(model, vocab_size, limits), vocab_size
        self._listed: WeakKeyDictionary[Row, NDArray[np.bool_]] = WeakKeyDictionary()

    def prepare(self, sampling: Sampling) -> Future[None] | None:
        """Starts to compile the grammar, if any; done when it can be followed. From any thread."""
        return self._grammars.prepare(sampling.grammar) if sampling.grammar else None

    def gauges(self) -> dict[str, float]:
        """By metric name."""
        return self._grammars.gauges()

    def allowed(self, rows: Sequence[Row]) -> Allowed | None:
        """Allowed tokens of constrained rows; None: all rows are free. Called after the layers are launched: a GPU
        still computes them, a CPU needs its cores for them."""
        held = [at for at, row in enumerate(rows) if _holds(row)]
        return self._allowed(held, [rows[at] for at in held]) if held else None

    def objection(self, row: Row) -> str:
        """Why no token can be chosen for this row; empty where one can. Known once its `Allowed` is."""
        return self._grammars.objection(row) if row.sampling.grammar else ""

    def ends(self, sampling: Sampling, token: int) -> bool:
        """Whether a token ends the answer: a stop token does, and the end of a grammar."""
        if token in sampling.stop_tokens:
            return True
        return bool(sampling.grammar) and token in self._grammars.end_tokens

    def _allowed(self, held: Sequence[int], rows: Sequence[Row]) -> Allowed:
        bits_MW = np.full((len(rows), -(-self._vocab_size // 32)), -1, np.int32)
        self._grammars.fill([(at, row) for at, row in enumerate(rows) if row.sampling.grammar], bits_MW)
        tokens_MV = np.unpackbits(
            bits_MW.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little"
        ).view(np.bool_)
        for row, tokens_V in zip(rows, tokens_MV, strict=True):
            if not self.objection(row):
                self._restrict(tokens_V, row)
        return Allowed(held, tokens_MV)

    def _restrict(self, tokens_V: NDArray[np.bool_], row: Row) -> None:
        """Applies all constraints but the grammar, in place."""
        sampling = row.sampling
        if sampling.allowed_tokens:
            kept_V = tokens_V & self._listed_of(row)
            if kept_V.any():
                tokens_V[:] = kept_V
        if sampling.bad_words:
            self._exclude(tokens_V, _endings(sampling.bad_words, row.outputs))
        if len(row.outputs) < sampling.min_tokens:
            ends = self._grammars.end_tokens if sampling.grammar else ()
            self._exclude(tokens_V, [*sampling.stop_tokens, *ends])

    def _exclude(self, tokens_V: NDArray[np.bool_], tokens: Sequence[int]) -> None:
        excluded = [token for token in tokens if token < self._vocab_size]
        before = tokens_V[excluded]
        tokens_V[excluded] = False
        if not tokens_V.any():
            tokens_V[excluded] = before

    def _listed_of(self, row: Row) -> NDArray[np.bool_]:
        """Mask of `allowed_tokens`, kept because it may name nearly all tokens."""
        listed_V = self._listed.get(row)
        if listed_V is None:
            listed_V = self._listed[row] = np.zeros(self._vocab_size, np.bool_)
            listed_V[[token for token in row.sampling.allowed_tokens if token < self._vocab_size]] = True
        return listed_V


def _holds(row: Row) -> bool:
    """Whether the row is not free to go on with any token."""
    sampling = row.sampling
    return bool(
        sampling.grammar
        or sampling.allowed_tokens
        or sampling.bad_words
        or (sampling.min_tokens > len(row.outputs) and sampling.stop_tokens)
    )


def _endings(bad_words: Sequence[tuple[int, ...]], outputs: Sequence[int]) -> list[int]:
    """Last tokens of the bad words whose other tokens end the answer."""
    return [
        word[-1] for word in bad_words if word and tuple(outputs[len(outputs) - len(word) + 1 :]) == word[:-1]
    ]
