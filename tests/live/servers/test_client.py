"""What is asked of a vLLM server, and what of it is not."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.core.types import Sampling
from isthmus.live.servers.client import MAX_ALLOWED, MAX_BIASES, MAX_STOPS, objection


@pytest.mark.parametrize(
    ("most", "more", "said"),
    [
        (
            {"allowed_tokens": tuple(range(MAX_ALLOWED))},
            {"allowed_tokens": tuple(range(MAX_ALLOWED + 1))},
            "vLLM nodes take 1024 allowed_token_ids at most",
        ),
        (
            {"logit_bias": tuple([(token, 1.0) for token in range(MAX_BIASES)])},
            {"logit_bias": tuple([(token, 1.0) for token in range(MAX_BIASES + 1)])},
            "vLLM nodes take a logit_bias of 1024 tokens at most",
        ),
        (
            {"stop_tokens": tuple(range(MAX_STOPS)), "min_tokens": 1},
            {"stop_tokens": tuple(range(MAX_STOPS + 1)), "min_tokens": 1},
            "vLLM nodes take 128 stop tokens at most beside min_tokens",
        ),
    ],
)
def test_what_would_end_a_server_is_refused(most: dict[str, Any], more: dict[str, Any], said: str) -> None:
    """vLLM's API takes it, and its engine dies of it."""
    assert objection(Sampling(**most), continues=False) == ""
    assert objection(Sampling(**more), continues=False) == said
