"""Limits of grammars and the error of one that is refused; loads no grammar library."""

from __future__ import annotations

import msgspec


class GrammarLimits(msgspec.Struct, frozen=True):
    """Limits of one grammar: bytes of text, CPU seconds of compilation, bytes of memory. `kept_bytes`: of all
    compiled grammars without rows."""

    max_bytes: int = 1 << 17
    cpu_s: float = 2.0
    memory_bytes: int = 256 << 20
    kept_bytes: int = 32 << 20


GRAMMAR_LIMITS = GrammarLimits()


class GrammarError(Exception):
    """Why a grammar cannot be followed, in one line."""
