"""Grammars tried token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from isthmus.model_files.grammar import LIMITS


def matcher_of(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def follows(tokenizer: LLTokenizer, grammar: str, text: str | Sequence[int]) -> bool:
    """Whether `text` (or these tokens) is a whole answer that the grammar allows."""
    matcher = matcher_of(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text) if isinstance(text, str) else list(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def written(matcher: LLMatcher, end: int, choose: Callable[[list[int]], int]) -> Iterator[int]:
    """Yields an answer's tokens, each chosen from those that the grammar allows, until `end` is."""
    token = None
    while token != end:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = [int(each) for each in np.flatnonzero(mask)]
        assert allowed and not matcher.is_error(), matcher.get_error()
        token = choose(allowed)
        assert matcher.consume_token(token), matcher.get_error()
        yield token
