from __future__ import annotations

import pytest

from isthmus.core.errors import RequestError
from isthmus.live.gateway.sampling import answer_tokens, check_prompt

from .fake import CARD  # 256 tokens


def test_a_prompt_leaves_room_for_one_token() -> None:
    check_prompt(255, CARD, "prompt")
    with pytest.raises(RequestError, match="maximum context length is 256 tokens") as caught:
        check_prompt(256, CARD, "prompt")
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_a_prompt_that_is_only_scored_may_be_all_of_the_context() -> None:
    check_prompt(256, CARD, "prompt", 0)
    with pytest.raises(RequestError, match="'prompt' has 257 tokens"):
        check_prompt(257, CARD, "prompt", 0)


def test_empty_prompts() -> None:
    with pytest.raises(RequestError, match="'prompt' is empty"):
        check_prompt(0, CARD, "prompt")


def test_what_is_asked_must_fit() -> None:
    assert answer_tokens(200, 56, CARD, param="max_tokens", default=None) == 56
    with pytest.raises(RequestError, match="has 200 and 'max_tokens' asks for 57 more") as caught:
        answer_tokens(200, 57, CARD, param="max_tokens", default=None)
    assert caught.value.param == "max_tokens"


def test_defaults() -> None:
    assert answer_tokens(200, None, CARD, param="max_tokens", default=None) == 56
    assert answer_tokens(200, None, CARD, param="max_tokens", default=16) == 16
    assert answer_tokens(250, None, CARD, param="max_tokens", default=16) == 6
