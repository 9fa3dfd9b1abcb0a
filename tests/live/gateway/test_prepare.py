"""From fields of a request to the jobs a cluster gets: lengths, sampling, limits of lists."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.core.errors import RequestError
from isthmus.core.types import Sampling
from isthmus.live.gateway import GatewaySettings, GatewayTokenizer, create_app
from isthmus.live.gateway.requests import (
    CompletionRequest,
    answer_tokens,
    check_prompt,
    choice_seed,
    sampling_of,
    samplings,
)
from isthmus.live.gateway.tokenizer import GenerationDefaults

from .fake import (
    CARD,  # 256 tokens
    FakeBackend,
)
from .inprocess import Poster

MESSAGES = [{"role": "user", "content": "hi"}]


def refused(response: Any, param: str, words: str) -> None:
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


def test_lists_have_a_limit_of_their_own(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    post = Poster(create_app(backend, tokenizer, GatewaySettings(max_messages=2, max_tools=1, max_depth=6)))
    assert post.chat(messages=MESSAGES * 2).status_code == 200
    refused(
        post.chat(messages=MESSAGES * 3), "messages", "3 entries; this server takes up to 2 (limits.messages)"
    )
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    refused(post.chat(tools=tools), "tools", "2 entries; this server takes up to 1 (limits.tools)")
    assert post.chat(metadata={"a": [[["]]]]"]]]}).status_code == 200
    assert (
        "deeper than 6 (limits.json_depth)" in post.chat(metadata={"a": [[[[[0]]]]]}).json()["error"]["message"]
    )
    assert len(backend.jobs) == 2


def test_a_text_that_must_be_too_long_is_not_tokenised(
    post: Poster, tokenizer: GatewayTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenised")

    text = "x" * 15_000
    refused(post.complete(prompt=text, truncate_prompt_tokens=10, max_tokens=0), "max_tokens", "echo")
    monkeypatch.setattr(tokenizer, "encode_text", fail)
    refused(post.complete(prompt=text), "prompt", "has 15000 characters, which are at least")
    refused(
        post.chat(messages=[{"role": "user", "content": text}]), "messages", "characters, which are at least"
    )


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


DEFAULTS = GenerationDefaults(eos=(258, 7), temperature=0.6, top_p=0.9, top_k=20)


def sampling(**fields: Any) -> Sampling:
    request = CompletionRequest(model="m", prompt="x", **fields)
    return sampling_of(request, DEFAULTS, CARD, logprobs=request.logprobs)


def test_defaults_are_the_model_s() -> None:
    assert sampling() == Sampling(temperature=0.6, top_p=0.9, top_k=20, stop_tokens=(258, 7))


def test_a_seed_repeats() -> None:
    first, again = (samplings(sampling(), 5, 3) for _ in range(2))
    assert first == again
    assert len({each.seed for each in first}) == 3
    assert first[0] == samplings(sampling(), 5, 1)[0]


def test_without_seed_each_prompt_draws_its_own() -> None:
    seeds = {each.seed for _ in range(4) for each in samplings(sampling(), None, 2)}
    assert len(seeds) == 8


@pytest.mark.parametrize("seed", [0, 5, -5, 2**63 - 1, -(2**63)])
def test_seeds_have_63_bits(seed: int) -> None:
    assert all(0 <= choice_seed(seed, choice) < 2**63 for choice in range(16))
