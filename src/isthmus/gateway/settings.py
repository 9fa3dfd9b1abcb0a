"""Limits of the gateway. Built once at start, never written again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatewaySettings:
    """`long_prompt_chars`: texts longer than this are tokenised in a thread, so that the loop stays free.

    `max_sequences`: prompts times `n` that one HTTP request may ask for. `ttft_ms`, `tbt_ms`: the limits of
    requests that bring none, for counting those that were kept.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    long_prompt_chars: int = 20_000
    max_sequences: int = 256
    ttft_ms: int | None = None
    tbt_ms: int | None = None
