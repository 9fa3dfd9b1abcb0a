"""What a grammar may take, and how it is objected to; `grammar`, which meets one, loads the library."""

from __future__ import annotations

import msgspec


class GrammarLimits(msgspec.Struct, frozen=True):
    """Of one grammar: its text, in bytes; the CPU seconds that it may be compiled for; the memory that it may take, in
    bytes. `kept_bytes`: of compiled grammars that nobody follows."""

    max_bytes: int = 1 << 17
    cpu_s: float = 2.0
    memory_bytes: int = 256 << 20
    kept_bytes: int = 32 << 20


GRAMMAR_LIMITS = GrammarLimits()


class GrammarError(Exception):
    """Why a grammar cannot be followed, in one line."""
