from __future__ import annotations

import math

import pytest

from isthmus.live.gateway.wire import finite, token_text


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e6])
def test_what_json_or_clients_cannot_take_is_the_lowest(logprob: float) -> None:
    assert finite(logprob) == -9999.0


def test_other_logprobs_stay() -> None:
    assert finite(-0.25) == -0.25


def test_token_text() -> None:
    assert token_text("é".encode()) == "é"
    assert token_text(b"\xe2\x82", prefix="bytes:") == "bytes:\\xe2\\x82"
