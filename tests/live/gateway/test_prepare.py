"""From fields of a request to the jobs a cluster gets: lengths, sampling, limits of lists."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.core.types import Sampling
from isthmus.live.gateway import GatewayTokenizer
from isthmus.live.gateway.requests import CompletionRequest, sampling_of, samplings
from isthmus.live.gateway.tokenizer import GenerationDefaults

from .fake import (
    CARD,
    FakeBackend,
)
from .inprocess import Poster, Served

MESSAGES = [{"role": "user", "content": "hi"}]


def refused(response: Any, param: str | None, words: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]


def test_lists_have_a_limit_of_their_own(backend: FakeBackend, served: Served) -> None:
    post = served(max_messages=2, max_tools=1, max_depth=6)
    assert post.chat(messages=MESSAGES * 2).status_code == 200
    many = "3 entries; this server takes up to 2 (limits.messages)"
    refused(post.chat(messages=MESSAGES * 3), "messages", many)
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    refused(post.chat(tools=tools), "tools", "2 entries; this server takes up to 1 (limits.tools)")
    assert post.chat(metadata={"a": [[["]]]]"]]]}).status_code == 200
    refused(post.chat(metadata={"a": [[[[[0]]]]]}), None, "deeper than 6 (limits.json_depth)")
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


def test_seeds_and_the_model_s_defaults() -> None:
    defaults = GenerationDefaults(eos=(258, 7), temperature=0.6, top_p=0.9, top_k=20)
    request = CompletionRequest(model="m", prompt="x")
    sampling = sampling_of(request, defaults, CARD, logprobs=None)
    assert sampling == Sampling(temperature=0.6, top_p=0.9, top_k=20, stop_tokens=(258, 7))
    for seed in (0, 5, -5, 2**63 - 1, -(2**63)):
        seeds = [each.seed for each in samplings(sampling, seed, 16)]
        assert seeds == [each.seed for each in samplings(sampling, seed, 16)] and len({*seeds}) == 16
        assert all(each is not None and 0 <= each < 2**63 for each in seeds)
    drawn = {each.seed for _ in range(4) for each in samplings(sampling, None, 2)}
    assert len(drawn) == 8, "each prompt draws its own"
